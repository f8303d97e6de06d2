"""Tests of max-min fair rates against exact progressive filling, and against textbook cases."""

from fractions import Fraction

import numpy as np
import pytest
from filling import Rows, fair_rates, problem
from hypothesis import given
from hypothesis import strategies as st
from reference_networks import one_switch, two_tiers

from orchestrrl.lab.sim.net.fluid import rates
from orchestrrl.lab.sim.net.model import GpuFlows, Servers

# Few values, so that flows and links are often equal.
shares = st.sampled_from([Fraction(1), Fraction(1), Fraction(1, 2), Fraction(1, 3), Fraction(2)])
capacities = st.lists(st.sampled_from([0, 1, 2, 3, 10]).map(Fraction), min_size=1, max_size=7)


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[Fraction], Rows]:
    capacity = draw(capacities)
    links = st.integers(0, len(capacity) - 1)
    rows = draw(st.lists(st.dictionaries(links, shares, max_size=4), max_size=14))
    return capacity, [sorted(row.items()) for row in rows]


@given(networks())
def test_rates_match_exact_progressive_filling(case: tuple[list[Fraction], Rows]) -> None:
    capacity, rows = case
    expected = [float(rate) for rate in fair_rates(capacity, rows)]
    assert problem(capacity, rows).levels == pytest.approx(expected)


@given(networks())
def test_no_link_is_overloaded_and_every_flow_has_a_bottleneck(case: tuple[list[Fraction], Rows]) -> None:
    capacity, rows = case
    found = problem(capacity, rows).levels
    used = np.zeros(len(capacity))
    fastest = np.zeros(len(capacity))
    for rate, row in zip(found, rows, strict=True):
        for link, share in row:
            used[link] += rate * float(share)
            fastest[link] = max(fastest[link], rate)
    room = np.array([float(each) for each in capacity])
    assert np.all(used <= room * (1 + 1e-9))
    for rate, row in zip(found, rows, strict=True):
        held = [used[link] >= room[link] * (1 - 1e-9) and rate >= fastest[link] * (1 - 1e-9) for link, _ in row]
        assert any(held) if row else rate == np.inf


@given(networks(), st.data())
def test_rates_do_not_depend_on_flow_order_or_link_numbers(
    case: tuple[list[Fraction], Rows], data: st.DataObject
) -> None:
    capacity, rows = case
    order = data.draw(st.permutations(range(len(rows))))
    names = data.draw(st.permutations(range(len(capacity))))
    moved_capacity = [Fraction(0)] * len(capacity)
    for link, name in enumerate(names):
        moved_capacity[name] = capacity[link]
    moved = [sorted((names[link], share) for link, share in rows[i]) for i in order]
    before = problem(capacity, rows).levels
    assert problem(moved_capacity, moved).levels == pytest.approx([before[i] for i in order])


def test_flows_share_one_link_equally() -> None:
    servers = Servers(3, gpus_per_server=1, nics_per_server=1)
    flows = GpuFlows.of([(0, 1, 1.0)] * 5)
    assert rates(one_switch(servers), flows) == pytest.approx([servers.nic_bytes_per_s / 5] * 5)


def test_parking_lot_flows_get_half_of_each_link() -> None:
    """One flow over all links and one flow per link get half of each link (Bertsekas and Gallager, figure 6.14)."""
    capacity = [Fraction(1)] * 4
    rows: Rows = [[(link, Fraction(1)) for link in range(4)]] + [[(link, Fraction(1))] for link in range(4)]
    assert problem(capacity, rows).levels == pytest.approx([0.5] * 5)


def test_incast_leaves_spare_sender_bandwidth_to_other_flows() -> None:
    servers = Servers(6, gpus_per_server=1, nics_per_server=1)
    flows = GpuFlows.of([(i, 0, 1.0) for i in range(1, 5)] + [(1, 5, 1.0)])
    rate = servers.nic_bytes_per_s
    assert rates(one_switch(servers), flows) == pytest.approx([rate / 4] * 4 + [rate * 3 / 4])


def test_capped_flow_leaves_bandwidth_to_others() -> None:
    servers = Servers(3, gpus_per_server=1, nics_per_server=1)
    flows = GpuFlows.of([(0, 1, 1.0), (0, 2, 1.0)])
    rate = servers.nic_bytes_per_s
    assert rates(one_switch(servers), flows, cap=np.array([rate / 8, np.inf])) == pytest.approx(
        [rate / 8, rate * 7 / 8]
    )


def test_rate_is_infinite_to_itself_and_zero_over_a_failed_link() -> None:
    servers = Servers(4, gpus_per_server=1, nics_per_server=1)
    dead = two_tiers(servers, servers_per_tor=2, oversubscribed=np.inf)
    flows = GpuFlows.of([(0, 0, 1.0), (0, 2, 1.0), (0, 1, 1.0)])
    assert rates(dead, flows) == pytest.approx([np.inf, 0.0, servers.nic_bytes_per_s])
    assert len(rates(dead, GpuFlows.none())) == 0
