"""Helpers that run a gateway as a process, like an operator."""

import functools
import itertools
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from orchestrrl.lab.testbed.engines import LocalEngine, all_started, start_simulated
from orchestrrl.lab.testbed.processes import LabProcess, command_of


async def operator_url(http: aiohttp.ClientSession, url: str) -> str:
    """Return the URL of a gateway's operator API."""
    async with http.get(url + "/version") as response:
        return str((await response.json())["operator_url"])


class GatewayProcess(LabProcess):
    def __init__(self, log_path: Path, arguments: list[str], port: int = 0) -> None:
        command = command_of("gateway", "--listen", f"127.0.0.1:{port}", *arguments)
        super().__init__(log_path.stem, command, log_path.parent)

    async def stop(self, grace_s: float = 60.0) -> int:
        return await super().stop(grace_s)


# Below the kernel's ephemeral ports, so that the kernel does not assign these before they are bound.
PORTS = range(31_000, 32_700)
BLOCK = 100  # one block per process, since tests run in parallel


@functools.cache
def _block() -> tuple[socket.socket, Iterator[int]]:
    """Reserve a block of ports for the lifetime of this process. Returns the socket on its first port and a cycle of
    the other ports."""
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
    """Return a free port, a different one at each call. It may be bound later."""
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
    """Start the simulated engines e0 and e1."""
    starting = [start_simulated(name, log_dir=log_dir, arguments=arguments) for name in ("e0", "e1")]
    async with all_started(starting) as engines:
        yield engines
