"""Device faults, and schedules of device faults.

Example: `FaultSchedule().at(12.0, DeviceFault(DeviceFaultKind.FAIL_PORT, 7))` fails port 7 after 12 seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import Annotated

from ocs_drivers.errors import InvalidOptions
from ocs_drivers.options import CheckedOptions, Flag, SecondsOr0, whole


class DeviceFaultKind(StrEnum):
    FAIL_PORT = "fail_port"  # the port reports failed; its circuits fail; new ones are refused
    DISABLE_PORT = "disable_port"
    MEND_PORT = "mend_port"  # the port is enabled, its mirror is free and its fibre is plugged in
    STICK_MIRROR = "stick_mirror"  # the port's mirror keeps its position, regardless of commands
    UNPLUG = "unplug"  # the mirror moves, but no light arrives
    PARTIAL_COMMIT = "partial_commit"  # the next setter applies only its first `items`
    DROP_CONNECTION = "drop_connection"  # the next setter is applied, then the connection breaks
    DROP_COMMAND = "drop_command"  # the connection breaks before the next setter is applied
    SLOW_ANSWER = "slow_answer"  # the next setter is applied, but answered `delay_s` later
    RESTART = "restart"  # the device restarts, dark or with its circuits restored


OF_A_PORT = frozenset(
    {
        DeviceFaultKind.FAIL_PORT,
        DeviceFaultKind.DISABLE_PORT,
        DeviceFaultKind.MEND_PORT,
        DeviceFaultKind.STICK_MIRROR,
        DeviceFaultKind.UNPLUG,
    }
)


@dataclass(frozen=True, slots=True)
class DeviceFault:
    kind: DeviceFaultKind
    port: int | None = None
    items: int = 0  # partial_commit: how many items are applied
    silent: bool = False  # partial_commit: the device answers as if it had succeeded
    delay_s: float = 0.0  # slow_answer

    def __post_init__(self) -> None:
        if (self.kind in OF_A_PORT) != (self.port is not None):
            need = "must have a" if self.kind in OF_A_PORT else "must not have a"
            raise ValueError(f"fault {self.kind} {need} port, got {self.port}")
        if self.items < 0:
            raise ValueError(f"items must be >= 0, got {self.items}")
        if not self.delay_s >= 0:
            raise ValueError(f"delay_s must be >= 0, got {self.delay_s}")


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """Faults with their times in seconds since the device was switched on. A schedule is immutable. The method `at`
    returns a new schedule that also contains the given faults."""

    due: tuple[tuple[float, DeviceFault], ...] = ()

    def at(self, at_s: float, *faults: DeviceFault) -> "FaultSchedule":
        return FaultSchedule(tuple(sorted((*self.due, *((at_s, fault) for fault in faults)), key=itemgetter(0))))


class ScheduledFault(CheckedOptions):
    """An entry of a fault schedule that is given as plain data. `at_s` is the time in seconds since the device was
    switched on."""

    at_s: SecondsOr0 = 0.0
    kind: DeviceFaultKind
    port: Annotated[int, whole(0)] | None = None
    items: Annotated[int, whole(0)] = 0
    silent: Flag = False
    delay_s: SecondsOr0 = 0.0


def parse_schedule(items: object) -> tuple[FaultSchedule, list[str]]:
    """Parse a schedule given as plain data, such as `[{"at_s": 12, "kind": "fail_port", "port": 7}]`. Return the
    schedule of the valid entries and a list of messages about the invalid entries."""
    if not isinstance(items, list | tuple):
        return FaultSchedule(), [f"faults: must be a list, got {items!r}"]
    schedule, wrong = FaultSchedule(), []
    for index, item in enumerate(items):
        try:
            if not isinstance(item, Mapping):
                raise ValueError(f"must be a mapping with at_s and kind, got {item!r}")
            given = dict(ScheduledFault.read(item, prefix=f"faults[{index}]."))
            schedule = schedule.at(given.pop("at_s"), DeviceFault(**given))
        except InvalidOptions as error:
            wrong += error.faults
        except ValueError as error:
            wrong.append(f"faults[{index}]: {error}")
    return schedule, wrong
