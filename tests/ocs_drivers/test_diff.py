"""Property tests of diffs, against a model of the device that is simple enough to verify by reading."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocs_drivers import diff as diffs
from ocs_drivers.errors import CircuitConflict, InvalidChange
from ocs_drivers.model import (
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    Connectivity,
    CrossConnect,
    CrossConnectReading,
    DeviceCircuit,
    PortState,
    PortStatus,
    SwitchFacts,
    fingerprint,
)

SIDES = SwitchFacts("v", "m", "s", "1", Connectivity.INGRESS_EGRESS, range(1, 6), range(6, 11), 0.01)
SHARED = SwitchFacts("v", "m", "s", "1", Connectivity.INGRESS_EGRESS, range(1, 6), range(1, 6), 0.01)
ANY = SwitchFacts("v", "m", "s", "1", Connectivity.ANY_TO_ANY, range(1, 9), range(1, 9), 0.01)

Pairs = frozenset[CrossConnect]


def reading(pairs: Pairs) -> CrossConnectReading:
    return CrossConnectReading(tuple(DeviceCircuit(pair, ours=True) for pair in sorted(pairs)), fingerprint(pairs))


def clash(facts: SwitchFacts, one: CrossConnect, two: CrossConnect) -> bool:
    """Return whether two different cross-connects need the same port, without using `SwitchFacts.ends`."""
    if facts.connectivity is Connectivity.ANY_TO_ANY:
        return bool({one.ingress_port, one.egress_port} & {two.ingress_port, two.egress_port})
    return one.ingress_port == two.ingress_port or one.egress_port == two.egress_port


def no_port_twice(facts: SwitchFacts, pairs: Pairs) -> bool:
    return not any(clash(facts, one, two) for one, two in itertools.combinations(pairs, 2))


@st.composite
def matchings(draw: st.DrawFn, facts: SwitchFacts) -> Pairs:
    """Draw cross-connects that share no port."""
    count = draw(st.integers(0, 4))
    if facts.connectivity is Connectivity.ANY_TO_ANY:
        ports = draw(st.permutations(list(facts.ingress_ports)))
        return frozenset(facts.normal(CrossConnect(*ports[2 * i : 2 * i + 2])) for i in range(count))
    ingress = draw(st.permutations(list(facts.ingress_ports)))
    egress = draw(st.permutations(list(facts.egress_ports)))
    return frozenset(CrossConnect(a, b) for a, b in list(zip(ingress, egress, strict=True))[:count])


@st.composite
def planned(draw: st.DrawFn) -> tuple[SwitchFacts, Pairs, CircuitChange, CircuitDiff]:
    """Draw a device, its circuits, a change in a mode that may evict, and the resulting diff."""
    facts = draw(st.sampled_from([SIDES, SHARED, ANY]))
    present = draw(matchings(facts))
    connect = draw(matchings(facts))
    mode = draw(st.sampled_from([ChangeMode.UPDATE, ChangeMode.OVERWRITE] if connect else [ChangeMode.UPDATE]))
    leaving = draw(st.sets(st.sampled_from(sorted(present)))) if present and mode is ChangeMode.UPDATE else set()
    change = CircuitChange(tuple(sorted(connect)), tuple(sorted(leaving - connect)))
    return facts, present, change, diffs.plan(facts, (), reading(present), change, mode)


def prefixes(diff: CircuitDiff) -> list[Pairs]:
    """Return the circuits on the device before the first step of the diff and after each step."""
    shown = [diff.before]
    for pair in diff.remove:
        shown.append(shown[-1] - {pair})
    for pair in diff.add:
        shown.append(shown[-1] | {pair})
    return shown


@given(planned())
def test_no_step_uses_a_port_twice(case: tuple[SwitchFacts, Pairs, CircuitChange, CircuitDiff]) -> None:
    facts, _, _, diff = case
    assert all(no_port_twice(facts, shown) for shown in prefixes(diff))
    assert prefixes(diff)[-1] == diff.after


@given(planned())
def test_applied_change_leaves_empty_diff(
    case: tuple[SwitchFacts, Pairs, CircuitChange, CircuitDiff],
) -> None:
    facts, _, change, diff = case
    assert frozenset(change.connect) <= diff.after
    assert not frozenset(change.disconnect) & diff.after
    assert diffs.plan(facts, (), reading(diff.after), change, diff.mode).empty
    assert diffs.remaining(facts, diff, diff.after).empty


@given(planned())
def test_evictions_are_exactly_the_conflicting_circuits(
    case: tuple[SwitchFacts, Pairs, CircuitChange, CircuitDiff],
) -> None:
    facts, present, change, diff = case
    unnamed = present - frozenset(change.connect) - frozenset(change.disconnect)
    if diff.mode is ChangeMode.OVERWRITE:
        expected = unnamed
    else:
        expected = {held for held in unnamed if any(clash(facts, held, wanted) for wanted in change.connect)}
    assert frozenset(diff.evicted) == expected
    assert frozenset(diff.remove) == expected | (frozenset(change.disconnect) & present)


@given(planned())
def test_every_prefix_can_be_completed_and_reversed(
    case: tuple[SwitchFacts, Pairs, CircuitChange, CircuitDiff],
) -> None:
    facts, _, _, diff = case
    for shown in prefixes(diff):
        rest = diffs.remaining(facts, diff, shown)
        assert (shown - frozenset(rest.remove)) | frozenset(rest.add) == diff.after
        back = diffs.remaining(facts, diff.way_back, shown)
        assert (shown - frozenset(back.remove)) | frozenset(back.add) == diff.before
        assert no_port_twice(facts, shown - frozenset(back.remove) | frozenset(back.add))


@given(planned(), st.sets(st.integers(0, 3)))
def test_plan_refuses_exactly_the_removal_of_foreign_circuits(
    case: tuple[SwitchFacts, Pairs, CircuitChange, CircuitDiff], theirs: set[int]
) -> None:
    facts, present, change, diff = case
    foreign = frozenset(pair for index, pair in enumerate(sorted(present)) if index in theirs)
    seen = CrossConnectReading(
        tuple(DeviceCircuit(pair, ours=pair not in foreign) for pair in sorted(present)), fingerprint(present)
    )
    named = frozenset(change.disconnect) & present
    clashing = {held for held in present for wanted in change.connect if held != wanted and clash(facts, held, wanted)}
    in_the_way = foreign & (named | clashing)
    if not in_the_way:
        planned = diffs.plan(facts, (), seen, change, diff.mode)
        assert not foreign & frozenset(planned.remove)
        assert frozenset(planned.remove) == frozenset(diff.remove) - foreign
        return
    with pytest.raises(CircuitConflict) as refused:
        diffs.plan(facts, (), seen, change, diff.mode, "ocs1")
    assert refused.value.faults == [
        f"{pair}: is not owned by this driver; take it over first: orchestrrl ocs take-over ocs1 {pair}"
        for pair in sorted(in_the_way)
    ]


@given(planned())
def test_safe_refuses_exactly_when_update_would_evict(
    case: tuple[SwitchFacts, Pairs, CircuitChange, CircuitDiff],
) -> None:
    facts, present, change, diff = case
    if diff.mode is ChangeMode.OVERWRITE:
        return
    if not diff.evicted:
        assert diffs.plan(facts, (), reading(present), change).remove == diff.remove
        return
    with pytest.raises(CircuitConflict) as refused:
        diffs.plan(facts, (), reading(present), change)
    assert all(str(pair) in str(refused.value) for pair in diff.evicted)


@given(matchings(SIDES), st.lists(st.builds(CrossConnect, st.integers(-1, 12), st.integers(-1, 12)), max_size=4))
def test_change_is_invalid_exactly_when_ports_are_missing_or_shared(present: Pairs, wanted: list[CrossConnect]) -> None:
    well_formed = all(
        pair.ingress_port in SIDES.ingress_ports and pair.egress_port in SIDES.egress_ports for pair in wanted
    ) and not any(clash(SIDES, one, two) for one, two in itertools.combinations(wanted, 2))
    change = CircuitChange(tuple(wanted))
    if well_formed:
        assert diffs.plan(SIDES, (), reading(present), change, ChangeMode.UPDATE).after >= frozenset(wanted)
    else:
        with pytest.raises(InvalidChange):
            diffs.plan(SIDES, (), reading(present), change, ChangeMode.UPDATE)


def test_unusable_ports_are_refused_only_for_additions() -> None:
    ports = [PortState(1, PortStatus.FAILED), PortState(7, PortStatus.DISABLED)]
    there = frozenset({CrossConnect(1, 6)})
    assert diffs.plan(SIDES, ports, reading(there), CircuitChange((CrossConnect(1, 6),))).empty
    with pytest.raises(CircuitConflict) as refused:
        diffs.plan(SIDES, ports, reading(frozenset()), CircuitChange((CrossConnect(1, 6), CrossConnect(2, 7))))
    assert refused.value.faults == [
        "connect[0].ingress_port: port is failed, got 1",
        "connect[1].egress_port: port is disabled, got 7",
    ]


def test_same_number_on_both_sides_is_allowed_with_shared_numbering() -> None:
    loop, crossing = CrossConnect(3, 3), CrossConnect(2, 1)
    assert diffs.plan(SHARED, (), reading(frozenset()), CircuitChange((loop, crossing))).add == (crossing, loop)
    with pytest.raises(InvalidChange, match="connected to itself"):
        diffs.plan(ANY, (), reading(frozenset()), CircuitChange((loop,)))


def test_any_to_any_pairs_are_normalized() -> None:
    there = frozenset({CrossConnect(2, 5)})
    assert diffs.plan(ANY, (), reading(there), CircuitChange((CrossConnect(5, 2),))).empty
    assert diffs.plan(ANY, (), reading(there), CircuitChange(disconnect=(CrossConnect(5, 2),))).remove == (
        CrossConnect(2, 5),
    )


def test_diff_and_reverse_refuse_ports_of_other_circuits() -> None:
    diff = diffs.plan(
        SIDES, (), reading(frozenset({CrossConnect(1, 6)})), CircuitChange(disconnect=(CrossConnect(1, 6),))
    )
    theirs = frozenset({CrossConnect(1, 7)})
    assert diffs.remaining(SIDES, diff, theirs).empty
    with pytest.raises(CircuitConflict, match="1:7"):
        diffs.remaining(SIDES, diff.way_back, theirs)
