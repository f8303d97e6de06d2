"""Engines are expected, start, fail to start and are no longer expected, in any order. Requests wait only with a
reason, expire only without one, and no token is lost or duplicated."""

import asyncio
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.errors import Permanent
from orchestrrl.core.operations import (
    CloseBarrier,
    EngineRoute,
    FrozenRequests,
    OpenBarrier,
    PauseMode,
)
from orchestrrl.gateway.ledger.ledger import RequestRecord
from planner.model import EngineHealth, EngineId, RequestMove
from tests.orchestrrl.gateway.fakes import RunningGroup, undisturbed, world

ENGINES = 3
NAMES = tuple(f"e{index}" for index in range(ENGINES))
PATIENCE_S = 8.0
QUANTUM_S = 0.5
STALL_S = 6.0
LEASE_S = 20.0

engines = st.sampled_from(NAMES)
acts = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 20), st.booleans()),
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("advance"), st.sampled_from((1, 5, 25))),  # quanta
    # The routes, and the expected engines with their remaining quanta.
    st.tuples(
        st.just("routes"),
        st.tuples(*[st.sampled_from(("in", "out", "draining"))] * ENGINES),
        st.frozensets(engines),
        st.sampled_from((0, 3, 20, 60)),
    ),
    st.tuples(st.just("arrive")),  # all expected engines have started
    st.tuples(st.just("silence"), st.frozensets(engines), st.sampled_from((3, 20))),  # out, expected, then forgotten
    st.tuples(st.just("move"), st.integers(0, 5), engines, st.sampled_from((0.0, 0.0, 3.0, 15.0))),
    st.tuples(st.just("move_all"), engines),
    st.tuples(st.just("restart"), engines),  # the engine's process
    st.tuples(st.just("leave"), st.integers(0, 5)),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("close"), st.sampled_from(PauseMode)),
    st.tuples(st.just("open")),
)


@dataclass(eq=False)
class Order:
    """The test's orders for one request, and the observed state of the request."""

    engine: str
    until_s: float
    was_expected: bool


@dataclass(eq=False)
class Client:
    job: RunningGroup
    task: "asyncio.Task[None]"
    prompt: list[int]
    max_tokens: int
    read: list[int] = field(default_factory=list)
    order: Order | None = None
    left: bool = False
    seen: bool = False  # it failed, and the failure was checked

    @property
    def record(self) -> RequestRecord:
        return self.job.records[0]

    @property
    def there(self) -> bool:
        return not self.task.done()


class Story:
    def __init__(self) -> None:
        self.w = world(ENGINES, engine_wait_s=PATIENCE_S, stall_s=STALL_S, failures=10**6)
        self.clients: list[Client] = []
        self.orders: set[asyncio.Task[object]] = set()
        self.routed = dict.fromkeys(NAMES, "in")
        self.expected: frozenset[str] = frozenset()
        self.expected_until_s = 0.0
        self.alone_since_s: float | None = None
        self.leases = 0
        self.watching = asyncio.create_task(self.w.gateway.watch())

    @property
    def now_s(self) -> float:
        return self.w.clock.now_s()

    # --- the expected state ---

    def usable(self, name: str) -> bool:
        backend = self.w.fleet.get(EngineId(name))
        return backend is not None and backend.usable

    def is_expected(self, name: str) -> bool:
        return name in self.expected and self.now_s < self.expected_until_s and not self.usable(name)

    # --- acts ---

    async def act(self, act: tuple[object, ...]) -> None:
        w = self.w
        match act:
            case ("ask", int(max_tokens), bool(stream)):
                self.ask(max_tokens, stream)
            case ("step", int(steps)):
                for _ in range(steps):
                    await w.step()
            case ("advance", int(quanta)):
                for _ in range(quanta):
                    await w.clock.advance(QUANTUM_S)
                    await self.check()
            case ("routes", tuple(states), frozenset(expected), int(quanta)):
                self.routed = dict(zip(NAMES, states, strict=True))
                self.expect(expected, quanta)
            case ("arrive",):
                self.routed |= dict.fromkeys(self.expected, "in")
                self.expected = frozenset()
                self.send_routes()
            case ("silence", frozenset(names), int(quanta)):
                self.routed |= dict.fromkeys(names, "out")
                self.expect(names, quanta)
            case ("move", int(number), str(name), float(hold_s)):
                if there := [client for client in self.clients if client.there]:
                    await self.move([there[number % len(there)]], name, hold_s)
            case ("move_all", str(name)):
                await self.move([client for client in self.clients if client.there], name, 0.0)
            case ("restart", str(name)):
                w.engines[name].die()
                await w.settle()
                w.engines[name].revive()
            case ("leave", int(number)):
                if there := [client for client in self.clients if client.there]:
                    there[number % len(there)].left = True
                    there[number % len(there)].task.cancel()
            case ("cancel", int(number)):
                if records := list(w.gateway.ledger):
                    w.gateway.cancel([records[number % len(records)].id], (), "cancelled")
            case ("close", PauseMode() as mode):
                self.leases += 1
                until_s = self.now_s + LEASE_S
                order = CloseBarrier(f"l{self.leases}", "", mode, FrozenRequests.RECOMPUTE, until_s, until_s - 5.0)
                self.orders.add(asyncio.create_task(w.gateway.barrier.close(order)))
            case ("open",):
                self.orders.add(asyncio.create_task(w.gateway.barrier.open(OpenBarrier(""))))
        await self.check()

    def ask(self, max_tokens: int, stream: bool) -> None:
        prompt = [*b"prompt ", len(self.clients)]
        ask = self.w.ask(request_id=f"r{len(self.clients)}", prompt=prompt, max_tokens=max_tokens, stream=stream)
        job = self.w.gateway.request_group(ask)
        read: list[int] = []

        def grown(record: RequestRecord) -> None:
            for delta in record.take_undelivered():
                read.extend(delta.chunk.token_ids)

        task = asyncio.create_task(job.run(grown if stream else None))
        self.clients.append(Client(job, task, prompt, max_tokens, read))

    def expect(self, names: frozenset[str], quanta: int) -> None:
        self.expected, self.expected_until_s = names, self.now_s + quanta * QUANTUM_S
        self.send_routes()

    def send_routes(self) -> None:
        routes = [
            EngineRoute(EngineId(name), f"http://{name}", EngineHealth.OK, draining=state == "draining")
            for name, state in self.routed.items()
            if state != "out"
        ]
        assert not self.w.gateway.set_routes(routes, map(EngineId, self.expected), self.expected_until_s)

    async def move(self, clients: list[Client], name: str, hold_s: float) -> None:
        await self.w.settle()
        for client in clients:
            record = client.record
            expected, usable = self.is_expected(name), self.usable(name)
            order = RequestMove(record.id, record.engine or EngineId(""), EngineId(name), hold_s)
            held = record.engine is None
            moving = asyncio.create_task(self.w.gateway.move([order]))
            for _ in range(8):
                await asyncio.sleep(0)
            if not usable and moving.done() and moving.result()[0].done:
                client.order = Order(name, self.now_s + hold_s, expected)
                assert expected or hold_s
            elif usable and held and moving.done() and moving.result()[0].done:
                await self.w.settle()
                assert record.done or record.engine == name
            else:
                self.orders.add(moving)

    # --- invariants ---

    async def check(self) -> None:
        await self.w.settle()
        w, now_s = self.w, self.now_s
        any_engine = any(map(self.usable, NAMES)) or any(map(self.is_expected, NAMES))
        if any_engine or not w.fleet.barrier_open:
            self.alone_since_s = None
        elif self.alone_since_s is None:
            self.alone_since_s = now_s
        for client in self.clients:
            self.check_wait(client)
            self.check_answer(client)

    def check_wait(self, client: Client) -> None:
        relay = self.w.gateway.relays.get(client.record.id)
        if not client.there or relay is None or relay.record.done or relay.backend is not None:
            return
        assert relay.record.engine is None
        name = relay.kept_for
        if name is not None:
            order = client.order
            assert order is not None
            assert order.engine == name
            assert not (self.usable(name) and self.w.fleet.barrier_open)
            order.was_expected = order.was_expected or self.is_expected(name)
            if not self.usable(name):
                assert self.is_expected(name) or (not order.was_expected and self.now_s < order.until_s)
        elif self.w.fleet.barrier_open and not relay._delay_s and relay._seeker is not None:
            waiting_since_s = {waiter.record.id: waiter.since_s for waiter in self.w.fleet.queue}
            if client.record.id in waiting_since_s:
                assert not any(map(self.usable, NAMES))
                # No request waits forever.
                if self.alone_since_s is not None:
                    since_s = max(self.alone_since_s, waiting_since_s[client.record.id])
                    assert self.now_s - since_s <= PATIENCE_S + 2 * QUANTUM_S

    def check_answer(self, client: Client) -> None:
        if client.there or client.left or client.seen:
            return
        client.task.result()
        record = client.record
        tokens, text, finish_reason = undisturbed(client.prompt, client.max_tokens)
        made = list(record.generated_ids)
        if record.failure is not None:
            assert "no engine was available" in str(record.failure.error)
            assert self.alone_since_s is not None
            assert self.now_s - self.alone_since_s >= PATIENCE_S - QUANTUM_S
            client.seen = True  # when it happened
        elif record.finish_reason == "abort":
            assert record.stop_reason in ("cancelled", "paused")
            assert made == tokens[: len(made)]
        else:
            assert (made, record.text, record.finish_reason) == (tokens, text, finish_reason)
        if client.job.request.streaming:
            for delta in record.take_undelivered():
                client.read.extend(delta.chunk.token_ids)
            assert client.read == made

    async def end(self) -> None:
        """Stop all orders, as if the daemon had died, and check that all requests end."""
        for _ in range(300):
            await self.w.step()
            await self.w.clock.advance(QUANTUM_S)
            await self.check()
        for client in self.clients:
            assert not client.there, client.record
        assert len(self.w.gateway.ledger) == 0
        assert len(self.w.fleet.queue) == 0
        assert not self.w.gateway.relays
        for engine in self.w.engines.values():
            assert not engine.attempts
        for outcome in await asyncio.gather(*self.orders, return_exceptions=True):
            assert not isinstance(outcome, BaseException) or isinstance(outcome, Permanent)
        self.watching.cancel()
        await asyncio.gather(self.watching, return_exceptions=True)
        await self.w.fleet.close()


@given(st.lists(acts, min_size=3, max_size=25))
def test_requests_survive_any_order_of_expected_engines(story: list[tuple[object, ...]]) -> None:
    async def run() -> None:
        before = asyncio.all_tasks()
        played = Story()
        for act in story:
            await played.act(act)
        await played.end()
        await played.w.settle()
        assert not asyncio.all_tasks() - before

    asyncio.run(asyncio.wait_for(run(), 60.0))
