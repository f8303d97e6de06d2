"""Measure the plans of weight syncs: on regular sites, the ratio of a plan's duration to its lower bound, and on large
sites, the planning time.

The bound ignores that circuits are integral and that forwarding a chunk takes time. The naive plan, whose duration is
reported for comparison, is the best plan in which every receiver receives directly from a holder.
"""

import time
from dataclasses import dataclass

import numpy as np

from orchestrrl.lab.bench.figure import Figure
from planner.sync_tree.model import Shard, SyncPlan, SyncProblem
from planner.sync_tree.plan import make_plan

LINK_GBPS = 200.0
TOTAL_BYTES = 64_000_000_000
ENDPOINTS_OF_TOR = 8
AIM = 1.35  # target ratio to the bound
AIM_S = 5.0  # target planning time of the largest site


@dataclass(frozen=True, slots=True)
class SyncFamily:
    """A family of sites whose engines have `tp` adjacent endpoints each. Each of the `shards` shards is sent to one
    endpoint of every engine."""

    train: int  # PoDs
    gen: int  # PoDs
    size: int  # endpoints per PoD
    circuits: int  # circuits at each PoD's boundary
    tp: int
    shards: int
    holders: int = 2  # holders per shard

    def __str__(self) -> str:
        site = f"{self.train} + {self.gen} PoDs of {self.size}, {self.circuits} circuits"
        return f"{site}, {self.shards} shards to engines of {self.tp}"


FAMILIES = (
    SyncFamily(2, 6, 32, 8, 1, 16),
    SyncFamily(2, 6, 32, 8, 1, 64),
    SyncFamily(2, 6, 32, 8, 4, 16),
    SyncFamily(2, 6, 32, 8, 4, 64),
    SyncFamily(2, 6, 32, 8, 8, 16),
    SyncFamily(2, 6, 32, 8, 8, 64),
    SyncFamily(2, 6, 32, 4, 8, 64),
    SyncFamily(2, 6, 32, 2, 32, 16),
    SyncFamily(4, 4, 16, 16, 2, 48),
)
LARGEST = (
    SyncFamily(8, 24, 64, 16, 1, 32, holders=8),
    SyncFamily(8, 24, 64, 16, 4, 64, holders=8),
    SyncFamily(8, 24, 64, 8, 8, 64, holders=8),
)


def problem(family: SyncFamily) -> SyncProblem:
    pods = family.train + family.gen
    ends = pods * family.size
    pod = np.arange(ends) // family.size
    sending = np.flatnonzero(pod < family.train)
    receiving = np.flatnonzero(pod >= family.train)
    tor = np.arange(ends) // ENDPOINTS_OF_TOR
    shards = tuple(
        Shard(
            f"shard{number}",
            TOTAL_BYTES // family.shards,
            _holders(family, number, len(sending)),
            tuple(receiving[number % family.tp :: family.tp].tolist()),
        )
        for number in range(family.shards)
    )
    tors = int(tor.max()) + 1
    return SyncProblem(
        link_gbps=LINK_GBPS,
        pods=tuple(f"pod{number}" for number in range(pods)),
        boundary_circuits=np.full(pods, family.circuits, dtype=np.int64),
        tors=tuple(f"tor{number}" for number in range(tors)),
        tor_gbps=np.full(tors, ENDPOINTS_OF_TOR * LINK_GBPS),
        endpoints=tuple(f"end{number}" for number in range(ends)),
        pod=pod,
        tor=tor,
        nic_gbps=np.full(ends, LINK_GBPS),
        shards=shards,
        chunk_bytes=16 << 20,
        hop_latency_s=1e-5,
    )


def _holders(family: SyncFamily, number: int, sending: int) -> tuple[int, ...]:
    first = number * sending // family.shards
    return tuple(sorted({(first + 7 * copy) % sending for copy in range(family.holders)}))


def timed(family: SyncFamily) -> tuple[SyncPlan, float]:
    """Return the plan for a site of the family, and the planning time in CPU seconds."""
    asked = problem(family)
    started_s = time.process_time()
    plan = make_plan(asked)
    return plan, time.process_time() - started_s


def sync_plan() -> list[Figure]:
    """Measure the ratio of a plan's duration to its lower bound for all families of regular sites, and return a figure
    for the family with the highest ratio. Also compare the longest planning time on a large site with the target."""
    plans = {family: timed(family)[0] for family in FAMILIES}
    worst = max(plans, key=lambda family: plans[family].estimate_s / plans[family].lower_bound_s)
    found = plans[worst]
    large = {family: timed(family) for family in LARGEST}
    slowest = max(large, key=lambda family: large[family][1])
    ratios = [plan.estimate_s / plan.lower_bound_s for plan, _ in large.values()]
    bound = "lower bound of any plan, possibly not attainable"
    note = f"the worst of {len(plans)} regular families: {worst}; directly from the holders {found.naive_s:.3g} s"
    times = f"{min(ratios):.2f} to {max(ratios):.2f} times the bound (target: {AIM})"
    slow = f"the slowest of {len(large)}: {slowest}; {times}"
    return [
        Figure("sync_plan", found.estimate_s, "s of model time", bound, found.lower_bound_s, note),
        Figure("sync_plan_large", large[slowest][1], "CPU s", "target", AIM_S, slow),
    ]
