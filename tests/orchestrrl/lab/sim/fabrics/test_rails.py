"""Tests of the choice of rails between two servers, with two NICs each and a ToR per NIC."""

import numpy as np
import pytest

from orchestrrl.lab.sim.net.fabrics.circuits import NO_WAY
from orchestrrl.lab.sim.net.fabrics.hosts import NO_NIC, Legs
from orchestrrl.lab.sim.net.fabrics.rfabric import Rails


def led(
    straight: int, other: int, across: int = NO_WAY, works: tuple[bool, ...] = (True,) * 4
) -> list[tuple[int, ...]]:
    """Return the NICs of a message from NIC 0 to NIC 2. Arguments are hops between ToRs: `straight` from 0 to 2,
    `other` from 1 to 3, `across` from 0 to 3 and from 1 to 2."""
    hops = np.full((4, 4), NO_WAY)
    np.fill_diagonal(hops, 0)
    for one, two, count in ((0, 2, straight), (1, 3, other), (0, 3, across), (1, 2, across)):
        hops[one, two] = hops[two, one] = count
    gpus = (np.array([0, 0]), np.array([2, 1]))
    legs = Legs(np.arange(2), np.ones(2), *gpus, np.array([0, NO_NIC]), np.array([2, NO_NIC]))
    found = Rails(2, np.arange(4), np.array(works), hops).lead(legs)
    assert found.src_nic[-1] == NO_NIC  # a leg inside a server is unchanged
    rows = zip(found.src_nic.tolist(), found.dst_nic.tolist(), found.share.tolist(), strict=True)
    return [(one, two) for one, two, share in rows if one != NO_NIC and share == pytest.approx(1 / (len(found) - 1))]


def test_message_keeps_its_rail_up_to_two_circuits() -> None:
    assert led(2, 1) == [(0, 2)]


def test_message_changes_to_a_rail_with_a_shorter_path() -> None:
    assert led(3, 1) == [(1, 3)]
    assert led(3, 3) == [(0, 2)]
    assert led(3, 1, works=(True, True, True, False)) == [(0, 2)]


def test_message_crosses_rails_without_a_path_on_any_single_rail() -> None:
    assert led(NO_WAY, 3) == [(1, 3)]
    assert led(NO_WAY, NO_WAY, 2) == [(0, 3), (1, 2)]
    assert led(NO_WAY, NO_WAY) == [(0, 2)]  # the router raises the error
