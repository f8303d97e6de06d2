"""Tests of the packet fabrics (fat tree, oversubscribed, rail-optimised) against closed forms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import all_pairs, check_routes, load, slowest_s

from orchestrrl.lab.sim.net.fabrics.base import Inventory, SimulatedFailures
from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.model import GpuFlows, LinkNetwork, LinkTier, Servers


def shifted(gpus: int, by: int) -> GpuFlows:
    """Return flows from each GPU to the GPU `by` positions further, cyclically."""
    src = np.arange(gpus)
    return GpuFlows(src, (src + by) % gpus, np.full(gpus, 1e9))


def nic_s(servers: Servers) -> float:
    return 1e9 / servers.nic_bytes_per_s


@pytest.mark.parametrize("by", [8, 24, 64, 500, 1024])
def test_fat_tree_does_not_block_shifts(by: int) -> None:
    servers = Servers(256)
    assert slowest_s(build("fat_tree", servers).network(), shifted(2048, by)) == pytest.approx(nic_s(servers))


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 20), radix=st.sampled_from([16, 32, 64]))
def test_fat_tree_does_not_block_random_permutations(seed: int, count: int, radix: int) -> None:
    servers = Servers(count)
    dst = np.random.default_rng(seed).permutation(servers.gpus)
    src = np.flatnonzero(np.arange(servers.gpus) // 8 != dst // 8)
    flows = GpuFlows(src, dst[src], np.full(len(src), 1e9))
    network = build("fat_tree", servers, radix=radix, servers_per_pod=4).network()
    assert slowest_s(network, flows) == pytest.approx(nic_s(servers) if len(src) else 0.0)


def test_oversubscription_slows_only_traffic_above_a_tor() -> None:
    servers = Servers(48)
    network = build("oversubscribed", servers, servers_per_pod=24).network()  # six servers to a ToR
    assert slowest_s(network, shifted(384, 48)) == pytest.approx(3 * nic_s(servers))
    assert slowest_s(network, shifted(384, 192)) == pytest.approx(3 * nic_s(servers))
    inside = shifted(384, 8)
    stays = inside.src // 48 == inside.dst // 48
    below = GpuFlows(inside.src[stays], inside.dst[stays], inside.bytes[stays])
    assert slowest_s(network, below) == pytest.approx(nic_s(servers))


@pytest.mark.parametrize("ratio", [1.0, 2.0, 4.0])
def test_uplink_bandwidth_follows_the_ratio(ratio: float) -> None:
    servers = Servers(64)
    network = build("oversubscribed", servers, ratio=ratio).network()
    up = tier_sum(network, LinkTier.AGG) / 2
    assert up == pytest.approx(servers.nics * servers.nic_bytes_per_s / ratio)


def tier_sum(network: LinkNetwork, tier: LinkTier) -> float:
    return float(network.capacity_bytes_per_s[[each is tier for each in network.tier]].sum())


def tiers_of(network: LinkNetwork, src: int, dst: int) -> list[LinkTier]:
    routes = network.router(np.array([src]), np.array([dst]))
    return [network.tier[link] for link in routes.link.tolist()]


def test_latency_counts_links_and_switches() -> None:
    servers = Servers(64)
    network = build("fat_tree", servers).network()
    for dst, links, switches in ((8, 2, 1), (64, 4, 3), (300, 6, 5)):
        routes = network.router(np.array([0]), np.array([dst]))
        assert len(routes.link) == links
        assert routes.latency_s[0] == pytest.approx(links * 1e-6 + switches * 0.8e-6)


def test_servers_per_tor_limits_servers_below_a_tor() -> None:
    servers = Servers(16)
    agg, nic = LinkTier.AGG, LinkTier.NIC
    for kind in ("fat_tree", "oversubscribed"):
        usual, small = (build(kind, servers, servers_per_tor=each).network() for each in (None, 2))
        assert tiers_of(usual, 0, 24) == tiers_of(small, 0, 8) == [nic, nic]
        assert tiers_of(small, 0, 16) == [nic, agg, agg, nic]
    rails = build("rail_optimized", servers, servers_per_tor=8).network()
    assert tiers_of(rails, 0, 56) == [nic, nic]
    assert tiers_of(rails, 0, 64) == [nic, agg, agg, nic]


def test_number_of_uplinks_is_rounded_up() -> None:
    """16 NICs of two servers at 3:1 have six uplinks, not five and a third."""
    servers = Servers(8)
    network = build("oversubscribed", servers, servers_per_tor=2).network()
    assert tier_sum(network, LinkTier.AGG) == pytest.approx(2 * 4 * 6 * servers.nic_bytes_per_s)


def test_rail_is_one_switch_away_inside_a_pod() -> None:
    network = build("rail_optimized", Servers(64)).network()
    nvlink, nic, agg, core = LinkTier.NVLINK, LinkTier.NIC, LinkTier.AGG, LinkTier.CORE
    assert tiers_of(network, 0, 8 * 31) == [nic, nic]
    assert tiers_of(network, 0, 8 * 31 + 5) == [nvlink, nvlink, nic, nic]
    assert tiers_of(network, 0, 8 * 40) == [nic, agg, core, core, agg, nic]


def test_rail_optimized_does_not_block_shifts() -> None:
    servers = Servers(256)
    network = build("rail_optimized", servers).network()
    for by in (8, 300, 1024):
        assert slowest_s(network, shifted(2048, by)) == pytest.approx(nic_s(servers))


def test_traffic_of_a_failed_nic_is_spread_evenly() -> None:
    servers = Servers(8)
    for kind in ("fat_tree", "rail_optimized"):
        network = build(kind, servers).without(SimulatedFailures(nics=frozenset({0}))).network()
        busy = load(network, GpuFlows.of([(0, 8, 7e9)]))
        nics = [link for link in np.flatnonzero(busy).tolist() if network.tier[link] is LinkTier.NIC]
        assert network.ends is not None
        up = [link for link in nics if network.ends[link, 0] < 8]
        assert busy[up].tolist() == pytest.approx([1e9] * 7)


def test_lost_tor_uplinks_slow_the_tors_servers() -> None:
    servers = Servers(64)
    fabric = build("fat_tree", servers).without(SimulatedFailures(tor_uplinks={0: 0.25}))
    assert slowest_s(fabric.network(), shifted(512, 256)) == pytest.approx(nic_s(servers) / 0.75)
    gone = fabric.without(SimulatedFailures(tor_uplinks={0: 1.0})).network()
    with pytest.raises(ValueError, match="no path from GPU 0 to GPU 256"):
        gone.router(np.array([40, 0]), np.array([400, 256]))
    unknown = fabric.without(SimulatedFailures(tor_uplinks={16: 0.5}))
    with pytest.raises(ValueError, match="bundles 0 to 15"):
        unknown.network()


def test_lost_pod_uplinks_slow_only_traffic_between_pods() -> None:
    servers = Servers(64)
    fabric = build("fat_tree", servers).without(SimulatedFailures(pod_uplinks={0: 0.5}))
    assert slowest_s(fabric.network(), shifted(512, 256)) == pytest.approx(nic_s(servers) / 0.5)
    assert slowest_s(fabric.network(), GpuFlows.of([(0, 64, 1e9)])) == pytest.approx(nic_s(servers))


def test_relay_over_nvlink_adds_latency() -> None:
    servers = Servers(8)
    straight = build("fat_tree", servers).network().router(np.array([0]), np.array([8])).latency_s
    network = build("fat_tree", servers).without(SimulatedFailures(nics=frozenset({0, 8}))).network()
    relayed = network.router(np.array([0]), np.array([8])).latency_s
    assert relayed == pytest.approx(straight + 2 * servers.propagation_s)


def test_inventory_of_packet_fabrics() -> None:
    """Each of 2,048 NICs has three links with a transceiver at both ends, and five switch ports."""
    assert build("fat_tree", Servers(256)).inventory() == Inventory(
        transceivers=6 * 2048, nics=2048, electrical_ports=5 * 2048, fibers=3 * 2048
    )
    assert build("fat_tree", Servers(4)).inventory() == Inventory(  # one ToR has all servers
        transceivers=64, nics=32, electrical_ports=32, fibers=32
    )
    assert build("rail_optimized", Servers(256)).inventory() == build("fat_tree", Servers(256)).inventory()
    assert build("oversubscribed", Servers(48), servers_per_pod=24).inventory() == Inventory(
        transceivers=2 * 640, nics=384, electrical_ports=384 + 4 * 128, fibers=640
    )


def test_uneven_numbers_of_servers_have_valid_routes() -> None:
    for kind in ("fat_tree", "oversubscribed", "rail_optimized"):
        for count in (1, 3, 7, 11):
            fabric = build(kind, Servers(count), servers_per_pod=3)
            check_routes(fabric.network(), *all_pairs(fabric.servers))
