"""Orders reach peers, also those that come back, and each is answered once."""

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
    """A peer at the other end: keeps what it is ordered."""

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


def test_an_order_is_answered_by_its_id_and_names_the_generation() -> None:
    async def scene(hub: PeerHub, clock: VirtualClock) -> None:
        line = Line(hub.attach(peer()))
        asked = [asyncio.ensure_future(hub.send_order(P0, CheckVersion(version), 10.0)) for version in (1, 2)]
        await clock.advance(0.1)
        assert [(each.generation, each.order) for each in line.orders] == [(7, CheckVersion(1)), (7, CheckVersion(2))]
        line.answer(1)
        line.answer(0)
        line.answer(0)  # said twice
        assert [(await each).id for each in asked] == [each.id for each in line.orders]

    play(scene)


def test_what_is_not_answered_is_given_again_to_a_peer_that_comes_back_and_the_old_stream_ends() -> None:
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
        first.stream.end()  # and this is not the peer's going away
        await clock.advance(0.1)
        assert not asked.done()
        assert hub.peers[P0].attached
        second.answer()
        assert (await asked).outcome is OrderOutcome.DONE

    play(scene)


def test_a_peer_that_has_gone_is_waited_for_and_then_no_more() -> None:
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
        with pytest.raises(OutcomeUnknown, match="gone for 30 s"):
            await given
        with pytest.raises(Retryable, match="gone for 30 s"):
            await not_given
        again = Line(hub.attach(peer()))
        await clock.advance(0.1)
        assert again.orders == []  # nobody waits for these any more

    play(scene)


def test_a_peer_that_does_not_answer_is_not_waited_for_longer_than_was_said() -> None:
    async def scene(hub: PeerHub, clock: VirtualClock) -> None:
        Line(hub.attach(peer()))
        asked = asyncio.ensure_future(hub.send_order(P0, CheckVersion(1), 10.0))
        await clock.advance(9.9)
        assert not asked.done()
        await clock.advance(0.2)
        with pytest.raises(OutcomeUnknown, match="within 10 s"):
            await asked

    play(scene)


def test_an_order_that_is_taken_back_before_it_was_sent_is_not_sent() -> None:
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


def test_listeners_hear_of_peers_that_come_tell_and_go() -> None:
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
        stream.on_news(peer(P1))  # nobody becomes another
        assert hub.peers[P0].peer == changed
        stream.end()
        stream.end()
        assert heard == [(P0, peer()), (P0, ArrivedBytes(1, 10)), (P0, changed), (P0, None)]
        assert not hub.peers[P0].attached

    play(scene)


def test_an_engine_has_one_peer_and_a_trainers_peer_none() -> None:
    async def scene(hub: PeerHub, clock: VirtualClock) -> None:
        stream = hub.attach(peer(engines=("e0",)))
        hub.attach(peer(engines=("e0",)))  # itself again
        with pytest.raises(ProblemFaults) as refused:
            hub.attach(peer(P1, engines=("e1", "e0")))
        assert refused.value.faults == ["engines[1].engine: is peer p0's already, got 'e0'"]
        with pytest.raises(ProblemFaults, match="role trainer"):
            hub.attach(peer(P1, PeerRole.TRAINER, ("e1",)))
        stream.end()
        assert hub.peers[P0].attached  # it was the old stream

    play(scene)
