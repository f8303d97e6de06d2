"""Emulators by the name of their protocol. A name is `FAMILY` or `FAMILY-DIALECT`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the help of the command line reads the names
    from ocs_drivers.base import DeviceClock
    from ocs_drivers.emulators.base import DevicePanel, Emulator

# Each a class or function `(panel, clock=None, **quirks) -> Emulator`. Its libraries are loaded with it.
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

# What the driver of the family has to be told, besides the address, to speak with the emulator as it is made here.
DRIVER_OPTIONS: dict[str, dict[str, Any]] = {
    "gnmi": {"tls": False},
    "gnmi-openconfig": {"tls": False, "model": "openconfig"},
    "netconf": {"password": "root", "verify_host_key": False},
    "scpi-dicon": {"profile": "dicon"},
    "tl1-calient": {"dialect": "calient"},
    "tl1-glimmerglass": {"dialect": "glimmerglass"},
}


def make_emulator(protocol: str, panel: "DevicePanel", clock: "DeviceClock | None" = None, **quirks: Any) -> "Emulator":
    """Raises InvalidOptions with every fault: a protocol that is not known (listing the known ones) or whose library is
    not installed, quirks that it does not have (listing those that it has), values that it refuses."""
    from importlib.metadata import EntryPoint

    from ocs_drivers.errors import InvalidOptions
    from ocs_drivers.registry import load_named

    factory = load_named("protocol", protocol, {name: EntryPoint(name, EMULATORS[name], "") for name in EMULATORS})
    try:
        emulator: Emulator = factory(panel, clock=clock, **quirks)
    except ValueError as error:
        raise InvalidOptions([str(error)]) from error
    return emulator
