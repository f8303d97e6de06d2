"""The streaming HTTP client reads answers cut anywhere, and reuses connections only when that is safe."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable
from orchestrrl.engines import exchange
from orchestrrl.engines.exchange import MOST_FRAMING_BYTES, ConnectionPool, EngineConnection, written

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
DEADLINE_S = 120.0


class NoTransport(asyncio.Transport):
    """The transport of a connection whose input the test supplies."""

    def abort(self) -> None: ...

    def close(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return False


def fed(*pieces: bytes) -> EngineConnection:
    """Return a connection that has received these pieces as the answer to its request."""
    connection = EngineConnection(ConnectionPool("http://h", connect_timeout_s=1))
    connection.connection_made(NoTransport())
    for piece in pieces:
        connection.data_received(piece)
    return connection


@given(st.lists(st.binary(min_size=1, max_size=40)), st.booleans(), st.lists(st.integers(0, 400)))
def test_chunked_body_may_be_cut_anywhere(pieces: list[bytes], trailers: bool, cuts: list[int]) -> None:
    end = b"0;x=y\r\nTrailer: x\r\n\r\n" if trailers else b"0\r\n\r\n"
    written_body = b"".join(b"%X\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + end
    edges = sorted({0, len(written_body), *(cut for cut in cuts if cut < len(written_body))})
    connection = fed(CHUNKED)
    for start, stop in itertools.pairwise(edges):
        assert not connection.ended
        connection.data_received(written_body[start:stop])
    assert connection.ended
    assert asyncio.run(connection.read_all()) == b"".join(pieces)
    assert connection.headers == {"transfer-encoding": "chunked"}


@pytest.mark.parametrize("body", [b"-1\r\n", b"1_0\r\n", b"\r\n", b"x\r\n", b"1\r\nab\r\n", b"f" * 17 + b"\r\n"])
def test_malformed_chunked_body_is_refused(body: bytes) -> None:
    with pytest.raises(Permanent, match=r"is not HTTP: .*[Cc]hunk"):
        asyncio.run(fed(CHUNKED, body).read_all())


def test_head_is_parsed() -> None:
    connection = fed(b"HTTP/1.1 503 Too Busy\r\nRetry-After: 7\r\nX: a:b\r\nEmpty:\r\nx:  c \r\n\r\n")
    assert connection.status == 503
    assert connection.headers == {"retry-after": "7", "x": "a:b, c", "empty": ""}


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 000 OK\r\n\r\n",
        OK + b"no colon\r\n\r\n",
        OK + b"X: a\r\n folded\r\n\r\n",
        OK + b"X: a\nY: b\r\n\r\n",
        OK + b"X : a\r\n\r\n",
        OK + b"X: a\0b\r\n\r\n",
        OK + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\n",
        OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        OK + b"Transfer-Encoding: gzip\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\t\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\xa0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    ],
)
def test_malformed_head_is_refused(nonsense: bytes) -> None:
    with pytest.raises(Permanent, match="is not HTTP: "):
        asyncio.run(fed(nonsense).read_all())


@pytest.mark.parametrize("begun", [OK + b"X: ", CHUNKED + b"1;", CHUNKED + b"1\r\na\r\n0\r\nX: "])
def test_unbounded_framing_is_refused(begun: bytes) -> None:
    endless = [b"a" * 1000] * (MOST_FRAMING_BYTES // 1000 + 2)
    with pytest.raises(Permanent, match="exceed 65536 bytes"):
        asyncio.run(fed(begun, *endless).read_all())


def test_header_with_line_break_is_refused() -> None:
    assert written([("A", "b")]) == b"A: b\r\n"
    with pytest.raises(ValueError, match="line"):
        written([("A", "b\r\nEvil: c")])


@pytest.mark.parametrize("url", ["", "h:1", "http://", "ftp://h", "http://h:x", "http://[::1"])
def test_invalid_url_is_permanent(url: str) -> None:
    with pytest.raises(Permanent):
        ConnectionPool(url, connect_timeout_s=1)


# --- with a scripted server ---

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[[Script], Awaitable[ConnectionPool]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers: list[asyncio.Server] = []
    pools: list[ConnectionPool] = []

    async def start(script: Script) -> ConnectionPool:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await script(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        servers.append(await asyncio.start_server(handle, "127.0.0.1", 0))
        port = servers[-1].sockets[0].getsockname()[1]
        pools.append(ConnectionPool(f"http://user:pass@127.0.0.1:{port}/base/", connect_timeout_s=5))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()
    for server in servers:
        server.close()


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))


async def answer(pool: ConnectionPool) -> tuple[int, bytes]:
    asked = pool.exchange("/p", b"{}", [("X-Request-Id", "r")])
    connection = await asked.begin()
    body = await connection.read_all()
    asked.leave()
    return connection.status, body


async def test_connection_is_reused_after_complete_answers(serve: Serve) -> None:
    seen: list[bytes] = []
    connections: list[object] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while True:
            seen.append(await request(reader))
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
            seen.append(await request(reader))
            writer.write(OK + b"Content-Length: 2\r\n\r\nxy")

    pool = await serve(script)
    assert [await answer(pool) for _ in range(4)] == [(200, b"abc"), (200, b"xy")] * 2
    assert len(connections) == 1
    assert seen[0].startswith(b"POST /base/p HTTP/1.1\r\nHost: 127.0.0.1:")
    for line in (b"X-Request-Id: r", b"Authorization: Basic dXNlcjpwYXNz", b"Content-Type: application/json"):
        assert line + b"\r\n" in seen[0]


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"Connection: close\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
        OK + b"\r\nx",
    ],
)
async def test_connections_closed_by_the_engine_are_not_kept(serve: Serve, reply: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(reply)

    pool = await serve(script)
    assert await answer(pool) == (200, b"x")
    assert await answer(pool) == (200, b"x")


async def test_request_on_connection_closed_by_engine_is_retried(serve: Serve) -> None:
    served: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(await request(reader))
        writer.write(OK + b"Content-Length: 1\r\n\r\nx")
        await request(reader)  # read, but never answered: the server had closed the connection

    pool = await serve(script)
    assert await answer(pool) == (200, b"x")
    assert await answer(pool) == (200, b"x")
    assert len(served) == 2


async def test_request_on_kept_connection_that_breaks_late_is_not_retried(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may have generated tokens in that time."""
    served: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(await request(reader))
        writer.write(OK + b"Content-Length: 1\r\n\r\nx")
        served.append(await request(reader))
        await asyncio.sleep(0.05)

    pool = await serve(script)
    assert await answer(pool) == (200, b"x")
    take_kept = pool.take_kept

    def take_and_wait_shortly() -> EngineConnection | None:
        kept = take_kept()
        monkeypatch.setattr("orchestrrl.engines.exchange.KEEP_IDLE_S", 0.01)
        return kept

    monkeypatch.setattr(pool, "take_kept", take_and_wait_shortly)
    with pytest.raises(OutcomeUnknown, match=r"http://127\.0\.0\.1"):  # without the login of its URL
        await answer(pool)
    assert len(served) == 2


async def test_request_on_new_connection_is_not_retried(serve: Serve) -> None:
    served: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(await request(reader))

    with pytest.raises(OutcomeUnknown):
        await answer(await serve(script))
    assert len(served) == 1


@pytest.mark.parametrize("partial", [CHUNKED + b"5\r\nab", OK + b"Content-Length: 5\r\n\r\nab", OK[:-4]])
async def test_broken_answer_has_an_unknown_outcome(serve: Serve, partial: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(partial)

    with pytest.raises(OutcomeUnknown):
        await answer(await serve(script))


@pytest.mark.parametrize("nonsense", [b"220 mail\r\n", CHUNKED + b"zz\r\n", OK + b"Content-Length: x\r\n\r\n"])
async def test_answer_that_is_not_http_is_permanent(serve: Serve, nonsense: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(nonsense)
        await reader.read()

    with pytest.raises(Permanent):
        await answer(await serve(script))


async def test_closing_early_closes_the_connection_to_the_engine(serve: Serve) -> None:
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(CHUNKED + b"1\r\na\r\n")
        await reader.read()
        gone.set()

    pool = await serve(script)
    asked = pool.exchange("/p", b"{}", ())
    connection = await asked.begin()
    assert await connection.read() == b"a"
    reading = asyncio.create_task(connection.read())
    await asyncio.sleep(0)
    asked.close()
    with pytest.raises(OutcomeUnknown):
        await reading
    async with asyncio.timeout(DEADLINE_S):
        await gone.wait()


async def test_closing_before_send_or_answer_has_an_unknown_outcome(serve: Serve) -> None:
    asked_for = asyncio.Event()

    async def script(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await request(reader)
        asked_for.set()
        await reader.read()

    pool = await serve(script)
    early = pool.exchange("/p", b"{}", ())
    early.close()
    with pytest.raises(OutcomeUnknown):
        await early.begin()
    late = pool.exchange("/p", b"{}", ())
    beginning = asyncio.create_task(late.begin())
    await asked_for.wait()
    late.close()
    with pytest.raises(OutcomeUnknown):
        await beginning


async def test_rest_of_a_left_answer_is_read_and_its_connection_kept(serve: Serve) -> None:
    connections: list[object] = []
    left = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while True:
            await request(reader)
            writer.write(CHUNKED + b"4\r\nlast\r\n")
            await left.wait()
            writer.write(b"4\r\nDONE\r\n0\r\n\r\n")

    pool = await serve(script)
    for _ in range(2):
        left.clear()
        asked = pool.exchange("/p", b"{}", ())
        connection = await asked.begin()
        assert await connection.read() == b"last"
        asked.leave()
        left.set()
        async with asyncio.timeout(DEADLINE_S):
            while not connection.ended:
                await asyncio.sleep(0.01)
    assert len(connections) == 1


async def test_left_answer_without_an_end_is_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "STREAM_END_S", 0.01)
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(CHUNKED + b"4\r\nlast\r\n")
        await reader.read()
        gone.set()

    pool = await serve(script)
    asked = pool.exchange("/p", b"{}", ())
    assert await (await asked.begin()).read() == b"last"
    asked.leave()
    async with asyncio.timeout(DEADLINE_S):
        await gone.wait()


async def test_idle_connections_are_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_IDLE_S", 0.01)
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK + b"Content-Length: 1\r\n\r\nx")
        await reader.read()
        gone.set()

    assert await answer(await serve(script)) == (200, b"x")
    async with asyncio.timeout(DEADLINE_S):
        await gone.wait()


async def test_engine_is_blocked_while_its_answer_is_not_read(serve: Serve) -> None:
    megabytes = 64
    wrote: list[int] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK + b"Content-Length: %d\r\n\r\n" % (megabytes << 20))
        for number in range(megabytes):
            writer.write(bytes(1 << 20))
            await writer.drain()
            wrote.append(number)
        await reader.read()

    pool = await serve(script)
    asked = pool.exchange("/p", b"{}", ())
    connection: EngineConnection = await asked.begin()
    before = -1
    while len(wrote) != before:  # until its writes block
        before = len(wrote)
        await asyncio.sleep(0.2)
    assert len(wrote) < megabytes
    assert len(await connection.read_all()) == megabytes << 20
    asked.leave()


async def test_unreachable_engine_is_retryable(unused_tcp_port: int) -> None:
    pool = ConnectionPool(f"http://127.0.0.1:{unused_tcp_port}", connect_timeout_s=5)
    with pytest.raises(Retryable):
        await pool.exchange("/p", b"{}", ()).begin()
