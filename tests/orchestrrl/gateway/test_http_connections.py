"""The door: what it takes for usual, that it hands everything else over whole, and that slow clients lose nothing."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.http.connections import (
    MOST_BODY_BYTES,
    HttpConnection,
    HttpServer,
    RequestHead,
    may_be_a_head,
    read_head,
)

DEADLINE_S = 120.0
LINE = b"POST /v1/completions HTTP/1.1"
USUAL = LINE + b"\r\nHost: h\r\nX-Request-Id:  r1 \r\nx-tag: \xc3\xa9\r\nConnection: Keep-Alive\r\nContent-Length: 4"


def test_a_usual_head_is_read() -> None:
    assert read_head(USUAL) == RequestHead(CompletionEndpoint.COMPLETIONS, "r1", "", "é", 4)
    chat = read_head(b"POST /v1/chat/completions HTTP/1.1\r\nhost:h\r\ncontent-length:0")
    assert chat == RequestHead(CompletionEndpoint.CHAT, "", "", "", 0)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: h\r\nContent-Length: 0",
        b"POST /v1/completions HTTP/1.0\r\nHost: h\r\nContent-Length: 4",
        b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: h\r\nContent-Length: 4",
        LINE + b"\r\nHost: h",
        LINE + b"\r\nContent-Length: 4",
        LINE + b"\r\nHost: h\r\nContent-Length: +4",
        LINE + b"\r\nHost: h\r\nContent-Length: 4\r\nContent-Length: 5",
        LINE + b"\r\nHost: h\r\nContent-Length: %d" % (MOST_BODY_BYTES + 1),
        LINE + b"\r\nHost: h\r\nContent-Length: 4\r\nConnection: close",
        LINE + b"\r\nHost: h\r\nContent-Length: 4\r\nTransfer-Encoding: chunked",
        LINE + b"\r\nHost: h\r\nContent-Length: 4\r\nExpect: 100-continue",
        LINE + b"\r\nHost: h\r\nContent-Length: 4\r\nContent-Encoding: gzip",
        LINE + b"\r\nHost: h\r\nContent-Length: 4\r\nX-Tag: a\r\n folded",
        LINE + b"\r\nHost: h\r\nContent-Length: 4\r\nX-Tag : a",
        LINE + b"\r\nHost: h\r\nContent-Length: 4\r\nX-Tag: a\r\nX-Tag: b",
        LINE + b"\r\nHost: h\r\nContent-Length: 4\r\nX-Tag: a\nEvil: b",
        LINE + b"\r\nHost: h\r\nContent-Length: 4\r\nX-Tag: a\0",
        LINE + b"\r\nHost: h\r\nContent-Length: 4\r\nno colon",
    ],
)
def test_what_is_unusual_is_left_to_others(head: bytes) -> None:
    assert read_head(head) is None


@given(st.binary(), st.integers(1, len(USUAL)))
def test_a_head_never_breaks_the_reader(junk: bytes, at: int) -> None:
    head = read_head(USUAL[:at] + junk + USUAL[at:])
    assert head is None or 0 <= head.body_bytes <= MOST_BODY_BYTES
    assert may_be_a_head(USUAL[:at])


# --- on a socket ---


@dataclass
class Fixture:
    host: str
    port: int
    harness: HttpServer
    seen: list[tuple[RequestHead, bytes]] = field(default_factory=list)
    general: list[bytes] = field(default_factory=list)

    async def talk(self, *writes: bytes, until: bytes) -> bytes:
        """Everything that comes back, up to `until`."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        for data in writes:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.readuntil(until)
        writer.close()
        return answer


@pytest.fixture
async def served() -> AsyncIterator[Fixture]:
    async def answer(head: RequestHead, body: bytes, connection: HttpConnection) -> None:
        fixture.seen.append((head, body))
        if body == b"boom":
            raise RuntimeError("a defect")
        if body == b"wait":
            await asyncio.Event().wait()
        if body == b"flow":
            await flow(connection)
            return
        await asyncio.sleep(0)
        connection.whole(200, b"<" + body + b">")

    async def flow(connection: HttpConnection) -> None:
        """More than sockets hold, written as its reader allows."""
        written = 0
        while written < 200:
            while not connection.writable:
                await connection.drain()
            connection.piece(b"~" * 100_000)
            written += 1
        connection.last_piece(b"end")

    async def general(request: web.Request) -> web.Response:
        fixture.general.append(await request.read())
        return web.Response(text="general")

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", general)
    runner = web.AppRunner(application)
    await runner.setup()
    assert runner.server is not None
    harness = HttpServer(answer, runner.server)
    server = await asyncio.get_running_loop().create_server(harness.connection, "127.0.0.1", 0)
    fixture = Fixture(*server.sockets[0].getsockname(), harness)
    yield fixture
    server.close()
    await harness.close()
    await runner.cleanup()


def usual(body: bytes) -> bytes:
    return LINE + b"\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize("cut", [1, 7, 30, 50, 1000])
async def test_requests_are_answered_in_order_however_they_arrive(served: Fixture, cut: int) -> None:
    sent = b"".join(usual(b"%04d" % number) for number in range(5))
    answers = await served.talk(*(sent[at : at + cut] for at in range(0, len(sent), cut)), until=b"<0004>")
    assert [answers.index(b"<%04d>" % number) for number in range(5)] == sorted(
        answers.index(b"<%04d>" % number) for number in range(5)
    )
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 5
    assert [body for _, body in served.seen] == [b"%04d" % number for number in range(5)]


async def test_a_connection_is_handed_over_with_what_was_read(served: Fixture) -> None:
    chunked = LINE + b"\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    answer = await served.talk(usual(b"one"), chunked, usual(b"two"), until=b"general")
    assert b"<one>" in answer
    async with asyncio.timeout(DEADLINE_S):
        while len(served.general) < 2:
            await asyncio.sleep(0.01)
    assert served.general == [b"ab", b"two"]
    assert [body for _, body in served.seen] == [b"one"]


async def test_nonsense_is_for_aiohttp_to_refuse(served: Fixture) -> None:
    assert (await served.talk(b"\x16\x03\x01 hello\r\n\r\n", until=b"\r\n")).startswith(b"HTTP/1.0 400 ")


async def test_a_client_that_leaves_ends_what_it_asked_for(served: Fixture) -> None:
    _, writer = await asyncio.open_connection(served.host, served.port)
    writer.write(usual(b"wait"))
    async with asyncio.timeout(DEADLINE_S):
        while not served.harness.busy:
            await asyncio.sleep(0.01)
        writer.close()
        while served.harness.busy or served.harness.doors:
            await asyncio.sleep(0.01)


async def test_a_defect_is_an_error_and_the_end_of_the_connection(served: Fixture) -> None:
    reader, writer = await asyncio.open_connection(served.host, served.port)
    writer.write(usual(b"boom"))
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 500 ")


async def test_a_slow_client_holds_the_writer_back_and_gets_all(served: Fixture) -> None:
    reader, writer = await asyncio.open_connection(served.host, served.port)
    writer.write(usual(b"flow"))
    async with asyncio.timeout(DEADLINE_S):
        while all(connection.writable for connection in served.harness.doors):
            await asyncio.sleep(0.01)
        answer = await _all(reader)
    writer.close()
    assert answer.count(b"~") == 200 * 100_000
    assert answer.endswith(b"3\r\nend\r\n0\r\n\r\n")


async def _all(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while not (parts and parts[-1].endswith(b"0\r\n\r\n")):
        parts.append(await reader.read(1 << 20))
    return b"".join(parts)
