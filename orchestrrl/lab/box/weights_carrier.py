"""The processes of a box's hosts that hold weights: `python -m orchestrrl.lab.box.weights_carrier TRANSPORT HOSTS`.

HOSTS is JSON: `[[PEER, ADDRESS, NAMESPACE], ...]`. Each host is a rank that enters its network namespace, and carries
what it is ordered by the product's own carrier and transport. The first line of output is the address of each peer.
Each line of standard input has an order for some peers, `{PEER: ORDER, ...}`, and is answered with a line,
`{PEER: ANSWER, ...}`, once all of them are done. Orders: `{"open": VERSION_MAP, "holds": [SHARD, ...], "seed": 1}`,
`{"carry": ORDER}`, `{"end": VERSION}`, `{"sum": true}`.
"""

import hashlib
import json
import random
import sys
from collections.abc import Collection
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from pydantic import TypeAdapter

from orchestrrl.lab.box.namespaces import enter
from orchestrrl.lab.testbed.ranks import Ranks, print_json
from orchestrrl.lab.weights_in_memory import BlockingCarrier, InMemory
from orchestrrl.weights.model import VersionMap
from orchestrrl.weights.orders import CarryEdges, EdgeState
from planner.model import PeerId

MAP: TypeAdapter[VersionMap] = TypeAdapter(VersionMap)
CARRY: TypeAdapter[CarryEdges] = TypeAdapter(CarryEdges)


class TestbedMemory(InMemory):
    """`holds`: shards that are there from the start, of random bytes that `seed` and their names say."""

    def __init__(self, map: VersionMap, holds: Collection[str], seed: int) -> None:
        whole = {s.id: content(seed, s.id, s.bytes) if s.id in holds else s.bytes for s in map.shards}
        super().__init__(map.version, whole)
        self.map = map
        self.received = tuple(shard.id for shard in map.shards if shard.id not in holds)

    def sha256(self) -> str:
        """Of all shards, one behind the other."""
        found = hashlib.sha256()
        for shard in self.map.shards:
            found.update(self.bytes[shard.id])
        return found.hexdigest()


def content(seed: int, shard: str, size: int) -> bytes:
    return random.Random(f"{seed}/{shard}").randbytes(size)


def sha256_of(map: VersionMap, seed: int) -> str:
    """What `TestbedMemory.sha256` is once all has arrived."""
    found = hashlib.sha256()
    for shard in map.shards:
        found.update(content(seed, shard.id, shard.bytes))
    return found.hexdigest()


def run_rank(transport: str, hosts: list[list[str]], number: int, line: Connection) -> None:
    peer, address, room = hosts[number]
    enter(room)  # the whole process, which has no thread yet
    carrier = BlockingCarrier(PeerId(peer), address, (transport,))
    line.send(carrier.addresses[transport])
    staged: TestbedMemory | None = None
    while (order := line.recv()) is not None:
        if "open" in order:
            staged = TestbedMemory(MAP.validate_python(order["open"]), order["holds"], order["seed"])
        line.send(None if staged is None else _carry_out(order, carrier, staged))
    carrier.close()


def _carry_out(order: dict[str, Any], carrier: BlockingCarrier, staged: TestbedMemory) -> Any:
    match order:
        case {"carry": document}:
            events = carrier.carry(staged, CARRY.validate_python(document))
            broken = [f"edge {event.edge} broke: {event.detail}" for event in events if event.state is EdgeState.BROKEN]
            return {"ended_s": max(event.ended_s if event.is_receiver else 0.0 for event in events), "broken": broken}
        case {"end": version}:
            carrier.end(version)
            staged.wipe(staged.received)
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
