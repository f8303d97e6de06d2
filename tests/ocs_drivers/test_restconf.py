"""The driver `restconf` and its emulator: the suite, requests counted, curl beside us, nonsense answered."""

from typing import Any, ClassVar

from emulated import EmulatedConformance

from ocs_drivers.emulators.base import Panel
from ocs_drivers.model import BootBehaviour


class TestRestconf(EmulatedConformance):
    driver = "restconf"
    protocol = "restconf"
    options: ClassVar[dict[str, Any]] = {"reconfiguration_s": 0.002}


class TestRestconfQuirks(EmulatedConformance):
    """An old model over 320 ports, jitter, chunks, power, and a password; restarts restore."""

    driver = "restconf"
    protocol = "restconf"
    panel = Panel(160, 160, reconfiguration_s=0.002, jitter_s=0.003, boot=BootBehaviour.RESTORE)
    options: ClassVar[dict[str, Any]] = {
        "reconfiguration_s": 0.002,
        "user": "admin",
        "password": "rööt",
        "power": True,
    }
    quirks: ClassVar[dict[str, Any]] = {
        "revision": "2017-06-13",
        "chunked": True,
        "power": True,
        "user": "admin",
        "password": "rööt",
    }


class TestRestconfPost(EmulatedConformance):
    """Any-to-any, one POST for each circuit, pairs listed late, a revision that is not told."""

    driver = "restconf"
    protocol = "restconf"
    options: ClassVar[dict[str, Any]] = {"reconfiguration_s": 0.002, "add_with": "post", "power": True}
    quirks: ClassVar[dict[str, Any]] = {"any_to_any": True, "lists_late": True, "yang_library": False, "power": True}
