"""Circuits on switch ports: the most circuits with the fewest changes, against two oracles that only use ports."""

from collections.abc import Mapping
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from place_oracle import best_by_program, best_of_all, check, draw_problem

from planner.fabric.model import Cabling, EndpointId, OcsId, Pair, PortPair, pair_of, port_pair
from planner.fabric.place import PlacedCircuits, PlacingProblem, place


def tor(number: int) -> EndpointId:
    return EndpointId(f"tor{number:02}")


def ocs(number: int) -> OcsId:
    return OcsId(f"ocs{number:02}")


def regular(tors: int, switches: int, ports: int) -> Cabling:
    """Return a pod in which every ToR has equally many adjacent ports on every switch."""
    return Cabling(
        {
            ocs(switch): {number * ports + port: tor(number) for number in range(tors) for port in range(ports)}
            for switch in range(switches)
        }
    )


def circuits(*ends: tuple[int, int, int]) -> Mapping[Pair, int]:
    return {pair_of(tor(one), tor(other)): count for one, other, count in ends}


def figures(placed: PlacedCircuits) -> tuple[int, int]:
    return len(placed.cross_connects), len(placed.kept)


def test_both_ends_of_circuit_are_on_one_switch() -> None:
    cabling = Cabling({ocs(0): {1: tor(0), 2: tor(1)}, ocs(1): {1: tor(1), 2: tor(2)}})
    placed = place(PlacingProblem(cabling, circuits((0, 1, 1), (0, 2, 1), (1, 2, 2))))
    assert placed.cross_connects == (PortPair(ocs(0), 1, 2), PortPair(ocs(1), 1, 2))
    assert placed.unplaced == circuits((0, 2, 1), (1, 2, 1))
    assert placed.proven


def test_wanted_circuits_stay_and_others_are_removed() -> None:
    wanted_up, unwanted_up, surplus_up = (PortPair(ocs(0), 0, 2), PortPair(ocs(0), 4, 6), PortPair(ocs(0), 1, 3))
    problem = PlacingProblem(
        regular(4, 1, 2), circuits((0, 1, 1), (1, 2, 1)), frozenset((wanted_up, unwanted_up, surplus_up))
    )
    placed = place(problem)
    check(problem, placed)
    assert figures(placed) == (2, 1)
    assert placed.kept[0] in (wanted_up, surplus_up)


def test_failed_port_is_not_used_and_its_circuit_is_removed() -> None:
    problem = PlacingProblem(
        regular(2, 1, 2), circuits((0, 1, 2)), frozenset((PortPair(ocs(0), 0, 2),)), {ocs(0): frozenset((0,))}
    )
    placed = place(problem)
    check(problem, placed)
    assert (figures(placed), placed.unplaced) == ((1, 0), circuits((0, 1, 1)))


def test_empty_request_removes_everything() -> None:
    problem = PlacingProblem(regular(2, 1, 1), {}, frozenset((PortPair(ocs(0), 0, 1),)))
    assert place(problem) == PlacedCircuits((), (), {}, 0, 0)


def test_endpoint_without_fibres_is_skipped() -> None:
    wanted = {pair_of(EndpointId("elsewhere"), tor(0)): 2}
    assert place(PlacingProblem(regular(2, 1, 1), wanted)).unplaced == wanted


@pytest.mark.parametrize("switches", [1, 2, 3, 4])
def test_triangle_puts_one_circuit_on_each_switch(switches: int) -> None:
    """Three ports on a switch carry one circuit, although every ToR has a port there."""
    problem = PlacingProblem(regular(3, switches, 1), circuits((0, 1, 1), (0, 2, 1), (1, 2, 1)))
    placed = place(problem)
    check(problem, placed)
    assert figures(placed) == (min(3, switches), 0)
    assert placed.proven


@pytest.mark.parametrize("tors", [5, 7])
def test_odd_ring_needs_a_third_switch(tors: int) -> None:
    ring = circuits(*((number, (number + 1) % tors, 1) for number in range(tors)))
    for switches, most in ((2, tors - 1), (3, tors)):
        problem = PlacingProblem(regular(tors, switches, 1), ring)
        placed = place(problem)
        check(problem, placed)
        assert figures(placed) == (most, 0)
        assert placed.proven


@pytest.mark.parametrize(("switches", "most"), [(3, 13), (4, 15)])
def test_petersen_graph_needs_a_fourth_switch(switches: int, most: int) -> None:
    """Each ToR has three circuits, yet three switches with a port for each of them carry at most 13 of the 15."""
    outer = [(number, (number + 1) % 5, 1) for number in range(5)]
    spokes = [(number, number + 5, 1) for number in range(5)]
    inner = [(5 + number, 5 + (number + 2) % 5, 1) for number in range(5)]
    problem = PlacingProblem(regular(10, switches, 1), circuits(*outer, *spokes, *inner))
    placed = place(problem)
    check(problem, placed)
    assert figures(placed) == (most, 0)
    assert placed.proven


@pytest.mark.parametrize("tors", [8, 16])
def test_complete_graph_uses_one_port_on_each_of_as_many_switches(tors: int) -> None:
    everyone = circuits(*((one, other, 1) for one, other in combinations(range(tors), 2)))
    placed = place(PlacingProblem(regular(tors, tors - 1, 1), everyone))
    assert figures(placed) == (len(everyone), 0)


def test_kept_circuit_gives_way_if_that_places_another() -> None:
    """Two switches have a port each; 0-1 is up where 1-2 would fit only if 2 had its port on the other one too."""
    cabling = Cabling({ocs(0): {1: tor(0), 2: tor(1), 3: tor(2)}, ocs(1): {1: tor(0), 2: tor(1)}})
    problem = PlacingProblem(cabling, circuits((0, 1, 1), (1, 2, 1)), frozenset((PortPair(ocs(0), 1, 2),)))
    placed = place(problem)
    check(problem, placed)
    assert figures(placed) == (2, 0)
    assert placed.proven


@pytest.mark.exact
@given(st.integers(0, 2**32), st.sampled_from((0.0, 0.6, 0.95)), st.sampled_from((0.0, 0.15)))
def test_matches_best_of_all_sets_of_cross_connects(seed: int, up: float, failed: float) -> None:
    rng = Random(seed)
    problem = draw_problem(rng, rng.randint(2, 5), rng.randint(1, 3), 2, up, failed)
    placed = place(problem)
    check(problem, placed)
    assert figures(placed) == best_of_all(problem)
    assert placed.proven


@pytest.mark.exact
@given(st.integers(0, 2**32), st.sampled_from((0.0, 0.5, 0.95)), st.sampled_from((0.0, 0.1)))
def test_matches_program_over_ports(seed: int, up: float, failed: float) -> None:
    rng = Random(seed)
    problem = draw_problem(rng, rng.randint(4, 8), rng.randint(2, 5), rng.choice((1, 2)), up, failed)
    placed = place(problem)
    check(problem, placed)
    assert figures(placed) == best_by_program(problem)


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_result_does_not_depend_on_input_order(seed: int) -> None:
    rng = Random(seed)
    problem = draw_problem(rng, 6, 3, 2, 0.8, 0.05)
    pairs = list(problem.circuits)
    rng.shuffle(pairs)
    turned = PlacingProblem(
        Cabling(
            {
                switch: dict(reversed(problem.cabling.ports[switch].items()))
                for switch in reversed(problem.cabling.ports)
            }
        ),
        {pair: problem.circuits[pair] for pair in pairs},
        problem.current,
        problem.failed_ports,
    )
    assert place(turned) == place(problem) == place(problem)


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_repeated_placement_changes_nothing(seed: int) -> None:
    rng = Random(seed)
    problem = draw_problem(rng, 6, 3, 2, 0.5, 0.1)
    first = place(problem)
    again = place(
        PlacingProblem(problem.cabling, problem.circuits, frozenset(first.cross_connects), problem.failed_ports)
    )
    assert again.cross_connects == again.kept == first.cross_connects


def full_pod(rng: Random, tors: int, switches: int, ports: int) -> frozenset[PortPair]:
    """Return a pod with every port in use at random, except a few without possible peers."""
    cabling, found = regular(tors, switches, ports), set()
    for switch, owner in cabling.ports.items():
        free = sorted(owner)
        rng.shuffle(free)
        for one, other in zip(free[::2], free[1::2], strict=True):
            if owner[one] != owner[other]:
                found.add(port_pair(switch, one, other))
    return frozenset(found)


def counted(cabling: Cabling, up: frozenset[PortPair]) -> dict[Pair, int]:
    counts: dict[Pair, int] = {}
    for each in sorted(up):
        pair = cabling.ends(each)
        assert pair is not None
        counts[pair] = counts.get(pair, 0) + 1
    return counts


@pytest.mark.parametrize(("tors", "switches", "ports"), [(64, 16, 2), (32, 4, 8)])
def test_full_pod_is_placed_from_nothing(tors: int, switches: int, ports: int) -> None:
    cabling, up = regular(tors, switches, ports), full_pod(Random(1), tors, switches, ports)
    problem = PlacingProblem(cabling, counted(cabling, up))
    placed = place(problem)
    check(problem, placed)
    assert not placed.unplaced
    assert placed.proven


def test_changed_full_pod_keeps_most_circuits() -> None:
    """The next period differs by a tenth; ports may be short because of circuits that stay."""
    cabling, up = regular(64, 16, 2), full_pod(Random(1), 64, 16, 2)
    wanted = counted(cabling, up)
    rng = Random(2)
    for _ in range(len(up) // 20):  # two circuits exchange ends
        (a, b), (c, d) = rng.sample(sorted(wanted), 2)
        if len({a, b, c, d}) == 4:
            for pair, more in ((pair_of(a, b), -1), (pair_of(c, d), -1), (pair_of(a, c), 1), (pair_of(b, d), 1)):
                wanted[pair] = wanted.get(pair, 0) + more
                if not wanted[pair]:
                    del wanted[pair]
    problem = PlacingProblem(cabling, wanted, up)
    placed = place(problem, work=0)
    check(problem, placed)
    assert not placed.unplaced
    assert len(placed.kept) > 0.9 * placed.bound_kept
    assert figures(place(problem, work=300_000)) >= figures(placed)


def with_failed(cabling: Cabling, rng: Random, on_each: int) -> dict[OcsId, frozenset[int]]:
    return {switch: frozenset(rng.sample(sorted(owner), on_each)) for switch, owner in cabling.ports.items()}


@pytest.mark.exact
@given(st.integers(0, 2**32), st.sampled_from((0.0, 1.0)))
def test_full_pod_with_failed_ports_matches_program_over_ports(seed: int, stands: float) -> None:
    rng = Random(seed)
    tors, switches, ports = rng.choice(((8, 3, 2), (10, 5, 1), (6, 3, 3)))
    cabling, up = regular(tors, switches, ports), full_pod(rng, tors, switches, ports)
    current = frozenset(each for each in sorted(up) if rng.random() < stands)
    problem = PlacingProblem(cabling, counted(cabling, up), current, with_failed(cabling, rng, 2))
    placed = place(problem)
    check(problem, placed)
    assert figures(placed) == best_by_program(problem)


@pytest.mark.parametrize(("tors", "switches", "ports", "failed"), [(64, 16, 2, 13), (64, 32, 1, 6)])
@pytest.mark.parametrize("stands", [False, True])
def test_pod_with_tenth_of_ports_failed_leaves_at_most_one_port_per_switch(
    tors: int, switches: int, ports: int, failed: int, stands: bool
) -> None:
    """The maximum: of the remaining ports on a switch, one is unused only if their number is odd."""
    cabling, up = regular(tors, switches, ports), full_pod(Random(1), tors, switches, ports)
    out = with_failed(cabling, Random(3), failed)
    problem = PlacingProblem(cabling, counted(cabling, up), up if stands else frozenset(), out)
    placed = place(problem, work=0)
    check(problem, placed)
    assert len(placed.cross_connects) == switches * ((tors * ports - failed) // 2) == placed.bound_circuits


def test_full_pod_with_few_failed_ports_places_nearly_all() -> None:
    cabling, up = regular(64, 16, 2), full_pod(Random(1), 64, 16, 2)
    problem = PlacingProblem(cabling, counted(cabling, up), up, with_failed(cabling, Random(3), 4))
    quick, placed = (place(problem, work=work) for work in (0, 180_000))
    check(problem, placed)
    assert figures(placed) >= figures(quick)
    assert len(placed.cross_connects) >= placed.bound_circuits - 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"circuits": {(tor(1), tor(0)): 1}}, "smaller id first"),
        ({"circuits": {(tor(0), tor(1)): 0}}, "must be >= 1, got 0"),
        ({"current": frozenset((PortPair(ocs(0), 0, 9),))}, "must use only ports with a fibre, got port 9 of ocs00"),
        (
            {"current": frozenset((PortPair(ocs(0), 0, 1), PortPair(ocs(0), 1, 2)))},
            "got several uses of port 1 of ocs00",
        ),
    ],
)
def test_invalid_problems_are_rejected(change: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"cabling": regular(3, 1, 1), "circuits": circuits((0, 1, 1)), **change}
    with pytest.raises(ValueError, match=message):
        PlacingProblem(**fields)  # type: ignore[arg-type]
