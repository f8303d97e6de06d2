"""The engines that a gateway talks to: their routes, what it has on each, and whether it believes them alive."""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from orchestrrl.clock import Clock
from orchestrrl.engines.base import Capabilities, Engine
from orchestrrl.errors import OrchestrRLError
from orchestrrl.gateway.ledger import Record
from orchestrrl.gateway.routing import Choice, EngineLoad, Policy, RoundRobin, choose, concurrency_cap
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
    running_tokens: int = 0
    waiting_tokens: int = 0
    progressed_s: float = 0.0  # last token of any request
    failures_total: int = 0
    kv_base_tokens: int = 0  # free KV as last told, plus what we had running then
    seconds_per_token: float | None = None
    policy_version: int | None = None  # of its weights; None: nobody has told
    outdated: bool = False  # it did not get the fleet's weights, and gets no requests until its version is told
    paused: bool = False  # by us: what it has stands still
    loads_open: int = 0  # requests of ours that load KV there and whose tokens were not counted yet
    loads_before: "asyncio.Task[int | None] | None" = None  # tokens that it had loaded before the first of these
    loads_found_tokens: int = 0  # since then, by requests that were counted

    @property
    def waiting(self) -> int:
        return len(self.records) - self.running

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

    def load(self) -> EngineLoad:
        return EngineLoad(
            id=self.id,
            running=self.running,
            waiting=self.waiting,
            running_tokens=self.running_tokens,
            waiting_tokens=self.waiting_tokens,
            kv_capacity_tokens=self.route.kv_capacity_tokens,
            kv_free_tokens=self.kv_base_tokens - self.running_tokens,
            max_sequences=self.route.max_sequences,
            seconds_per_token=self.seconds_per_token,
        )

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
        self.kv_base_tokens = route.kv_free_tokens + self.running_tokens
        self.seconds_per_token = None
        if route.load_index and self.records:
            # The daemon's index holds the rate; our own counts at this moment stand in for those behind it.
            mean_tokens = max(1.0, (self.running_tokens + self.waiting_tokens) / len(self.records))
            cap = concurrency_cap(self.load(), mean_tokens)
            self.seconds_per_token = route.load_index * cap / len(self.records)

    def enter(self, record: Record, now_s: float) -> None:
        self.records[record.id] = record
        self.waiting_tokens += record.context_tokens
        record.begin_attempt(self.id, now_s)

    def advance(self, record: Record, context_before: int, was: RequestState, now_s: float) -> None:
        """The record has grown from `context_before`, and was in state `was`."""
        self.progressed_s = now_s
        if was is RequestState.RUNNING:
            self.running_tokens += record.context_tokens - context_before
        elif record.state is RequestState.RUNNING:
            self.running += 1
            self.waiting_tokens -= context_before
            self.running_tokens += record.context_tokens
        else:
            self.waiting_tokens += record.context_tokens - context_before

    def leave(self, record: Record) -> None:
        if self.records.pop(record.id, None) is None:
            return
        if record.state is RequestState.RUNNING:
            self.running -= 1
            self.running_tokens -= record.context_tokens
        else:
            self.waiting_tokens -= record.context_tokens


class Fleet:
    """Holds the routing table. Connections are opened when used; `close` releases them."""

    def __init__(self, connect: Connect, *, clock: Clock, policy: Policy = Policy.LOAD_INDEX) -> None:
        self._connect = connect
        self._clock = clock
        self.incarnation = uuid.uuid4().hex  # makes names of ours differ from those of every other gateway and start
        self._round_robin = RoundRobin() if policy is Policy.ROUND_ROBIN else None
        self._slots: dict[EngineId, Slot] = {}
        self.kv_versions: Counter[str] = Counter()  # how many engines have each
        self.gate_open = True  # False: nothing goes to engines, and nobody is at fault for it
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

    def choose(self, context_tokens: int, without: Iterable[EngineId] = ()) -> Slot | None:
        """The engine that a request should go to, None where none may take it."""
        excluded = set(without)
        usable = [slot for slot in self._slots.values() if slot.usable and slot.id not in excluded]
        if len(usable) == 1 and self._round_robin is None:
            return usable[0]
        loads = [slot.load() for slot in usable]
        choice: Choice | None
        choice = self._round_robin.choose(loads) if self._round_robin else choose(loads, context_tokens)
        return None if choice is None else self._slots[choice.engine]

    def suspect(self, slot: Slot, because: str) -> None:
        """Believe an engine dead until it says otherwise."""
        slot.failures_total += 1
        if not slot.suspect_because:
            logger.warning("engine %s is suspect: %s", slot.id, because)
            slot.suspect_because = because
            self._recheck(slot)

    def trust(self, slot: Slot) -> None:
        """The engine has shown that it lives."""
        if slot.suspect_because:
            logger.info("engine %s is back", slot.id)
            slot.suspect_because = ""
            self.announce()

    def release(self, slot: Slot, record: Record) -> None:
        """The request is no longer on this engine."""
        slot.leave(record)
        self._forget_if_empty(slot)

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
        if not slot.routed and not slot.records and self._slots.get(slot.id) is slot:
            del self._slots[slot.id]
            self.in_background(slot.engine.close())

    def _retire(self, slot: Slot) -> None:
        """The id now names an engine elsewhere. What runs on the old one stays there until it is over."""
        del self._slots[slot.id]
        slot.routed = False
        self.in_background(self._close_when_empty(slot))

    async def _close_when_empty(self, slot: Slot) -> None:
        while slot.records:
            await self._clock.sleep(1.0)
        await slot.engine.close()
