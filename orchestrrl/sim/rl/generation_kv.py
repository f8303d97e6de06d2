"""KV of engines that change, over the fabric: what the quick generation loop asks when a plan is carried out. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrrl.sim.net.fabrics.base import Fabric
from orchestrrl.sim.rl.generation_fast import KvOutcome, Leaving
from orchestrrl.sim.rl.generation_fleet import GenGpus
from orchestrrl.sim.rl.kv_moves import Home, KvWish, move_kv


@dataclass(frozen=True)
class OverFabric:
    """Engines' GPUs are numbered from `where.first` on. Circuits are set for it where the fabric has any, while the new
    engines start."""

    fabric: Fabric
    where: GenGpus
    kv_bytes_per_token: float

    def __call__(self, leaving: Sequence[Leaving]) -> KvOutcome:
        engines = sorted({each.source for each in leaving} | {each.destination for each in leaving}, key=_first_gpu)
        place = {engine: number for number, engine in enumerate(engines)}
        homes = [Home(layout, np.array(gpus) + self.where.first) for layout, gpus in engines]
        rates = np.ones(len(homes))
        for each in leaving:
            rates[place[each.destination]] = each.prefill_tokens_per_s
        wishes = [KvWish(place[each.source], place[each.destination], each.context_tokens) for each in leaving]
        moved = move_kv(homes, wishes, self.kv_bytes_per_token, rates, self.fabric)
        by_network = frozenset(each.request for each, sent in zip(leaving, moved.transferred, strict=True) if sent)
        # What is computed again, the engines' own prefill takes.
        ready_s = {
            each.destination[1]: float(moved.ready_s[place[each.destination]])
            for each in leaving
            if each.request in by_network
        }
        return KvOutcome(ready_s, by_network, moved.bytes)


def _first_gpu(engine: tuple[object, tuple[int, ...]]) -> tuple[int, int]:
    return engine[1][0], len(engine[1])
