"""The load: completions over connections of its own, read with as little work as can be."""

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self
from urllib.parse import urlsplit

from httptools import HttpResponseParser

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.bench.plain_engine import MODEL, TOKEN

BODY_BYTES = 1_024
ANSWER_WITHIN_S = 60.0
_ids = itertools.count()


@dataclass(slots=True)
class TimedResponse:
    """One answer, as it came."""

    tokens: int = 0
    chunks: int = 0  # events with content; 1 for a whole answer
    first_s: float = 0.0  # from the request, or from the connection's opening, to the first content
    whole_s: float = 0.0


def request(url: str, *, max_tokens: int, stream: bool) -> bytes:
    """A completion of `BODY_BYTES`, ready to be sent."""
    asked = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    empty = json.dumps({**asked, "prompt": ""})
    body = json.dumps({**asked, "prompt": ("a request of one kilobyte " * 64)[: BODY_BYTES - len(empty)]})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


class ClientConnection(asyncio.Protocol):
    """One connection, one answer at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[TimedResponse] | None = None

    async def send(self, request: bytes, started_s: float | None = None) -> TimedResponse:
        """Raises Permanent for anything but a complete answer."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._answer = TimedResponse()
        self._body: list[bytes] = []
        self._parser = HttpResponseParser(self)
        self._started_s = time.perf_counter() if started_s is None else started_s
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(Permanent(f"the connection broke: {error}: {b''.join(self._body)[-300:]!r}"))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        if not self._answer.first_s and (b"data:" in body or b'"choices"' in body):
            self._answer.first_s = time.perf_counter() - self._started_s

    def on_message_complete(self) -> None:
        answer, done, text = self._answer, self._done, b"".join(self._body)
        answer.whole_s = time.perf_counter() - self._started_s
        streamed = text.startswith(b"data:")
        answer.chunks = text.count(b'data: {"id"') if streamed else 1
        answer.tokens = text.count(TOKEN)
        assert done is not None
        is_complete = not streamed or b"data: [DONE]" in text
        if self._parser.get_status_code() != HTTPStatus.OK or b'"error"' in text or not is_complete:
            done.set_exception(Permanent(f"not an answer: {text[:600]!r}"))
        elif not done.done():
            done.set_result(answer)


class Lanes:
    """Connections to one URL, open while the body runs."""

    def __init__(self, url: str, count: int) -> None:
        self._url, self._count = url, count
        self._lanes: list[ClientConnection] = []

    async def __aenter__(self) -> Self:
        self._lanes = [await connected(self._url) for _ in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for lane in self._lanes:
            lane.close()

    async def send_in_turn(self, request: bytes, requests: int) -> list[TimedResponse]:
        """So many in all, each with an id of its own, one after another on every connection."""
        head, rest = request.split(b"\r\n", 1)
        left = iter(range(requests))

        async def run(lane: ClientConnection) -> list[TimedResponse]:
            return [await lane.send(b"%b\r\nX-Request-Id: request-%d\r\n%b" % (head, next(_ids), rest)) for _ in left]

        async with asyncio.timeout(ANSWER_WITHIN_S):
            answers = await asyncio.gather(*(run(lane) for lane in self._lanes))
        return [answer for some in answers for answer in some]


async def all_at_once(
    url: str, request: bytes, streams: int, within_s: float = ANSWER_WITHIN_S
) -> Sequence[TimedResponse]:
    """Each on a connection of its own, which is opened now. Raises Permanent unless all are complete."""

    async def one() -> TimedResponse:
        started_s = time.perf_counter()
        lane = await connected(url)
        try:
            return await lane.send(request, started_s)
        finally:
            lane.close()

    async with asyncio.timeout(within_s):
        return await asyncio.gather(*(one() for _ in range(streams)))


async def connected(url: str) -> ClientConnection:
    host, _, port = urlsplit(url).netloc.rpartition(":")
    _, lane = await asyncio.get_running_loop().create_connection(ClientConnection, host, int(port))
    return lane
