"""Effects of failures on ports, and stand-ins of failed NICs."""

from fabric_sites import GB, failures, gpus_of, sites, small_site
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.fabric.demand import mask_nics
from planner.fabric.ground import failed_ports
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.fabric.materialize import materialize
from planner.fabric.model import PortPair
from planner.fabric.plan import FabricFailures, FabricPlan, FabricState
from planner.fabric.topology import PodRole, Site


def exchange(site: Site) -> Intent:
    each = Traffic(TrafficOperation.EP, Primitive.ALL_TO_ALL, (gpus_of(site, PodRole.TRAIN),), GB)
    return Intent("experts", Stage.TRAIN, (each,))


def test_failed_switches_and_circuits_exclude_their_ports() -> None:
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
def test_failed_nics_share_healthy_stand_ins_evenly(failed: set[int]) -> None:
    site = small_site()
    server = site.servers[1]
    mask = mask_nics(site, FabricFailures(nics=frozenset((server.id, nic) for nic in failed)))
    if len(failed) == 4:
        assert server.id not in mask.stand_in
        assert mask.notes == (f"{server.id}: all 4 NICs have failed, so the server is unreachable",)
        return
    stand_in = mask.stand_in[server.id]
    assert all(stand_in[nic] == nic for nic in range(4) if nic not in failed)
    loads = [stand_in.count(nic) for nic in range(4) if nic not in failed]
    assert max(loads) - min(loads) <= 1
    assert len(mask.notes) == len(failed)


def test_stand_in_is_on_same_tor_if_possible() -> None:
    site = small_site(rails=2)  # two NICs of a server on each ToR
    server = site.servers[0]
    assert mask_nics(site, FabricFailures(nics=frozenset({(server.id, 1)}))).stand_in[server.id] == (0, 0, 2, 3)
