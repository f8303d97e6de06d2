"""Route traffic over circuits between nodes. Traffic is split over all shortest paths by width. The functions have no
side effects.

At each node, the next hops of all shortest paths share the traffic in proportion to their width. The width of a hop is
the smaller of the hop's own bandwidth and the bandwidth of the paths from its head to the target. A two-hop path is
therefore as wide as the narrower of its hops.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import shortest_path

from orchestrrl.lab.sim.net.fabrics.hosts import LinkRows, Wiring, expand
from orchestrrl.lab.sim.net.model import Floats, Ints, LinkTier, Servers
from orchestrrl.lab.sim.scenario import one_of
from planner.fabric.topology import DEVICES

NO_WAY = 2**31  # the hop count of unreachable nodes; larger than any path
Device = Annotated[str, one_of(DEVICES)]  # an optical switch


class DirectedLinks(NamedTuple):
    """Directed links between nodes, sorted by their tail. The links that leave node n are the entries `begin[n]` to
    `begin[n + 1] - 1`."""

    begin: Ints
    head: Ints  # [edge]
    width: Floats  # [edge]

    @classmethod
    def of(cls, width: Floats) -> "DirectedLinks":
        """Build links from a matrix of widths, indexed by [from, to]. A width of 0 means that there is no link."""
        tail, head = np.nonzero(width)
        begin = np.concatenate([[0], np.cumsum(np.bincount(tail, minlength=len(width)))])
        return cls(begin, head, width[tail, head])

    @property
    def tail(self) -> Ints:
        return np.repeat(np.arange(len(self.begin) - 1), np.diff(self.begin))

    def reversed(self) -> "DirectedLinks":
        order = np.argsort(self.head, kind="stable")
        begin = np.concatenate([[0], np.cumsum(np.bincount(self.head, minlength=len(self.begin) - 1))])
        return DirectedLinks(begin, self.tail[order], self.width[order])


@dataclass(frozen=True, slots=True)
class PairPaths:
    """The shortest paths of node pairs in compressed rows. Each entry contains an edge, and the fraction of the pair's
    traffic on that edge. `hops` is the number of edges on a path of the pair, or 0 if the pair has no path."""

    begin: Ints  # [pair + 1]
    edge: Ints
    share: Floats
    hops: Ints  # [pair]

    def rows(self, pairs: Ints) -> tuple[Ints, Ints, Floats]:
        """Return three arrays with one entry for each edge of each pair in `pairs`: the index into `pairs`, the edge,
        and the fraction of the pair's traffic on the edge."""
        owner, entry = expand(self.begin, pairs)
        return owner, self.edge[entry], self.share[entry]


def ways(edges: DirectedLinks, source: Ints, target: Ints) -> PairPaths:
    """Return all shortest paths of each node pair. `source` and `target` are the nodes of each pair, which must
    differ."""
    order = np.argsort(target, kind="stable")
    back = edges.reversed()
    counts, edge, share, hops = _ways(edges, back, source[order], target[order])
    whose = np.repeat(order, counts)
    by_pair = np.argsort(whose, kind="stable")
    begin = np.concatenate([[0], np.cumsum(np.bincount(whose, minlength=len(source)))])
    of_pair = np.empty(len(source), np.int64)
    of_pair[order] = hops
    return PairPaths(begin, edge[by_pair], share[by_pair], of_pair)


def distances(edges: DirectedLinks) -> Ints:
    """Return the number of hops between any two nodes, as an array indexed by [from, to]. The number is NO_WAY if there
    is no path."""
    nodes = len(edges.begin) - 1
    graph = coo_array((np.ones(len(edges.head)), (edges.tail, edges.head)), (nodes, nodes)).tocsr()
    hops = shortest_path(graph, unweighted=True)
    return np.where(np.isinf(hops), NO_WAY, hops).astype(np.int64)


@numba.njit(cache=True)
def _ways(links: DirectedLinks, back: DirectedLinks, source: Ints, target: Ints) -> tuple[Ints, Ints, Floats, Ints]:
    """Return the paths of node pairs as four arrays: the number of edges of each pair, all edges, their shares of
    traffic, and the number of hops of each pair. The pairs must be sorted by target, so that the distances to a target
    are computed once."""
    nodes, pairs, found = len(links.begin) - 1, len(source), 0
    counts, hops = np.zeros(pairs, np.int64), np.zeros(pairs, np.int64)
    distance, onward, queue = np.empty(nodes, np.int64), np.zeros(nodes), np.empty(nodes, np.int64)
    mass = np.zeros(nodes)
    room = len(links.head)  # of one pair
    edges, shares = np.empty(4 * pairs + room, np.int64), np.empty(4 * pairs + room)
    last = -1
    for pair in range(pairs):
        if target[pair] != last:
            last = target[pair]
            _lead_to(last, links, back, distance, onward, queue)
        hops[pair] = max(distance[source[pair]], 0)
        if hops[pair] == 0:
            continue
        if found + room > len(edges):
            edges = np.concatenate((edges, np.empty(found + room, np.int64)))
            shares = np.concatenate((shares, np.empty(found + room)))
        added = _flood(source[pair], links, distance, onward, mass, queue, edges[found:], shares[found:])
        counts[pair] = added
        found += added
    return counts, edges[:found], shares[:found], hops


@numba.njit(cache=True)
def _flood(
    source: int,
    links: DirectedLinks,
    distance: Ints,
    onward: Floats,
    mass: Floats,
    queue: Ints,
    edges: Ints,
    shares: Floats,
) -> int:
    """Spread one unit of traffic over all shortest paths from `source`. Nodes are visited breadth first, so that a node
    forwards traffic only after all of its traffic has arrived. `distance` and `onward` are the results of `_lead_to`.
    `mass` is zero before and after the call. Return the number of edges written to `edges` and `shares`."""
    mass[source] = 1.0
    queue[0], first, end, found = source, 0, 1, 0
    while first < end:
        node = queue[first]
        first += 1
        for edge in range(links.begin[node], links.begin[node + 1]):
            head = links.head[edge]
            if distance[head] == distance[node] - 1:
                share = mass[node] * min(links.width[edge], onward[head]) / onward[node]
                edges[found], shares[found] = edge, share
                found += 1
                if distance[head] > 0:
                    if mass[head] == 0.0:
                        queue[end] = head
                        end += 1
                    mass[head] += share
    for place in range(end):
        mass[queue[place]] = 0.0
    return found


@numba.njit(cache=True)
def _lead_to(
    target: int, links: DirectedLinks, back: DirectedLinks, distance: Ints, onward: Floats, order: Ints
) -> None:
    """Compute `distance`, the number of hops from each node to the target, and `onward`, the width of the shortest
    paths from each node to the target. `distance` is -1 for a node without a path."""
    distance[:] = -1
    distance[target], onward[target] = 0, np.inf
    order[0], first, end = target, 0, 1
    while first < end:
        node = order[first]
        first += 1
        if node != target:
            onward[node] = 0.0
            for edge in range(links.begin[node], links.begin[node + 1]):
                if distance[links.head[edge]] == distance[node] - 1:
                    onward[node] += min(links.width[edge], onward[links.head[edge]])
        for place in range(back.begin[node], back.begin[node + 1]):
            before = back.head[place]
            if distance[before] == -1:
                distance[before] = distance[node] + 1
                order[end] = before
                end += 1


@dataclass(frozen=True, slots=True)
class CircuitLinks:
    edges: DirectedLinks
    first: int  # the link of edge 0
    light_s: Floats  # [edge], propagation

    @classmethod
    def lay(
        cls,
        wiring: Wiring,
        bytes_per_s: Floats,
        tiers: NDArray[np.str_],
        light_s: Floats,
        first_node: int,
    ) -> "CircuitLinks":
        """Add circuits between nodes to `wiring`. `bytes_per_s`, `tiers` and the propagation times `light_s` are
        indexed by [from, to]. `first_node` is the number of the first node. All circuits from one node to another form
        one link."""
        edges = DirectedLinks.of(bytes_per_s)
        tail, head = edges.tail, edges.head
        first = wiring.lay_each(
            [LinkTier(each) for each in tiers[tail, head].tolist()], edges.width, first_node + tail, first_node + head
        )
        return cls(edges, first, light_s[tail, head])

    @classmethod
    def between_servers(cls, wiring: Wiring, joins: Ints, servers: Servers) -> "CircuitLinks":
        """Add circuits between servers to `wiring`. `joins` contains the number of circuits from one server to another,
        as an array indexed by [from, to]. Each circuit uses one NIC of each server."""
        width = np.asarray(joins * servers.nic_bytes_per_s, np.float64)
        light_s = np.full(joins.shape, 2 * servers.propagation_s)
        return cls.lay(wiring, width, np.full(joins.shape, LinkTier.DIRECT), light_s, servers.nics)

    def add(self, rows: LinkRows, legs: Ints, one: Ints, other: Ints, switch_s: float) -> Floats:
        """Add to `rows`, for each leg, the links of the shortest paths from the leg's node in `one` to its node in
        `other`. The two nodes may be equal. Return each leg's latency in seconds, which includes propagation and
        `switch_s` for each circuit. Raises ValueError if no path connects the two nodes."""
        nodes = len(self.edges.begin) - 1
        apart = np.flatnonzero(one != other)
        codes, pair = np.unique(one[apart] * nodes + other[apart], return_inverse=True)
        found = ways(self.edges, codes // nodes, codes % nodes)
        lost = np.flatnonzero(found.hops == 0)
        if len(lost):
            raise ValueError(f"no circuits connect node {codes[lost[0]] // nodes} to node {codes[lost[0]] % nodes}")
        owner, edge, share = found.rows(pair)
        rows.add(legs[apart[owner]], self.first + edge, share)
        passing_s = np.bincount(
            np.repeat(np.arange(len(codes)), np.diff(found.begin)),
            found.share * (self.light_s[found.edge] + switch_s),
            minlength=len(codes),
        )
        seconds = np.zeros(len(legs))
        seconds[apart] = passing_s[pair]
        return seconds
