"""A gateway as a process of its own, as operators run it."""

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
    """Where a gateway has its operator API."""
    async with http.get(url + "/version") as response:
        return str((await response.json())["operator_url"])


class GatewayProcess(LabProcess):
    def __init__(self, log_path: Path, arguments: list[str], port: int = 0) -> None:
        command = command_of("gateway", "--listen", f"127.0.0.1:{port}", *arguments)
        super().__init__(log_path.stem, command, log_path.parent)

    async def stop(self, grace_s: float = 60.0) -> int:
        return await super().stop(grace_s)


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
    starting = [start_simulated(name, log_dir=log_dir, arguments=arguments) for name in ("e0", "e1")]
    async with all_started(starting) as engines:
        yield engines
