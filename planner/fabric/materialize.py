"""Convert an intent into circuits on every switch, or return why the existing circuits stay. Has no side effects.

This is Algorithm 2 (section 5.3) of the paper. `orchestrrl/fabric/circuit_executor.py` commits a plan.

A plan covers the PoDs that its stage touches and in which the intent has ranks. All other PoDs keep their circuits,
including the core circuits between two such PoDs. `FabricPlan.cross_connects` covers the whole site. Ports are assigned
in this order: pins, the response slice, core lanes with their lifts, circuits between ToRs, spare ports.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from planner.fabric.allocate import BITS_PER_BYTE
from planner.fabric.demand import GENERAL, IntentFlows, flows_of
from planner.fabric.ground import AggRoom, PlanGround
from planner.fabric.intent import Intent
from planner.fabric.lifts import (
    Due,
    Lifted,
    evened_out,
    lift_all,
    lift_any,
    place_in_core,
    reserve,
)
from planner.fabric.model import EndpointId, Pair, PortPair, pair_of, partners, shared_ports
from planner.fabric.place import PlacingProblem, place
from planner.fabric.plan import Directed, FabricPlan, FabricState, TierPlan
from planner.fabric.sizing import CircuitSizes, WantedBytes, size_with, spread, wanted_of
from planner.fabric.templates import TEMPLATES, StageTemplate
from planner.fabric.topology import RESPONSES, Site, Switch
from planner.model import Hold


def materialize(
    site: Site,
    intent: Intent,
    state: FabricState,
    template: StageTemplate | None = None,
    bridges: frozenset[Pair] = frozenset(),
) -> FabricPlan | Hold:
    """Return the plan of an intent, or a Hold. The code of the Hold is `nobody_placed` if the stage touches no PoD with
    ranks, and `infeasible` if the circuits cannot be committed. If `template` is None, the template of the intent's
    stage is used. `bridges` are pairs of ToRs that get a circuit even without traffic; their PoDs are treated as PoDs
    with ranks."""
    template = template or TEMPLATES[intent.stage]
    flows = flows_of(intent, site, state.failures)
    pods = flows.pods | {site.pod_of[tor] for pair in bridges for tor in pair}
    touched = frozenset(pod for pod in pods if site.pod[pod].role in template.touched)
    if not touched:
        return Hold("nobody_placed", f"{intent.period}: no rank is in a PoD that stage {intent.stage} touches")
    draft = _Draft(site, intent, state, template, flows, touched, bridges).plan(by_tors=True)
    if draft.unserved_bytes > 0 or not draft.as_sized:  # if it is as sized and serves all, no other is better
        other = _Draft(site, intent, state, template, flows, touched, bridges).plan(by_tors=False)
        draft = min(draft, other, key=_Drafted.misses)
    plan = draft.plan
    faults = validate(site, state, plan.cross_connects)
    return Hold("infeasible", "; ".join(faults)) if faults else plan


def validate(site: Site, state: FabricState, cross_connects: Iterable[PortPair]) -> tuple[str, ...]:
    """Return the reasons why these cross-connects cannot be committed in this state. The result is empty if they can be
    committed. This is the final check of section 5.3 of the paper."""
    ground = PlanGround(site, state, frozenset(site.pod))
    wanted = frozenset(cross_connects)
    used = {port for each in wanted for port in each.sides}
    shared = shared_ports(wanted).items()
    faults = [f"port {port} of {switch} must be used once, got {count} times" for (switch, port), count in shared]
    faults += [f"port {port} of {switch} has failed" for switch, port in used & ground.failed]
    for each in wanted - state.current:
        faults += [f"{each}: port {port[1]} has no fibre" for port in each.sides if port not in site.owner]
    for each in wanted - state.pinned:
        faults += [f"{each}: port {port[1]} is pinned" for port in each.sides if port in ground.pinned_ports]
        purposes = sorted({site.reserved.get(port, "nothing") for port in each.sides})
        if len(purposes) > 1:
            faults.append(f"{each}: its ports are reserved for different purposes: {', '.join(purposes)}")
    return (*sorted(faults), *check_coupling(site, wanted))


def check_coupling(site: Site, cross_connects: Iterable[PortPair]) -> tuple[str, ...]:
    """Return a message for each PoD that cannot carry all its core circuits. The message contains the number of core
    circuits that end in the PoD, and the number that the PoD can carry.

    An uplink does not switch light. A core circuit ends on one lane in each PoD, and its light reaches a ToR only if
    the PoD's own switch connects that lane to the ToR. See appendix D ("Agg/Core relationship") of the paper.
    """
    cross_connects = frozenset(cross_connects)
    joined = partners(cross_connects)
    wanted: Counter[str] = Counter()
    there: Counter[str] = Counter()
    for each in cross_connects:
        for lane in filter(None, map(site.lane_at.get, each.sides)):
            pod = site.pod_of[lane.uplink]
            wanted[pod] += 1
            end = joined.get(lane.ends[0])
            there[pod] += end is not None and site.owner.get(end) in site.tor
    return tuple(
        f"{pod}: {wanted[pod]} core circuits end there, but only {there[pod]} are lifted to a ToR"
        for pod in sorted(wanted)
        if there[pod] < wanted[pod]
    )


@dataclass(frozen=True, slots=True)
class _Drafted:
    plan: FabricPlan
    as_sized: bool  # placed and lifted as sized
    unserved_bytes: float  # between ToRs without a circuit
    slowest_bytes: float  # per circuit, of a pair of ToRs with circuits

    def misses(self) -> tuple[int, float, float]:
        """Return a sort key that is smaller for better drafts: the number of unserved pairs first, then the unserved
        bytes, then the most bytes per circuit."""
        return sum(len(tier.unserved) for tier in self.plan.tiers), self.unserved_bytes, self.slowest_bytes


class _Draft:
    """Builds one plan. Each step takes free ports from the `AggRoom` of each PoD."""

    def __init__(
        self,
        site: Site,
        intent: Intent,
        state: FabricState,
        template: StageTemplate,
        flows: IntentFlows,
        touched: frozenset[EndpointId],
        bridges: frozenset[Pair],
    ) -> None:
        self._site = site
        self._intent = intent
        self._template = template
        self._flows = flows
        self._touched = touched
        self._bridges = bridges
        self._ground = PlanGround(site, state, touched)
        self._notes = list(flows.notes)
        self._rooms = {pod.id: AggRoom(self._ground, pod.id) for pod in site.pods}

    def plan(self, *, by_tors: bool) -> "_Drafted":
        site, ground = self._site, self._ground
        eligible = self._template.core_pairs(site.pod[pod] for pod in self._touched)
        wanted = wanted_of(site, self._touched, eligible, self._flows.tors.get(GENERAL, {}))
        self._note_left_out(wanted)
        kept_core, kept_lifts = self._what_stays_in_core()
        responses, response_lifts, notes = reserve(ground, self._rooms)
        self._notes += [f"response slice: {note}" for note in notes]
        lanes = {pod: own for pod, own in ground.lanes_for(None).items() if pod in self._touched}
        lanes_count = {pod: len(own) for pod, own in lanes.items()}
        ports = {pod: self._rooms[pod].ports() for pod in wanted.tors}
        sizes = size_with(self._bridges, site, self._template, wanted, lanes_count, ports, by_tors=by_tors)
        placed = place_in_core(ground, lanes, sizes.core)
        carrying = evened_out(placed, lanes, self._rooms)
        inside = {pod: self._in_pod(pod, sizes, carrying) for pod in wanted.tors}
        due = Counter(end for each in inside.values() for end in each.lifts)
        lifted = lift_all(
            carrying, ground.site.lane_at, self._rooms, site.pod_of, due, between=sizes.between, most=sizes.most
        )
        self._note_not_carried(lifted)
        spare = {pod: self._spare(pod) for pod in wanted.tors}
        cross_connects = frozenset(
            {each for room in self._rooms.values() for each in room.stays}
            | {*kept_core, *responses, *lifted.core}
            | {*kept_lifts, *response_lifts, *lifted.lifts}
            | {each for pod in wanted.tors for each in (*inside[pod].tors, *spare[pod])}
        )
        general = frozenset(lifted.core), frozenset(lifted.lifts)
        tiers = (
            *(self._agg_tier(pod, cross_connects, wanted, general[1], each.unplaced) for pod, each in inside.items()),
            self._core_tier(cross_connects, wanted, responses, general[0], placed.unplaced),
        )
        plan = FabricPlan(
            tiers=tiers,
            cross_connects=cross_connects,
            completion_s=max(tier.completion_s for tier in tiers),
            notes=tuple(self._notes),
        )
        joined = Counter({pair_of(*tors): count for tors, count in lifted.circuits.items()})
        for tier in tiers:
            joined.update({pair: count for pair, count in tier.circuits.items() if site.tor.keys() >= set(pair)})
        as_sized = not any((placed.unplaced, *(each.unplaced for each in inside.values())))
        as_sized &= all(lifted.circuits[tors] == count for tors, count in sizes.most.items())
        return _Drafted(plan, as_sized, *self._missed(wanted.larger_bytes, joined))

    def _missed(self, larger_bytes: Mapping[Pair, float], joined: Mapping[Pair, int]) -> tuple[float, float]:
        served = {pair: sent_bytes for pair, sent_bytes in larger_bytes.items() if joined.get(pair)}
        slowest_bytes = max((sent_bytes / joined[pair] for pair, sent_bytes in served.items()), default=0.0)
        return math.fsum(larger_bytes.values()) - math.fsum(served.values()), slowest_bytes

    def _what_stays_in_core(self) -> tuple[list[PortPair], tuple[PortPair, ...]]:
        """Return the core circuits that stay and that the PoDs at both ends can carry, and their lifts."""
        in_core = [each for switch in self._site.core_switches for each in self._ground.stays.get(switch.id, ())]
        foreign = [each for each in in_core if not self._ground.is_of_site(each)]
        core, lifts, notes = lift_any(self._ground, self._rooms, filter(self._ground.is_of_site, in_core))
        self._notes += notes
        return [*foreign, *core], lifts

    def _in_pod(self, pod: EndpointId, sizes: CircuitSizes, carrying: Iterable[PortPair]) -> "_InPod":
        """Place the PoD's circuits between ToRs, together with the lifts of the lanes that core circuits use."""
        room, ground = self._rooms[pod], self._ground
        lanes = [ground.site.lane_at[port] for each in carrying for port in each.sides]
        cabling = room.cabling_with(pod, [lane for lane in lanes if self._site.pod_of[lane.uplink] == pod])
        tors = {tor.id for tor in self._site.tors_of[pod]}
        lifts = {pair_of(tor, pod): count for tor, count in sizes.lifts.items() if tor in tors}
        up = frozenset(each for each in room.up if cabling.ends(each) is not None)
        placed = place(PlacingProblem(cabling, {**sizes.tors[pod], **lifts}, up))
        found = _InPod(unplaced={pair: count for pair, count in placed.unplaced.items() if pod not in pair})
        for each in placed.cross_connects:
            ends = cabling.ends(each)
            assert ends is not None
            if pod in ends:
                found.lifts.append((each.switch, ends[0] if ends[1] == pod else ends[1]))
            else:
                found.tors.append(each)
        room.take(found.tors)
        return found

    def _spare(self, pod: EndpointId) -> Iterable[PortPair]:
        """Return circuits for the PoD's spare ports: the existing circuits, or new ones spread over all pairs of
        ToRs."""
        room = self._rooms[pod]
        spare: Iterable[PortPair] = room.up_between_tors()
        if self._template.spreads_spare:
            circuits = spread(self._site.link_gbps, room.ports(), room.tors_up())
            spare = place(PlacingProblem(room.cabling(), circuits, room.up_between_tors())).cross_connects
        room.take(spare)
        return spare

    def _agg_tier(
        self,
        pod: EndpointId,
        cross_connects: frozenset[PortPair],
        wanted: WantedBytes,
        general_lifts: frozenset[PortPair],
        unplaced: Mapping[Pair, int],
    ) -> TierPlan:
        """Return the plan of one PoD's aggregation layer. If a ToR lacks a lift that it needs, the pair of this ToR and
        the PoD is listed as unserved."""
        owner = self._ground.site.owner
        circuits: Counter[Pair] = Counter()
        lifts: Counter[Pair] = Counter()
        for each in _on(self._site.agg_switches_of[pod], cross_connects):
            ends = [owner[port] for port in each.sides if port in owner]
            if len(set(ends)) == 2:
                circuits[pair_of(*ends)] += 1
                if each in general_lifts:
                    tor = ends[0] if ends[0] in self._site.tor else ends[1]
                    lifts[pair_of(tor, pod)] += 1
        inside_s, inside_unserved = self._served(wanted.tors[pod], circuits)
        lifts_s, lifts_unserved = self._served(wanted.lifts[pod], lifts)
        return TierPlan(
            pod=pod,
            circuits=dict(sorted(circuits.items())),
            completion_s=max(inside_s, lifts_s),
            unserved=(*inside_unserved, *lifts_unserved),
            unplaced=unplaced,
        )

    def _core_tier(
        self,
        cross_connects: frozenset[PortPair],
        wanted: WantedBytes,
        responses: Iterable[PortPair],
        general: frozenset[PortPair],
        unplaced: Mapping[Pair, int],
    ) -> TierPlan:
        general_s, general_unserved = self._served(wanted.core, self._between_pods(general))
        streamed: dict[tuple[EndpointId, EndpointId], float] = defaultdict(float)
        for (source, destination), sent_bytes in self._flows.tors.get(RESPONSES, {}).items():
            here, there = self._site.pod_of[source], self._site.pod_of[destination]
            if here != there:
                streamed[here, there] += sent_bytes
        streamed_s, streamed_unserved = self._served(streamed, self._between_pods(responses))
        return TierPlan(
            pod=None,
            circuits=self._between_pods(_on(self._site.core_switches, cross_connects)),
            completion_s=max(general_s, streamed_s),
            unserved=tuple(sorted({*general_unserved, *streamed_unserved})),
            unplaced=unplaced,
        )

    def _between_pods(self, cross_connects: Iterable[PortPair]) -> Mapping[Pair, int]:
        circuits: Counter[Pair] = Counter()
        for each in cross_connects:
            lanes = filter(None, map(self._site.lane_at.get, each.sides))
            pods = {self._site.pod_of[lane.uplink] for lane in lanes}
            if len(pods) == 2:
                circuits[pair_of(*pods)] += 1
        return dict(sorted(circuits.items()))

    def _served(self, demand: Directed, circuits: Mapping[Pair, int]) -> tuple[float, tuple[Pair, ...]]:
        """Return the completion time, in seconds, of the slowest pair that has circuits, and the pairs with demand that
        have none."""
        slowest, unserved = 0.0, set()
        for ends, sent_bytes in demand.items():
            if sent_bytes > 0:
                pair = pair_of(*ends)
                if circuits.get(pair):
                    slowest = max(slowest, sent_bytes / circuits[pair])
                else:
                    unserved.add(pair)
        return slowest * BITS_PER_BYTE / (self._site.link_gbps * 1e9), tuple(sorted(unserved))

    def _note_left_out(self, wanted: WantedBytes) -> None:
        stage = self._intent.stage
        if wanted.ineligible_bytes:
            self._notes.append(
                f"{wanted.ineligible_bytes:.4g} bytes are between PoDs that get no circuits in stage {stage}"
            )
        if wanted.elsewhere_bytes:
            self._notes.append(
                f"{wanted.elsewhere_bytes:.4g} bytes are in or to PoDs that stage {stage} does not touch"
            )

    def _note_not_carried(self, lifted: Lifted) -> None:
        for pod, count in sorted(lifted.not_carried.items()):
            if count:
                self._notes.append(f"{pod}: {count} core circuits dropped, as no ToR has a port for their lane")


@dataclass(slots=True)
class _InPod:
    unplaced: Mapping[Pair, int]
    tors: list[PortPair] = field(default_factory=list)
    lifts: list[Due] = field(default_factory=list)


def _on(switches: Iterable[Switch], cross_connects: Iterable[PortPair]) -> Iterator[PortPair]:
    ids = {switch.id for switch in switches}
    return (each for each in cross_connects if each.switch in ids)
