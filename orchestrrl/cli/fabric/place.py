"""`orchestrrl fabric place`: which switch and which ports carry each circuit, for a problem in a file."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from orchestrrl.cli.command import ProblemFile, problem_command
from orchestrrl.cli.output import Columns, Output, View, cells_table, table

if TYPE_CHECKING:
    from orchestrrl.cli.fabric.problems import PlaceProblem
    from planner.fabric.model import Cabling, Pair, PortPair
    from planner.fabric.place import PlacedCircuits, PlacingProblem

LINES_SHOWN = 40  # cross-connects to add or remove; beyond that, switches only


@problem_command("fabric_place")
def fabric_place(file: ProblemFile) -> Output:
    """Say which switch and which ports carry each circuit.

    Reads one JSON problem: `switches` with the ports that each endpoint's fibres end on, the `circuits` wanted, the
    `current` cross-connects and the `failed_ports`. Both ends of a circuit lie on one switch. First as many circuits as
    can be placed, then with as few changes as can be. A current cross-connect on a failed port goes. Nothing is
    changed.

    Example:

        orchestrrl fabric place --print-example > circuits.json

        orchestrrl fabric place circuits.json

        orchestrrl fabric place - --json < circuits.json
    """
    # Imported here so that no other command waits for it.
    from orchestrrl.cli.fabric.problems import PLACE_CHECKS, PlaceProblem, placing_problem
    from orchestrrl.cli.problem import read_problem
    from planner.fabric.place import place

    read = read_problem(file, PlaceProblem, PLACE_CHECKS)
    problem = placing_problem(read)
    placed = place(problem)
    return Output(_json(read, problem.cabling, placed), _view(problem, placed))


def _json(read: "PlaceProblem", cabling: "Cabling", placed: "PlacedCircuits") -> dict[str, Any]:
    """Ends stand in the order in which the problem names them."""
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


def _view(problem: "PlacingProblem", placed: "PlacedCircuits") -> View:
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
        yield cells_table("Unplaced", ("pair", "circuits"), ((_name(pair), n) for pair, n in placed.unplaced.items()))


def _proof(placed: "PlacedCircuits") -> str:
    if placed.proven:
        return "; no placement does better."
    return (
        f"; no placement has more than {placed.bound_circuits:,}"
        f" circuits or, with as many as this, keeps more than {placed.bound_kept:,}."
    )


def _ends(problem: "PlacingProblem", each: "PortPair") -> str:
    owners = problem.cabling.ports[each.switch]
    return " - ".join(owners[port] for port in each.ports)


def _name(pair: "Pair") -> str:
    return " - ".join(pair)
