"""Look up drivers by name in the entry-point group `orchestrrl.ocs_drivers`, which contains built-in and third-party
drivers.

An entry point names a factory `(device, *, clock, **options) -> OcsDriver`, usually the driver's class. The factory's
other keyword-only parameters are the options that users may set.
"""

import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ocs_drivers.base import DeviceClock, OcsDriver, SystemClock
from ocs_drivers.errors import InvalidOptions, naming

ENTRY_POINT_GROUP = "orchestrrl.ocs_drivers"


def make_driver(
    name: str, device: str, options: Mapping[str, Any] | None = None, clock: DeviceClock | None = None
) -> OcsDriver:
    """Return a driver of type `name` for the device called `device`. No connection is opened.

    Raises InvalidOptions with every fault if the driver is unknown (the error lists the known drivers), options are
    unknown or missing, or the driver rejects their values.
    """
    with naming(device):
        driver: OcsDriver = make_from_group(ENTRY_POINT_GROUP, name, device, options or {}, clock or SystemClock())
    return driver


def make_from_group(group: str, name: str, device: str, options: Mapping[str, Any], clock: object) -> Any:
    """Return a driver that is constructed by the factory `name` of an entry-point group. Raises InvalidOptions under
    the same conditions as `make_driver`."""
    factory = load_named("driver", name, {entry.name: entry for entry in entry_points(group=group)})
    try:
        inspect.signature(factory).bind(device, clock=clock, **options)
    except TypeError as error:
        raise InvalidOptions([f"options: cannot be used with driver {name}: {error}"]) from None
    return factory(device, clock=clock, **options)


def load_named(what: str, name: str, entries: Mapping[str, EntryPoint]) -> Any:
    """Load the factory of an entry named `FAMILY` or `FAMILY-DIALECT`. Raises InvalidOptions if the name is unknown
    (the error lists the known names) or if a library that the entry needs is not installed. `what` is the subject of
    the error, such as `driver`."""
    if name not in entries:
        raise InvalidOptions([f"{what}: must be one of {', '.join(sorted(entries))}, got {name!r}"])
    try:
        return entries[name].load()
    except ModuleNotFoundError as error:
        if str(error.name).startswith("ocs_drivers."):
            raise
        needs = f"{what}: {name} needs {error.name}, which is not installed"
        family = name.partition("-")[0]
        extra = family if family in ("netconf", "gnmi") else "ocs"
        raise InvalidOptions([f"{needs}; run pip install 'orchestrrl[{extra}]'"]) from error
