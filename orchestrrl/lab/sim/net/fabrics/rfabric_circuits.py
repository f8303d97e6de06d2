"""Choose the site of an RFabric, and its circuits for a period from the bytes between ToRs. The functions have no side
effects.

Sites are regular: all PoDs are built alike, for as many servers as the largest PoD has. In a smaller PoD, the fraction
of its fibres that a ToR keeps equals the fraction of its server slots that are occupied. The PoD's lanes to the core
are reduced in the same way. Both numbers are rounded up. A ToR that is alone on its rail has no fibres.

Circuits come from the fabric's own planner (planner/fabric/materialize.py), with the stages' own templates. Every
period keeps all servers connected, over any number of hops (section 5.4 of the OrchestrRL paper). If circuits for the
demand leave servers disconnected, single circuits bridge them as long as ports are free. If not all servers can be
connected, sending servers keep a path to their destinations where this is possible.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFailures
from orchestrrl.lab.sim.net.fabrics.circuits import NO_WAY, DirectedLinks, distances
from orchestrrl.lab.sim.net.fabrics.hosts import left
from orchestrrl.lab.sim.net.model import Bools, Floats, Ints
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.fabric.materialize import materialize
from planner.fabric.model import EndpointId, OcsId, PortPair, pair_of, partners
from planner.fabric.plan import FabricFailures as FailedPorts
from planner.fabric.plan import FabricState
from planner.fabric.templates import TEMPLATES, StageTemplate
from planner.fabric.topology import PodRole, Server, Site, Switch
from planner.fabric.topology import Tier as SiteTier
from planner.model import GpuId, Hold


def evenly(count: int, per_pod: int) -> Ints:
    """Return the slot of each server, as an array indexed by server. The `count` servers are spread evenly over the
    fewest PoDs that have room, so that pipeline stages, which divide servers evenly, match the PoDs."""
    pods = -(-count // per_pod)
    pod = np.arange(count) * pods // max(1, count)
    first = np.searchsorted(pod, pod)
    return np.asarray(pod * per_pod + np.arange(count) - first, np.int64)


def fitted(site: Site, place: Ints) -> Site:
    """Return the site without the switch ports that are not needed if only the slots in `place` have servers."""
    here = [site.servers[number] for number in place.tolist()]
    wanted = _wanted(site, here)
    ordered = sorted(site.switches, key=lambda each: (each.tier, each.pod or "", each.id))
    switches = [
        switch
        for _, group in groupby(ordered, key=lambda each: (each.tier, each.pod))
        for switch in _trimmed(site, list(group), wanted)
    ]
    there = {(switch.id, port) for switch in switches for ports in switch.ports.values() for port in ports}
    kept = [
        replace(each, ports=frozenset(port for port in each.ports if (each.switch, port) in there))
        for each in site.reservations
    ]
    return replace(site, switches=tuple(switches), reservations=tuple(each for each in kept if each.ports))


def _wanted(site: Site, here: Sequence[Server]) -> Mapping[EndpointId, int]:
    """Return the number of fibres that each ToR and each uplink has to the switches of its PoD if the site has only the
    servers `here`."""
    if len(site.tors) == len({tor.rail for tor in site.tors}):
        return Counter()
    fibres = {endpoint: len(ends) for endpoint, ends in site.fibres[SiteTier.AGG].items()}
    tors, tor_places = _by_tor(here), _by_tor(site.servers)
    pods, pod_places = (Counter(each.pod for each in some) for some in (here, site.servers))
    return {tor.id: -(-fibres[tor.id] * tors[tor.id] // tor_places[tor.id]) for tor in site.tors} | {
        each.id: -(-fibres[each.id] * pods[each.pod] // pod_places[each.pod]) for each in site.uplinks
    }


def _by_tor(servers: Iterable[Server]) -> Counter[EndpointId]:
    return Counter(tor for each in servers for tor in set(each.tors))


def _trimmed(site: Site, group: Sequence[Switch], wanted: Mapping[EndpointId, int]) -> list[Switch]:
    """Return the switches of a PoD or of the core with only the wanted number of ports for each endpoint, spread evenly
    over the switches. The first switches take the remainder, as in a regular site."""
    found = []
    for number, switch in enumerate(group):
        ports = {}
        for endpoint, numbers in switch.ports.items():
            count = wanted[endpoint] // len(group) + (number < wanted[endpoint] % len(group))
            ports[endpoint] = _chosen(site, switch, numbers, count)
        found.append(replace(switch, ports=ports))
    return found


def _chosen(site: Site, switch: Switch, ports: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `count` of the ports. At most half of them are reserved ports; the others are free ports."""
    reserved = [port for port in ports if (switch.id, port) in site.reserved][: count // 2]
    free = [port for port in ports if (switch.id, port) not in site.reserved]
    return tuple(sorted([*free[: count - len(reserved)], *reserved]))


TRIES = 5  # attempts to connect all servers; a bridge may take ports that connected other servers
_EITHER = frozenset(PodRole)
_ANY_TWO = frozenset((one, other) for one in PodRole for other in PodRole)


@dataclass(frozen=True, eq=False)
class RFabricCircuits:
    """The circuits of an RFabric, planned for each period. With `roles`, PoDs are Train or Gen PoDs, and a stage
    changes only its own PoDs. Without `roles`, a period may change all PoDs."""

    site: Site
    roles: bool
    blocks: Ints  # [block of servers, rail], its ToR
    failed: SimulatedFailures

    @cached_property
    def at_rest(self) -> frozenset[PortPair]:
        """The circuits outside any period, which connect all ToRs of a rail evenly."""
        demand = (self._rail[:, None] == self._rail).astype(np.float64)
        np.fill_diagonal(demand, 0.0)
        intent = self._intent("rest", Stage.TRAIN, demand)
        plan = materialize(self.site, intent, FabricState(failures=self.failed_ports), _anywhere(Stage.TRAIN))
        return frozenset() if isinstance(plan, Hold) else plan.cross_connects

    def of_period(self, period: str, stage: Stage, demand: Floats) -> frozenset[PortPair]:
        """Return the circuits of a period. `demand` is the number of bytes between ToRs, as an array indexed by [tor,
        tor]."""
        template = TEMPLATES[stage] if self.roles else _anywhere(stage)
        eligible = self._eligible(template)
        demand = np.where(eligible, demand, 0.0)
        state = FabricState(current=self.at_rest, failures=self.failed_ports)
        template = replace(template, core_roles=_ANY_TWO)
        intent, bridges = self._intent(period, stage, demand), frozenset[tuple[int, int]]()
        found = []
        for further in reversed(range(TRIES)):
            pairs = frozenset(pair_of(*(self.site.tors[tor].id for tor in bridge)) for bridge in bridges)
            plan = materialize(self.site, intent, state, template, pairs)
            found.append(self.at_rest if isinstance(plan, Hold) else plan.cross_connects)
            if self._connected(self._hops(found[-1])).all():
                return found[-1]
            kept = found[-1] if further > 1 else frozenset()  # the last attempt connects all servers by bridges alone
            bridges |= self._bridges(kept, eligible, demand > 0, bridges)
        return max([self.at_rest, *found], key=lambda each: self._rank(each, demand > 0))

    def between_tors(self, cross_connects: frozenset[PortPair]) -> Ints:
        """Return the number of circuits between any two ToRs, as an array indexed by [tor, tor]. Circuits inside a PoD
        use the PoD's switches; circuits between PoDs use lanes and the core."""
        site, joins, owner = self.site, partners(cross_connects), self.site.owner
        lane_at = site.lane_at
        number = {tor.id: place for place, tor in enumerate(site.tors)}
        found: Counter[tuple[EndpointId | None, ...]] = Counter()
        for each in cross_connects:
            ends: list[EndpointId | None] = []
            for port in each.sides:
                lane = lane_at.get(port)
                end = port if lane is None else joins.get(lane.ends[0])
                ends.append(None if end is None else owner.get(end))
            found[tuple(ends)] += 1
        matrix = np.zeros((len(number), len(number)), np.int64)
        for (one, other), count in found.items():
            if one in number and other in number and one != other:
                matrix[number[one], number[other]] += count
                matrix[number[other], number[one]] += count
        return matrix

    @cached_property
    def failed_ports(self) -> FailedPorts:
        site, ports = self.site, []
        fibres = site.fibres[SiteTier.AGG]
        for tor, share in zip(site.tors, left(self.failed.tor_uplinks, len(site.tors)), strict=True):
            ports += _some(fibres[tor.id], 1 - share)
        for pod, share in zip(site.pods, left(self.failed.pod_uplinks, len(site.pods)), strict=True):
            for uplink in site.uplinks_of[pod.id]:
                ports += _some(fibres[uplink.id], 1 - share)
        return FailedPorts(ports=frozenset(ports))

    @cached_property
    def pod_of(self) -> Ints:
        """The index of each ToR's PoD, as an array indexed by ToR."""
        number = {pod.id: place for place, pod in enumerate(self.site.pods)}
        return np.array([number[tor.pod] for tor in self.site.tors], np.int64)

    @cached_property
    def _representatives(self) -> list[GpuId]:
        """One representative GPU below each ToR, as a list indexed by ToR."""
        found: dict[EndpointId, GpuId] = {}
        for server in self.site.servers:
            for gpu in server.gpus:
                found.setdefault(server.tors[server.nic(gpu)], gpu)
        return [found[tor.id] for tor in self.site.tors]

    def _eligible(self, template: StageTemplate) -> Bools:
        """Return whether the template's stage may connect two ToRs, as an array indexed by [tor, tor]."""
        pods = self.site.pods
        joins = np.array(
            [[one is other or (one.role, other.role) in template.core_roles for other in pods] for one in pods]
        )
        touched = np.array([pod.role in template.touched for pod in pods])
        both = (joins | joins.T) & touched[:, None] & touched[None, :]
        return np.asarray(np.asarray(both)[self.pod_of[:, None], self.pod_of[None, :]])

    def _bridges(
        self, found: frozenset[PortPair], eligible: Bools, demanded: Bools, bridges: frozenset[tuple[int, int]]
    ) -> frozenset[tuple[int, int]]:
        """Return the ToR pairs to connect, in addition to the circuits `found` and the earlier `bridges`, so that every
        block of servers has a path to the ToR that already reaches the most blocks. Only pairs in `eligible` are
        returned."""
        laid = np.zeros(demanded.shape, np.bool_)
        for one, other in bridges:
            laid[one, other] = laid[other, one] = True
        joined = np.asarray(demanded | demanded.T | laid, np.bool_)
        free = self._ports - laid.sum(axis=1)
        # A PoD that only a bridge touches loses its circuits to PoDs that no bridge touches.
        idle = ~np.isin(self.pod_of, self.pod_of[joined.any(axis=1)])
        circuits = np.where(self._apart & (idle[:, None] | idle), 0, self.between_tors(found))
        return self._joining(distances(DirectedLinks.of(np.where(laid, 1.0, circuits))) < NO_WAY, eligible, free)

    def _joining(self, reach: Bools, eligible: Bools, free: Ints) -> frozenset[tuple[int, int]]:
        """Return a small set of bridges, which are pairs of ToRs to be connected. Bridges are preferably inside one PoD
        and rail, and between ToRs with the most free ports. `reach`, indexed by [tor, tor], is true if a path connects
        the two ToRs. `free`, indexed by ToR, is the number of ports that no other bridge uses."""
        touches: Bools = np.asarray(reach[:, self.blocks].any(axis=2))  # [tor, block]
        hub = int(np.argmax(touches.sum(axis=1)))
        inside: Bools = reach[hub].copy()
        missing: Bools = np.asarray(~touches[hub], np.bool_)
        found = set()
        for block, ends in enumerate(self.blocks):
            left = np.minimum(free[ends, None], free)
            may = eligible[ends] & inside & ~inside[ends, None] & (left > 0)
            if not missing[block] or not may.any():
                continue
            gain = (touches[ends] & missing).sum(axis=1)[:, None]
            row, other = _first(may, gain, ~self._apart[ends], self._rail[ends, None] == self._rail, left)
            one = int(ends[row])
            found.add((one, other))
            inside |= reach[one]
            missing &= ~touches[one]
            free[[one, other]] -= 1
        return frozenset(found)

    @cached_property
    def _rail(self) -> Ints:
        """The rail of each ToR, as an array indexed by ToR. A ToR without a rail has the value -1."""
        return np.array([-1 if tor.rail is None else tor.rail for tor in self.site.tors])

    @cached_property
    def _ports(self) -> Ints:
        """The number of working fibres of each ToR, as an array indexed by ToR."""
        failed, fibres = self.failed_ports.ports, self.site.fibres[SiteTier.AGG]
        return np.array([sum(end not in failed for end in fibres[tor.id]) for tor in self.site.tors], np.int64)

    @cached_property
    def _apart(self) -> Bools:
        """An array, indexed by [tor, tor], that is True where the two ToRs are in different PoDs."""
        return np.asarray(self.pod_of[:, None] != self.pod_of, np.bool_)

    def _hops(self, cross_connects: frozenset[PortPair]) -> Ints:
        return distances(DirectedLinks.of(self.between_tors(cross_connects).astype(np.float64)))

    def _connected(self, hops: Ints) -> Bools:
        """Return whether a path connects two blocks of servers on any rail, as an array indexed by [block, block]."""
        blocks = self.blocks
        return np.array([[(hops[np.ix_(one, other)] < NO_WAY).any() for other in blocks] for one in blocks], np.bool_)

    def _rank(self, cross_connects: frozenset[PortPair], demanded: Bools) -> tuple[bool, bool]:
        """Return how well the circuits connect the blocks of servers, as two values: whether every block reaches every
        other block, and whether every pair of blocks with demand is connected."""
        is_connected = self._connected(self._hops(cross_connects))
        of_block = np.array([[tor in block for block in self.blocks] for tor in range(len(demanded))], np.int64)
        return bool(is_connected.all()), bool((is_connected | (of_block.T @ demanded @ of_block == 0)).all())

    def _intent(self, period: str, stage: Stage, demand: Floats) -> Intent:
        traffic = tuple(
            Traffic(
                TrafficOperation.DP,
                Primitive.PIPELINE,
                ((int(self._representatives[one]), int(self._representatives[other])),),
                float(demand[one, other]),
            )
            for one, other in np.argwhere(demand > 0).tolist()
        )
        return Intent(period, stage, traffic)


def _anywhere(stage: Stage) -> StageTemplate:
    """Return the template of a stage on a site without PoD roles: all PoDs may be changed and connected. The stage's
    own template specifies the use of spare ports."""
    return replace(TEMPLATES[stage], touched=_EITHER, core_roles=_ANY_TWO)


def _first(may: Bools, *marks: Bools | Ints) -> tuple[int, int]:
    """Return the row and column of the entry that `may` allows and that has the highest `marks`, compared
    lexicographically."""
    rows, columns = np.nonzero(may)
    marked = [np.broadcast_to(each, may.shape)[rows, columns] for each in marks]
    best = int(np.lexsort([-np.arange(len(rows)), *marked[::-1]])[-1])
    return int(rows[best]), int(columns[best])


def _some(ends: Sequence[tuple[OcsId, int]], share: float) -> list[tuple[OcsId, int]]:
    """Return the fraction `share` of the ports `ends`, spread evenly over their switches."""
    count = round(share * len(ends))
    return [ends[number * len(ends) // count] for number in range(count)]
