"""Cables are swapped and broken at random, light is traced independently, and exactly these faults must be found."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.fabric.site import parse_site
from orchestrrl.lab.box.run import SITE
from planner.fabric.cables import (
    DARK,
    STRANGER,
    STRAY,
    WRONG_CABLE,
    ObservedCables,
    faults_seen,
    port_text,
    traced,
    walk,
)
from planner.fabric.light import Interface, fibres_of, interfaces_at
from planner.fabric.model import OcsId, PortPair, port_pair

PLANT = parse_site(SITE)
CABLING = interfaces_at(
    PLANT, {tor.id: [f"swp{k}" for k in range(1, 1 + len(fibres_of(PLANT, tor.id)))] for tor in PLANT.tors}
)
SWITCH = OcsId("gen0/agg0")
PORTS = sorted(port for port in CABLING if port[0] == SWITCH)  # 1-4 of gen0/r0, 5-8 of gen0/r1


def light_of(pair: PortPair, ends: dict[tuple[OcsId, int], Interface | None]) -> frozenset[Interface]:
    """Return the interfaces with light: both ends or none, as a transceiver without received light does not report a
    link."""
    one, other = (ends[pair.switch, number] for number in pair.ports)
    return frozenset() if one is None or other is None else frozenset((one, other))


@given(st.permutations(PORTS), st.sets(st.sampled_from(PORTS)), st.sets(st.sampled_from(PORTS)))
def test_walk_finds_swapped_cables(
    plugged: list[tuple[OcsId, int]], broken: set[tuple[OcsId, int]], taken: set[tuple[OcsId, int]]
) -> None:
    ends = {port: None if port in broken else CABLING[there] for port, there in zip(PORTS, plugged, strict=True)}
    free = [port for port in PORTS if port not in taken]
    pairs = walk(CABLING, free)
    lit = {port for pair in pairs for port in ((pair.switch, number) for number in pair.ports)}
    assert lit == (set(free) if len(free) > 1 else set())
    good, faults = traced([(pair, light_of(pair, ends)) for pair in pairs], CABLING)
    if len(free) > 2 and not broken.intersection(free):  # two lone fibres are indistinguishable
        assert all(ends[port] == CABLING[port] for port in good)
        for fault in faults:
            if fault.kind == WRONG_CABLE:
                (port,) = (port for port in free if port_text(port) == fault.where)
                end = ends[port]
                assert end is not None
                assert end != CABLING[port]
                assert f"ends at {end[0]}/{end[1]}," in fault.what
        wrong = {port_text(port) for port in free if ends[port] != CABLING[port]}
        assert {fault.where for fault in faults} == wrong
        assert all(fault.kind == WRONG_CABLE for fault in faults)
        assert len(good) == len(free) - len(wrong)
    for port in broken.intersection(lit):
        assert DARK in {fault.kind for fault in faults if fault.where == port_text(port)}


def seen(ends: dict[tuple[OcsId, int], Interface], up: list[PortPair]) -> ObservedCables:
    """Return the ToRs' observations of these cross-connects."""
    answering: dict[Interface, frozenset[str]] = {}
    for pair in up:
        one, other = (ends[pair.switch, number] for number in pair.ports)
        answering |= {one: frozenset({other[0]} - {one[0]}), other: frozenset({one[0]} - {other[0]})}
    return ObservedCables(frozenset(answering), answering)  # type: ignore[arg-type]  # ids


def test_misplaced_cable_of_two_free_ones_is_reported() -> None:
    """The other one of the two swapped cables is in use."""
    pair = port_pair(SWITCH, 4, 8)
    good, (fault,) = traced([(pair, frozenset({CABLING[SWITCH, 1], CABLING[SWITCH, 8]}))], CABLING)
    assert good == {(SWITCH, 8)}
    assert (fault.kind, fault.where) == (WRONG_CABLE, "gen0/agg0:4")
    assert "ends at gen0/r0/swp1," in fault.what


@given(st.sets(st.sampled_from([(a, b) for a in (1, 2, 3) for b in (5, 6, 7)])), st.sampled_from(PORTS))
def test_existing_light_finds_used_cable_swapped_with_free_one(
    wanted: set[tuple[int, int]], port: tuple[OcsId, int]
) -> None:
    up: list[PortPair] = []
    for a, b in sorted(wanted):
        if all(number not in pair.ports for pair in up for number in (a, b)):
            up.append(port_pair(SWITCH, a, b))
    ends = {each: CABLING[each] for each in PORTS}
    assert faults_seen(PLANT, CABLING, up, seen(ends, up)) == ()
    free = [each for each in PORTS if CABLING[each][0] == CABLING[port][0] and all(each[1] not in p.ports for p in up)]
    in_use = any(port[1] in pair.ports for pair in up)
    other = free[-1]  # port 4 or 8 at least
    ends[port], ends[other] = ends[other], ends[port]
    faults = faults_seen(PLANT, CABLING, up, seen(ends, up))
    assert [(fault.kind, fault.where) for fault in faults] == ([(WRONG_CABLE, port_text(port))] if in_use else [])


def test_unexpected_routers_at_both_ends_are_reported() -> None:
    up = [port_pair(SWITCH, 1, 5), PortPair(OcsId("train0/agg0"), 1, 5)]
    ends = dict(CABLING)
    ends[SWITCH, 5], ends[OcsId("train0/agg0"), 5] = CABLING[OcsId("train0/agg0"), 5], CABLING[SWITCH, 5]
    faults = faults_seen(PLANT, CABLING, up, seen(ends, up))
    assert {fault.kind for fault in faults} == {STRANGER}
    assert "train0/r1 answers there" in next(fault.what for fault in faults if fault.where == "gen0/agg0:1")


def test_unexpected_signal_is_reported() -> None:
    stray = CABLING[SWITCH, 3]
    (fault,) = faults_seen(PLANT, CABLING, [], ObservedCables(frozenset({stray}), {}))
    assert (fault.kind, fault.where) == (STRAY, "gen0/r0/swp3")
