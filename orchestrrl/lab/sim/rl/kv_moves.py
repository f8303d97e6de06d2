"""KV that follows its requests to other instances over the fabric, or is computed again where that is sooner. Pure.

A request's KV is on the GPUs of one attention replica, its heads spread evenly over them, before and after. GPUs that
hold the same heads twice (fewer KV heads than GPUs) get one half each and copy the rest over NVLink, which takes next
to nothing beside the network. All KV sets out at once; what an instance computes again, it computes one after another.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Period, SimulatedFabric
from orchestrrl.lab.sim.net.fluid import finish_s, tier_bytes
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
    bytes: float  # over GPUs' links
    tier_bytes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KvShares:
    """Of all requests: bytes from GPU to GPU, and whose they are."""

    src: Ints
    dst: Ints
    bytes: Floats
    request: Ints  # its number among those that leave

    def only(self, these: NDArray[np.bool_]) -> "KvShares":
        return KvShares(self.src[these], self.dst[these], self.bytes[these], self.request[these])


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
        by_network, shares = np.ones(len(places), np.bool_), self.shares(leaving)
        ready_s, sent_bytes, tiers = again_s, 0.0, dict[str, float]()
        for _ in range(MOST_ROUNDS):
            some = shares.only(by_network[at][shares.request])
            flows, of = _merged(some)
            if not len(flows):
                ready_s, sent_bytes, tiers = np.where(by_network, 0.0, again_s), 0.0, {}
                break
            network = self.fabric.network(Period.of("KV", FabricStage.GEN, flows))
            arrived_s = _arrived_s(network, flows, of, at[some.request], len(places))
            later = by_network & (arrived_s > again_s)
            by_network = by_network & ~later
            ready_s = np.where(by_network, arrived_s, again_s)
            kept = some.only(by_network[at[some.request]])
            sent_bytes, tiers = float(kept.bytes.sum()), _tier_bytes(network, kept)
            if not later.any():
                break
        return KvOutcome(
            {gpus: float(ready_s[number]) for number, (_, gpus) in enumerate(places) if by_network[number]},
            frozenset(each.request for each, place in zip(leaving, at, strict=True) if by_network[place]),
            float(ready_s.max(initial=0.0)),
            sent_bytes,
            tiers,
        )

    def sent(self, leaving: Sequence[Leaving]) -> Mapping[str, float]:
        """Return bytes by tier of KV that nothing waits for, over the fabric as it is at rest."""
        shares = self.shares(leaving)
        return _tier_bytes(self.fabric.network(None), shares) if len(shares.src) else {}

    def shares(self, leaving: Sequence[Leaving]) -> KvShares:
        """Replicas of either side take the requests in turn."""
        gone, come = Counter[Place](), Counter[Place]()
        rows: list[tuple[int, int, float, int]] = []
        for number, each in enumerate(leaving):
            source = self._replica(each.source, gone[each.source])
            destination = self._replica(each.destination, come[each.destination])
            gone[each.source] += 1
            come[each.destination] += 1
            kv_bytes = each.context_tokens * self.kv_bytes_per_token
            for src, dst, share in _overlaps(source, destination):
                if src != dst:
                    rows.append((src, dst, share * kv_bytes, number))
        if not rows:
            none = GpuFlows.none()
            return KvShares(none.src, none.dst, none.bytes, none.src)
        from_gpu, to_gpu, size, request = (np.array(each) for each in zip(*rows, strict=True))
        return KvShares(from_gpu, to_gpu, size, request)

    def _replica(self, place: Place, turn: int) -> Ints:
        """[rank], GPUs of the attention replica whose turn it is."""
        parallelism, gpus = place
        held = gpus[: parallelism.attention_gpus] if parallelism.afd else gpus
        replicas = np.array(held).reshape(-1, parallelism.tp) + self.first_gpu
        return np.asarray(replicas[turn % len(replicas)])


def _tier_bytes(network: LinkNetwork, shares: KvShares) -> dict[str, float]:
    return {tier.value: size for tier, size in tier_bytes(network, _merged(shares)[0]).items()}


def _overlaps(source: Ints, destination: Ints) -> list[tuple[int, int, float]]:
    """Of heads spread evenly over either side, who has what of whom; shares add up to 1."""
    a, b = len(source), len(destination)
    cuts = sorted({*(i * b for i in range(a + 1)), *(j * a for j in range(b + 1))})  # in parts of 1 / (a * b)
    return [
        (int(source[first // b]), int(destination[first // a]), (last - first) / (a * b))
        for first, last in itertools.pairwise(cuts)
    ]


def _merged(shares: KvShares) -> tuple[GpuFlows, Ints]:
    """And which flow each share goes with."""
    if not len(shares.src):
        return GpuFlows.none(), np.empty(0, np.int64)
    ends = np.stack([shares.src, shares.dst])
    pairs, of = np.unique(ends, axis=1, return_inverse=True)
    of = of.reshape(-1)
    return GpuFlows(pairs[0], pairs[1], np.bincount(of, shares.bytes).astype(np.float64)), of


def _arrived_s(network: LinkNetwork, flows: GpuFlows, of: Ints, destination: Ints, places: int) -> Floats:
    """[place]"""
    arrived_s, routes = np.zeros(places), network.routes(flows)
    ends_s = finish_s(network, flows, routes) + routes.latency_s
    np.maximum.at(arrived_s, destination, ends_s[of])
    return arrived_s
