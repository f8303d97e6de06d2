"""Emulators by the name of their protocol. A name is `FAMILY` or `FAMILY-DIALECT`."""

from importlib import import_module
from typing import Any

from ocs_drivers.base import Clock
from ocs_drivers.emulators.base import Emulator, Panel
from ocs_drivers.errors import InvalidOptions

# Each a class or function `(panel, clock=None, **quirks) -> Emulator`; its libraries are loaded with it.
EMULATORS = {
    "calient_rest": "ocs_drivers.emulators.calient_rest:CalientRestEmulator",
    "gnmi": "ocs_drivers.emulators.gnmi:sonic",
    "gnmi-openconfig": "ocs_drivers.emulators.gnmi:openconfig",
    "netconf": "ocs_drivers.emulators.netconf:NetconfEmulator",
    "restconf": "ocs_drivers.emulators.restconf:RestconfEmulator",
    "scpi": "ocs_drivers.emulators.scpi:polatis",
    "scpi-dicon": "ocs_drivers.emulators.scpi:dicon",
    "tl1-calient": "ocs_drivers.emulators.tl1:calient",
    "tl1-glimmerglass": "ocs_drivers.emulators.tl1:glimmerglass",
    "tl1-polatis": "ocs_drivers.emulators.tl1:polatis",
}


def make_emulator(protocol: str, panel: Panel, clock: Clock | None = None, **quirks: Any) -> Emulator:
    """Raises InvalidOptions for a protocol that is not known, listing the known ones."""
    if protocol not in EMULATORS:
        raise InvalidOptions([f"protocol: must be one of {', '.join(sorted(EMULATORS))}, got {protocol!r}"])
    module, _, name = EMULATORS[protocol].partition(":")
    emulator: Emulator = getattr(import_module(module), name)(panel, clock=clock, **quirks)
    return emulator
