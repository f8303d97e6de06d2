"""Links between nodes that circuits join, and routes over as few of them as lead there. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrrl.lab.sim.net.fabrics.multipath import DirectedLinks, ways
from orchestrrl.lab.sim.net.fabrics.wiring import LinkRows, Wiring
from orchestrrl.lab.sim.net.model import Floats, Ints, LinkTier


@dataclass(frozen=True, slots=True)
class CircuitLinks:
    edges: DirectedLinks
    first: int  # the link of edge 0
    light_s: Floats  # [edge], propagation
    most_ways: int = 0  # over which traffic between two nodes is spread, 0: all that are shortest

    @classmethod
    def lay(
        cls,
        wiring: Wiring,
        bytes_per_s: Floats,
        tiers: NDArray[np.str_],
        light_s: Floats,
        first_node: int,
        most_ways: int = 0,
    ) -> "CircuitLinks":
        """All [from, to]; a bundle of circuits is one link, none where it carries nothing."""
        edges = DirectedLinks.of(bytes_per_s)
        tail, head = edges.tail, edges.head
        first = wiring.lay_each(
            [LinkTier(each) for each in tiers[tail, head].tolist()], edges.width, first_node + tail, first_node + head
        )
        return cls(edges, first, light_s[tail, head], most_ways)

    def add(self, rows: LinkRows, legs: Ints, one: Ints, other: Ints, switch_s: float) -> Floats:
        """From a node to a node, of each of the legs; they may be the same. Returns the seconds of light, and of each
        switch behind a circuit. Raises ValueError where there is no way."""
        nodes = len(self.edges.begin) - 1
        apart = np.flatnonzero(one != other)
        codes, pair = np.unique(one[apart] * nodes + other[apart], return_inverse=True)
        found = ways(self.edges, codes // nodes, codes % nodes, self.most_ways)
        lost = np.flatnonzero(found.hops == 0)
        if len(lost):
            raise ValueError(f"no circuits lead from {codes[lost[0]] // nodes} to {codes[lost[0]] % nodes}")
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
