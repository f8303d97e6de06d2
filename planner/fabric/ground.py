"""The resources of a plan: the owner of each port, failed and pinned ports, and the circuits that stay. Has no side
effects."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.fabric.model import Cabling, EndpointId, OcsId, Pair, Port, PortPair, pair_of, partners, port_pair
from planner.fabric.plan import FabricFailures, FabricState
from planner.fabric.topology import RESPONSES, Lane, Site


def failed_ports(site: Site, failures: FabricFailures) -> frozenset[Port]:
    """Return all ports that circuits must not use because of failures, including those of failed switches. A failed
    cross-connect excludes both its ports, because it is unknown which of them failed."""
    of_switches = {
        (switch.id, port)
        for switch in site.switches
        if switch.id in failures.switches
        for ports in switch.ports.values()
        for port in ports
    }
    of_circuits = {port for each in failures.cross_connects for port in each.sides}
    return frozenset(failures.ports | of_switches | of_circuits)


@dataclass(frozen=True)
class PlanGround:
    """The site, its state and the PoDs of a plan. The circuits of the `touched` PoDs are planned anew; all other PoDs
    keep their circuits."""

    site: Site
    state: FabricState
    touched: frozenset[EndpointId]

    @cached_property
    def failed(self) -> frozenset[Port]:
        return failed_ports(self.site, self.state.failures)

    @cached_property
    def pinned_ports(self) -> frozenset[Port]:
        return frozenset(port for each in self.state.pinned for port in each.sides)

    @cached_property
    def held(self) -> frozenset[Port]:
        """The failed and pinned ports, which new circuits must not use."""
        return self.failed | self.pinned_ports

    @cached_property
    def up(self) -> Mapping[OcsId, tuple[PortPair, ...]]:
        """The circuits that are up, by switch, except those with a failed port or a port that is pinned for another
        circuit."""
        return _by_switch(
            each
            for each in self.state.current
            if self._healthy(each) and (each in self.state.pinned or self.pinned_ports.isdisjoint(each.sides))
        )

    @cached_property
    def stays(self) -> Mapping[OcsId, tuple[PortPair, ...]]:
        """The circuits that stay, by switch: pinned circuits that can still carry light, circuits of untouched PoDs,
        circuits on ports reserved for purposes other than responses, and circuits that belong to no endpoint of the
        site."""
        pinned = {each for each in self.state.pinned if self._healthy(each)}
        return _by_switch(
            pinned | {each for of_switch in self.up.values() for each in of_switch if self._is_left_alone(each)}
        )

    def _is_left_alone(self, cross_connect: PortPair) -> bool:
        purposes = {self.site.reserved.get(end) for end in cross_connect.sides}
        if purposes != {None}:
            return len(purposes) == 1 and RESPONSES not in purposes
        owners = [self.site.owner[end] for end in cross_connect.sides if end in self.site.owner]
        return self.touched.isdisjoint(self.site.pod_of[each] for each in owners)

    def is_of_site(self, cross_connect: PortPair) -> bool:
        return any(end in self.site.owner for end in cross_connect.sides)

    def lanes_for(self, purpose: str | None) -> Mapping[EndpointId, tuple[Lane, ...]]:
        """Return, by PoD, the lanes reserved for `purpose` that have no failed or pinned port. If `purpose` is None,
        return the lanes that are not reserved."""
        found: dict[EndpointId, list[Lane]] = defaultdict(list)
        for lane in self.site.lanes:
            if self.site.reserved.get(lane.ends[1]) == purpose and self.held.isdisjoint(lane.ends):
                found[self.site.pod_of[lane.uplink]].append(lane)
        return {pod: tuple(lanes) for pod, lanes in found.items()}

    def _healthy(self, cross_connect: PortPair) -> bool:
        return self.failed.isdisjoint(cross_connect.sides)


class AggRoom:
    """Assigns the ports of one PoD's aggregation layer. The ports of circuits that stay are already assigned."""

    def __init__(self, ground: PlanGround, pod: EndpointId) -> None:
        switches = ground.site.agg_switches_of[pod]
        self._tors = ground.site.tor
        self._owner = ground.site.owner
        self._held = ground.held
        self.up = tuple(each for switch in switches for each in ground.up.get(switch.id, ()))
        self.stays = tuple(each for switch in switches for each in ground.stays.get(switch.id, ()))
        self._up_with = partners(self.up)
        self._stays_with = partners(self.stays)
        # Unused ports come first, because they need the fewest changes.
        self._free: dict[OcsId, dict[EndpointId, list[int]]] = {
            switch.id: {
                endpoint: self._usable(switch.id, ports)
                for endpoint, ports in sorted(switch.ports.items())
                if endpoint in ground.site.tor
            }
            for switch in switches
        }

    def _usable(self, switch: OcsId, ports: Iterable[int]) -> list[int]:
        free = (port for port in ports if (switch, port) not in self._held and (switch, port) not in self._stays_with)
        return sorted(free, key=lambda port: ((switch, port) in self._up_with, port))

    def lifted_to(self, lane: Lane) -> EndpointId | None:
        """Return the ToR that the lane stays connected to; None if the lane has no circuit that stays."""
        return self._tor(lane, self._stays_with)

    def up_to(self, lane: Lane) -> EndpointId | None:
        """Return the ToR that the lane is connected to now. Return None if there is no such ToR or the ToR's port
        cannot be used."""
        tor = self._tor(lane, self._up_with)
        return tor if tor is not None and self._up_with[lane.ends[0]][1] in self._free[lane.agg][tor] else None

    def _tor(self, lane: Lane, joined: Mapping[Port, Port]) -> EndpointId | None:
        end = joined.get(lane.ends[0])
        owner = None if end is None else self._owner.get(end)
        return owner if owner in self._tors else None

    def tors(self, lane: Lane) -> list[EndpointId]:
        """Return the ToRs that have a free port on the switch where the lane ends. The list is empty if the lane's own
        port cannot be used or has a circuit that stays."""
        if lane.ends[0] in self._held or lane.ends[0] in self._stays_with:
            return []
        return [tor for tor, ports in self._free[lane.agg].items() if ports]

    def left(self, lane: Lane, tor: EndpointId) -> int:
        """Return the number of free ports of the ToR on the switch where the lane ends."""
        return len(self._free[lane.agg].get(tor, ()))

    def lift(self, lane: Lane, tor: EndpointId) -> PortPair:
        """Connect the lane to the ToR and return the new cross-connect. If the two are connected now, the ToR's port
        stays the same; otherwise the first free port of the ToR is used. The port is marked as used."""
        ports = self._free[lane.agg][tor]
        port = self._up_with[lane.ends[0]][1] if self.up_to(lane) == tor else ports[0]
        ports.remove(port)
        return port_pair(lane.agg, lane.agg_port, port)

    def take(self, cross_connects: Iterable[PortPair]) -> None:
        """Mark the ToR ports of these cross-connects as used."""
        for each in cross_connects:
            for end in each.sides:
                self._free[each.switch][self._owner[end]].remove(end[1])

    def ports(self) -> Counter[EndpointId]:
        """Return the number of free ports of each ToR."""
        left: Counter[EndpointId] = Counter()
        for tors in self._free.values():
            for tor, ports in tors.items():
                left[tor] += len(ports)
        return left

    def ports_on(self) -> Mapping[OcsId, int]:
        """Return the number of free ports of all ToRs together, by switch."""
        return {switch: sum(map(len, tors.values())) for switch, tors in self._free.items()}

    def cabling(self) -> Cabling:
        """Return the cabling of the ToRs' free ports."""
        return Cabling(
            {
                switch: {port: tor for tor, ports in tors.items() for port in ports}
                for switch, tors in self._free.items()
            }
        )

    def cabling_with(self, boundary: EndpointId, lanes: Iterable[Lane]) -> Cabling:
        """Return the cabling of the ToRs' free ports and of the ends of these lanes. All lanes together count as the
        endpoint `boundary`."""
        ports = {switch: dict(of_switch) for switch, of_switch in self.cabling().ports.items()}
        for lane in lanes:
            ports[lane.agg][lane.agg_port] = boundary
        return Cabling(ports)

    def up_between_tors(self) -> frozenset[PortPair]:
        """Return the circuits that are up between two ToRs and whose ports are still free for this plan."""
        left = {(switch, port) for switch, tors in self._free.items() for ports in tors.values() for port in ports}
        inside = (each for each in self.up if left.issuperset(each.sides))
        return frozenset(each for each in inside if len({self._owner[end] for end in each.sides}) == 2)

    def tors_up(self) -> Counter[Pair]:
        """Return, for each pair of ToRs, the number of its circuits in `up_between_tors`."""
        return Counter(pair_of(*(self._owner[end] for end in each.sides)) for each in self.up_between_tors())


def _by_switch(cross_connects: Iterable[PortPair]) -> Mapping[OcsId, tuple[PortPair, ...]]:
    found: dict[OcsId, list[PortPair]] = defaultdict(list)
    for each in sorted(cross_connects):
        found[each.switch].append(each)
    return {switch: tuple(of_switch) for switch, of_switch in found.items()}
