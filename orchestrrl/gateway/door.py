"""The gateway's connections: the usual request for tokens is served here, any other is handed to aiohttp.

A general HTTP server costs more for each request and each piece of an answer than all that the gateway does for them.
A usual request is a POST to one of the two endpoints, in HTTP/1.1, whose body has a known and moderate length. The
first request of a connection that is anything else takes the whole connection, with what has been read, to aiohttp.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, cast

from orchestrrl.engines.base import Endpoint

logger = logging.getLogger(__name__)

MOST_HEAD_BYTES = 16_384
MOST_BODY_BYTES = 4 << 20
MOST_AHEAD_BYTES = 1 << 20  # of requests that a client sends before it has its answer

_LINES = {
    b"POST /v1/completions HTTP/1.1": Endpoint.COMPLETIONS,
    b"POST /v1/chat/completions HTTP/1.1": Endpoint.CHAT,
}
_LONGEST_LINE = max(map(len, _LINES))
# What these ask for is not done here.
_UNUSUAL = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"content-encoding"})
_LABELS = frozenset({b"x-request-id", b"x-group-id", b"x-tag"})
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_DEFECT = b'{"error":{"message":"a defect of the gateway","type":"InternalServerError","param":null,"code":500}}'
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 409: "Conflict", 429: "Too Many Requests"}


@dataclass(frozen=True, slots=True)
class Head:
    """What a usual request says before its body. Labels are as aiohttp reads headers."""

    endpoint: Endpoint
    request_id: str
    group: str
    tag: str
    body_bytes: int


def read_head(head: bytes) -> Head | None:
    """The head of a usual request, without the empty line at its end; None for any other. Pure."""
    first, *lines = head.split(b"\r\n")
    endpoint = _LINES.get(first)
    if endpoint is None or head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head:
        return None
    length: int | None = None
    host = False
    labels: dict[bytes, str] = {}
    for line in lines:
        name, separator, value = line.partition(b":")
        name = name.lower()
        if not separator or not name.replace(b"-", b"").isalnum() or name in _UNUSUAL:
            return None
        if name in _LABELS:
            if name in labels:
                return None
            labels[name] = value.strip(b" \t").decode("utf-8", "surrogateescape")
        elif name == b"host":
            host = True
        elif name == b"content-length":
            value = value.strip(b" \t")
            if length is not None or not value.isdigit() or len(value) > 10:
                return None
            length = int(value)
        elif name == b"connection" and value.strip(b" \t").lower() != b"keep-alive":
            return None
    if not host or length is None or length > MOST_BODY_BYTES:
        return None
    request_id, group, tag = (labels.get(name, "") for name in (b"x-request-id", b"x-group-id", b"x-tag"))
    return Head(endpoint, request_id, group, tag, length)


def may_be_usual(data: bytes) -> bool:
    """Whether a head that is not all there may become a usual one. Pure."""
    first = data[:_LONGEST_LINE]
    return len(data) <= MOST_HEAD_BYTES and any(first.startswith(line[: len(first)]) for line in _LINES)


class Door(asyncio.Protocol):
    """One connection. What answers a request is given the door to write to, and is cancelled when the client leaves."""

    def __init__(self, house: "House") -> None:
        self._house = house
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._body: list[bytes] = []  # of a request that is not all there
        self._missing_bytes = 0
        self._head: Head | None = None
        self._task: asyncio.Task[None] | None = None
        self.answered = False  # the head of an answer has been written
        self._paused = False
        self.writable = True
        self._drained: asyncio.Future[None] | None = None
        self.on_writable: Callable[[], None] | None = None

    @property
    def busy(self) -> bool:
        return self._task is not None

    # --- answers -----------------------------------------------------------------------------------------------------

    def whole(self, status: int, body: bytes) -> None:
        """The whole answer, a JSON document."""
        assert self._transport is not None
        self.answered = True
        reason = _REASONS.get(status, "Error").encode()
        self._transport.write(
            b"HTTP/1.1 %d %b\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n%b"
            % (status, reason, len(body), body)
        )

    def piece(self, data: bytes) -> None:
        """A piece of a streamed answer, the first of which brings the head."""
        assert self._transport is not None
        if self.answered:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self.answered = True
            self._transport.write(b"%b%x\r\n%b\r\n" % (_STREAM_HEAD, len(data), data))

    def last_piece(self, data: bytes) -> None:
        assert self._transport is not None
        head = b"" if self.answered else _STREAM_HEAD
        self.answered = True
        self._transport.write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(data), data))

    async def drain(self) -> None:
        """Return when the client has read enough for more to be written."""
        if not self.writable:
            self._drained = self._drained or asyncio.get_running_loop().create_future()
            await self._drained

    async def close(self) -> None:
        """Whatever is under way is cut."""
        task = self._task
        if self._transport is not None:
            self._transport.close()
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    # --- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio's by their methods only. Both set TCP_NODELAY.
        self._transport = cast(asyncio.Transport, transport)
        self._house.doors.add(self)
        peer: socket.socket | None = transport.get_extra_info("socket")
        if peer is not None:  # a client that is gone without a word is found out
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, error: Exception | None) -> None:
        self._house.doors.discard(self)
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)
        if self.on_writable is not None:
            self.on_writable()

    def data_received(self, data: bytes) -> None:
        if self._task is not None:
            self._data += data
            if len(self._data) > MOST_AHEAD_BYTES and not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
        elif self._head is not None:
            self._more_of_body(data)
        else:
            self._data = self._data + data if self._data else data
            self._next_request()

    # --- requests ----------------------------------------------------------------------------------------------------

    def _next_request(self) -> None:
        data = self._data
        head_stop = data.find(b"\r\n\r\n")
        if head_stop < 0:
            if data and not may_be_usual(data):
                self._hand_over()
            return
        head = read_head(data[:head_stop])
        if head is None:
            self._hand_over()
            return
        self._data = b""
        self._head = head
        self._body, self._missing_bytes = [], head.body_bytes
        self._more_of_body(data[head_stop + 4 :])

    def _more_of_body(self, data: bytes) -> None:
        head = self._head
        assert head is not None
        if len(data) > self._missing_bytes:
            self._data = data[self._missing_bytes :]
            data = data[: self._missing_bytes]
        self._body.append(data)
        self._missing_bytes -= len(data)
        if self._missing_bytes:
            return
        body, self._body, self._head = b"".join(self._body), [], None
        self.answered = False
        self._task = asyncio.get_running_loop().create_task(self._house.answer(head, body, self))
        self._task.add_done_callback(self._over)

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._task = self.on_writable = None
        if task.cancelled() or task.exception() is not None:
            if not task.cancelled():
                logger.error("a request could not be served", exc_info=task.exception())
            if self._transport is not None:
                if not self.answered and not task.cancelled():
                    self.whole(
                        500, b'{"error":{"message":"a defect of the gateway","type":"InternalServerError","code":500}}'
                    )
                self._transport.close()
            return
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        if self._data:
            self._next_request()

    def _hand_over(self) -> None:
        """The connection is aiohttp's from here on."""
        assert self._transport is not None
        self._house.doors.discard(self)
        protocol = self._house.general()
        data, self._data = self._data, b""
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(data)


@dataclass(slots=True)
class House:
    """All doors, what answers usual requests, and what makes aiohttp's side of a connection."""

    answer: Callable[[Head, bytes, Door], Coroutine[Any, Any, None]]
    general: Callable[[], asyncio.Protocol]
    doors: set[Door]

    def door(self) -> Door:
        return Door(self)

    @property
    def busy(self) -> bool:
        return any(door.busy for door in self.doors)

    async def close(self) -> None:
        await asyncio.gather(*(door.close() for door in self.doors))
