"""The options of a route driver as a pydantic model: every fault is reported at once, with its path and value."""

from typing import Annotated, Any

from ocs_drivers.errors import InvalidOptions
from ocs_drivers.options import CheckedOptions, FromOptions, is_number, must_be
from orchestrrl.core.clock import Clock, WallClock
from orchestrrl.core.errors import ProblemFaults
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
