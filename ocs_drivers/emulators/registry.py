"""Look up emulators by protocol name, `FAMILY` or `FAMILY-DIALECT`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line's help imports this module for the names only
    from ocs_drivers.base import DeviceClock
    from ocs_drivers.emulators.base import DevicePanel, Emulator

# Each entry is a class or function `(panel, clock=None, **quirks) -> Emulator`. Its libraries are imported with it.
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

# Options that the family's driver needs, besides the address, to connect to the emulator with its defaults.
DRIVER_OPTIONS: dict[str, dict[str, Any]] = {
    "gnmi": {"tls": False},
    "gnmi-openconfig": {"tls": False, "model": "openconfig"},
    "netconf": {"password": "root", "verify_host_key": False},
    "scpi-dicon": {"profile": "dicon"},
    "tl1-calient": {"dialect": "calient"},
    "tl1-glimmerglass": {"dialect": "glimmerglass"},
}


def make_emulator(protocol: str, panel: "DevicePanel", clock: "DeviceClock | None" = None, **quirks: Any) -> "Emulator":
    """Return an emulator of this protocol. Raises InvalidOptions with every fault if the protocol is unknown, its
    library is not installed, or a quirk is unknown or has an invalid value. For an unknown name, the error lists the
    known names."""
    from importlib.metadata import EntryPoint

    from ocs_drivers.errors import InvalidOptions
    from ocs_drivers.registry import load_named

    factory = load_named("protocol", protocol, {name: EntryPoint(name, EMULATORS[name], "") for name in EMULATORS})
    try:
        emulator: Emulator = factory(panel, clock=clock, **quirks)
    except ValueError as error:
        raise InvalidOptions([str(error)]) from error
    return emulator
