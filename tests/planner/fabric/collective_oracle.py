"""Compute the transfers of collectives by executing them: each rank in turn, step by step, message by message."""

from collections.abc import Iterator
from itertools import pairwise

from planner.fabric.intent import Primitive, Traffic
from planner.fabric.model import EndpointId
from planner.fabric.plan import FabricFailures
from planner.fabric.topology import Server, Site
from planner.model import GpuId

Message = tuple[int, int, float]  # from a rank, to a rank, bytes


def messages(traffic: Traffic) -> Iterator[Message]:
    """Yield the messages of all primitives except trees and broadcasts."""
    for group in traffic.groups:
        yield from _of_group(traffic, group)


def _of_group(traffic: Traffic, group: tuple[int, ...]) -> Iterator[Message]:
    size, whole = len(group), traffic.bytes_per_rank * traffic.times
    following = {rank: group[(place + 1) % size] for place, rank in enumerate(group)}
    match traffic.primitive:
        case Primitive.RING_ALL_REDUCE:  # chunks are summed on their way around the ring, then distributed around it
            for _ in range(2 * (size - 1)):
                for rank in group:
                    yield rank, following[rank], whole / size
        case Primitive.REDUCE_SCATTER:
            for _ in range(size - 1):
                for rank in group:
                    yield rank, following[rank], whole / size
        case Primitive.ALL_GATHER:
            for _ in range(size - 1):
                for rank in group:
                    yield rank, following[rank], whole
        case Primitive.ALL_TO_ALL:
            for rank in group:
                for other in group:
                    if other != rank:
                        yield rank, other, whole / size
        case Primitive.PIPELINE:
            for rank, other in pairwise(group):
                yield rank, other, whole
        case Primitive.RING_EXCHANGE:
            for rank in group:
                yield rank, following[rank], whole
        case Primitive.BIPARTITE:
            receivers = traffic.receivers[traffic.groups.index(group)]
            for rank in group:
                for other in receivers:
                    yield rank, other, whole / len(receivers)
                    if traffic.both_ways:
                        yield other, rank, whole / len(receivers)
        case other:
            raise AssertionError(other)


class Walk:
    """The path of a message: `hop` names the two ToRs that it crosses, or why it crosses none."""

    def __init__(self, site: Site, failures: FabricFailures) -> None:
        self._site = site
        self._failures = failures

    def hop(self, source: GpuId, destination: GpuId) -> tuple[EndpointId, EndpointId] | str:
        one, other = self._site.server_of.get(source), self._site.server_of.get(destination)
        if one is None or other is None or {one.id, other.id} & self._failures.servers:
            return "dropped"
        if one.id == other.id:
            return "nvlink"
        out, into = self._nic(one, one.nic(source)), self._nic(other, other.nic(destination))
        if out is None or into is None:
            return "dropped"
        rails = self._site.tor[one.tors[out]].rail, self._site.tor[other.tors[into]].rail
        if rails[0] != rails[1] and None not in rails:
            before, after = self._on_rail(one, rails[1]), self._on_rail(other, rails[0])
            if before:
                out = before[0]
            elif after:
                into = after[0]
        here, there = one.tors[out], other.tors[into]
        return "below" if here == there else (here, there)

    def _on_rail(self, server: Server, rail: int | None) -> list[int]:
        return [
            nic
            for nic, tor in enumerate(server.tors)
            if (server.id, nic) not in self._failures.nics and self._site.tor[tor].rail == rail
        ]

    def _nic(self, server: Server, nic: int) -> int | None:
        """Return the next healthy NIC, those on the same ToR first; for tests with at most one failed NIC per
        server."""
        count = len(server.tors)
        healthy = [other for other in range(count) if (server.id, other) not in self._failures.nics]
        if nic in healthy or not healthy:
            return nic if nic in healthy else None
        return min(healthy, key=lambda other: (server.tors[other] != server.tors[nic], (other - nic) % count))
