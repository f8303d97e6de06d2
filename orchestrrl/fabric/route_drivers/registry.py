"""Drivers by name: the entry-point group `orchestrrl.route_drivers`, where ours and third parties' are
registered.

An entry point names a factory `(router, *, clock, **options) -> RouteDriver`, usually the driver's class. The rest of
its keyword-only parameters are the options that users may set.
"""

import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from orchestrrl.core.clock import Clock, WallClock
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fabric.route_drivers.base import RouteDriver

ENTRY_POINT_GROUP = "orchestrrl.route_drivers"


def make_driver(
    name: str, router: str, options: Mapping[str, Any] | None = None, clock: Clock | None = None
) -> RouteDriver:
    """A driver `name` for the router that will go by the name `router`; opens nothing.

    Raises ProblemFaults with every fault: an unknown driver (listing the known ones), unknown or missing options,
    values that the driver refuses.
    """
    entries = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in entries:
        raise ProblemFaults([f"driver: must be one of {', '.join(sorted(entries))}, got {name!r}"])
    factory: Any = entries[name].load()
    given = dict(options or {})
    accepted = _options(factory)
    faults = [
        f"options.{option}: is not an option of driver {name} (known: {', '.join(sorted(accepted))}), got {value!r}"
        for option, value in given.items()
        if option not in accepted
    ]
    faults += [f"options.{option}: is missing" for option, needed in accepted.items() if needed and option not in given]
    if faults:
        raise ProblemFaults(faults)
    driver: RouteDriver = factory(router, clock=clock or WallClock(), **given)
    return driver


def _options(factory: Any) -> dict[str, bool]:
    """Names of a factory's options; True for those that must be given."""
    parameters = inspect.signature(factory).parameters.values()
    return {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "clock"
    }
