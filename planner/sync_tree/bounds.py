"""Compute a lower bound on the duration of any plan of a weight sync, and the shortest duration of sending directly
from holders. Has no side effects.

Both assume that circuits and waves may be fractional. The bound is the longest time that any part of the network takes
for the bytes that it must carry in any plan. Each receiver's NIC carries the shards that the receiver needs. Each pod
and ToR receives at least one copy of every shard that is needed and not held in it. The holders send every shard at
least once. A linear program distributes this sending over them optimally. Every crossing between pods uses circuits at
both ends.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from planner.sync_tree.model import BITS, Floats, Ints, ShardPairs, SyncProblem, Unreachable

_SOLVERS_ROUNDING = 1 - 1e-6  # the solver may miss its limits by 1e-7, but a bound must not

Ends = tuple[int, ...]
Limit = tuple[str, int]  # the kind of resource with a rate, and its number
Way = tuple[Limit, ...]
PodsOf = tuple[set[int], set[int], float]  # pods that hold, pods that need, and gigabits


def lower_bound_s(problem: SyncProblem) -> float:
    """Return a lower bound, in seconds, on the duration of any plan. Raises Unreachable if no plan exists."""
    program = _Program(problem)
    needed = _needed(problem)
    pods_of: list[PodsOf] = []
    for (holders, receivers), gigabits in needed.items():
        pods_held, pods_needed = _places(problem.pod, holders), _places(problem.pod, receivers)
        tors_held, tors_needed = _places(problem.tor, holders), _places(problem.tor, receivers)
        for receiver in receivers:
            program.load(gigabits, ("in", receiver))
        for pod in pods_needed - pods_held:
            program.load(gigabits, ("pod", pod), ("pod_in", pod))
        for tor in tors_needed - tors_held:
            program.load(gigabits, ("tor_in", tor))
        # If one pod or ToR alone holds a shard, the shard leaves it when another needs it. If several hold it, it
        # leaves one of them, unless it is needed there.
        if len(pods_held) == 1 and pods_needed - pods_held:
            program.load(gigabits, *(limit for pod in pods_held for limit in (("pod", pod), ("pod_out", pod))))
        if len(tors_held) == 1 and tors_needed - tors_held:
            program.load(gigabits, *(("tor_out", tor) for tor in tors_held))
        ways: list[list[Limit]] = []
        for holder in holders:
            ways.append([("out", holder)])
            if len(tors_held) > 1 and (tor := int(problem.tor[holder])) not in tors_needed:
                ways[-1].append(("tor_out", tor))
            if len(pods_held) > 1 and (pod := int(problem.pod[holder])) not in pods_needed:
                ways[-1] += [("pod", pod), ("pod_out", pod)]
        program.spread(gigabits, ways)
        pods_of.append((pods_held, pods_needed, gigabits))
    spread_s = program.seconds()  # before the others, as it raises Unreachable
    return max(spread_s, _relayed_s(problem, needed), _crossing_s(problem, pods_of))


def naive_s(problem: SyncProblem) -> float:
    """Return the duration in seconds if holders send to every receiver directly, within the limits of the network and
    with the best distribution over holders. The result is infinite if a receiver has no direct connection to any
    holder."""
    program = _Program(problem)
    for (holders, receivers), gigabits in _needed(problem).items():
        held = sorted(_places(problem.pod, holders))
        remote: Counter[tuple[int, int]] = Counter()  # [pod, ToR], receivers with the same path from all holders
        for receiver in receivers:
            program.load(gigabits, ("in", receiver))
            pod, tor = int(problem.pod[receiver]), int(problem.tor[receiver])
            if problem.pairs is None and pod not in held:
                remote[pod, tor] += 1
                continue
            if problem.pairs is not None and pod not in held and not problem.pairs.circuits[held, pod].any():
                return math.inf
            program.spread(gigabits, [_naive_way(problem, holder, receiver) for holder in holders])
        for (pod, tor), count in remote.items():
            program.load(gigabits * count, ("pod", pod), ("tor_in", tor))
        if remote:
            ways = [
                [("out", holder), ("tor_out", int(problem.tor[holder])), ("pod", int(problem.pod[holder]))]
                for holder in holders
            ]
            program.spread(gigabits * remote.total(), ways)
    return program.seconds(rounding=1.0)


def _naive_way(problem: SyncProblem, holder: int, receiver: int) -> list[Limit]:
    limits = [("out", holder)]
    if problem.tor[holder] != problem.tor[receiver]:
        limits += [("tor_out", int(problem.tor[holder])), ("tor_in", int(problem.tor[receiver]))]
    if problem.pod[holder] != problem.pod[receiver]:
        limits += [("pod", int(problem.pod[holder])), ("pod", int(problem.pod[receiver]))]
        limits.append(("pair", int(problem.pod[holder] * len(problem.pods) + problem.pod[receiver])))
    return limits


def _needed(problem: SyncProblem) -> Mapping[tuple[Ends, Ends], float]:
    """Return the total gigabits of all shards with the same holders and receivers, by (holders, receivers)."""
    found: defaultdict[tuple[Ends, Ends], float] = defaultdict(float)
    for shard in problem.shards:
        if shard.receivers:
            found[shard.holders, shard.receivers] += shard.bytes * BITS
    return found


def _places(of: Ints, ends: Ends) -> set[int]:
    """Return the pods or ToRs of the endpoints; `of` has the pod or ToR of every endpoint."""
    return set(of[list(ends)].tolist())


def _relayed_s(problem: SyncProblem, needed: Mapping[tuple[Ends, Ends], float]) -> float:
    """Return the time in seconds to send all deliveries over the NICs of all possible senders together. Every endpoint
    that holds or receives a shard is a possible sender."""
    total = sum(gigabits * len(receivers) for (_, receivers), gigabits in needed.items())
    senders = {end for ends in needed for end in (*ends[0], *ends[1])}
    return total / float(problem.nic_gbps[sorted(senders)].sum()) if total else 0.0


def _crossing_s(problem: SyncProblem, pods_of: Sequence[PodsOf]) -> float:
    """Return the minimum time in seconds for all crossings between pods. With any choice of relays, each crossing uses
    the capacity of a circuit in both of its pods."""
    crossing = sum(gigabits * len(needing - held) for held, needing, gigabits in pods_of)
    if not crossing:
        return 0.0
    useful = sorted(set[int]().union(*(held | needing for held, needing, _ in pods_of)))
    if (pairs := problem.pairs) is not None:
        for held, needing, _ in pods_of:
            _reach(problem, pairs, held, needing)
        between = (pairs.circuits * pairs.gbps)[np.ix_(useful, useful)]
        at_boundaries_s = 2 * crossing / float(_boundary_gbps(problem)[useful].sum())
        return max(at_boundaries_s, crossing / float(between.sum()), _cuts_s(pods_of, between, useful))
    ends = problem.boundary_circuits[useful]
    at_once = min(int(ends.sum()) // 2, int(ends.sum() - ends.max()))
    # without circuits, an error is raised for the pod
    return crossing / (at_once * problem.link_gbps) if at_once else 0.0


def _cuts_s(pods_of: Sequence[PodsOf], capacity: Floats, among: Sequence[int]) -> float:
    """Return the longest time in seconds that shards take to enter a set of pods, such as a site. The links inside a
    set are faster than its links to other pods. A shard that is needed but not held in a set enters it at least once.
    `among` lists the pods that hold or need shards; `capacity` is in Gbps, indexed by two positions in `among`."""
    from scipy.sparse.csgraph import connected_components

    longest_s = 0.0
    seen: set[frozenset[int]] = set()
    for slower in np.unique(capacity).tolist():
        _, site_of = connected_components(capacity > slower, directed=False)
        for site in range(site_of.max(initial=-1) + 1):
            inside = site_of == site
            pods = frozenset(among[place] for place in np.flatnonzero(inside).tolist())
            if pods in seen:
                continue
            seen.add(pods)
            entering = sum(each for held, to, each in pods_of if to & pods and not held & pods)
            if entering:
                longest_s = max(longest_s, entering / float(capacity[np.ix_(~inside, inside)].sum()))
    return longest_s


def _reach(problem: SyncProblem, pairs: ShardPairs, held: set[int], needed: set[int]) -> None:
    """Raise Unreachable if no path leads from the pods that hold a shard to a pod that needs it, through pods that hold
    or need it."""
    reached, queue = set(held), sorted(held)
    while queue:
        near = set(np.flatnonzero(pairs.circuits[queue.pop()]).tolist()) & needed - reached
        reached |= near
        queue += sorted(near)
    for pod in sorted(needed - reached):
        raise Unreachable(f"no circuits lead into PoD {problem.pods[pod]} from the holders of shards that it needs")


def _boundary_gbps(problem: SyncProblem) -> Floats:
    return np.asarray(problem.boundary_circuits * problem.fastest_gbps, dtype=np.float64)


class _Program:
    """A linear program for the shortest time in which given amounts of data pass through a network. A limit is a
    resource of the network with a limited rate, such as a NIC. `load` adds an amount that passes through all given
    limits. `spread` adds an amount that is divided among alternatives, each of which passes through several limits. The
    limits `pod_in`, `pod_out` and `pair` exist only if the problem has fixed connections between pods."""

    def __init__(self, problem: SyncProblem) -> None:
        self._problem = problem
        self._gbps = {"in": problem.nic_gbps, "out": problem.nic_gbps, "pod": _boundary_gbps(problem)}
        self._gbps |= {"tor_in": problem.tor_gbps, "tor_out": problem.tor_gbps}
        if problem.pairs is not None:
            between = problem.pairs.circuits * problem.pairs.gbps
            self._gbps |= {"pod_in": between.sum(axis=0), "pod_out": between.sum(axis=1), "pair": between.ravel()}
        self._alone: defaultdict[Limit, float] = defaultdict(float)
        self._spread: defaultdict[tuple[Way, ...], float] = defaultdict(float)

    def load(self, gigabits: float, *limits: Limit) -> None:
        for limit in limits:
            self._alone[limit] += gigabits

    def spread(self, gigabits: float, ways: Iterable[Iterable[Limit]]) -> None:
        """Spread an amount over alternatives, each of which is a list of limits. Alternatives that contain a limit
        without capacity are dropped."""
        open_ways = {tuple(way) for way in ways if all(self._capacity(limit) > 0 for limit in way)}
        if len(open_ways) == 1:  # a single alternative needs no program
            self.load(gigabits, *open_ways.pop())
        else:
            self._spread[tuple(sorted(open_ways))] += gigabits

    def seconds(self, rounding: float = _SOLVERS_ROUNDING) -> float:
        """Return the shortest time in seconds. Raises Unreachable if a used limit has no capacity, or if all
        alternatives of an amount were dropped. `rounding` is a factor on the solver's result."""
        for limit in sorted(self._alone):
            if self._capacity(limit) <= 0:
                is_tor = limit[0].startswith("tor")
                name = f"ToR {self._problem.tors[limit[1]]}" if is_tor else f"PoD {self._problem.pods[limit[1]]}"
                raise Unreachable(f"{name} has no circuits, but shards must pass through it")
        if () in self._spread:
            raise Unreachable("a shard cannot leave its holders, because they have no circuits")
        floor_s = max((load / self._capacity(limit) for limit, load in self._alone.items()), default=0.0)
        return max(floor_s, self._solve() * rounding) if self._spread else floor_s

    def _solve(self) -> float:
        limits = sorted({limit for ways in self._spread for way in ways for limit in way})
        row_of = {limit: row for row, limit in enumerate(limits)}
        rows, columns, values, sums = [], [], [], []
        column = 1  # 0 is the time
        for number, (ways, gigabits) in enumerate(self._spread.items()):
            for way in ways:
                sums.append((number, column))
                for limit in way:
                    rows.append(row_of[limit])
                    columns.append(column)
                    values.append(gigabits / self._capacity(limit))
                column += 1
        right = [-self._alone.get(limit, 0.0) / self._capacity(limit) for limit in limits]
        unit_s = max(*values, -min(right))  # the solver's tolerances are absolute
        values = [value / unit_s for value in values]
        rows += range(len(limits))
        columns += [0] * len(limits)
        values += [-1.0] * len(limits)
        above = _sparse(rows, columns, values, (len(limits), column))
        of, places = zip(*sums, strict=True)
        whole = _sparse(of, places, [1.0] * len(sums), (len(self._spread), column))
        from scipy.optimize import linprog  # takes longer to load than a daemon takes to start

        costs = np.zeros(column)
        costs[0] = 1.0
        at_most = np.array(right) / unit_s
        solved = linprog(costs, A_ub=above, b_ub=at_most, A_eq=whole, b_eq=np.ones(len(self._spread)), method="highs")
        if not solved.success or solved.x is None:
            raise ArithmeticError(f"cannot solve the linear program of the bound: {solved.message}")
        return float(solved.x[0]) * unit_s

    def _capacity(self, limit: Limit) -> float:
        kind, number = limit
        return float(self._gbps[kind][number]) if kind in self._gbps else math.inf


def _sparse(rows: Sequence[int], columns: Sequence[int], values: list[float], shape: tuple[int, int]) -> Any:
    from scipy.sparse import coo_array

    places = (np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64))
    return coo_array((np.array(values, dtype=np.float64), places), shape=shape).tocsr()
