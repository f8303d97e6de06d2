"""The processes of a box's hosts that hold weights: `python -m orchestrrl.lab.box.weights_carrier TRANSPORT HOSTS`.

HOSTS is JSON: `[[PEER, ADDRESS, NAMESPACE], ...]`. Each host is a rank that enters its network namespace, and carries
what it is ordered by the product's own carrier and transport. The first line of output is the address of each peer.
Each line of standard input has an order for some peers, `{PEER: ORDER, ...}`, and is answered with a line,
`{PEER: ANSWER, ...}`, once all of them are done. Orders: `{"open": VERSION_MAP, "holds": [SHARD, ...], "seed": 1}`,
`{"carry": ORDER}`, `{"end": VERSION}`, `{"sum": true}`.
"""

import json
import sys
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from pydantic import TypeAdapter

from orchestrrl.lab.box.namespaces import enter
from orchestrrl.lab.box.weights_memory import TestbedMemory
from orchestrrl.lab.testbed.ranks import Ranks, print_json
from orchestrrl.lab.weights_in_memory import BlockingCarrier
from orchestrrl.weights.model import VersionMap
from orchestrrl.weights.orders import CarryEdges, EdgeState
from planner.model import PeerId

MAP: TypeAdapter[VersionMap] = TypeAdapter(VersionMap)
CARRY: TypeAdapter[CarryEdges] = TypeAdapter(CarryEdges)


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
