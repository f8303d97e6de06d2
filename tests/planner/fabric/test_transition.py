"""`planner.fabric.transition`: every stage is followed move by move, and small problems are compared with all
alternatives."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transition_oracle import (
    TransitionFault,
    check,
    cost,
    counts,
    draw_problem,
    floors,
    followed,
    least,
    points,
    suffering,
)

from planner.fabric.model import Cabling, EndpointId, OcsId, PortPair, port_pair
from planner.fabric.transition import (
    Transition,
    TransitionProblem,
    TransitionStage,
    circuits_up,
    transition,
)

SEEDS = st.integers(min_value=0, max_value=2**32)
SLOW = settings(suppress_health_check=[HealthCheck.too_slow])


def reported(planned: Transition) -> set[tuple[str, ...]]:
    return {tuple(pair) for pair in planned.dark_pairs} | {(endpoint,) for endpoint in planned.thin_endpoints}


def small(seed: int) -> TransitionProblem:
    rng = Random(seed)
    return draw_problem(
        rng,
        switches=rng.randint(1, 3),
        ports=rng.choice((4, 6, 8)),
        endpoints=rng.randint(3, 5),
        fill=rng.choice((0.6, 0.9, 1.0)),
        same=rng.choice((0.0, 0.2, 0.5)),
        most_differences=7,
    )


def larger(seed: int) -> TransitionProblem:
    rng = Random(seed)
    return draw_problem(rng, switches=rng.randint(1, 5), ports=rng.choice((12, 24)), endpoints=rng.randint(4, 16))


@pytest.mark.exact
@SLOW
@given(SEEDS)
def test_no_transition_is_better(seed: int) -> None:
    problem = small(seed)
    planned = transition(problem)
    check(problem, planned)
    suffer = followed(problem, planned)
    assert suffer == reported(planned)
    fewest, stages = least(problem)
    assert (cost(suffer), len(planned.stages)) == (fewest, stages)
    assert planned.fewest_suffer
    assert planned.stages_at_least == stages


@SLOW
@given(SEEDS)
def test_every_point_is_safe_and_side_effects_are_reported(seed: int) -> None:
    problem = larger(seed)
    planned = transition(problem)
    check(problem, planned)
    assert followed(problem, planned) == reported(planned)
    assert planned.stages_at_least <= len(planned.stages)
    assert planned == transition(problem)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(SEEDS)
def test_target_is_reached_after_any_interruption(seed: int) -> None:
    problem = small(seed)
    for point in points(problem, transition(problem).stages):
        rest = replace(problem, current=point.up)
        planned = transition(rest)
        check(rest, planned)
        followed(rest, planned)
        if point.up == problem.target:
            assert planned.stages == ()


@given(SEEDS)
def test_repeated_stage_changes_nothing(seed: int) -> None:
    problem = small(seed)
    for stage in transition(problem).stages:
        once = (problem.current - set(stage.remove)) | set(stage.add)
        assert (once - set(stage.remove)) | set(stage.add) == once


@given(SEEDS)
def test_circuits_are_counted_at_each_point(seed: int) -> None:
    problem = small(seed)
    planned = transition(problem)
    lights = circuits_up(problem, planned)
    seen = list(points(problem, planned.stages))
    assert [(light.stage, light.kind) for light in lights] == [(point.stage, point.kind) for point in seen]
    for light, point in zip(lights, seen, strict=True):
        expected = counts(problem, point.up)
        assert {pair: n for pair, n in light.pairs.items() if n} == {k: n for k, n in expected.items() if len(k) == 2}
        assert all(n == expected[(endpoint,)] for endpoint, n in light.endpoints.items())
        assert sum(light.pairs.values()) == len(point.up)


@given(SEEDS, st.randoms(use_true_random=False))
def test_check_detects_altered_transitions(seed: int, rng: Random) -> None:
    """Reordered stages, moves in other stages, and omitted moves are faults exactly if the contract is broken."""
    problem = small(seed)
    planned = transition(problem)
    moves = [(each, "remove") for stage in planned.stages for each in stage.remove]
    moves += [(each, "add") for stage in planned.stages for each in stage.add]
    count = rng.randint(1, 4)
    dealt: list[tuple[list[PortPair], list[PortPair]]] = [([], []) for _ in range(count)]
    for each, kind in moves:
        if rng.random() < 0.97:
            dealt[rng.randrange(count)][kind == "add"].append(each)
    altered = replace(planned, stages=tuple(TransitionStage(tuple(down), tuple(up)) for down, up in dealt))
    try:
        safe = followed(problem, altered) <= reported(altered)
    except AssertionError:
        safe = False
    if safe:
        check(problem, altered)
    else:
        with pytest.raises(TransitionFault):
            check(problem, altered)


def cabled(**ports: tuple[int, ...]) -> Cabling:
    return Cabling.of({OcsId("s"): {EndpointId(name): numbers for name, numbers in ports.items()}})


def up(*ports: tuple[int, int]) -> frozenset[PortPair]:
    return frozenset(port_pair(OcsId("s"), *each) for each in ports)


def test_one_of_two_pairs_that_swap_ports_goes_dark() -> None:
    cabling = cabled(a=(1, 2), b=(3, 4), c=(5, 6))
    # The new circuit of a-b needs the port that a-c holds, and vice versa.
    problem = TransitionProblem(cabling, up((1, 3), (2, 5)), up((2, 4), (1, 6)), 4, 0.0)
    planned = transition(problem)
    assert planned.fewest_suffer
    assert planned.dark_pairs in ((("a", "b"),), (("a", "c"),))
    assert len(planned.stages) == planned.stages_at_least == 2


def test_spare_port_keeps_pair_lit_with_an_extra_stage() -> None:
    cabling = cabled(a=(1, 2), b=(3, 4), c=(5,))
    problem = TransitionProblem(cabling, up((1, 3)), up((2, 4), (1, 5)), 10, 0.0)
    planned = transition(problem)
    assert planned.stages == (
        TransitionStage((), tuple(up((2, 4)))),
        TransitionStage(tuple(up((1, 3))), tuple(up((1, 5)))),
    )
    assert (planned.dark_pairs, planned.stages_at_least) == ((), 2)


def test_full_fraction_cannot_always_be_met() -> None:
    cabling = cabled(a=(1, 2), b=(3, 4))
    problem = TransitionProblem(cabling, up((1, 3), (2, 4)), up((1, 4), (2, 3)), 4, 1.0)
    planned = transition(problem)
    assert planned.thin_endpoints == ("a", "b")
    assert followed(problem, planned) == reported(planned)


def test_float_errors_do_not_reduce_minimum() -> None:
    cabling = cabled(a=tuple(range(100)), b=tuple(range(100, 200)))
    before, after = (up(*((port, 100 + (port + turn) % 100) for port in range(100))) for turn in (0, 1))
    problem = TransitionProblem(cabling, before, after, 400, 0.29)
    planned = transition(problem)
    assert not planned.thin_endpoints
    assert min(light.endpoints[EndpointId("a")] for light in circuits_up(problem, planned)) == 29


def test_no_change_has_no_stage() -> None:
    problem = TransitionProblem(cabled(a=(1,), b=(2,)), up((1, 2)), up((1, 2)), 1, 1.0)
    assert transition(problem) == Transition((), (), (), 0, True)


def test_oracle_follows_the_contract() -> None:
    problem = TransitionProblem(cabled(a=(1, 2), b=(3, 4), c=(5,)), up((1, 3), (2, 4)), up((1, 3), (2, 5)), 1, 0.5)
    assert floors(problem) == {("a", "b"): 1, ("a",): 1, ("b",): 0}
    assert suffering(problem, frozenset()) == {("a", "b"), ("a",)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_moves_per_stage": 0}, "max_moves_per_stage must be >= 1, got 0"),
        ({"min_fraction": 1.5}, r"min_fraction must be within 0..1, got 1.5"),
        ({"current": up((1, 2))}, "s:1-2 must connect two endpoints"),
        ({"target": up((1, 9))}, "s:1-9 must connect two endpoints"),
        ({"target": up((1, 3), (1, 4))}, "target must use each port at most once, got several uses of port 1 of s"),
    ],
)
def test_invalid_problem_is_rejected(changes: dict[str, object], message: str) -> None:
    problem = TransitionProblem(cabled(a=(1, 2), b=(3, 4)), up((1, 3)), up((2, 4)), 1, 0.5)
    with pytest.raises(ValueError, match=message):
        replace(problem, **changes)  # type: ignore[arg-type]


def test_site_of_many_switches() -> None:
    problem = draw_problem(Random(5), switches=8, ports=160, endpoints=80, fill=1.0, same=0.1)
    problem = replace(problem, max_moves_per_stage=64, min_fraction=0.5)
    planned = transition(problem)
    check(problem, planned)
    assert followed_quickly(problem, planned) == reported(planned)
    assert len(planned.stages) <= 1.1 * planned.stages_at_least


def followed_quickly(problem: TransitionProblem, planned: Transition) -> set[tuple[str, ...]]:
    """Follow the stages as `followed` does, checking only after the removals of each stage."""
    current, suffer = problem.current, set[tuple[str, ...]]()
    for stage in planned.stages:
        current = current - set(stage.remove)
        suffer |= suffering(problem, current)
        current = current | set(stage.add)
    assert current == problem.target
    return suffer
