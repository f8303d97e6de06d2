"""Convert a peer's orders to messages and back. An order that exceeds the size of a message is sent in consecutive
pieces."""

import json
from collections.abc import Iterator
from typing import get_args

from pydantic import TypeAdapter

from orchestrrl.rpc.channel import MESSAGE_BYTES
from orchestrrl.rpc.pb import weights_pb2 as pb
from orchestrrl.weights.orders import ORDER, Order, PeerOrder

# a character takes at most four bytes, which leaves space for the rest of the message
PIECE_CHARACTERS = MESSAGE_BYTES // 8
_KINDS = {kind: TypeAdapter(kind) for kind in get_args(Order)}


def pieces_of(order: PeerOrder) -> Iterator[pb.PeerOrder]:
    """Yield the messages of an order. There is at least one message, and all messages except the last have `continues`
    set."""
    text = _text(order)
    for first in range(0, len(text), PIECE_CHARACTERS):
        last = first + PIECE_CHARACTERS
        yield pb.PeerOrder(order_json=text[first:last], continues=last < len(text))


def _text(order: PeerOrder) -> str:
    """Return the order as JSON. The order is converted by the adapter of its own kind, because ORDER, the adapter for
    the union of all kinds, gives the same text but is several times slower."""
    inner = _KINDS[type(order.order)].dump_json(order.order).decode()
    return f'{{"id":{json.dumps(order.id)},"generation":{order.generation},"order":{inner}}}'


class OrderAssembler:
    """An assembler of orders from the pieces that arrive on one stream. If a stream breaks, an incomplete order is
    dropped, and the daemon sends the order again."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, piece: pb.PeerOrder) -> PeerOrder | None:
        """Add a piece of an order. Return the order if the piece is its last, and None otherwise. Raises
        ValidationError if the order is invalid."""
        self._texts.append(piece.order_json)
        if piece.continues:
            return None
        text = "".join(self._texts)
        self._texts.clear()
        return ORDER.validate_json(text)
