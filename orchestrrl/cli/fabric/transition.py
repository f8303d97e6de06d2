"""`orchestrrl fabric transition`: from one set of cross-connects to another without a pair going dark."""

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.markup import escape

from orchestrrl.cli.command import ProblemFile, problem_command
from orchestrrl.cli.formats import bar, duration
from orchestrrl.cli.output import Output, View, cells_table, fields

if TYPE_CHECKING:
    from planner.fabric.model import Pair, PortPair
    from planner.fabric.transition import CircuitsUp, Transition, TransitionProblem

SHOWN_MOVES = 12  # of a stage; more are counted
SHOWN_STAGES = 60
BAR_WIDTH = 10


class Least(NamedTuple):
    """The endpoint with the smallest share of its circuits before or after, whichever are fewer."""

    endpoint: str | None
    circuits: int
    of: int


@problem_command("fabric_transition")
def fabric_transition(file: ProblemFile) -> Output:
    """Say in which stages cross-connects are changed, so that no pair goes dark and every endpoint keeps bandwidth.

    Reads one JSON problem: which endpoint each port of the `switches` is fibred to, the `current` and the `target`
    cross-connects, `max_moves_per_stage` and `min_fraction`. A stage's removals come down before its additions go up;
    what is left at each point is shown. Where no order keeps everybody lit, those that suffer are named, as few as can
    be: `dark_pairs` first, then `thin_endpoints`, then stages. Nothing is changed.

    Example:

        orchestrrl fabric transition --print-example > transition.json

        orchestrrl fabric transition transition.json

        orchestrrl fabric transition - --json < transition.json
    """
    from orchestrrl.cli.fabric.problems import TRANSITION_CHECKS, TransitionFile, transition_problem
    from orchestrrl.cli.problem import read_problem
    from planner.fabric.transition import transition

    problem = transition_problem(read_problem(file, TransitionFile, TRANSITION_CHECKS))
    started_s = time.perf_counter()
    found = transition(problem)
    solve_s = time.perf_counter() - started_s
    return Output(_json(problem, found), _view(problem, found, solve_s))


def _json(problem: "TransitionProblem", found: "Transition") -> dict[str, Any]:
    """The stages and who suffers; a dark pair is an object `{"a", "b"}`, as a circuit is.

    `points` says what is left: all circuits, and those of the endpoint that has least of its fewer before or after.
    """
    from planner.fabric.transition import circuits_up

    def parts(cross_connects: "Iterable[PortPair]") -> list[dict[str, Any]]:
        return [fields(each, "switch port_a port_b") for each in cross_connects]

    return {
        "stages": [{"remove": parts(stage.remove), "add": parts(stage.add)} for stage in found.stages],
        "dark_pairs": [{"a": one, "b": other} for one, other in found.dark_pairs],
        "thin_endpoints": list(found.thin_endpoints),
        "points": [
            {"stage": light.stage, "kind": light.kind, "circuits": sum(light.pairs.values()), "least": least._asdict()}
            for light, least in _leasts(circuits_up(problem, found))
        ],
        "stages_at_least": found.stages_at_least,
        "fewest_suffer": found.fewest_suffer,
    }


def _view(problem: "TransitionProblem", found: "Transition", solve_s: float) -> View:
    from planner.fabric.transition import circuits_up

    count, down = len(found.stages), sum(len(stage.remove) for stage in found.stages)
    up = sum(len(stage.add) for stage in found.stages)
    proven = "no fewer will do" if count == found.stages_at_least else f"at least {found.stages_at_least} are needed"
    yield (
        f"[bold]{_number(count, 'stage')}[/bold] ({proven}): {down:,} down, {up:,} up,"
        f" {len(problem.current & problem.target):,} untouched; solved in {duration(solve_s)}"
    )
    yield (
        f"dark pairs: {_named(found.dark_pairs)}; thin endpoints: {_escaped(found.thin_endpoints)}"
        + ("" if found.fewest_suffer else " (fewer may do: not proven)")
    )
    columns = ("stage", "point", "cross-connects", "circuits", "least of an endpoint", "")
    rows = list(_rows(found, circuits_up(problem, found)))
    yield cells_table("Stages", columns, rows[: 2 * SHOWN_STAGES + 1])
    if len(found.stages) > SHOWN_STAGES:
        yield f"... and {len(found.stages) - SHOWN_STAGES:,} more; --json has them all"


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _named(pairs: "tuple[Pair, ...]") -> str:
    return _escaped(f"{one}-{other}" for one, other in pairs)


def _escaped(names: Iterable[str]) -> str:
    """Names may look like markup."""
    return escape(", ".join(names)) or "none"


def _leasts(lights: "tuple[CircuitsUp, ...]") -> Iterator[tuple["CircuitsUp", Least]]:
    first, last = lights[0].endpoints, lights[-1].endpoints
    whole = {name: min(first[name], last[name]) for name in first if min(first[name], last[name]) > 0}
    for light in lights:
        name = min(whole, key=lambda name: (light.endpoints[name] / whole[name], name), default=None)
        yield light, Least(None, 0, 0) if name is None else Least(name, light.endpoints[name], whole[name])


def _rows(found: "Transition", lights: "tuple[CircuitsUp, ...]") -> Iterator[tuple[object, ...]]:
    """One line a point: what moves, what is up, and the endpoint that has least of what it has before or after."""
    for light, least in _leasts(lights):
        moved: tuple[PortPair, ...] = ()
        if light.stage:
            stage = found.stages[light.stage - 1]
            moved = stage.remove if light.kind == "removed" else stage.add
        sign = {"start": "", "removed": "-", "added": "+"}[light.kind]
        shown = [f"{sign}{each}" for each in moved[:SHOWN_MOVES]]
        if len(moved) > SHOWN_MOVES:
            shown.append(f"and {len(moved) - SHOWN_MOVES:,} more")
        yield (
            light.stage or None,
            {"start": "before", "removed": "down", "added": "up"}[light.kind],
            " ".join(shown) or None,
            sum(light.pairs.values()),
            None if least.endpoint is None else f"{least.endpoint} {least.circuits} of {least.of}",
            bar(min(1.0, least.circuits / least.of), BAR_WIDTH) if least.of else None,
        )
