"""How a group of ranks lies on servers, and the ways through it: rings, trees, pairs. Pure.

Groups that lie alike share a pattern: it names ranks by their place in the group, and the share of a message that goes
each way. NCCL cuts a message over channels, one for each NIC that the group has on a server. A channel comes into each
server and leaves it by the same rail (NCCL_CROSS_NIC=0, as NCCL's manual advises for rail-optimised fabrics); where the
last GPU of a server is beside another NIC, it hands over by NVLink (PXN, since NCCL 2.12).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from orchestrrl.lab.sim.net.model import Floats, GpuFlows, Ints, Servers

Hop = tuple[tuple[int, int], ...]  # from a rank to the next: straight, or by a third


@dataclass(frozen=True, slots=True)
class RankShape:
    """[rank], the server, counted from the first rank's, and the NIC in it."""

    server: tuple[int, ...]
    nic: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.server)

    @property
    def servers(self) -> int:
        return len(set(self.server))

    def members(self) -> dict[int, list[int]]:
        """Ranks of each server, servers in the order of their first rank."""
        found: dict[int, list[int]] = {}
        for rank, server in enumerate(self.server):
            found.setdefault(server, []).append(rank)
        return found

    @property
    def channels(self) -> int:
        """Inside a server one is enough: all of NVLink is behind it."""
        return 1 if self.servers == 1 else min(len({self.nic[r] for r in each}) for each in self.members().values())

    def leaders(self, ranks: list[int]) -> list[int]:
        """Of a server's ranks the first beside each NIC, in the order of NICs."""
        first = {self.nic[rank]: rank for rank in reversed(ranks)}
        return [first[nic] for nic in sorted(first)]


@dataclass(frozen=True, slots=True)
class Pattern:
    src: Ints  # [flow], rank
    dst: Ints  # [flow], rank
    part: Floats  # [flow], of the bytes that the caller names

    @classmethod
    def of(cls, rows: dict[tuple[int, int], float]) -> "Pattern":
        pairs = np.array(list(rows), np.int64).reshape(-1, 2)
        return cls(pairs[:, 0], pairs[:, 1], np.array(list(rows.values()), np.float64))

    def over(self, groups: Ints, size: float) -> GpuFlows:
        """As flows of every group [group, rank]."""
        return GpuFlows(
            groups[:, self.src].ravel(), groups[:, self.dst].ravel(), np.tile(self.part * size, len(groups))
        )


def shaped(groups: Ints, servers: Servers) -> Iterator[tuple[RankShape, Ints]]:
    """Groups [group, rank] that lie alike, together; in the order of their shapes' first groups."""
    server, nic = np.divmod(servers.nic_of(groups), servers.nics_per_server)
    rows = np.concatenate((server - server[:, :1], nic), axis=1)
    _, first, which = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    for index in np.argsort(first):
        row = rows[first[index]].tolist()
        yield RankShape(tuple(row[: groups.shape[1]]), tuple(row[groups.shape[1] :])), groups[which == index]


@lru_cache(maxsize=512)
def rings(shape: RankShape) -> tuple[tuple[Hop, ...], ...]:
    """[channel][rank in the ring's order], the hop from there to the next."""
    blocks = list(shape.members().values())
    found = []
    for channel in range(shape.channels):
        orders = [_from(block, shape.leaders(block)[channel]) for block in blocks]
        hops: list[Hop] = []
        for order, following in zip(orders, orders[1:] + orders[:1], strict=True):
            hops += [((a, b),) for a, b in pairwise(order)]
            hops.append(_across(order, following))
        found.append(tuple(hops))
    return tuple(found)


def _from(ranks: list[int], first: int) -> list[int]:
    at = ranks.index(first)
    return ranks[at:] + ranks[:at]


def _across(order: list[int], following: list[int]) -> Hop:
    if order is following or len(order) == 1:
        return ((order[-1], following[0]),)
    return ((order[-1], order[0]), (order[0], following[0]))


@lru_cache(maxsize=512)
def ring(shape: RankShape) -> Pattern:
    """Part 1: a lap of the whole message, cut over channels."""
    channels = rings(shape)
    return _summed([(pair, 1 / len(channels)) for hops in channels for hop in hops for pair in hop])


@lru_cache(maxsize=512)
def trees(shape: RankShape) -> Pattern:
    """Up and down two binary trees over servers, each with half of a channel's message, so that the inner servers of
    one are leaves of the other (Sanders, Speck and Traff 2009); in a server along a chain from the channel's leader."""
    blocks = list(shape.members().values())
    part = 1 / shape.channels
    rows: list[tuple[tuple[int, int], float]] = []
    for channel in range(shape.channels):
        orders = [_from(block, shape.leaders(block)[channel]) for block in blocks]
        for order in orders:
            rows += [(pair, part) for a, b in pairwise(order) for pair in ((a, b), (b, a))]
        for child, parent in double_tree(len(blocks)):
            a, b = orders[child][0], orders[parent][0]
            rows += [((a, b), part / 2), ((b, a), part / 2)]
    return _summed(rows)


def double_tree(count: int) -> list[tuple[int, int]]:
    """(child, parent) of both trees. In the first, 0 is the root and odd ones are leaves; the second is its mirror
    image, or it moved by one where the count is odd."""
    first = [(child, _parent(child, count)) for child in range(1, count)]
    if count % 2:
        return first + [((a + 1) % count, (b + 1) % count) for a, b in first]
    return first + [(count - 1 - a, count - 1 - b) for a, b in first]


def _parent(child: int, count: int) -> int:
    low = child & -child
    up = (child ^ low) | (low << 1)
    return up if up < count else child ^ low


def tree_depth(count: int) -> int:
    """The most steps from a leaf to the root."""
    deepest = 0
    for child in range(1, count):
        depth = 0
        while child:
            child, depth = _parent(child, count), depth + 1
        deepest = max(deepest, depth)
    return deepest


@lru_cache(maxsize=64)
def pairs(shape: RankShape) -> Pattern:
    """From every rank to every other, part 1 each. To another server it goes over the NIC of the rail that the receiver
    is on, by way of the GPU beside it, if that is in the group (PXN)."""
    server, nic = np.unique(shape.server, return_inverse=True)[1], np.array(shape.nic)
    beside = np.full((server.max() + 1, nic.max() + 1), -1)
    beside[server[::-1], nic[::-1]] = np.arange(shape.ranks - 1, -1, -1)
    a, b = (each.ravel() for each in np.indices((shape.ranks, shape.ranks)))
    a, b = a[a != b], b[a != b]
    by = beside[server[a], nic[b]]
    hands = (server[a] != server[b]) & (nic[a] != nic[b]) & (by >= 0)
    src, dst = np.concatenate((a, by[hands])), np.concatenate((np.where(hands, by, b), b[hands]))
    both, where = np.unique(src * shape.ranks + dst, return_inverse=True)
    return Pattern(both // shape.ranks, both % shape.ranks, np.bincount(where).astype(np.float64))


def _summed(rows: list[tuple[tuple[int, int], float]]) -> Pattern:
    found: dict[tuple[int, int], float] = {}
    for pair, part in rows:
        found[pair] = found.get(pair, 0.0) + part
    return Pattern.of(found)
