"""Drivers by name: the entry-point group `orchestrrl.ocs_drivers`, where ours and third parties' are registered alike.

An entry point names a factory `(device, *, clock, **options) -> OcsDriver`, usually the driver's class. The rest of its
keyword-only parameters are the options that users may set.
"""

import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from ocs_drivers.base import DeviceClock, OcsDriver, SystemClock
from ocs_drivers.errors import InvalidOptions

ENTRY_POINT_GROUP = "orchestrrl.ocs_drivers"


def make_driver(
    name: str, device: str, options: Mapping[str, Any] | None = None, clock: DeviceClock | None = None
) -> OcsDriver:
    """A driver `name` for the device that will go by the name `device`; opens nothing.

    Raises InvalidOptions with every fault: an unknown driver (listing the known ones), unknown or missing options,
    values that the driver refuses.
    """
    entries = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in entries:
        raise InvalidOptions([f"driver: must be one of {', '.join(sorted(entries))}, got {name!r}"], device=device)
    try:
        factory: Any = entries[name].load()
    except ModuleNotFoundError as error:
        wrong = f"driver: {name} needs {error.name}, which is not installed: pip install 'orchestrrl[{name}]'"
        raise InvalidOptions([wrong], device=device) from error
    given = dict(options or {})
    accepted = _options(factory)
    faults = [
        f"options.{option}: is not an option of driver {name} (known: {', '.join(sorted(accepted))}), got {value!r}"
        for option, value in given.items()
        if option not in accepted
    ]
    faults += [f"options.{option}: is missing" for option, needed in accepted.items() if needed and option not in given]
    if faults:
        raise InvalidOptions(faults, device=device)
    try:
        driver: OcsDriver = factory(device, clock=clock or SystemClock(), **given)
    except InvalidOptions as error:
        error.device = device
        raise
    return driver


def _options(factory: Any) -> dict[str, bool]:
    """Names of a factory's options; True for those that must be given."""
    parameters = inspect.signature(factory).parameters.values()
    return {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "clock"
    }
