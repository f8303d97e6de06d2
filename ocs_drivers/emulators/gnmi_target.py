"""What an emulated gNMI target is to its server: a tree to read, rows to watch, a transaction to carry out."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import grpc

from ocs_drivers.emulators.base import EmulatedDevice
from ocs_drivers.gnmi_data import Path

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


class GnmiTarget(Protocol):
    device: EmulatedDevice
    models: dict[str, str]  # with their versions
    origins: frozenset[str]  # of paths

    def tree(self) -> dict[str, Any]: ...

    def rows(self, below: Path) -> dict[Path, Row]:
        """What a subscription to a path is told of."""
        ...

    async def transact(self, changes: Sequence[GnmiChange]) -> None:
        """One SetRequest, in the order in which it is to be carried out. All of it is looked at before any is done."""
        ...
