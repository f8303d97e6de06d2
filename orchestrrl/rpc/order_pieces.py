"""A peer's order as messages: what is larger than a message holds comes in pieces, one behind the other."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import TypeAdapter

from orchestrrl.rpc.channel import MESSAGE_BYTES
from orchestrrl.rpc.pb import weights_pb2 as pb
from orchestrrl.weights.orders import Order, PeerOrder, peer_order

PIECE_CHARACTERS = MESSAGE_BYTES // 8  # a character takes four bytes at most: there is room for what is around them


def pieces_of(order: PeerOrder) -> Iterator[pb.PeerOrder]:
    """At least one; all but the last say that it continues."""
    text = _text(order)
    for first in range(0, len(text), PIECE_CHARACTERS):
        last = first + PIECE_CHARACTERS
        yield pb.PeerOrder(order_json=text[first:last], continues=last < len(text))


def _text(order: PeerOrder) -> str:
    """As `peer_order` has it. A kind by itself is written several times faster than one of a union."""
    inner = _kinds()[type(order.order)].dump_json(order.order).decode()
    return f'{{"id":{json.dumps(order.id)},"generation":{order.generation},"order":{inner}}}'


@cache
def _kinds() -> dict[type, TypeAdapter[Any]]:
    return {kind: TypeAdapter(kind) for kind in get_args(Order)}


class Joining:
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
        return peer_order().validate_json(text)
