"""The vocabulary of weight sync: who holds which shards, who needs them, and the waves of edges that carry them.

Ids are kept once; everything else names pods, ToRs, endpoints and shards by their place in these tuples.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
BITS = 8e-9  # gigabits of a byte


@dataclass(frozen=True, slots=True)
class Shard:
    """One part of the weights. A receiver that holds it already needs nothing."""

    id: str
    bytes: int
    holders: tuple[int, ...]  # endpoints
    receivers: tuple[int, ...]  # endpoints, none of them a holder

    def __post_init__(self) -> None:
        if self.bytes < 1:
            raise ValueError(f"bytes must be >= 1, got {self.bytes}")
        if self.receivers and not self.holders:
            raise ValueError(f"shard {self.id} has receivers and no holder")
        if both := set(self.holders) & set(self.receivers):
            raise ValueError(f"endpoints {sorted(both)} hold shard {self.id} and are to receive it")


@dataclass(frozen=True, slots=True)
class ShardPairs:
    """What joins pods as they are: circuits that exist, or a network across sites. There is no way but these."""

    circuits: Ints  # [pod, pod], in each direction
    gbps: Floats  # [pod, pod], of each circuit

    def __post_init__(self) -> None:
        for name, values in (("circuits", self.circuits), ("gbps", self.gbps)):
            if values.ndim != 2 or values.shape[0] != values.shape[1] or (values != values.T).any():
                raise ValueError(f"{name} between pods must be the same in both directions")
            if (values < 0).any() or values.diagonal().any():
                raise ValueError(f"{name} between pods must be >= 0, and 0 inside one")
        if ((self.circuits > 0) & (self.gbps <= 0)).any():
            raise ValueError("circuits between pods must have gbps > 0")


def pairs_of(pods: Mapping[str, int], links: Iterable[tuple[str, str, int, float]]) -> ShardPairs:
    """`pods`: the place of each; `links`: between which two, how many circuits each way, and the rate of each."""
    circuits, gbps = np.zeros((len(pods), len(pods)), dtype=np.int64), np.zeros((len(pods), len(pods)))
    for a, b, count, rate_gbps in links:
        for one, other in ((pods[a], pods[b]), (pods[b], pods[a])):
            circuits[one, other], gbps[one, other] = count, rate_gbps
    return ShardPairs(circuits, gbps)


@dataclass(frozen=True, slots=True)
class SyncProblem:
    """A site at one moment. Circuits leaving a pod plus those arriving stay within `boundary_circuits`; what leaves a
    ToR, and what enters it, each stay within `tor_gbps`; what an endpoint sends, and what it receives, within
    `nic_gbps`."""

    link_gbps: float
    pods: tuple[str, ...]
    boundary_circuits: Ints  # [pod]
    tors: tuple[str, ...]
    tor_gbps: Floats  # [ToR], its circuits upwards times the link's rate
    endpoints: tuple[str, ...]
    pod: Ints  # [endpoint]
    tor: Ints  # [endpoint]
    nic_gbps: Floats  # [endpoint]
    shards: tuple[Shard, ...]
    chunk_bytes: int
    hop_latency_s: float
    pairs: ShardPairs | None = None  # None: circuits between any two pods, at `link_gbps`, as boundaries allow

    def __post_init__(self) -> None:
        if self.pairs is not None and len(self.pairs.circuits) != len(self.pods):
            raise ValueError(f"pairs must be of {len(self.pods)} pods, got {len(self.pairs.circuits)}")
        if not self.link_gbps > 0:
            raise ValueError(f"link_gbps must be > 0, got {self.link_gbps}")
        if self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be >= 1, got {self.chunk_bytes}")
        if not self.hop_latency_s >= 0:
            raise ValueError(f"hop_latency_s must be >= 0, got {self.hop_latency_s}")
        if len(self.nic_gbps) and not (self.nic_gbps > 0).all():
            raise ValueError(f"nic_gbps must be > 0, got {self.nic_gbps.min()}")

    @property
    def fastest_gbps(self) -> Floats:
        """[pod], of the fastest circuit that leads there."""
        if self.pairs is None:
            return np.full(len(self.pods), self.link_gbps)
        fastest: Floats = np.where(self.pairs.circuits > 0, self.pairs.gbps, 0.0).max(axis=0, initial=0.0)
        return fastest

    def circuit_gbps(self, src_pod: int, dst_pod: int) -> float:
        return self.link_gbps if self.pairs is None else float(self.pairs.gbps[src_pod, dst_pod])


@dataclass(frozen=True, slots=True)
class WaveEdges:
    """What runs at once in one wave, one edge at each place of the columns."""

    shard: Ints
    offset: Ints  # bytes into the shard
    bytes: Ints
    src: Ints  # endpoint
    dst: Ints  # endpoint
    circuits: Ints  # 0 inside a pod (phase B), >= 1 between pods (phase A)
    rate_gbps: Floats
    above: Ints  # edges above it in this wave: the chunks that it waits for


@dataclass(frozen=True, slots=True)
class Wave:
    seconds: float
    edges: WaveEdges


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """`estimate_s` is the model's time of exactly these waves; no plan can take less than `lower_bound_s`; `naive_s` is
    the best that every receiver straight from a holder could do."""

    waves: tuple[Wave, ...]
    estimate_s: float
    lower_bound_s: float
    naive_s: float


class Unreachable(ValueError):
    """No plan can carry what is asked for: there is no way into or out of a pod or a ToR that it has to pass."""


def edge_seconds(problem: SyncProblem, edges: WaveEdges) -> Floats:
    """Each edge's time: its bytes at its rate, after one chunk and one hop for each edge above it."""
    chunk_s = problem.chunk_bytes * BITS / edges.rate_gbps
    return edges.bytes * BITS / edges.rate_gbps + edges.above * (chunk_s + problem.hop_latency_s)


def seconds_together(problem: SyncProblem, src: Ints, dst: Ints, circuits: Ints, gigabits: Floats) -> float:
    """The time in which all of this fits through NICs, ToRs and its own circuits."""

    def slowest_s(keys: Ints, amounts: Floats, capacity_gbps: Floats) -> float:
        sums = np.bincount(keys, weights=amounts, minlength=len(capacity_gbps))
        used = sums > 0
        return float((sums[used] / capacity_gbps[used]).max(initial=0.0))

    between = problem.tor[src] != problem.tor[dst]
    out, into = problem.tor[src][between], problem.tor[dst][between]
    crossing = circuits > 0
    circuit_gbps: float | Floats = problem.link_gbps
    if problem.pairs is not None:
        circuit_gbps = problem.pairs.gbps[problem.pod[src[crossing]], problem.pod[dst[crossing]]]
    own_s = gigabits[crossing] / (circuits[crossing] * circuit_gbps)
    return max(
        slowest_s(src, gigabits, problem.nic_gbps),
        slowest_s(dst, gigabits, problem.nic_gbps),
        slowest_s(out, gigabits[between], problem.tor_gbps),
        slowest_s(into, gigabits[between], problem.tor_gbps),
        float(own_s.max(initial=0.0)),
    )
