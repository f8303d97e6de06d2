"""Implementations by name: ours, and those that other packages register as entry points."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from orchestrrl.errors import Permanent


@dataclass(frozen=True, slots=True)
class PlugPoint:
    """Entry points of `group`, and `ours` by name with where they are, as in an entry point: these are found also where
    the package is only on the path, as in a trainer's environment. `what` names one in errors."""

    what: str
    group: str
    ours: Mapping[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.ours or name in _registered(self.group)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted({*self.ours, *_registered(self.group)}))

    def check(self, name: str) -> None:
        """Raises Permanent for an unknown name, listing the known ones."""
        if name not in self:
            raise Permanent(f"unknown {self.what} {name!r}; known: {', '.join(self.names())}")

    def load(self, name: str) -> Any:
        """Raises Permanent for an unknown name, and where what it needs is not installed."""
        self.check(name)
        try:
            return EntryPoint(name, self.ours.get(name) or _registered(self.group)[name], self.group).load()
        except ImportError as error:
            raise Permanent(f"{self.what} {name!r} needs what is not installed here: {error}") from error


@cache  # it reads a file of every installed package
def _registered(group: str) -> Mapping[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=group)}
