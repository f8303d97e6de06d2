"""KV of engines that change, over the fabric: what the quick generation loop asks when a plan is carried out. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.rl.generation_fleet import GenGpus
from orchestrrl.lab.sim.rl.generation_records import KvOutcome, Leaving
from orchestrrl.lab.sim.rl.kv_moves import Home, KvWish, kv_tier_bytes, move_kv
from planner.model import GpuId, Parallelism

Place = tuple[Parallelism, tuple[GpuId, ...]]


@dataclass(frozen=True)
class OverFabric:
    """Engines' GPUs are numbered from `where.first` on. Circuits are set for it where the fabric has any, while the new
    engines start."""

    fabric: SimulatedFabric
    where: GenGpus
    kv_bytes_per_token: float

    def __call__(self, leaving: Sequence[Leaving]) -> KvOutcome:
        place, homes, wishes = self._wishes_of(leaving)
        rates = np.ones(len(homes))
        for each in leaving:
            rates[place[each.destination]] = each.prefill_tokens_per_s
        moved = move_kv(homes, wishes, self.kv_bytes_per_token, rates, self.fabric)
        by_network = frozenset(each.request for each, sent in zip(leaving, moved.transferred, strict=True) if sent)
        # What is computed again, the engines' own prefill takes.
        ready_s = {
            each.destination[1]: float(moved.ready_s[place[each.destination]])
            for each in leaving
            if each.request in by_network
        }
        return KvOutcome(ready_s, by_network, moved.bytes, moved.tier_bytes)

    def sent(self, leaving: Sequence[Leaving]) -> Mapping[str, float]:
        _, homes, wishes = self._wishes_of(leaving)
        return kv_tier_bytes(homes, wishes, self.kv_bytes_per_token, self.fabric)

    def _wishes_of(self, leaving: Sequence[Leaving]) -> tuple[dict[Place, int], list[Home], list[KvWish]]:
        """Engines by their place in the list of homes."""
        engines = sorted({each.source for each in leaving} | {each.destination for each in leaving}, key=_key)
        place = {engine: number for number, engine in enumerate(engines)}
        homes = [Home(layout, np.array(gpus) + self.where.first) for layout, gpus in engines]
        wishes = [KvWish(place[each.source], place[each.destination], each.context_tokens) for each in leaving]
        return place, homes, wishes


def _key(engine: Place) -> tuple[object, ...]:
    """Of engines one after another on the same GPUs, too."""
    return engine[1], astuple(engine[0])
