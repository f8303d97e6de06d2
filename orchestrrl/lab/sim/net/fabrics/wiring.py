"""Put links together, and the rows of routes over them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrrl.lab.sim.net.model import Floats, FlowRouter, FlowRoutes, Ints, LinkNetwork, LinkTier, Servers


@dataclass(slots=True)
class Wiring:
    """Links as they are laid, each group in a row."""

    _capacity: list[Floats] = field(default_factory=list)
    _tier: list[LinkTier] = field(default_factory=list)
    _ends: list[Ints] = field(default_factory=list)

    def lay(self, tier: LinkTier, bytes_per_s: Floats | float, tail: Ints | int, head: Ints | int) -> int:
        """Links from nodes to nodes. Returns the number of the first."""
        capacity, tails, heads = np.broadcast_arrays(np.asarray(bytes_per_s, dtype=np.float64), tail, head)
        return self.lay_each([tier] * capacity.size, capacity.ravel(), tails.ravel(), heads.ravel())

    def lay_each(self, tiers: Sequence[LinkTier], bytes_per_s: Floats, tail: Ints, head: Ints) -> int:
        first = len(self._tier)
        self._capacity.append(bytes_per_s)
        self._tier += tiers
        self._ends.append(np.stack([tail, head], axis=1).astype(np.int64))
        return first

    def capacity(self) -> Floats:
        return np.concatenate(self._capacity)

    def network(self, servers: Servers, router: FlowRouter, name: str) -> LinkNetwork:
        return LinkNetwork(servers, self.capacity(), tuple(self._tier), router, name, np.concatenate(self._ends))


@dataclass(slots=True)
class LinkRows:
    """Links of flows, put down in the order in which they are passed. A flow may have several legs, side by side, each
    with its share of the bytes."""

    flow: Ints  # [leg], ascending
    share: Floats  # [leg]
    _parts: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)

    def add(self, leg: Ints, link: Ints, share: Floats | None = None) -> None:
        """`leg` ascends; `share`: of the leg's own."""
        self._parts.append((leg, link, self.share[leg] if share is None else self.share[leg] * share))

    def routes(self, latency_s: Floats) -> FlowRoutes:
        """`latency_s` [leg]; that of a flow is its slowest leg's."""
        legs = len(self.flow)
        taken = np.zeros(legs, np.int64)
        places = []
        for leg, _, _ in self._parts:
            own = np.bincount(leg, minlength=legs)
            places.append(taken[leg] + np.arange(len(leg)) - (np.cumsum(own) - own)[leg])
            taken += own
        first = np.concatenate([[0], np.cumsum(taken)])
        link, share = np.empty(first[-1], np.int64), np.empty(first[-1])
        for (leg, links, shares), place in zip(self._parts, places, strict=True):
            link[first[leg] + place] = links
            share[first[leg] + place] = shares
        legs_begin = np.flatnonzero(np.diff(self.flow, prepend=-1))
        begin = np.concatenate([first[legs_begin], first[-1:]])
        if len(legs_begin) == legs:
            return FlowRoutes(begin, link, share, latency_s)
        return _merged(begin, link, share, np.maximum.reduceat(latency_s, legs_begin))


def _merged(begin: Ints, link: Ints, share: Floats, latency_s: Floats) -> FlowRoutes:
    """A link once in each row."""
    flow = np.repeat(np.arange(len(begin) - 1), np.diff(begin))
    width = int(link.max(initial=0)) + 1
    codes, place = np.unique(flow * width + link, return_inverse=True)
    counts = np.bincount(codes // width, minlength=len(begin) - 1)
    return FlowRoutes(
        np.concatenate([[0], np.cumsum(counts)]),
        codes % width,
        np.asarray(np.bincount(place, share, minlength=len(codes)), np.float64),
        latency_s,
    )


def expand(begin: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Of a table in rows (`begin` as in Routes), for each of `rows`: which of them an entry is for, and the entry."""
    counts = (begin[1:] - begin[:-1])[rows]
    owner = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, begin[:-1][rows][owner] + within
