"""Collectives as NCCL runs them, as flows on the network. Pure.

Groups are GPUs [rank], or [group, rank] for several that call together. Bytes are those of a call's buffer at one
rank, as in NCCL's and torch.distributed's calls:

    all_reduce      the tensor                          bus bandwidth = bytes / s * 2 (n - 1) / n
    all_gather      what each rank gives (input)        bus bandwidth = bytes / s * (n - 1)
    reduce_scatter  what each rank keeps (output)       bus bandwidth = bytes / s * (n - 1)
    all_to_all      all that a rank gives, 1/n of it to each, itself included: bytes / s * (n - 1) / n
    broadcast       the tensor, rank 0 has it           bus bandwidth = bytes / s

Bus bandwidth is nccl-tests' (doc/PERFORMANCE.md there, whose size of the middle two is n times ours): what the
slowest link must carry, whatever the number of ranks.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from orchestrrl.lab.sim.net.model import Floats, GpuFlows, Ints, Servers
from orchestrrl.lab.sim.net.shapes import Pattern, RankShape, chain, pairs, ring, shaped, trees
from orchestrrl.lab.sim.net.transfer import MessageTransfer
from orchestrrl.lab.sim.net.tuning import Algorithm, Choice, Protocol, best, p2p_overhead_s, ring_choice, tree_choice

Groups = Ints | Sequence[int] | Sequence[Sequence[int]]


def all_reduce(
    groups: Groups,
    bytes: float,
    servers: Servers,
    *,
    algorithm: Algorithm | None = None,
    protocol: Protocol | None = None,
) -> MessageTransfer:
    """Ring or tree. None: what NCCL would take."""

    def choose(shape: RankShape) -> Choice:
        if algorithm is None and protocol is None:
            return best(shape, bytes, 2, servers, tree=True)
        if algorithm is Algorithm.TREE:
            return tree_choice(shape, protocol or Protocol.SIMPLE)
        return ring_choice(shape, protocol or Protocol.SIMPLE, 2)

    parts = []
    for shape, alike in _several(groups, servers):
        choice = choose(shape)
        if choice.algorithm is Algorithm.TREE:
            parts.append((choice, trees(shape).over(alike, bytes * choice.wire)))
        else:
            lap = 2 * (shape.ranks - 1) / shape.ranks * bytes
            parts.append((choice, ring(shape).over(alike, lap * choice.wire)))
    return _together(parts, "all_reduce")


def all_gather(groups: Groups, bytes: float, servers: Servers, *, protocol: Protocol | None = None) -> MessageTransfer:
    return _once_around(groups, bytes, servers, protocol, "all_gather")


def reduce_scatter(
    groups: Groups, bytes: float, servers: Servers, *, protocol: Protocol | None = None
) -> MessageTransfer:
    return _once_around(groups, bytes, servers, protocol, "reduce_scatter")


def broadcast(groups: Groups, bytes: float, servers: Servers, *, protocol: Protocol | None = None) -> MessageTransfer:
    """From rank 0 along the ring, in chunks that follow each other."""
    return _rings(groups, bytes, servers, protocol, chain, "broadcast")


def _once_around(
    groups: Groups, bytes: float, servers: Servers, protocol: Protocol | None, label: str
) -> MessageTransfer:
    ranks = np.atleast_2d(np.asarray(groups)).shape[1]
    return _rings(groups, bytes * (ranks - 1), servers, protocol, ring, label)


def _rings(
    groups: Groups,
    lap_bytes: float,
    servers: Servers,
    protocol: Protocol | None,
    way: Callable[[RankShape], Pattern],
    label: str,
) -> MessageTransfer:
    parts = []
    for shape, alike in _several(groups, servers):
        size = lap_bytes * shape.ranks / (shape.ranks - 1)
        choice = ring_choice(shape, protocol, 1) if protocol else best(shape, size, 1, servers, tree=False)
        parts.append((choice, way(shape).over(alike, lap_bytes * choice.wire)))
    return _together(parts, label)


def all_to_all(groups: Groups, bytes: float, servers: Servers, *, by_rail: bool = True) -> MessageTransfer:
    """`by_rail`: with a first hop over NVLink to the GPU on the receiver's rail (PXN, NCCL's default since 2.12)."""
    found = list(_several(groups, servers))
    flows = [pairs(shape, by_rail).over(alike, bytes / shape.ranks) for shape, alike in found]
    across = any(shape.servers > 1 for shape, _ in found)
    return MessageTransfer(
        GpuFlows.joined(flows), 1 if across else 0, "all_to_all", p2p_overhead_s(across) if found else 0.0
    )


def p2p(groups: Groups, bytes: float, servers: Servers) -> MessageTransfer:
    """From each group's first rank to its second."""
    each = np.atleast_2d(np.asarray(groups, np.int64))
    if each.shape[1] != 2:
        raise ValueError(f"p2p is between two ranks, got groups of {each.shape[1]}")
    flows = GpuFlows(each[:, 0], each[:, 1], np.full(len(each), float(bytes)))
    return _sent(flows, servers, "p2p")


def m2n(
    senders: Sequence[int] | Ints, receivers: Sequence[int] | Ints, bytes: float | Floats, servers: Servers
) -> MessageTransfer:
    """From each of the senders to each of the receivers, as attention hands tokens to experts on other GPUs and back
    (AFD). `bytes` goes from one sender to one receiver: one figure, or [sender, receiver]."""
    src, dst = np.asarray(senders, np.int64), np.asarray(receivers, np.int64)
    size = np.broadcast_to(np.asarray(bytes, np.float64), (len(src), len(dst)))
    return _sent(GpuFlows(np.repeat(src, len(dst)), np.tile(dst, len(src)), size.ravel().copy()), servers, "m2n")


def _sent(flows: GpuFlows, servers: Servers, label: str) -> MessageTransfer:
    across = bool(np.any(flows.src // servers.gpus_per_server != flows.dst // servers.gpus_per_server))
    return MessageTransfer(flows, 1 if across else 0, label, p2p_overhead_s(across) if len(flows) else 0.0)


def _several(groups: Groups, servers: Servers) -> Iterator[tuple[RankShape, Ints]]:
    """Groups of one rank have nothing to send."""
    each = np.atleast_2d(np.asarray(groups, np.int64))
    return shaped(each, servers) if each.shape[0] and each.shape[1] > 1 else iter(())


def _together(parts: list[tuple[Choice, GpuFlows]], label: str) -> MessageTransfer:
    """Groups that lie differently end together: the latency of the slowest is everyone's."""
    return MessageTransfer(
        GpuFlows.joined([flows for _, flows in parts]),
        max((choice.rounds for choice, _ in parts), default=0),
        label,
        max((choice.overhead_s for choice, _ in parts), default=0.0),
    )
