"""The conformance suite of fabrics: each `class TestX(FabricConformance)` defines how the fabric is built."""

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routes import all_pairs, check_order, check_routes

from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Period, SimulatedFabric, SimulatedFailures
from orchestrrl.lab.sim.net.fabrics.registry import KINDS, build
from orchestrrl.lab.sim.net.model import GpuFlows, LinkNetwork, LinkTier, Servers


def same(one: LinkNetwork, other: LinkNetwork) -> bool:
    """Return whether two networks have the same links, and the same routes for all pairs."""
    if one.tier != other.tier or not np.array_equal(one.capacity_bytes_per_s, other.capacity_bytes_per_s):
        return False
    routes = [each.router(*all_pairs(each.servers)) for each in (one, other)]
    return all(
        np.array_equal(getattr(routes[0], name), getattr(routes[1], name))
        for name in ("begin", "link", "share", "latency_s")
    )


def within(servers: int, gpus: int = 8) -> Period:
    """Return a period with traffic between all GPUs of the first `servers` servers."""
    src, dst = all_pairs(Servers(servers, gpus, 1))
    return Period(f"first{servers}", FabricStage.TRAIN, GpuFlows(src, dst, np.ones(len(src))))


def above(network: LinkNetwork, tor: int) -> float:
    """Return the bandwidth from a ToR upwards."""
    assert network.ends is not None
    upward = [tier in (LinkTier.AGG, LinkTier.CORE) for tier in network.tier]
    return float(network.capacity_bytes_per_s[(network.ends[:, 0] == tor) & upward].sum())


def transmitters(network: LinkNetwork) -> float:
    """Return the bandwidth of all links that leave a server or connect switches, in units of a NIC's rate."""
    servers, ends = network.servers, network.ends
    assert ends is not None
    server = np.full(int(ends.max()) + 1, -1)
    server[: servers.nics] = np.arange(servers.nics) // servers.nics_per_server
    server[servers.nics : servers.nics + servers.count] = np.arange(servers.count)
    one, other = server[ends].T
    outside = (one != other) | (one < 0)
    return float(network.capacity_bytes_per_s[outside].sum() / servers.nic_bytes_per_s)


class FabricConformance:
    kind: str
    options: ClassVar[dict[str, object]] = {}
    uplinks = True  # the fabric has ToRs and PoDs
    both_ways_alike = True
    all_lit = True  # every transceiver always has a link

    def fabric(self, servers: Servers | None = None) -> SimulatedFabric:
        return build(self.kind, servers or Servers(8), **self.options)

    def networks(self, fabric: SimulatedFabric, busy: int = 4) -> list[LinkNetwork]:
        demand = within(busy).demand
        return [fabric.network(), *(fabric.network(Period(f"p {stage}", stage, demand)) for stage in FabricStage)]

    def test_every_gpu_pair_has_a_valid_route_in_every_period(self) -> None:
        fabric = self.fabric()
        for network in self.networks(fabric):
            check_routes(network, *all_pairs(fabric.servers))
            check_order(network, *all_pairs(fabric.servers))

    def test_routes_are_valid_with_fewer_nics_than_gpus(self) -> None:
        fabric = self.fabric(Servers(8, 8, 4))
        for network in self.networks(fabric):
            check_routes(network, *all_pairs(fabric.servers))

    def test_traffic_inside_a_server_uses_only_nvlink(self) -> None:
        fabric = self.fabric()
        src, dst = all_pairs(fabric.servers)
        inside = src // 8 == dst // 8
        network = fabric.network()
        routes = network.router(src[inside], dst[inside])
        assert {network.tier[link] for link in routes.link.tolist()} == {LinkTier.NVLINK}
        assert np.array_equal(np.diff(routes.begin), np.full(inside.sum(), 2))

    def test_links_are_symmetric(self) -> None:
        if not self.both_ways_alike:
            pytest.skip("a NIC sends to one server and receives from another")
        for network in self.networks(self.fabric()):
            assert network.ends is not None
            rows = zip(network.ends.tolist(), network.capacity_bytes_per_s.tolist(), strict=True)
            there = sorted((one, other, rate) for (one, other), rate in rows)
            assert there == sorted((other, one, rate) for one, other, rate in there)

    def test_network_is_deterministic(self) -> None:
        for one, other in zip(self.networks(self.fabric()), self.networks(self.fabric()), strict=True):
            assert same(one, other)

    def test_network_of_a_period_does_not_depend_on_earlier_periods(self) -> None:
        one, other = self.fabric(), self.fabric()
        first, second = within(2), within(4)
        one.network(first)
        assert same(one.network(second), other.network(second))

    def test_changes_reports_different_networks(self) -> None:
        fabric, period = self.fabric(), within(4)
        assert not fabric.changes(period, period)
        assert fabric.changes(None, period) == (not same(fabric.network(), fabric.network(period)))
        assert not fabric.changes(None, period) or fabric.reconfigures_s > 0

    def test_failed_nics_are_bypassed(self) -> None:
        whole = self.fabric()
        fabric = whole.without(SimulatedFailures(nics=frozenset({0, 3, 17})))
        for network in self.networks(fabric):
            check_routes(network, *all_pairs(fabric.servers))
            up = [link for link, tier in enumerate(network.tier) if tier is LinkTier.NIC]
            assert network.ends is not None
            for link in up:
                if {0, 3, 17} & set(network.ends[link].tolist()):
                    assert network.capacity_bytes_per_s[link] == 0

    def test_server_without_nics_is_disconnected(self) -> None:
        network = self.fabric().without(SimulatedFailures(nics=frozenset(range(8, 16)))).network()
        with pytest.raises(ValueError, match=r"no NIC works on the server of failed NIC|no circuits connect node"):
            network.router(np.array([8]), np.array([0]))
        check_routes(network, np.array([8]), np.array([9]))

    def test_failed_uplinks_reduce_bandwidth_but_keep_a_path(self) -> None:
        if not self.uplinks:
            pytest.skip("the fabric has no ToRs")
        whole = self.fabric()
        fabric = whole.without(SimulatedFailures(tor_uplinks={0: 0.5}, pod_uplinks={0: 0.5}))
        for network in self.networks(fabric):
            check_routes(network, *all_pairs(fabric.servers))
        tor = fabric.servers.nics + fabric.servers.count
        assert 0 < above(fabric.network(), tor) < above(whole.network(), tor)

    @pytest.mark.parametrize(
        ("failed", "words"),
        [
            (SimulatedFailures(nics=frozenset({64})), r"failed NICs must be in 0\.\.63, got 64"),
            (SimulatedFailures(nics=frozenset({3, -1})), r"failed NICs must be in 0\.\.63, got -1"),
        ],
    )
    def test_failures_of_unknown_nics_are_rejected(self, failed: SimulatedFailures, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            self.fabric().without(failed).network()

    def test_failures_add_up(self) -> None:
        nics = frozenset({0}), frozenset({9})
        one = self.fabric().without(SimulatedFailures(nics=nics[0])).without(SimulatedFailures(nics=nics[1]))
        both = self.fabric().without(SimulatedFailures(nics=nics[0] | nics[1]))
        assert same(one.network(), both.network())

    def test_flows_with_invalid_gpus_are_rejected(self) -> None:
        network = self.fabric().network()
        for src, dst, words in ((0, 64, r"in 0\.\.63, got 64"), (-1, 3, "got -1"), (5, 5, "got GPU 5 for both")):
            with pytest.raises(ValueError, match=words):
                network.router(np.array([src]), np.array([dst]))

    def test_no_flows_use_no_links(self) -> None:
        routes = self.fabric().network().router(np.empty(0, np.int64), np.empty(0, np.int64))
        assert routes.begin.tolist() == [0]
        assert len(routes.link) == len(routes.latency_s) == 0

    def test_single_server_has_valid_routes(self) -> None:
        fabric = self.fabric(Servers(1))
        check_routes(fabric.network(), *all_pairs(fabric.servers))
        assert fabric.inventory().nics == 8

    @pytest.mark.parametrize("count", [2, 3, 5, 7, 8, 11])
    def test_links_match_the_inventory(self, count: int) -> None:
        """Each sending end of a link has a transceiver, also if PoDs and ToRs are partly filled."""
        fabric = self.fabric(Servers(count))
        bought = fabric.inventory().transceivers
        for network in self.networks(fabric, min(4, count)):
            if self.all_lit:
                assert transmitters(network) == pytest.approx(bought)
            else:
                assert transmitters(network) <= bought + 1e-6
        assert transmitters(fabric.network()) >= 0.9 * bought

    def test_every_server_is_in_a_pod(self) -> None:
        for count in (1, 7, 8):
            pods = self.fabric(Servers(count)).pods.of
            assert len(pods) == count
            assert sorted(set(pods.tolist())) == list(range(int(pods.max()) + 1))

    def test_fabric_and_network_have_the_kind_as_name(self) -> None:
        fabric = self.fabric()
        assert fabric.name == self.kind
        assert fabric.network().name == self.kind
        assert fabric.inventory().nics == 64


class TestFatTree(FabricConformance):
    kind = "fat_tree"
    options: ClassVar[dict[str, object]] = {"servers_per_pod": 4, "radix": 32}


class TestFatTreeOfSmallTors(FabricConformance):
    kind = "fat_tree"
    options: ClassVar[dict[str, object]] = {"servers_per_pod": 4, "servers_per_tor": 1}


class TestOversubscribed(FabricConformance):
    kind = "oversubscribed"
    options: ClassVar[dict[str, object]] = {"servers_per_pod": 4, "radix": 32}


class TestOversubscribedOfSmallTors(FabricConformance):
    kind = "oversubscribed"
    options: ClassVar[dict[str, object]] = {"servers_per_pod": 4, "servers_per_tor": 2}


class TestRailOptimized(FabricConformance):
    kind = "rail_optimized"
    options: ClassVar[dict[str, object]] = {"servers_per_pod": 4}


class TestRailOptimizedOfSmallTors(FabricConformance):
    kind = "rail_optimized"
    options: ClassVar[dict[str, object]] = {"servers_per_pod": 4, "servers_per_tor": 2}


class TestTopoOpt(FabricConformance):
    kind = "topoopt"
    uplinks = False
    both_ways_alike = False


class TestTopoOptOfADemand(FabricConformance):
    kind = "topoopt"
    uplinks = False
    both_ways_alike = False

    def fabric(self, servers: Servers | None = None) -> SimulatedFabric:
        servers = servers or Servers(8)
        return build(self.kind, servers, demand=within(min(4, servers.count)).demand)


class TestMixNet(FabricConformance):
    kind = "mixnet"
    all_lit = False
    options: ClassVar[dict[str, object]] = {"servers_per_region": 4, "servers_per_pod": 4}


class TestMixNetOfSmallTors(FabricConformance):
    kind = "mixnet"
    all_lit = False
    options: ClassVar[dict[str, object]] = {"servers_per_region": 4, "servers_per_pod": 4, "servers_per_tor": 1}


class TestRFabric(FabricConformance):
    kind = "rfabric"
    all_lit = False
    options: ClassVar[dict[str, object]] = {"servers_per_pod": 4}


class TestRFabricWithRoles(FabricConformance):
    kind = "rfabric"
    all_lit = False

    def fabric(self, servers: Servers | None = None) -> SimulatedFabric:
        servers = servers or Servers(8)
        return build(self.kind, servers, servers_per_pod=4, train_servers=(servers.count + 1) // 2)


class TestRFabricOfTwoTorsToARail(FabricConformance):
    kind = "rfabric"
    all_lit = False
    options: ClassVar[dict[str, object]] = {"servers_per_pod": 8, "servers_per_tor": 4, "allocation": "uniform"}


def test_every_kind_has_a_conformance_suite() -> None:
    assert {each.kind for each in FabricConformance.__subclasses__()} == set(KINDS)


@given(
    kind=st.sampled_from(sorted(KINDS)), count=st.integers(2, 9), gpus=st.sampled_from([2, 4, 8]), period=st.booleans()
)
def test_small_clusters_have_valid_routes(kind: str, count: int, gpus: int, period: bool) -> None:
    servers = Servers(count, gpus, gpus)
    fabric = build(kind, servers, **({"eps_nics": 1} if kind == "mixnet" else {}))
    network = fabric.network(within((count + 1) // 2, gpus) if period else None)
    check_routes(network, *all_pairs(servers))
