"""Validate the options of a driver with a pydantic model. All faults are reported at once, each with the name and value
of the option.

A device family declares its options as a subclass of `DriverOptions`, and names that class in its subclass of
`ConfiguredSwitch`.
"""

import math
from collections.abc import Callable, Mapping
from datetime import date
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ocs_drivers.base import DeviceClock, SystemClock
from ocs_drivers.driver import DriverTimeouts, SwitchDriver
from ocs_drivers.errors import InvalidOptions, naming


def must_be(what: str, is_right: Callable[[Any], object]) -> BeforeValidator:
    """Return a pydantic validator that accepts a value unchanged if `is_right(value)` is true. It rejects other values
    with the message `must be WHAT`, where WHAT is the parameter `what`."""

    def check(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(f"must be {what}")
        return value

    return BeforeValidator(check)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    return isinstance(value, str)


def as_text(value: object) -> object:
    return str(value) if isinstance(value, float | date) else value


def whole(at_least: int, at_most: int | None = None) -> BeforeValidator:
    """Return a pydantic validator for whole numbers >= `at_least` and, if `at_most` is given, <= `at_most`."""
    limits = f">= {at_least}" if at_most is None else f"within {at_least}..{at_most}"
    most = math.inf if at_most is None else at_most
    return must_be(f"a whole number {limits}", lambda value: is_whole(value) and at_least <= value <= most)


def split_address(address: str, default_port: int) -> tuple[str, int]:
    """Return the host and the port of an address of the form `HOST`, `HOST:PORT` or `[IPV6]:PORT`. `default_port` is
    used if the address has no port. Raises ValueError for any other text."""
    is_bare = ":" not in address or (address.startswith("[") and address.endswith("]"))
    host, digits = (address, str(default_port)) if is_bare else address.rsplit(":", 1)
    host = host.removeprefix("[").removesuffix("]")
    is_port = digits.isascii() and digits.isdecimal() and 0 < int(digits) < 65536
    if not host or not is_port or any(sign.isspace() or sign == "/" for sign in host):
        raise ValueError(f"must be HOST or HOST:PORT, got {address!r}")
    return host, int(digits)


def _is_address(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(split_address(value, 1))
    except ValueError:
        return False


Address = Annotated[str, must_be("HOST or HOST:PORT", _is_address)]
Flag = Annotated[bool, must_be("true or false", lambda value: isinstance(value, bool))]
Text = Annotated[str, must_be("text", is_text)]
Password = Annotated[str, Field(repr=False), must_be("text", is_text)]
# YAML parses 1.1 as a number and 2018-03-22 as a date, though text is intended.
YamlText = Annotated[str, must_be("text", is_text), BeforeValidator(as_text)]
Number = Annotated[float, must_be("a number", is_number)]
FilledText = Annotated[str, must_be("text", lambda value: isinstance(value, str) and value)]
Seconds = Annotated[float, must_be("a number > 0", lambda value: is_number(value) and value > 0)]
SecondsOr0 = Annotated[float, must_be("a number >= 0", lambda value: is_number(value) and value >= 0)]


class CheckedOptions(BaseModel):
    """Base class of device options. Values come from a configuration file and may have any type."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def conflicts(self) -> list[str]:
        """Return the faults in combinations of options, each as `NAME: WHAT`. When this method is called, options that
        failed their own check have their default values."""
        return []

    @classmethod
    def read(cls, given: Mapping[str, Any], prefix: str = "options.") -> Self:
        """Validate the given options and return them as an instance. If any of them are invalid, raises InvalidOptions
        with all faults, each with `prefix` in front."""
        faults: list[str] = []
        try:
            options = cls.model_validate(given)
        except ValidationError as error:
            known = ", ".join(sorted(cls.model_fields))
            faults = [_fault_text(detail, known) for detail in error.errors()]
            wrong = {detail["loc"][0] for detail in error.errors()}
            options = cls.model_construct(**{name: value for name, value in given.items() if name not in wrong})
        if faults := faults + options.conflicts():
            raise InvalidOptions([f"{prefix}{fault}" for fault in faults])
        return options


class DriverOptions(CheckedOptions):
    """The options common to all drivers."""

    requests: ClassVar[int] = 1  # most requests in one verb of the wire; each has its own time limit

    command_timeout_s: Seconds = 5.0
    lock_timeout_s: Seconds = 10.0
    tune_timeout_s: Seconds | None = None
    link_timeout_s: Seconds = 2.0

    @property
    def limits(self) -> DriverTimeouts:
        command_s = self.requests * self.command_timeout_s
        return DriverTimeouts(command_s, self.lock_timeout_s, self.tune_timeout_s, self.link_timeout_s)


class FromOptions:
    """Mix-in for drivers that are constructed from options. A driver is declared as `class MySwitch(ConfiguredSwitch,
    options=MyOptions, wire=MyWire)`. The fields of the options class are keyword-only parameters of the driver class.
    `wire` is called with the options and the clock, and returns the driver's wire."""

    _options_type: ClassVar[type[Any]]
    _make_wire: ClassVar[Any]

    def __init_subclass__(
        cls, options: type[CheckedOptions] | None = None, wire: Callable[[Any, Any], Any] | None = None
    ) -> None:
        if wire is not None:
            cls._make_wire = staticmethod(wire)
        if options is not None:  # otherwise the class is a variant of a driver that declares its options
            cls._options_type = options


class ConfiguredSwitch(FromOptions, SwitchDriver):
    """Base class for a SwitchDriver that is constructed from options."""

    def __init__(self, device: str, *, clock: DeviceClock | None = None, **given: Any) -> None:
        self.device = device
        with naming(device):
            options = self._options_type.read(given)
        clock = clock or SystemClock()
        super().__init__(device, self._make_wire(options, clock), clock=clock, limits=options.limits)


def _fault_text(detail: Any, known: str) -> str:
    name = str(detail["loc"][0])
    match detail["type"]:
        case "missing":
            return f"{name}: is missing"
        case "extra_forbidden":
            wrong = f"is not known (known: {known})"
        case "enum":
            wrong = f"must be one of {detail['ctx']['expected'].replace(' or ', ', ').replace(chr(39), '')}"
        case "value_error":
            wrong = str(detail["ctx"]["error"])
        case _:
            wrong = detail["msg"]
    return f"{name}: {wrong}, got {detail['input']!r}"
