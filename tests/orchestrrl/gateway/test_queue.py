"""The queue before the engines is first come, first served, and loses no request. No engine has more waiting requests
than allowed, and no request waits while there is room."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.base import Chunk, CompletionEndpoint
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends, NoBackend
from orchestrrl.gateway.routing.queue import QueuedRequest, RequestQueue
from orchestrrl.gateway.routing.strategies import STRATEGIES, RoutingPolicy
from planner.model import EngineId, RequestId

ENGINES = ("e0", "e1", "e2")


async def nothing() -> None: ...


def fleet_of(
    clock: VirtualClock, *, depth: int, engines: tuple[str, ...] = ENGINES, policy: str = "load_index"
) -> EngineBackends:
    def connect(url: str) -> Any:
        return SimpleNamespace(url=url, close=nothing)

    fleet = EngineBackends(connect, clock=clock, routing=RoutingPolicy(policy, queue_depth=depth))
    fleet.set_routes(routes(engines))
    return fleet


def routes(engines: tuple[str, ...], **known: Any) -> list[EngineRoute]:
    return [EngineRoute(EngineId(name), f"http://{name}", **known) for name in engines]


def record(name: str, *, again: bool = False) -> RequestRecord:
    made = RequestRecord(
        RequestId(name), CompletionEndpoint.COMPLETIONS, {"prompt": name}, False, 0.0, 8, prompt_tokens_estimate=5
    )
    made.attempt = int(again)
    return made


def slot_of(fleet: EngineBackends, name: str) -> EngineBackend:
    backend = fleet.get(EngineId(name))
    assert backend is not None
    return backend


class World:
    """Clients and scripted engines. Keeps its own record of the waiting and the placed requests."""

    def __init__(self, depth: int, policy: str) -> None:
        self.clock = VirtualClock()
        self.depth = depth
        self.fleet = fleet_of(self.clock, depth=depth, policy=policy)
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.records: dict[str, RequestRecord] = {}
        self.without: dict[str, frozenset[str]] = {}
        self.lines: tuple[list[str], list[str]] = ([], [])  # again, new: requests not yet placed, in order
        self.on: dict[str, EngineBackend] = {}
        self.draining: set[str] = set()
        self.placed_in_all = 0

    async def arrive(self, *, again: bool, without: frozenset[str]) -> None:
        name = f"r{len(self.tasks)}"
        self.records[name] = record(name, again=again)
        self.without[name] = without
        self.lines[not again].append(name)
        self.tasks[name] = asyncio.create_task(self._run(name, again))
        await self.settle()

    async def _run(self, name: str, again: bool) -> None:
        without = [EngineId(engine) for engine in self.without[name]]
        backend = await self.fleet.place(self.records[name], without=without, again=again)
        assert backend.usable
        assert self.fleet.barrier_open
        assert backend.id not in without
        line = self.lines[not again]
        for earlier in (*(self.lines[0] if not again else ()), *line[: line.index(name)]):
            assert backend.id in self.without[earlier], f"{name} overtook {earlier}"
        line.remove(name)
        backend.enter(self.records[name], self.clock.now_s())
        self.on[name] = backend
        self.placed_in_all += 1

    async def first_token(self, number: int) -> None:
        waiting = [name for name in self.on if not self.records[name].generated_ids]
        if waiting:
            name = waiting[number % len(waiting)]
            one, backend = self.records[name], self.on[name]
            before, was = one.context_tokens, one.state
            one.append(Chunk(token_ids=(7,)), "", None, self.clock.now_s())
            backend.advance(one, before, was, self.clock.now_s())
            self.fleet.trust(backend)
        await self.settle()

    async def finish(self, number: int) -> None:
        if self.on:
            name = list(self.on)[number % len(self.on)]
            self.fleet.release(self.on.pop(name), self.records[name])
        await self.settle()

    async def cancel(self, number: int, *, at_once: bool) -> None:
        """Cancel a client's request, possibly at the moment when its place becomes free."""
        waiting = [*self.lines[0], *self.lines[1]]
        if not waiting:
            return
        name = waiting[number % len(waiting)]
        if at_once and self.on:
            leaving = next(iter(self.on))
            self.fleet.release(self.on.pop(leaving), self.records[leaving])
        if any(name in backend.reserved for backend in self.fleet):
            self.placed_in_all += 1  # its wait had ended and was counted before it left
        self.tasks[name].cancel()
        for line in self.lines:
            if name in line:
                line.remove(name)
        await self.settle()

    async def toggle(self, number: int) -> None:
        self.draining ^= {ENGINES[number % len(ENGINES)]}
        changed = [dataclasses.replace(route, draining=route.engine in self.draining) for route in routes(ENGINES)]
        self.fleet.set_routes(changed)
        await self.settle()

    async def barrier(self) -> None:
        self.fleet.barrier_open = not self.fleet.barrier_open
        await self.settle()

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        for task in self.tasks.values():
            if task.done() and not task.cancelled():
                task.result()
        self.check()

    def check(self) -> None:
        assert [waiter.record.id for waiter in self.fleet.queue] == [*self.lines[0], *self.lines[1]]
        for backend in self.fleet:
            mine = [self.records[name] for name, where in self.on.items() if where is backend]
            assert not backend.reserved
            assert backend.waiting == sum(not one.generated_ids for one in mine) <= self.depth
            assert backend.running == len(mine) - backend.waiting
            assert backend.waiting_tokens == sum(one.context_tokens for one in mine if not one.generated_ids)
            assert backend.running_tokens == sum(one.context_tokens for one in mine if one.generated_ids)
        room = {backend.id for backend in self.fleet if backend.usable and backend.waiting < self.depth}
        if self.fleet.barrier_open:
            for name in (*self.lines[0], *self.lines[1]):
                assert room <= self.without[name], f"{name} waits although there is room on {sorted(room)}"


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("arrive"),
            st.booleans(),
            st.frozensets(st.sampled_from(ENGINES), max_size=2) | st.just(frozenset()),
        ),
        st.tuples(st.just("first_token"), st.integers(0, 30)),
        st.tuples(st.just("finish"), st.integers(0, 30)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("toggle"), st.integers(0, 2)),
        st.tuples(st.just("barrier")),
    ),
    max_size=60,
)


@given(steps=steps, depth=st.integers(1, 3), policy=st.sampled_from(sorted(STRATEGIES)))
def test_queue_is_first_come_first_served_and_loses_no_request(steps: list[Any], depth: int, policy: str) -> None:
    async def run() -> None:
        world = World(depth, policy)
        for what, *how in steps:
            match what:
                case "arrive":
                    await world.arrive(again=how[0], without=how[1])
                case "first_token":
                    await world.first_token(how[0])
                case "finish":
                    await world.finish(how[0])
                case "cancel":
                    await world.cancel(how[0], at_once=how[1])
                case "toggle":
                    await world.toggle(how[0])
                case "barrier":
                    await world.barrier()
        # In the end, every request that stayed has been placed.
        world.draining = {ENGINES[0]}
        await world.toggle(0)
        if not world.fleet.barrier_open:
            await world.barrier()
        while world.on:
            await world.finish(0)
        assert len(world.fleet.queue) == 0
        assert world.placed_in_all == waited(world.fleet)["+Inf"]
        assert all(task.done() for task in world.tasks.values())
        await world.fleet.close()

    asyncio.run(run())


@given(
    seats=st.integers(1, 4),
    depth=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
)
def test_no_engine_idles_while_a_request_waits(seats: int, depth: int, lengths: list[int]) -> None:
    """Engines with few seats: a request gets its first token one second after its seat, and keeps it for its length."""

    async def run() -> None:
        clock = VirtualClock()
        fleet = fleet_of(clock, depth=depth)
        begun: list[int] = []
        queues: dict[str, deque[tuple[RequestRecord, int]]] = {name: deque() for name in ENGINES}
        seated: dict[str, list[list[Any]]] = {name: [] for name in ENGINES}

        async def client(number: int, length: int) -> None:
            one = record(f"r{number}")
            backend = await fleet.place(one)
            begun.append(number)
            backend.enter(one, clock.now_s())
            queues[backend.id].append((one, length))

        tasks = [asyncio.create_task(client(number, length)) for number, length in enumerate(lengths)]
        finished = 0
        for _ in range(2 * sum(lengths) + 2 * len(lengths)):
            await clock.advance(1.0)
            if finished == len(lengths):
                break
            for name in ENGINES:
                backend = slot_of(fleet, name)
                assert backend.waiting <= depth
                if len(fleet.queue):
                    assert backend.waiting == depth
                for seat in list(seated[name]):
                    seat[1] -= 1
                    if seat[1] == 0:
                        seated[name].remove(seat)
                        fleet.release(backend, seat[0])
                        finished += 1
                while queues[name] and len(seated[name]) < seats:
                    one, length = queues[name].popleft()
                    seated[name].append([one, length])
                    before, was = one.context_tokens, one.state
                    one.append(Chunk(token_ids=(7,)), "", None, clock.now_s())
                    backend.advance(one, before, was, clock.now_s())
                    fleet.trust(backend)
        assert finished == len(lengths)
        assert begun == sorted(begun)
        await asyncio.gather(*tasks)
        await fleet.close()

    asyncio.run(run())


def waited(fleet: EngineBackends) -> dict[str, float]:
    """Return the number of requests that waited no longer than each bound."""
    (metric,) = fleet.waits.collect()
    return {sample.labels["le"]: sample.value for sample in metric.samples if "le" in sample.labels}


async def test_no_request_waits_without_a_queue_depth() -> None:
    fleet = fleet_of(VirtualClock(), depth=0)
    for number in range(100):
        one = record(f"r{number}")
        (await fleet.place(one)).enter(one, 0.0)
    assert [backend.waiting for backend in fleet] == [34, 33, 33]
    assert set(waited(fleet).values()) == {100}  # zero wait


async def test_waiting_requests_of_others_count_except_for_one_place() -> None:
    fleet = fleet_of(VirtualClock(), depth=4, engines=("e0",))
    backend = slot_of(fleet, "e0")

    async def fill() -> int:
        placed = 0
        while backend.has_room(4, 5):
            one = record(f"r{placed}-{backend.waiting_of_others}")
            (await fleet.place(one)).enter(one, 0.0)
            placed += 1
        return placed

    fleet.set_routes(routes(("e0",), waiting=3))
    assert await fill() == 1
    fleet.set_routes(routes(("e0",), waiting=4))  # including this gateway's
    assert backend.waiting_of_others == 3
    assert await fill() == 0
    # This gateway's request runs now, but did not when the daemon sampled the engine.
    one = next(iter(backend.records.values()))
    one.append(Chunk(token_ids=(7,)), "", None, 0.0)
    backend.advance(one, 5, type(one.state).WAITING, 0.0)
    fleet.set_routes(routes(("e0",), waiting=1))
    assert backend.waiting_of_others == 0
    fleet.set_routes(routes(("e0",), waiting=100))
    assert await fill() == 1
    await fleet.close()


async def test_patience_counts_only_without_an_eligible_engine() -> None:
    clock = VirtualClock()
    fleet = fleet_of(clock, depth=1, engines=("e0",))
    first, second = record("r0"), record("r1")
    (await fleet.place(first)).enter(first, 0.0)
    waiting = asyncio.create_task(fleet.place(second, patience_s=10.0))
    await clock.advance(100.0)  # in a queue
    assert not waiting.done()
    fleet.set_routes([])
    await clock.advance(9.0)
    fleet.barrier_open = False
    await clock.advance(100.0)  # the closed barrier does not count
    fleet.barrier_open = True
    await clock.advance(9.0)
    fleet.set_routes(routes(("e0",)))
    await clock.advance(1.0)
    fleet.set_routes([])
    await clock.advance(9.8)
    assert not waiting.done()
    await clock.advance(0.4)
    with pytest.raises(NoBackend, match="no engine was available for 10 s"):
        await waiting
    assert len(fleet.queue) == 0
    await fleet.close()


async def test_cancelled_waiter_passes_its_place_to_the_next() -> None:
    fleet = fleet_of(VirtualClock(), depth=1, engines=("e0",))
    backend, first = slot_of(fleet, "e0"), record("r0")
    (await fleet.place(first)).enter(first, 0.0)
    leaving, staying = (asyncio.create_task(fleet.place(record(name))) for name in ("r1", "r2"))
    await asyncio.sleep(0)
    fleet.release(backend, first)
    assert list(backend.reserved) == ["r1"]
    leaving.cancel()
    assert await staying is backend
    assert list(backend.reserved) == ["r2"]
    assert (backend.waiting, backend.waiting_tokens, len(fleet.queue)) == (1, 5, 0)
    await fleet.close()


async def test_unusable_engine_is_not_chosen_before_the_announcement() -> None:
    fleet = fleet_of(VirtualClock(), depth=0, engines=("e0", "e1"))
    assert (await fleet.place(record("r0"))).id == "e0"
    slot_of(fleet, "e1").outdated = True
    assert (await fleet.place(record("r1"))).id == "e0"
    slot_of(fleet, "e0").outdated = True
    waiting = asyncio.create_task(fleet.place(record("r2")))
    await asyncio.sleep(0)
    slot_of(fleet, "e1").outdated = False
    fleet.announce()
    assert (await waiting).id == "e1"
    await fleet.close()


async def test_request_without_eligible_engine_expires_and_blocks_no_other() -> None:
    clock = VirtualClock()
    fleet = fleet_of(clock, depth=2, engines=("e0",))
    refused = asyncio.create_task(fleet.place(record("r0", again=True), without=[EngineId("e0")], patience_s=5.0))
    await clock.advance(1.0)
    other = await fleet.place(record("r1"))
    assert other.id == "e0"
    await clock.advance(5.0)
    with pytest.raises(NoBackend):
        await refused
    await fleet.close()


async def test_avoided_engine_is_used_only_if_there_is_no_other() -> None:
    fleet = fleet_of(VirtualClock(), depth=1, engines=("e0", "e1"))
    for number in (0, 1):
        one = record(f"r{number}")
        (await fleet.place(one)).enter(one, 0.0)
    avoiding = asyncio.create_task(fleet.place(record("r2", again=True), avoiding=[EngineId("e0")]))
    await asyncio.sleep(0)
    fleet.release(slot_of(fleet, "e0"), slot_of(fleet, "e0").records[RequestId("r0")])
    await asyncio.sleep(0)
    assert not avoiding.done()
    assert (await fleet.place(record("r3"))).id == "e0"  # it is skipped
    fleet.set_routes(routes(("e0",)))
    assert not avoiding.done()
    fleet.give_back(slot_of(fleet, "e0"), record("r3"))
    assert (await avoiding).id == "e0"
    await fleet.close()


def test_dispatch_scans_a_long_queue_no_further_than_needed() -> None:
    queue = RequestQueue()
    waiters = [QueuedRequest(record(f"r{number}"), lambda outcome: None) for number in range(10_000)]
    for waiter in waiters:
        queue.join(waiter)
    asked = []

    def place_for(waiter: QueuedRequest) -> str | None:
        asked.append(waiter)
        return "there" if len(asked) <= 2 else None

    assert queue.next(place_for) == (waiters[0], "there")
    assert queue.next(place_for) == (waiters[1], "there")
    assert queue.next(place_for) is None
    assert asked == waiters[:3]
    assert list(queue) == waiters[2:]
    queue.leave(waiters[5])
    queue.leave(waiters[5])
    assert len(queue) == 9_997


async def test_placed_callback_may_make_room_at_once() -> None:
    """A simulated engine does so when it updates its state for an arriving request."""
    fleet = fleet_of(VirtualClock(), depth=1, engines=("e0",))
    backend, placed = slot_of(fleet, "e0"), []

    def ends_at_once(name: str) -> Callable[[EngineBackend | NoBackend], None]:
        def on_placed(outcome: EngineBackend | NoBackend) -> None:
            assert outcome is backend
            one = records[name]
            backend.enter(one, 0.0)
            placed.append(name)
            fleet.release(backend, one)

        return on_placed

    fleet.barrier_open = False
    records = {f"r{number}": record(f"r{number}") for number in range(50)}
    for name, one in records.items():
        fleet.enqueue(QueuedRequest(one, ends_at_once(name)))
    fleet.barrier_open = True
    assert placed == list(records)
    assert (len(fleet.queue), backend.waiting) == (0, 0)
    await fleet.close()
