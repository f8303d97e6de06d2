"""What the core joins, both PoDs must carry: the lane at either end has to be lifted to a ToR in its PoD. Pure.

An uplink switches nothing. A circuit of the core ends on one lane in each PoD, and light gets on from there only if the
PoD's own switch joins that very lane to a ToR. Appendix D ("Agg/Core relationship") of the paper.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from planner.fabric.masks import Port
from planner.fabric.model import EndpointId, PortPair
from planner.fabric.topology import Lane, Site


def lanes_by_core_port(site: Site) -> Mapping[Port, Lane]:
    return {(lane.core, lane.core_port): lane for lane in site.lanes}


def port_owners(site: Site) -> Mapping[Port, EndpointId]:
    """The ToR or uplink that each port of each switch is fibred to."""
    return {
        (switch.id, port): endpoint
        for switch in site.switches
        for endpoint, ports in switch.ports.items()
        for port in ports
    }


def partners(cross_connects: Iterable[PortPair]) -> Mapping[Port, int]:
    """For each port that is in use, the other one."""
    found: dict[Port, int] = {}
    for each in cross_connects:
        found[each.switch, each.port_a] = each.port_b
        found[each.switch, each.port_b] = each.port_a
    return found


def check_coupling(site: Site, cross_connects: Iterable[PortPair]) -> tuple[str, ...]:
    """The PoDs that cannot carry what the core brings them, with how much is wanted and there; none: all is carried."""
    cross_connects = frozenset(cross_connects)
    lane_at = lanes_by_core_port(site)
    joined = partners(cross_connects)
    owner = port_owners(site)
    wanted: Counter[str] = Counter()
    there: Counter[str] = Counter()
    for each in cross_connects:
        for port in each.ports:
            lane = lane_at.get((each.switch, port))
            if lane is None:
                continue
            pod = site.pod_of[lane.uplink]
            wanted[pod] += 1
            end = joined.get((lane.agg, lane.agg_port))
            there[pod] += end is not None and owner.get((lane.agg, end)) in site.tor
    return tuple(
        f"{pod}: {wanted[pod]} circuits of the core end there, {there[pod]} are lifted to a ToR"
        for pod in sorted(wanted)
        if there[pod] < wanted[pod]
    )
