"""Measure the minimum latency with which the pauses of a job can be reported. They are read from shared memory by
polling and sent over TCP, without any decisions.

`python -m orchestrrl.lab.bench.echo STAMPS RANKS POLL_S` polls the file STAMPS, in which each rank stores the number of
its pauses and the start time of the last one (lab/demo/fabric_job.py). When all ranks have reached the same pause, the
program sends the latest of these start times to a socket on this host, which another process reads. On SIGTERM, the
program prints one line of JSON with all latencies in seconds, and exits.
"""

import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

MESSAGE = struct.Struct("=q")
NANO = 1e-9


def poll(words: memoryview, ranks: int, wire: socket.socket, poll_s: float) -> None:
    """Send the latest start time of each pause over the socket `wire` once all ranks have stored the pause in the
    shared memory `words`. Poll the memory every `poll_s` seconds until the process is terminated."""
    sent = 0
    while True:
        pauses = [words[2 * rank] for rank in range(ranks)]
        if pauses[0] > sent and pauses.count(pauses[0]) == ranks:
            wire.sendall(MESSAGE.pack(max(words[2 * rank + 1] for rank in range(ranks))))
            sent = pauses[0]
        else:
            time.sleep(poll_s)


def receive(wire: socket.socket) -> list[float]:
    """Receive messages until the other end is closed, and return their latencies in seconds."""
    taken_s: list[float] = []
    while message := wire.recv(MESSAGE.size, socket.MSG_WAITALL):
        now_ns = time.monotonic_ns()
        taken_s.append((now_ns - MESSAGE.unpack(message)[0]) * NANO)
    return taken_s


def _end(*_: object) -> None:
    sys.exit(0)


def main(stamps: Path, ranks: int, poll_s: float) -> None:
    with stamps.open("r+b") as file:
        words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    listener = socket.create_server(("127.0.0.1", 0))
    receiver = os.fork()
    if receiver == 0:
        wire = socket.create_connection(listener.getsockname())
        listener.close()
        sys.stdout.write(json.dumps(receive(wire)) + "\n")
        sys.stdout.flush()
        os._exit(0)
    wire, _ = listener.accept()
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    signal.signal(signal.SIGTERM, _end)
    try:
        poll(words, ranks, wire, poll_s)
    finally:
        wire.close()
        os.waitpid(receiver, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
