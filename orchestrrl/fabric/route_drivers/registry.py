"""Drivers by name: the entry-point group `orchestrrl.route_drivers`, where ours and third parties' are
registered.

An entry point names a factory `(router, *, clock, **options) -> RouteDriver`, usually the driver's class. The rest of
its keyword-only parameters are the options that users may set.
"""

from collections.abc import Mapping
from typing import Any

from ocs_drivers.errors import InvalidOptions
from ocs_drivers.registry import make_from_group
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
    try:
        driver: RouteDriver = make_from_group(ENTRY_POINT_GROUP, name, router, options or {}, clock or WallClock())
    except InvalidOptions as error:
        raise ProblemFaults(error.faults) from error
    return driver
