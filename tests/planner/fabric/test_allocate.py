"""Circuits for a demand, against the contract: a literal Algorithm 3, round-robin assignment, and the optimum by
CP-SAT."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.bench.fabric_allocate import Judged, Optimum, dense, small
from planner.fabric.allocate import Allocation, AllocationProblem, algorithm3, allocate
from planner.fabric.model import EndpointId, Pair, pair_of

Counts = dict[Pair, int]


def ends(*names: str) -> tuple[EndpointId, ...]:
    return tuple(EndpointId(name) for name in names)


@dataclass(frozen=True)
class Facts:
    """A problem in the contract's terms."""

    problem: AllocationProblem

    @property
    def ports(self) -> dict[EndpointId, int]:
        failed = self.problem.failed_ports
        return {each: max(0, ports - failed.get(each, 0)) for each, ports in self.problem.ports.items()}

    def both(self, pair: Pair) -> tuple[float, float]:
        demand = self.problem.demand
        return demand.get(pair, 0.0), demand.get((pair[1], pair[0]), 0.0)

    def demanded(self) -> list[Pair]:
        endpoints = sorted(self.problem.ports)
        return [(a, b) for a in endpoints for b in endpoints if a < b and sum(self.both((a, b))) > 0]

    def joinable(self) -> list[Pair]:
        eligible = self.problem.eligible
        return [pair for pair in self.demanded() if eligible is None or pair in eligible]

    def pair_s(self, pair: Pair, count: int) -> float:
        return max(self.both(pair)) * 8 / (count * self.problem.link_gbps * 1e9) if count else math.inf

    def completion_s(self, circuits: Mapping[Pair, int]) -> float:
        return max((self.pair_s(pair, count) for pair, count in circuits.items()), default=0.0)

    def served_bytes(self, circuits: Mapping[Pair, int]) -> float:
        return math.fsum(sum(self.both(pair)) for pair in circuits)


def literal_algorithm3(facts: Facts) -> Counts:
    free, counts = facts.ports, {}
    while able := [pair for pair in facts.joinable() if free[pair[0]] and free[pair[1]]]:
        slowest = max(max(facts.both(pair)) / counts[pair] if pair in counts else math.inf for pair in able)
        tied = [p for p in able if (max(facts.both(p)) / counts[p] if p in counts else math.inf) == slowest]
        pair = min(tied, key=lambda each: (-max(facts.both(each)), each))
        counts[pair] = counts.get(pair, 0) + 1
        for end in pair:
            free[end] -= 1
    return counts


def literal_uniform(facts: Facts) -> Counts:
    free, counts = facts.ports, {}
    dealt = True
    while dealt:
        dealt = False
        for pair in facts.joinable():
            if free[pair[0]] and free[pair[1]]:
                free[pair[0]] -= 1
                free[pair[1]] -= 1
                counts[pair] = counts.get(pair, 0) + 1
                dealt = True
    return counts


@st.composite
def problems(draw: st.DrawFn) -> AllocationProblem:
    ids = ends(*"abcdefgh"[: draw(st.integers(1, 8))])
    sizes = st.sampled_from([0.0, 1.0, 1e9, 2e9, 3e9, 7e9, 40e9]) | st.floats(1.0, 1e12)
    demand = {(a, b): draw(sizes) for a in ids for b in ids if a != b and draw(st.booleans())}
    pairs = [pair_of(a, b) for a in ids for b in ids if a < b]
    return AllocationProblem(
        link_gbps=draw(st.sampled_from([100.0, 200.0, 0.5])),
        ports={each: draw(st.integers(0, 5)) for each in ids},
        demand=demand,
        eligible=frozenset(draw(st.sets(st.sampled_from(pairs)))) if pairs and draw(st.booleans()) else None,
        failed_ports={each: draw(st.integers(0, 6)) for each in ids if draw(st.integers(0, 3)) == 0},
    )


def check(problem: AllocationProblem, found: Allocation) -> None:
    """Check all requirements of the contract."""
    facts = Facts(problem)
    used = dict.fromkeys(problem.ports, 0)
    for (a, b), count in found.circuits.items():
        assert a < b
        assert count >= 1
        used[a] += count
        used[b] += count
    assert all(used[each] <= ports for each, ports in facts.ports.items())
    assert found.circuits.keys() <= set(facts.joinable())
    assert list(found.circuits) == sorted(found.circuits)
    assert found.unserved == tuple(pair for pair in facts.demanded() if pair not in found.circuits)
    assert found.completion_s == pytest.approx(facts.completion_s(found.circuits), rel=1e-12)
    assert found.uniform_completion_s == pytest.approx(facts.completion_s(literal_uniform(facts)), rel=1e-12)


def no_worse(problem: AllocationProblem, found: Mapping[Pair, int], than: Mapping[Pair, int]) -> bool:
    facts = Facts(problem)
    return (
        len(found) >= len(than)
        and facts.served_bytes(found) >= facts.served_bytes(than) * (1 - 1e-12)
        and facts.completion_s(found) <= facts.completion_s(than) * (1 + 1e-12)
    )


@given(problems())
def test_algorithm_3_matches_the_paper(problem: AllocationProblem) -> None:
    found = algorithm3(problem)
    check(problem, found)
    assert found.circuits == literal_algorithm3(Facts(problem))


@given(problems(), st.booleans())
def test_allocation_is_never_worse_than_algorithm_3(problem: AllocationProblem, bipartite: bool) -> None:
    found = allocate(problem, bipartite=bipartite)
    check(problem, found)
    assert no_worse(problem, found.circuits, literal_algorithm3(Facts(problem)))
    if not found.unserved:
        assert found == algorithm3(problem)


@given(st.integers(0, 2**32))
def test_bipartite_option_serves_no_fewer_bytes(seed: int) -> None:
    problem = small(seed, bipartite=True)
    with_it, without = (allocate(problem, bipartite=each) for each in (True, False))
    check(problem, with_it)
    facts = Facts(problem)
    assert facts.served_bytes(with_it.circuits) >= facts.served_bytes(without.circuits)
    assert no_worse(problem, with_it.circuits, algorithm3(problem).circuits)


@given(problems(), st.randoms(use_true_random=False))
def test_order_and_direction_do_not_matter(problem: AllocationProblem, shuffle: Random) -> None:
    demand = list(problem.demand.items())
    ports = list(problem.ports.items())
    shuffle.shuffle(demand)
    shuffle.shuffle(ports)
    assert allocate(replace(problem, demand=dict(demand), ports=dict(ports))) == allocate(problem)
    turned = {(b, a): sent_bytes for (a, b), sent_bytes in problem.demand.items()}
    assert allocate(replace(problem, demand=turned)) == allocate(problem)


@given(problems())
def test_failed_ports_equal_missing_ports(problem: AllocationProblem) -> None:
    left = replace(problem, ports=Facts(problem).ports, failed_ports={})
    assert allocate(left) == allocate(problem)


@pytest.mark.parametrize("seed", range(12))
def test_allocation_is_close_to_optimum(seed: int) -> None:
    problem = small(seed)
    least = Judged.of(problem, algorithm3(problem))
    if not least.pairs:
        return
    best = Optimum(problem, least).fewest_seconds()
    found = Judged.of(problem, allocate(problem))
    assert found.pairs == best.pairs
    assert best.completion_s * (1 - 1e-12) <= found.completion_s <= best.completion_s * 1.2


def test_bottleneck_rule_is_optimal_if_ports_suffice() -> None:
    for problem in map(small, range(60)):
        found = algorithm3(problem)
        if not found.unserved and found.circuits:
            best = Optimum(problem, Judged.of(problem, found)).fewest_seconds()
            assert found.completion_s == pytest.approx(best.completion_s, rel=1e-12)


def test_largest_pair_does_not_exclude_two_others() -> None:
    """a-b is the largest, and takes the ports that c-a and b-d need; together these have more bytes."""
    a, b, c, d = ends("a", "b", "c", "d")
    problem = AllocationProblem(
        200.0, dict.fromkeys((a, b, c, d), 1), {(a, b): 10e9, (c, a): 9e9, (b, d): 8e9, (d, b): 1e9}
    )
    assert algorithm3(problem).circuits == {(a, b): 1}
    found = allocate(problem)
    assert found.circuits == {(a, c): 1, (b, d): 1}
    assert found.completion_s == 9e9 * 8 / 200e9
    assert found.unserved == ((a, b),)


def test_more_pairs_with_fewer_bytes_are_not_preferred() -> None:
    a, b, c, d = ends("a", "b", "c", "d")
    problem = AllocationProblem(200.0, dict.fromkeys((a, b, c, d), 1), {(a, b): 10e9, (c, a): 4e9, (b, d): 5e9})
    assert allocate(problem) == algorithm3(problem)


def test_ineligible_pairs_stay_unserved() -> None:
    a, b, c = ends("a", "b", "c")
    problem = AllocationProblem(200.0, dict.fromkeys((a, b, c), 4), {(a, b): 5e9, (b, c): 1e9}, frozenset({(b, c)}))
    found = allocate(problem)
    assert (found.circuits, found.unserved) == ({(b, c): 4}, ((a, b),))
    assert found.completion_s == 1e9 * 8 / 4 / 200e9


def test_nothing_is_served_without_demand_or_ports() -> None:
    a, b = ends("a", "b")
    for problem in (AllocationProblem(200.0, {}, {}), AllocationProblem(200.0, {a: 3, b: 3}, {(a, b): 0.0})):
        assert allocate(problem) == Allocation({}, 0.0, (), 0.0)
    assert allocate(AllocationProblem(200.0, {a: 0, b: 3}, {(a, b): 1.0})) == Allocation({}, 0.0, ((a, b),), 0.0)


@pytest.mark.parametrize("size", [5e-324, 1e-300, 1e300])
def test_extreme_byte_counts(size: float) -> None:
    ids = ends(*"abcdef")
    demand = {(a, b): size * (1 + place % 3) for place, a in enumerate(ids) for b in ids if a != b}
    problem = AllocationProblem(200.0, dict.fromkeys(ids, 3), demand)
    check(problem, allocate(problem))


def test_many_ports_and_few_pairs() -> None:
    a, b, c = ends("a", "b", "c")
    problem = AllocationProblem(200.0, {a: 4000, b: 4000, c: 1}, {(a, b): 1e12, (b, c): 3e12, (a, c): 1e9})
    found = allocate(problem)
    check(problem, found)
    assert found.circuits == {(a, b): 3999, (b, c): 1} or found.circuits == {(a, b): 4000}


def test_full_size_site_uses_nearly_all_ports() -> None:
    problem = dense(128, 32, seed=1)
    found, reference = allocate(problem), algorithm3(problem)
    assert no_worse(problem, found.circuits, reference.circuits)
    assert len(found.circuits) >= 2_046 > len(reference.circuits)  # of 2,048 that the ports allow
    assert allocate(problem) == found


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"link_gbps": 0.0}, "link_gbps"),
        ({"link_gbps": math.nan}, "link_gbps"),
        ({"ports": {EndpointId("a"): -1, EndpointId("b"): 1}}, "ports of a"),
        ({"failed_ports": {EndpointId("x"): 1}}, "'x'"),
        ({"failed_ports": {EndpointId("a"): -1}}, "ports of a"),
        ({"demand": {ends("a", "x"): 1.0}}, "'x'"),
        ({"demand": {ends("a", "a"): 1.0}}, "'a' for both"),
        ({"demand": {ends("a", "b"): -1.0}}, ">= 0 bytes"),
        ({"demand": {ends("a", "b"): math.inf}}, "finite and >= 0 bytes"),
        ({"demand": {ends("a", "b"): 1.7e308, ends("b", "a"): 1.7e308}}, "finite sum"),
        ({"eligible": frozenset({ends("b", "a")})}, "smaller endpoint first"),
        ({"eligible": frozenset({ends("a", "x")})}, "'x'"),
    ],
)
def test_invalid_problems_are_rejected(changed: dict[str, object], message: str) -> None:
    a, b = ends("a", "b")
    sound = AllocationProblem(200.0, {a: 2, b: 2}, {(a, b): 1.0})
    with pytest.raises(ValueError, match=message):
        replace(sound, **changed)  # type: ignore[arg-type]
