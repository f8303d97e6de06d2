"""The types of weight sync: shards with their holders and receivers, and the waves of edges that carry them.

Ids are stored once. Elsewhere, pods, ToRs, endpoints and shards are referred to by their index in the tuples of ids.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
BITS = 8e-9  # gigabits per byte


@dataclass(frozen=True, slots=True)
class Shard:
    """One part of the weights. An endpoint that already holds the shard is not one of its receivers."""

    id: str
    bytes: int
    holders: tuple[int, ...]  # endpoints
    receivers: tuple[int, ...]  # endpoints, none of them a holder

    def __post_init__(self) -> None:
        if self.bytes < 1:
            raise ValueError(f"bytes must be >= 1, got {self.bytes}")
        if self.receivers and not self.holders:
            raise ValueError(f"shard {self.id} has receivers but no holder")
        if both := set(self.holders) & set(self.receivers):
            raise ValueError(f"endpoints {sorted(both)} must not both hold and receive shard {self.id}")


@dataclass(frozen=True, slots=True)
class ShardPairs:
    """The fixed connections between pods: existing circuits, or a network across sites. No other pods are connected."""

    circuits: Ints  # [pod, pod], per direction
    gbps: Floats  # [pod, pod], per circuit

    def __post_init__(self) -> None:
        for name, values in (("circuits", self.circuits), ("gbps", self.gbps)):
            if values.ndim != 2 or values.shape[0] != values.shape[1] or (values != values.T).any():
                raise ValueError(
                    f"{name} between pods must be a symmetric square matrix,"
                    f" got an asymmetric array of shape {values.shape}"
                )
            if (values < 0).any() or values.diagonal().any():
                raise ValueError(
                    f"{name} must be >= 0 between pods and 0 within each pod, got a minimum of {values.min()} and"
                    f" the values {values.diagonal()} within pods"
                )
        if ((self.circuits > 0) & (self.gbps <= 0)).any():
            raise ValueError(f"circuits between pods must have gbps > 0, got {self.gbps[self.circuits > 0].min()}")


def pairs_of(pods: Mapping[str, int], links: Iterable[tuple[str, str, int, float]]) -> ShardPairs:
    """Build the connections between pods. `pods` maps the name of each pod to its index. Each of `links` has two pods,
    the number of circuits per direction, and the Gbps per circuit."""
    circuits, gbps = np.zeros((len(pods), len(pods)), dtype=np.int64), np.zeros((len(pods), len(pods)))
    for a, b, count, rate_gbps in links:
        for one, other in ((pods[a], pods[b]), (pods[b], pods[a])):
            circuits[one, other], gbps[one, other] = count, rate_gbps
    return ShardPairs(circuits, gbps)


@dataclass(frozen=True, slots=True)
class SyncProblem:
    """The shards to send, and the capacities of the site when the plan is made. At most `boundary_circuits` circuits
    leave or enter a pod, counting both directions together. Traffic out of a ToR and traffic into it each stay within
    `tor_gbps`, and traffic out of an endpoint and traffic into it each stay within `nic_gbps`."""

    link_gbps: float
    pods: tuple[str, ...]
    boundary_circuits: Ints  # [pod]
    tors: tuple[str, ...]
    tor_gbps: Floats  # [ToR], circuits upwards times the link rate
    endpoints: tuple[str, ...]
    pod: Ints  # [endpoint]
    tor: Ints  # [endpoint]
    nic_gbps: Floats  # [endpoint]
    shards: tuple[Shard, ...]
    chunk_bytes: int
    hop_latency_s: float
    pairs: ShardPairs | None = None  # None: circuits between any two pods, at `link_gbps`, within the boundaries

    def __post_init__(self) -> None:
        if self.pairs is not None and len(self.pairs.circuits) != len(self.pods):
            raise ValueError(f"pairs must have {len(self.pods)} pods, got {len(self.pairs.circuits)}")
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
        """The rate of the fastest circuit into each pod in Gbps, as an array indexed by pod."""
        if self.pairs is None:
            return np.full(len(self.pods), self.link_gbps)
        fastest: Floats = np.where(self.pairs.circuits > 0, self.pairs.gbps, 0.0).max(axis=0, initial=0.0)
        return fastest

    def circuit_gbps(self, src_pod: int, dst_pod: int) -> float:
        return self.link_gbps if self.pairs is None else float(self.pairs.gbps[src_pod, dst_pod])


@dataclass(frozen=True, slots=True)
class WaveEdges:
    """The edges that run concurrently in one wave, as columns with one entry per edge."""

    shard: Ints
    offset: Ints  # bytes into the shard
    bytes: Ints
    src: Ints  # endpoint
    dst: Ints  # endpoint
    circuits: Ints  # 0 inside a pod (phase B), >= 1 between pods (phase A)
    rate_gbps: Floats
    above: Ints  # edges above it in this wave: it waits for one chunk each


@dataclass(frozen=True, slots=True)
class Wave:
    seconds: float
    edges: WaveEdges


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """The waves of a sync. `estimate_s` is the predicted duration of these waves. No plan takes less than
    `lower_bound_s`. `naive_s` is the shortest duration if holders send to every receiver directly."""

    waves: tuple[Wave, ...]
    estimate_s: float
    lower_bound_s: float
    naive_s: float


class Unreachable(ValueError):
    """Raised if no plan exists because a pod or ToR that shards must pass through has no connection."""


def edge_seconds(problem: SyncProblem, edges: WaveEdges) -> Floats:
    """Return the duration of each edge in seconds: the time to send its bytes at its rate, plus the time of one chunk
    and one hop for each edge above it."""
    chunk_s = problem.chunk_bytes * BITS / edges.rate_gbps
    return edges.bytes * BITS / edges.rate_gbps + edges.above * (chunk_s + problem.hop_latency_s)


def seconds_together(problem: SyncProblem, src: Ints, dst: Ints, circuits: Ints, gigabits: Floats) -> float:
    """Return the time in seconds that concurrent edges take within the capacities of NICs, ToRs and the edges'
    circuits. Each edge sends its entry of `gigabits`."""

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
