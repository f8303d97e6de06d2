"""Collectives as NCCL runs them, as flows on the network, along rings, with the protocol that NCCL would choose. Pure.

Groups are GPUs [rank], or [group, rank] for several that call together. Bytes are those of a call's buffer at one
rank, as in NCCL's and torch.distributed's calls:

    all_reduce      the tensor                          bus bandwidth = bytes / s * 2 (n - 1) / n
    all_gather      what each rank gives (input)        bus bandwidth = bytes / s * (n - 1)
    reduce_scatter  what each rank keeps (output)       bus bandwidth = bytes / s * (n - 1)
    all_to_all      all that a rank gives, 1/n of it to each, itself included: bytes / s * (n - 1) / n

Bus bandwidth is nccl-tests' (doc/PERFORMANCE.md there, whose size of the middle two is n times ours): what the
slowest link must carry, whatever the number of ranks.

Latencies and bandwidths are those of NCCL's own tuning model (github.com/NVIDIA/nccl, v2.28, src/graph/tuning.cc):
baseLatencies, hwLatencies of NVLink and of the network, the network's overhead per message, llMaxBws. A step over the
network there is a whole one, through a switch; the switch's part is taken off here, since the simulator's routes have
it. Trees, which NCCL takes for small all-reduces over many servers, are left out: gradients are large.

Groups that lie alike share a pattern: it names ranks by their place in the group, and the share of a message that goes
each way. NCCL cuts a message over channels, one for each NIC that the group has on a server. A channel comes into each
server and leaves it by the same rail (NCCL_CROSS_NIC=0, as NCCL's manual advises for rail-optimised fabrics); where the
last GPU of a server is beside another NIC, it hands over by NVLink (PXN, since NCCL 2.12).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise

import numpy as np

from orchestrrl.lab.sim.net.model import Floats, GpuFlows, Ints, MessageTransfer, Servers

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
    """Part 1: a lap of the whole message, cut over channels."""
    channels, parts = rings(shape), dict[tuple[int, int], float]()
    for pair in (pair for hops in channels for hop in hops for pair in hop):
        parts[pair] = parts.get(pair, 0.0) + 1 / len(channels)
    src, dst = np.array(list(parts), np.int64).reshape(-1, 2).T
    return Pattern(src, dst, np.array(list(parts.values()), np.float64))


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


NET_OVERHEAD_S = 1e-6  # per message; three times with Simple in a ring inside servers
ONE_SWITCH_S = 2 * 1e-6 + 0.8e-6  # two links and a switch, as `Servers` has them


class Protocol(StrEnum):
    LL = "ll"  # 4 bytes of data with 4 of a flag
    LL128 = "ll128"  # 120 bytes of 128 are data
    SIMPLE = "simple"


@dataclass(frozen=True, slots=True)
class Latency:
    """Of a ring. `alone_s`: of a step over the network in a group of one GPU a server, which has nothing inside servers
    to hide it behind: NCCL takes a tree's."""

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
LL_BYTES_PER_S = {1: 141e9, 2: 39e9}  # of all channels, one server of Hopper GPUs and two
LL_MANY_BYTES_PER_S = 20.4e9  # three servers and more
RING_PLATEAU = 1.4  # all-reduce by Simple over servers: how much longer its steps take than the constants


@dataclass(frozen=True, slots=True)
class RingChoice:
    """How a ring runs with one protocol. `laps`: 2 of an all-reduce, 1 of what goes around once."""

    shape: RankShape
    protocol: Protocol
    laps: int

    @property
    def rounds(self) -> int:
        """Over the network."""
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
        """Return the time of `size` bytes on a network without other traffic: the alpha-beta model."""
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
    """Of a send and its receive, with what else of them is in the same group call."""
    latency = LATENCIES[Protocol.SIMPLE]
    return latency.base_s + (_host_s(latency.net_s, Protocol.SIMPLE) if across else latency.nvlink_s)


def _host_s(net_s: float, protocol: Protocol) -> float:
    return net_s + NET_OVERHEAD_S * (2 if protocol is Protocol.SIMPLE else 1) - ONE_SWITCH_S


Groups = Ints | Sequence[int] | Sequence[Sequence[int]]


def all_reduce(groups: Groups, bytes: float, servers: Servers) -> MessageTransfer:
    return _around(groups, lambda ranks: bytes, 2, servers)


def all_gather(groups: Groups, bytes: float, servers: Servers) -> MessageTransfer:
    return _around(groups, lambda ranks: bytes * ranks, 1, servers)


reduce_scatter = all_gather  # the other way round, as much


def _around(groups: Groups, whole_bytes: Callable[[int], float], laps: int, servers: Servers) -> MessageTransfer:
    """Along rings, in chunks that follow each other; `whole_bytes` of a group of so many ranks. Groups that lie
    differently end together: the latency of the slowest is everyone's."""
    flows, rounds, overhead_s = [], 0, 0.0
    for shape, alike in _several(groups, servers):
        size = whole_bytes(shape.ranks)
        choice = best(shape, size, laps, servers)
        lap_bytes = laps * (shape.ranks - 1) / shape.ranks * size
        flows.append(ring(shape).over(alike, lap_bytes * WIRE[choice.protocol]))
        rounds, overhead_s = max(rounds, choice.rounds), max(overhead_s, choice.overhead_s)
    return MessageTransfer(GpuFlows.joined(flows), rounds, overhead_s)


def all_to_all(groups: Groups, bytes: float, servers: Servers) -> MessageTransfer:
    """With a first hop over NVLink to the GPU on the receiver's rail (PXN, NCCL's default since 2.12)."""
    found = list(_several(groups, servers))
    flows = [pairs(shape).over(alike, bytes / shape.ranks) for shape, alike in found]
    across = any(shape.servers > 1 for shape, _ in found)
    return MessageTransfer(GpuFlows.joined(flows), 1 if across else 0, p2p_overhead_s(across) if found else 0.0)


def p2p(groups: Groups, bytes: float, servers: Servers) -> MessageTransfer:
    """From each group's first rank to its second."""
    each = np.atleast_2d(np.asarray(groups, np.int64))
    if each.shape[1] != 2:
        raise ValueError(f"p2p is between two ranks, got groups of {each.shape[1]}")
    flows = GpuFlows(each[:, 0], each[:, 1], np.full(len(each), float(bytes)))
    return _sent(flows, servers)


def m2n(
    senders: Sequence[int] | Ints, receivers: Sequence[int] | Ints, bytes: float | Floats, servers: Servers
) -> MessageTransfer:
    """From each of the senders to each of the receivers, as attention hands tokens to experts on other GPUs and back
    (AFD). `bytes` goes from one sender to one receiver: one figure, or [sender, receiver]."""
    src, dst = np.asarray(senders, np.int64), np.asarray(receivers, np.int64)
    size = np.broadcast_to(np.asarray(bytes, np.float64), (len(src), len(dst)))
    return _sent(GpuFlows(np.repeat(src, len(dst)), np.tile(dst, len(src)), size.ravel().copy()), servers)


def _sent(flows: GpuFlows, servers: Servers) -> MessageTransfer:
    across = bool(flows.cross(servers).any())
    return MessageTransfer(flows, 1 if across else 0, p2p_overhead_s(across) if len(flows) else 0.0)


def _several(groups: Groups, servers: Servers) -> Iterator[tuple[RankShape, Ints]]:
    """Groups of one rank have nothing to send."""
    each = np.atleast_2d(np.asarray(groups, np.int64))
    return shaped(each, servers) if each.shape[0] and each.shape[1] > 1 else iter(())
