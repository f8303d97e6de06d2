"""An HTTP/1.1 client for engines, optimised for answers that arrive in many small pieces.

httptools parses the answers. A connection is reused after its answer has been read to the end. Closing an exchange
earlier closes its connection, which makes the engine abort the request. A general-purpose client would need several
times more CPU time per request and per piece.
"""

import asyncio
import errno
import re
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import Iterable
from typing import cast
from urllib.parse import unquote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from orchestrrl.core.addresses import ip_of, without_login
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable
from orchestrrl.engines.base import NoConnection

RETRY_AFTER_S = 1.0
# uvicorn, which serves vLLM, closes an idle connection after 5 s. If its event loop lags, it may do so before it reads
# a new request, so idle connections are closed here well before that.
KEEP_IDLE_S = 2.0
STREAM_END_S = 5.0  # the longest wait for an answer's end after the reader has left it
MOST_FRAMING_BYTES = 65_536  # consecutive bytes of a response head, chunk sizes or trailers
_OWN_SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # a token of RFC 9110
_FRAMING = frozenset({"content-length", "transfer-encoding"})
MOST_PENDING_BYTES = 1 << 20  # unread bytes of an answer at which reading from the socket pauses


class EngineConnection(asyncio.Protocol):
    """One connection to an engine, with the answer that is currently being read."""

    def __init__(self, pool: "ConnectionPool") -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.idle_since_s = 0.0
        self._parser = HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)  # some proxies pad them
        self._reset()

    def _reset(self) -> None:
        self._framing_bytes = 0  # received since the last piece of the body
        self._pieces: list[bytes] = []
        self._pending_bytes = 0
        self._paused = False
        self._keep = False
        self._left = False  # the reader needs no more of the answer
        self._end_timer: asyncio.TimerHandle | None = None
        self.answered = False  # a byte of the answer has arrived
        self.ended = False  # the whole answer has arrived
        self.status = 0  # 0 until the head has been read
        self.headers: dict[str, str] = {}

    @property
    def open(self) -> bool:
        return not self._transport.is_closing()

    def send(self, request: bytes) -> None:
        self._reset()
        self._transport.write(request)

    async def read_head(self) -> None:
        """Wait until the status and headers of the answer have arrived in `status` and `headers`. Raises OutcomeUnknown
        if the connection breaks, and Permanent if the answer is not HTTP."""
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """Wait for the next bytes of the body and return them, or return b"" at the end of the body. Raises the same
        errors as `read_head`."""
        while not self._pieces:
            if self.ended:
                return b""
            await self._wait()
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._pending_bytes = 0
        self._resume_reading()
        return data

    async def read_all(self) -> bytes:
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def leave(self) -> None:
        """Discard the rest of the answer, and keep the connection for the next request if the answer ends within
        `STREAM_END_S`."""
        if self.ended:
            self._finish()
        elif self.open:
            self._left = True
            self._pieces.clear()
            self._end_timer = asyncio.get_running_loop().call_later(STREAM_END_S, self.close)
            self._resume_reading()

    def close(self) -> None:
        """Abort the connection. A pending read raises OutcomeUnknown."""
        self._transport.abort()
        self._break(OutcomeUnknown(f"{self._pool.where}: the connection was closed by this client"))

    # --- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods but not its class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.ended:  # no request is open
            self.close()
            return
        self.answered = True
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if self._framing_bytes > MOST_FRAMING_BYTES:
                raise ValueError(f"the response head, chunk sizes or trailers exceed {MOST_FRAMING_BYTES} bytes")
        except (HttpParserError, HttpParserUpgrade, ValueError) as error:
            if not self.ended:
                self._break(Permanent(f"{self._pool.where}: the answer is not HTTP: {error.__context__ or error}"))
                self.close()
                return
            self._keep = False  # the answer is complete, but further input cannot be trusted
        if self._pending_bytes > MOST_PENDING_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        if self.ended:
            self._end()
        else:
            self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self)
        if self.status and self.headers.keys().isdisjoint(_FRAMING) and error is None:
            self._end()  # the end of the connection marks the end of the body
        else:
            self._break(OutcomeUnknown(f"{self._pool.where}: the connection broke: {error or 'closed by the engine'}"))

    # --- httptools ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.ended:
            raise ValueError("unexpected bytes after the end of the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # trailers are ignored
            # Strip spaces only, so that the transfer coding is read as in httptools.
            key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip(" ")
            self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        self._framing_bytes = 0
        status, version = self._parser.get_status_code(), self._parser.get_http_version()
        if version not in ("1.0", "1.1") or status < 100:
            raise ValueError(
                f"the response must be HTTP/1.0 or HTTP/1.1 with a status >= 100, got HTTP/{version} {status}"
            )
        if status < 200:  # an interim response; the final one follows
            self.headers.clear()
            return
        coding = self.headers.get("transfer-encoding", "chunked")
        if coding.lower() != "chunked":
            raise ValueError(f"transfer-encoding: must be chunked, got {coding!r}")
        self.status = status
        self._keep = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        if not self._left:
            self._pieces.append(body)
            self._pending_bytes += len(body)

    def on_message_complete(self) -> None:
        self.ended = self.status > 0

    # --- the answer --------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self.ended = True
        self._wake()
        if self._left:
            self._finish()

    def _finish(self) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
            self._end_timer = None
        if self._keep and self.open:
            self._pool.keep(self)
        else:
            self._transport.close()

    def _resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self._pieces:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _break(self, error: OrchestrRLError) -> None:
        if self._error is None and not self.ended:
            self._error = error
        if self._end_timer is not None:
            self._end_timer.cancel()
            self._end_timer = None
        self._wake()


class EngineExchange:
    """One request to an engine and its answer. `close` may be called at any time."""

    def __init__(self, pool: "ConnectionPool", request: bytes, *, alone: bool) -> None:
        """Prepare an exchange. If `alone` is True, the exchange opens a new connection instead of reusing an idle
        one."""
        self._pool = pool
        self._request = request
        self._alone = alone
        self._connection: EngineConnection | None = None
        self.sent = False
        self.closed = False  # `close` was called
        self.answered = False  # the reader has received a part of the answer, so the engine has the request

    async def begin(self) -> EngineConnection:
        """Send the request, wait for the head of the answer, and return the connection. Raises Retryable if the engine
        is unreachable, OutcomeUnknown if the connection breaks, and Permanent if the answer is not HTTP."""
        loop = asyncio.get_running_loop()
        sent_s = 0.0
        while True:
            connection = None if self._alone else self._pool.take_kept()
            kept = connection is not None
            if connection is None:
                connection = await self._pool.connect()
            self._connection = connection
            try:
                if self.closed:
                    raise OutcomeUnknown(f"{self._pool.where}: the request was aborted before it was sent")
                connection.send(self._request)
                self.sent = True
                sent_s = loop.time()
                await connection.read_head()
            except OutcomeUnknown:
                # The engine closed the idle connection before it read the request. That shows soon; if the connection
                # breaks later, the engine may have generated tokens.
                soon = loop.time() < sent_s + KEEP_IDLE_S
                if kept and soon and not connection.answered and not self.closed:
                    continue
                raise
            return connection

    def leave(self) -> None:
        """Discard the rest of the answer, and keep the connection for the next request if the answer ends within
        `STREAM_END_S`."""
        if self._connection is not None:
            self._connection.leave()
            self._connection = None

    def close(self) -> None:
        """Abort the exchange unless it has ended. A pending read raises OutcomeUnknown."""
        self.closed = True
        if self._connection is not None:
            self._connection.close()


NEXT_ADDRESS_AFTER_S = 0.25  # delay between connection attempts to the addresses of a name (RFC 8305)


class ConnectionPool:
    """The connections to one engine. They are opened when needed, without a limit on their number, and released by
    `close`."""

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        """Parse the engine's URL. Raises Permanent if it is invalid."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise Permanent(f"{without_login(url)}: is not a valid URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Permanent(f"{without_login(url)}: must be an http or https URL with a host")
        self.where = without_login(url)
        self._host = parts.hostname
        # A literal address needs no race of several attempts, which would slow every connection.
        self._next_address_after_s = NEXT_ADDRESS_AFTER_S if ip_of(parts.hostname) is None else None
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        own = {"Host": parts.netloc.rpartition("@")[2]}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            own["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
        self._own_names = frozenset(name.lower() for name in own) | {"content-type"}
        self._head = written(own.items())
        self._idle: deque[EngineConnection] = deque()  # in order of last use
        self._open: set[EngineConnection] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None

    def exchange(
        self,
        path: str,
        body: bytes,
        headers: Iterable[tuple[str, str]] = (),
        *,
        method: str = "POST",
        content_type: str = "application/json",
        alone: bool = False,
    ) -> EngineExchange:
        """Return an exchange whose request is not yet sent. The pool's headers and `content_type` override headers of
        the same name in `headers`.

        If `alone` is True, the exchange uses a new connection, so that a control call is not lost. vLLM closes a
        connection that has been idle for 5 s. If vLLM's event loop lags, as on a busy host, vLLM may close the
        connection although a new request has arrived on it.
        """
        line = f"{method} {self._path}{path} HTTP/1.1\r\n".encode()
        kept = (pair for pair in headers if pair[0].lower() not in self._own_names)
        head = written((("Content-Type", content_type), *kept))
        if alone:
            head += b"Connection: close\r\n"
        request = b"%b%b%bContent-Length: %d\r\n\r\n%b" % (line, self._head, head, len(body), body)
        return EngineExchange(self, request, alone=alone)

    def take_kept(self) -> EngineConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open and connection.idle_since_s + KEEP_IDLE_S > asyncio.get_running_loop().time():
                return connection
            connection.close()
        return None

    async def connect(self) -> EngineConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                # asyncio sets TCP_NODELAY.
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(self),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    happy_eyeballs_delay=self._next_address_after_s,
                )
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError; UnicodeError: an invalid host name
            if isinstance(error, OSError) and error.errno in _OWN_SHORTAGE:
                raise NoConnection(f"{self.where}: cannot open a connection: {error}", RETRY_AFTER_S) from error
            reason = str(error) or f"no connection within {self._connect_timeout_s:g} s"
            raise Retryable(f"{self.where}: cannot be reached: {reason}", RETRY_AFTER_S) from error
        self._open.add(connection)
        return connection

    def keep(self, connection: EngineConnection) -> None:
        """Keep a connection, after its answer has ended, for the next request."""
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.append(connection)
        if self._sweep_timer is None:
            self._sweep_timer = loop.call_later(KEEP_IDLE_S, self._sweep)

    def forget(self, connection: EngineConnection) -> None:
        """Remove a closed connection from the pool."""
        self._open.discard(connection)

    def close(self) -> None:
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        self._idle.clear()
        for connection in list(self._open):
            connection.close()

    def _sweep(self) -> None:
        """Close the connections that have been idle for `KEEP_IDLE_S`."""
        loop = asyncio.get_running_loop()
        while self._idle and self._idle[0].idle_since_s + KEEP_IDLE_S <= loop.time():
            self._idle.popleft().close()
        self._sweep_timer = loop.call_at(self._idle[0].idle_since_s + KEEP_IDLE_S, self._sweep) if self._idle else None


def written(headers: Iterable[tuple[str, str]]) -> bytes:
    """Return the headers as bytes in HTTP's format. Surrogate escapes in a value become the bytes that they represent.
    Raises ValueError if a name is invalid or a value contains a line break or NUL."""
    lines = []
    for name, value in headers:
        if "\r" in value or "\n" in value or "\0" in value or _NAME.fullmatch(name) is None:
            raise ValueError(f"a header must have a valid name and a one-line value, got {name!r} with {value!r}")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode(errors="surrogateescape")
