"""Tests of flow end times, with and without steady flows, against exact event simulation and closed forms."""

from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from filling import Rows, fair_ends
from hypothesis import given
from hypothesis import strategies as st
from reference_networks import one_switch, two_tiers

from orchestrrl.lab.sim.net.fluid import finish_beside, finish_s, rates
from orchestrrl.lab.sim.net.model import Floats, FlowRoutes, GpuFlows, Ints, LinkNetwork, LinkTier, Servers

SMALL = Servers(4, gpus_per_server=1, nics_per_server=1)
RATE = SMALL.nic_bytes_per_s


class Listed:
    """A router that returns row i for the pair (i, 1000)."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __call__(self, src: Ints, dst: Ints) -> FlowRoutes:
        rows = [self.rows[i] for i in src]
        begin = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
        link = np.array([link for row in rows for link, _ in row], np.int64)
        share = np.array([float(share) for row in rows for _, share in row])
        return FlowRoutes(begin, link, share, np.zeros(len(rows)))


def listed(capacity: list[Fraction], rows: Rows) -> LinkNetwork:
    return LinkNetwork(
        Servers(1), np.array([float(each) for each in capacity]), (LinkTier.NIC,) * len(capacity), Listed(rows)
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Fraction], Rows, list[Fraction]]:
    capacity = draw(st.lists(st.sampled_from([0, 1, 2, 5]).map(Fraction), min_size=1, max_size=5))
    row = st.dictionaries(
        st.integers(0, len(capacity) - 1), st.sampled_from([Fraction(1), Fraction(1, 2)]), min_size=1, max_size=3
    )
    rows = [sorted(each.items()) for each in draw(st.lists(row, min_size=1, max_size=8))]
    size = draw(st.lists(st.integers(0, 4).map(Fraction), min_size=len(rows), max_size=len(rows)))
    return capacity, rows, size


def flows_of(size: list[Fraction]) -> GpuFlows:
    return GpuFlows.of([(i, 1000, float(each)) for i, each in enumerate(size)])


@pytest.mark.exact
@given(cases())
def test_end_times_match_exact_event_simulation(case: tuple[list[Fraction], Rows, list[Fraction]]) -> None:
    capacity, rows, size = case
    expected = [float(end) for end in fair_ends(capacity, rows, size)]
    network = listed(capacity, rows)
    assert finish_s(network, flows_of(size), tolerance=0.0) == pytest.approx(expected, abs=1e-12)
    assert finish_s(network, flows_of(size), tolerance=1e-3) == pytest.approx(expected, rel=5e-3)


class Shared(NamedTuple):
    end_s: Floats  # [flow]
    behind_s: Floats  # [steady flow]


def beside(network: LinkNetwork, flows: GpuFlows, steady: GpuFlows, tolerance: float = 0.0) -> Shared:
    return Shared(*finish_beside(network, flows, network.routes(flows), steady, tolerance=tolerance))


LONG = Fraction(10**9)  # size of a flow that outlasts all others


@pytest.mark.exact
@given(cases(), st.lists(st.sampled_from([Fraction(1, 4), Fraction(1), Fraction(9)]), min_size=8, max_size=8))
def test_end_times_with_steady_flows_match_exact_event_simulation(
    case: tuple[list[Fraction], Rows, list[Fraction]], wish: list[Fraction]
) -> None:
    """A steady flow equals an endless flow over a private link with the capacity of its demand."""
    capacity, rows, size = case
    half = len(rows) // 2
    caps = wish[: len(rows) - half]
    capped = [[*row, (len(capacity) + i, Fraction(1))] for i, row in enumerate(rows[half:])]
    expected = fair_ends([*capacity, *caps], rows[:half] + capped, size[:half] + [LONG] * len(caps))
    steady = GpuFlows.of([(half + i, 1000, float(cap)) for i, cap in enumerate(caps)])
    found = beside(listed(capacity, rows), flows_of(size[:half]), steady)
    assert found.end_s == pytest.approx([float(end) for end in expected[:half]], abs=1e-12)


@given(cases(), st.sampled_from([0.25, 1.0, 9.0]))
def test_steady_flow_delay_matches_stepwise_integration(
    case: tuple[list[Fraction], Rows, list[Fraction]], wish: float
) -> None:
    """The first row is steady. It loses exactly the bytes that the other flows take."""
    capacity, rows, size = case
    network, steady, flows = listed(capacity, rows), GpuFlows.of([(0, 1000, wish)]), flows_of(size)
    flows = GpuFlows(flows.src[1:], flows.dst[1:], flows.bytes[1:])
    found = beside(network, flows, steady)
    alone = float(rates(network, steady, cap=steady.bytes)[0])
    ends = np.unique(found.end_s[np.isfinite(found.end_s)])
    missed, left, now_s = 0.0, flows.bytes.copy(), 0.0
    for end_s in ends.tolist():
        here = np.flatnonzero((left > 1e-9) & (found.end_s > now_s))
        some = GpuFlows.joined([steady, GpuFlows(flows.src[here], flows.dst[here], left[here])])
        rate = rates(network, some, cap=np.array([wish] + [np.inf] * len(here)))
        missed += (alone - float(rate[0])) * (end_s - now_s)
        left[here] -= rate[1:] * (end_s - now_s)
        now_s = end_s
    assert np.abs(left[np.isfinite(found.end_s)]).max(initial=0.0) == pytest.approx(0.0, abs=1e-7)  # all arrived
    assert found.behind_s[0] * alone == pytest.approx(max(0.0, missed), abs=1e-7)


def test_shared_link_matches_closed_form() -> None:
    """The steady flow gets its demand up to half of the link, and at most half."""
    network, flows = one_switch(SMALL), GpuFlows.of([(0, 2, RATE * 3)])
    little, much = (beside(network, flows, GpuFlows.of([(0, 1, RATE * share)])) for share in (0.25, 0.8))
    assert (little.end_s, little.behind_s) == (pytest.approx([4.0]), pytest.approx([0.0]))
    assert much.end_s == pytest.approx([6.0])
    assert much.behind_s == pytest.approx([6.0 * (0.8 - 0.5) / 0.8])


@given(cases())
def test_no_steady_flows_leave_end_times_unchanged(case: tuple[list[Fraction], Rows, list[Fraction]]) -> None:
    capacity, rows, size = case
    network, flows = listed(capacity, rows), flows_of(size)
    assert beside(network, flows, GpuFlows.none(), 1e-3).end_s.tolist() == finish_s(network, flows).tolist()


def test_flows_over_a_failed_link_never_end() -> None:
    down = two_tiers(SMALL, servers_per_tor=2, oversubscribed=np.inf)
    flows = GpuFlows.of([(0, 2, 1.0), (0, 1, RATE)])
    assert finish_s(down, flows) == pytest.approx([np.inf, 1.0])
    found = beside(down, flows, GpuFlows.of([(1, 3, RATE), (3, 2, RATE)]))
    assert found.end_s == pytest.approx([np.inf, 1.0])
    assert found.behind_s.tolist() == [0.0, 0.0]


def test_flow_to_itself_takes_no_time() -> None:
    assert finish_s(one_switch(SMALL), GpuFlows.of([(0, 1, RATE), (0, 0, 1.0), (0, 3, 0.0)])) == pytest.approx(
        [1, 0, 0]
    )
