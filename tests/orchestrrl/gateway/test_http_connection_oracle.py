"""The gateway's HTTP server against aiohttp's: the same bytes, cut anywhere, get the same answers or refusals."""

import asyncio
import itertools
import json
from dataclasses import dataclass

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.gateway.http.connections import HttpAnswer, HttpConnection, HttpRequest, HttpServer

# An answer that has not arrived after this many turns of the event loop waits for more of its request. Turns are
# counted instead of time, since the host may stall; the servers run in the same loop.
QUIET_TURNS = 30
TURN_S = 0.01
PATHS = ("/v1/completions", "/v1/chat/completions")
LABELS = ("X-Request-Id", "X-Group-Id", "X-Tag")
PAUSE_S = 0.01
LAST = b"GET /last HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class Both:
    """Two servers with the same handler: the gateway's, and aiohttp's."""

    door_port: int
    plain_port: int
    harness: HttpServer
    runner: web.AppRunner
    plain: asyncio.Server

    async def close(self) -> None:
        self.plain.close()
        await self.harness.close()
        await self.runner.cleanup()


def echo(path: str, labels: list[str], body: bytes) -> bytes:
    return json.dumps([path, labels, body.hex()]).encode()


async def both() -> Both:
    async def usual(request: HttpRequest, connection: HttpConnection) -> None:
        await asyncio.sleep(0)
        path = request.url.partition("?")[0]
        if path not in PATHS or request.method != "POST":
            connection.whole(HttpAnswer(b"{}", 405 if path in PATHS else 404))
            return
        labels = [request.fields.get(name.lower(), "") for name in LABELS]
        connection.whole(HttpAnswer(echo(path, labels, request.body)))

    async def general(request: web.Request) -> web.Response:
        labels = [request.headers.get(name, "") for name in LABELS]
        return web.Response(body=echo(request.path, labels, await request.read()), content_type="application/json")

    application = web.Application()
    for path in PATHS:
        application.router.add_post(path, general)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    harness = HttpServer(usual)
    plain = await asyncio.get_running_loop().create_server(runner.server, "127.0.0.1", 0)
    plain_port = plain.sockets[0].getsockname()[1]
    return Both(await harness.listen("127.0.0.1", 0), plain_port, harness, runner, plain)


async def answers(port: int, pieces: list[bytes], *, one_by_one: bool = False) -> list[tuple[int, bytes]]:
    """Return the status and body of each answer. Bodies of refusals, and anything after a refusal, are not compared."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found: list[tuple[int, bytes]] = []

    async def read() -> None:
        while (answer := await _answer(reader)) is not None:
            found.append(answer)
            if answer[0] >= 400:
                return

    reading = asyncio.create_task(read())
    try:
        for piece in pieces:
            if reading.done():
                break
            before = len(found)
            writer.write(piece)
            await asyncio.sleep(0)
            if one_by_one:
                await _quiet(reading, found, but_for=before)
                await asyncio.sleep(PAUSE_S)
        await _quiet(reading, found)
    finally:
        writer.close()
        reading.cancel()
        await asyncio.wait([reading])
    if not reading.cancelled():
        reading.result()
    return found


async def _quiet(reading: "asyncio.Task[None]", found: list[tuple[int, bytes]], but_for: int | None = None) -> None:
    """Wait until the connection has ended, no further answers arrive, or more than `but_for` answers have arrived."""
    before, turns = len(found), 0
    while not reading.done() and turns < QUIET_TURNS and (but_for is None or len(found) <= but_for):
        await asyncio.sleep(TURN_S)
        turns = turns + 1 if len(found) == before else 0
        before = len(found)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    status = int(head.split(b" ")[1])
    status = 400 if status == 431 else status  # aiohttp's parser returns one status for all faults of a head
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    return status, await reader.readexactly(length) if status == 200 else b""


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place for place in cuts if place < len(data))})
    return [data[start:stop] for start, stop in itertools.pairwise(edges)]


async def by_both(requests: list[bytes], cuts: list[int]) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
    """Compare both servers. aiohttp receives one request at a time, since it drops valid ones together with a bad
    one."""
    served = await both()
    try:
        return await asyncio.gather(
            answers(served.door_port, cut(b"".join(requests), cuts)),
            answers(served.plain_port, requests, one_by_one=True),
        )
    finally:
        await served.close()


def request(
    body: bytes = b"{}", *, line: bytes = b"POST /v1/completions HTTP/1.1", headers: bytes = b"", length: bytes = b""
) -> bytes:
    return b"%b\r\nHost: h\r\n%bContent-Length: %b\r\n\r\n%b" % (line, headers, length or b"%d" % len(body), body)


CHUNKS = b"2\r\nab\r\n0\r\n\r\n"
SMUGGLED = request(b"smuggled")
SHAPES = {
    "usual": request(b'{"a": 1}', headers=b"X-Request-Id: \t r1 \t\r\nX-TAG: \xc3\xa9\r\nx-group-id:g\r\n"),
    "chat": request(b"\xff\x00\r\n\r\n", line=b"POST /v1/chat/completions HTTP/1.1"),
    "empty body": request(b""),
    "zeros before the length": request(b"abc", length=b"0003"),
    "get": b"GET /v1/completions HTTP/1.1\r\nHost: h\r\n\r\n",
    "head": b"HEAD /nothing HTTP/1.1\r\nHost: h\r\n\r\n",
    "no such path": request(line=b"POST /v1/nothing HTTP/1.1"),
    "query": request(line=b"POST /v1/completions?a=b HTTP/1.1"),
    "http 1.0": request(line=b"POST /v1/completions HTTP/1.0"),
    "http 1.0 kept": request(line=b"POST /v1/completions HTTP/1.0", headers=b"Connection: keep-alive\r\n"),
    "lower case": request(line=b"post /v1/completions HTTP/1.1"),
    "two spaces": request(line=b"POST  /v1/completions HTTP/1.1"),
    "close": request(headers=b"Connection: close\r\n"),
    "kept": request(headers=b"Connection: Keep-Alive\r\n"),
    "kept twice": request(headers=b"Connection: keep-alive\r\nConnection: keep-alive\r\n"),
    "closed twice": request(headers=b"Connection: keep-alive\r\nConnection: close\r\n"),
    "chunked": b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
    "length and chunks": request(CHUNKS, headers=b"Transfer-Encoding: chunked\r\n"),
    "chunks and a length too short": request(CHUNKS, headers=b"Transfer-Encoding: chunked\r\n", length=b"3"),
    "chunks that hide a request": request(b"0\r\n\r\n" + SMUGGLED, headers=b"Transfer-Encoding: chunked\r\n"),
    "chunks, disguised": request(CHUNKS, headers=b"Transfer-Encoding : chunked\r\n"),
    "chunks, misspelt": request(CHUNKS, headers=b"Transfer-Encoding: xchunked\r\n"),
    "chunks, folded": request(CHUNKS, headers=b"Transfer-Encoding:\r\n chunked\r\n"),
    "two lengths": request(b"abc" + SMUGGLED, headers=b"Content-Length: 3\r\n"),
    "a list of lengths": request(b"abc", length=b"3, 3"),
    "negative length": request(b"abc", length=b"-3"),
    "signed length": request(b"abc", length=b"+3"),
    "hexadecimal length": request(b"abc", length=b"0x3"),
    "huge length": request(b"abc", length=b"99999999999999999999999999"),
    "no length": b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n\r\n",
    "no host": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
    "two hosts": request(headers=b"Host: other\r\n"),
    "folded": request(headers=b"X-Tag: a\r\n b\r\n"),
    "bare line feed": request(headers=b"X-Tag: a\nX-Group-Id: b\r\n"),
    "bare carriage return": request(headers=b"X-Tag: a\rX-Group-Id: b\r\n"),
    "zero byte": request(headers=b"X-Tag: a\0b\r\n"),
    "control byte": request(headers=b"X-Tag: a\x01b\r\n"),
    "delete": request(headers=b"X-Other: a\x7fb\r\n"),
    "control byte elsewhere": request(headers=b"X-Other: a\x08b\r\n"),
    "no utf-8": request(headers=b"X-Tag: \xff\xfe\r\n"),
    "empty name": request(headers=b": a\r\n"),
    "space in a name": request(headers=b"X Tag: a\r\n"),
    "odd name": request(headers=b"X-\xc3\xa9: a\r\n"),
    "odd but lawful name": request(headers=b"!#$%&'*+.^_`|~0a: a\r\n"),
    "same label twice": request(headers=b"X-Tag: a\r\nX-Tag: b\r\n"),
    "continue": request(headers=b"Expect: 200-ok\r\n"),
    "many headers": request(headers=b"".join(b"X-%d: a\r\n" % n for n in range(200))),
    "long value": request(headers=b"X-Other: %b\r\n" % (b"a" * 9000)),
    "long head": request(headers=b"X-Other: %b\r\n" % (b"a" * 65_536)),
    "empty lines before": b"\r\n\r\n" + request(),
    "upgrade": request(headers=b"Connection: Upgrade\r\nUpgrade: h2c\r\n"),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "too long a body": request(b"abc" + SMUGGLED, length=b"3"),
}
# aiohttp also refuses these if further data follows in one piece.
ENDING = {"http 1.0", "close", "closed twice", "upgrade"}


@pytest.mark.parametrize("name", SHAPES)
async def test_every_request_shape_is_answered_like_aiohttp(name: str) -> None:
    after = [] if name in ENDING else [LAST]
    for requests in ([SHAPES[name], *after], [request(b"before"), SHAPES[name], *after]):
        ours, theirs = await by_both(requests, [])
        assert ours == theirs


async def test_too_large_content_length_is_refused_before_the_body() -> None:
    ours, theirs = await by_both([request(b"abc", length=b"99999999")], [])
    assert (ours, theirs) == ([(413, b"")], [])  # aiohttp waits for it


@given(
    st.lists(st.sampled_from(sorted(SHAPES.keys() - ENDING)), min_size=1, max_size=4),
    st.lists(st.integers(0, 800), max_size=12),
)
def test_pipelined_requests_cut_anywhere_match_aiohttp(names: list[str], cuts: list[int]) -> None:
    ours, theirs = asyncio.run(by_both([*(SHAPES[name] for name in names), LAST], cuts))
    # aiohttp may drop requests that arrive together with a bad one, as above.
    assert ours == theirs or (ours[-1][0] == 400 and ours[:-1] == theirs[: len(ours) - 1])


async def test_request_may_be_cut_at_every_byte() -> None:
    requests = [SHAPES["usual"], SHAPES["chunked"], LAST]
    ours, theirs = await by_both(requests, list(range(sum(map(len, requests)))))
    assert ours == theirs
    first, second, last = ours
    assert json.loads(first[1])[1:] == [["r1", "g", "é"], b'{"a": 1}'.hex()]
    assert json.loads(second[1])[2] == b"ab".hex()
    assert last[0] == 404
