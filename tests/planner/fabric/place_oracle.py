"""Placements by the letter of the contract: the optimum of small problems, and a check of any placement. Independent of
the planner's methods."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from random import Random

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from planner.fabric.model import Cabling, EndpointId, OcsId, Pair, PortPair, port_pair
from planner.fabric.place import PlacedCircuits, PlacingProblem


def draw_problem(
    rng: Random, endpoints: int, switches: int, most_ports: int, up: float, failed: float
) -> PlacingProblem:
    """Draw uneven fibres and more circuits than may fit; some current cross-connects belong to no wanted pair."""
    names = [EndpointId(f"tor{number}") for number in range(endpoints)]
    ports: dict[OcsId, dict[int, EndpointId]] = {}
    for number in range(switches):
        owners = [name for name in names for _ in range(rng.randint(0, most_ports))]
        rng.shuffle(owners)
        ports[OcsId(f"ocs{number}")] = dict(enumerate(owners, start=1))
    current = set()
    for switch, owner in ports.items():
        free = sorted(owner)
        rng.shuffle(free)
        while len(free) > 1 and rng.random() < up:
            current.add(port_pair(switch, free.pop(), free.pop()))
    pairs = [pair for pair in combinations(names, 2) if rng.random() < 0.6]
    return PlacingProblem(
        Cabling(ports),
        {pair: rng.randint(1, 3) for pair in pairs},
        frozenset(current),
        {switch: frozenset(port for port in owner if rng.random() < failed) for switch, owner in ports.items()},
    )


def check(problem: PlacingProblem, placed: PlacedCircuits) -> None:
    """Check all rules of a placement."""
    used = Counter((each.switch, port) for each in placed.cross_connects for port in each.ports)
    assert all(count == 1 for count in used.values())
    assert all(port not in problem.failed_ports.get(switch, ()) for switch, port in used)
    carried = Counter(problem.cabling.ends(each) for each in placed.cross_connects)
    assert None not in carried
    assert {pair: count - carried[pair] for pair, count in problem.circuits.items() if count != carried[pair]} == dict(
        placed.unplaced
    )
    assert carried.keys() <= problem.circuits.keys()
    assert all(count > 0 for count in placed.unplaced.values())
    assert set(placed.kept) == set(placed.cross_connects) & problem.current
    assert list(placed.cross_connects) == sorted(set(placed.cross_connects))
    assert len(placed.cross_connects) <= placed.bound_circuits
    if len(placed.cross_connects) == placed.bound_circuits:
        assert len(placed.kept) <= placed.bound_kept


def best_of_all(problem: PlacingProblem) -> tuple[int, int]:
    """Return the most circuits, and the most of these kept, by trying every set of cross-connects."""
    found = {(): 0}  # circuits placed per pair -> most that can be kept
    pairs = sorted(problem.circuits)
    found = {tuple(0 for _ in pairs): 0}
    for switch, owner in sorted(problem.cabling.ports.items()):
        here: dict[tuple[int, ...], int] = {}
        healthy = sorted(set(owner) - set(problem.failed_ports.get(switch, ())))
        for matching in _matchings(problem, switch, healthy):
            ends = Counter(problem.cabling.ends(each) for each in matching)
            counts = tuple(ends[pair] for pair in pairs)
            here[counts] = max(here.get(counts, 0), sum(each in problem.current for each in matching))
        together: dict[tuple[int, ...], int] = {}
        for before, kept in found.items():
            for counts, more in here.items():
                both = tuple(map(sum, zip(before, counts, strict=True)))
                if all(count <= problem.circuits[pair] for pair, count in zip(pairs, both, strict=True)):
                    together[both] = max(together.get(both, 0), kept + more)
        found = together
    return max((sum(counts), kept) for counts, kept in found.items())


def _matchings(problem: PlacingProblem, switch: OcsId, ports: list[int]) -> Iterator[list[PortPair]]:
    if not ports:
        yield []
        return
    first, *others = ports
    yield from _matchings(problem, switch, others)
    for other in others:
        each = port_pair(switch, first, other)
        if problem.cabling.ends(each) in problem.circuits:
            for rest in _matchings(problem, switch, [port for port in others if port != other]):
                yield [each, *rest]


def best_by_program(problem: PlacingProblem) -> tuple[int, int]:
    """Return the most circuits, and the most of these kept, by a program with one binary per pair of ports."""
    choices: list[tuple[PortPair, Pair]] = []
    for switch, owner in sorted(problem.cabling.ports.items()):
        healthy = sorted(set(owner) - set(problem.failed_ports.get(switch, ())))
        for one, other in combinations(healthy, 2):
            each = port_pair(switch, one, other)
            pair = problem.cabling.ends(each)
            if pair is not None and pair in problem.circuits:
                choices.append((each, pair))
    if not choices:
        return 0, 0
    uses: dict[object, list[int]] = {}
    for column, (each, pair) in enumerate(choices):
        for limit in (pair, *((each.switch, port) for port in each.ports)):
            uses.setdefault(limit, []).append(column)
    rows = np.zeros((len(uses), len(choices)))
    most = np.ones(len(uses))
    for row, (limit, columns) in enumerate(uses.items()):
        rows[row, columns] = 1
        most[row] = problem.circuits.get(limit, 1)  # type: ignore[call-overload]
    weights = np.array([len(problem.current) + 1 + (each in problem.current) for each, _ in choices])
    solved = milp(-weights, constraints=LinearConstraint(rows, ub=most), integrality=1, bounds=Bounds(0, 1))
    chosen = [each for (each, _), value in zip(choices, solved.x, strict=True) if value > 0.5]
    return len(chosen), sum(each in problem.current for each in chosen)
