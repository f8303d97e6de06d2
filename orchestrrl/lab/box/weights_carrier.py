"""The processes of a box's hosts that hold weights: `python -m orchestrrl.lab.box.weights_carrier SOCKET TRANSPORT
HOSTS`.

HOSTS is JSON: `[[PEER, ADDRESS, NAMESPACE], ...]`. What all need is imported once; then each is forked, enters its
host's network namespace, and carries what it is ordered by the product's own carrier and transport. They end with the
standard input of the first one. Over SOCKET, lines of JSON. Orders: `{"open": VERSION_MAP, "holds": [SHARD, ...],
"seed": 1}`, `{"carry": ORDER}`, `{"end": VERSION}`, `{"sum": true}`. Answers: who it is and where it listens, what
became of each edge, and of each order but `carry`.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import threading
from typing import Any

from pydantic import TypeAdapter

from orchestrrl.lab.box.namespaces import enter
from orchestrrl.lab.box.weights_memory import TestbedMemory
from orchestrrl.weights.model import VersionMap
from orchestrrl.weights.orders import NEWS, ArrivedBytes, CarryEdges, EdgeEvent
from orchestrrl.weights.peer.carry import ThreadedCarrier
from orchestrrl.weights.transports.base import make_transport
from planner.model import PeerId

MAP: TypeAdapter[VersionMap] = TypeAdapter(VersionMap)
CARRY: TypeAdapter[CarryEdges] = TypeAdapter(CarryEdges)


class CarrierLine:
    """To who gives the orders; may be used by several threads."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self.orders = self._socket.makefile("rb")
        self._turn = threading.Lock()

    def report(self, **what: Any) -> None:
        with self._turn:
            self._socket.sendall(json.dumps(what).encode() + b"\n")

    def news(self, each: EdgeEvent | ArrivedBytes) -> None:
        if isinstance(each, EdgeEvent):
            self.report(event=NEWS.dump_python(each, mode="json"))


def carry(path: str, me: str, address: str, name: str) -> None:
    """A host's life: until nobody gives orders any more."""
    transport = make_transport(name, address)
    line = CarrierLine(path)
    line.report(peer=me, address=transport.open())
    carrier = ThreadedCarrier(PeerId(me), {name: transport}, line.news)
    staged: TestbedMemory | None = None
    for order in line.orders:
        match json.loads(order):
            case {"open": document, "holds": holds, "seed": seed}:
                staged = TestbedMemory(MAP.validate_python(document), holds, seed)
                line.report(opened=True)
            case {"carry": document}:
                assert staged is not None, "carry before open"
                carrier.carry(staged, CARRY.validate_python(document))
            case {"end": version}:
                assert staged is not None, "end before open"
                carrier.end(version)
                staged.wipe()
                line.report(ended=True)
            case {"sum": True}:
                assert staged is not None, "sum before open"
                used = resource.getrusage(resource.RUSAGE_SELF)
                line.report(sha256=staged.sha256(), missing=staged.missing(), cpu_s=used.ru_utime + used.ru_stime)
    carrier.close()
    transport.close()


def main(path: str, name: str, hosts: str) -> None:
    children: list[int] = []
    for me, address, room in json.loads(hosts):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                enter(room)  # the whole process, which has no thread yet
                carry(path, me, address, name)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    while os.read(0, 4096):
        pass
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
