"""What an emulated gNMI target is to its server: a tree to read, rows to watch, a transaction to carry out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc

from ocs_drivers.base import DeviceClock
from ocs_drivers.cross_connect_model import ConnectionBroken
from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.gnmi_data import Path, shown
from ocs_drivers.model import Action, CrossConnect, SwitchFacts

Row = dict[str, Any]


class GnmiOp(StrEnum):
    DELETE = "delete"
    REPLACE = "replace"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class GnmiChange:
    op: GnmiOp
    path: Path
    value: Any = None


class GnmiRefusal(Exception):
    """A call to end with this status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.message = text


class GnmiTarget(ABC):
    """An emulated device whose circuits are ordered in one place and appear in another."""

    models: dict[str, str]  # with their versions
    origins: frozenset[str]  # of paths
    keeps_leftovers = False  # what the hardware did not take stays ordered
    refused_as = grpc.StatusCode.ABORTED  # of what the hardware refuses

    def __init__(self, facts: SwitchFacts, panel: DevicePanel, clock: DeviceClock | None) -> None:
        self.device = EmulatedDevice(facts, panel, clock)
        self.ordered: set[CrossConnect] = set()
        self._session = self.device.session()

    @abstractmethod
    def tree(self) -> dict[str, Any]: ...

    @abstractmethod
    def rows(self, below: Path) -> dict[Path, Row]:
        """Return the rows or entries of lists at or below a path, which a subscription to it receives."""

    @abstractmethod
    async def transact(self, changes: Sequence[GnmiChange]) -> None:
        """One SetRequest, in the order in which it is to be carried out. All of it is looked at before any is done."""

    def notice_restart(self) -> None:
        if not self.device.is_alive(self._session):
            self._session = self.device.session()
            self.ordered = self.device.model.present

    async def carry_out(
        self, changes: Sequence[GnmiChange], wanted: set[CrossConnect], gone: set[CrossConnect], new: set[CrossConnect]
    ) -> None:
        """Let the glass follow: `wanted` is to be ordered afterwards; what of it the glass does not take is not."""
        command = " ".join(f"{change.op} {shown(change.path)}" for change in changes)
        is_broken = False
        try:
            if removed := sorted(gone & self.device.model.present - new):
                await self.device.set(Action.REMOVE, removed, command)
            if missing := sorted(new - self.device.model.present):
                await self.device.set(Action.ADD, missing, command)
        except ConnectionBroken:
            is_broken = True
            raise
        except DriverPermanent as error:
            raise GnmiRefusal(self.refused_as, f"Failed to apply patch: {error.answer}") from None
        finally:
            kept = new if self.keeps_leftovers and not is_broken else set()
            self.ordered = (wanted | (self.ordered if is_broken else set())) & self.device.model.present | kept
