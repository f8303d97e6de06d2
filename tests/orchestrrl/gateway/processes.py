"""A gateway as a process of its own, as operators run it."""

import asyncio
import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from orchestrrl.lab.deployers.attended import LocalEngine, start_simulated


async def operator_url(http: aiohttp.ClientSession, url: str) -> str:
    """Where a gateway has its operator API."""
    async with http.get(url + "/version") as response:
        return str((await response.json())["operator_url"])


class GatewayProcess:
    """`start` waits for the URL that the process prints; `kill` and `stop` end it."""

    def __init__(self, log_path: Path, arguments: list[str], port: int = 0) -> None:
        self._log_path = log_path
        self._command = [sys.executable, "-m", "orchestrrl", "gateway", "--listen", f"127.0.0.1:{port}", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    async def start(self) -> str:
        self.url = (await asyncio.to_thread(self._spawn)).strip()
        assert self.url.startswith("http://"), self._log_path.read_text()
        return self.url

    async def start_and_read(self, lines: int) -> list[str]:
        """The first lines of its output, without their ends."""
        await self.start()
        assert self._process is not None
        assert self._process.stdout is not None
        more = [await asyncio.to_thread(self._process.stdout.readline) for _ in range(lines - 1)]
        return [self.url, *(line.decode().strip() for line in more)]

    def _spawn(self) -> str:
        """The first line of its output."""
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    async def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)
        return await asyncio.to_thread(self._process.wait, 60)


# Below those that the kernel gives to whoever asks for any: nobody is given one of these before it is bound.
PORTS = range(31_000, 32_700)
BLOCK = 100  # a process's own: tests run side by side


@functools.cache
def _block() -> tuple[socket.socket, Iterator[int]]:
    """The first port of a block, which this process holds as long as it lives, and the others in turn."""
    for first in PORTS[::BLOCK]:
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", first))
        except OSError:
            holder.close()
            continue
        return holder, itertools.cycle(range(first + 1, first + BLOCK))
    raise AssertionError(f"no block of ports is free in {PORTS}")


def free_port() -> int:
    """One that nobody has. It may be bound later, and is another each time."""
    _, ports = _block()
    for port in itertools.islice(ports, BLOCK):
        with socket.socket() as holder:
            try:
                holder.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free")


@asynccontextmanager
async def two_engines(log_dir: Path, *arguments: str) -> AsyncIterator[list[LocalEngine]]:
    """Simulated ones, e0 and e1."""
    names = ("e0", "e1")
    started = await asyncio.gather(*(start_simulated(n, log_dir=log_dir, arguments=arguments) for n in names))
    yield list(started)
    for engine in started:
        engine.kill()
