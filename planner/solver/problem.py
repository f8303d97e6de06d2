"""The types of the makespan problem and of its solution, which `makespan.solve` computes.

Requests are stored as columns, because a problem may have hundreds of thousands of them.
"""

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.profile import Curve
from planner.model import Configuration, ConfigurationId, EngineId, GpuId, RequestId

Floats = NDArray[np.float64]

NOWHERE = -1

RUNNING, WAITING, NEW = 0, 1, 2  # values of Requests.state


@dataclass(frozen=True, slots=True)
class KvTransferCost:
    """The cost, in seconds, of moving a request by KV transfer over per-GPU links or by recomputing its context.

    An engine receives or recomputes one context after the other. The fixed costs are paid once for all requests that
    arrive together by the same method, and do not stop the engine's decoding. A rate of 0 means that the link does not
    exist.
    """

    inter_node_gbps_per_gpu: float
    intra_node_gbps_per_gpu: float
    latency_s: float  # of each transfer
    rebuilt_tokens: Curve | None = None  # as a function of the context's tokens, see MoveCosts; None: all of them
    _: KW_ONLY
    kv_bytes_per_token: float = 0.0
    transfer_fixed_s: float = 0.0
    recompute_fixed_s: float = 0.0

    def recompute_s(
        self, context_tokens: NDArray[np.float64], tokens_per_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the time in seconds to recompute each context at the given prefill rates, without the fixed cost."""
        rebuilt = context_tokens if self.rebuilt_tokens is None else self.rebuilt_tokens.over(context_tokens)
        return rebuilt / tokens_per_s

    def transfer_s(
        self, context_tokens: NDArray[np.float64], gpus: NDArray[np.int64], inside: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Return the time in seconds to transfer each context over the links of `gpus` GPUs, without the fixed cost.

        `inside` is True for transfers inside a node. The result is infinite if there is no link. The arguments are
        broadcast.
        """
        rate_gbps = gpus * np.where(inside, self.intra_node_gbps_per_gpu, self.inter_node_gbps_per_gpu)
        with np.errstate(divide="ignore", invalid="ignore"):
            wire_s = context_tokens * self.kv_bytes_per_token * 8 / (rate_gbps * 1e9)
        seconds: NDArray[np.float64] = np.where(rate_gbps > 0, wire_s, np.inf) + self.latency_s
        return seconds


@dataclass(frozen=True, slots=True)
class CurrentInstance:
    """A current engine, which runs a configuration on a set of GPUs."""

    id: EngineId
    configuration: ConfigurationId
    gpus: tuple[GpuId, ...]  # ascending


@dataclass(frozen=True, slots=True)
class ProblemRequests:
    """The requests of a problem as columns, in input order."""

    ids: tuple[RequestId, ...]
    context_tokens: NDArray[np.int64]  # [request], resident or to be rebuilt
    remaining_tokens: NDArray[np.int64]  # [request], at least 1
    instance: NDArray[np.int64]  # [request], index into Problem.current, NOWHERE for new ones
    state: NDArray[np.int8]  # [request], RUNNING | WAITING | NEW


@dataclass(frozen=True, slots=True)
class KvBalance:
    """The soft constraint of equation 2 of the paper: the ratio of KV footprint to capacity on each instance should be
    within mu ± delta."""

    mu: float
    delta: float


@dataclass(frozen=True, slots=True)
class MakespanProblem:
    gpus_count: int
    per_node: int
    configurations: tuple[Configuration, ...]
    transfer: KvTransferCost
    current: tuple[CurrentInstance, ...]
    requests: ProblemRequests
    epsilon_s: float
    kv_balance: KvBalance | None = None
    work_budget: int | None = None  # deterministic bound on the search


@dataclass(frozen=True, slots=True)
class PlacedInstance:
    """One instance of a solution. `requests` are indices into the problem's requests, in order of admission."""

    id: EngineId
    configuration: ConfigurationId
    gpus: tuple[GpuId, ...]
    requests: NDArray[np.int64]
    kept: bool
    decode_s: float
    migration_s: float
    switch_s: float

    @property
    def finish_s(self) -> float:
        return self.decode_s + self.migration_s + self.switch_s


class Migration(NamedTuple):
    """A running request that moves to another instance."""

    request: int  # index
    source: EngineId
    destination: EngineId
    method: str  # transfer | recompute
    cost_s: float


@dataclass(frozen=True, slots=True)
class Solution:
    """The solver's result. If there is a current fleet, the decision is `keep` unless a change shortens the makespan by
    more than the problem's `epsilon_s`."""

    decision: str  # reconfigure | rebalance | keep
    reason: str
    makespan_s: float
    current_makespan_s: float | None  # None without a current fleet, or if a request does not fit its instance
    lower_bound_s: float  # proven, under the cost model of evaluate.py
    kv_balance_violation: float
    instances: tuple[PlacedInstance, ...]
    migrations: tuple[Migration, ...]

    @property
    def gap(self) -> float | None:
        """The relative gap between the makespan and its lower bound, or None if the proven bound is 0 and the makespan
        is not."""
        if self.makespan_s <= self.lower_bound_s:
            return 0.0
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else None


class Infeasible(ValueError):
    """Raised if no fleet can serve the requests. `limit` describes the exceeded limit, `needed` is the required amount,
    and `available` is the smaller amount that exists."""

    def __init__(self, limit: str, needed: float, available: float, unit: str) -> None:
        super().__init__(f"{limit}: {needed:g} {unit} needed, {available:g} available")
        self.limit, self.needed, self.available, self.unit = limit, needed, available, unit
