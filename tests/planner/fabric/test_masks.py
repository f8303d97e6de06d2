"""What failures take away, who stands in, and what they cost a period."""

import pytest
from fabric_sites import GB, failures, gpus_of, sites, small_site
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.fabric.failure_cost import FailureCost, cost_of
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.fabric.masks import failed_ports, healthy_lanes, mask_nics
from planner.fabric.materialize import materialize
from planner.fabric.model import EndpointId, PortPair
from planner.fabric.plan import FabricFailures, FabricPlan, FabricState
from planner.fabric.topology import PodRole, ServerId, Site
from planner.model import GpuId, Hold


def exchange(site: Site) -> Intent:
    each = Traffic(TrafficOperation.EP, Primitive.ALL_TO_ALL, (gpus_of(site, PodRole.TRAIN),), GB)
    return Intent("experts", Stage.TRAIN, (each,))


def cost(site: Site, broken: FabricFailures) -> FailureCost:
    found = cost_of(site, exchange(site), broken)
    assert not isinstance(found, Hold), found
    return found


def test_switches_and_circuits_take_their_ports_with_them() -> None:
    site = small_site()
    switch = site.core_switches[0]
    whole = failed_ports(site, FabricFailures(switches=frozenset({switch.id})))
    assert whole == {(switch.id, port) for ports in switch.ports.values() for port in ports}
    pair = PortPair(switch.id, 1, 9)
    assert failed_ports(site, FabricFailures(cross_connects=frozenset({pair}))) == {(switch.id, 1), (switch.id, 9)}


@settings(max_examples=20)
@given(st.data())
def test_more_failures_never_leave_more(data: st.DataObject) -> None:
    site = data.draw(sites())
    some, others = data.draw(failures(site)), data.draw(failures(site))
    fewer, more = failed_ports(site, some), failed_ports(site, some | others)
    assert fewer <= more
    assert set(healthy_lanes(site, more)) <= set(healthy_lanes(site, fewer))
    assert mask_nics(site, some | others).stand_in.keys() <= mask_nics(site, some).stand_in.keys()
    budgets = []
    for broken in (FabricFailures(), some, some | others):
        plan = materialize(site, exchange(site), FabricState(failures=broken))
        failed = failed_ports(site, broken)
        left = sum(
            (switch.id, port) not in failed
            for switch in site.switches
            for ports in switch.ports.values()
            for port in ports
        )
        budgets.append(left)
        if isinstance(plan, FabricPlan):
            assert 2 * sum(count for tier in plan.tiers for count in tier.circuits.values()) <= left
    assert budgets == sorted(budgets, reverse=True)


@given(st.sets(st.integers(0, 3)))
def test_failed_nics_have_healthy_stand_ins_that_they_share_evenly(failed: set[int]) -> None:
    site = small_site()
    server = site.servers[1]
    mask = mask_nics(site, FabricFailures(nics=frozenset((server.id, nic) for nic in failed)))
    if len(failed) == 4:
        assert server.id not in mask.stand_in
        assert mask.notes == (f"{server.id}: all 4 NICs have failed, it is cut off",)
        return
    stand_in = mask.stand_in[server.id]
    assert all(stand_in[nic] == nic for nic in range(4) if nic not in failed)
    loads = [stand_in.count(nic) for nic in range(4) if nic not in failed]
    assert max(loads) - min(loads) <= 1
    assert len(mask.notes) == len(failed)


def test_a_stand_in_is_taken_from_the_same_tor_if_there_is_one() -> None:
    site = small_site(rails=2)  # two NICs of a server on each ToR
    server = site.servers[0]
    assert mask_nics(site, FabricFailures(nics=frozenset({(server.id, 1)}))).stand_in[server.id] == (0, 0, 2, 3)


def test_losing_nothing_costs_nothing() -> None:
    site = small_site()
    found = cost(site, FabricFailures())
    assert (found.lost_gbps, found.slowdown, found.ports_lost, found.unserved) == (0, 1, 0, ())


def test_a_core_switch_costs_its_lanes() -> None:
    site = small_site(core_lanes=16, response_lanes=0)
    switch = site.core_switches[0]
    some = [port for ports in switch.ports.values() for port in ports[: len(ports) // 2]]
    found = cost(site, FabricFailures(ports=frozenset((switch.id, port) for port in some)))
    assert found.lanes_lost == len(some) == found.ports_lost
    assert found.lost_gbps > 0
    assert found.slowdown > 1
    assert not found.unserved


def test_a_switch_of_a_pod_leaves_it_its_others() -> None:
    site = small_site(agg_switches=2)
    found = cost(site, FabricFailures(switches=frozenset({site.agg_switches_of[EndpointId("train0")][0].id})))
    assert 0 < found.lost_gbps < found.healthy_gbps
    assert found.slowdown > 1
    assert found.dropped_bytes == 0


def test_a_nic_costs_the_one_that_stands_in() -> None:
    site = small_site()
    found = cost(site, FabricFailures(nics=frozenset({(site.servers[0].id, 0)})))
    assert found.nic_s == pytest.approx(2 * found.healthy_nic_s, rel=0.2)
    assert found.notes


def test_a_server_is_replaced_by_placing_its_ranks_elsewhere() -> None:
    site = small_site(train_pods=1)
    gpus = gpus_of(site, PodRole.TRAIN)
    lost = FabricFailures(servers=frozenset({ServerId("train0/s0")}))
    each = Traffic(TrafficOperation.EP, Primitive.ALL_TO_ALL, (gpus[:12],), GB)
    first = cost_of(site, Intent("experts", Stage.TRAIN, (each,)), lost)
    moved = cost_of(site, Intent("experts", Stage.TRAIN, (each,), {r: GpuId(12 + r) for r in range(4)}), lost)
    assert isinstance(first, FailureCost)
    assert isinstance(moved, FailureCost)
    assert first.dropped_bytes > 0
    assert moved.dropped_bytes == 0
