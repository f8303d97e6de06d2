"""Model NCCL's collectives as flows on the network: along rings, with the protocol that NCCL would choose. The
functions have no side effects.

Groups are arrays of GPUs, indexed by [rank], or by [group, rank] if several groups call together. `bytes` is the size
of a call's buffer at one rank, as in NCCL's and torch.distributed's calls:

    all_reduce      the tensor                           bus bandwidth = bytes / s * 2 (n - 1) / n
    all_gather      the input of each rank               bus bandwidth = bytes / s * (n - 1)
    reduce_scatter  the output of each rank              bus bandwidth = bytes / s * (n - 1)
    all_to_all      the input of each rank, 1/n per rank bus bandwidth = bytes / s * (n - 1) / n

Bus bandwidth is defined as in the documentation of nccl-tests (doc/PERFORMANCE.md). For all_gather and reduce_scatter,
that page uses the size of the whole buffer, which is n times `bytes`. Bus bandwidth is the rate of the slowest link,
and does not depend on the number of ranks.

Latencies and bandwidths are those of NCCL's own tuning model (github.com/NVIDIA/nccl, v2.28, src/graph/tuning.cc):
baseLatencies, hwLatencies of NVLink and of the network, the network's overhead per message, and llMaxBws. NCCL's
latency of a network step includes one switch. The switch's part is subtracted here, because the simulator's routes add
it. Trees, which NCCL uses for small all-reduces over many servers, are not modelled, because gradients are large.

Groups with the same placement share a pattern. A pattern contains the rank of each flow's source and destination, and
the flow's fraction of the message. NCCL splits a message over channels, one for each NIC that the group has on a
server. A channel enters and leaves each server on the same rail (NCCL_CROSS_NIC=0, as NCCL's manual advises for
rail-optimised fabrics). If the last GPU of a server is at another NIC, it forwards over NVLink (PXN, since NCCL 2.12).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise

import numpy as np

from orchestrrl.lab.sim.net.model import Floats, GpuFlows, Ints, MessageTransfer, Servers

Hop = tuple[tuple[int, int], ...]  # from a rank to the next, directly or through a third rank


@dataclass(frozen=True, slots=True)
class RankShape:
    """The placement of a group. For each rank, it contains the index of the rank's server relative to the first rank's
    server, and the index of the rank's NIC in that server."""

    server: tuple[int, ...]
    nic: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.server)

    @property
    def servers(self) -> int:
        return len(set(self.server))

    def members(self) -> dict[int, list[int]]:
        """Return the ranks of each server, with servers in the order of their first rank."""
        found: dict[int, list[int]] = {}
        for rank, server in enumerate(self.server):
            found.setdefault(server, []).append(rank)
        return found

    @property
    def channels(self) -> int:
        """The number of NCCL channels. It is 1 for a group inside one server, because one channel uses the whole NVLink
        bandwidth."""
        return 1 if self.servers == 1 else min(len({self.nic[r] for r in each}) for each in self.members().values())

    def leaders(self, ranks: list[int]) -> list[int]:
        """Return the first rank at each NIC of a server, in the order of NICs. `ranks` are the ranks on that server."""
        first = {self.nic[rank]: rank for rank in reversed(ranks)}
        return [first[nic] for nic in sorted(first)]


@dataclass(frozen=True, slots=True)
class Pattern:
    src: Ints  # [flow], rank
    dst: Ints  # [flow], rank
    part: Floats  # [flow], fraction of the caller's bytes

    def over(self, groups: Ints, size: float) -> GpuFlows:
        """Return the pattern's flows for every group of `groups`, an array of GPUs indexed by [group, rank]. The number
        of bytes of each flow is `size` times the flow's `part`."""
        return GpuFlows(
            groups[:, self.src].ravel(), groups[:, self.dst].ravel(), np.tile(self.part * size, len(groups))
        )


def shaped(groups: Ints, servers: Servers) -> Iterator[tuple[RankShape, Ints]]:
    """Yield each placement that occurs in `groups`, with the groups that have this placement. Arrays of groups are
    indexed by [group, rank]. Placements are yielded in the order of their first groups."""
    server, nic = np.divmod(servers.nic_of(groups), servers.nics_per_server)
    rows = np.concatenate((server - server[:, :1], nic), axis=1)
    _, first, which = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    for index in np.argsort(first):
        row = rows[first[index]].tolist()
        yield RankShape(tuple(row[: groups.shape[1]]), tuple(row[groups.shape[1] :])), groups[which == index]


@lru_cache(maxsize=512)
def rings(shape: RankShape) -> tuple[tuple[Hop, ...], ...]:
    """Return the ring of each channel, as the hops from each rank to the next in ring order."""
    blocks = list(shape.members().values())
    found = []
    for channel in range(shape.channels):
        firsts = [block.index(shape.leaders(block)[channel]) for block in blocks]
        orders = [block[first:] + block[:first] for block, first in zip(blocks, firsts, strict=True)]
        hops: list[Hop] = []
        for order, following in zip(orders, orders[1:] + orders[:1], strict=True):
            hops += [((a, b),) for a, b in pairwise(order)]
            hops.append(_across(order, following))
        found.append(tuple(hops))
    return tuple(found)


def _across(order: list[int], following: list[int]) -> Hop:
    if order is following or len(order) == 1:
        return ((order[-1], following[0]),)
    return ((order[-1], order[0]), (order[0], following[0]))


@lru_cache(maxsize=512)
def ring(shape: RankShape) -> Pattern:
    """Return the pattern of one lap of a whole message around the ring. The message is split evenly over the
    channels."""
    channels, parts = rings(shape), dict[tuple[int, int], float]()
    for pair in (pair for hops in channels for hop in hops for pair in hop):
        parts[pair] = parts.get(pair, 0.0) + 1 / len(channels)
    src, dst = np.array(list(parts), np.int64).reshape(-1, 2).T
    return Pattern(src, dst, np.array(list(parts.values()), np.float64))


@lru_cache(maxsize=64)
def pairs(shape: RankShape) -> Pattern:
    """Return the pattern of flows from every rank to every other rank, in which the part of each flow is 1. A flow to
    another server uses the receiver's rail. If the group has a GPU on this rail in the sender's server, the flow first
    goes to that GPU (PXN)."""
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


NET_OVERHEAD_S = 1e-6  # per message; three times as long with Simple in a ring inside servers
ONE_SWITCH_S = 2 * 1e-6 + 0.8e-6  # two links and a switch, with the defaults of `Servers`


class Protocol(StrEnum):
    LL = "ll"  # 4 bytes of data with 4 of a flag
    LL128 = "ll128"  # 120 bytes of 128 are data
    SIMPLE = "simple"


@dataclass(frozen=True, slots=True)
class Latency:
    """The latencies of a ring in seconds: `base_s` for the call, `nvlink_s` for a step inside a server, and `net_s` for
    a network step. `alone_s` replaces `net_s` in a group with one GPU per server, where no step inside a server hides
    the network step. NCCL uses a tree's latency for this case."""

    base_s: float
    nvlink_s: float
    net_s: float
    alone_s: float


LATENCIES = {
    Protocol.LL: Latency(6.6e-6, 0.6e-6, 2.7e-6, 5.0e-6),
    Protocol.LL128: Latency(14.0e-6, 1.9e-6, 4.0e-6, 8.5e-6),
    Protocol.SIMPLE: Latency(8.4e-6, 3.4e-6, 14.0e-6, 14.0e-6),
}
WIRE = {Protocol.LL: 2.0, Protocol.LL128: 128 / 120, Protocol.SIMPLE: 1.0}  # bytes sent per byte of data
LL_BYTES_PER_S = {1: 141e9, 2: 39e9}  # of all channels, by the number of servers of Hopper GPUs
LL_MANY_BYTES_PER_S = 20.4e9  # for three servers and more
RING_PLATEAU = 1.4  # factor on the latency of an all-reduce over servers with Simple


@dataclass(frozen=True, slots=True)
class RingChoice:
    """A ring with one protocol. `laps` is the number of times that the data circulates: 2 for an all-reduce, and 1 for
    other collectives."""

    shape: RankShape
    protocol: Protocol
    laps: int

    @property
    def rounds(self) -> int:
        """The number of dependent steps over the network."""
        return self.laps * (self.shape.servers - 1)

    @property
    def overhead_s(self) -> float:
        latency, shape, is_simple = LATENCIES[self.protocol], self.shape, self.protocol is Protocol.SIMPLE
        nvlink_s = latency.nvlink_s
        if shape.servers > 1:
            nvlink_s = max(nvlink_s, NET_OVERHEAD_S * (3 if is_simple else 1))
        step_s = _host_s(latency.alone_s if shape.servers == shape.ranks else latency.net_s, self.protocol)
        inside = self.laps * (shape.ranks - 1) - self.rounds
        plateau = RING_PLATEAU if self.laps == 2 and is_simple and shape.servers > 1 else 1.0
        return plateau * (latency.base_s + inside * nvlink_s + self.rounds * step_s)

    def seconds(self, size: float, servers: Servers) -> float:
        """Return the time in seconds to transfer `size` bytes on a network without other traffic (alpha-beta model)."""
        shape, rate = self.shape, servers.nvlink_bytes_per_s
        if shape.servers > 1:
            rate = min(rate, servers.nic_bytes_per_s * shape.channels)
        rate /= WIRE[self.protocol]
        if self.protocol is Protocol.LL:
            rate = min(rate, LL_BYTES_PER_S.get(shape.servers, LL_MANY_BYTES_PER_S))
        lap = self.laps * (shape.ranks - 1) / shape.ranks
        return self.overhead_s + self.rounds * ONE_SWITCH_S + lap * size / rate


def best(shape: RankShape, size: float, laps: int, servers: Servers) -> RingChoice:
    return min((RingChoice(shape, each, laps) for each in Protocol), key=lambda each: each.seconds(size, servers))


def p2p_overhead_s(across: bool) -> float:
    """Return the overhead, in seconds, of one group call of sends and receives. `across` is true if messages are sent
    between servers."""
    latency = LATENCIES[Protocol.SIMPLE]
    return latency.base_s + (_host_s(latency.net_s, Protocol.SIMPLE) if across else latency.nvlink_s)


def _host_s(net_s: float, protocol: Protocol) -> float:
    return net_s + NET_OVERHEAD_S * (2 if protocol is Protocol.SIMPLE else 1) - ONE_SWITCH_S


Groups = Ints | Sequence[int] | Sequence[Sequence[int]]


def all_reduce(groups: Groups, bytes: float, servers: Servers) -> MessageTransfer:
    return _around(groups, lambda ranks: bytes, 2, servers)


def all_gather(groups: Groups, bytes: float, servers: Servers) -> MessageTransfer:
    return _around(groups, lambda ranks: bytes * ranks, 1, servers)


reduce_scatter = all_gather  # the same traffic in the opposite direction


def _around(groups: Groups, whole_bytes: Callable[[int], float], laps: int, servers: Servers) -> MessageTransfer:
    """Return the transfer of a pipelined ring collective. `whole_bytes` maps a group's number of ranks to the size of
    the group's message in bytes. Groups with different placements are treated as one transfer, which has the latency of
    the slowest group."""
    flows, rounds, overhead_s = [], 0, 0.0
    for shape, alike in _several(groups, servers):
        size = whole_bytes(shape.ranks)
        choice = best(shape, size, laps, servers)
        lap_bytes = laps * (shape.ranks - 1) / shape.ranks * size
        flows.append(ring(shape).over(alike, lap_bytes * WIRE[choice.protocol]))
        rounds, overhead_s = max(rounds, choice.rounds), max(overhead_s, choice.overhead_s)
    return MessageTransfer(GpuFlows.joined(flows), rounds, overhead_s)


def all_to_all(groups: Groups, bytes: float, servers: Servers) -> MessageTransfer:
    """Return the flows of an all-to-all. A message to another server first goes over NVLink to the receiver's rail
    (PXN, NCCL's default since 2.12)."""
    found = list(_several(groups, servers))
    flows = [pairs(shape).over(alike, bytes / shape.ranks) for shape, alike in found]
    across = any(shape.servers > 1 for shape, _ in found)
    return MessageTransfer(GpuFlows.joined(flows), 1 if across else 0, p2p_overhead_s(across) if found else 0.0)


def p2p(groups: Groups, bytes: float, servers: Servers) -> MessageTransfer:
    """Return the flows of one message from each group's first rank to its second rank. Raises ValueError if the groups
    do not have two ranks."""
    each = np.atleast_2d(np.asarray(groups, np.int64))
    if each.shape[1] != 2:
        raise ValueError(f"p2p needs groups of 2 ranks, got groups of {each.shape[1]}")
    flows = GpuFlows(each[:, 0], each[:, 1], np.full(len(each), float(bytes)))
    return _sent(flows, servers)


def m2n(
    senders: Sequence[int] | Ints, receivers: Sequence[int] | Ints, bytes: float | Floats, servers: Servers
) -> MessageTransfer:
    """Return the flows of messages from each sender to each receiver, such as those from attention to experts on other
    GPUs and back (AFD). `bytes` is the size of each message: one number, or an array indexed by [sender, receiver]."""
    src, dst = np.asarray(senders, np.int64), np.asarray(receivers, np.int64)
    size = np.broadcast_to(np.asarray(bytes, np.float64), (len(src), len(dst)))
    return _sent(GpuFlows(np.repeat(src, len(dst)), np.tile(dst, len(src)), size.ravel().copy()), servers)


def _sent(flows: GpuFlows, servers: Servers) -> MessageTransfer:
    across = bool(flows.cross(servers).any())
    return MessageTransfer(flows, 1 if across else 0, p2p_overhead_s(across) if len(flows) else 0.0)


def _several(groups: Groups, servers: Servers) -> Iterator[tuple[RankShape, Ints]]:
    """Yield placements and groups as `shaped` does. Yield nothing for groups of one rank, because they do not
    communicate."""
    each = np.atleast_2d(np.asarray(groups, np.int64))
    return shaped(each, servers) if each.shape[0] and each.shape[1] > 1 else iter(())
