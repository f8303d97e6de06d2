"""Choose the switch and ports of each circuit. Place as many circuits as possible, with as few changes of
cross-connects as possible.

Both ends of a circuit are on one switch. Independent parts (`_parts`) are placed separately, by chains of moves
(place_chains.py). If the chains do not reach a provable optimum, a small part is solved by integer programs
(`_settle`), and a large part is improved by ruin and recreate (Schrimpf et al., Record Breaking Optimization Results
Using the Ruin and Recreate Principle, 2000). Each step inserts, by force, some circuits that are missing or that are up
now but not kept. Circuits in their way are removed and placed again by chains of moves. The new layout is kept if it is
no worse than the previous one.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from planner.fabric.model import Cabling, EndpointId, OcsId, Pair, PortPair, port_pair, shared_ports
from planner.fabric.place_chains import CircuitChains, CircuitLayout, Counting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHAIN_WORK = 300  # inspected circuits per circuit and switch
WORK = 600_000  # inspected circuits, for parts too large to be solved as a whole; about a second
WHOLE = 2_000  # (pair, switch) combinations up to which a part is solved as a whole
SEED = 1
WHOLE_NODES = 300  # of the search for each of the two goals
MOST_FORCED = 8  # circuits inserted at once


@dataclass(frozen=True, slots=True)
class PlacingProblem:
    """The wanted circuits, the cabling, and the current cross-connects. A current cross-connect is always removed if
    one of its ports has failed or its pair is not wanted."""

    cabling: Cabling
    circuits: Mapping[Pair, int]
    current: frozenset[PortPair] = frozenset()
    failed_ports: Mapping[OcsId, frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (one, other), count in self.circuits.items():
            if one >= other:
                raise ValueError(f"a pair must be two endpoints with the smaller id first, got {one!r} and {other!r}")
            if count < 1:
                raise ValueError(f"circuits between {one} and {other} must be >= 1, got {count}")
        for cross_connect in self.current:
            for switch, port in cross_connect.sides:
                if self.cabling.endpoint(switch, port) is None:
                    raise ValueError(
                        f"current: {cross_connect} must use only ports with a fibre, got port {port} of {switch}"
                    )
        if twice := [f"port {port} of {switch}" for switch, port in shared_ports(self.current)]:
            raise ValueError(f"current must use each port at most once, got several uses of {', '.join(twice)}")

    def healthy(self, switch: OcsId, port: int) -> bool:
        return port not in self.failed_ports.get(switch, ())


@dataclass(frozen=True, slots=True)
class PlacedCircuits:
    """The cross-connects of a placement, sorted. No placement has more than `bound_circuits` circuits. No placement
    with as many circuits as this one keeps more than `bound_kept` current cross-connects. A placement that meets both
    bounds is optimal."""

    cross_connects: tuple[PortPair, ...]
    kept: tuple[PortPair, ...]  # cross-connects that are up already
    unplaced: Mapping[Pair, int]
    bound_circuits: int
    bound_kept: int

    @property
    def proven(self) -> bool:
        return (len(self.cross_connects), len(self.kept)) == (self.bound_circuits, self.bound_kept)


def place(problem: PlacingProblem, work: int = WORK) -> PlacedCircuits:
    """Place as many circuits as possible and, secondly, change as few cross-connects as possible. For parts that are
    too large to be solved exactly, `work` limits the search: it is the number of circuits that may be inspected."""
    ports = _healthy_ports(problem)
    up = _worth_keeping(problem)
    parts = list(_parts(problem, ports, up))
    everything = sum(part.counting.most_placed() for part in parts) or 1
    added: list[PortPair] = []
    kept: list[PortPair] = []
    unplaced = dict(problem.circuits)
    bound_circuits = bound_kept = 0
    for part in parts:
        layout, most_placed, most_kept = _lay_out(part.counting, work * part.counting.most_placed() // everything)
        bound_circuits += most_placed
        bound_kept += most_kept
        new: list[tuple[Pair, OcsId, int]] = []
        for pair, row in zip(part.pairs, layout.placed, strict=True):
            unplaced[pair] -= sum(row)
            for switch, count in zip(part.switches, row, strict=True):
                stays = up.get((pair, switch), [])[:count]
                kept += stays
                new.append((pair, switch, count - len(stays)))
                for port in (port for each in stays for port in each.ports):
                    ports[problem.cabling.ports[switch][port], switch].remove(port)
        for (one, other), switch, count in new:
            for _ in range(count):
                added.append(port_pair(switch, ports[one, switch].pop(0), ports[other, switch].pop(0)))
    return PlacedCircuits(
        tuple(sorted(added + kept)),
        tuple(sorted(kept)),
        {pair: count for pair, count in sorted(unplaced.items()) if count},
        bound_circuits,
        bound_kept,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Pairs that share no endpoint with the pairs of other parts, and the switches on which these pairs can have
    circuits."""

    pairs: tuple[Pair, ...]
    switches: tuple[OcsId, ...]
    counting: Counting


def _lay_out(counting: Counting, work: int) -> tuple[CircuitLayout, int, int]:
    most_placed, most_kept = counting.most_placed(), counting.most_kept()
    layout = _chained(counting, gently=True)
    if layout.total < most_placed:
        layout = max(layout, _chained(counting, gently=False), key=lambda each: (each.total, each.kept))
    if (layout.total, layout.kept) == (most_placed, most_kept):
        return layout, most_placed, most_kept
    if not small(counting):
        _ruin_and_recreate(layout, most_placed, most_kept, work)
        return layout, most_placed, most_kept
    return layout, *_settle(layout, most_placed, most_kept)


def small(counting: Counting) -> bool:
    """Return whether the part that `counting` describes is small enough to be solved by an integer program."""
    return len(counting.ends) * counting.switches <= WHOLE


def _chained(counting: Counting, gently: bool) -> CircuitLayout:
    layout = CircuitLayout(counting)
    chains = CircuitChains(layout, CHAIN_WORK * counting.switches * counting.most_placed())
    chains.keep()
    chains.fill(gently)
    return layout


def _healthy_ports(problem: PlacingProblem) -> dict[tuple[EndpointId, OcsId], list[int]]:
    ports: dict[tuple[EndpointId, OcsId], list[int]] = defaultdict(list)
    for switch, owners in problem.cabling.ports.items():
        for port, endpoint in sorted(owners.items()):
            if problem.healthy(switch, port):
                ports[endpoint, switch].append(port)
    return ports


def _worth_keeping(problem: PlacingProblem) -> dict[tuple[Pair, OcsId], list[PortPair]]:
    """Return, by pair and switch, the current cross-connects of wanted pairs on healthy ports."""
    up: dict[tuple[Pair, OcsId], list[PortPair]] = defaultdict(list)
    for cross_connect in sorted(problem.current):
        pair, switch = problem.cabling.ends(cross_connect), cross_connect.switch
        if pair is None or pair not in problem.circuits:
            continue
        if all(problem.healthy(switch, port) for port in cross_connect.ports):
            up[pair, switch].append(cross_connect)
    return up


def _parts(
    problem: PlacingProblem,
    ports: Mapping[tuple[EndpointId, OcsId], list[int]],
    up: Mapping[tuple[Pair, OcsId], list[PortPair]],
) -> Iterator[_Part]:
    """Yield the independent parts of the problem in the order of their first pairs. Pairs whose endpoints share no
    switch are in no part."""
    reach: dict[EndpointId, set[OcsId]] = defaultdict(set)
    for (endpoint, switch), healthy in ports.items():
        if healthy:
            reach[endpoint].add(switch)
    pairs = [pair for pair in sorted(problem.circuits) if reach[pair[0]] & reach[pair[1]]]
    root: dict[EndpointId, EndpointId] = {}

    def find(endpoint: EndpointId) -> EndpointId:
        while (above := root.setdefault(endpoint, endpoint)) != endpoint:
            root[endpoint] = root[above]
            endpoint = above
        return endpoint

    for one, other in pairs:
        root[find(other)] = find(one)
    parts: dict[EndpointId, list[Pair]] = defaultdict(list)
    for pair in pairs:
        parts[find(pair[0])].append(pair)
    for members in parts.values():
        endpoints = sorted({endpoint for pair in members for endpoint in pair})
        switches = sorted(set[OcsId]().union(*(reach[one] & reach[other] for one, other in members)))
        number = {endpoint: place for place, endpoint in enumerate(endpoints)}
        yield _Part(
            tuple(members),
            tuple(switches),
            Counting(
                ends=tuple((number[one], number[other]) for one, other in members),
                wanted=tuple(problem.circuits[pair] for pair in members),
                ports=tuple(
                    tuple(len(ports.get((endpoint, switch), ())) for switch in switches) for endpoint in endpoints
                ),
                up=tuple(tuple(len(up.get((pair, switch), ())) for switch in switches) for pair in members),
            ),
        )


def _ruin_and_recreate(layout: CircuitLayout, most_placed: int, most_kept: int, work: int) -> None:
    """Improve the layout by ruin and recreate, until it has `most_placed` placed and `most_kept` kept circuits, `work`
    is spent, or no circuit is left to insert."""
    rng = random.Random(SEED)
    chains = CircuitChains(layout, work)
    while chains.work_left > 0 and (layout.total, layout.kept) < (most_placed, most_kept):
        missing = _missing(layout) if layout.total < most_placed else []
        wanting = missing or _improvable(layout)
        if not wanting:
            return
        before = (layout.total, layout.kept)
        layout.moves = []
        for pair, switch in rng.sample(wanting, min(rng.randint(1, MOST_FORCED), len(wanting))):
            _force(layout, pair, switch, rng)
        chains.work_left -= len(layout.counting.ends)  # for finding dropped circuits
        chains.refill(sorted({pair for pair, _, _ in layout.moves}))
        if (layout.total, layout.kept) < before:
            layout.go_back()


def _missing(layout: CircuitLayout) -> list[tuple[int, int]]:
    """Return (pair, switch) for each pair that lacks circuits and each switch on which both of its ends have more
    healthy ports than the pair has circuits there."""
    counting = layout.counting
    return [
        (pair, switch)
        for pair, missing in enumerate(layout.missing)
        if missing
        for switch, some in enumerate(map(min, *(counting.ports[end] for end in counting.ends[pair])))
        if some > layout.placed[pair][switch]
    ]


def _improvable(layout: CircuitLayout) -> list[tuple[int, int]]:
    """Return (pair, switch) for each pair that could keep more of its current circuits and each switch on which it
    could keep one more."""
    counting = layout.counting
    return [
        (pair, home)
        for pair, (row, up) in enumerate(zip(layout.placed, counting.up, strict=True))
        if any(up) and sum(map(min, row, up)) < counting.wanted[pair]
        for home, there in enumerate(up)
        if there > row[home]
    ]


def _force(layout: CircuitLayout, pair: int, home: int, rng: random.Random) -> None:
    """Put a circuit of the pair on switch `home`, and remove other circuits whose ports are needed. If the pair lacks
    no circuit, take the circuit from another switch where the pair has more circuits than can be kept. If there is no
    such switch, do nothing."""
    up = layout.counting.up
    away = [switch for switch, count in enumerate(layout.placed[pair]) if switch != home and count > up[pair][switch]]
    if not layout.missing[pair]:
        if not away:
            return
        layout.take(pair, rng.choice(away))
    for endpoint in layout.counting.ends[pair]:
        if layout.free[endpoint][home] < 1:
            others = list(layout.there[endpoint][home])
            loose = [other for other in others if layout.placed[other][home] > up[other][home]]
            layout.take(rng.choice(loose or others), home)
    layout.add(pair, home)


def _settle(layout: CircuitLayout, most_placed: int, most_kept: int) -> tuple[int, int]:
    """Improve the layout by integer programs: first place as many circuits as possible, then keep as many current
    circuits as possible. Return upper bounds on both numbers.

    If every endpoint has one port on each switch, choosing the switch of each circuit is edge colouring, for which no
    fast exact method is known. The search is limited by nodes, not by time, so its result is the same on every machine.
    """
    # Imported here, since most problems do not need it and loading takes longer than solving.
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    counting = layout.counting
    ends, ports, wanted = np.array(counting.ends), np.array(counting.ports), np.array(counting.wanted)
    room = np.minimum(ports[ends].min(axis=1), wanted[:, None])  # [pair, switch]
    pair, switch = np.nonzero(room)
    count, places = len(pair), np.arange(len(pair))
    # Variables: circuits placed per (pair, switch), then circuits kept of them.
    sizes = np.concatenate([room[pair, switch], np.minimum(room, counting.up)[pair, switch]])
    at_ends = [len(wanted) + ends[pair, side] * counting.switches + switch for side in (0, 1)]
    rows = np.concatenate([pair, *at_ends, *[len(wanted) + ports.size + places] * 2])
    columns = np.concatenate([places, places, places, places, count + places])
    signs = np.repeat([1, 1, 1, -1, 1], count)
    used = csr_array((signs, (rows, columns)), shape=(len(wanted) + ports.size + count, 2 * count))
    limits = np.concatenate([wanted, ports.ravel(), np.zeros(count)])
    placed, kept = np.repeat([[1, 0], [0, 1]], count, axis=1)

    def solve(goal: "NDArray[np.int64]") -> int | None:
        """Maximise the goal, and apply the solution to the layout unless the layout becomes worse. Return an upper
        bound on the goal, or None if no solution is found."""
        least = LinearConstraint(placed[None, :], lb=layout.total)
        found = milp(
            -goal,
            integrality=np.ones(2 * count, dtype=np.int64),
            bounds=Bounds(0, sizes),
            constraints=[LinearConstraint(used, ub=limits), least],
            options={"node_limit": WHOLE_NODES},
        )
        if found.x is None:
            return None
        before = (layout.total, layout.kept)
        layout.moves = []
        counts = list(zip(pair.tolist(), switch.tolist(), np.rint(found.x[:count]).astype(int).tolist(), strict=True))
        for change in (layout.take, layout.add):
            for number, at, target in counts:
                more = target - layout.placed[number][at]
                for _ in range(more if change == layout.add else -more):
                    change(number, at)
        if (layout.total, layout.kept) < before:
            layout.go_back()
        return int(-found.mip_dual_bound + 1e-6)

    if layout.total < most_placed and (bound := solve(placed)) is not None:
        most_placed = min(most_placed, bound)
    if layout.kept < most_kept and (bound := solve(kept)) is not None:
        most_kept = min(most_kept, bound)
    return most_placed, most_kept
