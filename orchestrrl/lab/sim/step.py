"""The shortest generation step over simulated engines if every length were known: the oracle of the demo. Pure.

Every request is there at time 0. The oracle searches placements (longest first onto the least loaded engine; the
longest packed together and the rest spread) and takes the best; it is not proven optimal, so `lower_bound_s` stands
beside it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from orchestrrl.lab.sim.static import drained
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.scheduler import EngineShape, Scheduler, decode_alone_s
from planner.model import RequestId

# Requests on the engine that takes the longest, and on the next one.
PACKED_LONGEST = (1, 2, 3, 4, 6, 8, 12)
PACKED_NEXT = (20, 30, 40)


def placed_s(
    shape: EngineShape, requests: Mapping[RequestId, SimRequest], placement: Sequence[Sequence[RequestId]]
) -> float:
    """Return the seconds until the last answer; `placement`: of each engine, its requests in order of submission."""
    ends_s = [0.0]
    for ids in placement:
        engine = Scheduler(shape)
        for request in ids:
            requests[request].submit(engine, 0.0)
        ends_s += drained(engine)
    return max(ends_s)


def best_placed_s(
    shape: EngineShape, requests: Mapping[RequestId, SimRequest], routed: Sequence[Sequence[RequestId]]
) -> float:
    """The shortest step found. `routed`: the placement that OrchestrRL's gateway would begin with."""
    placements = (routed, *_placements(len(routed), list(requests.values())))
    return min(placed_s(shape, requests, placement) for placement in placements)


def lower_bound_s(shape: EngineShape, requests: Iterable[SimRequest]) -> float:
    """No schedule is shorter: the longest single request on an engine of its own."""
    return max(decode_alone_s(shape, request.prompt_tokens, request.output_tokens) for request in requests)


def _placements(engines: int, requests: Sequence[SimRequest]) -> Iterator[list[list[RequestId]]]:
    longest_first = sorted(requests, key=lambda request: (-request.output_tokens, request.id))
    loads, placement = [0] * engines, [[] for _ in range(engines)]  # type: tuple[list[int], list[list[RequestId]]]
    for request in longest_first:
        target = loads.index(min(loads))
        placement[target].append(request.id)
        loads[target] += request.prompt_tokens + request.output_tokens
    yield placement
    if engines < 3:
        return
    for longest in PACKED_LONGEST:
        for following in PACKED_NEXT:
            rest = longest_first[longest + following :]
            packed = [
                [request.id for request in longest_first[:longest]],
                [request.id for request in longest_first[longest : longest + following]],
            ]
            yield packed + [[request.id for request in rest[k :: engines - 2]] for k in range(engines - 2)]
