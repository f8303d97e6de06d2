"""Tests of shortest paths against a slow reference implementation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrrl.lab.sim.net.fabrics.circuits import NO_WAY, DirectedLinks, distances, ways

Graph = dict[int, dict[int, float]]


def graph_of(width: np.ndarray) -> Graph:
    return {node: {int(head): float(row[head]) for head in np.flatnonzero(row)} for node, row in enumerate(width)}


def hops(graph: Graph, node: int, target: int) -> int:
    reached, at = {node}, 0
    while target not in reached:
        more = reached | {head for each in reached for head in graph[each]}
        if more == reached:
            return NO_WAY
        reached, at = more, at + 1
    return at


def onward(graph: Graph, node: int, target: int) -> float:
    if node == target:
        return float("inf")
    return sum(min(wide, onward(graph, head, target)) for head, wide in closer(graph, node, target))


def closer(graph: Graph, node: int, target: int) -> list[tuple[int, float]]:
    here = hops(graph, node, target)
    return [(head, wide) for head, wide in graph[node].items() if hops(graph, head, target) == here - 1]


def spread(graph: Graph, node: int, target: int, mass: float, found: dict[tuple[int, int], float]) -> None:
    if node == target:
        return
    for head, wide in closer(graph, node, target):
        share = mass * min(wide, onward(graph, head, target)) / onward(graph, node, target)
        found[node, head] = found.get((node, head), 0.0) + share
        spread(graph, head, target, share, found)


def matrix(seed: int, nodes: int, full: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    width = rng.integers(1, 5, (nodes, nodes)) * (rng.random((nodes, nodes)) < full)
    np.fill_diagonal(width, 0)
    return np.asarray(width, np.float64)


@given(seed=st.integers(0, 10**6), nodes=st.integers(2, 8), full=st.floats(0.1, 0.9))
def test_traffic_is_split_over_all_shortest_paths_by_width(seed: int, nodes: int, full: float) -> None:
    width = matrix(seed, nodes, full)
    graph, edges = graph_of(width), DirectedLinks.of(width)
    source, target = np.nonzero(~np.eye(nodes, dtype=bool))
    found = ways(edges, source, target)
    for pair, (one, other) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        row = slice(found.begin[pair], found.begin[pair + 1])
        ends = list(zip(edges.tail[found.edge[row]].tolist(), edges.head[found.edge[row]].tolist(), strict=True))
        expected: dict[tuple[int, int], float] = {}
        if hops(graph, one, other) < NO_WAY:
            spread(graph, one, other, 1.0, expected)
            assert found.hops[pair] == hops(graph, one, other)
        else:
            assert found.hops[pair] == 0
        assert dict(zip(ends, found.share[row].tolist(), strict=True)) == pytest.approx(expected)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 9), full=st.floats(0.0, 0.6))
def test_distances_match_breadth_first_search(seed: int, nodes: int, full: float) -> None:
    width = matrix(seed, nodes, full)
    graph = graph_of(width)
    expected = [[hops(graph, one, other) for other in range(nodes)] for one in range(nodes)]
    assert distances(DirectedLinks.of(width)).tolist() == expected
