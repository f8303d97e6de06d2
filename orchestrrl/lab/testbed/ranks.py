"""Ranks of a test bed: processes forked from a parent that has imported their modules. A pipe connects each rank to the
parent.

The module uses only the standard library, because programs that start ranks also run without OrchestrRL's dependencies.
"""

import contextlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

FORK = multiprocessing.get_context("fork")
STOP_WITHIN_S = 10.0


class Ranks:
    """A group of processes that run `work(rank, line)`, where `line` is a pipe to the parent. Methods that receive
    messages raise EOFError if a rank has ended."""

    def __init__(self, count: int, work: Callable[[int, Connection], None]) -> None:
        self._lines: list[Connection] = []
        self._processes: list[ForkProcess] = []
        for rank in range(count):
            ours, theirs = FORK.Pipe()
            # A rank inherits the pipes of the ranks before it: if this process dies, ranks end from last to first.
            process = FORK.Process(target=_forked, args=(work, rank, ours, theirs), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def receive(self) -> list[Any]:
        """Wait for the next message of each rank, and return the messages in the order of ranks."""
        return [line.recv() for line in self._lines]

    def ask(self, order: object) -> list[Any]:
        """Send the same order to all ranks and return their responses in the order of ranks."""
        return self.ask_each([order] * len(self._lines))

    def ask_each(self, orders: Sequence[object]) -> list[Any]:
        """Send each rank its own order and return the responses in the order of ranks."""
        for line, order in zip(self._lines, orders, strict=True):
            line.send(order)
        return self.receive()

    def stop(self) -> list[int | None]:
        """Send None to all ranks as the order to exit, kill the ranks that do not exit in time, and return the exit
        statuses."""
        for line in self._lines:
            with contextlib.suppress(OSError):  # the rank has already ended
                line.send(None)
        for process in self._processes:
            process.join(STOP_WITHIN_S)
            if process.is_alive():
                process.kill()
                process.join()
        return [process.exitcode for process in self._processes]


def _forked(work: Callable[[int, Connection], None], rank: int, ours: Connection, theirs: Connection) -> None:
    ours.close()
    work(rank, theirs)


def print_json(value: object) -> None:
    """Print a value as a line of JSON, and flush standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
