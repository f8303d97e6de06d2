"""`orchestrrl fabric allocate`, `place` and `transition`: solve problems from files. The commands allocate circuits to
pairs of endpoints, place circuits on switch ports, and plan transitions between two sets of cross-connects."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from orchestrrl.cli.command import ProblemFile, problem_command
from orchestrrl.cli.formats import bar, duration
from orchestrrl.cli.output import Columns, Output, View, cells_table, fields, table

if TYPE_CHECKING:
    from orchestrrl.cli.fabric.problems import PlaceProblem
    from planner.fabric.allocate import Allocation, AllocationProblem
    from planner.fabric.model import Cabling, Pair, PortPair
    from planner.fabric.place import PlacedCircuits, PlacingProblem
    from planner.fabric.transition import CircuitsUp, Transition, TransitionProblem

PAIRS_SHOWN = 60  # maximum number of pairs to print, the slowest first
LINES_SHOWN = 40  # cross-connects to add or remove; if there are more, only counts per switch are printed
SHOWN_MOVES = 12  # moves to print per stage; further moves are only counted
SHOWN_STAGES = 60
BAR_WIDTH = 10


@problem_command("fabric_allocate")
def fabric_allocate(
    file: ProblemFile,
    bipartite: Annotated[
        bool,
        typer.Option(
            "--bipartite",
            help="For demand between two sides with hot endpoints: save their ports and maximize the bytes served.",
        ),
    ] = False,
) -> Output:
    """Allocate circuits to pairs of endpoints so that the transfer time of the slowest pair is as short as possible.

    The command reads one JSON problem. `link_gbps` is the rate of a circuit, and each of the `endpoints` has a number
    of `ports`. `demand` contains the bytes to transfer from `src` to `dst`; the bytes of several entries for the same
    pair are added up. `eligible` is the list of pairs `[a, b]` that may be joined, or null for all pairs.
    `failed_ports` is the number of failed ports of each endpoint (a number above its `ports` means all ports). Circuits
    are full duplex. The result serves at least as many pairs and bytes as that of Algorithm 3 of the paper, and its
    slowest pair takes no longer. The command changes nothing.

    Example:

        orchestrrl fabric allocate --print-example > demand.json

        orchestrrl fabric allocate demand.json

        orchestrrl fabric allocate - --json < demand.json
    """
    # Imported here so that other commands start fast, and before the clock starts, which measures only the solver.
    from orchestrrl.cli.fabric.problems import ALLOCATE_CHECKS, AllocateProblem, allocation_problem
    from orchestrrl.cli.problem import read_problem
    from planner.fabric.allocate import allocate

    problem = allocation_problem(read_problem(file, AllocateProblem, ALLOCATE_CHECKS))
    started_s = time.perf_counter()
    allocation = allocate(problem, bipartite=bipartite)
    solve_s = time.perf_counter() - started_s
    return Output(_allocation_json(allocation, solve_s), _allocation_view(problem, allocation, solve_s))


def _allocation_json(allocation: "Allocation", solve_s: float) -> dict[str, Any]:
    return {
        "circuits": [{"a": a, "b": b, "count": count} for (a, b), count in allocation.circuits.items()],
        "completion_s": allocation.completion_s,
        "unserved": [list(pair) for pair in allocation.unserved],
        "uniform_completion_s": allocation.uniform_completion_s,
        "solve_s": solve_s,
    }


def _allocation_view(problem: "AllocationProblem", allocation: "Allocation", solve_s: float) -> View:
    rows = [_allocation_row(problem, pair, count) for pair, count in allocation.circuits.items()]
    rows.sort(key=lambda row: (-row[0], row[1]))
    unserved = allocation.unserved
    pairs = f"{len(rows):,} of {len(rows) + len(unserved):,}" if unserved else f"{len(rows):,}"
    yield (
        f"[bold]{sum(allocation.circuits.values()):,} circuits[/bold] for {pairs} pairs: the slowest ends after"
        f" {duration(allocation.completion_s)}; with ports divided evenly over the pairs,"
        f" {duration(allocation.uniform_completion_s)}; solved in {duration(solve_s)}"
    )
    yield cells_table(
        "Pairs, slowest first" if len(rows) <= PAIRS_SHOWN else f"The {PAIRS_SHOWN} slowest of {len(rows):,} pairs",
        ("a", "b", "circuits", "a to b", "b to a", "seconds"),
        (
            (a, b, count, _bytes(there), _bytes(back), duration(value_s))
            for value_s, (a, b), count, there, back in rows[:PAIRS_SHOWN]
        ),
    )
    if unserved:
        names = ", ".join(f"{a} - {b}" for a, b in unserved[:PAIRS_SHOWN])
        more = f" and {len(unserved) - PAIRS_SHOWN:,} more" if len(unserved) > PAIRS_SHOWN else ""
        yield cells_table("Unserved pairs", ("number", "pairs"), [(len(unserved), names + more)])


def _allocation_row(problem: "AllocationProblem", pair: "Pair", count: int) -> tuple[float, "Pair", int, float, float]:
    from planner.fabric.allocate import seconds

    there, back = (problem.demand.get(ends, 0.0) for ends in (pair, (pair[1], pair[0])))
    return seconds(max(there, back) / count, problem.link_gbps), pair, count, there, back


def _bytes(value: float) -> str | None:
    return f"{value / 1e9:,.3g} GB" if value else None


# --- place


@problem_command("fabric_place")
def fabric_place(file: ProblemFile) -> Output:
    """Compute the switch and the ports of each circuit.

    The command reads one JSON problem: `switches` with the ports of each endpoint's fibres, the required `circuits`,
    the `current` cross-connects and the `failed_ports`. Both ends of a circuit are on the same switch. The result
    places as many circuits as possible and, among such placements, changes as few cross-connects as possible. A current
    cross-connect on a failed port is removed. The command changes nothing.

    Example:

        orchestrrl fabric place --print-example > circuits.json

        orchestrrl fabric place circuits.json

        orchestrrl fabric place - --json < circuits.json
    """
    # Imported here so that other commands start fast.
    from orchestrrl.cli.fabric.problems import PLACE_CHECKS, PlaceProblem, placing_problem
    from orchestrrl.cli.problem import read_problem
    from planner.fabric.place import place

    read = read_problem(file, PlaceProblem, PLACE_CHECKS)
    problem = placing_problem(read)
    placed = place(problem)
    return Output(_placing_json(read, problem.cabling, placed), _placing_view(problem, placed))


def _placing_json(read: "PlaceProblem", cabling: "Cabling", placed: "PlacedCircuits") -> dict[str, Any]:
    """Return the placement as a JSON object. The endpoints of each pair are in the same order as in the problem."""
    named = {(min(each.a, each.b), max(each.a, each.b)): (each.a, each.b) for each in read.circuits}
    kept = {(each.switch, *each.ports) for each in placed.kept}
    return {
        "cross_connects": [_cross_connect(named, cabling, each) for each in placed.cross_connects],
        "kept": [
            each.model_dump()
            for each in read.current
            if (each.switch, min(each.port_a, each.port_b), max(each.port_a, each.port_b)) in kept
        ],
        "unplaced": [
            {"a": named[pair][0], "b": named[pair][1], "count": count} for pair, count in placed.unplaced.items()
        ],
    }


def _cross_connect(
    named: dict[tuple[str, str], tuple[str, str]], cabling: "Cabling", each: "PortPair"
) -> dict[str, Any]:
    owners = cabling.ports[each.switch]
    one, other = each.ports
    a, b = named[min(owners[one], owners[other]), max(owners[one], owners[other])]
    port_a, port_b = (one, other) if owners[one] == a else (other, one)
    return {"switch": each.switch, "a": a, "b": b, "port_a": port_a, "port_b": port_b}


def _placing_view(problem: "PlacingProblem", placed: "PlacedCircuits") -> View:
    new = set(placed.cross_connects) - set(placed.kept)
    gone = problem.current - set(placed.kept)
    yield (
        f"[bold]{len(placed.cross_connects):,} of {sum(problem.circuits.values()):,} circuits[/bold] placed:"
        f" {len(placed.kept):,} stay, {len(new):,} new, {len(gone):,} removed{_proof(placed)}"
    )
    kinds = {"circuits": placed.cross_connects, "kept": placed.kept, "new": new, "removed": gone}
    counts: Columns = {title: Counter(each.switch for each in kind).__getitem__ for title, kind in kinds.items()}
    yield table("Switches", {"switch": str, **counts}, sorted(problem.cabling.ports))
    if 0 < len(new) + len(gone) <= LINES_SHOWN:
        yield cells_table(
            "Changes",
            ("switch", "change", "ports", "endpoints"),
            (
                (each.switch, word, "{}-{}".format(*each.ports), _ends(problem, each))
                for word, group in (("remove", gone), ("add", new))
                for each in sorted(group)
            ),
        )
    if placed.unplaced:
        yield cells_table(
            "Unplaced", ("pair", "circuits"), ((" - ".join(pair), n) for pair, n in placed.unplaced.items())
        )


def _ends(problem: "PlacingProblem", each: "PortPair") -> str:
    owners = problem.cabling.ports[each.switch]
    return " - ".join(owners[port] for port in each.ports)


def _proof(placed: "PlacedCircuits") -> str:
    if placed.proven:
        return "; this placement is optimal."
    return (
        f"; no placement has more than {placed.bound_circuits:,}"
        f" circuits or, with as many as this, keeps more than {placed.bound_kept:,}."
    )


# --- transition


class Least(NamedTuple):
    """The endpoint that has the smallest share of its circuits up. `circuits` is the number that are up. `of` is the
    number of its circuits before or after the transition, whichever is smaller. `endpoint` is None if this number is 0
    for every endpoint."""

    endpoint: str | None
    circuits: int
    of: int


@problem_command("fabric_transition")
def fabric_transition(file: ProblemFile) -> Output:
    """Plan a change of cross-connects in stages, so that no pair goes dark and every endpoint keeps bandwidth.

    The command reads one JSON problem: the endpoint at each port of the `switches`, the `current` and the `target`
    cross-connects, and two limits. `max_moves_per_stage` limits the moves of a stage, and `min_fraction` is the
    smallest fraction of its circuits that each endpoint should keep. A stage's removals are made before its additions.
    The command prints the circuits that are up before the first stage and after the removals and the additions of each
    stage. If no order satisfies the limits, the result lists the pairs that go dark (`dark_pairs`) and the endpoints
    that keep too few circuits (`thin_endpoints`). The result minimizes first the number of such pairs, then the number
    of such endpoints, and then the number of stages. The command changes nothing.

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
    return Output(_transition_json(problem, found), _transition_view(problem, found, solve_s))


def _transition_json(problem: "TransitionProblem", found: "Transition") -> dict[str, Any]:
    """Return the transition as a JSON object. Each dark pair is an object of the form `{"a", "b"}`.

    `points` lists, for each point of the transition, the total number of circuits and the endpoint that has the
    smallest share of its circuits up.
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


def _transition_view(problem: "TransitionProblem", found: "Transition", solve_s: float) -> View:
    from planner.fabric.transition import circuits_up

    count, down = len(found.stages), sum(len(stage.remove) for stage in found.stages)
    up = sum(len(stage.add) for stage in found.stages)
    proven = "the minimum" if count == found.stages_at_least else f"at least {found.stages_at_least} are needed"
    yield (
        f"[bold]{_number(count, 'stage')}[/bold] ({proven}): {down:,} down, {up:,} up,"
        f" {len(problem.current & problem.target):,} untouched; solved in {duration(solve_s)}"
    )
    yield (
        f"dark pairs: {_escaped(map('-'.join, found.dark_pairs))}; thin endpoints: {_escaped(found.thin_endpoints)}"
        + ("" if found.fewest_suffer else " (not proven minimal)")
    )
    columns = ("stage", "point", "cross-connects", "circuits", "smallest share", "")
    rows = list(_transition_rows(found, circuits_up(problem, found)))
    yield cells_table("Stages", columns, rows[: 2 * SHOWN_STAGES + 1])
    if len(found.stages) > SHOWN_STAGES:
        yield f"... and {len(found.stages) - SHOWN_STAGES:,} more; use --json to list all"


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _escaped(names: Iterable[str]) -> str:
    """Join names with commas and escape rich markup in them. Return `none` if there are no names."""
    from rich.markup import escape  # imported here: --json does not need it

    return escape(", ".join(names)) or "none"


def _leasts(lights: "tuple[CircuitsUp, ...]") -> Iterator[tuple["CircuitsUp", Least]]:
    first, last = lights[0].endpoints, lights[-1].endpoints
    whole = {name: min(first[name], last[name]) for name in first if min(first[name], last[name]) > 0}
    for light in lights:
        name = min(whole, key=lambda name: (light.endpoints[name] / whole[name], name), default=None)
        yield light, Least(None, 0, 0) if name is None else Least(name, light.endpoints[name], whole[name])


def _transition_rows(found: "Transition", lights: "tuple[CircuitsUp, ...]") -> Iterator[tuple[object, ...]]:
    """Yield a table row for each point of the transition: the moves made, the number of circuits up, and the endpoint
    that has the smallest share of its circuits up."""
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
