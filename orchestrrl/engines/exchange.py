"""POST to an engine and read its answer as it comes: HTTP/1.1 for answers of many small pieces, and nothing else.

A connection whose answer was read to its end serves the next request; one that was left before that is closed, which
tells the engine to stop. A general client costs several times as much for each request and each piece.
"""

import asyncio
import errno
import re
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Mapping
from typing import cast
from urllib.parse import unquote, urlsplit

from orchestrrl.core.addresses import without_login
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable
from orchestrrl.engines.base import NoConnection

RETRY_AFTER_S = 1.0
# uvicorn, which serves vLLM, closes a kept connection after 5 s. Where its event loop lags it does so before it reads
# what was just sent, so kept ones are given up well before.
KEEP_IDLE_S = 2.0
STREAM_END_S = 5.0  # between what the reader wanted of an answer and the answer's end
MOST_HEAD_BYTES = 65_536
_OWN_SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # a token of RFC 9110
_ONCE = frozenset({"content-length", "transfer-encoding"})
MOST_PENDING_BYTES = 1 << 20  # of an answer that nobody reads; then the engine has to wait


class ChunkedBody:
    """Takes HTTP's chunked coding off a body, however the network cut it up. Pure."""

    def __init__(self) -> None:
        self.ended = False
        self.surplus = False  # bytes came that are not the body's
        self._rest = b""  # of a line that is not all there
        self._left = 0  # bytes of the present chunk still to come
        self._line_end = False  # the next line is the end of a chunk's content, and empty
        self._trailers = False

    def feed(self, data: bytes) -> list[bytes]:
        """The content of `data`, in pieces. Raises ValueError for what is no such body."""
        pieces: list[bytes] = []
        if self._rest:
            data, self._rest = self._rest + data, b""
        at, end = 0, len(data)
        while at < end:
            if self.ended:
                self.surplus = True
                break
            if self._left:
                stop = min(end, at + self._left)
                pieces.append(data[at:stop])
                self._left -= stop - at
                self._line_end = not self._left
                at = stop
                continue
            line_stop = data.find(b"\r\n", at)
            if line_stop < 0:
                self._rest = data[at:]
                if len(self._rest) > MOST_HEAD_BYTES:
                    raise ValueError("a chunk's line has no end")
                break
            self._line(data[at:line_stop])
            at = line_stop + 2
        return pieces

    def _line(self, line: bytes) -> None:
        if self._line_end:
            if line:
                raise ValueError("a chunk is longer than its size")
            self._line_end = False
        elif self._trailers:
            self.ended = not line
        else:
            digits = line.partition(b";")[0].strip()
            if not digits.isalnum():  # int() takes signs and underscores, too
                raise ValueError(f"a chunk of size {line[:40]!r}")
            self._left = int(digits, 16)
            self._trailers = not self._left


class EngineConnection(asyncio.Protocol):
    """One connection, and the answer that comes over it."""

    def __init__(self, pool: "ConnectionPool") -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.idle_since_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._head: bytes | None = b""  # None: read
        self._chunked: ChunkedBody | None = None
        self._length: int | None = None  # of the body still to come
        self._pieces: list[bytes] = []
        self._pending_bytes = 0
        self._paused = False
        self._keep = False
        self._left = False  # the reader has what it wanted
        self._end_timer: asyncio.TimerHandle | None = None
        self.answered = False  # a byte of the answer has come
        self.ended = False  # all of it has
        self.status = 0
        self.headers: dict[str, str] = {}

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes) -> None:
        self._reset()
        assert self._transport is not None
        self._transport.write(request)

    async def read_head(self) -> None:
        """Wait for `status` and `headers`. Raises OutcomeUnknown when the connection breaks, Permanent when the answer
        is not HTTP."""
        while self._head is not None:
            await self._wait()

    async def read(self) -> bytes:
        """What has come of the body since the last call; empty at its end. Raises as `read_head`."""
        while not self._pieces:
            if self.ended:
                return b""
            await self._wait()
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._pending_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def read_all(self) -> bytes:
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def leave(self) -> None:
        """The reader has what it wanted: the rest is read and dropped, and the connection kept for the next request."""
        if self.ended:
            self._finish()
        elif self.open:
            self._left = True
            self._pieces.clear()
            self._end_timer = asyncio.get_running_loop().call_later(STREAM_END_S, self.close)
            if self._paused and self._transport is not None:
                self._paused = False
                self._transport.resume_reading()

    def close(self) -> None:
        """Break it off; whoever reads gets OutcomeUnknown."""
        if self._transport is not None:
            self._transport.abort()
        self._break(OutcomeUnknown(f"{self._pool.where}: the connection was closed here"))

    # --- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio's by their methods only.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._take(data)
        except ValueError as error:
            self._break(Permanent(f"{self._pool.where}: the answer is not HTTP: {error}"))
            self.close()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        if self._head is None and self._chunked is None and self._length is None and error is None:
            self._end()  # its end is the body's
        else:
            self._break(OutcomeUnknown(f"{self._pool.where}: the connection broke: {error or 'closed by the engine'}"))

    # --- the answer --------------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        if self.ended:
            raise ValueError("bytes that nobody asked for")
        self.answered = True
        if self._head is not None:
            self._head += data
            rest = self._read_head()
            if rest is None:
                return
            data = rest
        if self._chunked is not None:
            pieces = self._chunked.feed(data)
            self._keep = self._keep and not self._chunked.surplus
            self._add(pieces, self._chunked.ended)
        elif self._length is not None:
            if len(data) > self._length:  # the answer is whole; nothing that follows can be trusted
                self._keep, data = False, data[: self._length]
            self._length -= len(data)
            self._add([data] if data else [], self._length == 0)
        else:
            self._add([data] if data else [], False)

    def _add(self, pieces: list[bytes], ended: bool) -> None:
        if pieces and not self._left:
            self._pieces += pieces
            self._pending_bytes += sum(map(len, pieces))
            if self._pending_bytes > MOST_PENDING_BYTES and not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
        if ended:
            self._end()
        else:
            self._wake()

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
        elif self._transport is not None:
            self._transport.close()

    def _read_head(self) -> bytes | None:
        """What came after the head; None while the head is not all there."""
        assert self._head is not None
        head, found, rest = self._head.partition(b"\r\n\r\n")
        if not found:
            if len(head) > MOST_HEAD_BYTES or not (head.startswith(b"HTTP/1.") or b"HTTP/1.".startswith(head)):
                raise ValueError(repr(head[:80]))
            return None
        version, status, self.headers = read_head(head)
        if 100 <= status < 200:  # the answer proper is still to come
            self._head = rest
            return self._read_head() if rest else None
        self._head, self.status = None, status
        coding, length = self.headers.get("transfer-encoding", "").lower(), self.headers.get("content-length")
        if coding and length is not None:
            raise ValueError("transfer-encoding and content-length")
        if coding == "chunked":
            self._chunked = ChunkedBody()
        elif coding:
            raise ValueError(f"transfer-encoding {coding!r}")
        elif status in (204, 304):
            self._length = 0
        elif length is not None:
            if not length.isdecimal():
                raise ValueError(f"content-length {length!r}")
            self._length = int(length)
        connection = self.headers.get("connection", "").lower()
        self._keep = "close" not in connection and (version == b"HTTP/1.1" or "keep-alive" in connection)
        self._keep = self._keep and (self._chunked is not None or self._length is not None)
        return rest

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


def read_head(head: bytes) -> tuple[bytes, int, dict[str, str]]:
    """Version, status and headers (names in lower case) of an answer. Pure. Raises ValueError."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1.") or not status[:3].isdecimal():
        raise ValueError(repr(first[:80]))
    headers: dict[str, str] = {}
    for line in lines:
        name, separator, value = line.partition(":")
        if not separator:
            raise ValueError(f"header {line[:80]!r}")
        name = name.lower()
        if name in headers and name in _ONCE:
            raise ValueError(f"{name} twice")
        headers[name] = value.strip()
    return version.encode(), int(status[:3]), headers


class EngineExchange:
    """One request and its answer. `close` may be called at any time."""

    def __init__(self, pool: "ConnectionPool", request: bytes) -> None:
        self._pool = pool
        self._request = request
        self._connection: EngineConnection | None = None
        self._closed = False

    async def begin(self) -> EngineConnection:
        """Send, and wait for the answer's head. Raises Retryable when the engine cannot be reached, OutcomeUnknown when
        the connection breaks, Permanent when the answer is not HTTP."""
        loop = asyncio.get_running_loop()
        sent_s = 0.0
        while True:
            connection = self._pool.take_kept()
            kept = connection is not None
            if connection is None:
                connection = await self._pool.connect()
            self._connection = connection
            try:
                if self._closed:
                    raise OutcomeUnknown(f"{self._pool.where}: closed before it was sent")
                connection.send(self._request)
                sent_s = loop.time()
                await connection.read_head()
            except OutcomeUnknown:
                # The engine had given the kept connection up before it read what was sent, which shows soon: one that
                # breaks later may have generated meanwhile.
                soon = loop.time() < sent_s + KEEP_IDLE_S
                if kept and soon and not connection.answered and not self._closed:
                    continue
                raise
            return connection

    def leave(self) -> None:
        """The reader has what it wanted of the answer: its end is read and dropped."""
        if self._connection is not None:
            self._connection.leave()
            self._connection = None

    def close(self) -> None:
        """Break it off, unless it has ended; whoever reads gets OutcomeUnknown."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()


class ConnectionPool:
    """Connections to one engine, opened when they are needed, without limit. `close` releases them."""

    def __init__(self, url: str, *, connect_timeout_s: float, headers: Mapping[str, str]) -> None:
        """Raises Permanent for what is no URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise Permanent(f"{without_login(url)}: not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Permanent(f"{without_login(url)}: not a URL")
        self.where = without_login(url)
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        own = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            own.setdefault("Authorization", f"Basic {b64encode(login.encode()).decode()}")
        self._own_names = frozenset(name.lower() for name in own)
        self._head = written(own.items())
        self._idle: deque[EngineConnection] = deque()  # the last used is the last
        self._open: set[EngineConnection] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None

    def exchange(self, path: str, body: bytes, headers: Iterable[tuple[str, str]]) -> EngineExchange:
        """A POST; nothing is sent yet. A header that this pool itself sends wins over one of the same name."""
        line = f"POST {self._path}{path} HTTP/1.1\r\n".encode()
        head = written(pair for pair in headers if pair[0].lower() not in self._own_names)
        return EngineExchange(self, b"%b%b%bContent-Length: %d\r\n\r\n%b" % (line, self._head, head, len(body), body))

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
                    lambda: EngineConnection(self), self._host, self._port, ssl=self._tls
                )
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError; a host's name may be none
            if isinstance(error, OSError) and error.errno in _OWN_SHORTAGE:
                raise NoConnection(f"{self.where}: no connection can be opened: {error}", RETRY_AFTER_S) from error
            reason = str(error) or f"no connection within {self._connect_timeout_s:g} s"
            raise Retryable(f"{self.where}: cannot be reached: {reason}", RETRY_AFTER_S) from error
        self._open.add(connection)
        return connection

    def keep(self, connection: EngineConnection) -> None:
        """Its answer has ended well."""
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.append(connection)
        if self._sweep_timer is None:
            self._sweep_timer = loop.call_later(KEEP_IDLE_S, self._sweep)

    def forget(self, connection: EngineConnection) -> None:
        """It is closed."""
        self._open.discard(connection)

    def close(self) -> None:
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        self._idle.clear()
        for connection in list(self._open):
            connection.close()

    def _sweep(self) -> None:
        """Close what nobody has used for long."""
        loop = asyncio.get_running_loop()
        while self._idle and self._idle[0].idle_since_s + KEEP_IDLE_S <= loop.time():
            self._idle.popleft().close()
        self._sweep_timer = loop.call_at(self._idle[0].idle_since_s + KEEP_IDLE_S, self._sweep) if self._idle else None


def written(headers: Iterable[tuple[str, str]]) -> bytes:
    """As HTTP has them. Bytes of a value that are no UTF-8 are those that a surrogate escape stands for. Raises
    ValueError for a name or a value that would break out of its line."""
    lines = []
    for name, value in headers:
        if "\r" in value or "\n" in value or "\0" in value or _NAME.fullmatch(name) is None:
            raise ValueError(f"header {name}: {value!r} does not fit in a line")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode(errors="surrogateescape")
