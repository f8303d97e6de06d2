"""The gateway's side of the pause barrier between requests and engines. The barrier is closed while weights change.

While the barrier is closed, the gateway sends no requests to engines and quiesces them: running requests are frozen,
finished or ended, as ordered. Every engine that supports pausing is paused, so that requests of other clients also
stop. Requests are withdrawn from an engine that cannot be paused, and continue from their tokens later.

The holder of a lease closes the barrier. The barrier opens when the lease ends, so a trainer or a daemon that dies does
not leave the fleet frozen.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from orchestrrl.core.clock import until_set
from orchestrrl.core.errors import OrchestrRLError, Permanent, Retryable
from orchestrrl.core.operations import CloseBarrier, FrozenRequests, OpenBarrier, OperationItemResult, PauseMode
from orchestrrl.fleet.reports import BarrierPhase, BarrierReport
from orchestrrl.gateway.ledger.ledger import OnStale
from orchestrrl.gateway.relay import RequestRelay
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends
from planner.model import EngineId, RequestId

logger = logging.getLogger(__name__)

REST_POLL_S = 0.02
# An engine that cannot be paused now, for example while it loads KV, may accept a pause shortly after.
PAUSE_TRIES = 5
PAUSE_AGAIN_S = 0.2
# A failed resume would leave the engine paused forever, so it is retried until it succeeds or the engine has left.
RESUME_AGAIN_S = 0.5
RESUME_AGAIN_CAP_S = 5.0
LEASE_LOOK_S = 1.0  # the longest interval between checks of the lease, which a renewal may shorten
LEASES_REMEMBERED = 64
# An engine that another client paused before the gateway connected is left paused for this long.
ORPHANED_AFTER_S = 60.0
NAMED_MOST = 5  # the most requests listed in a message


class GatewayPause:
    """The pause barrier of one gateway. `close` and `open` carry out the daemon's orders CloseBarrier and
    OpenBarrier."""

    def __init__(self, fleet: EngineBackends, relays: Mapping[RequestId, RequestRelay]) -> None:
        self._fleet = fleet
        self._relays = relays
        self._clock = fleet.clock
        self.closed: CloseBarrier | None = None  # the order that closed it; None: it is open
        self._since_s = 0.0
        self._own_at_rest = asyncio.Event()  # set when the requests of this gateway have finished or ended, as ordered
        self._may_pause = asyncio.Event()  # set when no other gateway has requests left to finish
        self._quiet = asyncio.Event()
        self.rest: dict[EngineId, OperationItemResult] = {}  # each engine's result of the last closing
        self._opened = asyncio.Event()  # set when it opens; replaced when it closes
        self._engines_free = asyncio.Lock()  # a pause and a resume of one engine must not overtake each other
        self._ended: deque[str] = deque(maxlen=LEASES_REMEMBERED)  # ended leases
        self.opened_because = ""
        self.expired_total = 0
        self._closed_total_s = 0.0
        self.stale_total: Counter[OnStale] = Counter()  # requests that exceeded their version lag, by action

    @property
    def closed_total_s(self) -> float:
        return self._closed_total_s + (self._clock.now_s() - self._since_s if self.closed is not None else 0.0)

    def report(self) -> BarrierReport:
        slots = [relay.backend for relay in self._relays.values()]
        frozen = sum(backend is not None and backend.paused for backend in slots)
        held = sum(backend is None for backend in slots)
        closed = self.closed
        phase = BarrierPhase.OPEN
        if closed is not None:
            phase = BarrierPhase.QUIET if self._quiet.is_set() else BarrierPhase.CLOSING
        return BarrierReport(
            phase=phase,
            lease="" if closed is None else closed.lease,
            lease_until_s=0.0 if closed is None else closed.lease_until_s,
            running=len(slots) - frozen - held,
            frozen=frozen,
            held=held,
            policy_version=self._fleet.policy_version,
        )

    # --- closing -----------------------------------------------------------------------------------------------------

    async def close(self, order: CloseBarrier) -> tuple[OperationItemResult, ...]:
        """Close the barrier and wait until all engines are quiet. Returns one item per engine. If `order.engines_run`
        is set, wait only for the requests of this gateway, and return no items. If the lease of the order already holds
        the barrier, renew the lease.

        Raises Permanent if another lease holds the barrier, if the lease of the order has ended, or if the barrier
        opens or the deadline passes before the engines are quiet. If the deadline passes, the barrier opens again.
        """
        self._take(order)
        at_rest = self._own_at_rest if order.engines_run else self._quiet
        opened = asyncio.create_task(self._opened.wait())
        try:
            await until_set(self._clock, at_rest, order.quiet_by_s - self._clock.now_s(), opened)
        finally:
            opened.cancel()
        if not self._held_by(order):
            raise Permanent(f"the pause barrier opened again before all engines were quiet: {self.opened_because}")
        if not at_rest.is_set():
            because = f"the engines were not quiet by the deadline: {self._still_running()}"
            await self._open(None, (), because)
            raise Permanent(because)
        return () if order.engines_run else tuple(self.rest.values())

    def _take(self, order: CloseBarrier) -> None:
        now_s = self._clock.now_s()
        held = self.closed
        if held is not None and held.lease != order.lease:
            left_s = held.lease_until_s - now_s
            raise Permanent(f"{held.holder or 'another client'} holds the pause barrier for another {left_s:.3g} s")
        if order.lease in self._ended:
            raise Permanent(f"lease {order.lease} has already ended; requests have continued, and weights may be mixed")
        if order.lease_until_s <= now_s:
            raise Permanent(f"lease {order.lease} already ended {now_s - order.lease_until_s:.3g} s ago")
        if held is not None:
            self.renew(order.lease, order.lease_until_s)
        else:
            logger.warning("the pause barrier closes for %s (%s)", order.holder or "a client", order.mode)
            self.closed = order
            self._since_s = now_s
            self._fleet.barrier_open = False
            # Callers that wait for an earlier closing must not wake for this one.
            self._own_at_rest, self._may_pause, self._quiet = asyncio.Event(), asyncio.Event(), asyncio.Event()
            self._opened = asyncio.Event()
            self.rest = {}
            self._fleet.in_background(self._come_to_rest(order))
            self._fleet.in_background(self._expire(order))
        if not order.engines_run:
            self._may_pause.set()

    def renew(self, lease: str, until_s: float) -> None:
        """Set the end of the lease to time `until_s`. Raises Permanent if the pause barrier is not closed under this
        lease."""
        if self.closed is None or self.closed.lease != lease:
            because = self.opened_because or "it was never closed"
            raise Permanent(f"the pause barrier is not closed under lease {lease}: {because}")
        self.closed = replace(self.closed, lease_until_s=until_s)

    async def _come_to_rest(self, order: CloseBarrier) -> None:
        if order.mode is not PauseMode.KEEP:
            for relay in list(self._relays.values()):
                if not relay.record.generated_ids and not relay.record.fixed_because:
                    relay.withdraw()
                elif order.mode is PauseMode.ABORT:
                    relay.end("abort", "paused")
            await self._drained(order)
        if self._held_by(order):
            self._own_at_rest.set()
            await self._may_pause.wait()
        async with self._engines_free:
            if self._held_by(order):
                await asyncio.gather(*(self._bring_to_rest(backend, order) for backend in self._fleet.with_retired()))
        await self._drained(order)
        if self._held_by(order):
            self._quiet.set()
            logger.info("the pause barrier is closed and all engines are quiet")

    async def _drained(self, order: CloseBarrier) -> None:
        """Wait until all running requests are on paused engines, or until the order no longer holds the barrier."""
        while self._held_by(order) and any(self._runs(relay) for relay in self._relays.values()):
            await self._clock.sleep(REST_POLL_S)

    def _held_by(self, order: CloseBarrier) -> bool:
        return self.closed is not None and self.closed.lease == order.lease

    async def _bring_to_rest(self, backend: EngineBackend, order: CloseBarrier) -> None:
        """Pause the engine, or withdraw its requests if it cannot be paused."""
        try:
            can_be_paused = (await self._fleet.capabilities(backend)).pause
            if not self._fleet.contains(backend):  # it has left the fleet and would never be resumed
                return
            if can_be_paused:
                await self._pause(backend, drop_kv=order.frozen is not FrozenRequests.CONTINUE)
                stay = await self._take_back(backend, order) if order.frozen is FrozenRequests.TAKEN_BACK else 0
                detail = f"{stay} requests cannot leave this engine and stay on it" if stay else ""
                self._rests(backend, done=True, detail=detail)
                return
            self._rests(backend, done=True, detail="the engine cannot be paused; its requests were withdrawn")
        except OrchestrRLError as error:
            self._rests(backend, done=False, detail=str(error))
            self._fleet.suspect(backend, str(error))
        for relay in list(self._relays.values()):
            if relay.backend is backend:
                relay.withdraw()

    async def _take_back(self, backend: EngineBackend, order: CloseBarrier) -> int:
        """Withdraw the requests from a paused engine, and wait until they have left. Returns the number of requests
        that cannot leave the engine."""
        here = [relay for relay in self._relays.values() if relay.backend is backend]
        taken = [relay for relay in here if relay.withdraw()]
        while self._held_by(order) and any(relay.backend is backend for relay in taken):
            await self._clock.sleep(REST_POLL_S)
        return len(here) - len(taken)

    def _rests(self, backend: EngineBackend, *, done: bool, detail: str) -> None:
        if self._fleet.get(backend.id) is backend:  # a retired backend of the same id has no item
            self.rest[backend.id] = OperationItemResult(backend.id, done, detail)

    async def _pause(self, backend: EngineBackend, *, drop_kv: bool) -> None:
        for tries_left in reversed(range(PAUSE_TRIES)):
            backend.paused = True  # set even if the call fails, so that the engine is resumed later
            try:
                await backend.engine.pause(PauseMode.KEEP, drop_kv=drop_kv)
                backend.still = True
                if drop_kv:
                    backend.lose_cache()
                return
            except Retryable:
                if not tries_left:
                    raise
            await self._clock.sleep(PAUSE_AGAIN_S)

    async def _expire(self, order: CloseBarrier) -> None:
        """Open the barrier when the lease of the order ends. The lease may be renewed until then."""
        while self.closed is not None and self._held_by(order):
            left_s = self.closed.lease_until_s - self._clock.now_s()
            if left_s <= 0:
                self.expired_total += 1
                missed = "" if self._quiet.is_set() else f", and {self._still_running()}"
                if order.weights_change and self._quiet.is_set():
                    # Tokens have no version until one is reported.
                    self._fleet.policy_version = None
                    for backend in self._fleet.with_retired():
                        backend.policy_version, backend.mixed = None, True
                    missed = " while weights were being changed: the version of each engine is unknown"
                await self._open(None, (), f"the lease of {order.holder or 'a client'} ended{missed}")
                return
            await self._clock.sleep(min(left_s, LEASE_LOOK_S))

    # --- opening -----------------------------------------------------------------------------------------------------

    async def open(self, order: OpenBarrier) -> tuple[OperationItemResult, ...]:
        """Open the barrier and resume the engines. Returns one item per resumed engine. If the order has no lease, the
        barrier opens regardless of the lease that holds it. In that case, engines are resumed even if the barrier is
        already open, for example engines that an earlier gateway has paused.

        Raises Permanent if the barrier is not closed under the lease, or if `order.without` names an unknown engine.
        """
        self._named(order.without, "without: ")
        if order.lease and order.lease in self._ended:
            raise Permanent(
                f"lease {order.lease} has already ended ({self.opened_because}); requests have continued since, and"
                " weights may be mixed"
            )
        if order.lease and (self.closed is None or self.closed.lease != order.lease):
            raise Permanent(f"the pause barrier is not closed under lease {order.lease}")
        if self.closed is None:
            for backend in self._fleet:
                backend.paused = True
        return await self._open(order.policy_version, order.without, "as ordered")

    async def _open(
        self, version: int | None, without: tuple[EngineId, ...], because: str
    ) -> tuple[OperationItemResult, ...]:
        closed, opened = self.closed, self._opened  # the barrier may close again before the engines run
        self.opened_because = because
        if closed is not None:
            self.closed = None
            self._closed_total_s += self._clock.now_s() - self._since_s
            self._ended.append(closed.lease)
            self._may_pause.set()  # wakes the closing task, which then finds nothing to pause
        if version is not None:
            self._on_new_weights(version, without, self.rest if closed is not None else {})
            if closed is not None and closed.frozen is FrozenRequests.RESTART:
                for relay in list(self._relays.values()):
                    relay.restart()
        for relay in list(self._relays.values()):
            relay.record.progressed_s = self._clock.now_s()  # the pause must not count as a stall
            if relay.backend is not None and relay.backend.outdated:
                relay.withdraw()
        async with self._engines_free:
            backends = self._fleet.with_retired()
            paused = [backend for backend in backends if backend.paused and not self._left_out(backend)]
            items = await asyncio.gather(*(self._resume_as_ordered(backend) for backend in paused))
        if self.closed is None:  # the barrier may have closed again
            self._fleet.barrier_open = True
            self._fleet.announce()
        opened.set()
        logger.warning("the pause barrier is open: %s", because)
        return tuple(items)

    def _on_new_weights(
        self, version: int, without: tuple[EngineId, ...], rests: Mapping[EngineId, OperationItemResult]
    ) -> None:
        """Set the policy version of the fleet and its engines to `version`. Engines in `without`, engines that failed
        to pause (according to `rests`) and retired backends are marked as outdated instead. Answers that now exceed
        their maximum version lag are restarted or ended."""
        self._fleet.policy_version = version
        for backend in self._fleet.with_retired():
            if self._fleet.get(backend.id) is not backend:
                backend.outdated = True
                continue
            rest = rests.get(backend.id)
            backend.outdated = backend.id in without or (rest is not None and not rest.done)
            if not backend.outdated:
                backend.has(version)
        for relay in list(self._relays.values()):
            self.park_to_bound(relay)

    def park_to_bound(self, relay: RequestRelay) -> None:
        """Restart or end an answer whose version lag exceeds the client's limit."""
        record = relay.record
        too_old = record.versions.lag(self._fleet.policy_version)
        if record.max_version_lag is None or too_old <= record.max_version_lag:
            return
        if record.on_stale is OnStale.RESTART and relay.restart():
            self.stale_total[OnStale.RESTART] += 1
        elif relay.end("abort", "max_version_lag"):
            self.stale_total[OnStale.ABORT] += 1

    def learn(self, newest: int | None) -> None:
        """Set the fleet's policy version to `newest`, the daemon's version, unless `newest` is None. The versions can
        differ if this gateway missed an opening of the barrier."""
        if newest is None or newest == self._fleet.policy_version:
            return
        self._fleet.policy_version = newest
        for relay in list(self._relays.values()):
            self.park_to_bound(relay)

    async def _resume_as_ordered(self, backend: EngineBackend) -> OperationItemResult:
        if (error := await self._resume(backend)) is None:
            return OperationItemResult(backend.id, done=True)
        self._fleet.suspect(backend, f"it was paused and could not be resumed: {error}")
        self._resume_later(backend)
        return OperationItemResult(backend.id, done=False, detail=str(error))

    async def _resume(self, backend: EngineBackend) -> OrchestrRLError | None:
        """Resume the engine. Returns the error if that fails, else None."""
        try:
            if backend.capabilities is None or backend.capabilities.pause:
                await backend.engine.resume()
        except OrchestrRLError as error:
            return error
        self._runs_again(backend)
        return None

    def _runs_again(self, backend: EngineBackend) -> None:
        backend.paused = backend.still = False
        self._fleet.forget_if_empty(backend)

    def _resume_later(self, backend: EngineBackend) -> None:
        if not backend.resuming:
            backend.resuming = True
            self._fleet.in_background(self._resume_until_done(backend))

    async def _resume_until_done(self, backend: EngineBackend) -> None:
        delay_s = RESUME_AGAIN_S
        since_s = self._clock.now_s()
        try:
            while self._is_to_run(backend):
                async with self._engines_free:
                    error = await self._resume(backend) if self._is_to_run(backend) else None
                if error is None:
                    return
                gone = not backend.routed and self._clock.now_s() - since_s > ORPHANED_AFTER_S
                if isinstance(error, Permanent) or gone:
                    logger.error("%s cannot be resumed and is no longer retried: %s", backend.id, error)
                    self._runs_again(backend)
                    return
                logger.debug("%s is not yet resumed: %s", backend.id, error)
                await self._clock.sleep(delay_s)
                delay_s = min(RESUME_AGAIN_CAP_S, 2 * delay_s)
        finally:
            backend.resuming = False

    def _is_to_run(self, backend: EngineBackend) -> bool:
        """Return whether the engine is paused although no order requires it."""
        return backend.paused and not self._left_out(backend) and self.closed is None and self._fleet.contains(backend)

    def _left_out(self, backend: EngineBackend) -> bool:
        """Return whether the engine stays paused until it has new weights. An engine outside the routes receives no new
        weights, so it is resumed."""
        return backend.outdated and backend.routed

    async def set_version(self, engines: tuple[EngineId, ...], version: int) -> None:
        """Record that these engines now have weights of version `version`. Raises Permanent if an engine is unknown."""
        for backend in self._named(engines):
            backend.has(version)
        newest = self._fleet.policy_version
        self._fleet.policy_version = version if newest is None else newest
        for backend in self._fleet:
            backend.outdated = backend.outdated and backend.policy_version != self._fleet.policy_version
        self.wake_engines()

    def wake_engines(self) -> None:
        """Resume engines that are paused although no order requires it, for example because they now have the fleet's
        weights."""
        for backend in self._fleet.with_retired():
            if self._is_to_run(backend):
                self._resume_later(backend)
        self._fleet.announce()

    async def meet(self, backend: EngineBackend) -> None:
        """Resume a new engine after `ORPHANED_AFTER_S` seconds if it was paused by another client, such as an earlier
        gateway."""
        if not await self._is_paused_by_others(backend):
            return
        logger.warning("%s was found paused and will be resumed in %g s", backend.id, ORPHANED_AFTER_S)
        await self._clock.sleep(ORPHANED_AFTER_S)
        if await self._is_paused_by_others(backend):
            backend.paused = True
            self.wake_engines()

    async def _is_paused_by_others(self, backend: EngineBackend) -> bool:
        try:
            paused = await backend.engine.is_paused()
        except OrchestrRLError as error:
            logger.debug("%s does not report whether it is paused: %s", backend.id, error)
            return False
        return paused and self.closed is None and not backend.paused and self._fleet.get(backend.id) is backend

    def _named(self, engines: Sequence[EngineId], path: str = "engines: ") -> list[EngineBackend]:
        """Return the engines with these ids. Raises Permanent, with a message that begins with `path`, if an id is
        unknown."""
        found = {engine: backend for engine in engines if (backend := self._fleet.get(engine)) is not None}
        if unknown := [engine for engine in engines if engine not in found]:
            known = ", ".join(backend.id for backend in self._fleet) or "none"
            raise Permanent(f"{path}must be engines of this gateway ({known}), got {', '.join(map(repr, unknown))}")
        return list(found.values())

    # --- inside ------------------------------------------------------------------------------------------------------

    def _runs(self, relay: RequestRelay) -> bool:
        return relay.backend is not None and not relay.backend.still

    def _still_running(self) -> str:
        names = [relay.record.id for relay in self._relays.values() if self._runs(relay)]
        if not names:
            return "an engine has not answered" if self._may_pause.is_set() else "other gateways' requests still run"
        more = f" and {len(names) - NAMED_MOST} more" if len(names) > NAMED_MOST else ""
        return f"{len(names)} requests still run: {', '.join(names[:NAMED_MOST])}{more}"

    async def stop(self) -> None:
        """Open the barrier, so that engines paused by this gateway do not stay paused after it ends."""
        if self.closed is not None:
            await self._open(None, (), "the gateway is shutting down")
