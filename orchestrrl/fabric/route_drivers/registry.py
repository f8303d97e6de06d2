"""Drivers by name, and drivers that are made from options: every fault is reported at once, with its path and value.

An entry point of the group `orchestrrl.route_drivers`, where ours and third parties' are registered, names a factory
`(router, *, clock, **options) -> RouteDriver`, usually the driver's class. The rest of its keyword-only parameters are
the options that users may set.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from ocs_drivers.errors import InvalidOptions
from ocs_drivers.options import CheckedOptions, FromOptions, is_number, must_be
from ocs_drivers.registry import make_from_group
from orchestrrl.core.clock import Clock, WallClock
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fabric.route_drivers.base import RouteDriver
from orchestrrl.fabric.route_drivers.driver import RouterDriver


def are_words(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) and word for word in value)


def _is_limit(value: Any) -> bool:
    return is_number(value) and 0 < value < 3600


class RouterOptions(CheckedOptions):
    """What every driver lets its users set."""

    command_timeout_s: Annotated[float, must_be("a number within 0..3600", _is_limit)] = 5.0


class CommandOptions(RouterOptions):
    """What every driver that runs commands lets its users set. `prefix`: the words that stand before each command."""

    prefix: Annotated[tuple[str, ...], must_be("a list of words, as [ssh, tor3]", are_words)] = ()


class ConfiguredRouter(FromOptions, RouterDriver):
    """A RouterDriver made from options. Raises ProblemFaults with every fault of them."""

    def __init__(self, router: str, *, clock: Clock | None = None, **given: Any) -> None:
        try:
            options = self._options_type.read(given)
        except InvalidOptions as error:
            raise ProblemFaults(error.faults) from None
        clock = clock or WallClock()
        super().__init__(router, self._make_wire(options, clock), clock=clock, command_s=options.command_timeout_s)


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
