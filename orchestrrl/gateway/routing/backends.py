"""A gateway's engines: the routing table, the queue of requests that wait for an engine, and the health of each
engine."""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from prometheus_client import Histogram

from orchestrrl.core.addresses import same_address, server_address, without_login
from orchestrrl.core.clock import Clock, stop
from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.core.nodes import GatewayEngine
from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.base import CompletionEndpoint, Engine, EngineCapabilities
from orchestrrl.engines.handover import LeftKv
from orchestrrl.gateway.failovers import FailoverCounter
from orchestrrl.gateway.ledger.ledger import COMPLETE, RequestRecord
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.queue import QueuedRequest, RequestQueue
from orchestrrl.gateway.routing.sessions import SessionTable, after_turn, engine_for, typical_times
from orchestrrl.gateway.routing.strategies import RoutedRequest, RoutingPolicy, prefix_of
from orchestrrl.integrations.instrument.kv_scheduler import DEFAULT_WAIT_S
from planner.model import EngineHealth, EngineId, RequestState

logger = logging.getLogger(__name__)

Connect = Callable[[str], Engine]

# First interval between health probes of a suspected engine; it doubles up to the cap.
RECHECK_FIRST_S = 0.25
RECHECK_CAP_S = 5.0
WAIT_BOUNDS_S = (0.0, 0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0)
LEARN_S = 2.0  # the longest that a request waits for its engine's capabilities
MODELS_AGAIN_S = 2.0  # the shortest time between two searches for an unknown model


class NoBackend(Exception):
    """Raised if no engine that may run the request was available within the request's patience (`patience_s`)."""


class EngineBackends:
    """Holds the routing table and the queue of requests that wait for an engine. Connections to engines are opened on
    first use and closed by `close`."""

    def __init__(self, connect: Connect, *, clock: Clock, routing: RoutingPolicy | None = None) -> None:
        self._connect = connect
        self.clock = clock
        self.incarnation = uuid.uuid4().hex  # makes this gateway's names unique among all gateways and starts
        self.routing = routing or RoutingPolicy()
        self.queue = RequestQueue()
        self.sessions = SessionTable(self.routing.session_ttl_s)
        self.waits = Histogram(
            "orchestrrl_gateway_queue_seconds",
            "Seconds that a request waited in the gateway before each attempt.",
            buckets=WAIT_BOUNDS_S,
            registry=None,
        )
        self.failovers = FailoverCounter()
        self._giving_up = False  # a task expires requests without an engine
        self._usable_slots: list[EngineBackend] | None = None  # cache; None: it must be computed again
        self._last: EngineId | None = None  # the engine chosen last
        self._backends: dict[EngineId, EngineBackend] = {}
        self.own: dict[EngineId, GatewayEngine] = {}  # engines that the gateway was started with
        self.kv_versions: Counter[str] = Counter()  # number of routed engines per KV version
        self._contexts: set[float] = set()  # context lengths of the routed engines, in tokens
        self._model_sets: set[tuple[str, ...]] = set()  # models of each routed engine that has reported them
        self._models_read_s = -inf  # time of the last search for an unknown model
        self._models_reading: asyncio.Task[None] | None = None  # that search; it may have ended
        self._expected: frozenset[EngineId] = frozenset()  # from the daemon's last order ...
        self._expected_until_s = 0.0  # ... and their deadline, so that no request waits forever if the daemon dies
        self._unexpecting: asyncio.Task[None] | None = None  # waits for that deadline
        self._retired: list[EngineBackend] = []  # backends whose id now names another server, until they are empty
        self._barrier_open = True
        self.policy_version: int | None = None  # newest reported version
        self.changed = asyncio.Event()  # set and replaced when an engine may have become usable
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[EngineBackend]:
        return iter(self._backends.values())

    def with_retired(self) -> list[EngineBackend]:
        """Return the backends in the routing table and the retired backends, whose ids now name other servers."""
        return [*self._backends.values(), *self._retired]

    def contains(self, backend: EngineBackend) -> bool:
        """Return whether the backend is in the routing table or retired."""
        return self._backends.get(backend.id) is backend or any(other is backend for other in self._retired)

    def get(self, engine: EngineId | None) -> EngineBackend | None:
        if engine is None:
            return None
        return self._backends.get(engine) or self._backends.get(self.id_of(engine))

    def id_of(self, engine: EngineId) -> EngineId:
        """Return the daemon's id of `engine` if the gateway was started with this engine and the daemon uses another
        id. Otherwise, return `engine`."""
        own = self.own.get(engine)
        return engine if own is None else own.known_as or engine

    @property
    def expected(self) -> frozenset[EngineId]:
        """The engines that are being started and are not usable yet."""
        if not self._expected or self.clock.now_s() >= self._expected_until_s:  # the common case
            return frozenset()
        return self._expected.difference(backend.id for backend in self if backend.usable)

    def set_routes(
        self, routes: Iterable[EngineRoute], expected: Iterable[EngineId] = (), expected_until_s: float = 0.0
    ) -> list[str]:
        """Replace the routing table. Returns one message per invalid route. The valid routes are applied. `expected`
        names the engines that are being started, for which requests may wait until `expected_until_s`."""
        faults = []
        named = set()
        came = self._expect(frozenset(expected), expected_until_s)
        routes = tuple(routes)
        self._rename(routes)
        for route in routes:
            backend = self._backends.get(route.engine)
            if backend is not None and route.url and not _leads_to(route.url, backend):
                self._retire(backend)
                backend = None
            if backend is None:
                if not route.url:
                    faults.append(f"{route.engine}: the URL is unknown")
                    continue
                backend = EngineBackend(
                    route.engine, engine=self._connect(route.url), route=EngineRoute(route.engine, route.url)
                )
                backend.own_pool = self.routing.pools.get(route.engine, "")
                self._backends[route.engine] = backend
            backend.follow(route)
            named.add(route.engine)
            if backend.id in came and route.health is not EngineHealth.GONE:
                # The daemon has seen it start, so an earlier suspicion no longer holds.
                backend.suspect_because = ""
                backend.forget_offers()
                self.in_background(self.learn(backend))
            if backend.suspect_because:
                self._recheck(backend)
        for backend in list(self._backends.values()):
            if backend.id not in named:
                backend.routed = False
                self.forget_if_empty(backend)
        self.announce()
        return faults

    def _rename(self, routes: Iterable[EngineRoute]) -> None:
        """Rename engines that the gateway was started with to the ids used in the routes. Their requests stay on them.
        A route with a new id describes a new engine, unless its address is that of an engine that the gateway was
        started with."""
        urls = {route.engine: route.url for route in routes}
        ours = {name for own in self.own.values() for name in (own.engine, own.known_as)}
        for engine in self.own.keys() & urls.keys():  # the daemon uses this id as well
            self.own[engine] = replace(self.own[engine], known_as=None)
        strays = {
            server_address(backend.engine.url): backend
            for backend in self._backends.values()
            if backend.id not in urls and backend.routed and backend.id in ours
        }
        for engine, url in urls.items() if strays else ():
            backend = strays.get(server_address(url)) if url and engine not in self._backends else None
            if backend is None:
                continue
            logger.info("the daemon's id of engine %s is %s", backend.id, engine)
            self.use_id(backend.id, engine)
            self._backends[engine] = self._backends.pop(backend.id)
            for record in backend.records.values():
                if record.engine == backend.id:
                    record.engine = engine
            backend.id = engine
            del strays[server_address(url)]
        routed = [self._backends[id] for id in urls if id in self._backends] if strays else []
        for engine, own in self.own.items():
            same = next((backend.id for backend in routed if same_address(backend.engine.url, own.url)), None)
            if engine not in urls and same is not None:
                self.use_id(engine, same)

    def keep_ids(self) -> None:
        """Store the current engines and their ids as the engines that the gateway was started with."""
        self.own = {backend.id: GatewayEngine(backend.id, without_login(backend.engine.url)) for backend in self}

    def use_id(self, name: EngineId, engine: EngineId) -> None:
        """Map engine `name`, with which the gateway was started, to the daemon's id `engine`."""
        for first, own in self.own.items():
            if name in (first, own.known_as):
                self.own[first] = replace(own, known_as=None if first == engine else engine)

    def _expect(self, expected: frozenset[EngineId], until_s: float) -> frozenset[EngineId]:
        """Replace the expected engines, and return the engines that are no longer expected because they have started or
        will not start."""
        before = self._expected, self._expected_until_s
        self._expected, self._expected_until_s = expected, until_s
        if before != (expected, until_s):
            if self._unexpecting is not None:
                self._unexpecting.cancel()
            self._unexpecting = None
            if expected and self.clock.now_s() < until_s:
                self._unexpecting = self.in_background(self._unexpect(expected, until_s))
        return before[0] - expected

    async def _unexpect(self, expected: frozenset[EngineId], until_s: float) -> None:
        """Wait until the deadline of the expected engines has passed, then wake the requests that wait for these
        engines."""
        while (left_s := until_s - self.clock.now_s()) > 0:
            await self.clock.sleep(left_s)
        late = sorted(expected.difference(backend.id for backend in self if backend.usable))
        if late:
            logger.warning("engines did not start in time, requests no longer wait for them: %s", ", ".join(late))
        self.announce()

    def announce(self) -> None:
        """Wake all tasks that wait for a change of the engines, and dispatch queued requests. Must be called when an
        engine may have become usable."""
        self.kv_versions = Counter(backend.kv_version for backend in self._backends.values() if backend.routed)
        self._note_capabilities()
        self.changed.set()
        self.changed = asyncio.Event()
        self._usability_changed()
        self.dispatch()

    @property
    def barrier_open(self) -> bool:
        """Return whether requests may be sent to engines."""
        return self._barrier_open

    @barrier_open.setter
    def barrier_open(self, is_open: bool) -> None:
        self._barrier_open = is_open
        self._usability_changed()
        self.dispatch()

    # --- places ------------------------------------------------------------------------------------------------------

    async def place(
        self,
        record: RequestRecord,
        *,
        without: Iterable[EngineId] = (),
        avoiding: Iterable[EngineId] = (),
        again: bool = False,
        patience_s: float = float("inf"),
    ) -> EngineBackend:
        """Wait for an engine with room and reserve a place on it. The caller must then call `EngineBackend.enter` or
        `give_back`. Engines in `without` are excluded. Engines in `avoiding` are used only if no other engine is
        available. If `again` is set, the request precedes new requests.

        Raises NoBackend if no engine outside `without` has been usable or expected for `patience_s` seconds. Time
        during which the pause barrier is closed is not counted.
        """
        if self._barrier_open and not self.queue and not avoiding:  # the common case, without the cost of waiting
            found = self.choose(self._newcomer(record), without)
            if found is not None:
                self._reserve(found, record)
                self.waits.observe(0.0)
                return found
        backend: asyncio.Future[EngineBackend] = asyncio.get_running_loop().create_future()

        def placed(outcome: EngineBackend | NoBackend) -> None:
            if isinstance(outcome, NoBackend):
                backend.set_exception(outcome)
            else:
                backend.set_result(outcome)

        waiter = QueuedRequest(record, placed, frozenset(without), frozenset(avoiding), again, patience_s)
        self.enqueue(waiter)
        try:
            if not backend.done():
                record.detach()
                await asyncio.wait({backend})  # unlike `await backend`, does not cancel the future
            return backend.result()
        except asyncio.CancelledError:
            if backend.done() and backend.exception() is None:
                self.give_back(backend.result(), record)
            raise
        finally:
            self.queue.leave(waiter)

    def enqueue(self, waiter: QueuedRequest) -> None:
        """Queue a request without waiting. `waiter.placed` is called once, possibly before this call returns."""
        waiter.newcomer, waiter.since_s = self._newcomer(waiter.record), self.clock.now_s()
        self.queue.join(waiter)
        self.dispatch()
        if waiter in self.queue:
            self._note_if_alone(waiter, waiter.since_s, self.expected)
            if waiter.patience_s < float("inf") and not self._giving_up:
                self._giving_up = True
                self.in_background(self._expire_those_alone())

    def give_back(self, backend: EngineBackend, record: RequestRecord) -> None:
        """Release the record's reserved place. Does nothing if no place is reserved."""
        if backend.unreserve(record):
            self.forget_if_empty(backend)
            self.dispatch()

    def dispatch(self) -> None:
        """Place queued requests while engines have room. A `placed` callback may call this method again."""
        while self._barrier_open and (found := self.queue.next(self._place_for)) is not None:
            waiter, backend = found
            self._reserve(backend, waiter.record)
            self.waits.observe(self.clock.now_s() - waiter.since_s)
            waiter.placed(backend)

    def _place_for(self, waiter: QueuedRequest) -> EngineBackend | None:
        if waiter.avoiding:
            shunned = waiter.without | waiter.avoiding
            if any(backend.id not in shunned for backend in self._usable()):
                # Waiting for another engine is better than returning to one that stalled.
                return self.choose(waiter.newcomer, shunned)
        return self.choose(waiter.newcomer, waiter.without)

    def _reserve(self, backend: EngineBackend, record: RequestRecord) -> None:
        if session := self._session_of(record):
            now_s, first = self.clock.now_s(), record.attempt == 0
            cached_tokens = self.sessions.begin(session, backend, self._usable(), now_s, first=first)
            record.cached_tokens = min(cached_tokens, record.context_tokens - 1)
        backend.reserve(record)

    def _newcomer(self, record: RequestRecord) -> RoutedRequest:
        prefix = prefix_of(record.group, record.body) if self.routing.by_prefix else 0
        return RoutedRequest(record.context_tokens, prefix, record.tag, self._session_of(record))

    def _session_of(self, record: RequestRecord) -> str:
        return record.session if self.sessions.ttl_s else ""

    def choose(self, newcomer: RoutedRequest, without: Iterable[EngineId] = ()) -> EngineBackend | None:
        """Return the engine for a request, or None if no engine can currently accept the request."""
        able = self._usable()
        if depth := self.routing.queue_depth:
            able = [backend for backend in able if backend.has_room(depth, newcomer.context_tokens)]
        if without:
            able = [backend for backend in able if backend.id not in without]
        if newcomer.session and able:
            kept = self.sessions.get(newcomer.session, self.clock.now_s())
            saved = None if kept is None else kept.saved
            loading = {each.cache for each in able if saved is not None and each.kv_version == saved.version}
            choice = engine_for(self.routing.snapshot(able, newcomer, self._last), kept, loading)
            logger.debug("session %s: %s on %s: %s", newcomer.session, choice.outcome, choice.load.id, choice.detail)
            backend: EngineBackend | None = choice.load
        else:
            backend = self.routing.choose(able, newcomer, self._last)
        if backend is None:
            return None
        if not backend.usable:  # it became unusable after the last announcement
            self._usable_slots = None
            return self.choose(newcomer, without)
        self._last = backend.id
        return backend

    def _usable(self) -> list[EngineBackend]:
        if self._usable_slots is None:
            self._usable_slots = [backend for backend in self._backends.values() if backend.usable]
        return self._usable_slots

    # --- patience ----------------------------------------------------------------------------------------------------

    def _usability_changed(self) -> None:
        """Recompute the usable engines, and record which queued requests have no eligible engine."""
        self._usable_slots = None
        now_s, expected = self.clock.now_s(), self.expected
        for waiter in self.queue:
            self._note_if_alone(waiter, now_s, expected)

    def _note_if_alone(self, waiter: QueuedRequest, now_s: float, expected: frozenset[EngineId]) -> None:
        there = any(backend.id not in waiter.without for backend in self._usable())
        if there or not self._barrier_open or not expected <= waiter.without:
            waiter.alone_since_s = None
        elif waiter.alone_since_s is None:
            waiter.alone_since_s = now_s

    async def _expire_those_alone(self) -> None:
        """Fail queued requests that have had no eligible engine for the whole of their patience. One task serves all
        queued requests, so that a burst of thousands of requests needs only one timer. The delay after the end of a
        request's patience is at most one percent of the patience."""
        try:
            while waiters := [waiter for waiter in self.queue if waiter.patience_s < float("inf")]:
                now_s = self.clock.now_s()
                next_s = float("inf")
                for waiter in waiters:
                    since_s = now_s if waiter.alone_since_s is None else waiter.alone_since_s
                    left_s = since_s + waiter.patience_s - now_s
                    if left_s > 0:
                        next_s = min(next_s, max(left_s, waiter.patience_s * 0.01))
                        continue
                    self.queue.leave(waiter)
                    waiter.placed(NoBackend(f"no engine was available for {waiter.patience_s:g} s"))
                if next_s < float("inf"):
                    await self.clock.sleep(next_s)
        finally:
            self._giving_up = False

    # --- health ------------------------------------------------------------------------------------------------------

    def suspect(self, backend: EngineBackend, because: str) -> None:
        """Mark the engine as suspected dead. It receives no new requests until a health probe or a token shows that it
        is alive."""
        backend.failures_total += 1
        if not backend.suspect_because:
            logger.warning("engine %s is suspected dead: %s", backend.id, because)
            backend.suspect_because = because
            self._usability_changed()
            self._recheck(backend)

    def trust(self, backend: EngineBackend) -> None:
        """Stop suspecting an engine that has shown that it is alive, and dispatch queued requests."""
        if backend.suspect_because:
            logger.info("engine %s is back", backend.id)
            backend.suspect_because = ""
            self.announce()
        elif self.queue:
            self.dispatch()

    def release(self, backend: EngineBackend, record: RequestRecord) -> None:
        """Remove the request from this engine and dispatch queued requests to the freed place."""
        computed = record.state is RequestState.RUNNING
        backend.leave(record)
        if computed:
            self.keep_context(backend, record, ended=True)
        self.forget_if_empty(backend)
        if self.queue:
            self.dispatch()

    def keep_context(self, backend: EngineBackend, record: RequestRecord, *, ended: bool) -> None:
        """Remember that the engine has the KV of the record's context, if the record is a turn of a session. `ended` is
        False while the attempt runs."""
        if session := self._session_of(record):
            answer_tokens, now_s = record.generated_tokens, self.clock.now_s()
            tokens = record.prompt_tokens + answer_tokens
            left = record.saves_kv if record.finish_reason in COMPLETE else None
            saved = left if left is not None and left.version == backend.kv_version else None
            self.sessions.keep(session, backend, tokens, answer_tokens if ended else None, now_s, saved)

    def is_to_offload(self, record: RequestRecord) -> bool:
        """Return whether the KV of the record's context is to be saved when the answer ends, so that another engine can
        load it at the session's next turn."""
        times = typical_times(self._usable()) if self._session_of(record) else None
        return times is not None and after_turn(record.context_tokens, self.sessions.elsewhere, times).offload

    def offloaded_kv(self, record: RequestRecord) -> tuple[LeftKv | None, float]:
        """Return the saved KV of the session's last turn if the record begins a turn on an engine that is not expected
        to have the KV, else None. Also return the time, in seconds, for which the KV may still be being saved."""
        now_s = self.clock.now_s()
        kept = self.sessions.get(record.session, now_s)
        if kept is None or record.attempt > 1 or record.cached_tokens:
            return None, 0.0
        return kept.saved, max(0.0, kept.ended_s + DEFAULT_WAIT_S - now_s)

    async def capabilities(self, backend: EngineBackend) -> EngineCapabilities:
        """Return the engine's capabilities, which are read once and then cached. Raises the errors of the engine's
        client if the capabilities cannot be read."""
        if backend.capabilities is None:
            backend.capabilities = await backend.engine.capabilities()
            self._note_capabilities()
        return backend.capabilities

    async def learn(self, backend: EngineBackend) -> None:
        """Read the engine's capabilities if they are unknown, and wait for them for up to `LEARN_S` seconds. No error
        is raised if the capabilities cannot be read."""
        if backend.capabilities is not None or backend.unlearnable:
            return
        if backend.learning is None or backend.learning.done():
            backend.learning = self.in_background(self._learn(backend))
        await asyncio.wait({backend.learning}, timeout=LEARN_S)

    async def lacking(self, endpoint: CompletionEndpoint) -> frozenset[EngineId]:
        """Return the engines to which requests to the endpoint must not be sent. Every engine offers completions and
        chats. An engine whose capabilities are unknown may offer any endpoint, and is used if no engine is known to
        offer this one."""
        if endpoint is not CompletionEndpoint.GENERATE:
            return frozenset()
        if not self._known_to_offer(endpoint):
            await asyncio.gather(*(self.learn(backend) for backend in self if backend.usable))
        wait = self._known_to_offer(endpoint)
        unknown = {backend.id for backend in self if wait and backend.capabilities is None and not backend.unlearnable}
        return frozenset(backend.id for backend in self if not backend.offers(endpoint)) | unknown

    def _known_to_offer(self, endpoint: CompletionEndpoint) -> bool:
        return any(backend.usable and backend.capabilities is not None and backend.offers(endpoint) for backend in self)

    async def _learn(self, backend: EngineBackend) -> None:
        try:
            await self.capabilities(backend)
        except OrchestrRLError as error:
            logger.debug("capabilities of %s: %s", backend.id, error)
            backend.unlearnable = isinstance(error, Permanent)
        finally:
            await self._close_if_gone(backend)

    def _note_capabilities(self) -> None:
        routed = [backend for backend in self._backends.values() if backend.routed]
        self._contexts = {backend.context_limit_tokens for backend in routed}
        self._model_sets = {backend.models for backend in routed if backend.capabilities is not None}

    def too_short_for(self, tokens: int) -> frozenset[EngineId]:
        """Return the engines whose context is too short for `tokens` tokens although another engine's context is
        longer. On these engines an answer could end early, as if max_tokens had been smaller."""
        if len(self._contexts) < 2:
            return frozenset()
        wanted = min(tokens, max(self._contexts))
        return frozenset(backend.id for backend in self if backend.context_limit_tokens < wanted)

    def without_model(self, model: object) -> frozenset[EngineId]:
        """Return the engines that do not serve the model, such as a LoRA adapter, although another engine does. The
        result is empty if no engine is known to serve it, so that an engine refuses the request."""
        if not self.models_differ or not model:
            return frozenset()
        known = [backend for backend in self if backend.routed and backend.capabilities is not None]
        lacking = [backend.id for backend in known if model not in backend.models]
        return frozenset(lacking) if len(lacking) < len(known) else frozenset()

    async def find_model(self, model: object) -> None:
        """Read the models of all engines again if no engine is known to serve `model`, at most every `MODELS_AGAIN_S`
        seconds and for up to `LEARN_S` seconds. An adapter may have been loaded since the last read."""
        if not model or any(model in backend.models for backend in self):
            return
        if self.clock.now_s() >= self._models_read_s + MODELS_AGAIN_S:
            self._models_read_s = self.clock.now_s()
            self._models_reading = self.in_background(self.read_models_again())
        if self._models_reading is not None and not self._models_reading.done():
            await asyncio.wait({self._models_reading}, timeout=LEARN_S)

    @property
    def models_differ(self) -> bool:
        """Return whether some engines serve other models than the others."""
        return len(self._model_sets) > 1

    async def read_models_again(self) -> None:
        """Read the models of all engines whose models are known again. They change when adapters are loaded."""
        await asyncio.gather(*(self._read_again(backend) for backend in self if backend.usable and backend.models))

    async def _read_again(self, backend: EngineBackend) -> None:
        try:
            backend.capabilities = await backend.engine.capabilities()
            self._note_capabilities()
        except OrchestrRLError as error:
            logger.debug("models of %s: %s", backend.id, error)
        finally:
            await self._close_if_gone(backend)

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task that `close` cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def abort(self, backend: EngineBackend, attempt_id: str) -> None:
        """Abort an attempt on its engine. Errors are only logged, because the attempt's connection is already closed,
        which also stops the attempt."""
        try:
            await backend.engine.abort([attempt_id])
        except OrchestrRLError as error:
            logger.debug("abort of %s on %s: %s", attempt_id, backend.id, error)
        finally:
            await self._close_if_gone(backend)

    async def detokenize(self, backend: EngineBackend, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens. Raises the errors of the engine's client if the engine cannot decode them."""
        try:
            return await backend.engine.detokenize(token_ids)
        finally:
            await self._close_if_gone(backend)

    async def close(self) -> None:
        await stop(*self._tasks)
        for backend in self.with_retired():
            await backend.engine.close()
        self._backends.clear()
        self._retired.clear()

    def _recheck(self, backend: EngineBackend) -> None:
        if not backend.rechecking:
            backend.rechecking = True
            self.in_background(self._recheck_until_alive(backend))

    async def _recheck_until_alive(self, backend: EngineBackend) -> None:
        delay_s = RECHECK_FIRST_S
        try:
            while backend.suspect_because and self._backends.get(backend.id) is backend:
                await self.clock.sleep(delay_s)
                delay_s = min(RECHECK_CAP_S, delay_s * 2)
                if await backend.engine.healthy():
                    backend.forget_offers()  # it may have been restarted with other options
                    await self.learn(backend)
                    self.trust(backend)
        finally:
            backend.rechecking = False
            await self._close_if_gone(backend)

    def forget_if_empty(self, backend: EngineBackend) -> None:
        """Remove an engine that left the routes, once it has no requests of this gateway and is not paused by this
        gateway."""
        if backend.routed or backend.in_use or not self.contains(backend):
            return
        if self._backends.get(backend.id) is backend:
            del self._backends[backend.id]
        self._retired = [other for other in self._retired if other is not backend]
        self._usable_slots = None
        self.in_background(backend.engine.close())

    async def _close_if_gone(self, backend: EngineBackend) -> None:
        """Close the engine's client if the engine was removed during a call. The call may have opened a connection."""
        if not self.contains(backend):
            await backend.engine.close()

    def _retire(self, backend: EngineBackend) -> None:
        """Retire a backend whose id now names another server. Its running requests stay on it until they end."""
        del self._backends[backend.id]
        backend.routed = False
        self._retired.append(backend)
        self.forget_if_empty(backend)


def _leads_to(url: str, backend: EngineBackend) -> bool:
    """Return whether the URL refers to the engine's server. A different URL with the same address is also accepted,
    unless the engine is suspected dead."""
    if url.rstrip("/") == backend.engine.url.rstrip("/"):
        return True
    return same_address(url, backend.engine.url) and not backend.suspect_because
