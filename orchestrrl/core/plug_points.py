"""Look up implementations by name, among the built-in ones and those that other packages register as entry points."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from orchestrrl.core.errors import Permanent


@dataclass(frozen=True, slots=True)
class PlugPoint:
    """A kind of implementation that is looked up by name, such as engine clients. `kind` is the term for it in error
    messages.

    `built_in` maps a name to `module:attribute`. Such names work even if this package is not installed but only on the
    import path, as in a trainer's environment. `group` is the entry-point group of other packages. Built-in names take
    precedence.
    """

    kind: str
    group: str
    built_in: Mapping[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.built_in or name in _registered(self.group)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted({*self.built_in, *_registered(self.group)}))

    def check(self, name: str) -> None:
        """Raise Permanent if the name is unknown. The error lists the known names."""
        if name not in self:
            raise Permanent(f"unknown {self.kind} {name!r}: must be one of {', '.join(self.names())}")

    def load(self, name: str) -> Any:
        """Import an implementation and return it. Raises Permanent if the name is unknown or a dependency is not
        installed."""
        self.check(name)
        try:
            return EntryPoint(name, self.built_in.get(name) or _registered(self.group)[name], self.group).load()
        except ImportError as error:
            raise Permanent(f"cannot load {self.kind} {name!r}, because a dependency is missing: {error}") from error


@cache  # reads a file of every installed package
def _registered(group: str) -> Mapping[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=group)}
