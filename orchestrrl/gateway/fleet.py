"""The engines that a gateway talks to: their routes, what it has on each, and whether it believes them alive."""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrrl.clock import Clock
from orchestrrl.engines.base import Capabilities, Engine
from orchestrrl.errors import OrchestrRLError
from orchestrrl.gateway.ledger import Record
from orchestrrl.gateway.queue import Queue, Waiter, Waits
from orchestrrl.gateway.routing import Newcomer, Routing
from orchestrrl.gateway.routing.base import concurrency_cap
from orchestrrl.gateway.routing.prefix_affinity import prefix_of
from orchestrrl.operations import Route
from planner.model import EngineHealth, EngineId, RequestId, RequestState

logger = logging.getLogger(__name__)

Connect = Callable[[str], Engine]

# A suspect is asked again after this long, doubling up to the cap.
RECHECK_FIRST_S = 0.25
RECHECK_CAP_S = 5.0


@dataclass(slots=True)
class Slot:
    """One engine, and the gateway's requests on it."""

    id: EngineId
    engine: Engine
    route: Route
    routed: bool = True  # False: left the routes, and only finishes what it has
    suspect_because: str = ""  # empty: believed alive
    rechecking: bool = False  # it is being asked whether it lives
    capabilities: Capabilities | None = None
    records: dict[RequestId, Record] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0  # without a token yet; those for whom a place is reserved count
    running_tokens: int = 0
    waiting_tokens: int = 0
    reserved: dict[RequestId, int] = field(default_factory=dict)  # context tokens of those who are about to enter
    waiting_of_others: int = 0  # requests that others have waiting there
    waited_most: int = 0  # of ours, since the last route, and before
    waited_most_before: int = 0
    progressed_s: float = 0.0  # last token of any request
    failures_total: int = 0
    # With the counts above, what routing.Load asks for: plain fields, since a choice reads those of every engine.
    kv_capacity_tokens: int = 0
    kv_free_tokens: int = 0  # as last told, less what we have running since
    max_sequences: int = 0
    own_pool: str = ""  # where the daemon names none
    pool: str = ""
    seconds_per_token: float | None = None
    policy_version: int | None = None  # of its weights; None: nobody has told
    outdated: bool = False  # it did not get the fleet's weights, and gets no requests until its version is told
    paused: bool = False  # by us: what it has stands still
    loads_open: int = 0  # requests of ours that load KV there and whose tokens were not counted yet
    loads_before: "asyncio.Task[int | None] | None" = None  # tokens that it had loaded before the first of these
    loads_found_tokens: int = 0  # since then, by requests that were counted

    @property
    def usable(self) -> bool:
        """May take a request that is new to it."""
        return (
            self.routed
            and not self.route.draining
            and not self.suspect_because
            and not self.outdated
            and self.route.health is not EngineHealth.NONSENSE
        )

    @property
    def kv_version(self) -> str:
        """What KV on it depends on; empty: it hands none over."""
        version = self.route.kv_version
        return version if not version or self.policy_version is None else f"{version}@{self.policy_version}"

    def follow(self, route: Route) -> None:
        """Take the daemon's newer word on this engine."""
        if route.health is EngineHealth.GONE and self.route.health is not EngineHealth.GONE:
            self.suspect_because = self.suspect_because or "the daemon says that it is gone"
        self.route = route
        self.routed = True
        if route.policy_version is not None:
            self.policy_version = route.policy_version
        if route.newest_policy_version is not None:
            self.outdated = self.policy_version != route.newest_policy_version
        self.kv_capacity_tokens = route.kv_capacity_tokens
        self.kv_free_tokens = route.kv_free_tokens
        self.max_sequences = route.max_sequences
        self.pool = route.pool or self.own_pool
        self.seconds_per_token = None
        if route.load_index and self.records:
            # The daemon's index holds the rate; our own counts at this moment stand in for those behind it.
            mean_tokens = max(1.0, (self.running_tokens + self.waiting_tokens) / len(self.records))
            cap = concurrency_cap(self, mean_tokens)
            self.seconds_per_token = route.load_index * cap / len(self.records)

        # What waited when the daemon's word was sampled may run by now. The most of ours that waited lately is taken
        # off, so that ours are never taken for others'.
        ours = max(self.waited_most, self.waited_most_before)
        self.waiting_of_others = max(0, (route.waiting or 0) - ours)
        self.waited_most_before, self.waited_most = self.waited_most, self.waiting

    def has_room(self, queue_depth: int, context_tokens: int) -> bool:
        """Whether one more may be sent there. `queue_depth` is of those who have to wait: where seats and KV are known
        to be free for all who were sent, nobody does for longer than prefill takes."""
        # One of ours always may wait: others who fill the engine would keep us out.
        return self.waiting < max(1, queue_depth - self.waiting_of_others) or (
            self.running + self.waiting < self.max_sequences
            and context_tokens + self.waiting_tokens <= self.kv_free_tokens
            and not self.waiting_of_others
        )

    def reserve(self, record: Record) -> None:
        """The record will enter; until then it counts as waiting."""
        self.reserved[record.id] = record.context_tokens
        self._await(record.context_tokens)

    def unreserve(self, record: Record) -> bool:
        tokens = self.reserved.pop(record.id, None)
        if tokens is None:
            return False
        self.waiting -= 1
        self.waiting_tokens -= tokens
        return True

    def enter(self, record: Record, now_s: float) -> None:
        self.unreserve(record)
        self.records[record.id] = record
        self._await(record.context_tokens)
        record.begin_attempt(self.id, now_s)

    def _await(self, tokens: int) -> None:
        self.waiting += 1
        self.waiting_tokens += tokens
        if self.waiting > self.waited_most:
            self.waited_most = self.waiting

    def advance(self, record: Record, context_before: int, was: RequestState, now_s: float) -> None:
        """The record has grown from `context_before`, and was in state `was`."""
        self.progressed_s = now_s
        if was is RequestState.RUNNING:
            self._run(record.context_tokens - context_before)
        elif record.state is RequestState.RUNNING:
            self.running += 1
            self.waiting -= 1
            self.waiting_tokens -= context_before
            self._run(record.context_tokens)
        else:
            self.waiting_tokens += record.context_tokens - context_before

    def _run(self, tokens: int) -> None:
        self.running_tokens += tokens
        self.kv_free_tokens -= tokens

    def leave(self, record: Record) -> None:
        if self.records.pop(record.id, None) is None:
            return
        if record.state is RequestState.RUNNING:
            self.running -= 1
            self._run(-record.context_tokens)
        else:
            self.waiting -= 1
            self.waiting_tokens -= record.context_tokens


class NoEngine(Exception):
    """None was there that the request could ever go to, for as long as it had patience."""


class Fleet:
    """Holds the routing table, and the queue before the engines. Connections are opened when used; `close` releases
    them."""

    def __init__(
        self,
        connect: Connect,
        *,
        clock: Clock,
        routing: Routing | None = None,
        queue_depth: int = 0,
        pools: Mapping[EngineId, str] | None = None,
    ) -> None:
        """`queue_depth`: so many requests at most are sent to an engine to wait for their first token, beside those for
        whom it is known to have seats and KV; the others wait here. 0: all wait there. `pools`: of engines for which
        the daemon names none."""
        if queue_depth < 0:
            raise ValueError(f"queue_depth must be >= 0, got {queue_depth}")
        self._connect = connect
        self._clock = clock
        self.incarnation = uuid.uuid4().hex  # makes names of ours differ from those of every other gateway and start
        self.routing = routing or Routing()
        self.queue_depth = queue_depth
        self._pools = pools or {}
        self.queue = Queue()
        self.waits = Waits()
        self._placed: dict[Waiter, Callable[[Slot | NoEngine], None]] = {}  # who wants to know of it
        self._giving_up = False  # those who are alone too long are looked for
        self._usable_slots: list[Slot] | None = None  # None: to be looked up again
        self._last: EngineId | None = None  # chosen
        self._slots: dict[EngineId, Slot] = {}
        self.kv_versions: Counter[str] = Counter()  # how many engines have each
        self._gate_open = True
        self.policy_version: int | None = None  # newest that was told
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    def get(self, engine: EngineId | None) -> Slot | None:
        return None if engine is None else self._slots.get(engine)

    def set_routes(self, routes: Iterable[Route]) -> list[str]:
        """Replace the routing table. Returns what was wrong with it, entry by entry; the rest is taken."""
        faults = []
        named = set()
        for route in routes:
            slot = self._slots.get(route.engine)
            if slot is not None and route.url and route.url.rstrip("/") != slot.engine.url.rstrip("/"):
                self._retire(slot)
                slot = None
            if slot is None:
                if not route.url:
                    faults.append(f"{route.engine}: no URL is known")
                    continue
                slot = Slot(route.engine, self._connect(route.url), Route(route.engine, route.url))
                slot.own_pool = self._pools.get(route.engine, "")
                self._slots[route.engine] = slot
            slot.follow(route)
            named.add(route.engine)
            if slot.suspect_because:
                self._recheck(slot)
        for slot in list(self._slots.values()):
            if slot.id not in named:
                slot.routed = False
                self._forget_if_empty(slot)
        self.announce()
        return faults

    def announce(self) -> None:
        """An engine may have become usable. Everybody who waits now wakes; whoever comes later waits for the next
        change."""
        self.kv_versions = Counter(slot.kv_version for slot in self._slots.values() if slot.routed)
        self._changed.set()
        self._changed = asyncio.Event()
        self._usability_changed()
        self.dispatch()

    @property
    def gate_open(self) -> bool:
        """False: nothing goes to engines, and nobody is at fault for it."""
        return self._gate_open

    @gate_open.setter
    def gate_open(self, is_open: bool) -> None:
        self._gate_open = is_open
        self._usability_changed()
        self.dispatch()

    # --- places ------------------------------------------------------------------------------------------------------

    async def place(
        self,
        record: Record,
        *,
        without: Iterable[EngineId] = (),
        avoiding: Iterable[EngineId] = (),
        again: bool = False,
        patience_s: float = float("inf"),
    ) -> Slot:
        """Wait for an engine with room, and reserve the place until `Slot.enter`; who does not enter gives it back
        (`give_back`). `avoiding`: only where there is no other engine. `again`: before those who are new.

        Raises NoEngine after `patience_s` without an engine that it could go to; time in a queue does not count, nor
        while the gate is closed.
        """
        if self._gate_open and not self._placed and not avoiding:  # the usual case, without what waiting takes
            found = self.choose(self._newcomer(record), without)
            if found is not None:
                found.reserve(record)
                self.waits.add(0.0)
                return found
        slot: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()

        def placed(outcome: Slot | NoEngine) -> None:
            if isinstance(outcome, NoEngine):
                slot.set_exception(outcome)
            else:
                slot.set_result(outcome)

        waiter = self.enqueue(
            record,
            placed,
            without=frozenset(without),
            avoiding=frozenset(avoiding),
            again=again,
            patience_s=patience_s,
        )
        try:
            if not slot.done():
                record.hold()
            return await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled() and slot.exception() is None:
                self.give_back(slot.result(), record)
            raise
        finally:
            self.leave_queue(waiter)

    def enqueue(
        self,
        record: Record,
        placed: Callable[[Slot | NoEngine], None],
        *,
        without: frozenset[EngineId] = frozenset(),
        avoiding: frozenset[EngineId] = frozenset(),
        again: bool = False,
        patience_s: float = float("inf"),
    ) -> Waiter:
        """`place` for those who do not wait themselves: `placed` is called once, perhaps at once."""
        waiter = Waiter(record, self._newcomer(record), self._clock.now_s(), without, avoiding, again, patience_s)
        self._placed[waiter] = placed
        self.queue.join(waiter)
        self.dispatch()
        if waiter in self._placed:
            self._note_if_alone(waiter, waiter.since_s)
            if patience_s < float("inf") and not self._giving_up:
                self._giving_up = True
                self.in_background(self._give_up_on_those_alone())
        return waiter

    def leave_queue(self, waiter: Waiter) -> None:
        if self._placed.pop(waiter, None) is not None:
            self.queue.leave(waiter)

    def give_back(self, slot: Slot, record: Record) -> None:
        """A place that was reserved is not needed. Harmless where none is."""
        if slot.unreserve(record):
            self._forget_if_empty(slot)
            self.dispatch()

    def dispatch(self) -> None:
        """Give places to those who wait, as far as there is room. Whoever is told of his place may call this again."""
        while self._gate_open and self._placed and (found := self.queue.next(self._place_for)) is not None:
            waiter, slot = found
            slot.reserve(waiter.record)
            self.waits.add(self._clock.now_s() - waiter.since_s)
            self._placed.pop(waiter)(slot)

    def _place_for(self, waiter: Waiter) -> Slot | None:
        if waiter.avoiding:
            shunned = waiter.without | waiter.avoiding
            if any(slot.id not in shunned for slot in self._usable()):
                # Better to wait for a good one than to go to one that hung.
                return self.choose(waiter.newcomer, shunned)
        return self.choose(waiter.newcomer, waiter.without)

    def _newcomer(self, record: Record) -> Newcomer:
        prefix = prefix_of(record.group, record.body) if self.routing.by_prefix else 0
        return Newcomer(record.context_tokens, prefix, record.tag)

    def choose(self, newcomer: Newcomer, without: Iterable[EngineId] = ()) -> Slot | None:
        """The engine that a request should go to, None where none may take it now."""
        able = self._usable()
        if self.queue_depth:
            able = [slot for slot in able if slot.has_room(self.queue_depth, newcomer.context_tokens)]
        if without:
            able = [slot for slot in able if slot.id not in without]
        slot = self.routing.choose(able, newcomer, self._last)
        if slot is not None:
            self._last = slot.id
        return slot

    def _usable(self) -> list[Slot]:
        if self._usable_slots is None:
            self._usable_slots = [slot for slot in self._slots.values() if slot.usable]
        return self._usable_slots

    # --- patience ----------------------------------------------------------------------------------------------------

    def _usability_changed(self) -> None:
        """An engine may have become usable, or is no longer: who has one to wait for, and who has none?"""
        self._usable_slots = None
        now_s = self._clock.now_s()
        for waiter in self.queue:
            self._note_if_alone(waiter, now_s)

    def _note_if_alone(self, waiter: Waiter, now_s: float) -> None:
        if not self._gate_open or any(slot.id not in waiter.without for slot in self._usable()):
            waiter.alone_since_s = None
        elif waiter.alone_since_s is None:
            waiter.alone_since_s = now_s

    async def _give_up_on_those_alone(self) -> None:
        """One task for all of them, and only while somebody waits: a burst of thousands needs no thousands of timers.
        Nobody waits longer than their patience and a hundredth."""
        try:
            while waiters := [waiter for waiter in self.queue if waiter.patience_s < float("inf")]:
                now_s = self._clock.now_s()
                next_s = float("inf")
                for waiter in waiters:
                    since_s = now_s if waiter.alone_since_s is None else waiter.alone_since_s
                    left_s = since_s + waiter.patience_s - now_s
                    if left_s > 0:
                        next_s = min(next_s, max(left_s, waiter.patience_s * 0.01))
                        continue
                    placed = self._placed[waiter]
                    self.leave_queue(waiter)
                    placed(NoEngine(f"no engine was there for {waiter.patience_s:g} s"))
                if next_s < float("inf"):
                    await self._clock.sleep(next_s)
        finally:
            self._giving_up = False

    # --- health ------------------------------------------------------------------------------------------------------

    def suspect(self, slot: Slot, because: str) -> None:
        """Believe an engine dead until it says otherwise."""
        slot.failures_total += 1
        if not slot.suspect_because:
            logger.warning("engine %s is suspect: %s", slot.id, because)
            slot.suspect_because = because
            self._usability_changed()
            self._recheck(slot)

    def trust(self, slot: Slot) -> None:
        """The engine has shown that it lives."""
        if slot.suspect_because:
            logger.info("engine %s is back", slot.id)
            slot.suspect_because = ""
            self.announce()
        elif self._placed:
            self.dispatch()

    def release(self, slot: Slot, record: Record) -> None:
        """The request is no longer on this engine."""
        slot.leave(record)
        self._forget_if_empty(slot)
        if self._placed:
            self.dispatch()

    async def changed(self) -> None:
        """Return when an engine may have become usable."""
        await self._changed.wait()

    async def capabilities(self, slot: Slot) -> Capabilities:
        """What the engine offers, asked once; raises what the engine raises."""
        if slot.capabilities is None:
            slot.capabilities = await slot.engine.capabilities()
        return slot.capabilities

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that nobody waits for; it is cancelled by `close`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def abort(self, slot: Slot, attempt_id: str) -> None:
        """Stop an attempt, best effort: its connection is closed already, which stops it too."""
        try:
            await slot.engine.abort([attempt_id])
        except OrchestrRLError as error:
            logger.debug("abort of %s on %s: %s", attempt_id, slot.id, error)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in list(self._slots.values()):
            await slot.engine.close()
        self._slots.clear()

    def _recheck(self, slot: Slot) -> None:
        if not slot.rechecking:
            slot.rechecking = True
            self.in_background(self._recheck_until_alive(slot))

    async def _recheck_until_alive(self, slot: Slot) -> None:
        delay_s = RECHECK_FIRST_S
        try:
            while slot.suspect_because and self._slots.get(slot.id) is slot:
                await self._clock.sleep(delay_s)
                delay_s = min(RECHECK_CAP_S, delay_s * 2)
                if await slot.engine.healthy():
                    self.trust(slot)
        finally:
            slot.rechecking = False

    def _forget_if_empty(self, slot: Slot) -> None:
        if not slot.routed and not slot.records and not slot.reserved and self._slots.get(slot.id) is slot:
            del self._slots[slot.id]
            self._usable_slots = None
            self.in_background(slot.engine.close())

    def _retire(self, slot: Slot) -> None:
        """The id now names an engine elsewhere. What runs on the old one stays there until it is over."""
        del self._slots[slot.id]
        self._usable_slots = None
        slot.routed = False
        self.in_background(self._close_when_empty(slot))

    async def _close_when_empty(self, slot: Slot) -> None:
        while slot.records or slot.reserved:
            await self._clock.sleep(1.0)
        await slot.engine.close()
