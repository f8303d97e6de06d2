"""Which rail a message takes, between two servers of two NICs with a ToR each."""

import numpy as np
import pytest

from orchestrrl.lab.sim.net.fabrics.circuits import NO_WAY
from orchestrrl.lab.sim.net.fabrics.hosts import NO_NIC, Legs
from orchestrrl.lab.sim.net.fabrics.rfabric import Rails


def led(
    straight: int, other: int, across: int = NO_WAY, works: tuple[bool, ...] = (True,) * 4
) -> list[tuple[int, ...]]:
    """From NIC 0 to NIC 2, of whose ToRs hops are given; `other`: from 1 to 3, `across`: from 0 to 3 and 1 to 2."""
    hops = np.full((4, 4), NO_WAY)
    np.fill_diagonal(hops, 0)
    for one, two, count in ((0, 2, straight), (1, 3, other), (0, 3, across), (1, 2, across)):
        hops[one, two] = hops[two, one] = count
    gpus = (np.array([0, 0]), np.array([2, 1]))
    legs = Legs(np.arange(2), np.ones(2), *gpus, np.array([0, NO_NIC]), np.array([2, NO_NIC]))
    found = Rails(2, np.arange(4), np.array(works), hops).lead(legs)
    assert found.src_nic[-1] == NO_NIC  # what stays in its server is left alone
    rows = zip(found.src_nic.tolist(), found.dst_nic.tolist(), found.share.tolist(), strict=True)
    return [(one, two) for one, two, share in rows if one != NO_NIC and share == pytest.approx(1 / (len(found) - 1))]


def test_up_to_two_circuits_it_keeps_its_rail() -> None:
    assert led(2, 1) == [(0, 2)]


def test_a_longer_way_is_left_for_a_shorter_one_on_another_rail() -> None:
    assert led(3, 1) == [(1, 3)]
    assert led(3, 3) == [(0, 2)]
    assert led(3, 1, works=(True, True, True, False)) == [(0, 2)]


def test_without_a_way_on_any_rail_it_changes_rails() -> None:
    assert led(NO_WAY, 3) == [(1, 3)]
    assert led(NO_WAY, NO_WAY, 2) == [(0, 3), (1, 2)]
    assert led(NO_WAY, NO_WAY) == [(0, 2)]  # the router tells of it
