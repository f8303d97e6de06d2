"""What a static fleet could do if every length were known: a mark beside the arms. Pure.

Requests are spread (longest first onto the least loaded) or packed (contiguous blocks of the descending order, which
keeps the longest together); of all configurations, the best.
"""

from collections.abc import Sequence

from orchestrrl.sim.engines import EngineKind, homogeneous
from orchestrrl.sim.scenario import Scenario
from orchestrrl.sim.static import StaticStep, run_static
from orchestrrl.sim.workload import SimRequest
from planner.cost import Pending, work_s
from planner.model import Configuration

BISECTIONS = 40


def best_known(
    scenario: Scenario, kinds: Sequence[EngineKind], requests: Sequence[SimRequest]
) -> tuple[EngineKind, StaticStep]:
    """The shortest step found, and the configuration of its engines."""
    tried = []
    for kind in kinds:
        engines = len(homogeneous(kind, scenario.gpus, scenario.gpus_per_node))
        configuration = kind.profile.configuration((1.0, max(2.0, len(requests) / engines)))
        for place in (spread, packed):
            tried.append((kind, run_static(kind, place(configuration, engines, requests))))
    return min(tried, key=lambda found: found[1].makespan_s)


def _pending(request: SimRequest) -> Pending:
    return Pending(request.prompt_tokens, request.output_tokens)


def _longest_first(requests: Sequence[SimRequest]) -> list[SimRequest]:
    return sorted(requests, key=lambda request: (-request.output_tokens, request.id))


def spread(configuration: Configuration, engines: int, requests: Sequence[SimRequest]) -> list[list[SimRequest]]:
    placement: list[list[SimRequest]] = [[] for _ in range(engines)]
    loads_s = [0.0] * engines
    for request in _longest_first(requests):
        place = loads_s.index(min(loads_s))
        if not placement[place]:
            loads_s[place] += configuration.alpha_s * request.output_tokens
        loads_s[place] += work_s(configuration, _pending(request))
        placement[place].append(request)
    return placement


def packed(configuration: Configuration, engines: int, requests: Sequence[SimRequest]) -> list[list[SimRequest]]:
    """The shortest makespan for which the blocks, each filled as far as it goes, are no more than there are engines."""
    ordered = _longest_first(requests)
    high_s = sum(_alone_s(configuration, request) for request in ordered)
    low_s, best = 0.0, [ordered]
    for _ in range(BISECTIONS):
        middle_s = (low_s + high_s) / 2
        blocks = _blocks(configuration, ordered, middle_s, engines)
        if blocks is None:
            low_s = middle_s
        else:
            high_s, best = middle_s, blocks
    return best + [[] for _ in range(engines - len(best))]


def _blocks(
    configuration: Configuration, ordered: Sequence[SimRequest], makespan_s: float, engines: int
) -> list[list[SimRequest]] | None:
    blocks: list[list[SimRequest]] = []
    left_s, room = 0.0, 0
    for request in ordered:
        work, footprint = work_s(configuration, _pending(request)), request.prompt_tokens + request.output_tokens
        if not blocks or work > left_s or footprint > room or len(blocks[-1]) >= configuration.max_sequences:
            if len(blocks) == engines:
                return None
            blocks.append([])
            left_s = makespan_s - configuration.alpha_s * request.output_tokens
            room = configuration.kv_capacity_tokens
            if work > left_s or footprint > room:
                return None
        blocks[-1].append(request)
        left_s -= work
        room -= footprint
    return blocks


def _alone_s(configuration: Configuration, request: SimRequest) -> float:
    return configuration.alpha_s * request.output_tokens + work_s(configuration, _pending(request))
