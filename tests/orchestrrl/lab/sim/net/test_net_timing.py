"""Tests of collective times on networks that are small enough for closed forms."""

import numpy as np
import pytest
from reference_networks import one_switch, two_tiers

from orchestrrl.lab.sim.net.collectives import (
    Protocol,
    RankShape,
    RingChoice,
    all_gather,
    all_reduce,
    all_to_all,
    p2p,
    reduce_scatter,
)
from orchestrrl.lab.sim.net.fluid import finish_s, seconds, tier_bytes
from orchestrrl.lab.sim.net.model import GpuFlows, LinkNetwork, LinkTier, MessageTransfer, Servers

TESTBED = Servers(5)  # of figure 12(c) in the OrchestrRL paper: 40 GPUs, NICs of 200 Gbit/s
MUCH = 4e9


def rail_testbed() -> LinkNetwork:
    return two_tiers(TESTBED, servers_per_tor=5, rails=True)


def test_ring_over_single_gpu_servers_matches_closed_form() -> None:
    servers = Servers(6, gpus_per_server=1, nics_per_server=1)
    transfer = all_reduce(range(6), MUCH, servers)
    latency_s = 2 * servers.propagation_s + servers.processing_s
    assert transfer.overhead_s == RingChoice(RankShape(tuple(range(6)), (0,) * 6), Protocol.SIMPLE, 2).overhead_s
    expected = 2 * 5 / 6 * MUCH / servers.nic_bytes_per_s + 10 * latency_s + transfer.overhead_s
    assert seconds(one_switch(servers), transfer) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("what", [all_reduce, all_gather, reduce_scatter])
def test_large_messages_reach_the_bandwidth_of_all_nics(what) -> None:  # type: ignore[no-untyped-def]
    n, size = 40, MUCH if what is all_reduce else MUCH / 40
    bus = 2 * (n - 1) / n if what is all_reduce else n - 1
    rate = bus * size / seconds(rail_testbed(), what(range(n), size, TESTBED))
    assert rate == pytest.approx(8 * TESTBED.nic_bytes_per_s, rel=0.02)


def test_bus_bandwidth_rises_with_message_size() -> None:
    sizes = 2.0 ** np.arange(12, 34)
    bus = [2 * 39 / 40 * size / seconds(rail_testbed(), all_reduce(range(40), size, TESTBED)) for size in sizes]
    assert bus == sorted(bus)


def test_oversubscription_of_three_triples_uplink_time() -> None:
    servers = Servers(8)
    across = all_to_all(range(64), MUCH, servers)
    free, narrow = (two_tiers(servers, servers_per_tor=4, oversubscribed=each) for each in (1.0, 3.0))
    remote = 32 / 64 * MUCH / servers.nic_bytes_per_s  # half of a GPU's data goes to servers below the other ToR
    assert seconds(free, across) - across.overhead_s == pytest.approx(
        56 / 64 * MUCH / servers.nic_bytes_per_s, rel=1e-3
    )
    assert seconds(narrow, across) - across.overhead_s == pytest.approx(3 * remote, rel=1e-3)


def test_concurrent_transfers_share_bandwidth_and_end_separately() -> None:
    servers = Servers(3)
    short, long = p2p([0, 16], 1e9, servers), p2p([8, 16], 3e9, servers)
    alone = 1e9 / servers.nic_bytes_per_s
    first, second = finish_s(one_switch(servers), GpuFlows.joined([short.flows, long.flows]))
    assert first == pytest.approx(2 * alone)
    assert second == pytest.approx(4 * alone)


def test_empty_transfer_takes_no_time() -> None:
    servers = Servers(2)
    assert seconds(one_switch(servers), all_reduce([3], 1e9, servers)) == 0
    assert seconds(one_switch(servers), MessageTransfer(GpuFlows.none())) == 0


def test_tier_bytes_count_both_directions() -> None:
    servers = Servers(4)
    flows = GpuFlows.of([(0, 1, 5.0), (0, 8, 7.0), (0, 31, 11.0)])
    counted = tier_bytes(two_tiers(servers, servers_per_tor=2), flows)
    assert counted == {LinkTier.NVLINK: 10.0, LinkTier.NIC: 36.0, LinkTier.AGG: 22.0}


def test_transfer_over_a_failed_link_never_ends() -> None:
    servers = Servers(8)
    dead = two_tiers(servers, oversubscribed=np.inf)
    assert seconds(dead, p2p([0, 63], 1e6, servers)) == np.inf
