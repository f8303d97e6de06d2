"""The processes of a box's hosts that hold weights: `python -m orchestrrl.lab.box.weights_carrier TRANSPORT HOSTS`.

HOSTS is JSON: `[[PEER, ADDRESS, NAMESPACE], ...]`. Each host is a rank that enters its network namespace, and carries
what it is ordered by the product's own carrier and transport. The first line of output is the address of each peer.
Each line of standard input has an order for some peers, `{PEER: ORDER, ...}`, and is answered with a line,
`{PEER: ANSWER, ...}`, once all of them are done. Orders: `{"open": VERSION_MAP, "holds": [SHARD, ...], "seed": 1}`,
`{"carry": ORDER}`, `{"end": VERSION}`, `{"sum": true}`.
"""

import ctypes
import hashlib
import json
import random
import sys
import threading
from collections.abc import Collection, Mapping
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from pydantic import TypeAdapter

from orchestrrl.lab.box.namespaces import enter
from orchestrrl.lab.testbed.ranks import Ranks, print_json
from orchestrrl.weights.model import Range, ShardMap, VersionMap
from orchestrrl.weights.orders import ArrivedBytes, CarryEdges, EdgeEvent, EdgeState
from orchestrrl.weights.peer.carry import ThreadedCarrier
from orchestrrl.weights.transports.base import make_transport
from planner.model import PeerId
from planner.sync_tree.ranges import ByteRanges

MAP: TypeAdapter[VersionMap] = TypeAdapter(VersionMap)
CARRY: TypeAdapter[CarryEdges] = TypeAdapter(CarryEdges)


class InMemory:
    """A version in memory: shards of these bytes or, where only a size is given, to be received. What peers hold is in
    files (weights/peer/staged.py)."""

    def __init__(self, version: int, shards: Mapping[str, bytes | int]) -> None:
        self.bytes = {name: bytearray(what) for name, what in shards.items()}
        maps = tuple(ShardMap(name, len(held), ()) for name, held in self.bytes.items())
        self.map = VersionMap(version, (), maps, block_bytes=1)
        self._received = [name for name, what in shards.items() if isinstance(what, int)]
        self._there = {name: ByteRanges() for name in shards}
        self._changed = threading.Condition()
        for name in shards.keys() - set(self._received):
            self._there[name].add(0, len(self.bytes[name]))

    def wipe(self) -> None:
        """Overwrite all that was received with zeros, and forget it."""
        for name in self._received:
            held = self.bytes[name]
            ctypes.memset((ctypes.c_char * len(held)).from_buffer(held), 0, len(held))
        with self._changed:
            self._there |= {name: ByteRanges() for name in self._received}

    def view(self, shard: str, offset: int, size: int) -> memoryview | None:
        return memoryview(self.bytes[shard])[offset : offset + size]

    def read(self, shard: str, offset: int, into: memoryview) -> None:
        into[:] = memoryview(self.bytes[shard])[offset : offset + len(into)]

    def write(self, shard: str, offset: int, data: memoryview) -> None:
        memoryview(self.bytes[shard])[offset : offset + len(data)] = data

    def arrived(self, shard: str, offset: int, size: int) -> None:
        with self._changed:
            self._there[shard].add(offset, size)
            self._changed.notify_all()

    def wait(self, shard: str, offset: int, size: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._there[shard].covers(offset, size), timeout_s)

    def missing(self) -> dict[str, tuple[Range, ...]]:
        with self._changed:
            gaps = {name: there.gaps(len(self.bytes[name])) for name, there in self._there.items()}
        return {name: ranges for name, ranges in gaps.items() if ranges}

    def sha256(self) -> str:
        """Return the sum of all shards, one behind the other."""
        found = hashlib.sha256()
        for held in self.bytes.values():
            found.update(held)
        return found.hexdigest()


def memory_of(map: VersionMap, seed: int, holds: Collection[str]) -> InMemory:
    """Return a version of which `holds` are there from the start, of random bytes that `seed` and their names give."""

    def content(shard: ShardMap) -> bytes:
        return random.Random(f"{seed}/{shard.id}").randbytes(shard.bytes)

    return InMemory(map.version, {s.id: content(s) if s.id in holds else s.bytes for s in map.shards})


def run_rank(transport_name: str, hosts: list[list[str]], number: int, line: Connection) -> None:
    peer, address, room = hosts[number]
    enter(room)  # the whole process, which has no thread yet
    transport = make_transport(transport_name, address)
    line.send(transport.open())
    ended: SimpleQueue[EdgeEvent] = SimpleQueue()

    def on_news(news: EdgeEvent | ArrivedBytes) -> None:
        if isinstance(news, EdgeEvent) and news.state is not EdgeState.BEGAN:
            ended.put(news)

    carrier = ThreadedCarrier(PeerId(peer), {transport_name: transport}, on_news)
    staged: InMemory | None = None
    while (order := line.recv()) is not None:
        if "open" in order:
            staged = memory_of(MAP.validate_python(order["open"]), order["seed"], order["holds"])
        line.send(None if staged is None else _carry_out(order, carrier, ended, staged))
    carrier.close()
    transport.close()


def _carry_out(
    order: dict[str, Any], carrier: ThreadedCarrier, ended: "SimpleQueue[EdgeEvent]", staged: InMemory
) -> Any:
    match order:
        case {"carry": document}:
            edges = CARRY.validate_python(document)
            carrier.carry(staged, edges)
            events = [ended.get() for _ in edges.edges]
            broken = [f"edge {event.edge} broke: {event.detail}" for event in events if event.state is EdgeState.BROKEN]
            return {"ended_s": max(event.ended_s if event.is_receiver else 0.0 for event in events), "broken": broken}
        case {"end": version}:
            carrier.end(version)
            staged.wipe()
        case {"sum": True}:
            return {"sha256": staged.sha256(), "missing": staged.missing()}
    return None


def main(transport: str, text: str) -> None:
    hosts: list[list[str]] = json.loads(text)
    ranks, peers = Ranks(len(hosts), partial(run_rank, transport, hosts)), [peer for peer, *_ in hosts]
    print_json(dict(zip(peers, ranks.receive(), strict=True)))
    for line in sys.stdin:
        orders = json.loads(line)
        answers = ranks.ask_each([orders.get(peer, {}) for peer in peers])
        print_json(dict(zip(peers, answers, strict=True)))
    ranks.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
