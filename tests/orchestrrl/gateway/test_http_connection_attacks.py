"""Malicious or failing clients: too much data, too slow, disconnected half-way. Memory and waits are bounded."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from orchestrrl.gateway.http import connections as module
from orchestrrl.gateway.http.connections import MOST_AHEAD_BYTES, HttpAnswer, HttpConnection, HttpRequest, HttpServer

DEADLINE_S = 120.0
LINE = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n"


def usual(body: bytes) -> bytes:
    return LINE + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


@dataclass
class Served:
    """A server that acts on the body: `wait` forever, `tidy` up after that, `large` answers; others are echoed."""

    harness: HttpServer
    port: int
    seen: list[bytes] = field(default_factory=list)
    tidied: int = 0

    @property
    def connection(self) -> HttpConnection:
        (connection,) = self.harness.connections
        return connection

    @property
    def unread_bytes(self) -> int:
        """Return the bytes written for all clients that are still in this process."""
        return sum(
            connection._transport.get_write_buffer_size()
            for connection in self.harness.connections
            if connection._transport is not None
        )

    async def connect(self, *, receive_bytes: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        client = socket.socket()
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=client)

    async def until_quiet(self) -> None:
        """Wait until no request has arrived for a while."""
        before = -1
        while before != len(self.seen):
            before = len(self.seen)
            await asyncio.sleep(0.1)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async def answer(request: HttpRequest, connection: HttpConnection) -> None:
        body = request.body
        fixture.seen.append(body)
        if body[:4] in (b"wait", b"tidy"):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.02)
                fixture.tidied += 1
        connection.whole(HttpAnswer(b"~" * 1_000_000 if body == b"large" else b"<" + body + b">"))

    harness = HttpServer(answer)
    fixture = Served(harness, await harness.listen("127.0.0.1", 0))
    yield fixture
    await harness.close()


async def read_large(reader: asyncio.StreamReader, answers: int) -> None:
    left_bytes = answers * 1_000_000
    while left_bytes:
        left_bytes -= (await reader.read(1 << 20)).count(b"~")


async def test_unread_answers_do_not_accumulate(served: Served) -> None:
    """A client that pipelines requests without reading is blocked, and receives all answers once it reads."""
    reader, writer = await served.connect(receive_bytes=4096)
    requests = 40
    writer.write(usual(b"large") * requests)
    async with asyncio.timeout(DEADLINE_S):
        await served.until_quiet()
        assert len(served.seen) < requests
        assert served.unread_bytes <= 1_100_000
        await read_large(reader, requests)
    assert len(served.seen) == requests
    writer.close()


async def test_pipelined_requests_do_not_accumulate(served: Served) -> None:
    _, writer = await served.connect()
    writer.write(usual(b"wait") + usual(b"x" * 1000) * 60_000)
    async with asyncio.timeout(DEADLINE_S):
        while not served.seen:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert served.connection._ahead_bytes <= MOST_AHEAD_BYTES + (1 << 18)  # asyncio reads this much at once
        writer.transport.abort()


@pytest.mark.parametrize(
    "part", [b"P", LINE, b"GET /metrics HTTP/1.1\r\n", b"SEARC", LINE + b"Content-Length: 5\r\n\r\nabcd"]
)
async def test_incomplete_request_is_refused_after_the_timeout(
    served: Served, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_WITHIN_S", 0.2)
    reader, writer = await served.connect()
    async with asyncio.timeout(DEADLINE_S):
        writer.write(usual(b"first"))
        assert (await reader.readuntil(b"<first>")).startswith(b"HTTP/1.1 200 ")
        for byte in part:  # the clock runs from the first byte, not from the last
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        while served.harness.connections:
            await asyncio.sleep(0.01)


async def test_idle_connection_has_no_timeout(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_WITHIN_S", 0.05)
    reader, writer = await served.connect()
    async with asyncio.timeout(DEADLINE_S):
        for number in range(3):
            request = usual(b"%d" % number)
            writer.write(request[:50])
            await asyncio.sleep(0.01)
            writer.write(request[50:])
            await reader.readuntil(b"<%d>" % number)
            await asyncio.sleep(0.1)
    writer.close()


@pytest.mark.parametrize("size", [4, 70_000, 1_000_000])
@pytest.mark.parametrize("is_followed", [False, True])
@pytest.mark.parametrize("half", [True, False])
async def test_half_closed_connection_cancels_its_request(
    served: Served, half: bool, is_followed: bool, size: int
) -> None:
    asked = b"tidy".ljust(size)
    _, writer = await served.connect()
    writer.write(usual(asked) + (usual(b"second") if is_followed else b""))
    async with asyncio.timeout(DEADLINE_S):
        while not served.seen:
            await asyncio.sleep(0.01)
        if half:
            writer.write_eof()
        else:
            writer.transport.abort()
        while not served.tidied or served.harness.connections:
            await asyncio.sleep(0.01)
    assert not served.harness.busy
    assert served.seen == [asked]  # its pipelined requests are not started
    writer.close()


async def test_request_cancelled_at_close_can_clean_up(served: Served) -> None:
    """The loss of a connection must not cancel its request a second time while the request is being cancelled."""
    _, writer = await served.connect()
    writer.write(usual(b"tidy"))
    async with asyncio.timeout(DEADLINE_S):
        while not served.seen:
            await asyncio.sleep(0.01)
        await served.harness.close()
    assert served.tidied == 1
    writer.close()


async def test_server_is_busy_while_an_answer_is_being_read(served: Served) -> None:
    reader, writer = await served.connect(receive_bytes=4096)
    async with asyncio.timeout(DEADLINE_S):
        writer.write(usual(b"large") * 10)
        while not served.unread_bytes:
            await asyncio.sleep(0.01)
        await served.until_quiet()
        assert served.harness.busy
        await read_large(reader, 10)
        while served.harness.busy:
            await asyncio.sleep(0.01)
    writer.close()


async def test_refused_client_that_reads_nothing_is_disconnected(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.1)
    _, writer = await served.connect()
    async with asyncio.timeout(DEADLINE_S):
        writer.write(b"nonsense\r\n\r\n")
        while served.harness.connections or not writer.transport.is_closing():
            writer.write(b"x" * 1000)
            await asyncio.sleep(0.01)


async def test_last_answers_on_a_full_connection_are_complete(served: Served) -> None:
    reader, writer = await served.connect(receive_bytes=4096)
    async with asyncio.timeout(DEADLINE_S):
        writer.write(usual(b"large") * 8 + b"GET /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        await served.until_quiet()
        answer = await reader.read()
        while not reader.at_eof():
            answer += await reader.read()
    assert answer.count(b"~") == 8_000_000
    assert answer.endswith(b"<>")


async def test_body_of_many_small_pieces_is_accepted(served: Served) -> None:
    reader, writer = await served.connect()
    body = bytes(range(256)) * 8
    async with asyncio.timeout(DEADLINE_S):
        for byte in usual(body):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await reader.readuntil(b">")).startswith(b"HTTP/1.1 200 ")
        assert served.seen == [body]
    writer.close()
