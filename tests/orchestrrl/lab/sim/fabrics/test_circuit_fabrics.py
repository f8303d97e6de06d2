"""Tests of the circuits of RFabric, MixNet and TopoOpt: ports, allocation by demand, hops and components."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routes import all_pairs, check_routes, owners, slowest_s

from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Inventory, Period, SimulatedFailures
from orchestrrl.lab.sim.net.fabrics.mixnet import mixnet
from orchestrrl.lab.sim.net.fabrics.rfabric import rfabric
from orchestrrl.lab.sim.net.fabrics.topoopt import topoopt
from orchestrrl.lab.sim.net.model import GpuFlows, LinkNetwork, LinkTier, Servers
from planner.fabric.materialize import validate
from planner.fabric.plan import FabricState
from planner.fabric.topology import Tier as SiteTier


def shifted(first: int, last: int, by: int, size: float = 1e9) -> GpuFlows:
    """Return flows from each GPU of `first` to `last` to the GPU `by` positions further, cyclically."""
    src = np.arange(first, last)
    return GpuFlows(src, first + (src - first + by) % (last - first), np.full(last - first, size))


def period(flows: GpuFlows, name: str = "period", stage: FabricStage = FabricStage.TRAIN) -> Period:
    return Period(name, stage, flows)


def tiers_of(network: LinkNetwork, flows: GpuFlows) -> set[LinkTier]:
    return {network.tier[link] for link in network.router(flows.src, flows.dst).link.tolist()}


@given(
    seed=st.integers(0, 10**6),
    pods=st.integers(1, 3),
    blocks=st.sampled_from([None, 2]),
    stage=st.sampled_from(list(FabricStage)),
    lost=st.floats(0, 0.6),
    allocation=st.sampled_from(["traffic", "uniform"]),
)
def test_circuits_fit_ports_and_pass_validation(
    seed: int, pods: int, blocks: int | None, stage: FabricStage, lost: float, allocation: str
) -> None:
    rng = np.random.default_rng(seed)
    servers = Servers(4 * pods - seed % 3)  # the last PoD may have empty slots
    whole = rfabric(
        servers,
        servers_per_pod=4,
        servers_per_tor=blocks,
        train_servers=min(4, servers.count) if seed % 2 else None,
        allocation=allocation,
    )
    fabric = whole.without(SimulatedFailures(tor_uplinks={0: lost}))
    src, dst = all_pairs(servers)
    some = rng.integers(0, len(src), 50)
    demand = GpuFlows(src[some], dst[some], rng.exponential(1e9, 50))
    for wanted in (None, period(demand, stage=stage)):
        cross_connects = fabric.circuits_of(wanted)
        assert validate(fabric.site, FabricState(failures=fabric.circuits.failed_ports), cross_connects) == ()
        circuits = fabric.circuits.between_tors(cross_connects)
        assert (circuits == circuits.T).all()
        ports = np.array([len(fabric.site.fibres[SiteTier.AGG][tor.id]) for tor in fabric.site.tors])
        ports[0] -= round(lost * ports[0])
        assert (circuits.sum(axis=1) <= ports).all()


def test_circuits_follow_traffic() -> None:
    """PoDs send in pairs. A pair uses all lanes of both PoDs; at rest, a third of the lanes connects the two."""
    servers = Servers(64)
    src = np.concatenate([np.arange(128), np.arange(256, 384)])
    flows = GpuFlows(src, src + 128, np.full(256, 1e9))
    times = {
        allocation: slowest_s(rfabric(servers, servers_per_pod=16, allocation=allocation).network(period(flows)), flows)
        for allocation in ("traffic", "fixed")
    }
    assert times["traffic"] < 0.5 * times["fixed"]
    assert times["traffic"] == pytest.approx(2e9 / servers.nic_bytes_per_s, rel=0.15)  # half of a ToR's are lanes


def test_uniform_allocation_is_slower_with_unequal_traffic() -> None:
    servers, src, heavy = Servers(48), np.arange(128), 2e9
    flows = GpuFlows.joined(
        [GpuFlows(src, src + 128, np.full(128, heavy)), GpuFlows(src, src + 256, np.full(128, heavy / 16))]
    )
    times = [
        slowest_s(rfabric(servers, servers_per_pod=16, allocation=each).network(period(flows)), flows)
        for each in ("traffic", "uniform")
    ]
    assert times[0] < 0.8 * times[1]


def test_rail_rings_inside_a_pod_stay_on_their_tors() -> None:
    fabric = rfabric(Servers(64))
    network = fabric.network(period(shifted(0, 256, 8)))
    assert tiers_of(network, shifted(0, 256, 8)) == {LinkTier.NIC}


def test_other_rail_is_reached_over_nvlink() -> None:
    network = rfabric(Servers(8)).network()
    assert tiers_of(network, GpuFlows.of([(0, 13, 1.0)])) == {LinkTier.NVLINK, LinkTier.NIC}


def test_stages_change_only_their_own_pods() -> None:
    fabric = rfabric(Servers(32), servers_per_pod=8, train_servers=16)
    train = fabric.circuits_of(period(shifted(0, 128, 64), "train"))
    gen = fabric.circuits_of(period(shifted(128, 256, 8), "gen", FabricStage.GEN))
    rest = fabric.circuits_of(None)
    of_gen = {switch.id for pod in ("gen0", "gen1") for switch in fabric.site.agg_switches_of[pod]}
    of_train = {switch.id for pod in ("train0", "train1") for switch in fabric.site.agg_switches_of[pod]}
    kept = {each for each in rest if each.switch in of_train}
    assert train != rest
    assert len({each for each in gen if each.switch in of_train} & kept) >= 0.4 * len(kept)  # except lanes to Gen
    assert {each.switch for each in train} & of_gen


def test_gen_periods_do_not_add_circuits_between_gen_pods() -> None:
    """Traffic between two Gen PoDs has the circuits at rest, a third of their lanes; without roles, all lanes."""
    flows = GpuFlows.joined([shifted(128, 256, 64), shifted(128, 256, 8)])

    def between_pods(**options: int) -> int:
        fabric = rfabric(Servers(32), servers_per_pod=8, **options)
        circuits = fabric.circuits.between_tors(fabric.circuits_of(period(flows, "gen", FabricStage.GEN)))
        return int(circuits[16:24, 24:32].sum())

    assert between_pods(train_servers=16) <= 11
    assert between_pods() >= 31  # except the lane that connects the other PoDs


def test_blocks_of_a_pod_stay_connected_when_demand_exceeds_ports() -> None:
    """Expert groups have four servers, in PoDs of 22. Groups that span blocks or PoDs need more than the eight fibres
    of their ToRs, which leaves no fibre to the other blocks."""
    fabric = rfabric(Servers(64), train_servers=20, servers_per_tor=8)
    src, dst = all_pairs(Servers(4))
    groups = [GpuFlows(first + src, first + dst, np.ones(len(src))) for first in range(160, 512, 32)]
    network = fabric.network(period(GpuFlows.joined(groups), "gen", FabricStage.GEN))
    one_each = all_pairs(Servers(44, 1, 1))
    check_routes(network, 160 + 8 * one_each[0], 160 + 8 * one_each[1])


def test_every_stage_has_a_lane_for_responses() -> None:
    fabric = rfabric(Servers(16), servers_per_pod=8, train_servers=8)
    for stage in FabricStage:
        network = fabric.network(period(shifted(0, 64, 8), f"at {stage}", stage))
        assert LinkTier.CORE in tiers_of(network, GpuFlows.of([(64, 0, 1.0)]))


def test_fixed_circuits_never_change() -> None:
    fabric = rfabric(Servers(16), servers_per_pod=4, allocation="fixed")
    assert not fabric.changes(None, period(shifted(0, 128, 32)))
    assert rfabric(Servers(16), servers_per_pod=4).changes(None, period(shifted(0, 64, 32)))


def test_reconfiguration_time_is_the_devices() -> None:
    assert rfabric(Servers(64)).reconfigures_s == 0.025
    assert rfabric(Servers(64), device="mems_3d_calient").reconfigures_s == 0.010
    assert mixnet(Servers(8)).reconfigures_s == 0.025
    assert topoopt(Servers(8)).reconfigures_s == 0
    assert rfabric(Servers(8)).reconfigures_s == 0.0  # a ToR that is alone on its rail has no circuits


def test_inventory_of_circuit_fabrics() -> None:
    """RFabric has as many uplink fibres as NICs (2,048), and half as many lanes with a port at both ends."""
    servers = Servers(256)
    assert rfabric(servers).inventory() == Inventory(
        transceivers=3 * 2048, nics=2048, electrical_ports=2 * 2048, ocs_ports=2 * 2048, fibers=5 * 1024
    )
    assert topoopt(servers).inventory() == Inventory(transceivers=2048, nics=2048, patch_panel_ports=2048, fibers=2048)
    assert mixnet(servers).inventory() == Inventory(
        transceivers=1536 + 6 * 512, nics=2048, electrical_ports=5 * 512, ocs_ports=1536, fibers=1536 + 3 * 512
    )


def test_empty_server_slots_add_no_components() -> None:
    """Two servers train and six generate, in PoDs of six slots. There is a ToR fibre per NIC and a lane for every
    second NIC, as if all PoDs were full."""
    alone = Inventory(transceivers=2 * 64, nics=64, electrical_ports=64, fibers=64)
    assert rfabric(Servers(8)).inventory() == alone  # one ToR per rail, without uplinks
    full = Inventory(transceivers=3 * 64, nics=64, electrical_ports=2 * 64, ocs_ports=2 * 64, fibers=64 + 64 + 32)
    assert rfabric(Servers(8), train_servers=2).inventory() == full
    assert rfabric(Servers(8), train_servers=4).inventory() == full
    assert rfabric(Servers(8), servers_per_pod=4).inventory() == full
    odd = rfabric(Servers(7), servers_per_pod=4).inventory()  # three fibres of four, and 12 of 16 lanes
    assert odd == Inventory(
        transceivers=3 * 56, nics=56, electrical_ports=2 * 56, ocs_ports=2 * 56, fibers=56 + 56 + 28
    )


@given(count=st.integers(2, 40), train=st.integers(0, 40), per_tor=st.sampled_from([None, 3]))
def test_inventory_depends_little_on_the_split_of_servers(count: int, train: int, per_tor: int | None) -> None:
    """Rounding adds at most one fibre per ToR. A ToR with one server fewer than others of its PoD has as many fibres.
    ToRs that are alone on their rails have none."""
    fabric = rfabric(Servers(count), train_servers=min(train, count), servers_per_tor=per_tor, servers_per_pod=8)
    found, nics = fabric.inventory(), 8 * count
    up = found.electrical_ports - nics
    assert found.transceivers == 2 * nics + up
    assert nics <= up + len(fabric.site.tors) or (up == 0 and len(fabric.site.tors) == 8)
    assert up <= nics * 1.5 + len(fabric.site.tors)
    assert found.nics == nics


def test_pipeline_stages_have_separate_pods() -> None:
    """36 servers in two PoDs of up to 32 are 18 in each, as two pipeline stages need."""
    pods = rfabric(Servers(101), train_servers=36, servers_per_pod=32).pods
    assert pods.apart
    train, gen = np.bincount(pods.of[:36]), np.bincount(pods.of[36:])[2:]
    assert train.tolist() == [18, 18]
    assert gen.tolist() == [22, 22, 21]
    assert np.bincount(rfabric(Servers(70)).pods.of).tolist() == [24, 23, 23]


def test_mixnet_connects_region_servers_with_the_most_traffic() -> None:
    fabric = mixnet(Servers(64))
    ring = shifted(0, 64, 8)  # eight servers, each to the next
    circuits = fabric.circuits(period(ring))
    assert (circuits.sum(axis=1) <= 6).all()
    assert circuits[0, 1] == circuits[0, 7] == 3
    network = fabric.network(period(ring))
    assert tiers_of(network, ring) == {LinkTier.NVLINK, LinkTier.DIRECT}


def test_circuits_have_the_bandwidth_of_their_nics() -> None:
    ring, servers = shifted(0, 64, 8), Servers(64)
    assert slowest_s(mixnet(servers).network(period(ring)), ring) == pytest.approx(8e9 / 3 / servers.nic_bytes_per_s)


def test_latency_counts_fibres_and_packet_switches() -> None:
    far = shifted(0, 128, 64)
    link_s, switch_s = 1e-6, 0.8e-6

    def latency_s(network: LinkNetwork, dst: int) -> float:
        return float(network.router(np.array([0]), np.array([dst])).latency_s[0])

    fabric = rfabric(Servers(16), servers_per_pod=8).network(period(far))
    assert latency_s(fabric, 8) == pytest.approx(2 * link_s + switch_s)
    assert latency_s(fabric, 64) == pytest.approx((2 + 4) * link_s + 2 * switch_s)
    assert latency_s(mixnet(Servers(8)).network(period(shifted(0, 64, 8))), 8) == pytest.approx(3 * link_s)
    assert latency_s(topoopt(Servers(8)).network(), 8) == pytest.approx(3 * link_s)
    two_hops = topoopt(Servers(8), ring_nics=1, demand=shifted(0, 64, 8)).network()
    assert latency_s(two_hops, 16) == pytest.approx((1 + 2 * 2) * link_s + switch_s)


def test_mixnet_leaves_a_region_over_two_nics() -> None:
    servers = Servers(64)
    fabric = mixnet(servers)
    far = shifted(0, 512, 256)
    network = fabric.network(period(far))
    assert LinkTier.DIRECT not in tiers_of(network, far)
    assert slowest_s(network, far) == pytest.approx(4e9 / servers.nic_bytes_per_s)


def test_mixnet_uses_the_other_tree_nic_after_a_failure() -> None:
    servers = Servers(64)
    network = mixnet(servers).without(SimulatedFailures(nics=frozenset({6}))).network(period(shifted(0, 512, 256)))
    assert slowest_s(network, shifted(0, 512, 256)) == pytest.approx(8e9 / servers.nic_bytes_per_s)


def test_mixnet_allocates_fewer_circuits_after_nic_failures() -> None:
    fabric = mixnet(Servers(8)).without(SimulatedFailures(nics=frozenset({0, 1, 2, 3})))
    assert fabric.circuits(None)[0].sum() <= 2


@given(seed=st.integers(0, 10**6), count=st.integers(2, 12), rings=st.integers(1, 8))
def test_topoopt_nics_send_to_one_server_and_receive_from_one(seed: int, count: int, rings: int) -> None:
    rng, servers = np.random.default_rng(seed), Servers(count)
    src, dst = all_pairs(servers)
    some = rng.integers(0, len(src), 40)
    demand = GpuFlows(src[some], dst[some], rng.exponential(1e9, 40))
    fabric = topoopt(servers, demand=demand, ring_nics=rings)
    for ring in fabric.sends_to:
        assert sorted(ring.tolist()) == list(range(count))
        assert (ring != np.arange(count)).all()
    assert (fabric.joins.sum(axis=1) == 8).all()
    assert (fabric.joins.sum(axis=0) == 8).all()
    check_routes(fabric.network(), src, dst)


def test_topoopt_serves_its_demand_in_one_hop() -> None:
    servers, ring = Servers(32), shifted(0, 256, 80)
    network = topoopt(servers, demand=ring).network()
    routes = network.router(ring.src, ring.dst)
    direct = [network.tier[link] is LinkTier.DIRECT for link in routes.link.tolist()]
    assert np.bincount(owners(routes), direct).tolist() == [1] * 256
    assert slowest_s(network, ring) <= 8 / 6 * 1e9 / servers.nic_bytes_per_s  # the other NICs form rings


def test_topoopt_chooses_the_best_number_of_ring_nics() -> None:
    """The fewest possible NICs form rings if traffic between server pairs is far larger than around."""
    servers = Servers(32)
    demand = GpuFlows.joined([shifted(0, 256, 16), *(shifted(at, at + 16, 8, 30e9) for at in range(0, 256, 16))])
    best, *others = (
        slowest_s(topoopt(servers, demand=demand, ring_nics=each).network(), demand) for each in (None, 2, 4, 6)
    )
    assert best == pytest.approx(min(others))
    assert best < 0.8 * others[1]


def test_topoopt_without_a_demand_has_only_rings() -> None:
    servers = Servers(32)
    assert np.array_equal(topoopt(servers).sends_to, topoopt(servers, ring_nics=8).sends_to)


def test_topoopt_traffic_loads_every_hop() -> None:
    """Hosts forward most of an all-to-all for which the topology was not built."""
    servers = Servers(64)
    network = topoopt(servers).network()
    src, dst = all_pairs(servers)
    outside = src // 8 != dst // 8
    routes = network.router(src[outside], dst[outside])
    direct = np.array([each is LinkTier.DIRECT for each in network.tier])
    hops = routes.share[direct[routes.link]].sum() / outside.sum()
    assert 2 < hops < 6


def test_rfabric_rejects_failures_of_unknown_uplinks() -> None:
    for failed in (SimulatedFailures(tor_uplinks={8: 0.5}), SimulatedFailures(pod_uplinks={0: 1.5})):
        with pytest.raises(ValueError, match="fractions 0 to 1 of bundles 0 to"):
            rfabric(Servers(8)).without(failed).network()
