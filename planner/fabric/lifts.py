"""Choose the lanes that carry core circuits, the ToR that each lane is connected to, and the response slice. Has no
side effects.

A core circuit connects two ToRs without a packet switch between them. Its two ToRs are therefore chosen together: the
pair with the most bytes per circuit. A lift is the cross-connect between a lane and a ToR. At first, only ToRs that
still need some of their planned lifts are considered, then all pairs of ToRs with traffic and free ports, and finally
any ToRs. The lanes reserved for responses (the response slice) have the same circuits in every stage and period.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from planner.fabric.allocate import AllocationProblem, algorithm3
from planner.fabric.ground import AggRoom, PlanGround
from planner.fabric.model import Cabling, EndpointId, OcsId, Pair, Port, PortPair, pair_of, port_pair
from planner.fabric.place import PlacedCircuits, PlacingProblem, place
from planner.fabric.sizing import Tors
from planner.fabric.topology import RESPONSES, Lane, PodRole

Due = tuple[OcsId, EndpointId]  # a ToR on a switch


def place_in_core(
    ground: PlanGround, lanes: Mapping[EndpointId, Iterable[Lane]], circuits: Mapping[Pair, int]
) -> PlacedCircuits:
    """Place circuits between PoDs on the core ports of the given lanes."""
    ports: dict[OcsId, dict[int, EndpointId]] = defaultdict(dict)
    for pod, own in lanes.items():
        for lane in own:
            ports[lane.core][lane.core_port] = pod
    cabling = Cabling(ports)
    up = frozenset(each for switch in ports for each in ground.up.get(switch, ()) if cabling.ends(each) is not None)
    return place(PlacingProblem(cabling, circuits, up))


def evened_out(
    placed: PlacedCircuits, lanes: Mapping[EndpointId, Iterable[Lane]], rooms: Mapping[EndpointId, AggRoom]
) -> tuple[PortPair, ...]:
    """Move new circuits to the core lanes that end on the aggregation switches with the most free ToR ports. The number
    of circuits per core switch does not change. Two ToRs can only be connected on a switch where both have a free port,
    so lifts must not use all ports of one switch."""
    kept = frozenset(placed.kept)
    taken = {port for each in kept for port in each.sides}
    left = {switch: count for room in rooms.values() for switch, count in room.ports_on().items()}
    pod_at: dict[tuple[OcsId, int], EndpointId] = {}
    free: dict[tuple[EndpointId, OcsId], dict[OcsId, list[int]]] = defaultdict(lambda: defaultdict(list))
    for pod, own in lanes.items():
        for lane in own:
            pod_at[lane.ends[1]] = pod
            if lane.ends[1] in taken:
                left[lane.agg] -= 1
            else:
                free[pod, lane.core][lane.agg].append(lane.core_port)
    chosen = list(kept)
    for each in placed.cross_connects:
        if each not in kept:
            ends = []
            for port in each.sides:
                choice = free[pod_at[port], each.switch]
                agg = max(
                    (switch for switch, ports in choice.items() if ports), key=lambda switch: (left[switch], switch)
                )
                ends.append(choice[agg].pop(0))
                left[agg] -= 1
            chosen.append(port_pair(each.switch, *ends))
    return tuple(sorted(chosen))


@dataclass(slots=True)
class Lifted:
    core: list[PortPair] = field(default_factory=list)  # carried at both ends
    lifts: list[PortPair] = field(default_factory=list)
    # dropped core circuits, by the PoD that cannot carry them
    not_carried: Counter[EndpointId] = field(default_factory=Counter)
    circuits: Counter[Tors] = field(default_factory=Counter)


def lift_all(
    cross_connects: Iterable[PortPair],
    lane_at: Mapping[Port, Lane],
    rooms: Mapping[EndpointId, AggRoom],
    pod_of: Mapping[EndpointId, EndpointId],
    budget: Mapping[Due, int],
    between: Mapping[Pair, Mapping[Tors, float]],
    most: Mapping[Tors, int],
) -> Lifted:
    """Connect the lanes of core circuits to ToRs on free ports of `rooms`. `budget` contains the planned number of
    lifts per switch and ToR. `between` contains the bytes between ToRs; in each pair of ToRs, the ToR of the PoD with
    the smaller id comes first. `most` contains the maximum number of circuits per pair of ToRs; pairs that are not in
    `most` are not limited."""
    work = _Lifting(rooms, dict(budget), between, most)
    todo = []
    for core in sorted(cross_connects):
        one, other = map(lane_at.__getitem__, core.sides)
        if pod_of[one.uplink] > pod_of[other.uplink]:
            one, other = other, one
        todo.append((core, (pod_of[one.uplink], one), (pod_of[other.uplink], other)))
    todo = [each for each in todo if not work.keep(*each)]
    todo = [each for each in todo if not work.lift(*each, work.may)]
    todo = [each for each in todo if not work.lift(*each, work.can)]
    for each in todo:
        work.lift_anywhere(*each)
    return work.result


_End = tuple[EndpointId, Lane]  # a PoD and its lane


class _Lifting:
    def __init__(
        self,
        rooms: Mapping[EndpointId, AggRoom],
        budget: dict[Due, int],
        between: Mapping[Pair, Mapping[Tors, float]],
        most: Mapping[Tors, int],
    ) -> None:
        self._rooms = rooms
        self._budget = budget
        self._between = {pair: dict(sorted(flows.items())) for pair, flows in between.items()}
        self._most = most
        self.result = Lifted()

    def keep(self, core: PortPair, one: _End, other: _End) -> bool:
        """Keep both lifts of the core circuit if they are up and still needed; return whether they were kept."""
        tors = self._rooms[one[0]].up_to(one[1]), self._rooms[other[0]].up_to(other[1])
        if tors[0] is None or tors[1] is None or not (self._due(one, tors[0]) and self._due(other, tors[1])):
            return False
        if (tors[0], tors[1]) not in self._between.get(pair_of(one[0], other[0]), {}):
            return False
        if self._has_all((tors[0], tors[1])):
            return False
        self._take(core, (one, tors[0]), (other, tors[1]))
        return True

    def lift(self, core: PortPair, one: _End, other: _End, allowed: Callable[[_End, EndpointId], bool]) -> bool:
        """Connect both lanes of the core circuit to the allowed pair of ToRs with the most bytes per circuit. Return
        False if no pair is allowed."""
        best, most = None, (0.0, 0)
        for (first, second), sent_bytes in self._between.get(pair_of(one[0], other[0]), {}).items():
            share = sent_bytes / (self.result.circuits[first, second] + 1)
            if (
                share < most[0]
                or self._has_all((first, second))
                or not (allowed(one, first) and allowed(other, second))
            ):
                continue
            # Ties go to the ToRs with the most ports on these switches, so that the free ports of different ToRs do not
            # end up on different switches.
            left = self._rooms[one[0]].left(one[1], first) + self._rooms[other[0]].left(other[1], second)
            if (share, left) > most:
                best, most = (first, second), (share, left)
        if best is not None:
            self._take(core, (one, best[0]), (other, best[1]))
        return best is not None

    def lift_anywhere(self, core: PortPair, one: _End, other: _End) -> None:
        first_tor, second_tor = self._any(one), self._any(other)
        if first_tor is None or second_tor is None:
            self.result.not_carried[one[0]] += first_tor is None
            self.result.not_carried[other[0]] += second_tor is None
            return
        self._take(core, (one, first_tor), (other, second_tor))

    def _has_all(self, tors: Tors) -> bool:
        return tors in self._most and self.result.circuits[tors] >= self._most[tors]

    def _due(self, end: _End, tor: EndpointId) -> int:
        """Return the number of planned lifts that the ToR still needs on the switch where the lane ends."""
        return max(0, self._budget.get((end[1].agg, tor), 0))

    def may(self, end: _End, tor: EndpointId) -> bool:
        return self._due(end, tor) > 0 and self.can(end, tor)

    def can(self, end: _End, tor: EndpointId) -> bool:
        return self._rooms[end[0]].left(end[1], tor) > 0

    def _any(self, end: _End) -> EndpointId | None:
        """Return the current ToR of the lane if this ToR still needs a lift. Otherwise return the ToR that needs the
        most lifts, or None if no ToR has a free port."""
        room, lane = self._rooms[end[0]], end[1]
        up = room.up_to(lane)
        if up is not None and self._due(end, up) > 0:
            return up
        tors = room.tors(lane)
        return max(tors, key=lambda tor: (self._due(end, tor), room.left(lane, tor), tor), default=None)

    def _take(self, core: PortPair, *ends: tuple[_End, EndpointId]) -> None:
        self.result.core.append(core)
        for (pod, lane), tor in ends:
            self.result.lifts.append(self._rooms[pod].lift(lane, tor))
            self._budget[lane.agg, tor] = self._budget.get((lane.agg, tor), 0) - 1
        self.result.circuits[ends[0][1], ends[1][1]] += 1


# Core circuits that can be carried, their lifts, and notes on those that cannot.
Carried = tuple[tuple[PortPair, ...], tuple[PortPair, ...], tuple[str, ...]]


def reserve(ground: PlanGround, rooms: Mapping[EndpointId, AggRoom]) -> Carried:
    """Return the circuits between Gen and Train PoDs over the lanes reserved for responses, the lifts of these lanes to
    ToRs, and notes on circuits that cannot be carried. The lifts use free ports of `rooms`. Existing circuits stay, and
    every Gen PoD gets its first circuit before any Gen PoD gets a second one."""
    lanes = ground.lanes_for(RESPONSES)
    wanted = _circuits(ground, {pod: len(own) for pod, own in lanes.items()})
    placed = place_in_core(ground, lanes, wanted)
    return lift_any(ground, rooms, placed.cross_connects)


def lift_any(ground: PlanGround, rooms: Mapping[EndpointId, AggRoom], cross_connects: Iterable[PortPair]) -> Carried:
    """Connect the lanes of these core circuits, round-robin, to any ToRs that have free ports. Return the circuits that
    can be carried, the new lifts, and a note on each circuit that cannot be carried."""
    turns: Counter[EndpointId] = Counter()
    core, lifts, notes = [], [], []
    for each in sorted(cross_connects):
        ends = list(map(ground.site.lane_at.get, each.sides))
        lanes = [lane for lane in ends if lane is not None]
        chosen: list[EndpointId | None] = []
        for lane in lanes:  # a pinned circuit may have both ends in one PoD, but must not end at one ToR
            chosen.append(_tor(rooms[ground.site.pod_of[lane.uplink]], lane, turns, chosen))
        if len(lanes) < len(ends) or None in chosen:
            dark = [ground.site.pod_of[lane.uplink] for lane, tor in zip(lanes, chosen, strict=True) if tor is None]
            notes.append(f"{each} carries nothing, as no ToR of {' or '.join(dark) or 'any PoD'} has a port for it")
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
    """Return the ToR that the lane is connected to, unless it is in `taken`. Otherwise return, of the ToRs with a free
    port that are not in `taken`, the one with the fewest lanes in `turns`. Return None if there is no such ToR."""
    known = room.lifted_to(lane) or room.up_to(lane)
    if known is not None and known not in taken:
        return known
    free = [tor for tor in room.tors(lane) if tor not in taken]
    return min(free, key=lambda tor: (turns[tor], tor), default=None)


def _circuits(ground: PlanGround, ports: Mapping[EndpointId, int]) -> Mapping[Pair, int]:
    """Allocate circuits as if each Gen PoD sent twice as much to one Train PoD as to each of the others. This Train PoD
    is chosen round-robin. `ports` contains the number of lanes of each PoD."""
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
