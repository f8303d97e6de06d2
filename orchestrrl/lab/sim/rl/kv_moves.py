"""KV that follows its requests to other instances over the fabric, or is computed again where that is sooner. Pure.

A request's KV is on the GPUs of one attention replica, its heads spread evenly over them, before and after. GPUs that
hold the same heads twice (fewer KV heads than GPUs) get one half each and copy the rest over NVLink, which takes next
to nothing beside the network. All KV sets out at once; what an instance computes again, it computes one after another.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
from numpy.typing import NDArray

from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Period, SimulatedFabric
from orchestrrl.lab.sim.net.fluid import finish_routed_s, tier_bytes
from orchestrrl.lab.sim.net.model import Floats, GpuFlows, Ints, LinkNetwork
from orchestrrl.lab.sim.net.problem import routes_of
from orchestrrl.lab.sim.rl.generation_fleet import GenGpus
from orchestrrl.lab.sim.rl.generation_records import KvOutcome, Leaving
from planner.model import GpuId, Parallelism

# In which instances may leave the network to the others: each works out circuits and times. After the last, those that
# stay have what they got beside the others.
MOST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Home:
    """The GPUs of an instance, and how it uses them."""

    parallelism: Parallelism
    gpus: Ints  # [rank]; under AFD attention before FFN

    @property
    def replicas(self) -> Ints:
        """[attention replica, rank]"""
        p = self.parallelism
        held = self.gpus[: p.attention_gpus] if p.afd else self.gpus
        return held.reshape(-1, p.tp)


@dataclass(frozen=True, slots=True)
class KvWish:
    """A request that is to go on elsewhere: places in the list of homes."""

    source: int
    destination: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class KvMoved:
    """What became of them."""

    ready_s: Floats  # [home]: its last KV is there, over the network or computed again
    transferred: tuple[bool, ...]  # [wish]; else computed again
    bytes: float  # over GPUs' links
    recomputed_tokens: int
    tier_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return float(self.ready_s.max(initial=0.0))


@dataclass(frozen=True, slots=True)
class _Shares:
    """Of all wishes: bytes from GPU to GPU, and whose they are."""

    src: Ints
    dst: Ints
    bytes: Floats
    wish: Ints


def move_kv(
    homes: Sequence[Home],
    wishes: Sequence[KvWish],
    kv_bytes_per_token: float,
    prefill_tokens_per_s: Floats,  # [home]
    fabric: SimulatedFabric,
) -> KvMoved:
    """Whoever would have its instance's KV sooner by computing it again does so, instance by instance, and leaves the
    network to the others."""
    again_s = _recompute_s(len(homes), wishes, prefill_tokens_per_s)
    by_network = np.ones(len(homes), dtype=np.bool_)
    shares = _shares(homes, wishes, kv_bytes_per_token)
    destination = np.array([wish.destination for wish in wishes], np.int64)
    ready_s, sent_bytes, tiers = again_s, 0.0, dict[str, float]()
    for _ in range(MOST_ROUNDS):
        sent = by_network[destination][shares.wish]
        some = _only(shares, sent)
        flows, of = _merged(some)
        if not len(flows):
            ready_s, sent_bytes, tiers = np.where(by_network, 0.0, again_s), 0.0, {}
            break
        network = fabric.network(Period.of("KV", FabricStage.GEN, flows))
        arrived_s = _arrived_s(network, flows, of, destination[some.wish], len(homes))
        later = by_network & (arrived_s > again_s)
        by_network = by_network & ~later
        ready_s = np.where(by_network, arrived_s, again_s)
        kept = by_network[destination[some.wish]]
        sent_bytes, tiers = float(some.bytes[kept].sum()), _tier_bytes(network, _only(some, kept))
        if not later.any():
            break
    transferred = tuple(bool(each) for each in by_network[destination])
    again = sum(wish.context_tokens for wish, sent in zip(wishes, transferred, strict=True) if not sent)
    return KvMoved(ready_s, transferred, sent_bytes, again, tiers)


def kv_flows(homes: Sequence[Home], wishes: Sequence[KvWish], kv_bytes_per_token: float) -> GpuFlows:
    """One flow for each two GPUs."""
    return _merged(_shares(homes, wishes, kv_bytes_per_token))[0]


def _only(shares: _Shares, these: NDArray[np.bool_]) -> _Shares:
    return _Shares(shares.src[these], shares.dst[these], shares.bytes[these], shares.wish[these])


def _tier_bytes(network: LinkNetwork, shares: _Shares) -> dict[str, float]:
    return {tier.value: size for tier, size in tier_bytes(network, _merged(shares)[0]).items()}


def kv_tier_bytes(
    homes: Sequence[Home], wishes: Sequence[KvWish], kv_bytes_per_token: float, fabric: SimulatedFabric
) -> dict[str, float]:
    """Of KV that goes when it likes, over the fabric as it is at rest."""
    shares = _shares(homes, wishes, kv_bytes_per_token)
    return _tier_bytes(fabric.network(None), shares) if len(shares.src) else {}


def _recompute_s(homes: int, wishes: Sequence[KvWish], prefill_tokens_per_s: Floats) -> Floats:
    """[home]"""
    at = np.array([wish.destination for wish in wishes], np.int64)
    tokens = np.array([wish.context_tokens for wish in wishes], np.float64)
    return np.bincount(at, tokens / prefill_tokens_per_s[at], homes).astype(np.float64)


def _shares(homes: Sequence[Home], wishes: Sequence[KvWish], kv_bytes_per_token: float) -> _Shares:
    """Replicas of either side take the requests in turn."""
    replicas = [home.replicas for home in homes]
    gone, come = np.zeros(len(homes), np.int64), np.zeros(len(homes), np.int64)
    rows: list[tuple[int, int, float, int]] = []
    for number, wish in enumerate(wishes):
        a, b = wish.source, wish.destination
        source = replicas[a][gone[a] % len(replicas[a])]
        destination = replicas[b][come[b] % len(replicas[b])]
        gone[a] += 1
        come[b] += 1
        kv_bytes = wish.context_tokens * kv_bytes_per_token
        for src, dst, share in _overlaps(source, destination):
            if src != dst:
                rows.append((src, dst, share * kv_bytes, number))
    if not rows:
        none = GpuFlows.none()
        return _Shares(none.src, none.dst, none.bytes, none.src)
    from_gpu, to_gpu, size, wish_of = (np.array(each) for each in zip(*rows, strict=True))
    return _Shares(from_gpu, to_gpu, size, wish_of)


def _overlaps(source: Ints, destination: Ints) -> list[tuple[int, int, float]]:
    """Of heads spread evenly over either side, who has what of whom; shares add up to 1."""
    a, b = len(source), len(destination)
    cuts = sorted({*(i * b for i in range(a + 1)), *(j * a for j in range(b + 1))})  # in parts of 1 / (a * b)
    return [
        (int(source[first // b]), int(destination[first // a]), (last - first) / (a * b))
        for first, last in itertools.pairwise(cuts)
    ]


def _merged(shares: _Shares) -> tuple[GpuFlows, Ints]:
    """And which flow each share goes with."""
    if not len(shares.src):
        return GpuFlows.none(), np.empty(0, np.int64)
    ends = np.stack([shares.src, shares.dst])
    pairs, of = np.unique(ends, axis=1, return_inverse=True)
    of = of.reshape(-1)
    return GpuFlows(pairs[0], pairs[1], np.bincount(of, shares.bytes).astype(np.float64)), of


def _arrived_s(network: LinkNetwork, flows: GpuFlows, of: Ints, destination: Ints, homes: int) -> Floats:
    """[home]"""
    arrived_s = np.zeros(homes)
    if len(flows):
        routes = routes_of(network, flows)
        ends_s = finish_routed_s(network, flows, routes) + routes.latency_s
        np.maximum.at(arrived_s, destination, ends_s[of])
    return arrived_s


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
        """Return bytes by tier of KV that nothing waits for."""
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
