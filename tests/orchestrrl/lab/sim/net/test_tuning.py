"""Tests of NCCL's tuning model against values computed by hand, in microseconds, for 32 GPUs on 4 servers."""

import numpy as np
import pytest

from orchestrrl.lab.sim.net.collectives import (
    WIRE,
    Protocol,
    RankShape,
    RingChoice,
    all_reduce,
    all_to_all,
    best,
    p2p_overhead_s,
    shaped,
)
from orchestrrl.lab.sim.net.model import Servers

SERVERS = Servers(64)
SWITCH_US = 2.8  # two links and a switch, which are part of the routes


def shape(groups: np.ndarray) -> RankShape:
    ((found, _),) = shaped(groups[None], SERVERS)
    return found


FOUR, SPREAD = shape(np.arange(32)), shape(np.arange(0, 32, 8))


@pytest.mark.parametrize(
    ("protocol", "laps", "microseconds"),
    [
        (Protocol.LL, 2, 6.6 + 56 * 1.0 + 6 * (2.7 + 1 - SWITCH_US)),
        (Protocol.LL128, 2, 14.0 + 56 * 1.9 + 6 * (4.0 + 1 - SWITCH_US)),
        (Protocol.SIMPLE, 2, 1.4 * (8.4 + 56 * 3.4 + 6 * (14.0 + 2 - SWITCH_US))),
        (Protocol.SIMPLE, 1, 8.4 + 28 * 3.4 + 3 * (14.0 + 2 - SWITCH_US)),
    ],
)
def test_ring_latency_has_a_step_for_each_rank(protocol: Protocol, laps: int, microseconds: float) -> None:
    found = RingChoice(FOUR, protocol, laps)
    assert found.overhead_s * 1e6 == pytest.approx(microseconds)
    assert found.rounds == laps * 3


def test_ring_of_one_gpu_per_server_exposes_every_step() -> None:
    assert RingChoice(SPREAD, Protocol.LL, 1).overhead_s * 1e6 == pytest.approx(6.6 + 3 * (5.0 + 1 - SWITCH_US))


def test_protocols_send_flags_with_data() -> None:
    assert [WIRE[each] for each in Protocol] == [2.0, pytest.approx(16 / 15), 1.0]


def test_p2p_overhead_of_one_message() -> None:
    assert p2p_overhead_s(across=True) * 1e6 == pytest.approx(8.4 + 14.0 + 2 - SWITCH_US)
    assert p2p_overhead_s(across=False) * 1e6 == pytest.approx(8.4 + 3.4)


def test_chosen_protocol_changes_with_message_size() -> None:
    """The order from low latency to high bandwidth is LL, LL128, Simple."""
    found = [best(FOUR, size, 1, SERVERS).protocol for size in 2.0 ** np.arange(10, 36)]
    assert found == sorted(found, key=list(Protocol).index)
    assert set(found) == set(Protocol)


def test_groups_with_different_placement_wait_for_the_slowest() -> None:
    """One group has four GPUs on one server, the other on four servers."""
    groups = [[0, 1, 2, 3], [0, 8, 16, 24]]
    both = all_reduce(groups, 1e6, SERVERS)
    alone = [all_reduce(each, 1e6, SERVERS) for each in groups]
    assert (both.rounds, both.overhead_s) == (6, max(each.overhead_s for each in alone))


def test_collectives_inside_a_server_have_no_network_rounds() -> None:
    assert all_to_all(range(8), 1e6, SERVERS).rounds == 0
    assert all_reduce(range(8), 1e6, SERVERS).rounds == 0
    assert all_to_all(range(9), 1e6, SERVERS).rounds == 1
