"""Tests of killing a peer that forwards bytes: both neighbours report it, keep what they have, and continue."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("carrying_peer.py")
SIZE, HALF = 4_000_000, 2_031_616  # whole chunks of it are held

pytestmark = pytest.mark.timeout(240)


class Process:
    def __init__(self, python: str, name: str, transport: str, held: int) -> None:
        self.name = name
        self.popen = subprocess.Popen(
            [python, "-X", "faulthandler", PROGRAM, name, transport, str(SIZE), str(held)],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address: str = ""

    def started(self) -> None:
        """Wait until all processes have started, in parallel, since importing Torch is slow."""
        self.address = self.next_line()

    def next_line(self) -> Any:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"{self.name} has ended: {self.popen.wait()}"
        return json.loads(line)

    def until(self, edge: str, state: str) -> list[Any]:
        while (message := self.next_line())[:2] != [edge, state]:
            assert message[1] == "began"
        return list(message)

    def order(self, *edges: dict[str, Any]) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(edges) + "\n")
        self.popen.stdin.flush()

    def leave(self) -> None:
        """Make a peer exit, and check that nothing of it is left."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        assert self.next_line() == ["left", []]
        assert self.popen.wait() == 0


@contextmanager
def process(python: str, name: str, transport: str, held: int) -> Iterator[Process]:
    made = Process(python, name, transport, held)
    try:
        yield made
    finally:
        made.popen.kill()
        made.popen.wait()
        for stream in (made.popen.stdin, made.popen.stdout):
            if stream is not None and not stream.closed:
                stream.close()


def test_peer_in_the_middle_of_a_chain_is_killed() -> None:
    kill_the_middle_of_a_chain(sys.executable, "tcp")


def kill_the_middle_of_a_chain(python: str, transport: str) -> None:
    with ExitStack() as stack:
        # The first has half of it and waits for the rest, so that the chain is in its middle at any speed.
        first, whole, middle, last = (
            stack.enter_context(process(python, name, transport, held))
            for name, held in (("first", HALF), ("whole", SIZE), ("middle", 0), ("last", 0))
        )

        for peer in (first, whole, middle, last):
            peer.started()

        def edge(name: str, src: Process, dst: Process, offset: int, size: int) -> dict[str, Any]:
            ends = {"src": src.name, "dst": dst.name, "transport": transport, "address": dst.address}
            return {"id": name, "shard": "s", "offset": offset, "bytes": size, **ends}

        one, two = edge("one", first, middle, 0, SIZE), edge("two", middle, last, 0, SIZE)
        for peer, edges in ((first, [one]), (middle, [one, two]), (last, [two])):
            peer.order(*edges)
        last.until("two", "began")
        os.kill(middle.popen.pid, signal.SIGKILL)
        broken = last.until("two", "broken")
        assert 0 <= broken[2] <= HALF
        assert broken[3], "what has arrived is not what was sent"
        assert first.until("one", "broken")[3]
        rest = edge("rest", whole, last, broken[2], SIZE - broken[2])
        for peer in (whole, last):
            peer.order(rest)
        done = last.until("rest", "done")
        assert done[2:4] == [SIZE - broken[2], True]
        assert whole.until("rest", "done")[3]
        for peer in (first, whole, last):
            peer.leave()
