"""What no plan can beat, and what sending everything straight from its holders takes at best. Pure.

Both are fluid: circuits and waves are not counted in wholes. The bound looks at what each part must carry whatever the
plan: receivers' NICs; into each pod and ToR every shard that is needed and not held there, once; out of the holders
every shard at least once, spread as well as can be (a linear program); circuits at both ends of every crossing.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.sync_tree.model import BITS, Floats, Ints, Shard, ShardPairs, SyncProblem, Unreachable

_SOLVERS_ROUNDING = 1 - 1e-6  # it may miss its limits by 1e-7: a bound must not


def lower_bound_s(problem: SyncProblem) -> float:
    """Raises Unreachable where no plan exists."""
    needed = [shard for shard in problem.shards if shard.receivers]
    bounds = [
        _received_s(problem, needed),
        _pods_s(problem, needed),
        _tors_s(problem, needed),
        _holders_s(problem, needed),
        _relayed_s(problem, needed),
        _pairs_s(problem, needed),
    ]
    return max(bounds)


def naive_s(problem: SyncProblem) -> float:
    """Every receiver straight from a holder, within the same limits, with the best spreading over holders; infinite
    where not all are joined directly."""
    needed = [shard for shard in problem.shards if shard.receivers]
    if not all(_are_joined(problem, shard) for shard in needed):
        return math.inf
    program = _Program(problem)
    fixed = _Fixed(problem)
    for shards in _by(needed, lambda shard: (shard.holders, shard.receivers)):
        gigabits = sum(shard.bytes for shard in shards) * BITS
        _naive_group(problem, program, fixed, shards[0], gigabits)
    return max(_received_s(problem, needed), fixed.seconds(), program.seconds(fixed))


def _received_s(problem: SyncProblem, shards: Iterable[Shard]) -> float:
    gigabits = np.zeros(len(problem.endpoints))
    for shard in shards:
        gigabits[list(shard.receivers)] += shard.bytes * BITS
    return float((gigabits / problem.nic_gbps).max(initial=0.0))


def _pods_s(problem: SyncProblem, shards: Iterable[Shard]) -> float:
    """A pod's circuits carry in what is needed and not held there, and out what is held there alone."""
    carried = np.zeros(len(problem.pods))
    crossing, useful = 0.0, set()
    for shard in shards:
        held, needed = _places(problem.pod, shard)
        useful |= held | needed
        gigabits = shard.bytes * BITS
        crossing += gigabits * len(needed - held)
        carried[list(needed - held)] += gigabits
        if len(held) == 1 and needed - held:
            carried[list(held)] += gigabits
    capacity = _boundary_gbps(problem)
    return max(_seconds(carried, capacity, problem.pods, "PoD"), _crossing_s(problem, crossing, sorted(useful)))


def _crossing_s(problem: SyncProblem, gigabits: float, useful: list[int]) -> float:
    """Each crossing takes a circuit's worth at both of its ends, in two pods, wherever relays are put."""
    if not gigabits:
        return 0.0
    if problem.pairs is not None:
        return 2 * gigabits / float(_boundary_gbps(problem)[useful].sum())
    ends = problem.boundary_circuits[useful]
    at_once = min(int(ends.sum()) // 2, int(ends.sum() - ends.max()))
    return gigabits / (at_once * problem.link_gbps) if at_once else 0.0  # where there is none: told of the pod


def _tors_s(problem: SyncProblem, shards: Iterable[Shard]) -> float:
    into, out = np.zeros(len(problem.tors)), np.zeros(len(problem.tors))
    for shard in shards:
        held, needed = _places(problem.tor, shard)
        into[list(needed - held)] += shard.bytes * BITS
        if len(held) == 1 and needed - held:
            out[list(held)] += shard.bytes * BITS
    both = (_seconds(load, problem.tor_gbps, problem.tors, "ToR") for load in (into, out))
    return max(both)


def _pairs_s(problem: SyncProblem, shards: Sequence[Shard]) -> float:
    """What pods' own circuits carry in and out, and all of them together; and whether they lead everywhere."""
    pairs = problem.pairs
    if pairs is None:
        return 0.0
    into, out = np.zeros(len(problem.pods)), np.zeros(len(problem.pods))
    crossing, useful = 0.0, set()
    for shard in shards:
        held, needed = _places(problem.pod, shard)
        _reach(problem, pairs, held, needed)
        useful |= held | needed
        into[list(needed - held)] += shard.bytes * BITS
        crossing += shard.bytes * BITS * len(needed - held)
        if len(held) == 1 and needed - held:
            out[list(held)] += shard.bytes * BITS
    among = sorted(useful)
    capacity = _between_gbps(pairs)[np.ix_(among, among)]
    names = tuple(problem.pods[pod] for pod in among)
    each_s = (_seconds(load[among], capacity.sum(axis=0), names, "PoD") for load in (into, out))
    return max(
        *each_s, crossing / float(capacity.sum()) if crossing else 0.0, _cuts_s(problem, shards, capacity, among)
    )


def _cuts_s(problem: SyncProblem, shards: Sequence[Shard], capacity: Floats, among: list[int]) -> float:
    """Into each set of pods that are joined faster among themselves than with others, as sites are, what is needed and
    not held there has to come once. `capacity`: [of those, of those], pods that have to do with any shard."""
    from scipy.sparse.csgraph import connected_components

    bytes_of: defaultdict[tuple[frozenset[int], frozenset[int]], int] = defaultdict(int)
    for shard in shards:
        held, needed = _places(problem.pod, shard)
        bytes_of[frozenset(held), frozenset(needed)] += shard.bytes
    longest_s = 0.0
    seen: set[frozenset[int]] = set()
    for slower in np.unique(capacity).tolist():
        _, site_of = connected_components(capacity > slower, directed=False)
        for site in range(site_of.max(initial=-1) + 1):
            inside = site_of == site
            pods = frozenset(among[place] for place in np.flatnonzero(inside))
            if pods in seen:
                continue
            seen.add(pods)
            entering = sum(size for (held, needed), size in bytes_of.items() if needed & pods and not held & pods)
            if entering:
                longest_s = max(longest_s, entering * BITS / float(capacity[np.ix_(~inside, inside)].sum()))
    return longest_s


def _reach(problem: SyncProblem, pairs: ShardPairs, held: set[int], needed: set[int]) -> None:
    """Raises Unreachable where something is needed that pods on the way do not need, nor have."""
    reached, queue = set(held), sorted(held)
    while queue:
        near = set(np.flatnonzero(pairs.circuits[queue.pop()]).tolist()) & needed - reached
        reached |= near
        queue += sorted(near)
    for pod in sorted(needed - reached):
        raise Unreachable(f"no circuits lead into PoD {problem.pods[pod]} from where shards are that it needs")


def _are_joined(problem: SyncProblem, shard: Shard) -> bool:
    """Whether each receiver can be sent to by some holder."""
    if problem.pairs is None:
        return True
    held, needed = _places(problem.pod, shard)
    circuits = problem.pairs.circuits
    return all(pod in held or circuits[sorted(held), pod].any() for pod in needed)


def _between_gbps(pairs: ShardPairs) -> Floats:
    """In each direction."""
    return np.asarray(pairs.circuits * pairs.gbps, dtype=np.float64)


def _holders_s(problem: SyncProblem, shards: Iterable[Shard]) -> float:
    """Each shard leaves its holders at least once: by their NICs, and by their ToRs and pods where nobody inside needs
    it."""
    program = _Program(problem)
    for group in _by(shards, lambda shard: (shard.holders, *_away(problem, shard))):
        gigabits = sum(shard.bytes for shard in group) * BITS
        needed_pods, needed_tors = _away(problem, group[0])
        shares = []
        for holder in group[0].holders:
            limits = [("out", holder)]
            if problem.tor[holder] not in needed_tors:
                limits.append(("tor_out", int(problem.tor[holder])))
            if problem.pod[holder] not in needed_pods:
                limits.append(("pod", int(problem.pod[holder])))
                if problem.pairs is not None:
                    limits.append(("pod_out", int(problem.pod[holder])))
            shares.append(limits)
        program.spread(gigabits, shares)
    return program.seconds() * _SOLVERS_ROUNDING


def _relayed_s(problem: SyncProblem, shards: Iterable[Shard]) -> float:
    """Every delivery is sent by somebody who holds or receives something."""
    total, senders = 0.0, set()
    for shard in shards:
        total += shard.bytes * BITS * len(shard.receivers)
        senders |= {*shard.holders, *shard.receivers}
    return total / float(problem.nic_gbps[sorted(senders)].sum()) if total else 0.0


def _naive_group(problem: SyncProblem, program: "_Program", fixed: "_Fixed", shard: Shard, gigabits: float) -> None:
    """Where no holder is in the receiver's pod, the way in is the same from every holder, unless pods are joined in
    pairs."""
    held_pods = {int(problem.pod[holder]) for holder in shard.holders}
    remote = 0
    for receiver in shard.receivers:
        pod, tor = int(problem.pod[receiver]), int(problem.tor[receiver])
        if pod in held_pods or problem.pairs is not None:
            program.spread(gigabits, [_naive_way(problem, holder, receiver) for holder in shard.holders])
        else:
            remote += 1
            fixed.pod[pod] += gigabits
            fixed.tor_in[tor] += gigabits
    if remote:
        ways = [
            [("out", holder), ("tor_out", int(problem.tor[holder])), ("pod", int(problem.pod[holder]))]
            for holder in shard.holders
        ]
        program.spread(gigabits * remote, ways)


def _naive_way(problem: SyncProblem, holder: int, receiver: int) -> list[tuple[str, int]]:
    limits = [("out", holder)]
    if problem.tor[holder] != problem.tor[receiver]:
        limits += [("tor_out", int(problem.tor[holder])), ("tor_in", int(problem.tor[receiver]))]
    if problem.pod[holder] != problem.pod[receiver]:
        limits += [("pod", int(problem.pod[holder])), ("pod", int(problem.pod[receiver]))]
        if problem.pairs is not None:
            limits.append(("pair", int(problem.pod[holder] * len(problem.pods) + problem.pod[receiver])))
    return limits


@dataclass
class _Fixed:
    """Loads that are the same however things are spread, gigabits."""

    problem: SyncProblem

    def __post_init__(self) -> None:
        self.pod = np.zeros(len(self.problem.pods))
        self.tor_in = np.zeros(len(self.problem.tors))

    def seconds(self) -> float:
        problem = self.problem
        capacity = _boundary_gbps(problem)
        return max(
            _seconds(self.pod, capacity, problem.pods, "PoD"),
            _seconds(self.tor_in, problem.tor_gbps, problem.tors, "ToR"),
        )


class _Program:
    """The least time in which amounts can be spread over alternatives, each of which loads some limits."""

    def __init__(self, problem: SyncProblem) -> None:
        self._problem = problem
        self._amounts: defaultdict[tuple[tuple[tuple[str, int], ...], ...], float] = defaultdict(float)

    def spread(self, gigabits: float, ways: list[list[tuple[str, int]]]) -> None:
        """Alternatives without capacity are no alternatives."""
        open_ways = {tuple(way) for way in ways if all(self._capacity(limit) > 0 for limit in way)}
        if not open_ways:
            raise Unreachable("a shard cannot leave its holders: they have no circuits")
        self._amounts[tuple(sorted(open_ways))] += gigabits

    def seconds(self, fixed: _Fixed | None = None) -> float:
        alone: defaultdict[tuple[str, int], float] = defaultdict(float)  # what has one way only needs no program
        for ways, gigabits in self._amounts.items():
            if len(ways) == 1:
                for limit in ways[0]:
                    alone[limit] += gigabits
        if fixed is not None:
            for pod, gigabits in enumerate(fixed.pod):
                alone["pod", pod] += float(gigabits)
            for tor, gigabits in enumerate(fixed.tor_in):
                alone["tor_in", tor] += float(gigabits)
        floor_s = max((load / self._capacity(limit) for limit, load in alone.items() if load), default=0.0)
        several = {ways: gigabits for ways, gigabits in self._amounts.items() if len(ways) > 1}
        return max(floor_s, self._solve(several, alone)) if several else floor_s

    def _solve(
        self, several: dict[tuple[tuple[tuple[str, int], ...], ...], float], alone: dict[tuple[str, int], float]
    ) -> float:
        limits = sorted({limit for ways in several for way in ways for limit in way})
        row_of = {limit: row for row, limit in enumerate(limits)}
        rows, columns, values, sums = [], [], [], []
        column = 1  # 0 is the time
        for number, (ways, gigabits) in enumerate(several.items()):
            for way in ways:
                sums.append((number, column))
                for limit in way:
                    rows.append(row_of[limit])
                    columns.append(column)
                    values.append(gigabits / self._capacity(limit))
                column += 1
        right = [-alone.get(limit, 0.0) / self._capacity(limit) for limit in limits]
        unit_s = max(*values, -min(right))  # the solver's tolerances are absolute
        values = [value / unit_s for value in values]
        rows += range(len(limits))
        columns += [0] * len(limits)
        values += [-1.0] * len(limits)
        above = _sparse(rows, columns, values, (len(limits), column))
        whole = _sparse(
            [row for row, _ in sums], [place for _, place in sums], [1.0] * len(sums), (len(several), column)
        )
        from scipy.optimize import linprog  # takes longer to load than a daemon to start

        costs = np.zeros(column)
        costs[0] = 1.0
        at_most = np.array(right) / unit_s
        solved = linprog(costs, A_ub=above, b_ub=at_most, A_eq=whole, b_eq=np.ones(len(several)), method="highs")
        if not solved.success or solved.x is None:
            raise ArithmeticError(f"the bound's linear program failed: {solved.message}")
        return float(solved.x[0]) * unit_s

    def _capacity(self, limit: tuple[str, int]) -> float:
        kind, number = limit
        problem = self._problem
        if kind == "out":
            return float(problem.nic_gbps[number])
        if kind == "pod":
            return float(_boundary_gbps(problem)[number])
        if kind in {"pair", "pod_out"} and problem.pairs is not None:
            between = _between_gbps(problem.pairs)
            return float(between.flat[number] if kind == "pair" else between[number].sum())
        return float(problem.tor_gbps[number])


def _seconds(gigabits: Floats, capacity_gbps: Floats, names: tuple[str, ...], kind: str) -> float:
    used = np.flatnonzero(gigabits)
    for number in used[capacity_gbps[used] <= 0]:
        raise Unreachable(f"{kind} {names[number]} has no circuits, and shards have to pass it")
    return float((gigabits[used] / capacity_gbps[used]).max(initial=0.0))


def _boundary_gbps(problem: SyncProblem) -> Floats:
    link_gbps: float | Floats = problem.link_gbps
    if problem.pairs is not None:  # with the fastest that they have
        link_gbps = np.where(problem.pairs.circuits > 0, problem.pairs.gbps, 0.0).max(axis=0, initial=0.0)
    return np.asarray(problem.boundary_circuits * link_gbps, dtype=np.float64)


def _places(of: Ints, shard: Shard) -> tuple[set[int], set[int]]:
    """Where it is held and where it is needed, in pods or ToRs."""
    return set(of[list(shard.holders)].tolist()), set(of[list(shard.receivers)].tolist())


def _away(problem: SyncProblem, shard: Shard) -> tuple[frozenset[int], frozenset[int]]:
    """Pods and ToRs in which somebody needs it."""
    receivers = list(shard.receivers)
    return frozenset(problem.pod[receivers].tolist()), frozenset(problem.tor[receivers].tolist())


def _sparse(rows: list[int], columns: list[int], values: list[float], shape: tuple[int, int]) -> Any:
    from scipy.sparse import coo_array

    places = (np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64))
    return coo_array((np.array(values, dtype=np.float64), places), shape=shape).tocsr()


def _by(shards: Iterable[Shard], key: Callable[[Shard], Hashable]) -> Iterator[list[Shard]]:
    """Shards with the same key together."""
    groups: dict[Hashable, list[Shard]] = {}
    for shard in shards:
        groups.setdefault(key(shard), []).append(shard)
    return iter(groups.values())
