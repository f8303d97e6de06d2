"""Emulators by the name of their protocol. A name is `FAMILY` or `FAMILY-DIALECT`."""

import inspect
from datetime import date
from importlib import import_module
from typing import Any

from ocs_drivers.base import DeviceClock
from ocs_drivers.emulators.base import DevicePanel, Emulator
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

# What the driver of the family has to be told, besides the address, to speak with the emulator as it is made here.
DRIVER_OPTIONS: dict[str, dict[str, Any]] = {
    "gnmi": {"tls": False},
    "gnmi-openconfig": {"tls": False, "model": "openconfig"},
    "netconf": {"password": "root", "verify_host_key": False},
    "scpi-dicon": {"profile": "dicon"},
    "tl1-calient": {"dialect": "calient"},
    "tl1-glimmerglass": {"dialect": "glimmerglass"},
}


def make_emulator(protocol: str, panel: DevicePanel, clock: DeviceClock | None = None, **quirks: Any) -> Emulator:
    """Raises InvalidOptions with every fault: a protocol that is not known (listing the known ones) or whose library is
    not installed, quirks that it does not have (listing those that it has), values that it refuses."""
    factory = _factory(protocol)
    parameters = inspect.signature(factory).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.name not in ("panel", "clock")]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):  # which checks them itself
        faults = [
            f"{name}: is not a quirk of {protocol} (known: {', '.join(known) or 'none'}), got {value!r}"
            for name, value in quirks.items()
            if name not in known
        ]
        defaults = {parameter.name: parameter.default for parameter in parameters}
        # YAML makes of 1.1 a number and of 2018-03-22 a date, where text is meant.
        quirks = {
            name: str(value) if isinstance(defaults.get(name), str) and isinstance(value, float | date) else value
            for name, value in quirks.items()
        }
        faults += [
            f"{parameter.name}: must be {_WORDS[type(parameter.default)]}, got {quirks[parameter.name]!r}"
            for parameter in parameters
            if parameter.name in quirks and not _is_alike(quirks[parameter.name], parameter.default)
        ]
        if faults:
            raise InvalidOptions(faults)
    try:
        emulator: Emulator = factory(panel, clock=clock, **quirks)
    except ValueError as error:
        raise InvalidOptions([str(error)]) from error
    return emulator


_WORDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _is_alike(value: object, default: object) -> bool:
    """Whether a value is of the kind of the default. One of another kind, such as None, says nothing."""
    if type(default) not in _WORDS or type(value) is type(default):
        return True
    return isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)


def _factory(protocol: str) -> Any:
    if protocol not in EMULATORS:
        raise InvalidOptions([f"protocol: must be one of {', '.join(sorted(EMULATORS))}, got {protocol!r}"])
    module, _, name = EMULATORS[protocol].partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("ocs_drivers"):
            raise
        extra = protocol.partition("-")[0]
        wrong = f"protocol: {protocol} needs {error.name}, which is not installed: pip install 'orchestrrl[{extra}]'"
        raise InvalidOptions([wrong]) from error
