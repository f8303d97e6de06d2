"""How soon a homogeneous fleet ends the requests in flight: one estimate per configuration. Pure.

Requests are spread longest first onto the least loaded instance; what runs already is admitted before what waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from planner.cost import DoesNotFit, Pending, decode_s, lower_bound_s, work_s
from planner.model import Configuration, ConfigurationId, EngineId


@dataclass(frozen=True, slots=True)
class Job:
    """One request with its estimate, and where it is now."""

    pending: Pending
    running: bool = False
    engine: EngineId | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a fleet would take. `rebuild_s` is the slowest instance's prefill of running requests that came to it."""

    makespan_s: float
    rebuild_s: float
    lower_bound_s: float


def instances_that_fit(configuration: Configuration, gpus_count: int, per_node: int) -> int:
    """Instances on `gpus_count` GPUs: those of at most a node stay inside one, larger ones take whole nodes."""
    nodes, rest = divmod(gpus_count, per_node)
    if configuration.gpus <= per_node:
        return nodes * (per_node // configuration.gpus) + rest // configuration.gpus
    nodes_each, odd = divmod(configuration.gpus, per_node)
    return 0 if odd else nodes // nodes_each


def why_none_fits(configuration: Configuration, gpus_count: int, per_node: int) -> str:
    """The reason where `instances_that_fit` is 0, for people."""
    if configuration.gpus > per_node and configuration.gpus % per_node:
        return f"an instance of {configuration.gpus} GPUs is neither inside a node of {per_node} nor whole nodes"
    return f"an instance takes {configuration.gpus} GPUs; there are {gpus_count} in nodes of {per_node}"


def spread(configuration: Configuration, instances: int, jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs by instance, each list in the order of admission."""
    fleet: list[list[Job]] = [[] for _ in range(instances)]
    loads = [(0.0, place) for place in range(instances)]
    for job in sorted(jobs, key=lambda job: -job.pending.remaining_tokens):
        load_s, place = heappop(loads)
        # The first job on an instance is its longest, and pays for the iterations of all.
        floor_s = 0.0 if fleet[place] else configuration.alpha_s * job.pending.remaining_tokens
        fleet[place].append(job)
        heappush(loads, (load_s + floor_s + work_s(configuration, job.pending), place))
    return [in_order_of_admission(held) for held in fleet]


def in_order_of_admission(jobs: Sequence[Job]) -> list[Job]:
    """What runs first, then what waits; each in the order given."""
    return sorted(jobs, key=lambda job: not job.running)


def estimate(configuration: Configuration, instances: int, jobs: Sequence[Job]) -> Estimate:
    """Makespan of `jobs` spread over equal instances. Raises DoesNotFit."""
    makespan_s = rebuild_s = 0.0
    for held in spread(configuration, instances, jobs):
        makespan_s = max(makespan_s, decode_s(configuration, [job.pending for job in held]))
        moved_tokens = sum(job.pending.context_tokens for job in held if job.running)
        rebuild_s = max(rebuild_s, moved_tokens / configuration.prefill_tokens_per_s)
    bound_s = lower_bound_s(configuration, instances, [job.pending for job in jobs])
    return Estimate(makespan_s, rebuild_s, bound_s)


def as_placed_s(
    configurations: Mapping[ConfigurationId, Configuration],
    engines: Mapping[EngineId, ConfigurationId | None],
    jobs: Sequence[Job],
) -> float | None:
    """Makespan of the fleet as it stands, jobs that are on no engine dealt in turn; None where it cannot be told."""
    names = sorted(engines)
    if not names or any(engines[name] not in configurations for name in names):
        return None
    held: dict[EngineId, list[Job]] = {name: [] for name in names}
    homeless = [job for job in jobs if job.engine not in held]
    for job in jobs:
        if job.engine in held:
            held[job.engine].append(job)
    for turn, job in enumerate(homeless):
        held[names[turn % len(names)]].append(job)
    try:
        return max(
            decode_s(_known(configurations, engines[name]), [job.pending for job in in_order_of_admission(held[name])])
            for name in names
        )
    except DoesNotFit:
        return None


def _known(configurations: Mapping[ConfigurationId, Configuration], name: ConfigurationId | None) -> Configuration:
    assert name is not None
    return configurations[name]
