"""Processes of a test bed. Each process has its own log and session. The caller can wait until a process is ready. All
processes are reliably stopped."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from orchestrrl.core.errors import Permanent
from orchestrrl.fleet.deployers.machine import log_tail

READY_WITHIN_S = 120.0
STOP_WITHIN_S = 15.0
ANSWER_WITHIN_S = 600.0
POLL_S = 0.02
REPOSITORY = Path(__file__).parents[3]
# Created by `make venv-vllm`; the vLLM of a GPU host can be used too.
VLLM_PYTHON = REPOSITORY / os.environ.get("ORCHESTRRL_VLLM_ENV", ".venv-vllm") / "bin" / "python"

Found = TypeVar("Found")


class LabProcess:
    """A program on this machine, started by `spawn` or `start`. Its output is written to NAME.out in `folder`, and its
    errors to NAME.log. If `one_log` is set, both are written to NAME.log. If `takes_input` is set, `request` writes a
    line to the program's input and reads the next line of its output.

    The program has its own session, so that Ctrl-C in a terminal reaches only the test bed, which then stops its
    processes.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        one_log: bool = False,
        takes_input: bool = False,
    ) -> None:
        self.name = name
        self.command = [str(word) for word in command]
        self.log_path = folder / f"{name}.log"
        self.out_path = self.log_path if one_log else folder / f"{name}.out"
        self.url = ""  # the first line of the output, set by `start`
        self._environment = {"PYTHONUNBUFFERED": "1", **(environment or {})}
        self._cwd = cwd
        self._takes_input = takes_input
        self._process: subprocess.Popen[bytes] | None = None
        self._read_bytes = 0  # bytes of the output that `next_line` has read
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        if self._process is None:
            self.spawn()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Start or restart the process. On a restart, the log is appended to and the output is truncated."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if self._process is None:
            self.log_path.unlink(missing_ok=True)
        self._read_bytes = 0
        with self.log_path.open("ab") as log, contextlib.ExitStack() as files:
            out = log if self.out_path == self.log_path else files.enter_context(self.out_path.open("wb"))
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE if self._takes_input else subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                cwd=self._cwd,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )

    async def start(self, within_s: float = READY_WITHIN_S) -> str:
        """Start the process and return the first line of its output, which becomes its `url`. If no line is printed
        within `within_s`, kill the process and raise Permanent."""
        self.spawn()
        with self.killed_on_failure():
            self.url = await self.next_line(within_s)
        return self.url

    def read_line(self) -> str | None:
        """Return the next complete line of the output without its newline, or None if no complete line is available
        yet."""
        with self.out_path.open("rb") as out:
            out.seek(self._read_bytes)
            line = out.readline()
        if not line.endswith(b"\n"):
            return None
        self._read_bytes += len(line)
        return line.decode(errors="replace").strip()

    async def next_line(self, within_s: float = READY_WITHIN_S) -> str:
        """Wait for the next line of the output and return it. Raises Permanent if the process ends first or prints no
        line within `within_s`."""

        async def line() -> str | None:
            return self.read_line()

        return await self.until(line, within_s)

    async def request(self, question: Mapping[str, Any], within_s: float = ANSWER_WITHIN_S) -> Any:
        """Write `question` to the process's input as a line of JSON, and return the JSON value of the next output line.
        Raises Permanent if the process ends or prints no line within `within_s`."""
        async with self._turn:
            self.send(question)
            return json.loads(await self.next_line(within_s))

    def send(self, message: Mapping[str, Any]) -> None:
        """Write `message` to the process's input as a line of JSON."""
        assert self.process.stdin is not None, f"{self.name} takes no input"
        with contextlib.suppress(BrokenPipeError):  # the process has ended; reading its output reports that
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    async def until(self, condition: Callable[[], Awaitable[Found | None]], within_s: float = READY_WITHIN_S) -> Found:
        """Wait until `condition` returns a true value, and return this value. Raises Permanent, with the end of the
        log, if the process ends or the wait exceeds `within_s`."""
        return await until(condition, f"{self.name} is ready", within_s, POLL_S, (self,))

    def check(self) -> None:
        """Raise Permanent, with the end of the log, if the process has ended."""
        if not self.running:
            raise Permanent(self.obituary(f"exited with status {self.process.returncode}"))

    def cpu_s(self) -> float:
        """Return the CPU time, in seconds, that all threads of the process have used since it started."""
        # The CPU clock of another process, see clock_getcpuclockid(3); the resolution of /proc is 10 ms.
        return time.clock_gettime(~self.pid << 3 | 2)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the whole session, as in a crash. A second call has no effect."""
        self._signal_all(signal.SIGKILL)
        self.process.wait()

    @contextlib.contextmanager
    def killed_on_failure(self) -> Iterator[None]:
        """Kill the whole session if the body of the `with` statement raises an exception or is cancelled."""
        try:
            yield
        except BaseException:
            self.kill()
            raise

    async def stop(self, grace_s: float = STOP_WITHIN_S) -> int:
        """Stop the process and return its exit status, or 0 if it was never started. If the process has an input, close
        it and wait up to `grace_s` for the processes of the session to end. Then send SIGTERM, wait up to `grace_s`
        again, and send SIGKILL to the whole session."""
        if self._process is None:
            return 0
        try:
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
                await self._gone(grace_s)
            self.signal(signal.SIGCONT)
            self._terminate()
            await self._gone(grace_s)
        finally:  # also if the clean-up is cancelled
            self._signal_all(signal.SIGKILL)
            status = self._process.wait()
        return status

    def _terminate(self) -> None:
        self.signal(signal.SIGTERM)

    async def _gone(self, within_s: float) -> None:
        """Wait until the session has no processes or `within_s` has passed."""
        deadline_s = time.monotonic() + within_s
        while (self.running or self._signal_all(0)) and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)

    def _signal_all(self, number: int) -> bool:
        """Send a signal to the process group. Return True on success, and False if the group has no processes."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def obituary(self, what: str) -> str:
        """Return an error message with the process's name, the event `what`, and the end of the log."""
        return f"{self.name} {what}; the end of {self.log_path}:\n{log_tail(self.log_path)}"


def command_of(*words: str | Path) -> list[str]:
    """Return the command line of an `orchestrrl` command in this Python environment."""
    return [sys.executable, "-m", "orchestrrl", *map(str, words)]


def flags_of(options: Mapping[str, object]) -> list[str]:
    """Return options as command-line flags. For example, `{"tick_s": 0.01}` gives `--tick-s 0.01`."""
    return [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def free_port() -> int:
    """Return a TCP port of this host that is currently free."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        return port


async def until(
    condition: Callable[[], Awaitable[Found | None]],
    what: str,
    within_s: float = READY_WITHIN_S,
    every_s: float = 0.1,
    processes: Sequence[LabProcess] = (),
) -> Found:
    """Wait until `condition` returns a true value, and return this value. Raises Permanent if one of `processes` ends
    or the wait exceeds `within_s`. If `processes` has a single process, the error includes the end of its log.
    Otherwise, the error after `within_s` begins with `what`, a description of the condition."""
    deadline_s = time.monotonic() + within_s
    while True:
        over = [process for process in processes if not process.running]
        if found := await condition():
            return found
        for process in over:
            process.check()
        if time.monotonic() > deadline_s:
            late = f"{what}: not within {within_s:g} s; see the logs"
            raise Permanent(processes[0].obituary("was not ready in time") if len(processes) == 1 else late)
        await asyncio.sleep(every_s)


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator["asyncio.Task[None]"]:
    """Run `work` while the body of the `async with` statement runs, then cancel it. An exception of `work` is raised at
    the end of the statement."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def meanwhile(repeated: Callable[[], Awaitable[None]], every_s: float) -> AsyncIterator[None]:
    """Call `repeated` every `every_s` seconds while the body of the `async with` statement runs."""

    async def repeat() -> None:
        while True:
            await repeated()
            await asyncio.sleep(every_s)

    async with beside(repeat()):
        yield
