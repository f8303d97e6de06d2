"""Which lanes carry the circuits of the core: placed as pairs of PoDs, then evenly over a PoD's switches. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from planner.fabric.ground import AggRoom, PlanGround
from planner.fabric.model import Cabling, EndpointId, OcsId, Pair, PortPair, port_pair
from planner.fabric.place import PlacedCircuits, PlacingProblem, place
from planner.fabric.topology import Lane


def place_in_core(
    ground: PlanGround, lanes: Mapping[EndpointId, Iterable[Lane]], circuits: Mapping[Pair, int]
) -> PlacedCircuits:
    """Between PoDs, on the ports at which these lanes end in the core."""
    ports: dict[OcsId, dict[int, EndpointId]] = defaultdict(dict)
    for pod, own in lanes.items():
        for lane in own:
            ports[lane.core][lane.core_port] = pod
    cabling = Cabling(ports)
    up = frozenset(each for each in ground.up_in_core if cabling.ends(each) is not None)
    return place(PlacingProblem(cabling, circuits, up))


def evened_out(
    placed: PlacedCircuits, lanes: Mapping[EndpointId, Iterable[Lane]], rooms: Mapping[EndpointId, AggRoom]
) -> tuple[PortPair, ...]:
    """As many circuits on the same switches of the core. New ones take the lanes whose far ends are where ToRs have
    most ports left: two ToRs can only be joined where both have a port, so lifts must not use up one switch of a PoD.
    """
    kept = frozenset(placed.kept)
    taken = {(each.switch, port) for each in kept for port in each.ports}
    left = {switch: count for room in rooms.values() for switch, count in room.ports_on().items()}
    pod_at: dict[tuple[OcsId, int], EndpointId] = {}
    free: dict[tuple[EndpointId, OcsId], dict[OcsId, list[int]]] = defaultdict(lambda: defaultdict(list))
    for pod, own in lanes.items():
        for lane in own:
            pod_at[lane.core, lane.core_port] = pod
            if (lane.core, lane.core_port) in taken:
                left[lane.agg] -= 1
            else:
                free[pod, lane.core][lane.agg].append(lane.core_port)
    chosen = list(kept)
    for each in placed.cross_connects:
        if each not in kept:
            ends = []
            for port in each.ports:
                choice = free[pod_at[each.switch, port], each.switch]
                agg = max(
                    (switch for switch, ports in choice.items() if ports), key=lambda switch: (left[switch], switch)
                )
                ends.append(choice[agg].pop(0))
                left[agg] -= 1
            chosen.append(port_pair(each.switch, *ends))
    return tuple(sorted(chosen))
