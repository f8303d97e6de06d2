"""Flows that end and come: against exact events in fractions, and against small steps of time."""

from fractions import Fraction

import numpy as np
import pytest
from filling import Rows, fair_ends
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_networks import one_switch, two_tiers

from orchestrrl.sim.net.fluid import Fluid, finish_s
from orchestrrl.sim.net.max_min import rates
from orchestrrl.sim.net.model import Flows, Ints, Network, Routes, Servers, Tier

SMALL = Servers(4, gpus_per_server=1, nics_per_server=1)
RATE = SMALL.nic_bytes_per_s


class Listed:
    """A router of one row for each pair (flow, 1000): what a test draws."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __call__(self, src: Ints, dst: Ints) -> Routes:
        rows = [self.rows[i] for i in src]
        begin = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
        link = np.array([link for row in rows for link, _ in row], np.int64)
        share = np.array([float(share) for row in rows for _, share in row])
        return Routes(begin, link, share, np.zeros(len(rows)))


def listed(capacity: list[Fraction], rows: Rows) -> Network:
    return Network(Servers(1), np.array([float(each) for each in capacity]), (Tier.NIC,) * len(capacity), Listed(rows))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Fraction], Rows, list[Fraction]]:
    capacity = draw(st.lists(st.sampled_from([0, 1, 2, 5]).map(Fraction), min_size=1, max_size=5))
    row = st.dictionaries(
        st.integers(0, len(capacity) - 1), st.sampled_from([Fraction(1), Fraction(1, 2)]), min_size=1, max_size=3
    )
    rows = [sorted(each.items()) for each in draw(st.lists(row, min_size=1, max_size=8))]
    size = draw(st.lists(st.integers(0, 4).map(Fraction), min_size=len(rows), max_size=len(rows)))
    return capacity, rows, size


def flows_of(size: list[Fraction]) -> Flows:
    return Flows.of([(i, 1000, float(each)) for i, each in enumerate(size)])


@given(cases())
@settings(max_examples=120, deadline=None)
def test_ends_are_those_of_exact_events(case: tuple[list[Fraction], Rows, list[Fraction]]) -> None:
    capacity, rows, size = case
    expected = [float(end) for end in fair_ends(capacity, rows, size)]
    network = listed(capacity, rows)
    assert finish_s(network, flows_of(size), tolerance=0.0) == pytest.approx(expected, abs=1e-12)
    assert finish_s(network, flows_of(size), tolerance=1e-3) == pytest.approx(expected, rel=5e-3)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_flows_that_come_together_end_as_if_nobody_had_looked(
    case: tuple[list[Fraction], Rows, list[Fraction]],
) -> None:
    capacity, rows, size = case
    network, fluid = listed(capacity, rows), Fluid(listed(capacity, rows))
    ids = fluid.add(flows_of(size))
    end = dict.fromkeys(ids.tolist(), np.inf)
    for until_s in np.arange(0.0, 30.0, 0.7):
        end |= {ended: end_s for end_s, ended in fluid.advance(until_s)}
    if np.isfinite(fluid.next_event_s):
        end |= {ended: end_s for end_s, ended in fluid.advance(1e6)}
    assert [end[each] for each in ids] == pytest.approx(finish_s(network, flows_of(size), tolerance=0.0), abs=1e-7)


@given(cases(), st.lists(st.integers(0, 3), min_size=8, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
@settings(max_examples=15, deadline=None)
def test_flows_that_come_at_any_time_send_what_small_steps_do(
    case: tuple[list[Fraction], Rows, list[Fraction]], begin: list[int], capped: list[bool]
) -> None:
    capacity, rows, size = case
    network, step_s, until_s = listed(capacity, rows), 1 / 32, 6.0
    flows, cap = flows_of(size), np.where(capped, 0.5, np.inf)[: len(size)]
    left, now_s = flows.bytes.copy(), 0.0
    while now_s < until_s:
        here = np.flatnonzero((np.array(begin[: len(size)]) <= now_s) & (left > 1e-9))
        some = Flows(flows.src[here], flows.dst[here], left[here])
        left[here] = np.maximum(left[here] - rates(network, some, cap=cap[here]) * step_s, 0.0)
        now_s += step_s
    fluid, ids = Fluid(network), np.full(len(size), -1)
    for at_s in range(4):
        fluid.advance(float(at_s))
        for i in range(len(size)):
            if begin[i] == at_s:
                one = Flows(flows.src[i : i + 1], flows.dst[i : i + 1], flows.bytes[i : i + 1].copy())
                ids[i] = fluid.add(one, cap_bytes_per_s=cap[i])[0]
    ended = {flow for _, flow in fluid.advance(until_s)}
    found = [0.0 if fluid_id in ended else _left(fluid, fluid_id) for fluid_id in ids]
    # A step too long at the end of each flow is what the steps may be off by.
    assert found == pytest.approx(left.tolist(), abs=len(size) * 5 * step_s)


def _left(fluid: Fluid, flow: int) -> float:
    try:
        return float(fluid.left_bytes(np.array([flow]))[0])
    except KeyError:
        return 0.0  # it ended before


def test_background_takes_its_wish_and_no_more_than_its_share() -> None:
    fluid = Fluid(one_switch(SMALL))
    background = fluid.add(Flows.of([(0, 1, np.inf)]), cap_bytes_per_s=RATE / 4)
    moved = fluid.add(Flows.of([(0, 2, RATE * 3)]))
    assert fluid.rates(moved) == pytest.approx([RATE * 3 / 4])
    assert fluid.next_event_s == pytest.approx(4.0)
    fluid.advance(1.0)
    fluid.wish(background, RATE)  # more than half: it gets half
    assert fluid.rates(np.concatenate((background, moved))) == pytest.approx([RATE / 2, RATE / 2])
    assert fluid.advance(10.0) == [(pytest.approx(1.0 + 2.25 * 2), int(moved[0]))]
    assert fluid.rates(background) == pytest.approx([RATE])
    assert fluid.link_bytes_per_s().sum() == pytest.approx(2 * RATE)
    assert fluid.remove(background) == [np.inf]
    assert fluid.next_event_s == np.inf


def test_what_was_sent_is_kept_when_circuits_change() -> None:
    fast, slow = (two_tiers(SMALL, servers_per_tor=2, oversubscribed=each) for each in (1.0, 4.0))
    fluid = Fluid(fast)
    ids = fluid.add(Flows.of([(0, 2, RATE * 2)]))
    fluid.advance(1.0)
    fluid.change(slow)
    assert fluid.left_bytes(ids) == pytest.approx([RATE])
    assert fluid.next_event_s == pytest.approx(1.0 + 1.0 / (2 / 4))


def test_ended_flows_are_unknown_and_time_runs_forward() -> None:
    fluid = Fluid(one_switch(SMALL), now_s=5.0)
    ids = fluid.add(Flows.of([(0, 1, RATE), (0, 0, 1.0), (0, 3, 0.0)]))
    assert fluid.advance(6.0) == [(5.0, 1), (5.0, 2), (6.0, 0)]
    with pytest.raises(KeyError, match=r"have ended: \[0, 1, 2\]"):
        fluid.left_bytes(ids)
    with pytest.raises(ValueError, match="does not run back"):
        fluid.advance(5.5)


def test_nothing_ends_over_a_link_that_is_down() -> None:
    down = two_tiers(SMALL, servers_per_tor=2, oversubscribed=np.inf)
    assert finish_s(down, Flows.of([(0, 2, 1.0), (0, 1, RATE)])) == pytest.approx([np.inf, 1.0])
    fluid = Fluid(down)
    fluid.add(Flows.of([(0, 2, 1.0)]))
    assert fluid.next_event_s == np.inf
    assert fluid.advance(100.0) == []


@given(
    cases(),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.sampled_from([0.25, 1.0, np.inf])), max_size=12),
)
@settings(max_examples=80, deadline=None)
def test_rates_after_any_changes_are_those_found_from_nothing(
    case: tuple[list[Fraction], Rows, list[Fraction]], changes: list[tuple[int, int, float]]
) -> None:
    capacity, rows, _ = case
    network = listed(capacity, rows)
    fluid, there = Fluid(network), dict[int, tuple[int, float]]()
    for what, which, cap in changes:
        row = which % len(rows)
        if what == 0 or not there:
            (flow,) = fluid.add(Flows.of([(row, 1000, np.inf)]), cap_bytes_per_s=cap).tolist()
            there[flow] = (row, cap)
        else:
            flow = sorted(there)[which % len(there)]
            if what == 1:
                fluid.wish(np.array([flow]), cap)
                there[flow] = (there[flow][0], cap)
            else:
                fluid.remove(np.array([flow]))
                del there[flow]
        ids = np.array(sorted(there), np.int64)
        same = Flows.of([(there[each][0], 1000, 1.0) for each in ids.tolist()])
        expected = rates(network, same, cap=np.array([there[each][1] for each in ids.tolist()]))
        assert fluid.rates(ids) == pytest.approx(expected)
