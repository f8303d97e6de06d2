"""A peer's order as messages: what is larger than a message holds comes in pieces, one behind the other."""

import json
from collections.abc import Iterator
from typing import get_args

from pydantic import TypeAdapter

from orchestrrl.rpc.channel import MESSAGE_BYTES
from orchestrrl.rpc.pb import weights_pb2 as pb
from orchestrrl.weights.orders import ORDER, Order, PeerOrder

PIECE_CHARACTERS = MESSAGE_BYTES // 8  # a character takes four bytes at most: there is room for what is around them
_KINDS = {kind: TypeAdapter(kind) for kind in get_args(Order)}


def pieces_of(order: PeerOrder) -> Iterator[pb.PeerOrder]:
    """At least one; all but the last say that it continues."""
    text = _text(order)
    for first in range(0, len(text), PIECE_CHARACTERS):
        last = first + PIECE_CHARACTERS
        yield pb.PeerOrder(order_json=text[first:last], continues=last < len(text))


def _text(order: PeerOrder) -> str:
    """As ORDER has it. A kind by itself is written several times faster than one of a union."""
    inner = _KINDS[type(order.order)].dump_json(order.order).decode()
    return f'{{"id":{json.dumps(order.id)},"generation":{order.generation},"order":{inner}}}'


class OrderAssembler:
    """Pieces of one stream: a stream that breaks takes the beginning of an order with it, and it is given again."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, piece: pb.PeerOrder) -> PeerOrder | None:
        """The order, where this was its last piece. Raises ValidationError where that cannot be read."""
        self._texts.append(piece.order_json)
        if piece.continues:
            return None
        text = "".join(self._texts)
        self._texts.clear()
        return ORDER.validate_json(text)
