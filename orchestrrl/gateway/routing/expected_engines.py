"""Engines that are being started, as the daemon last said, and until when that is believed. Pure."""

from dataclasses import dataclass

from planner.model import EngineId


@dataclass(frozen=True, slots=True)
class ExpectedEngines:
    """`until_s` is the daemon's clock, as the ends of leases are: one that dies leaves nobody waiting for longer."""

    engines: frozenset[EngineId] = frozenset()
    until_s: float = 0.0

    def at(self, now_s: float) -> frozenset[EngineId]:
        return self.engines if now_s < self.until_s else frozenset()
