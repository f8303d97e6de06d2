"""A process with a peer that only carries: `carrying_peer.py NAME TRANSPORT BYTES HELD_BYTES`.

It has the first HELD_BYTES of a shard of BYTES. It prints its address, reads the edges as one line of JSON, and prints
each of their reports on a line: edge, state, bytes, and whether the bytes held are correct. It exits when its standard
input ends.
"""

import json
import sys
import threading

from in_memory import InMemory

from orchestrrl.weights.orders import ArrivedBytes, CarryEdge, CarryEdges, EdgeEvent
from orchestrrl.weights.peer.carry import ThreadedCarrier
from orchestrrl.weights.transports.base import make_transport
from orchestrrl.weights.transports.conformance import pattern
from planner.model import PeerId


def main() -> None:
    name, transport, size, held = PeerId(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    whole = pattern(size)
    staged = InMemory(1, {"s": size})
    staged.write("s", 0, memoryview(whole)[:held])
    if held:
        staged.arrived("s", 0, held)
    line = threading.Lock()

    def tell(news: EdgeEvent | ArrivedBytes) -> None:
        if isinstance(news, ArrivedBytes):
            return
        there = size - sum(missing for ranges in staged.missing().values() for _, missing in ranges)
        is_right = bytes(staged.bytes["s"][:there]) == whole[:there]
        with line:
            print(json.dumps([news.edge, news.state, news.bytes, is_right, news.detail]), flush=True)

    with_bytes = make_transport(transport, "127.0.0.1")
    print(json.dumps(with_bytes.open()), flush=True)
    carrier = ThreadedCarrier(name, {transport: with_bytes}, tell)
    for order in sys.stdin:
        edges = tuple(CarryEdge(**each) for each in json.loads(order))
        carrier.carry(staged, CarryEdges(1, edges, chunk_bytes=65536, stall_s=20.0))
    carrier.close()
    with_bytes.close()
    print(json.dumps(["left", [each.name for each in threading.enumerate() if each.name.startswith("weights-")]]))


if __name__ == "__main__":
    main()
