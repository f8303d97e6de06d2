"""The gateway's HTTP server, which parses requests with httptools and writes responses.

A general-purpose HTTP server would cost more per request and per piece of an answer than the gateway's own work. This
server accepts and refuses the same requests as the server of aiohttp
(tests/orchestrrl/gateway/test_http_connection_oracle.py sends the same bytes to both servers). As in aiohttp, a client
that closes its side of the connection is treated as disconnected, even if it can still read.
"""

import asyncio
import json
import logging
import re
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from http.client import responses as reasons
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from orchestrrl.core.errors import cut
from orchestrrl.gateway.http.field_types import HttpRefusal
from orchestrrl.gateway.http.responses import error_body

logger = logging.getLogger(__name__)

DEFECT = "internal error of the gateway"  # the message of a 500 response
MOST_FIELD_BYTES = 8190  # size of the request line's URL, and of each header
MOST_HEADERS = 128
MOST_FRAMING_BYTES = 65_536  # consecutive bytes of a request head, chunk sizes or trailers
MOST_BODY_BYTES = 64 << 20
MOST_AHEAD_BYTES = 1 << 16  # size of pipelined requests, sent before the current answer is complete
REQUEST_WITHIN_S = 120.0  # from a request's first byte to its last
LINGER_S = 5.0  # a refused client has this long to read its answer and stop sending
# Detects a client whose machine is unreachable after two minutes.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))
# The parser does not name the header at fault.
_FAULTY_HEADER = re.compile(rb"^([A-Za-z0-9-]+):[^\n]*?[\0-\x08\x0b\x0c\x0e-\x1f\x7f]", re.MULTILINE)
_JSON = "application/json; charset=utf-8"


@dataclass(frozen=True)
class HttpRequest:
    """One HTTP request. Header values are decoded as UTF-8 with surrogate escapes for invalid bytes."""

    method: str
    url: str
    headers: tuple[tuple[str, str], ...] = field(repr=False)  # may include credentials
    body: bytes = field(repr=False)  # as received, possibly compressed
    version: str = "1.1"  # HTTP version
    keep_alive: bool = True  # the connection stays open after this request

    @cached_property
    def fields(self) -> Mapping[str, str]:
        """The header values by lower-case name. If a name occurs more than once, only its first value is included."""
        return {name.lower(): value for name, value in reversed(self.headers)}


class HttpAnswer(NamedTuple):
    """A complete HTTP response."""

    body: bytes
    status: int = 200
    content_type: str = _JSON
    headers: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def of_json(cls, value: Any, status: int = 200) -> "HttpAnswer":
        return cls(json.dumps(value).encode(), status)

    @classmethod
    def of_refusal(cls, refusal: HttpRefusal) -> "HttpAnswer":
        body = error_body(str(refusal), refusal.status, refusal.param)
        return cls.of_json(body, refusal.status)._replace(headers=refusal.headers)


EVENTS = HttpAnswer(b"", content_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def log_refusal(asked: str, peer: object, status: int, message: str) -> None:
    """Log the refusal of a request if `status` is below 500. The log entry is one line without unprintable characters.
    Refusals with other statuses are logged where they occur."""
    if status >= 500:
        return
    text = "".join(character if character.isprintable() else " " for character in f"{asked}: {status}: {message}")
    logger.warning("refused a request of %s: %s", peer or "a client that has left", cut(text, 500))


class HttpConnection(asyncio.Protocol):
    """One HTTP connection. The handler of a request writes its response to the connection, and is cancelled if the
    client disconnects."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._parser = HttpRequestParser(self)
        self._framing_bytes = 0  # received since the last piece of a body
        self._begun = False  # a part of a request has been received
        self._timer: asyncio.TimerHandle | None = None  # refuses a request that stays incomplete
        self._begin_request()
        self._requests: deque[HttpRequest | HttpRefusal] = deque()
        self._ahead_bytes = 0  # received while a request is answered
        self._refusing = False  # further input is discarded
        self._task: asyncio.Task[None] | None = None
        self._keep = True  # the connection stays open after the current request
        self._version = "1.1"  # HTTP version of the current request
        self._bodiless = False  # the current request is a HEAD
        self.answered = False  # the head of the response has been written
        self._paused = False
        self.writable = True
        self._drained: asyncio.Future[None] | None = None
        self.on_writable: Callable[[], None] | None = None

    def _begin_request(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._has_head = False  # True: further headers are trailers, which are ignored
        self._continue_due = False
        self._body = bytearray()

    @property
    def peer(self) -> object:
        """The client's IP address, or None if the connection is closed."""
        address = self._transport.get_extra_info("peername")
        return address[0] if address else None

    @property
    def busy(self) -> bool:
        """Return whether a request is being answered, or a response has not been sent completely."""
        return self._task is not None or self._transport.get_write_buffer_size() > 0

    # --- answers -----------------------------------------------------------------------------------------------------

    def whole(self, answer: HttpAnswer) -> None:
        head = self._head(answer, f"Content-Length: {len(answer.body)}\r\n")
        self._transport.write(head + (b"" if self._bodiless else answer.body))

    def piece(self, data: bytes, *, last: bool = False, form: HttpAnswer = EVENTS) -> None:
        """Write a piece of a streamed response. The head of the response, which has the status and headers of `form`,
        is written before the first piece. If `last` is set, the response ends after the piece."""
        end = b"0\r\n\r\n" if last else b""
        chunked = self._version == "1.1"  # in HTTP/1.0, the response ends with the connection
        head = b""
        if not self.answered:
            self._keep = self._keep and chunked
            head = self._head(form, "Transfer-Encoding: chunked\r\n" if chunked else "")
        if not data:  # an empty chunk would end the response
            self._transport.write(head + (end if chunked else b""))
            return
        self._transport.write(b"%b%x\r\n%b\r\n%b" % (head, len(data), data, end) if chunked else head + data)

    def _head(self, answer: HttpAnswer, framing: str) -> bytes:
        self.answered = True
        more = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items()) if answer.headers else ""
        return (
            f"HTTP/1.1 {answer.status} {reasons.get(answer.status, 'Error')}\r\nContent-Type: {answer.content_type}\r\n"
            f"{framing}{more}{self._connection_header()}\r\n"
        ).encode(errors="surrogateescape")

    def cut(self) -> None:
        """Break off the response, so that the client does not take it as complete."""
        self._transport.abort()

    def _connection_header(self) -> str:
        if not self._keep:
            return "Connection: close\r\n"
        return "Connection: keep-alive\r\n" if self._version == "1.0" else ""

    async def drain(self) -> None:
        """Wait until the client has read enough of the response that more can be written."""
        if not self.writable:
            self._drained = self._drained or asyncio.get_running_loop().create_future()
            await self._drained

    async def close(self) -> None:
        """Close the connection, cancel the current request and wait until its handler has ended."""
        task = self._task
        self._transport.close()
        if task is not None:
            self._cut(task)
            await asyncio.wait({task})

    def refuse(self, refusal: HttpRefusal) -> None:
        """Respond with an error and close the connection. Further input is discarded."""
        self._refusing, self._keep = True, False
        self._stop_timer()
        self._requests.clear()
        self.whole(HttpAnswer.of_refusal(refusal))
        if self._transport.can_write_eof():
            # Closing with unread data would reset the connection, and the client might lose the response.
            self._transport.write_eof()
            self._resume_reading()
            asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)
        else:
            self._transport.close()

    def _cut(self, task: "asyncio.Task[None]") -> None:
        """Cancel the task, unless it was already cancelled. A second cancellation would interrupt the cleanup after the
        first."""
        if not task.cancelling():
            task.cancel()

    # --- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods but not its class. Both set TCP_NODELAY.
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        peer: socket.socket | None = transport.get_extra_info("socket")
        if peer is not None:  # detects a client that vanished without closing
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                peer.setsockopt(socket.IPPROTO_TCP, option, value)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._stop_timer()
        self._requests.clear()
        self._begin_request()
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
        self._advance()

    def data_received(self, data: bytes) -> None:
        if self._refusing:
            return
        is_ahead = self._task is not None or bool(self._requests)  # the data belongs to a pipelined request
        self._feed(data)
        self._advance()
        if is_ahead and (self._task is not None or self._requests):
            self._ahead_bytes += len(data)
            if self._ahead_bytes > MOST_AHEAD_BYTES and not self._paused:
                self._paused = True
                self._transport.pause_reading()

    def _feed(self, data: bytes) -> None:
        self._framing_bytes += len(data)
        try:
            while data:
                try:
                    self._parser.feed_data(data)
                    data = b""
                except HttpParserUpgrade as upgrade:
                    data = self._without_upgrade() + data[upgrade.args[0] :]
            if self._framing_bytes > MOST_FRAMING_BYTES:
                raise _endless()
        except (HttpParserError, HttpRefusal) as error:
            # The faulty request is refused after the earlier requests have been answered.
            cause = error.__context__ if isinstance(error, HttpParserError) else error
            refusal = cause if isinstance(cause, HttpRefusal) else _parser_refusal(error, data)
            if isinstance(error, HttpParserCallbackError) and refusal is not cause:
                logger.error("failed to parse a request", exc_info=cause)
                refusal = HttpRefusal(DEFECT, status=500)
            self._refusing = True
            self._ended()
            self._requests.append(refusal)

    def _without_upgrade(self) -> bytes:
        """Return the head of an upgrade request without its Upgrade header, and reset the parser. With the Upgrade
        header, the parser would skip the body of the request."""
        headers = [b"%b: %b\r\n" % header for header in self._headers if header[0].lower() != b"upgrade"]
        line = b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, self._parser.get_http_version().encode())
        head = b"%b\r\n%b\r\n" % (line, b"".join(headers))
        self._parser = HttpRequestParser(self)
        self._begin_request()
        return head

    # --- httptools ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._begun = True

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._check_size(len(self._url), len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._check_size(len(name) + len(value), len(name) + len(value))
        if not self._has_head:
            self._headers.append((name, value))

    def _check_size(self, field_bytes: int, more_bytes: int) -> None:
        self._head_bytes += more_bytes
        if field_bytes > MOST_FIELD_BYTES:
            raise HttpRefusal(
                f"the request line and each header must have at most {MOST_FIELD_BYTES} bytes, got {field_bytes}",
                status=431,
            )
        if self._head_bytes > MOST_FRAMING_BYTES:
            raise _endless()

    def on_headers_complete(self) -> None:
        if len(self._headers) > MOST_HEADERS:
            raise HttpRefusal(
                f"a request must have at most {MOST_HEADERS} headers, got {len(self._headers)}", status=431
            )
        self._framing_bytes, self._has_head = 0, True
        names = [name.lower() for name, _ in self._headers]
        is_latest = self._parser.get_http_version() == "1.1"
        if is_latest and names.count(b"host") != 1:
            raise HttpRefusal(f"Host: must be given exactly once, got {names.count(b'host')} Host headers", "Host")
        if b"content-length" in names and int(self._headers[names.index(b"content-length")][1]) > MOST_BODY_BYTES:
            raise _too_large()
        if b"expect" in names:
            expected = self._headers[names.index(b"expect")][1].strip().decode(errors="replace")
            if expected.lower() != "100-continue":
                raise HttpRefusal(f"Expect: must be 100-continue, got {cut(repr(expected), 80)}", "Expect", status=417)
            self._continue_due = is_latest and not self._parser.should_upgrade()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        self._body += body
        if len(self._body) > MOST_BODY_BYTES:
            raise _too_large()

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            if self._parser.get_method() == b"CONNECT":
                raise HttpRefusal("CONNECT: Method Not Allowed", status=405)
            return  # it is parsed again without the Upgrade header
        headers = tuple(
            (name.decode("latin-1"), value.strip(b" \t").decode("utf-8", "surrogateescape"))
            for name, value in self._headers
        )
        method, url = self._parser.get_method().decode(), self._url.decode("utf-8", "surrogateescape")
        version, keep_alive = self._parser.get_http_version(), self._parser.should_keep_alive()
        self._requests.append(HttpRequest(method, url, headers, bytes(self._body), version, keep_alive))
        self._ended()

    def _ended(self) -> None:
        self._begun = False
        self._stop_timer()
        self._begin_request()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- requests in order -------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Start the next request, if there is one and the client has read the responses to the earlier requests."""
        if self._task is not None or not self.writable or self._transport.is_closing():
            return
        if self._refusing and not self._requests:  # already refused
            return
        if self._requests:
            request = self._requests.popleft()
            self.answered = False
            if isinstance(request, HttpRefusal):
                log_refusal("HTTP", self.peer, request.status, str(request))
                self.refuse(request)
                return
            self._keep, self._version, self._bodiless = request.keep_alive, request.version, request.method == "HEAD"
            self._task = asyncio.get_running_loop().create_task(self._server.answer(request, self))
            self._task.add_done_callback(self._over)
        if self._requests:
            return
        self._ahead_bytes = 0
        self._resume_reading()
        if self._task is not None:
            return
        if self._continue_due:
            self._continue_due = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._begun and self._timer is None:
            slow = HttpRefusal(f"the request was not complete after {REQUEST_WITHIN_S:g} s", status=408)
            self._timer = asyncio.get_running_loop().call_later(REQUEST_WITHIN_S, self.refuse, slow)

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._task = self.on_writable = None
        self._bodiless = False
        failed = not task.cancelled() and task.exception() is not None
        if failed:
            logger.error("failed to serve a request", exc_info=task.exception())
        if failed and not self.answered:
            self.refuse(HttpRefusal(DEFECT, status=500))
        elif failed or task.cancelled() or not self._keep:
            self._transport.close()
        else:
            self._advance()

    def _resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()


def _endless() -> HttpRefusal:
    return HttpRefusal(
        f"a request head, chunk sizes and trailers must each have at most {MOST_FRAMING_BYTES} bytes", status=431
    )


def _too_large() -> HttpRefusal:
    return HttpRefusal(f"the body must have at most {MOST_BODY_BYTES} bytes", status=413)


def _parser_refusal(error: Exception, data: bytes) -> HttpRefusal:
    """Return the refusal of a request that the parser rejected. The message contains the parser's error and at most the
    name of a header, because the rest of the request may contain a credential."""
    if data.startswith(b"\x16\x03"):
        return HttpRefusal("the request is HTTPS, but this port serves HTTP")
    named = _FAULTY_HEADER.search(data)
    name = None if named is None else named[1].decode()
    return HttpRefusal(f"{name}: {error}" if name else f"the request is not HTTP: {error}", name)


class HttpServer:
    """The listeners and connections of one HTTP server, and the handler of their requests."""

    def __init__(self, answer: Callable[[HttpRequest, HttpConnection], Coroutine[Any, Any, None]]) -> None:
        self.answer = answer
        self.connections: set[HttpConnection] = set()
        self._listeners: list[asyncio.Server] = []

    async def listen(self, host: str, port: int, *, shared: bool = False) -> int:
        """Listen on a port and return its number. Port 0 selects a free port. If `shared` is set, other processes may
        listen on the same port."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: HttpConnection(self), host, port, backlog=4096, reuse_port=shared or None
        )
        self._listeners.append(server)
        bound_port: int = server.sockets[0].getsockname()[1]
        return bound_port

    @property
    def busy(self) -> bool:
        return any(connection.busy for connection in self.connections)

    async def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        await asyncio.gather(*(connection.close() for connection in self.connections))
