"""The TCP transport: one plain socket connection per link. It works on every host and does not need torch.

Sockets block, and the kernel enforces time limits (SO_RCVTIMEO, SO_SNDTIMEO). A chunk therefore usually needs only one
system call, which runs without the global interpreter lock. TCP_USER_TIMEOUT detects a host that disappears while bytes
are in flight.
"""

import contextlib
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections import deque

from orchestrrl.weights.transports.base import IncomingLink, LinkBroken, OutgoingLink
from orchestrrl.weights.transports.listener import LinkListener, knock, widen

BUFFER_BYTES = 4 * 1024 * 1024
SAME_HOST_BUFFER_BYTES = 512 * 1024  # without network latency, small buffers keep the data in the CPU cache
TIMEVAL = struct.Struct("@ll")


class TcpTransport:
    """The TCP transport. `buffer_bytes` is the requested size of socket buffers. Links inside one host use smaller
    buffers."""

    def __init__(self, host: str, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._buffer_bytes = buffer_bytes
        self._listener = LinkListener(host, buffer_bytes)

    def open(self) -> str:
        return self._listener.open()

    def accept(self, key: str, timeout_s: float) -> IncomingLink:
        return TcpIncoming(self._fitted(self._listener.accept(key, timeout_s)))

    def dial(self, address: str, key: str, timeout_s: float) -> OutgoingLink:
        sock, _ = knock(address, key, timeout_s, self._buffer_bytes)
        return TcpOutgoing(self._fitted(sock))

    def close(self) -> None:
        self._listener.close()

    def _fitted(self, sock: socket.socket) -> socket.socket:
        with contextlib.suppress(OSError):  # the other endpoint has gone: the next use of the socket raises
            if sock.getsockname()[0] == sock.getpeername()[0]:
                widen(sock, min(self._buffer_bytes, SAME_HOST_BUFFER_BYTES))
        return sock


class _Chunk:
    """A chunk in flight. `rest` is the part that is not yet sent or received. Its bytes move while the caller waits for
    this chunk or for another chunk of the link."""

    def __init__(self, link: "_Link", rest: memoryview) -> None:
        self.link = link
        self.rest = rest

    def wait(self, timeout_s: float) -> None:
        self.link.work_until(self, timeout_s)


class _Link(ABC):
    OPTION: int  # the socket option of its time limit

    def __init__(self, sock: socket.socket) -> None:
        self._at_work = threading.Lock()
        self._socket = sock
        self._chunks: deque[_Chunk] = deque()
        self._timeout_s = 0.0

    def work_until(self, chunk: _Chunk, timeout_s: float) -> None:
        if chunk.rest:
            self._watch(timeout_s)
        while chunk.rest:
            self._drop_finished()
            first = self._chunks[0]
            try:
                with self._at_work:
                    moved = self._move(first.rest)
            except BlockingIOError as error:
                raise LinkBroken(f"no byte was transferred for {timeout_s:g} s") from error
            except OSError as error:
                raise LinkBroken(f"the connection failed: {error}") from error
            if moved == 0:
                raise LinkBroken("the other endpoint closed the link")
            first.rest = first.rest[moved:]
        self._drop_finished()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other endpoint has closed it already
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a waiting thread
        with self._at_work:  # a descriptor closed earlier could be reused while that thread still uses it
            self._socket.close()

    def _drop_finished(self) -> None:
        while self._chunks and not self._chunks[0].rest:
            self._chunks.popleft()

    def _take(self, view: memoryview) -> _Chunk:
        chunk = _Chunk(self, view.cast("B"))
        self._chunks.append(chunk)
        return chunk

    def _watch(self, timeout_s: float) -> None:
        if timeout_s == self._timeout_s:
            return
        self._timeout_s = timeout_s
        whole_s = int(timeout_s)
        try:
            limit = TIMEVAL.pack(whole_s, max(int((timeout_s - whole_s) * 1e6), 0 if whole_s else 1))
            self._socket.setsockopt(socket.SOL_SOCKET, self.OPTION, limit)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(int(timeout_s * 1e3), 1))
        except OSError as error:
            raise LinkBroken(f"cannot set the timeouts of the connection: {error}") from error

    @abstractmethod
    def _move(self, rest: memoryview) -> int:
        """Move as many bytes of `rest` as possible within the time limit. Return the number of bytes moved, which is 0
        if the other endpoint has closed the link. Raises OSError if no byte moves within the time limit or the
        connection is lost."""


class TcpOutgoing(_Link):
    OPTION = socket.SO_SNDTIMEO

    def send(self, chunk: memoryview) -> _Chunk:
        taken = self._take(chunk)
        if self._chunks[0] is taken:
            try:
                with self._at_work:
                    taken.rest = taken.rest[self._socket.send(taken.rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass  # the kernel's buffer is full: `wait` sends the rest
            except OSError as error:
                raise LinkBroken(f"the connection failed: {error}") from error
        return taken

    def _move(self, rest: memoryview) -> int:
        return self._socket.send(rest)


class TcpIncoming(_Link):
    OPTION = socket.SO_RCVTIMEO

    def receive(self, into: memoryview) -> _Chunk:
        return self._take(into)

    def _move(self, rest: memoryview) -> int:
        return self._socket.recv_into(rest, len(rest), socket.MSG_WAITALL)
