"""The carrier processes of a box's hosts: `python -m orchestrrl.lab.box.weights_carrier TRANSPORT HOSTS`.

HOSTS is JSON: `[[PEER, ADDRESS, NAMESPACE], ...]`. Each host is a forked process that enters its network namespace and
carries out orders with OrchestrRL's carrier and transport. The first line of output contains the address of each peer.
Each line of standard input contains orders for some peers, `{PEER: ORDER, ...}`. When all these orders are done, the
response is a line `{PEER: RESPONSE, ...}` with all peers. The response of a peer without an order is null. The orders
are:

    {"open": VERSION_MAP, "holds": [SHARD, ...]}    create the files of a version, with the data of the shards held
    {"carry": EDGES}                                carry out the edges that begin or end at the peer
    {"sum": true}                                   compute the SHA-256 of the model file

The response to `open` is null. The response to `carry` is `{"ended_s": TIME, "broken": [TEXT, ...]}`: the Unix time at
which the last edge to the peer ended (0 if there is none), and the edges that failed. The response to `sum` is
`{"sha256": DIGEST, "missing": {SHARD: RANGES}}`, where RANGES are the bytes that the peer has not received.
"""

import hashlib
import json
import random
import shutil
import sys
from collections.abc import Collection
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pydantic import TypeAdapter

from orchestrrl.lab.box.namespaces import enter
from orchestrrl.lab.testbed.ranks import Ranks, print_json
from orchestrrl.weights.model import MODEL_FILE, VersionMap
from orchestrrl.weights.orders import ArrivedBytes, CarryEdges, EdgeEvent, EdgeState, OpenVersion
from orchestrrl.weights.peer.carry import ThreadedCarrier
from orchestrrl.weights.peer.staged import StagedVersion
from orchestrrl.weights.transports.base import make_transport
from planner.model import PeerId

FOLDER = Path("/run/weights")  # in memory, inside the box's mount namespace
MAP: TypeAdapter[VersionMap] = TypeAdapter(VersionMap)
CARRY: TypeAdapter[CarryEdges] = TypeAdapter(CarryEdges)


def opened(folder: Path, map: VersionMap, holds: Collection[str]) -> StagedVersion:
    """Create the files of the version `map` in `folder`, and fill the shards in `holds` with data. Files of an earlier
    version are deleted."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    staged = StagedVersion(folder, OpenVersion(map))
    for shard in map.shards:
        if shard.id in holds:
            staged.write(shard.id, 0, memoryview(random.Random(shard.id).randbytes(shard.bytes)))
            staged.arrived(shard.id, 0, shard.bytes)
    return staged


def sha256_of(folder: Path) -> str:
    """Return the SHA-256 of the model file in a version's folder, in hexadecimal."""
    with (folder / MODEL_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run_rank(transport_name: str, hosts: list[list[str]], number: int, line: Connection) -> None:
    peer, address, room = hosts[number]
    enter(room)  # moves the whole process, which has only this thread
    transport = make_transport(transport_name, address)
    line.send(transport.open())
    ended: SimpleQueue[EdgeEvent] = SimpleQueue()

    def on_news(news: EdgeEvent | ArrivedBytes) -> None:
        if isinstance(news, EdgeEvent) and news.state is not EdgeState.BEGAN:
            ended.put(news)

    carrier = ThreadedCarrier(PeerId(peer), {transport_name: transport}, on_news)
    staged: StagedVersion | None = None
    while (order := line.recv()) is not None:
        if "open" in order:
            map = MAP.validate_python(order["open"])
            carrier.end(map.version)
            staged = opened(FOLDER / peer, map, order["holds"])
        line.send(None if staged is None else _carry_out(order, carrier, ended, staged))
    carrier.close()
    transport.close()


def _carry_out(
    order: dict[str, Any], carrier: ThreadedCarrier, ended: "SimpleQueue[EdgeEvent]", staged: StagedVersion
) -> Any:
    match order:
        case {"carry": document}:
            edges = CARRY.validate_python(document)
            carrier.carry(staged, edges)
            events = [ended.get() for _ in edges.edges]
            broken = [f"edge {event.edge} broke: {event.detail}" for event in events if event.state is EdgeState.BROKEN]
            return {"ended_s": max(event.ended_s if event.is_receiver else 0.0 for event in events), "broken": broken}
        case {"sum": True}:
            return {"sha256": sha256_of(staged.folder), "missing": staged.missing()}
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
