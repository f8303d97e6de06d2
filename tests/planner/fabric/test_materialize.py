"""Invariants of circuit plans for any site, intent, failures and current circuits."""

from collections import Counter
from dataclasses import replace

import pytest
from fabric_sites import GB, failures, gpus_of, intents, sites, small_site
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.fabric.materialize import materialize, validate
from planner.fabric.model import EndpointId, OcsId, PortPair, port_pair
from planner.fabric.plan import FabricFailures, FabricPlan, FabricState
from planner.fabric.sizing import spread
from planner.fabric.topology import PodRole, Site, Tier
from planner.model import Hold


def planned(site: Site, intent: Intent, state: FabricState) -> FabricPlan:
    plan = materialize(site, intent, state)
    assert isinstance(plan, FabricPlan), plan
    return plan


def all_to_all(site: Site, role: PodRole, stage: Stage, period: str = "any") -> Intent:
    each = Traffic(TrafficOperation.EP, Primitive.ALL_TO_ALL, (gpus_of(site, role),), GB)
    return Intent(period, stage, (each,))


def gradients(site: Site) -> Intent:
    return all_to_all(site, PodRole.TRAIN, Stage.TRAIN, "gradients")


def generation(site: Site) -> Intent:
    groups = [gpus_of(site, PodRole.GEN)[first : first + 16] for first in range(0, len(gpus_of(site, PodRole.GEN)), 16)]
    return Intent("generation", Stage.GEN, (Traffic(TrafficOperation.EP, Primitive.ALL_TO_ALL, tuple(groups), GB),))


def weights(site: Site) -> Intent:
    holders = gpus_of(site, PodRole.TRAIN)[:4]
    receivers = (gpus_of(site, PodRole.GEN),) * 4
    each = Traffic(
        TrafficOperation.WEIGHT_SYNC, Primitive.BROADCAST, tuple((r,) for r in holders), GB, receivers=receivers
    )
    return Intent("weights", Stage.WEIGHT_SYNC, (each,))


def pods_of(site: Site, cross_connect: PortPair) -> set[EndpointId]:
    owner = {port: end for end, ports in site.switch[cross_connect.switch].ports.items() for port in ports}
    return {site.pod_of[owner[port]] for port in cross_connect.ports}


def in_core(site: Site, plan: frozenset[PortPair]) -> list[PortPair]:
    return [each for each in plan if site.switch[each.switch].tier is Tier.CORE]


@st.composite
def states(draw: st.DrawFn, site: Site) -> FabricState:
    """Draw states in which any circuits are up and pinned, each port once."""
    up = []
    for switch in site.switches:
        ports = draw(st.permutations([port for ports in switch.ports.values() for port in ports]))
        count = draw(st.integers(0, len(ports) // 2))
        up += [port_pair(switch.id, *ports[2 * number : 2 * number + 2]) for number in range(count)]
    pinned = draw(st.lists(st.sampled_from(sorted(up)), max_size=2)) if up else []
    return FabricState(frozenset(up), draw(failures(site)), frozenset(pinned))


@given(st.data())
def test_forbidden_ports_are_not_used(data: st.DataObject) -> None:
    site = data.draw(sites())
    intent, state = data.draw(intents(site)), data.draw(states(site))
    plan = materialize(site, intent, state)
    if isinstance(plan, Hold):
        assert plan.code == "nobody_placed"
        return
    used = Counter((each.switch, port) for each in plan.cross_connects for port in each.ports)
    assert max(used.values(), default=0) <= 1
    broken = state.failures
    assert not {switch for switch, _ in used} & broken.switches
    assert not used.keys() & broken.ports
    pinned_ports = {(each.switch, port) for each in state.pinned for port in each.ports}
    for each in plan.cross_connects:
        ports = {(each.switch, port) for port in each.ports}
        assert each in state.pinned or not ports & pinned_ports
        if each not in state.pinned:
            assert len({site.reserved.get(port) for port in ports}) == 1
    assert not validate(site, state, plan.cross_connects)
    assert materialize(site, intent, state) == plan
    for lane in site.lanes:  # every lane that the core uses continues to a ToR
        if used[lane.core, lane.core_port]:
            joined = [each for each in plan.cross_connects if each.switch == lane.agg and lane.agg_port in each.ports]
            owner = {port: end for end, ports in site.switch[lane.agg].ports.items() for port in ports}
            (ends,) = ([owner[port] for port in each.ports] for each in joined)
            assert any(end in site.tor for end in ends)


@settings(max_examples=20)
@given(st.data())
def test_plan_leaves_other_circuits_alone(data: st.DataObject) -> None:
    site = data.draw(sites())
    before = planned(site, gradients(site), FabricState())
    before = planned(site, generation(site), FabricState(before.cross_connects))
    intent = data.draw(intents(site, [Stage.TRAIN, Stage.GEN]))
    plan = planned(site, intent, FabricState(before.cross_connects))
    other = PodRole.GEN if intent.stage is Stage.TRAIN else PodRole.TRAIN
    untouched = {pod.id for pod in site.pods if pod.role is other}
    for one, two in ((before, plan), (plan, before)):
        assert not [each for each in one.cross_connects - two.cross_connects if pods_of(site, each) <= untouched]


@settings(max_examples=20)
@given(st.data())
def test_circuit_counts_match_placement(data: st.DataObject) -> None:
    site = data.draw(sites())
    plan = planned(site, data.draw(intents(site)), FabricState())
    owner = {
        (switch.id, port): end for switch in site.switches for end, ports in switch.ports.items() for port in ports
    }
    for tier in plan.tiers:
        counted: Counter[frozenset[EndpointId]] = Counter()
        for each in plan.cross_connects:
            if site.switch[each.switch].pod == tier.pod:
                ends = [owner[each.switch, port] for port in each.ports]
                counted[frozenset(ends if tier.pod else map(site.pod_of.__getitem__, ends))] += 1
        assert counted == {frozenset(pair): count for pair, count in tier.circuits.items()}


@settings(max_examples=20)
@given(st.data())
def test_repeated_period_changes_little(data: st.DataObject) -> None:
    """A plan on top of itself may switch once to equally good choices, then it is stable."""
    site = data.draw(sites())
    intent = data.draw(intents(site))
    state = FabricState()
    for _ in range(3):
        plan = planned(site, intent, state)
        state = FabricState(plan.cross_connects)
    assert planned(site, intent, state).cross_connects == plan.cross_connects


def test_gen_pods_are_connected_only_by_the_slice() -> None:
    site = small_site()
    up = planned(site, weights(site), FabricState())
    assert len(in_core(site, up.cross_connects)) > 2
    plan = planned(site, generation(site), FabricState(up.cross_connects))
    core = in_core(site, plan.cross_connects)
    reserved = {(each.switch, port) for each in site.reservations for port in each.ports}
    assert all((each.switch, port) in reserved for each in core for port in each.ports)
    assert {pod for each in core for pod in pods_of(site, each)} == set(site.pod)


def test_slice_is_equal_in_every_stage() -> None:
    site = small_site()
    state, slices = FabricState(), []
    for intent in (gradients(site), generation(site), weights(site), gradients(site)):
        plan = planned(site, intent, state)
        state = FabricState(plan.cross_connects)
        slices.append(
            {each for each in in_core(site, plan.cross_connects) if (each.switch, each.port_a) in site.reserved}
        )
        lanes = {(lane.core, lane.core_port): lane for lane in site.lanes}
        for each in sorted(slices[-1]):
            for port in each.ports:
                lane = lanes[each.switch, port]
                lifts = [x for x in plan.cross_connects if x.switch == lane.agg and lane.agg_port in x.ports]
                slices[-1].update(lifts)
    assert slices[0]
    assert slices == slices[:1] * 4


def test_gradients_get_mesh_of_train_pods() -> None:
    site = small_site(train_pods=3)
    plan = planned(site, gradients(site), FabricState())
    core = plan.tiers[-1]
    assert {("train0", "train1"), ("train0", "train2"), ("train1", "train2")} <= core.circuits.keys()
    assert plan.completion_s > 0


def test_weights_reach_gen_pods_over_core() -> None:
    site = small_site()
    plan = planned(site, weights(site), FabricState())
    sent_to = {pair for pair, count in plan.tiers[-1].circuits.items() if count > 1}
    assert sent_to == {("gen0", "train0"), ("gen1", "train0")}


def test_spare_ports_raise_bisection() -> None:
    site = small_site(train_pods=1, response_lanes=0)
    far = (0, 8)  # one rank in each block: a single pair of ToRs has demand
    intent = Intent("pair", Stage.TRAIN, (Traffic(TrafficOperation.DP, Primitive.RING_ALL_REDUCE, (far,), GB),))
    plan = planned(site, intent, FabricState())
    (tier, _) = plan.tiers
    # the pair uses all ports of its two ToRs, the other six connect each other
    assert len(tier.circuits) == 1 + 6 * 5 // 2
    assert sum(tier.circuits.values()) == 8 * 8 // 2


@given(st.integers(2, 40), st.integers(2, 12))
def test_few_spare_ports_connect_all_tors_over_few_hops(size: int, ports: int) -> None:
    tors = [EndpointId(f"tor{number:02}") for number in range(size)]
    circuits = spread(200.0, dict.fromkeys(tors, ports), {})
    used = Counter(end for pair, count in circuits.items() for end in pair for _ in range(count))
    assert max(used.values()) <= ports
    assert sum(used.values()) >= size * ports - ports  # at most one ToR, or one port of some ToRs, is unused
    reached, hops = {tors[0]}, 0
    while len(reached) < size:
        more = {end for pair in circuits if reached & set(pair) for end in pair}
        assert more > reached
        reached, hops = more, hops + 1
    assert hops <= (size if ports < 4 else 8)


def test_pod_that_cannot_lift_reduces_core_circuits() -> None:
    site = small_site(servers_per_pod=2, servers_per_tor=1, response_lanes=0, gen_pods=0)
    whole = planned(site, gradients(site), FabricState())
    switches = {switch.id for switch in site.agg_switches_of[EndpointId("train1")]}
    some = {
        (switch.id, port)
        for switch in site.agg_switches_of[EndpointId("train1")]
        for end, ports in switch.ports.items()
        if end in site.tor
        for port in ports[2:]
    }
    assert switches
    state = FabricState(failures=FabricFailures(ports=frozenset(some)))
    left = planned(site, gradients(site), state)
    assert len(in_core(site, left.cross_connects)) < len(in_core(site, whole.cross_connects))
    assert not validate(site, state, left.cross_connects)


def test_pinned_circuits_stay_and_block_their_ports() -> None:
    site = small_site()
    up = planned(site, gradients(site), FabricState())
    kept = frozenset(sorted(up.cross_connects)[::7])
    state = FabricState(up.cross_connects, pinned=kept)
    for intent in (generation(site), weights(site), all_to_all(site, PodRole.TRAIN, Stage.TRAIN)):
        assert kept <= planned(site, intent, state).cross_connects


def test_circuits_on_ports_outside_the_site_are_left_alone() -> None:
    site = small_site()
    foreign = PortPair(site.switches[0].id, 500, 501)
    assert foreign in planned(site, gradients(site), FabricState(frozenset({foreign}))).cross_connects


def test_plan_is_validated_again_before_commit() -> None:
    site = small_site()
    plan = planned(site, gradients(site), FabricState())
    used = min(in_core(site, plan.cross_connects))
    lane = next(lane for lane in site.lanes if (lane.core, lane.core_port) == (used.switch, used.port_a))
    assert validate(site, FabricState(), plan.cross_connects) == ()
    broken = FabricState(failures=FabricFailures(ports=frozenset({(lane.agg, lane.agg_port)})))
    assert validate(site, broken, plan.cross_connects) == (f"port {lane.agg_port} of {lane.agg} has failed",)
    pinned = FabricState(pinned=frozenset({port_pair(used.switch, used.port_a, 570)}))
    assert validate(site, pinned, plan.cross_connects) == (f"{used}: port {used.port_a} is pinned",)
    (lift,) = (each for each in plan.cross_connects if each.switch == lane.agg and lane.agg_port in each.ports)
    (fault,) = validate(site, FabricState(), plan.cross_connects - {lift})
    assert fault.startswith(f"{site.pod_of[lane.uplink]}: ")
    strange = PortPair(OcsId("nowhere"), 1, 2)
    assert len(validate(site, FabricState(), {strange})) == 2


def test_intent_without_placed_ranks_is_held() -> None:
    site = small_site()
    intent = replace(gradients(site), stage=Stage.GEN)
    held = materialize(site, intent, FabricState())
    assert isinstance(held, Hold)
    assert held.code == "nobody_placed"


def test_bytes_without_circuits_in_stage_are_reported() -> None:
    site = small_site()
    across = Intent("any", Stage.GEN, all_to_all(site, PodRole.GEN, Stage.GEN).traffic)
    assert any("get no circuits" in note for note in planned(site, across, FabricState()).notes)


def test_more_volume_takes_longer_on_same_circuits() -> None:
    site = small_site()
    once = gradients(site)
    twice = replace(once, traffic=(replace(once.traffic[0], times=2.0),))
    plans = [planned(site, intent, FabricState()) for intent in (once, twice)]
    assert plans[0].cross_connects == plans[1].cross_connects
    assert plans[1].completion_s == pytest.approx(2 * plans[0].completion_s)


def test_site_of_one_pod_has_no_core() -> None:
    site = small_site(train_pods=1, gen_pods=0, response_lanes=0)
    plan = planned(site, gradients(site), FabricState())
    assert plan.tiers[-1].circuits == {}
    assert plan.tiers[0].circuits
    assert not plan.tiers[0].unserved


def test_lifts_leave_ports_for_other_circuits() -> None:
    """Some ToR ports would have no peers on their switch if lifts exhausted one switch of a PoD."""
    site = small_site(servers_per_pod=4, servers_per_tor=1, rails=2, tor_uplinks=8, agg_switches=4, core_lanes=32)
    plan = planned(site, gradients(site), FabricState())
    assert [sum(tier.unplaced.values()) for tier in plan.tiers] == [0] * len(plan.tiers)
    assert not [tier.unserved for tier in plan.tiers if tier.unserved]
