"""Keep child processes running: start them, restart those that end, relay their output, and stop them in order."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from orchestrrl.cli.up.children import ChildCommand
from orchestrrl.cli.up.restarts import count_failures, restart_pause_s
from orchestrrl.core.clock import Clock, until_set
from orchestrrl.core.errors import Permanent

BOUND_PROCESS = str(Path(__file__).with_name("bound_process.py"))
OUTPUT_WITHIN_S = 1.0  # to read what remains of the output of a process that has ended
READ_BYTES = 1 << 16

Log = Callable[[str, str], None]  # the name of a process and a line


class ChildProcess(Protocol):
    """The methods and attributes of asyncio.subprocess.Process that the supervisor uses."""

    stdout: asyncio.StreamReader | None
    stderr: asyncio.StreamReader | None

    @property
    def returncode(self) -> int | None: ...

    def send_signal(self, signal: int) -> None: ...

    async def wait(self) -> int: ...


Spawn = Callable[[Sequence[str]], Awaitable[ChildProcess]]


async def spawn(words: Sequence[str]) -> asyncio.subprocess.Process:
    """Start a program in a session of its own, so that Ctrl-C reaches only this process. When this process ends, even
    by SIGKILL, the program receives SIGTERM."""
    bound = (sys.executable, "-I", "-S", BOUND_PROCESS, str(os.getpid()), *words)
    null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*bound, stdin=null, stdout=pipe, stderr=pipe, start_new_session=True)


class SupervisedProcess:
    """Runs one child process, and restarts it when it ends. `ready` is set when the process is ready for the first
    time."""

    def __init__(self, command: ChildCommand, log: Log, clock: Clock, spawn: Spawn = spawn) -> None:
        self._command = command
        self._log = log
        self._clock = clock
        self._spawn = spawn
        self._process: ChildProcess | None = None
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.ready = asyncio.Event()

    def start(self) -> "asyncio.Task[None]":
        """Start the process. The returned task runs until `stop` is called. It raises Permanent if the process ends
        before it is ready for the first time, or cannot be kept running."""
        self._task = asyncio.create_task(self._run())
        return self._task

    async def stop(self) -> None:
        """Stop the process: send SIGTERM, and SIGKILL if it does not exit in time."""
        if self._task is None:
            return
        self._stopping.set()
        self._signal(signal.SIGTERM)
        await until_set(self._clock, asyncio.Event(), self._command.stop_within_s, self._task)
        if not self._task.done():
            self._log("up", f"the {self._command.name} is killed, because it did not exit in time")
            self.kill()
            await asyncio.wait({self._task})

    def kill(self) -> None:
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _run(self) -> None:
        name, failures = self._command.name, 0
        while True:
            started_s = self._clock.now_s()
            end = await self._run_once()
            if self._stopping.is_set():
                return
            if not self.ready.is_set():
                raise Permanent(f"the {name} {end} before it was ready")
            failures = count_failures(failures, self._clock.now_s() - started_s)
            pause_s = restart_pause_s(failures)
            if pause_s is None:
                raise Permanent(f"the {name} {end}, for the {failures}th time in succession")
            self._log("up", f"the {name} {end}; it is restarted in {pause_s:g} s")
            await until_set(self._clock, self._stopping, pause_s)
            if self._stopping.is_set():
                return

    async def _run_once(self) -> str:
        """Run the process until it ends, and return how it ended."""
        try:
            process = self._process = await self._spawn(self._command.words)
        except OSError as error:
            return f"cannot be started ({error})"
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        if not self._command.prints_address:
            self.ready.set()
        relays = {
            asyncio.create_task(self._relay(process.stdout, self._on_output)),
            asyncio.create_task(self._relay(process.stderr, lambda line: self._log(self._command.name, line))),
        }
        status = await process.wait()
        await asyncio.wait(relays, timeout=OUTPUT_WITHIN_S)
        for relay in relays:  # another process may hold the pipe open
            relay.cancel()
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def _on_output(self, line: str) -> None:
        self.ready.set()
        self._log(self._command.name, line)

    async def _relay(self, reader: asyncio.StreamReader | None, on_line: Callable[[str], None]) -> None:
        assert reader is not None, "the process is started with pipes"
        rest = b""
        while piece := await reader.read(READ_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                on_line(line.decode(errors="replace"))
        if rest:
            on_line(rest.decode(errors="replace"))


async def _wait_for(event: asyncio.Event, tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Wait until the event is set. If one of the tasks fails before, raise its exception."""
    waiting = asyncio.create_task(event.wait())
    try:
        done, _ = await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    for task in done:
        task.result()


async def keep_running(processes: Sequence[SupervisedProcess], on_stop: Callable[[], None] = lambda: None) -> None:
    """Run the processes until cancelled. Then call `on_stop` and stop them, one after the other, in the given order.
    They start in the reverse order, each when the one before is ready. If one of them cannot be kept running, stop all
    and raise Permanent. If the stop is cancelled, kill them."""
    tasks: list[asyncio.Task[None]] = []
    try:
        for process in reversed(processes):
            tasks.append(process.start())
            await _wait_for(process.ready, tasks)
        await _wait_for(asyncio.Event(), tasks)
    except asyncio.CancelledError:
        on_stop()
        raise
    finally:
        try:
            for process in processes:
                await process.stop()
        finally:
            for process in processes:
                process.kill()
