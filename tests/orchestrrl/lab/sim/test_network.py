"""Tests of the shared NIC budget per node: demands are met if they fit, and scaled in proportion otherwise."""

import asyncio

import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.lab.sim.network import NodeNetwork
from planner.sync_tree.network import LeftForMoves


async def times_s(
    network: NodeNetwork, clock: VirtualClock, *transfers: tuple[tuple[int, ...], float, float]
) -> list[float]:
    ends: dict[int, float] = {}

    async def carry(index: int, nodes: tuple[int, ...], wish_gbps: float, gbytes: float) -> None:
        await network.transfer(nodes, wish_gbps, gbytes)
        ends[index] = clock.now_s()

    tasks = [asyncio.create_task(carry(index, *transfer)) for index, transfer in enumerate(transfers)]
    await clock.advance(1000.0)
    await asyncio.gather(*tasks)
    network.close()
    return [ends[index] for index in range(len(transfers))]


def network_of(clock: VirtualClock, share: bool = True) -> NodeNetwork:
    return NodeNetwork(clock, 100.0, share, lambda: None)


async def test_single_transfer_gets_its_demand() -> None:
    clock = VirtualClock()
    assert await times_s(network_of(clock), clock, ((0, 1), 50.0, 50.0)) == [pytest.approx(8.0)]


async def test_transfers_share_a_nic_until_the_first_ends() -> None:
    clock = VirtualClock()
    # The demands are 80 + 80 of 100: each gets 50 until the first ends, then the second gets 80.
    first, second = await times_s(network_of(clock), clock, ((0, 1), 80.0, 50.0), ((0, 2), 80.0, 100.0))
    assert first == pytest.approx(400 / 50)
    assert second == pytest.approx(8.0 + (800 - 400) / 80)


async def test_transfers_do_not_interfere_without_sharing() -> None:
    clock = VirtualClock()
    ends = await times_s(network_of(clock, share=False), clock, ((0, 1), 80.0, 50.0), ((0, 2), 80.0, 100.0))
    assert ends == [pytest.approx(5.0), pytest.approx(10.0)]


async def test_engine_traffic_slows_only_transfers_between_nodes() -> None:
    clock = VirtualClock()
    network = network_of(clock)
    network.engines_send({0: 100.0})
    across, inside = await times_s(network, clock, ((0, 1), 100.0, 50.0), ((), 400.0, 50.0))
    assert across == pytest.approx(8.0)  # half of the NIC
    assert inside == pytest.approx(1.0)
    assert network.crowding(0) == pytest.approx(1.0)


async def test_bandwidth_left_for_moves() -> None:
    clock = VirtualClock()
    network = network_of(clock)
    assert network.left_for_moves() == LeftForMoves(1.0, ())
    network.engines_send({0: 50.0, 1: 20.0})
    assert network.left_for_moves() == LeftForMoves(pytest.approx(1 / 1.5), ("engines' own traffic",))
    weights = asyncio.create_task(network.transfer((1,), 100.0, 50.0, "weight sync"))
    moved = asyncio.create_task(network.transfer((0, 1), 100.0, 50.0))  # moves do not count against themselves
    await clock.advance(0.1)
    assert network.left_for_moves() == LeftForMoves(pytest.approx(1 / 2.2), ("weight sync", "engines' own traffic"))
    await clock.advance(1000.0)
    await asyncio.gather(weights, moved)
    network.close()
