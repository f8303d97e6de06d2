"""Run the conformance suite on the driver `gnmi`, with the tables of SONiC-OCS and with OpenConfig's proposal."""

from typing import Any, ClassVar

import pytest

from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.model import BootBehaviour
from tests.ocs_drivers.emulated import EmulatedConformance


class TestSonic(EmulatedConformance):
    driver = "gnmi"
    protocol = "gnmi"
    options: ClassVar[dict[str, Any]] = {"tls": False}


@pytest.mark.slow
class TestSonicImage(EmulatedConformance):
    """The table names of the image `ocs-kvm`, and sides of different size."""

    driver = "gnmi"
    protocol = "gnmi"
    options: ClassVar[dict[str, Any]] = {"tls": False, "user": "admin", "password": "YourPaSsWoRd"}
    panel: ClassVar[DevicePanel] = DevicePanel(24, 32, reconfiguration_s=0.002, boot=BootBehaviour.RESTORE)
    quirks: ClassVar[dict[str, Any]] = {
        "tables": "image",
        "origin": "sonic_db",
        "user": "admin",
        "password": "YourPaSsWoRd",
    }


class TestOpenConfig(EmulatedConformance):
    driver = "gnmi"
    protocol = "gnmi-openconfig"
    options: ClassVar[dict[str, Any]] = {"tls": False, "model": "openconfig"}


@pytest.mark.slow
class TestOpenConfigAnyToAny(EmulatedConformance):
    """One range of ports from 10; connections are listed under both of their ports."""

    driver = "gnmi"
    protocol = "gnmi-openconfig"
    options: ClassVar[dict[str, Any]] = {"tls": False, "model": "openconfig"}
    panel: ClassVar[DevicePanel] = DevicePanel(64, 64, reconfiguration_s=0.002)
    quirks: ClassVar[dict[str, Any]] = {"any_to_any": True, "mirrored": True, "first_index": 10}
