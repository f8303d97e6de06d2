"""Servers as processes of their own, and the CPU time that they have used."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrrl.core.errors import Permanent

READY_WITHIN_S = 60.0
STOP_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class ListeningServer:
    """A server that listens."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        return process_cpu_s(self.pid)


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process since its start, over all its threads."""
    # Linux's clock of another process, as clock_getcpuclockid(3) makes it; /proc counts in 10 ms.
    return time.clock_gettime(~pid << 3 | 2)


@asynccontextmanager
async def serving(module: str, *arguments: str, log_path: Path) -> AsyncIterator[ListeningServer]:
    """Run a module that prints its URL first; it is ended on leaving. Raises Permanent when it prints none."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments, stdout=asyncio.subprocess.PIPE, stderr=log
        )
    assert process.stdout is not None
    try:
        line = b""
        with suppress(TimeoutError):
            line = await asyncio.wait_for(process.stdout.readline(), READY_WITHIN_S)
        if not line.startswith(b"http://"):
            raise Permanent(f"{module} did not start: see {log_path}")
        yield ListeningServer(line.decode().strip(), process.pid)
    finally:
        await end(process)


async def end(process: asyncio.subprocess.Process) -> None:
    """Ask it to stop, and stop it where it does not. One that has ended is left as it is."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_WITHIN_S)
    except TimeoutError:
        process.kill()
        await process.wait()
