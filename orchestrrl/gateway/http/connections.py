"""The gateway's connections: the usual request for tokens is served here, any other is handed to aiohttp.

A general HTTP server costs more for each request and each piece of an answer than all that the gateway does for them.
A usual request is a POST to one of the two endpoints, in HTTP/1.1, whose body has a known and moderate length. The
first request of a connection that is anything else takes the whole connection, with what has been read, to aiohttp.

It can be left out: with `orchestrrl gateway --plain-http` all requests are aiohttp's. Both must give the same
answers (tests/orchestrrl/gateway/test_http_connection_oracle.py sends the same bytes to both), so whatever is not
plainly usual is handed over, and aiohttp judges it. As with aiohttp, a client that closes its side of the connection,
or only half of it, has left.
"""

import asyncio
import json
import logging
import re
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from http.client import responses as reasons
from typing import Any, cast

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.http.faults import DEFECT
from orchestrrl.gateway.http.headers import end_to_end
from orchestrrl.gateway.http.responses import error_body

logger = logging.getLogger(__name__)

# As aiohttp has them, which judges what has more.
MOST_HEAD_BYTES = 8190
MOST_HEADERS = 128
MOST_BODY_BYTES = 4 << 20
MOST_AHEAD_BYTES = 1 << 16  # of requests that a client sends before it has its answer
REQUEST_WITHIN_S = 120.0  # from a request's first byte to its last
# A client whose machine is gone is found out after two minutes.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))

_LINES = {
    b"POST /v1/completions HTTP/1.1": CompletionEndpoint.COMPLETIONS,
    b"POST /v1/chat/completions HTTP/1.1": CompletionEndpoint.CHAT,
}
# Tabs and the ends of lines are looked at on their own.
_CONTROL = re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]")
# What these ask for is not done here.
_UNUSUAL = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"content-encoding"})
_LABELS = (b"x-request-id", b"x-group-id", b"x-tag")
_READ_HERE = frozenset({b"host", b"content-length", b"connection", *_LABELS})
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A completion request without its body. Labels are as aiohttp reads headers."""

    endpoint: CompletionEndpoint
    request_id: str
    group: str
    tag: str
    body_bytes: int
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # for engines; credentials among them


def read_head(head: bytes) -> RequestHead | None:
    """The head of a usual request, without the empty line at its end; None for any other. Pure."""
    first, *lines = head.split(b"\r\n")
    endpoint = _LINES.get(first)
    if endpoint is None or head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
        return None
    if len(head) > MOST_HEAD_BYTES or len(lines) > MOST_HEADERS or _CONTROL.search(head) is not None:
        return None
    read: dict[bytes, bytes] = {}
    others: list[tuple[str, str]] = []
    for line in lines:
        shown_name, separator, value = line.partition(b":")
        name, value = shown_name.lower(), value.strip(b" \t")
        if not separator or not name.replace(b"-", b"").isalnum() or name in _UNUSUAL or name in read:
            return None
        if name in _READ_HERE:
            read[name] = value
        else:
            others.append((shown_name.decode(), value.decode("utf-8", "surrogateescape")))
    length = read.get(b"content-length", b"")
    if not length.isdigit() or len(length) > 10 or int(length) > MOST_BODY_BYTES or b"host" not in read:
        return None
    if read.get(b"connection", b"keep-alive").lower() != b"keep-alive":
        return None
    request_id, group, tag = (read.get(name, b"").decode("utf-8", "surrogateescape") for name in _LABELS)
    return RequestHead(endpoint, request_id, group, tag, int(length), end_to_end(others))


def may_be_a_head(data: bytes) -> bool:
    """Whether what has come may be the beginning of a head, and is worth waiting for the rest. Pure."""
    return len(data) <= MOST_HEAD_BYTES and data[:1].isalpha() and data.count(b"\n") == data.count(b"\r\n")


class HttpConnection(asyncio.Protocol):
    """One connection. What answers a request is given the door to write to, and is cancelled when the client leaves."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._head: RequestHead | None = None  # of a request that is not all there
        self._body = bytearray()  # of the same
        self._task: asyncio.Task[None] | None = None
        self.answered = False  # the head of an answer has been written
        self._paused = False
        self.writable = True
        self._drained: asyncio.Future[None] | None = None
        self.on_writable: Callable[[], None] | None = None

    @property
    def peer(self) -> object:
        """The client's address."""
        address = None if self._transport is None else self._transport.get_extra_info("peername")
        return address[0] if address else None

    @property
    def busy(self) -> bool:
        """A request is being answered, or the client has yet to read the answer."""
        unread = self._transport is not None and self._transport.get_write_buffer_size() > 0
        return self._task is not None or unread

    # --- answers -----------------------------------------------------------------------------------------------------

    def whole(self, status: int, body: bytes) -> None:
        """The whole answer, a JSON document."""
        assert self._transport is not None
        self.answered = True
        self._transport.write(
            b"HTTP/1.1 %d %b\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n%b"
            % (status, reasons.get(status, "Error").encode(), len(body), body)
        )

    def piece(self, data: bytes) -> None:
        """A piece of a streamed answer, the first of which brings the head."""
        self._write_piece(b"%x\r\n%b\r\n" % (len(data), data))

    def last_piece(self, data: bytes) -> None:
        self._write_piece(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))

    def _write_piece(self, chunk: bytes) -> None:
        assert self._transport is not None
        self._transport.write(chunk if self.answered else _STREAM_HEAD + chunk)
        self.answered = True

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
            self._cut(task)
            await asyncio.wait({task})

    def fail(self, status: int, message: str) -> None:
        """Answer with an error of the gateway's, and close the connection."""
        assert self._transport is not None
        self.whole(status, json.dumps(error_body(message, status)).encode())
        self._transport.close()

    def _cut(self, task: "asyncio.Task[None]") -> None:
        """Once: a second cancellation would break off what the first one has to clean up."""
        if not task.cancelling():
            task.cancel()

    # --- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio's by their methods only. Both set TCP_NODELAY.
        self._transport = cast(asyncio.Transport, transport)
        self._server.doors.add(self)
        peer: socket.socket | None = transport.get_extra_info("socket")
        if peer is not None:  # a client that is gone without a word is found out
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                peer.setsockopt(socket.IPPROTO_TCP, option, value)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.forget(self)
        self._data = b""  # requests that nobody waits for
        if self._task is not None:
            self._cut(self._task)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)
        if self.on_writable is not None:
            self.on_writable()
        if self._task is None:
            self._go_on()

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._more_of_body(data)
            return
        self._data = self._data + data if self._data else data
        if self._task is None and self.writable:
            self._next_request()
        elif len(self._data) > MOST_AHEAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    # --- requests ----------------------------------------------------------------------------------------------------

    def _next_request(self) -> None:
        data = self._data
        head_stop = data.find(b"\r\n\r\n")
        if head_stop < 0:
            if not may_be_a_head(data):
                self._hand_over()
            else:
                self._server.expect(self)
            return
        head = read_head(data[:head_stop])
        if head is None:
            self._hand_over()
            return
        self._data = b""
        self._head = head
        self._more_of_body(data[head_stop + 4 :])

    def _more_of_body(self, data: bytes) -> None:
        head = self._head
        assert head is not None
        missing_bytes = head.body_bytes - len(self._body)
        self._body += data[:missing_bytes]
        if len(data) < missing_bytes:
            self._server.expect(self)
            return
        self._data = data[missing_bytes:]
        body, self._body = bytes(self._body), bytearray()
        self._server.unfinished.pop(self, None)
        self._head = None
        self.answered = False
        self._task = asyncio.get_running_loop().create_task(self._server.answer(head, body, self))
        self._task.add_done_callback(self._over)

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._task = self.on_writable = None
        if task.cancelled() or task.exception() is not None:
            if not task.cancelled():
                logger.error("a request could not be served", exc_info=task.exception())
            if self._transport is not None:
                if self.answered or task.cancelled():
                    self._transport.close()
                else:
                    self.fail(500, DEFECT)
            return
        if self.writable:  # a client that does not read its answers gets no more of them
            self._go_on()

    def _go_on(self) -> None:
        """With what the client has sent meanwhile."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        if self._data:
            self._next_request()

    def _hand_over(self) -> None:
        """The connection is aiohttp's from here on."""
        assert self._transport is not None
        self._server.forget(self)
        protocol = self._server.general()
        data, self._data = self._data, b""
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(data)


class HttpServer:
    """All doors, what answers usual requests, and what makes aiohttp's side of a connection."""

    def __init__(
        self,
        answer: Callable[[RequestHead, bytes, HttpConnection], Coroutine[Any, Any, None]],
        general: Callable[[], asyncio.Protocol],
    ) -> None:
        self.answer = answer
        self.general = general
        self.doors: set[HttpConnection] = set()
        # By when the rest of its request must have come; the first is first.
        self.unfinished: dict[HttpConnection, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def connection(self) -> HttpConnection:
        return HttpConnection(self)

    @property
    def busy(self) -> bool:
        return any(connection.busy for connection in self.doors)

    def expect(self, connection: HttpConnection) -> None:
        """A part of a request has come."""
        if connection not in self.unfinished:
            loop = asyncio.get_running_loop()
            self.unfinished[connection] = until_s = loop.time() + REQUEST_WITHIN_S
            if self._timer is None:
                self._timer = loop.call_at(until_s, self._refuse_slow)

    def forget(self, connection: HttpConnection) -> None:
        self.doors.discard(connection)
        self.unfinished.pop(connection, None)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(connection.close() for connection in self.doors))

    def _refuse_slow(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for connection, until_s in list(self.unfinished.items()):
            if until_s > now_s:
                break
            del self.unfinished[connection]
            connection.fail(408, f"the request was not all there after {REQUEST_WITHIN_S:g} s")
        following_s = next(iter(self.unfinished.values()), None)
        self._timer = None if following_s is None else loop.call_at(following_s, self._refuse_slow)
