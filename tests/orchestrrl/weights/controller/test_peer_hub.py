"""Delivery of orders to peers, also to peers that attach again, with one result per order."""

import asyncio
from collections.abc import Callable

import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import OutcomeUnknown, ProblemFaults, Retryable
from orchestrrl.weights.controller.peer_hub import PeerHub, PeerStream
from orchestrrl.weights.model import (
    EngineAt,
    Peer,
    PeerLocation,
    PeerRole,
)
from orchestrrl.weights.orders import ArrivedBytes, CheckVersion, KeepVersions, OrderOutcome, PeerOrder, PeerResult
from planner.model import EngineId, PeerId

P0, P1 = PeerId("p0"), PeerId("p1")


def peer(id: PeerId = P0, role: PeerRole = PeerRole.ENGINE, engines: tuple[str, ...] = ()) -> Peer:
    return Peer(
        id, role, f"{id}-host", PeerLocation(), {"tcp": f"{id}:1"}, tuple(EngineAt(EngineId(e), e) for e in engines)
    )


class Line:
    """A fake peer that records its orders."""

    def __init__(self, stream: PeerStream) -> None:
        self.stream = stream
        self.orders: list[PeerOrder] = []
        self.over = False
        self._task = asyncio.ensure_future(self._receive())

    async def _receive(self) -> None:
        async for order in self.stream.orders():
            self.orders.append(order)
        self.over = True

    def answer(self, place: int = -1) -> None:
        self.stream.on_news(PeerResult(self.orders[place].id, OrderOutcome.DONE, "well"))


def play(scene: Callable[[PeerHub, VirtualClock], object]) -> None:
    async def played() -> None:
        clock = VirtualClock(1000.0)
        result = scene(PeerHub(clock, 7, patience_s=30.0), clock)
        assert asyncio.iscoroutine(result)
        await result

    asyncio.run(played())


def test_result_is_matched_by_order_id_and_order_has_the_generation() -> None:
    async def scene(hub: PeerHub, clock: VirtualClock) -> None:
        line = Line(hub.attach(peer()))
        asked = [asyncio.ensure_future(hub.send_order(P0, CheckVersion(version), 10.0)) for version in (1, 2)]
        await clock.advance(0.1)
        assert [(each.generation, each.order) for each in line.orders] == [(7, CheckVersion(1)), (7, CheckVersion(2))]
        line.answer(1)
        line.answer(0)
        line.answer(0)  # a repeated result
        assert [(await each).id for each in asked] == [each.id for each in line.orders]

    play(scene)


def test_attaching_again_ends_the_old_stream_and_repeats_unanswered_orders() -> None:
    async def scene(hub: PeerHub, clock: VirtualClock) -> None:
        first = Line(hub.attach(peer()))
        asked = asyncio.ensure_future(hub.send_order(P0, CheckVersion(1), 100.0))
        answered = asyncio.ensure_future(hub.send_order(P0, CheckVersion(2), 100.0))
        await clock.advance(0.1)
        first.answer(1)
        await answered
        second = Line(hub.attach(peer()))
        await clock.advance(0.1)
        assert first.over
        assert [each.order for each in second.orders] == [CheckVersion(1)]
        assert second.orders[0].id == first.orders[0].id
        first.answer(0)  # on a stream that has ended
        first.stream.end()  # and this does not detach the peer
        await clock.advance(0.1)
        assert not asked.done()
        assert hub.peers[P0].attached
        second.answer()
        assert (await asked).outcome is OrderOutcome.DONE

    play(scene)


def test_order_waits_for_a_detached_peer_up_to_the_patience() -> None:
    async def scene(hub: PeerHub, clock: VirtualClock) -> None:
        with pytest.raises(Retryable, match="not attached"):
            await hub.send_order(P0, CheckVersion(1), 100.0)
        line = Line(hub.attach(peer()))
        given = asyncio.ensure_future(hub.send_order(P0, CheckVersion(1), 100.0))
        await clock.advance(1.0)
        line.stream.end()
        not_given = asyncio.ensure_future(hub.send_order(P0, CheckVersion(2), 100.0))
        await clock.advance(29.0)
        assert not given.done()
        assert not not_given.done()
        await clock.advance(1.1)
        with pytest.raises(OutcomeUnknown, match="detached for 30 s"):
            await given
        with pytest.raises(Retryable, match="detached for 30 s"):
            await not_given
        again = Line(hub.attach(peer()))
        await clock.advance(0.1)
        assert again.orders == []  # no caller waits for these now

    play(scene)


def test_order_raises_outcome_unknown_without_an_answer_in_time() -> None:
    async def scene(hub: PeerHub, clock: VirtualClock) -> None:
        Line(hub.attach(peer()))
        asked = asyncio.ensure_future(hub.send_order(P0, CheckVersion(1), 10.0))
        await clock.advance(9.9)
        assert not asked.done()
        await clock.advance(0.2)
        with pytest.raises(OutcomeUnknown, match="within 10 s"):
            await asked

    play(scene)


def test_cancelled_order_is_not_sent() -> None:
    async def scene(hub: PeerHub, clock: VirtualClock) -> None:
        stream = hub.attach(peer())
        asked = asyncio.ensure_future(hub.send_order(P0, CheckVersion(1), 10.0))
        kept = asyncio.ensure_future(hub.send_order(P0, KeepVersions(()), 10.0))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait({asked})
        line = Line(stream)
        await clock.advance(0.1)
        assert [each.order for each in line.orders] == [KeepVersions(())]
        kept.cancel()

    play(scene)


def test_listeners_receive_attach_reports_and_detach() -> None:
    async def scene(hub: PeerHub, clock: VirtualClock) -> None:
        heard: list[object] = []
        hub.listen(lambda who, news: heard.append((who, news)))
        stream = hub.attach(peer())
        stream.on_news(ArrivedBytes(1, 10))
        changed = Peer(P0, PeerRole.ENGINE, "other", PeerLocation(pod="pod0"), {})
        await clock.advance(5.0)
        stream.on_news(changed)
        assert hub.peers[P0].peer == changed
        assert hub.peers[P0].last_report_s == 1005.0
        stream.on_news(peer(P1))  # a peer cannot change its id
        assert hub.peers[P0].peer == changed
        stream.end()
        stream.end()
        assert heard == [(P0, peer()), (P0, ArrivedBytes(1, 10)), (P0, changed), (P0, None)]
        assert not hub.peers[P0].attached

    play(scene)


def test_engine_belongs_to_one_peer_and_trainer_peers_have_no_engines() -> None:
    async def scene(hub: PeerHub, clock: VirtualClock) -> None:
        stream = hub.attach(peer(engines=("e0",)))
        hub.attach(peer(engines=("e0",)))  # the same peer again
        with pytest.raises(ProblemFaults) as refused:
            hub.attach(peer(P1, engines=("e1", "e0")))
        assert refused.value.faults == ["engines[1].engine: already belongs to peer p0, got 'e0'"]
        with pytest.raises(ProblemFaults, match="role trainer"):
            hub.attach(peer(P1, PeerRole.TRAINER, ("e1",)))
        stream.end()
        assert hub.peers[P0].attached  # from the old stream

    play(scene)
