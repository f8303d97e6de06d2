"""Peers as processes under a daemon that orders them over the real service: bytes from one to another, restarts in the
middle, orders delivered twice and orders of daemons that are no more."""

import asyncio

from orchestrrl.weights.orders import (
    CheckVersion,
    OrderOutcome,
    PeerResult,
)


def test_results_are_remembered_for_long_but_not_for_ever() -> None:
    from orchestrrl.core.clock import VirtualClock
    from orchestrrl.weights.orders import PeerOrder
    from orchestrrl.weights.peer.orders import OrderBook

    done: list[str] = []

    async def perform(order: PeerOrder) -> PeerResult:
        done.append(order.id)
        return PeerResult(order.id, OrderOutcome.DONE)

    async def scenario() -> None:
        book = OrderBook(perform, VirtualClock(), remembered=4)
        for number in range(100):
            await book.result(PeerOrder(f"o{number}", 1, CheckVersion(1)))
        await book.result(PeerOrder("o99", 1, CheckVersion(1)))
        assert len(done) == 100
        assert len(book._tasks) <= 5
        both = await asyncio.gather(*(book.result(PeerOrder("new", 1, CheckVersion(1))) for _ in range(3)))
        assert len({each.id for each in both}) == 1
        assert done.count("new") == 1

    asyncio.run(scenario())
