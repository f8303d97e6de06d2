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
from queue import SimpleQueue
from typing import Any

from pydantic import TypeAdapter

from orchestrrl.lab.box.namespaces import enter
from orchestrrl.lab.box.weights_memory import TestbedMemory
from orchestrrl.lab.testbed.ranks import Ranks, print_json
from orchestrrl.weights.model import VersionMap
from orchestrrl.weights.orders import ArrivedBytes, CarryEdges, EdgeEvent, EdgeState
from orchestrrl.weights.peer.carry import ThreadedCarrier
from orchestrrl.weights.transports.base import make_transport
from planner.model import PeerId

MAP: TypeAdapter[VersionMap] = TypeAdapter(VersionMap)
CARRY: TypeAdapter[CarryEdges] = TypeAdapter(CarryEdges)


class CarrierRank:
    """One host: its memory, and the carrier of its peer."""

    def __init__(self, peer: str, address: str, transport: str) -> None:
        self._transport = make_transport(transport, address)
        self.address = self._transport.open()
        self._ended: SimpleQueue[EdgeEvent] = SimpleQueue()
        self._carrier = ThreadedCarrier(PeerId(peer), {transport: self._transport}, self._on_news)

    def _on_news(self, news: EdgeEvent | ArrivedBytes) -> None:
        if isinstance(news, EdgeEvent) and news.state is not EdgeState.BEGAN:
            self._ended.put(news)

    def carry_out(self, order: dict[str, Any]) -> Any:
        match order:
            case {"open": document, "holds": holds, "seed": seed}:
                self._staged = TestbedMemory(MAP.validate_python(document), holds, seed)
            case {"carry": document}:
                return self._carry(CARRY.validate_python(document))
            case {"end": version}:
                self._carrier.end(version)
                self._staged.wipe()
            case {"sum": True}:
                return {"sha256": self._staged.sha256(), "missing": self._staged.missing()}
        return None

    def _carry(self, order: CarryEdges) -> dict[str, Any]:
        """Return when the last byte had arrived here, and which edges broke."""
        self._carrier.carry(self._staged, order)
        events = [self._ended.get() for _ in order.edges]
        broken = [f"edge {event.edge} broke: {event.detail}" for event in events if event.state is EdgeState.BROKEN]
        return {"ended_s": max(event.ended_s if event.is_receiver else 0.0 for event in events), "broken": broken}

    def close(self) -> None:
        self._carrier.close()
        self._transport.close()


def run_rank(transport: str, hosts: list[list[str]], number: int, line: Connection) -> None:
    peer, address, room = hosts[number]
    enter(room)  # the whole process, which has no thread yet
    rank = CarrierRank(peer, address, transport)
    line.send(rank.address)
    while (order := line.recv()) is not None:
        line.send(rank.carry_out(order))
    rank.close()


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
