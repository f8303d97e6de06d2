"""The slice of the core that is kept for responses: the same circuits in every stage, whatever is announced. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from planner.fabric.allocate import AllocationProblem, algorithm3
from planner.fabric.core_lanes import place_in_core
from planner.fabric.ground import AggRoom, PlanGround
from planner.fabric.model import EndpointId, Pair, PortPair
from planner.fabric.topology import RESPONSES, Lane, PodRole


@dataclass(frozen=True, slots=True)
class ReservedSlice:
    core: tuple[PortPair, ...]
    lifts: tuple[PortPair, ...]
    notes: tuple[str, ...]


def reserve(ground: PlanGround, rooms: Mapping[EndpointId, AggRoom]) -> ReservedSlice:
    """Circuits between Gen and Train PoDs over the lanes kept for responses, each lane lifted to a ToR; takes ports of
    the rooms. What is up stays. Every Gen PoD gets one first."""
    lanes = ground.lanes_for(RESPONSES)
    wanted = _circuits(ground, {pod: len(own) for pod, own in lanes.items()})
    placed = place_in_core(ground, lanes, wanted)
    core, lifts, notes = lift_any(ground, rooms, placed.cross_connects)
    return ReservedSlice(core, lifts, tuple(f"the slice for responses: {note}" for note in notes))


def lift_any(
    ground: PlanGround, rooms: Mapping[EndpointId, AggRoom], cross_connects: Iterable[PortPair]
) -> tuple[tuple[PortPair, ...], tuple[PortPair, ...], tuple[str, ...]]:
    """Those that can be carried, what lifts their lanes, and what cannot be carried. ToRs take turns."""
    turns: Counter[EndpointId] = Counter()
    core, lifts, notes = [], [], []
    for each in sorted(cross_connects):
        ends = [ground.lane_at.get((each.switch, port)) for port in each.ports]
        lanes = [lane for lane in ends if lane is not None]
        chosen: list[EndpointId | None] = []
        for lane in lanes:  # both may end in one PoD, if somebody pinned such a circuit: not at one ToR
            chosen.append(_tor(rooms[ground.site.pod_of[lane.uplink]], lane, turns, chosen))
        if len(lanes) < len(ends) or None in chosen:
            dark = [ground.site.pod_of[lane.uplink] for lane, tor in zip(lanes, chosen, strict=True) if tor is None]
            notes.append(f"{each} leads nowhere, no ToR of {' or '.join(dark) or 'any PoD'} has a port for it")
            continue
        core.append(each)
        for lane, tor in zip(lanes, chosen, strict=True):
            room = rooms[ground.site.pod_of[lane.uplink]]
            assert tor is not None
            turns[tor] += 1
            if room.lifted_to(lane) is None:
                lifts.append(room.lift(lane, tor))
    return tuple(core), tuple(lifts), tuple(notes)


def _tor(
    room: AggRoom, lane: Lane, turns: Counter[EndpointId], taken: Collection[EndpointId | None]
) -> EndpointId | None:
    """What the lane is joined to; else the ToR with the fewest such lanes."""
    known = room.lifted_to(lane) or room.up_to(lane)
    if known is not None and known not in taken:
        return known
    free = [tor for tor in room.tors(lane) if tor not in taken]
    return min(free, key=lambda tor: (turns[tor], tor), default=None)


def _circuits(ground: PlanGround, ports: Mapping[EndpointId, int]) -> Mapping[Pair, int]:
    """As for a demand that is alike between all of them, but for the one that each Gen PoD is served first."""
    gen, train = (
        sorted(pod.id for pod in ground.site.pods if pod.role is role and ports.get(pod.id))
        for role in (PodRole.GEN, PodRole.TRAIN)
    )
    demand = {
        (one, other): 2.0 if number % len(train) == turn else 1.0
        for number, one in enumerate(gen)
        for turn, other in enumerate(train)
    }
    if not demand:
        return {}
    return algorithm3(AllocationProblem(ground.site.link_gbps, ports, demand)).circuits
