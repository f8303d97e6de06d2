"""The gateway's HTTP server on sockets: requests are answered in order, and slow clients lose no data."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from orchestrrl.gateway.http import connections
from orchestrrl.gateway.http.connections import HttpAnswer, HttpConnection, HttpRequest, HttpServer

DEADLINE_S = 120.0
LINE = b"POST /v1/completions HTTP/1.1"


@dataclass
class Fixture:
    host: str
    port: int
    harness: HttpServer
    seen: list[HttpRequest] = field(default_factory=list)

    @property
    def bodies(self) -> list[bytes]:
        return [request.body for request in self.seen]

    async def talk(self, *writes: bytes, until: bytes) -> bytes:
        """Send the data and return the response, up to `until`."""
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
    async def answer(request: HttpRequest, connection: HttpConnection) -> None:
        fixture.seen.append(request)
        body = request.body
        if body == b"boom":
            raise RuntimeError("a defect")
        if body == b"wait":
            await asyncio.Event().wait()
        if body == b"flow":
            await flow(connection)
            return
        await asyncio.sleep(0)
        connection.whole(HttpAnswer(b"<" + body + b">"))

    async def flow(connection: HttpConnection) -> None:
        """Write more than socket buffers hold, as fast as the client reads."""
        written = 0
        while written < 200:
            while not connection.writable:
                await connection.drain()
            connection.piece(b"~" * 100_000)
            written += 1
        connection.piece(b"end", last=True)

    harness = HttpServer(answer)
    fixture = Fixture("127.0.0.1", await harness.listen("127.0.0.1", 0), harness)
    yield fixture
    await harness.close()


def usual(body: bytes) -> bytes:
    return LINE + b"\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize("cut", [1, 7, 30, 50, 1000])
async def test_requests_are_answered_in_order(served: Fixture, cut: int) -> None:
    sent = b"".join(usual(b"%04d" % number) for number in range(5))
    answers = await served.talk(*(sent[at : at + cut] for at in range(0, len(sent), cut)), until=b"<0004>")
    assert [answers.index(b"<%04d>" % number) for number in range(5)] == sorted(
        answers.index(b"<%04d>" % number) for number in range(5)
    )
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 5
    assert served.bodies == [b"%04d" % number for number in range(5)]


async def test_request_has_method_url_headers_and_body(served: Fixture) -> None:
    head = b"\r\nHost: h\r\nX-Request-Id: \t r1 \r\nx-tag: \xc3\xa9\r\nX-Tag: b\r\nContent-Length: 3\r\n\r\n"
    await served.talk(LINE + head + b"one", until=b"<one>")
    (request,) = served.seen
    assert (request.method, request.url, request.body) == ("POST", "/v1/completions", b"one")
    assert request.headers[1:4] == (("X-Request-Id", "r1"), ("x-tag", "é"), ("X-Tag", "b"))
    assert (request.fields["x-request-id"], request.fields["x-tag"]) == ("r1", "é")


async def test_chunked_body_between_other_requests(served: Fixture) -> None:
    chunked = LINE + b"\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    await served.talk(usual(b"one"), chunked, usual(b"two"), until=b"<two>")
    assert served.bodies == [b"one", b"abc", b"two"]


async def test_trailers_are_ignored(served: Fixture) -> None:
    chunked = LINE + b"\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    await served.talk(chunked + b"X-Request-Id: t\r\nAuthorization: Bearer t\r\n\r\n", usual(b"two"), until=b"<two>")
    assert served.bodies == [b"abc", b"two"]
    assert served.seen[0].headers == (("Host", "h"), ("Transfer-Encoding", "chunked"))


async def test_continue_is_sent_when_the_request_is_next(served: Fixture) -> None:
    asked = LINE + b"\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    reader, writer = await asyncio.open_connection(served.host, served.port)
    writer.write(usual(b"one") + asked)
    async with asyncio.timeout(DEADLINE_S):
        assert b"<one>HTTP/1.1 100 Continue\r\n\r\n" in await reader.readuntil(b"100 Continue\r\n\r\n")
        writer.write(b"two" + asked.replace(b"1.1", b"1.0") + b"six")
        rest = await reader.readuntil(b"<six>")
    writer.close()
    assert served.bodies == [b"one", b"two", b"six"]
    assert b"100 Continue" not in rest  # HTTP/1.0 has no Expect header


async def test_upgrade_from_http_1_0_is_ignored(served: Fixture) -> None:
    asked = b"GET /health HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    assert (await served.talk(asked, until=b"<>")).startswith(b"HTTP/1.1 200 ")
    assert served.seen[0].version == "1.0"


async def test_parser_defect_is_a_server_error(
    served: Fixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> HttpRequest:
        raise RuntimeError("a defect")

    monkeypatch.setattr(connections, "HttpRequest", broken)
    assert (await served.talk(usual(b"one"), until=b"\r\n")).startswith(b"HTTP/1.1 500 ")
    assert "RuntimeError: a defect" in caplog.text


@pytest.mark.parametrize("body", [b"", b"ab"])
async def test_upgrade_is_ignored(served: Fixture, body: bytes) -> None:
    """Java's client requests an upgrade to HTTP/2 with its first request."""
    headers = b"\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
    asked = LINE + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body
    answer = await served.talk(asked + asked + usual(b"two"), until=b"<two>")
    assert served.bodies == [body, body, b"two"]
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 3


async def test_head_response_has_no_body(served: Fixture) -> None:
    answer = await served.talk(b"HEAD /health HTTP/1.1\r\nHost: h\r\n\r\n", usual(b"one"), until=b"<one>")
    first, _, rest = answer.partition(b"\r\n\r\n")
    assert b"Content-Length: 2" in first
    assert rest.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("kept", [b"", b"Connection: keep-alive\r\n"])
async def test_http_1_0_response_is_not_chunked(served: Fixture, kept: bytes) -> None:
    reader, writer = await asyncio.open_connection(served.host, served.port)
    writer.write(b"POST /v1/completions HTTP/1.0\r\n%bContent-Length: 4\r\n\r\nflow" % kept)
    async with asyncio.timeout(DEADLINE_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"Connection: close" in head
    assert b"Transfer-Encoding" not in head
    assert body == b"~" * 200 * 100_000 + b"end"


async def test_malformed_requests_are_refused(served: Fixture) -> None:
    assert (await served.talk(b"hello\r\n\r\n", until=b"\r\n")).startswith(b"HTTP/1.1 400 ")


MANY = b"".join(b"X-%d: %b\r\n" % (number, b"a" * 7_000) for number in range(14))


@pytest.mark.parametrize(
    "head", [b"X-A: %b\r\n" % (b"a" * 9_000), b"".join(b"X-%d: a\r\n" % n for n in range(200)), MANY]
)
async def test_request_heads_are_bounded(served: Fixture, head: bytes) -> None:
    answer = await served.talk(LINE + b"\r\nHost: h\r\n" + head + b"\r\n", until=b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert (await served.talk(LINE + b"\r\nX: " + b"a" * 70_000, until=b"\r\n")).startswith(b"HTTP/1.1 431 ")


async def test_client_disconnect_cancels_its_request(served: Fixture) -> None:
    _, writer = await asyncio.open_connection(served.host, served.port)
    writer.write(usual(b"wait"))
    async with asyncio.timeout(DEADLINE_S):
        while not served.harness.busy:
            await asyncio.sleep(0.01)
        writer.close()
        while served.harness.busy or served.harness.connections:
            await asyncio.sleep(0.01)


async def test_handler_defect_returns_500_and_closes_the_connection(served: Fixture) -> None:
    reader, writer = await asyncio.open_connection(served.host, served.port)
    writer.write(usual(b"boom"))
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 500 ")


async def test_slow_client_delays_the_writer_and_receives_everything(served: Fixture) -> None:
    reader, writer = await asyncio.open_connection(served.host, served.port)
    writer.write(usual(b"flow"))
    async with asyncio.timeout(DEADLINE_S):
        while all(connection.writable for connection in served.harness.connections):
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
