"""Links that are process groups of torch.distributed, of two ranks each: what gloo and NCCL have in common.

Both ends meet at the receiver's door; it names a store of its own process and a prefix that no other link has. The
socket of the meeting stays open beside the group: it tells when the other end has gone, and that all has been received.

A group takes longer to be made than many a shard to be sent, so it outlives its link where both ends are done: the
receiver tells which it has idle, by name, and the sender says which of them the link is, or the name of the new one.
"""

import contextlib
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from orchestrrl.weights.transports.base import IncomingLink, LinkBroken, OutgoingLink, TransportOptions
from orchestrrl.weights.transports.idle import IdleConnections
from orchestrrl.weights.transports.listener import ANSWERED_WITHIN_S, LinkListener, address_of, knock, parts_of

RECEIVER, SENDER = 0, 1  # ranks
FAREWELL = b"."
FAREWELL_S = 2.0
NAME_BYTES = 16  # of a group
MOST_OFFERED = 48  # names, in what a door answers

Group = Any  # a torch.distributed.Backend
Wait = Callable[[timedelta], None]  # for what was begun; raises RuntimeError


class GroupTransport(ABC):
    """`_join` makes the group of one link."""

    def __init__(self, options: TransportOptions) -> None:
        self._host = options.host
        self._listener = LinkListener(options.host)
        self._store: Any = None
        # Of receivers, by address: torch's client may wait for a name server as it connects, so it connects once.
        self._found: dict[str, Any] = {}
        self._finding = threading.Lock()
        self._idle_incoming: IdleConnections[JoinedGroup] = IdleConnections(lambda joined: joined.leave())
        self._idle_outgoing: IdleConnections[JoinedGroup] = IdleConnections(lambda joined: joined.leave())

    def open(self) -> str:
        patience = timedelta(seconds=ANSWERED_WITHIN_S)
        self._store = dist.TCPStore(self._host, 0, None, True, patience, wait_for_workers=False)
        return self._listener.open()

    def accept(self, key: str, timeout_s: float) -> IncomingLink:
        new = secrets.token_hex(NAME_BYTES // 2)
        with contextlib.ExitStack() as stack:

            def answer() -> bytes:
                names = stack.enter_context(self._idle_incoming.offered())
                return " ".join([str(self._store.port), new, *names[:MOST_OFFERED]]).encode()

            meeting = self._listener.accept(key, timeout_s, answer)
            chosen = _chosen(meeting)
            # A sender is done with a group a moment before this end of it is.
            joined = None if chosen == new else self._idle_incoming.take(chosen, ANSWERED_WITHIN_S)
        if joined is None and chosen != new:
            meeting.close()
            raise LinkBroken(f"the sender speaks of a group that is not here: {chosen!r}")
        if joined is None:
            joined = self._made(meeting, address_of(self._host, self._store.port), new, RECEIVER)
        return GroupIncoming(joined, meeting, lambda done: self._idle_incoming.keep(chosen, "", done))

    def dial(self, address: str, key: str, timeout_s: float) -> OutgoingLink:
        meeting, answer = knock(address, key, timeout_s)
        port, new, *names = answer.decode().split()
        chosen, joined = self._idle_outgoing.take_first(names, address) or (new, None)
        try:
            meeting.sendall(chosen.encode())
        except OSError as error:
            meeting.close()
            if joined is not None:
                joined.leave()
            raise LinkBroken(f"{address}: {error}") from error
        if joined is None:
            joined = self._made(meeting, address_of(parts_of(address)[0], int(port)), new, SENDER)
        return GroupOutgoing(joined, meeting, lambda done: self._idle_outgoing.keep(chosen, address, done))

    def close(self) -> None:
        self._listener.close()
        self._idle_incoming.close()
        self._idle_outgoing.close()
        self._store = None
        self._found.clear()

    def _made(self, meeting: socket.socket, store: str, prefix: str, rank: int) -> "JoinedGroup":
        try:
            found = self._store if rank == RECEIVER else self._find(store)
            return self._join(dist.PrefixStore(prefix, found), rank)
        except RuntimeError as error:  # all of torch.distributed's are
            meeting.close()
            self._found.pop(store, None)
            raise LinkBroken(f"no group with the other end: {_short(error)}") from error

    def _find(self, store: str) -> Any:
        host, port = parts_of(store)
        with self._finding:
            if store not in self._found:
                patience = timedelta(seconds=ANSWERED_WITHIN_S)
                self._found[store] = dist.TCPStore(host, port, None, False, patience, wait_for_workers=False)
            return self._found[store]

    @abstractmethod
    def _join(self, store: Any, rank: int) -> "JoinedGroup": ...


class JoinedGroup(ABC):
    """A group of two, as one of its ranks uses it. `lingers`: what was sent may be lost where the sender leaves before
    the receiver has it all. `may_idle`: that it serves another link costs nothing meanwhile."""

    lingers: bool
    may_idle: bool

    def __init__(self, group: Group, rank: int) -> None:
        self.group = group
        self._other = 1 - rank

    @abstractmethod
    def send(self, chunk: torch.Tensor) -> Wait:
        """Begin, and how to wait. Raises RuntimeError."""

    @abstractmethod
    def receive(self, into: torch.Tensor) -> Wait: ...

    @abstractmethod
    def interrupt(self) -> None:
        """Whoever waits in another thread goes on with a RuntimeError; the group is of no use afterwards."""

    @abstractmethod
    def leave(self) -> None:
        """Let go of what the group has. Nobody waits any more."""


class _Begun:
    def __init__(self, link: "_GroupLink", wait: Wait, tensor: torch.Tensor) -> None:
        self._link = link
        self._wait = wait
        self._tensor = tensor  # its memory must not go before

    def wait(self, timeout_s: float) -> None:
        self._link.landed(self._wait, timeout_s)


class _GroupLink:
    def __init__(self, joined: JoinedGroup, meeting: socket.socket, keep: Callable[[JoinedGroup], None]) -> None:
        self._joined: JoinedGroup | None = joined
        self._meeting = meeting
        self._keep = keep
        self._is_done = False
        self._at_work = threading.Lock()
        self._interrupted = False
        self._on_the_way = 0

    def landed(self, wait: Wait, timeout_s: float) -> None:
        with self._working():
            wait(timedelta(seconds=timeout_s))
            self._on_the_way -= 1

    def _begin(self, memory: memoryview, begin: Callable[["JoinedGroup", torch.Tensor], Wait]) -> _Begun:
        tensor = tensor_of(memory)
        with self._working() as joined:
            begun = _Begun(self, begin(joined, tensor), tensor)
            self._on_the_way += 1
        return begun

    @contextlib.contextmanager
    def _working(self) -> Iterator["JoinedGroup"]:
        with self._at_work:
            if self._joined is None or self._interrupted:
                raise LinkBroken("the link is closed")
            try:
                yield self._joined
            except RuntimeError as error:
                raise LinkBroken(_short(error)) from error

    def done(self) -> None:
        self._is_done = not self._on_the_way

    def close(self) -> None:
        """From its own thread, or from another one while that waits."""
        if not self._at_work.acquire(blocking=False):
            self._interrupted = True
            if (joined := self._joined) is not None:
                joined.interrupt()
            self._at_work.acquire()
        try:
            if (joined := self._joined) is None:
                return
            self._joined = None
            if joined.lingers and not self._interrupted and not self._on_the_way:
                self._send_farewell()
            self._meeting.close()
            if self._is_done and not self._interrupted and joined.may_idle:
                self._keep(joined)
            else:
                joined.leave()
        finally:
            self._at_work.release()

    def _send_farewell(self) -> None:
        """All that was begun here has been waited for."""


class GroupOutgoing(_GroupLink):
    def send(self, chunk: memoryview) -> _Begun:
        return self._begin(chunk, lambda joined, tensor: joined.send(tensor))

    def _send_farewell(self) -> None:
        """The group stays until the receiver leaves it too, or has gone."""
        with contextlib.suppress(OSError):  # the receiver has gone: nothing is to be waited for
            self._meeting.settimeout(FAREWELL_S)
            self._meeting.shutdown(socket.SHUT_WR)
            self._meeting.recv(len(FAREWELL))


class GroupIncoming(_GroupLink):
    def receive(self, into: memoryview) -> _Begun:
        return self._begin(into, lambda joined, tensor: joined.receive(tensor))

    def _send_farewell(self) -> None:
        with contextlib.suppress(OSError):
            self._meeting.sendall(FAREWELL)


def _chosen(meeting: socket.socket) -> str:
    """What the sender says: which group. Raises LinkBroken."""
    heard = b""
    try:
        meeting.settimeout(ANSWERED_WITHIN_S)
        while len(heard) < NAME_BYTES and (part := meeting.recv(NAME_BYTES - len(heard))):
            heard += part
        meeting.settimeout(None)
        return heard.decode()
    except (OSError, ValueError) as error:
        meeting.close()
        raise LinkBroken(f"the sender does not say which group: {error}") from error


def tensor_of(memory: memoryview) -> torch.Tensor:
    """The same memory, also where it is read-only and may only be sent."""
    flat = memory.cast("B")
    if not flat:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(flat, dtype=torch.uint8)


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:300]
