"""Tests of RFabric's circuits by traffic against an even split, with small ToRs and many PoDs."""

import numpy as np
import pytest
from routes import all_pairs, check_routes, slowest_s

from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Period
from orchestrrl.lab.sim.net.fabrics.rfabric import RFabric, rfabric
from orchestrrl.lab.sim.net.model import GpuFlows, Ints, Servers

GB = 1e9


def half_way(servers: Servers, size: float) -> GpuFlows:
    """Return flows from each GPU of the first half to its counterpart in the second, as between two pipeline stages."""
    src = np.arange(servers.gpus // 2)
    return GpuFlows(src, src + servers.gpus // 2, np.full(len(src), size))


def rings_of_three(servers: Servers, size: float) -> GpuFlows:
    """Return flows in rings of three servers, from each GPU to its counterpart in the next server."""
    src = np.arange(servers.count // 3 * 24)
    return GpuFlows(src, src // 24 * 24 + (src % 24 + 8) % 24, np.full(len(src), size))


def one_after_the_other_s(fabric: RFabric, *bursts: GpuFlows) -> float:
    network = fabric.network(Period("period", FabricStage.TRAIN, GpuFlows.joined(bursts)))
    return sum(slowest_s(network, each) for each in bursts)


@pytest.mark.parametrize(
    ("servers", "per_tor", "per_pod"), [(36, 8, 8), (36, 4, 8), (60, 4, 8), (24, 4, 8), (18, 4, 4), (36, 4, 32)]
)
@pytest.mark.parametrize("heavy", [1, 16])
def test_allocation_by_traffic_is_no_slower_than_uniform(servers: int, per_tor: int, per_pod: int, heavy: int) -> None:
    """Separate bursts form one demand. Most traffic is between PoDs, and there are many light pairs inside and between
    PoDs. In an earlier version, light pairs took circuits from heavy pairs, and both took long detours."""
    cluster = Servers(servers)
    bursts = half_way(cluster, heavy * GB), rings_of_three(cluster, GB)
    times_s = {
        allocation: one_after_the_other_s(
            rfabric(cluster, servers_per_tor=per_tor, servers_per_pod=per_pod, allocation=allocation), *bursts
        )
        for allocation in ("traffic", "uniform")
    }
    assert times_s["traffic"] <= 1.05 * times_s["uniform"]


def between(fabric: RFabric, flows: GpuFlows) -> tuple[Ints, Ints]:
    """Return the circuits between ToRs that send to each other, and between ToRs of different PoDs that do not."""
    period = Period("period", FabricStage.TRAIN, flows)
    circuits = fabric.circuits.between_tors(fabric.circuits_of(period))
    demand = fabric.tor_demand(flows)
    sends, pod_of = demand + demand.T > 0, fabric.circuits.pod_of
    return circuits[sends], circuits[~sends & (pod_of[:, None] != pod_of)]


def test_pods_without_common_demand_are_connected_by_one_circuit() -> None:
    """Two PoDs send to two others: every sending pair has circuits, and one circuit connects the two halves."""
    cluster = Servers(32)
    fabric = rfabric(cluster, servers_per_pod=8, servers_per_tor=4)
    flows = half_way(cluster, GB)
    sending, others = between(fabric, flows)
    assert sending.min() >= 1
    assert sending.sum() == 2 * (2 * 32 - 2)  # one of 32 lanes of each half is the bridge's; each lane counts twice
    assert others.sum() == 2
    one_each = all_pairs(Servers(32, 1, 1))
    check_routes(fabric.network(Period("period", FabricStage.TRAIN, flows)), 8 * one_each[0], 8 * one_each[1])


def test_tors_without_traffic_get_no_lanes() -> None:
    cluster = Servers(36)
    fabric = rfabric(cluster, servers_per_pod=8, servers_per_tor=4)
    _, others = between(fabric, GpuFlows.joined([half_way(cluster, 16 * GB), rings_of_three(cluster, GB)]))
    assert others.sum() == 0
