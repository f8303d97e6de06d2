"""TCP in front of a gRPC server, so that an emulator can break the connection that a call came by.

grpc.aio ends calls, not connections. The relay moves bytes, TLS or not, between a client's connection and one of its
own to the server, and knows a call's connection by the peer that the server sees.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from ocs_drivers.emulators.base import address_of


@dataclass(frozen=True, slots=True)
class RelayedConnection:
    session: int  # of the device: dead once that has restarted
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class TcpRelay:
    """`new_session` is asked for the number of the session that begins with a connection."""

    def __init__(self, new_session: Callable[[], int]) -> None:
        self._new_session = new_session
        self._connections: dict[int, RelayedConnection] = {}  # by our port towards the server
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._server_port = 0

    async def start(self, host: str, port: int, server_port: int) -> str:
        self._server_port = server_port
        self._listener = await asyncio.start_server(self._relay, host, port)
        return address_of(self._listener)

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections.values():
            connection.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def connection(self, peer: str) -> RelayedConnection | None:
        """By the peer of a call, `ipv4:127.0.0.1:PORT`; None if it is gone already."""
        port = peer.rpartition(":")[2]
        return self._connections.get(int(port)) if port.isdecimal() else None

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = self._new_session()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._server_port)
        port = upstream.get_extra_info("sockname")[1]
        connection = RelayedConnection(session, (writer, upstream))
        self._connections[port] = connection
        ways = [asyncio.ensure_future(_pump(reader, upstream)), asyncio.ensure_future(_pump(upstream_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            connection.abort()
            del self._connections[port]
            self._tasks.discard(task)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # the connection broke: so does the other
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
