"""The listener of a peer, which accepts senders' connections by the key of their link.

The sender connects and sends the key; the receiver answers when its process accepts a link with that key. Connections
without a valid key are limited in bytes, time and number, and are closed without an answer.

    sender:   magic, version (1 byte), length of the key (2 bytes, network order), key
    receiver: magic, version, length of the answer (2 bytes), answer

A transport with its own connections (gloo, NCCL) uses the listener only for rendezvous. It keeps the socket open to
detect at once that the other process has exited.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from orchestrrl.core.clock import stop
from orchestrrl.weights.transports.base import LinkBroken, NotYet

MAGIC = b"ORlw"
VERSION = 2
GREETING = struct.Struct("!4sBH")
MOST_BYTES = 1024  # of a key, or an answer
INTRODUCED_WITHIN_S = 5.0
MOST_STRANGERS = 128
MOST_WAITING = 4096
REDIAL_S = 0.05
ANSWERED_WITHIN_S = 10.0  # once both endpoints are connected
# Transient errors of connect: the path may not be up yet (a circuit is changing, a route is being learnt).
MAY_COME = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.EAGAIN, errno.ENETDOWN})

log = logging.getLogger(__name__)


class LinkListener:
    """A listener that accepts senders' connections in a separate thread, which `open` starts."""

    def __init__(self, host: str, buffer_bytes: int = 0) -> None:
        self._host = host
        self._buffer_bytes = buffer_bytes
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, socket.socket] = OrderedDict()
        self._end: Callable[[], object] = lambda: None  # stops the thread
        self._thread: threading.Thread | None = None
        self._closed = False

    def open(self) -> str:
        """Start to listen; return the address as `host:port`, with an IPv6 host in brackets. Raises OSError if the host
        cannot be resolved or bound."""
        family, _, _, _, place = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0]
        server = socket.create_server((str(place[0]), 0), family=family, backlog=256)
        server.setblocking(False)
        widen(server, self._buffer_bytes)
        loop = asyncio.new_event_loop()
        attending = loop.create_task(self._attend(server))

        def end() -> None:
            loop.remove_reader(server)  # else a connection could be accepted for the cancelled wait, and leak
            attending.cancel()

        self._end = partial(loop.call_soon_threadsafe, end)
        self._thread = threading.Thread(target=_run, args=(loop, attending), name="weights-door", daemon=True)
        self._thread.start()
        return address_of(self._host, server.getsockname()[1])

    def accept(self, key: str, timeout_s: float, answer: bytes = b"") -> socket.socket:
        """Wait for the sender of link `key`, send it `answer`, and return a blocking socket to it. Raises NotYet if the
        sender does not connect within `timeout_s`, and LinkBroken if the listener is closed or the sender
        disconnects."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                left_s = max(0.0, until_s - time.monotonic())
                if not self._changed.wait_for(lambda: key in self._waiting or self._closed, left_s):
                    raise NotYet(f"no sender connected for link {key!r} within {timeout_s:g} s")
                if key not in self._waiting:
                    raise LinkBroken("this transport is closed")
                found = self._waiting.pop(key)
                if _is_there(found):
                    break
                found.close()
        try:
            found.settimeout(ANSWERED_WITHIN_S)
            found.sendall(GREETING.pack(MAGIC, VERSION, len(answer)) + answer)
            found.settimeout(None)
        except OSError as error:
            found.close()
            raise LinkBroken(f"cannot answer the sender of link {key!r}: {error}") from error
        return found

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._end()
            self._thread.join()
        with self._changed:
            for each in self._waiting.values():
                each.close()
            self._waiting.clear()

    async def _attend(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        strangers: dict[asyncio.Task[None], None] = {}  # connections without a complete key, oldest first
        try:
            while True:
                try:
                    came, _ = await loop.sock_accept(server)
                except OSError as error:  # the client has disconnected, or no file descriptors are left
                    log.debug("accepting a connection failed: %s", error)
                    await asyncio.sleep(REDIAL_S)
                    continue
                if len(strangers) >= MOST_STRANGERS:
                    first = next(iter(strangers))
                    del strangers[first]
                    first.cancel()
                stranger = loop.create_task(self._introduce(came))
                strangers[stranger] = None
                stranger.add_done_callback(lambda over: strangers.pop(over, None))
                await asyncio.sleep(0)  # let the handlers run if many connections arrive at once
        finally:
            server.close()
            await stop(*strangers)

    async def _introduce(self, came: socket.socket) -> None:
        """Read the link's key from a new connection and keep the connection for `accept`. If no valid key arrives
        within the time limit, close the connection."""
        key = None
        try:
            came.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(INTRODUCED_WITHIN_S):
                length = _length_of(await _heard(came, GREETING.size))
                key = (await _heard(came, length)).decode()
        except (OSError, ValueError) as error:
            log.debug("a connection was closed: %s", error)
            return
        finally:
            if key is None:
                came.close()
        came.setblocking(True)
        with self._changed:
            if (before := self._waiting.pop(key, None)) is not None:
                before.close()  # the sender has dialled again
            self._waiting[key] = came
            if len(self._waiting) > MOST_WAITING:
                self._waiting.popitem(last=False)[1].close()
            self._changed.notify_all()


def _run(loop: asyncio.AbstractEventLoop, attending: asyncio.Task[None]) -> None:
    with contextlib.closing(loop), contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(attending)


async def _heard(came: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes, because later bytes belong to the link. Raises ValueError if the stream ends before
    `size` bytes have arrived."""
    heard = b""
    while len(heard) < size:
        part = await asyncio.get_running_loop().sock_recv(came, size - len(heard))
        if not part:
            raise ValueError(f"the sender closed the connection after {len(heard)} of {size} bytes")
        heard += part
    return heard


def knock(address: str, key: str, timeout_s: float, buffer_bytes: int = 0) -> tuple[socket.socket, bytes]:
    """Connect to a receiver for link `key`; return a blocking socket and the receiver's answer once it has accepted.
    Raises NotYet if the receiver has not accepted within `timeout_s`, LinkBroken if the connection fails or the answer
    is invalid, and ValueError if the key is too long."""
    said = key.encode()
    if len(said) > MOST_BYTES:
        raise ValueError(f"a link's key must have at most {MOST_BYTES} bytes, got {len(said)}")
    until_s = time.monotonic() + timeout_s
    sock = _connect(address, until_s, timeout_s, buffer_bytes)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(GREETING.pack(MAGIC, VERSION, len(said)) + said)
        sock.settimeout(max(until_s - time.monotonic(), 0.001))
        try:
            greeting = _exactly(sock, GREETING.size)
        except TimeoutError as error:
            raise NotYet(f"{address} did not accept link {key!r} within {timeout_s:g} s") from error
        answer = _exactly(sock, _length_of(greeting))
    except NotYet:
        sock.close()
        raise
    except (OSError, ValueError) as error:
        sock.close()
        raise LinkBroken(f"cannot open link {key!r} to {address}: {error}") from error
    sock.settimeout(None)
    return sock, answer


def _connect(address: str, until_s: float, timeout_s: float, buffer_bytes: int) -> socket.socket:
    host, port = parts_of(address)
    while True:
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise LinkBroken(f"cannot resolve {address}: {error}") from error
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            widen(sock, buffer_bytes)
            sock.settimeout(max(until_s - time.monotonic(), 0.001))
            sock.connect(place)
        except OSError as error:
            sock.close()
            if not isinstance(error, TimeoutError) and error.errno not in MAY_COME:
                raise LinkBroken(f"cannot connect to {address}: {error}") from error
            if time.monotonic() + REDIAL_S >= until_s:
                raise NotYet(f"cannot connect to {address} within {timeout_s:g} s: {error}") from error
            time.sleep(REDIAL_S)
        else:
            return sock


def widen(sock: socket.socket, buffer_bytes: int) -> None:
    """Set the socket's buffer sizes to `buffer_bytes`. If `buffer_bytes` is 0 or exceeds the kernel's limit, leave the
    sizes to the kernel's autotuning, because a buffer whose requested size the kernel has capped never grows."""
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        if 0 < buffer_bytes <= _allowed_bytes(limit):
            sock.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)


def _allowed_bytes(limit: str) -> int:
    try:
        return int(Path("/proc/sys/net/core", limit).read_text())
    except OSError:  # not shown in this network namespace
        return 0


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parts_of(address: str) -> tuple[str, int]:
    """Split `host:port` into host and port. Raises LinkBroken if the address is malformed."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LinkBroken(f"an address must be host:port, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _length_of(greeting: bytes) -> int:
    magic, version, length = GREETING.unpack(greeting[: GREETING.size])
    if magic != MAGIC or version != VERSION or length > MOST_BYTES:
        raise ValueError(
            f"the greeting must have magic {MAGIC!r}, version {VERSION} and a length of at most {MOST_BYTES} bytes,"
            f" got {magic!r}, {version} and {length}"
        )
    return int(length)


def _exactly(sock: socket.socket, size: int) -> bytes:
    heard = bytearray()
    while len(heard) < size:
        part = sock.recv(size - len(heard))
        if not part:
            raise OSError(f"the receiver closed the connection after {len(heard)} of {size} bytes")
        heard += part
    return bytes(heard)


def _is_there(sock: socket.socket) -> bool:
    """Return whether the connection is still open at the other endpoint."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
