"""Links that are torch.distributed process groups of two ranks each: the common part of the gloo and NCCL transports.

The sender connects to the receiver's listener. The listener answers with the address of a store in the receiver's
process and a prefix that is unique to the link. The socket of this rendezvous stays open for the lifetime of the group.
Over this socket, the receiver confirms that it has received all chunks. If the receiver's process exits instead, the
socket is closed, so the sender stops waiting for the confirmation.
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

from orchestrrl.weights.transports.base import IncomingLink, LinkBroken, OutgoingLink
from orchestrrl.weights.transports.listener import ANSWERED_WITHIN_S, LinkListener, address_of, knock, parts_of

RECEIVER, SENDER = 0, 1  # ranks
FAREWELL = b"."
FAREWELL_S = 2.0
PATIENCE = timedelta(seconds=ANSWERED_WITHIN_S)

Group = Any  # a torch.distributed.Backend
Wait = Callable[[timedelta], None]  # waits for a started operation; raises RuntimeError


class GroupTransport(ABC):
    """A transport whose links are process groups. Subclasses implement `_join`, which creates the group of a link."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._listener = LinkListener(host)
        self._own_store = ""  # its address
        # Store clients by address, kept because torch may query a name server for each new connection.
        self._stores: dict[str, Any] = {}
        self._connecting = threading.Lock()

    def open(self) -> str:
        store = dist.TCPStore(self._host, 0, None, True, PATIENCE, wait_for_workers=False)
        self._own_store = address_of(self._host, store.port)
        self._stores[self._own_store] = store
        return self._listener.open()

    def accept(self, key: str, timeout_s: float) -> IncomingLink:
        answer = f"{self._own_store} {secrets.token_hex(8)}".encode()
        meeting = self._listener.accept(key, timeout_s, answer)
        return GroupIncoming(self._made(meeting, answer, RECEIVER), meeting)

    def dial(self, address: str, key: str, timeout_s: float) -> OutgoingLink:
        meeting, answer = knock(address, key, timeout_s)
        return GroupOutgoing(self._made(meeting, answer, SENDER), meeting)

    def close(self) -> None:
        self._listener.close()
        with self._connecting:
            self._stores.clear()

    def _made(self, meeting: socket.socket, answer: bytes, rank: int) -> "JoinedGroup":
        store = ""
        try:
            store, prefix = answer.decode().split()
            return self._join(dist.PrefixStore(prefix, self._connected(store)), rank)
        except BaseException as error:
            meeting.close()
            if rank == SENDER:
                with self._connecting:
                    self._stores.pop(store, None)
            if isinstance(error, RuntimeError | ValueError):  # from torch.distributed, or for an invalid answer
                raise LinkBroken(f"cannot join the other endpoint's group: {_short(error)}") from error
            raise

    def _connected(self, address: str) -> Any:
        host, port = parts_of(address)
        with self._connecting:
            if address not in self._stores:
                self._stores[address] = dist.TCPStore(host, port, None, False, PATIENCE, wait_for_workers=False)
            return self._stores[address]

    @abstractmethod
    def _join(self, store: Any, rank: int) -> "JoinedGroup": ...


class JoinedGroup(ABC):
    """A process group of two ranks, as seen by one rank. `lingers` is True if bytes may be lost when the sender leaves
    before the receiver has received all bytes."""

    lingers: bool

    def __init__(self, group: Group, rank: int) -> None:
        self.group = group
        self._other = 1 - rank

    @abstractmethod
    def send(self, chunk: torch.Tensor) -> Wait:
        """Start to send a chunk; return a function that waits until the chunk is sent. Raises RuntimeError if the group
        has failed."""

    @abstractmethod
    def receive(self, into: torch.Tensor) -> Wait: ...

    @abstractmethod
    def interrupt(self) -> None:
        """Make a pending wait in another thread raise RuntimeError. The group cannot be used afterwards."""

    @abstractmethod
    def leave(self) -> None:
        """Release the group's resources. No operation may be pending."""


class _Begun:
    def __init__(self, link: "_GroupLink", wait: Wait, tensor: torch.Tensor) -> None:
        self._link = link
        self._wait = wait
        self._tensor = tensor  # keeps the memory alive until the operation has ended

    def wait(self, timeout_s: float) -> None:
        self._link.landed(self._wait, timeout_s)


class _GroupLink:
    def __init__(self, joined: JoinedGroup, meeting: socket.socket) -> None:
        self._joined: JoinedGroup | None = joined
        self._meeting = meeting
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

    def close(self) -> None:
        """Close the link. This method may be called from the link's own thread, or from another thread while the link's
        thread waits."""
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
            joined.leave()
        finally:
            self._at_work.release()

    def _send_farewell(self) -> None:
        """Agree with the other endpoint to end the link. The caller must have waited for all chunks."""


class GroupOutgoing(_GroupLink):
    def send(self, chunk: memoryview) -> _Begun:
        return self._begin(chunk, lambda joined, tensor: joined.send(tensor))

    def _send_farewell(self) -> None:
        """Wait, for at most `FAREWELL_S`, until the receiver disconnects or confirms that it has all chunks."""
        with contextlib.suppress(OSError):  # the receiver has gone
            self._meeting.settimeout(FAREWELL_S)
            self._meeting.shutdown(socket.SHUT_WR)
            self._meeting.recv(len(FAREWELL))


class GroupIncoming(_GroupLink):
    def receive(self, into: memoryview) -> _Begun:
        return self._begin(into, lambda joined, tensor: joined.receive(tensor))

    def _send_farewell(self) -> None:
        with contextlib.suppress(OSError):
            self._meeting.sendall(FAREWELL)


def tensor_of(memory: memoryview) -> torch.Tensor:
    """Return a uint8 tensor that shares `memory`. If the memory is read-only, the tensor may be sent, but no data may
    be received into it."""
    flat = memory.cast("B")
    if not flat:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(flat, dtype=torch.uint8)


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:300]
