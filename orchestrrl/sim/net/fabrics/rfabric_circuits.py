"""Which circuits RFabric has in a period: from bytes between ToRs to cross-connects of a site, by the fabric's own
planner (planner/fabric/materialize.py). Pure.

Templates are the stages' own. Beside a period's circuits all servers reach all, in few hops or many: connectivity is
kept (section 5.4 of the OrchestrRL paper).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from orchestrrl.sim.net.fabrics.base import Failures
from orchestrrl.sim.net.fabrics.hosts import Bools, left
from orchestrrl.sim.net.fabrics.multipath import NO_WAY, Edges, distances
from orchestrrl.sim.net.model import Floats, Ints
from planner.fabric.coupling import lanes_by_core_port, partners, port_owners
from planner.fabric.intent import Intent, Operation, Primitive, Stage, Traffic
from planner.fabric.materialize import materialize
from planner.fabric.model import EndpointId, OcsId, PortPair
from planner.fabric.plan import FabricState
from planner.fabric.plan import Failures as FailedPorts
from planner.fabric.templates import Shape, Spare, Template, template_of
from planner.fabric.topology import Role, Site
from planner.fabric.topology import Tier as SiteTier
from planner.model import GpuId, Hold

_EITHER = frozenset(Role)
_ANY_TWO = frozenset((one, other) for one in Role for other in Role)


@dataclass(frozen=True, eq=False)
class Circuits:
    """`roles`: whether PoDs are of Train or Gen, and each stage touches its own; else a period may touch all."""

    site: Site
    roles: bool
    blocks: Ints  # [block of servers, rail], its ToR
    failed: Failures

    @cached_property
    def at_rest(self) -> frozenset[PortPair]:
        """All ToRs of a rail alike."""
        rail = np.array([-1 if tor.rail is None else tor.rail for tor in self.site.tors])
        demand = (rail[:, None] == rail[None, :]).astype(np.float64)
        np.fill_diagonal(demand, 0.0)
        intent = self._intent("rest", Stage.TRAIN, demand)
        plan = materialize(self.site, intent, FabricState(failures=self.failed_ports), _anywhere(intent))
        return frozenset() if isinstance(plan, Hold) else plan.cross_connects

    def of_period(self, period: str, stage: Stage, demand: Floats) -> frozenset[PortPair]:
        """`demand` [tor, tor], bytes."""
        bare = Intent(period, stage, ())
        template = template_of(bare) if self.roles else _anywhere(bare)
        demand, ring = np.where(self._eligible(template), demand, 0.0), self._ring(template)
        state = FabricState(current=self.at_rest, failures=self.failed_ports)
        template = replace(template, core_roles=_ANY_TWO)
        # What joins PoDs and blocks: nothing beside the period's own, if that is enough; else after it, else before it.
        first = None
        for weight in (0.0, 1e-6 * demand[demand > 0].min(initial=1.0), demand.max(initial=1.0)):
            joined_up = demand.copy()
            for one, other in ring:
                joined_up[one, other] = max(joined_up[one, other], weight)
            plan = materialize(self.site, self._intent(period, stage, joined_up), state, template)
            found = self.at_rest if isinstance(plan, Hold) else plan.cross_connects
            if self._leads(found):
                return found
            first = first or found
        return self.at_rest if not first or self._leads(self.at_rest) else first

    def between_tors(self, cross_connects: frozenset[PortPair]) -> Ints:
        """[tor, tor], how many join the two: in a PoD over its own switches, else over lanes and the core."""
        site, joins, owner = self.site, partners(cross_connects), port_owners(self.site)
        lane_at = lanes_by_core_port(site)
        number = {tor.id: place for place, tor in enumerate(site.tors)}
        found: Counter[tuple[EndpointId | None, ...]] = Counter()
        for each in cross_connects:
            ends: list[EndpointId | None] = []
            for port in each.ports:
                lane = lane_at.get((each.switch, port))
                at, there = (each.switch, port) if lane is None else (lane.agg, joins.get((lane.agg, lane.agg_port)))
                ends.append(None if there is None else owner.get((at, there)))
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
        """[tor]"""
        number = {pod.id: place for place, pod in enumerate(self.site.pods)}
        return np.array([number[tor.pod] for tor in self.site.tors], np.int64)

    @cached_property
    def _voices(self) -> list[GpuId]:
        """[tor], a GPU that speaks for all that are below it."""
        found: dict[EndpointId, GpuId] = {}
        for server in self.site.servers:
            for gpu in server.gpus:
                found.setdefault(server.tors[server.nic(gpu)], gpu)
        return [found[tor.id] for tor in self.site.tors]

    def _eligible(self, template: Template) -> Bools:
        """[tor, tor], whether the stage gives the two circuits."""
        pods = self.site.pods
        joins = np.array(
            [[one is other or (one.role, other.role) in template.core_roles for other in pods] for one in pods]
        )
        touched = np.array([pod.role in template.touched for pod in pods])
        both = (joins | joins.T) & touched[:, None] & touched[None, :]
        return np.asarray(np.asarray(both)[self.pod_of[:, None], self.pod_of[None, :]])

    def _ring(self, template: Template) -> list[tuple[int, int]]:
        """Pairs of ToRs that join all that is touched: each PoD and the next, and in a PoD each block of servers and
        the next; in turn on all rails."""
        pods = [place for place, pod in enumerate(self.site.pods) if pod.role in template.touched]
        pairs = []
        for turn, (pod, following) in enumerate(zip(pods, pods[1:] + pods[:1], strict=True)):
            one, other = np.flatnonzero(self.pod_of == pod), np.flatnonzero(self.pod_of == following)
            if pod != following:
                pairs.append((int(one[turn % len(one)]), int(other[turn % len(other)])))
        for pod in pods:
            blocks = self.blocks[self.pod_of[self.blocks[:, 0]] == pod]
            for turn, (one, other) in enumerate(pairwise(blocks)):
                pairs.append((int(one[turn % len(one)]), int(other[turn % len(other)])))
        return pairs

    def _leads(self, cross_connects: frozenset[PortPair]) -> bool:
        """Whether all servers can be reached from all, on whichever rail."""
        hops = distances(Edges.of(self.between_tors(cross_connects).astype(np.float64)))
        return all((hops[np.ix_(one, other)] < NO_WAY).any() for one in self.blocks for other in self.blocks)

    def _intent(self, period: str, stage: Stage, demand: Floats) -> Intent:
        traffic = tuple(
            Traffic(
                Operation.DP,
                Primitive.PIPELINE,
                ((int(self._voices[one]), int(self._voices[other])),),
                float(demand[one, other]),
            )
            for one, other in np.argwhere(demand > 0).tolist()
        )
        return Intent(period, stage, traffic)


def _anywhere(intent: Intent) -> Template:
    """Of PoDs without roles: all may be touched and joined; ports that are left over as at its stage."""
    spare = Spare.KEEP if intent.stage is Stage.WEIGHT_SYNC else Spare.SPREAD
    return Template(intent.period, Shape.of(intent), _EITHER, _ANY_TWO, spare, bipartite=False)


def _some(ends: Sequence[tuple[OcsId, int]], share: float) -> list[tuple[OcsId, int]]:
    """So many of them, evenly over the switches that they are on."""
    count = round(share * len(ends))
    return [ends[number * len(ends) // count] for number in range(count)]
