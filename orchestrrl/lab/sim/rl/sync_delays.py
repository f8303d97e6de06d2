"""How long weights on their way hold up those who go on beside them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrrl.lab.sim.net.fabrics.base import FabricStage


@dataclass(frozen=True, slots=True)
class SyncTime:
    """`held_s`: what those beside it are late by, if they are at work all the while."""

    seconds: float
    held_s: Mapping[FabricStage, float] = field(default_factory=dict)


@dataclass(slots=True)
class Slowed:
    """A lane of the time line, and the stretches in which part of its work does not get done."""

    _stretches: list[tuple[float, float, float]] = field(default_factory=list)  # begin, end, share that is lost

    def add(self, begin_s: float, end_s: float, held_s: float) -> None:
        """One that begins within the one before is moved behind it."""
        if held_s > 0 and end_s > begin_s:
            late_s = max(0.0, self._stretches[-1][1] - begin_s) if self._stretches else 0.0
            self._stretches.append((begin_s + late_s, end_s + late_s, min(1.0, held_s / (end_s - begin_s))))

    def held_s(self, begin_s: float, work_s: float) -> float:
        """By which work that begins then ends later than it would."""
        now_s, left_s, held_s = begin_s, work_s, 0.0
        for from_s, until_s, lost in self._stretches:
            if until_s <= now_s:
                continue
            left_s -= max(0.0, from_s - now_s)
            now_s = max(now_s, from_s)
            done_s = (until_s - now_s) * (1 - lost)
            if left_s <= 0:
                return held_s
            if left_s < done_s:
                return held_s + left_s * lost / (1 - lost)
            held_s += (until_s - now_s) * lost
            left_s -= done_s
            now_s = until_s
        return held_s
