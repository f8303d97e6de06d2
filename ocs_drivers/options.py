"""The options of a driver, checked together: every fault is told at once, with its path and value."""

import math
from enum import StrEnum

from ocs_drivers.driver import DriverTimeouts
from ocs_drivers.errors import InvalidOptions


class DriverOptions:
    """Collects faults while a driver's constructor looks at its arguments; `check` raises them. Values may be of any
    type: they come from a configuration file."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.faults: list[str] = []

    def add(self, name: str, wrong: str, value: object) -> None:
        self.faults.append(f"{name}: {wrong}, got {value!r}")

    def address(self, address: object, default_port: int) -> tuple[str, int]:
        """Host and port of `HOST`, `HOST:PORT` or `[IPV6]:PORT`."""
        host, port, is_right = "", default_port, isinstance(address, str)
        if isinstance(address, str):
            host, colon, digits = address.rpartition(":") if ":" in address else (address, "", "")
            if address.startswith("[") and address.endswith("]"):
                host, colon, digits = address, "", ""
            if colon:
                is_right = digits.isdecimal() and 0 < int(digits) < 65536
                port = int(digits) if is_right else default_port
            host = host.removeprefix("[").removesuffix("]")
        if not is_right or not host or any(sign.isspace() or sign == "/" for sign in host):
            self.add("address", "must be HOST or HOST:PORT", address)
        return host, port

    def text(self, name: str, value: object, *, may_be_empty: bool = False) -> bool:
        is_right = isinstance(value, str) and bool(value or may_be_empty)
        if not is_right:
            self.add(name, "must be text", value)
        return is_right

    def flag(self, name: str, value: object) -> bool:
        if not isinstance(value, bool):
            self.add(name, "must be true or false", value)
        return value is True

    def whole(self, name: str, value: object, *, at_least: int | None = None) -> bool:
        """Whether it is a whole number as wanted."""
        is_right = isinstance(value, int) and not isinstance(value, bool) and (at_least is None or value >= at_least)
        if not is_right:
            self.add(name, "must be a whole number" + (f" >= {at_least}" if at_least is not None else ""), value)
        return is_right

    def choice(self, name: str, value: object, choices: type[StrEnum]) -> bool:
        is_right = value in list(choices)
        if not is_right:
            self.add(name, f"must be one of {', '.join(choices)}", value)
        return is_right

    def seconds(self, name: str, value: object, *, may_be_0: bool = False) -> bool:
        is_right = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and (value > 0 or (may_be_0 and value == 0))
        )
        if not is_right:
            self.add(name, f"must be a number {'>=' if may_be_0 else '>'} 0", value)
        return is_right

    def limits(
        self, command_timeout_s: float, lock_timeout_s: float, tune_timeout_s: float | None, link_timeout_s: float
    ) -> DriverTimeouts:
        """What every driver lets its users set; the defaults where it is wrong."""
        times = {
            "command_timeout_s": command_timeout_s,
            "lock_timeout_s": lock_timeout_s,
            "link_timeout_s": link_timeout_s,
        }
        if tune_timeout_s is not None:
            times["tune_timeout_s"] = tune_timeout_s
        before = len(self.faults)
        for name, value in times.items():
            self.seconds(name, value)
        if len(self.faults) > before:
            return DriverTimeouts()
        return DriverTimeouts(command_timeout_s, lock_timeout_s, tune_timeout_s, link_timeout_s)

    def check(self) -> None:
        """Raises InvalidOptions if anything was wrong."""
        if self.faults:
            raise InvalidOptions([f"options.{fault}" for fault in self.faults], device=self._device)
