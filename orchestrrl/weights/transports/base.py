"""What carrying asks of a way for bytes: links from one peer to one other, each of one direction, chunk after chunk.

A plug point: one module per way, registered in the entry-point group `orchestrrl.weight_transports`; every one passes
`orchestrrl/weights/transports/conformance.py`. Calls block, and are made from the threads that own an edge; a link
belongs to two of them, one at each end.
"""

from typing import Protocol

from orchestrrl.core.errors import Retryable
from orchestrrl.core.plug_points import PlugPoint

SMALL_BYTES = 64


class LinkBroken(Retryable):
    """The other end has gone, or nothing has moved for too long. What arrived before is whole."""

    def __init__(self, message: str) -> None:
        super().__init__(message, after_s=1.0)


class NotYet(LinkBroken):
    """The other end has not come within the time. It may yet: the same call may be made again."""


class PendingChunk(Protocol):
    """A chunk on its way. They are waited for in the order in which they were given."""

    def wait(self, timeout_s: float) -> None:
        """Return when the buffer is the caller's again: sent, or filled. Raises LinkBroken."""
        ...


class OutgoingLink(Protocol):
    """The sender's end. Two chunks may be on their way at once, and a few bytes (`SMALL_BYTES`) beside them.

    Only `close` may be called by another thread than the link's own: it is how one that waits is interrupted, with
    LinkBroken. It may be called twice. What was waited for before it still reaches the receiver.
    """

    def send(self, chunk: memoryview) -> PendingChunk:
        """The chunk must stay as it is until it is waited for. Raises LinkBroken."""
        ...

    def close(self) -> None:
        """Let the link go; what is on its way may be lost."""
        ...


class IncomingLink(Protocol):
    """The receiver's end: as many at once, and `close` likewise."""

    def receive(self, into: memoryview) -> PendingChunk:
        """`into` is filled, in the order of the calls: both ends cut the same chunks. Raises LinkBroken."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """One process's, made with the address that others reach it at and it listens on. Construction opens nothing;
    `open` does."""

    def open(self) -> str:
        """Listen. The address that other peers are told."""
        ...

    def accept(self, key: str, timeout_s: float) -> IncomingLink:
        """The receiver's end of the link `key`, when the sender has dialled. Raises LinkBroken, and NotYet where it
        has not within the time."""
        ...

    def dial(self, address: str, key: str, timeout_s: float) -> OutgoingLink:
        """The sender's. The receiver may come later, within the time: else NotYet. Where nobody can listen:
        LinkBroken."""
        ...

    def close(self) -> None:
        """Of the transport alone: links that are open are closed by whoever has them."""
        ...


TRANSPORTS = PlugPoint(
    "transport",
    "orchestrrl.weight_transports",
    {
        "tcp": "orchestrrl.weights.transports.tcp:TcpTransport",
        "gloo": "orchestrrl.weights.transports.gloo:GlooTransport",
        "nccl": "orchestrrl.weights.transports.nccl:NcclTransport",
    },
)


def make_transport(name: str, host: str) -> Transport:
    """Return the transport of that name which listens on `host`, the address that other peers reach this one at.
    Raises Permanent for an unknown name, listing the known ones, and where what it needs is not installed."""
    transport: Transport = TRANSPORTS.load(name)(host)
    return transport
