"""KV that follows its requests to other instances over the fabric, or is computed again where that is sooner. Pure.

A request's KV is on the GPUs of one attention replica, its heads spread evenly over them, before and after. GPUs that
hold the same heads twice (fewer KV heads than GPUs) get one half each and copy the rest over NVLink, which takes next
to nothing beside the network. All KV sets out at once; what an instance computes again, it computes one after another.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Period, SimulatedFabric
from orchestrrl.lab.sim.net.fluid import TierBytes, finish_s, tier_bytes
from orchestrrl.lab.sim.net.model import Floats, GpuFlows, Ints, LinkNetwork
from planner.model import GpuId, Parallelism, RequestId

# In which instances may leave the network to the others: each works out circuits and times. After the last, those that
# stay have what they got beside the others.
MOST_ROUNDS = 3
Place = tuple[Parallelism, tuple[GpuId, ...]]  # of an instance; under AFD GPUs for attention before those for FFN


@dataclass(frozen=True, slots=True)
class Leaving:
    """A running request whose engine changes."""

    request: RequestId
    source: Place
    destination: Place
    prefill_tokens_per_s: float  # of the destination
    context_tokens: int


@dataclass(frozen=True, slots=True)
class KvOutcome:
    """`ready_s` by destination's GPUs, of those that get KV over the network: its last KV is there. Requests that are
    not in `transferred` are computed again. `seconds`: until both is done everywhere."""

    ready_s: Mapping[tuple[GpuId, ...], float]
    transferred: frozenset[RequestId]
    seconds: float
    tier_bytes: TierBytes


@dataclass(frozen=True)
class OverFabric:
    """Engines' GPUs are numbered from `first_gpu` on. Circuits are set for it where the fabric has any, while the new
    engines start."""

    fabric: SimulatedFabric
    first_gpu: int
    kv_bytes_per_token: float

    def __call__(self, leaving: Sequence[Leaving]) -> KvOutcome:
        """Whoever would have its instance's KV sooner by computing it again does so, instance by instance, and leaves
        the network to the others."""
        places = list(dict.fromkeys(each.destination for each in leaving))
        at = np.array([places.index(each.destination) for each in leaving], np.int64)
        again_s = np.bincount(
            at, [each.context_tokens / each.prefill_tokens_per_s for each in leaving], len(places)
        ).astype(np.float64)
        by_network, (shares, request) = np.ones(len(places), np.bool_), self.shares(leaving)
        ready_s = again_s
        sent: TierBytes = {}
        for _ in range(MOST_ROUNDS):
            going = by_network[at][request]
            flows, of = shares.only(going).merged()
            if not len(flows):
                ready_s, sent = np.where(by_network, 0.0, again_s), {}
                break
            network = self.fabric.network(Period.of("KV", FabricStage.GEN, flows))
            arrived_s = _arrived_s(network, flows, of, at[request[going]], len(places))
            later = by_network & (arrived_s > again_s)
            by_network = by_network & ~later
            ready_s = np.where(by_network, arrived_s, again_s)
            sent = tier_bytes(network, shares.only(by_network[at][request]).merged()[0])
            if not later.any():
                break
        return KvOutcome(
            {gpus: float(ready_s[number]) for number, (_, gpus) in enumerate(places) if by_network[number]},
            frozenset(each.request for each, place in zip(leaving, at, strict=True) if by_network[place]),
            float(ready_s.max(initial=0.0)),
            sent,
        )

    def sent(self, leaving: Sequence[Leaving]) -> TierBytes:
        """Return bytes by tier of KV that nothing waits for, over the fabric as it is at rest."""
        return tier_bytes(self.fabric.network(None), self.shares(leaving)[0].merged()[0])

    def shares(self, leaving: Sequence[Leaving]) -> tuple[GpuFlows, Ints]:
        """Return what goes from GPU to GPU, and the number among `leaving` of the request that each is of. Replicas of
        either side take the requests in turn."""
        gone, come = Counter[Place](), Counter[Place]()
        rows: list[tuple[int, int, float]] = []
        request: list[int] = []
        for number, each in enumerate(leaving):
            source = self._replica(each.source, gone[each.source])
            destination = self._replica(each.destination, come[each.destination])
            gone[each.source] += 1
            come[each.destination] += 1
            kv_bytes = each.context_tokens * self.kv_bytes_per_token
            for src, dst, share in _overlaps(source, destination):
                if src != dst:
                    rows.append((src, dst, share * kv_bytes))
                    request.append(number)
        return GpuFlows.of(rows), np.array(request, np.int64)

    def _replica(self, place: Place, turn: int) -> Ints:
        """[rank], GPUs of the attention replica whose turn it is."""
        parallelism, gpus = place
        held = gpus[: parallelism.attention_gpus] if parallelism.afd else gpus
        replicas = np.array(held).reshape(-1, parallelism.tp) + self.first_gpu
        return np.asarray(replicas[turn % len(replicas)])


def _overlaps(source: Ints, destination: Ints) -> list[tuple[int, int, float]]:
    """Of heads spread evenly over either side, who has what of whom; shares add up to 1."""
    a, b = len(source), len(destination)
    cuts = sorted({*(i * b for i in range(a + 1)), *(j * a for j in range(b + 1))})  # in parts of 1 / (a * b)
    return [
        (int(source[first // b]), int(destination[first // a]), (last - first) / (a * b))
        for first, last in itertools.pairwise(cuts)
    ]


def _arrived_s(network: LinkNetwork, flows: GpuFlows, of: Ints, destination: Ints, places: int) -> Floats:
    """[place]"""
    arrived_s, routes = np.zeros(places), network.routes(flows)
    ends_s = finish_s(network, flows, routes) + routes.latency_s
    np.maximum.at(arrived_s, destination, ends_s[of])
    return arrived_s
