"""Orders over a network that loses, repeats, delays and reorders messages: each takes effect at most once and has one
result."""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.delivery import NotDone, OpenOrder, OpenOrders, OrderStream, Outbox, ReceivedOrders
from orchestrrl.core.errors import OutcomeUnknown, Permanent, ProblemFaults

T = TypeVar("T")
DONE = "done"


@dataclass(frozen=True)
class Order:
    id: str
    generation: int = 1
    valid_until_s: float | None = 1e12


@dataclass(frozen=True)
class Answer:
    order: str
    status: str
    detail: str = ""
    began_s: float = 0.0


def not_done(order: Order, why: NotDone, detail: str, began_s: float) -> Answer:
    return Answer(order.id, why, detail, began_s)


class Worker:
    """Counts its calls; waits while `release` is not set."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.release = asyncio.Event()
        self.release.set()
        self.error: Exception | None = None

    async def __call__(self, order: Order) -> Answer:
        self.calls.append(order.id)
        await self.release.wait()
        if self.error:
            raise self.error
        return Answer(order.id, DONE, f"call {len(self.calls)}")


def receiver(worker: Worker, clock: VirtualClock | None = None, capacity: int = 100) -> ReceivedOrders[Order, Answer]:
    return ReceivedOrders(worker, not_done, clock or VirtualClock(), capacity)


class TestReceivedOrders:
    async def test_repeated_delivery_gets_stored_result(self) -> None:
        worker = Worker()
        received = receiver(worker)
        first = await received.result(Order("a"))
        assert first == await received.result(Order("a"))
        assert (first.status, worker.calls) == (DONE, ["a"])

    async def test_repeated_delivery_joins_running_order(self) -> None:
        worker = Worker()
        worker.release.clear()
        received = receiver(worker)
        deliveries = [asyncio.create_task(received.result(Order("a"))) for _ in range(3)]
        await asyncio.sleep(0)
        deliveries[0].cancel()  # a waiting caller disconnects without an effect on the order or the others
        await asyncio.sleep(0)
        worker.release.set()
        second, third = await asyncio.gather(*deliveries[1:])
        assert second == third
        assert worker.calls == ["a"]

    async def test_expired_order_is_refused_but_stored_result_returned(self) -> None:
        worker, clock = Worker(), VirtualClock(100.0)
        received = receiver(worker, clock)
        done = await received.result(Order("a", valid_until_s=101.0))
        await clock.advance(5.0)
        assert await received.result(Order("a", valid_until_s=101.0)) == done
        late = await received.result(Order("b", valid_until_s=101.0))
        assert (late.status, late.detail, late.began_s) == (NotDone.REFUSED, "expired 4 s ago", 105.0)
        never = await received.result(Order("c", valid_until_s=0.0))
        assert (never.status, never.detail) == (NotDone.REFUSED, "has no expiry")
        assert worker.calls == ["a"]

    async def test_older_generation_is_refused(self) -> None:
        received = receiver(Worker())
        assert (await received.result(Order("a", generation=3))).status == DONE
        stale = await received.result(Order("b", generation=2))
        assert stale.status == NotDone.REFUSED
        assert stale.detail == "generation 2 is superseded by generation 3"
        assert (await received.result(Order("c", generation=3))).status == DONE
        assert (await received.result(Order("a", generation=2))).status == DONE  # its result, for any caller

    @pytest.mark.parametrize("seed", range(20))
    async def test_orders_run_once_and_storage_is_bounded(self, seed: int) -> None:
        rng, worker, clock = random.Random(seed), Worker(), VirtualClock(100.0)
        received = receiver(worker, clock, capacity=5)
        sent: list[Order] = []
        for number in range(300):
            if sent and rng.random() < 0.5:
                delivered = rng.choice(sent[-30:])
            else:
                delivered = Order(f"o{number}", rng.randint(1, 3), clock.now_s() + rng.uniform(-1.0, 4.0))
                sent.append(delivered)
            result = await received.result(delivered)
            assert result.status in (DONE, NotDone.REFUSED)
            assert (result.status == DONE) <= (delivered.id in worker.calls)
            assert len(received) <= 5
            await clock.advance(rng.choice([0.0, 0.0, 0.5]))
        assert len(worker.calls) == len(set(worker.calls))
        assert worker.calls

    async def test_order_beyond_capacity_is_refused_until_one_expires(self) -> None:
        worker, clock = Worker(), VirtualClock(100.0)
        received = receiver(worker, clock, capacity=2)
        for name in "ab":
            assert (await received.result(Order(name, valid_until_s=110.0))).status == DONE
        full = await received.result(Order("c", valid_until_s=130.0))
        assert full.detail == "2 unexpired orders are stored, the limit is 2"
        await clock.advance(11.0)
        assert (await received.result(Order("c", valid_until_s=130.0))).status == DONE

    async def test_orders_without_expiry_keep_newest_results_and_are_accepted(self) -> None:
        worker = Worker()
        received = receiver(worker, capacity=4)
        for number in range(100):
            await received.result(Order(f"o{number}", valid_until_s=None))
        await asyncio.gather(*(received.result(Order("o99", valid_until_s=None)) for _ in range(3)))
        assert len(worker.calls) == 100
        assert len(received) == 4
        worker.release.clear()
        running = [asyncio.create_task(received.result(Order(f"p{number}", valid_until_s=None))) for number in range(9)]
        await asyncio.sleep(0)
        worker.release.set()
        assert {answer.status for answer in await asyncio.gather(*running)} == {DONE}

    @pytest.mark.parametrize(
        ("error", "status", "detail"),
        [
            (Permanent("no engine e9 here"), NotDone.FAILED, "no engine e9 here"),
            (OutcomeUnknown("connection broke"), NotDone.UNKNOWN, "connection broke"),
            (KeyError("defect"), NotDone.UNKNOWN, "unexpected exception: KeyError('defect')"),
            (
                ProblemFaults([f"f{n}: is wrong" for n in range(22)]),
                NotDone.FAILED,
                "; ".join([*(f"f{n}: is wrong" for n in range(20)), "and 2 more"]),
            ),
        ],
    )
    async def test_errors_are_converted_to_results(self, error: Exception, status: NotDone, detail: str) -> None:
        worker = Worker()
        worker.error = error
        received = receiver(worker)
        result = await received.result(Order("a"))
        assert (result.status, result.detail) == (status, detail)
        assert await received.result(Order("a")) == result
        assert worker.calls == ["a"]

    async def test_interrupted_order_is_unknown(self) -> None:
        worker = Worker()
        worker.release.clear()
        received = receiver(worker)
        waiting = asyncio.create_task(received.result(Order("a")))
        await asyncio.sleep(0)
        await received.close()
        assert (await waiting).status == NotDone.UNKNOWN


async def test_ended_stream_sends_no_waiting_orders() -> None:
    stream = OrderStream([1, 2])
    orders = stream.orders()
    assert await anext(orders) == 1
    stream.put(3)
    stream.end()
    assert [order async for order in orders] == []


async def test_unwritten_items_wait_for_next_stream() -> None:
    outbox: Outbox[int] = Outbox(most=3)
    written: list[int] = []

    async def write(item: int) -> None:
        if item == 3 and 3 not in broken:
            broken.append(item)
            raise ConnectionError
        written.append(item)

    broken: list[int] = []
    for item in range(5):
        outbox.put(item)
    with pytest.raises(ConnectionError):
        await outbox.write_all(write)
    writing = asyncio.create_task(outbox.write_all(write))
    await asyncio.sleep(0)
    outbox.put(5)
    await asyncio.sleep(0)
    assert written == [2, 3, 4, 5]
    assert not outbox.items
    writing.cancel()


LASTS_S = 20.0
NODES = ("n0", "n1")
CAPACITY = 2


class AnyNetwork(RuleBasedStateMachine):
    """Several daemons one after another, two nodes, and messages that are delivered in any order, lost or repeated."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock = VirtualClock(100.0)
        self.generation = 1
        self.given: dict[str, tuple[str, Order]] = {}
        self.open: OpenOrders[str, Order, Answer] = OpenOrders()
        self.streams: dict[str, OrderStream[OpenOrder[str, Order, Answer]]] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.messages: list[tuple[str, Order | Answer]] = []  # in transit
        self.effects: list[str] = []
        self.wrongly_begun: list[Order] = []
        self.heard = dict.fromkeys(NODES, 0)  # the newest generation
        self.gates: dict[str, asyncio.Event] = {}
        self.closed: dict[str, Answer | None] = {}
        self.received = {
            node: ReceivedOrders[Order, Answer](self._perform, not_done, self.clock, capacity=CAPACITY)
            for node in NODES
        }
        for node in NODES:
            self.attach(node)

    async def _perform(self, order: Order) -> Answer:
        node, _ = self.given[order.id]
        if order.generation < self.heard[node] or self.clock.now_s() > (order.valid_until_s or 0.0):
            self.wrongly_begun.append(order)
        await self.gates.setdefault(order.id, asyncio.Event()).wait()
        self.effects.append(order.id)
        return Answer(order.id, DONE)

    def _play(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def _turns(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    @rule(nodes=st.lists(st.sampled_from(NODES), min_size=1, max_size=2), attached=st.booleans())
    def give_orders(self, nodes: list[str], attached: bool) -> None:
        for node in nodes:
            if attached and node not in self.streams:
                self.attach(node)
            self._order(node)

    def _order(self, node: str) -> None:
        order = Order(f"o{len(self.given)}", self.generation, self.clock.now_s() + LASTS_S)
        self.given[order.id] = node, order
        opened = OpenOrder(node, order, self.clock.now_s() + LASTS_S, self.loop.create_future())
        self.open.add(opened)
        if node in self.streams:
            self.streams[node].put(opened)
        self._play(self._turns())

    def attach(self, node: str) -> None:
        self.detach(node)
        stream = self.streams[node] = OrderStream(self.open.to(node))
        self.tasks.append(self.loop.create_task(self._send(node, stream)))
        self._play(self._turns())

    async def _send(self, node: str, stream: OrderStream[OpenOrder[str, Order, Answer]]) -> None:
        async for opened in stream.orders():
            opened.sends += 1
            self.messages.append((node, opened.order))

    def detach(self, node: str) -> None:
        if node in self.streams:
            self.streams.pop(node).end()
            self._play(self._turns())

    @rule(data=st.data(), count=st.integers(1, 6), finished=st.booleans())
    def messages_arrive(self, data: st.DataObject, count: int, finished: bool) -> None:
        """Deliver some of the messages in transit; a repeated one stays in transit."""
        for _ in range(min(count, len(self.messages))):
            place = data.draw(st.integers(0, len(self.messages) - 1))
            doubled = data.draw(st.booleans())
            node, message = self.messages[place] if doubled else self.messages.pop(place)
            if isinstance(message, Order):
                self.tasks.append(self.loop.create_task(self._receive(node, message)))
                self._play(self._turns())
            else:
                self._take(node, message)
        if finished:
            self._finish()

    async def _receive(self, node: str, order: Order) -> None:
        self.heard[node] = max(self.heard[node], order.generation)
        self.messages.append((node, await self.received[node].result(order)))

    def _take(self, node: str, answer: Answer) -> None:
        opened = self.open.find(node, answer.order)
        if opened is None:
            return
        if answer.status == NotDone.REFUSED and opened.sends > 1:
            return  # for this delivery only
        assert answer.order not in self.closed
        self.open.close(opened, answer)
        self.closed[answer.order] = answer
        assert opened.result is None or opened.result.result() == answer
        self.open.close(opened, replace(answer, detail="later"))  # changes nothing
        assert opened.result is None or opened.result.result() == answer

    def _finish(self) -> None:
        for gate in self.gates.values():
            gate.set()
        self._play(self._turns())

    @rule(data=st.data(), fault=st.sampled_from(["comes back", "goes away", "lost", "late", "withdrawn", "killed"]))
    def fault(self, data: st.DataObject, fault: str) -> None:
        """Inject one of several faults in a single rule, so that most runs make progress between faults."""
        match fault:
            case "comes back":
                self.attach(data.draw(st.sampled_from(NODES)))
            case "goes away":
                self.detach(data.draw(st.sampled_from(NODES)))
            case "lost":
                self._lose(data)
            case "late":
                self._play(self.clock.advance(data.draw(st.sampled_from([1.0, LASTS_S + 1.0]))))
            case "withdrawn":
                self._withdraw(data)
            case "killed":
                self._restart_daemon()

    def _lose(self, data: st.DataObject) -> None:
        if self.messages:
            self.messages.pop(data.draw(st.integers(0, len(self.messages) - 1)))

    def _withdraw(self, data: st.DataObject) -> None:
        if not list(self.open):
            return
        opened = data.draw(st.sampled_from(list(self.open)))
        self.open.close(opened)
        self.closed[opened.order.id] = None
        assert not opened.is_awaited

    def _restart_daemon(self) -> None:
        for node in NODES:
            self.detach(node)
        self.generation += 1
        left, self.open = list(self.open), OpenOrders()
        for opened in left:
            self.open.add(OpenOrder(opened.destination, opened.order, opened.over_s, None, sends=1))

    @invariant()
    def each_order_has_at_most_one_effect_and_its_result_is_true(self) -> None:
        assert self.wrongly_begun == []
        assert len(self.effects) == len(set(self.effects))
        for id, answer in self.closed.items():
            if answer is not None:
                assert (answer.status == DONE) == (id in self.effects)
        open_ids = {opened.order.id for opened in self.open}
        assert open_ids == self.given.keys() - self.closed.keys()
        assert not any(opened.sends == 0 and opened.order.id in self.effects for opened in self.open)
        assert all(len(received) <= CAPACITY for received in self.received.values())

    def teardown(self) -> None:
        """Deliver everything, so that the effects of nodes become known."""
        if not hasattr(self, "loop"):
            return
        for node in NODES:
            self.attach(node)
        self._play(self._settle())
        unknown = {opened.order.id for opened in self.open}
        assert not unknown & set(self.effects)
        for stream in self.streams.values():
            stream.end()
        self._play(self._end())
        self.loop.close()

    async def _settle(self) -> None:
        for node, message in tuple(self.messages):
            if isinstance(message, Order):
                self.tasks.append(asyncio.create_task(self._receive(node, message)))
        await self._turns()
        for gate in self.gates.values():
            gate.set()
        await self._turns()
        for node, message in self.messages:
            if isinstance(message, Answer):
                self._take(node, message)

    async def _end(self) -> None:
        await asyncio.gather(*self.tasks)
        for received in self.received.values():
            await received.close()


TestAnyNetwork = AnyNetwork.TestCase
TestAnyNetwork.settings = settings(max_examples=100)  # fewer reach few states


async def test_order_stream_waits_for_the_next_order() -> None:
    stream = OrderStream([Order("a")])
    orders = stream.orders()
    assert await anext(orders) == Order("a")
    waiting = asyncio.ensure_future(anext(orders))
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.put(Order("b"))
    assert await waiting == Order("b")
