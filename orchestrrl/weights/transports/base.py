"""The interface of a transport: unidirectional links between two peers that carry chunks in order.

Transports are a plug point: one module per transport, registered in the entry-point group
`orchestrrl.weight_transports`. Every transport must pass `orchestrrl/weights/transports/conformance.py`. Calls block.
Each endpoint of a link is used by a single thread, except that `close` may also be called from other threads.
"""

from typing import Protocol

from orchestrrl.core.errors import Retryable
from orchestrrl.core.plug_points import PlugPoint

SMALL_BYTES = 64


class LinkBroken(Retryable):
    """Raised if a link fails: the other endpoint closed it, its connection was lost, or no byte moved within the time
    limit. Chunks that arrived earlier are intact."""

    def __init__(self, message: str) -> None:
        super().__init__(message, after_s=1.0)


class NotYet(LinkBroken):
    """Raised if the other endpoint has not connected within the time limit. The caller may repeat the call."""


class PendingChunk(Protocol):
    """A chunk in flight. Chunks of a link must be waited for in the order in which they were submitted."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the chunk is sent or received, so that the caller may reuse its buffer. Raises LinkBroken if the
        link breaks or no byte moves for `timeout_s`."""
        ...


class OutgoingLink(Protocol):
    """The sender's endpoint of a link. Up to two chunks and one small message (of at most `SMALL_BYTES`) may be in
    flight at the same time.

    Only `close` may be called from another thread: it interrupts a waiting call, which raises LinkBroken. A repeated
    call of `close` has no effect. Chunks that were waited for before `close` still reach the receiver.
    """

    def send(self, chunk: memoryview) -> PendingChunk:
        """Start to send a chunk. Its memory must not change until the caller has waited for it. Raises LinkBroken if
        the link is broken or closed."""
        ...

    def close(self) -> None:
        """Close the link. Chunks in flight may be lost."""
        ...


class IncomingLink(Protocol):
    """The receiver's endpoint of a link. The limit on chunks in flight and the rules for `close` are as in
    OutgoingLink."""

    def receive(self, into: memoryview) -> PendingChunk:
        """Start to receive a chunk into `into`. Both endpoints must use the same chunk sizes. Raises LinkBroken if the
        link is broken or closed."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """A transport of one process. It is constructed with the address on which it listens and to which other peers
    connect. Construction opens no connections; `open` starts to listen."""

    def open(self) -> str:
        """Start to listen; return the address to which other peers must connect."""
        ...

    def accept(self, key: str, timeout_s: float) -> IncomingLink:
        """Return the receiver's endpoint of link `key` once the sender dials. Raises NotYet if the sender does not dial
        within `timeout_s`, and LinkBroken if the connection fails or the transport is closed."""
        ...

    def dial(self, address: str, key: str, timeout_s: float) -> OutgoingLink:
        """Return the sender's endpoint of link `key` once the receiver has accepted it. Raises NotYet if the receiver
        has not accepted within `timeout_s`, and LinkBroken if the connection fails, for example because no process
        listens at `address`."""
        ...

    def close(self) -> None:
        """Close the transport. Its open links stay open until their owners close them."""
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
    """Create the transport `name` for `host`, the address on which it listens and to which other peers connect. Raises
    Permanent if the name is unknown, with a list of the known names, or if a requirement of the transport is
    missing."""
    transport: Transport = TRANSPORTS.load(name)(host)
    return transport
