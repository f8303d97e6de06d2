"""Relay one request: make attempts on one engine after another until the request has an answer.

An attempt ends when the answer is complete, when the attempt is cut (by a move or because its engine has stalled) or
when its engine fails. The record keeps every token of the answer, and the next attempt continues from these tokens.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrrl.core.clock import until_set
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable
from orchestrrl.core.operations import OperationItemResult
from orchestrrl.engines.base import PATHS, Chunk, NoConnection, RequestRefused
from orchestrrl.gateway.attempt import EngineAttempt
from orchestrrl.gateway.http.responses import error_body
from orchestrrl.gateway.ledger.ledger import RequestFailure, RequestRecord
from orchestrrl.gateway.moves.movable import sampling_fields
from orchestrrl.gateway.moves.move import MoveInProgress, MoveRefused
from orchestrrl.gateway.moves.stops_after_cut import TextUnknown, stops_after_cut
from orchestrrl.gateway.passed import PassedAttempt, PassedCall
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends, NoBackend
from planner.model import EngineId, MoveMethod, RequestMove, RequestState

logger = logging.getLogger(__name__)

_HOW_TO_OFFER = "start vLLM with --enable-scale-out"


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Timeouts and retry limits of a relay."""

    engine_wait_s: float = 30.0  # the longest wait for any usable engine
    stall_s: float = 120.0  # the longest time without a token
    failures: int = 5  # consecutive failed attempts without a token; bounds the engines that one request can crash
    retry_first_s: float = 0.05
    retry_cap_s: float = 2.0
    move_answer_s: float = 2.0  # a move that was not refused is reported as done after this time
    slow_move_answer_s: float = 8.0  # the same for a move with a long predicted time, so that its time is measured
    coalesce_tokens: int = 1  # tokens per chunk of an answer that is not streamed; a cut loses fewer than this


@dataclass(frozen=True, slots=True)
class AwaitedEvent:
    """The engine for which a parked request waits, and the end of the wait. The engine may not have started yet."""

    engine: EngineId
    until_s: float  # the end of the wait if the engine is not expected
    expected: bool  # the engine was expected at the time of the order


class RequestRelay:
    """Runs the attempts of one request. `grown` is called when the record ends, and when a streamed record grows."""

    def __init__(
        self,
        record: RequestRecord,
        fleet: EngineBackends,
        limits: RelayLimits,
        grown: Callable[[RequestRecord], None],
        passed: PassedCall | None = None,
    ) -> None:
        """Create a relay. `passed` is given if the request is passed through unchanged."""
        self.record = record
        self._passed = passed
        self._fleet = fleet
        self._limits = limits
        self._clock = fleet.clock
        self._grown = grown
        self.backend: EngineBackend | None = None  # the engine that runs the request; None: no engine does
        self._attempted: EngineAttempt | None = None  # the current attempt
        self._pump_task: asyncio.Task[bool] | None = None
        self._move: MoveInProgress | None = None
        self._back_to: EngineBackend | None = None  # the source of a refused move
        self._awaited: AwaitedEvent | None = None
        self._seeker: asyncio.Task[Any] | None = None  # waits for the engine of the next attempt
        self._interruptions = 0  # cancellations of the seeker by this relay that the seeker has not handled yet
        self._restarting = False  # discard the answer so far
        self._refused_by: set[EngineId] = set()
        self._hung_on: set[EngineId] = set()
        self._stalled = False  # the current attempt was cancelled because it produced no token
        self._failures = 0
        self._failed: list[tuple[EngineId, bool]] = []  # failures since the last token: engine, had it computed any
        self._sent_tokens = 0  # context of the current attempt
        self._delay_s = 0.0
        self._computed_before: int | None = None  # the engine's token total when the request last seemed stalled

    async def run(self) -> None:
        """Make attempts until the record is done. Cancelling this coroutine stops the current attempt on its engine."""
        try:
            while not self.record.done:
                backend = await self._next_slot()
                if backend is None:
                    break
                await self._attempt(backend)
        finally:
            ended = "the request finished before the move" if self.record.done else "the client disconnected"
            self._answer_move(done=False, detail=ended)
            self._grown(self.record)

    # --- orders other than moves -------------------------------------------------------------------------------------

    @property
    def kept_for(self) -> EngineId | None:
        """The engine for which the request is parked, or None if the request is not parked."""
        return self._awaited.engine if self._awaited is not None and self.backend is None else None

    def end(self, finish_reason: str, stop_reason: str) -> bool:
        """End the answer with the tokens generated so far. Returns False if the answer has already ended."""
        if self.record.done:
            return False
        self.record.finish(finish_reason, stop_reason, self._clock.now_s())
        self._interrupt()
        if self._pump_task is not None:
            self._pump_task.cancel()
        return True

    def withdraw(self) -> bool:
        """Stop the request on its engine. The request continues from its tokens when an engine is available. Returns
        False if the request is on no engine or cannot leave its engine."""
        if self._pump_task is None or self._pump_task.done() or self.backend is None or self.record.fixed_because:
            return False
        self._answer_move(done=False, detail="the request was withdrawn from its engine")
        self._pump_task.cancel()
        return True

    def restart(self) -> bool:
        """Start the answer over. Returns False if the answer has ended or the client has received a part of it."""
        if self.record.done or self.record.delivered:
            return False
        self._answer_move(done=False, detail="the answer starts over")
        if self._pump_task is None or self.backend is None:
            self.record.forget_answer()
        elif self.record.generated_ids or self.record.relayed:
            self._restarting = True
            self._pump_task.cancel()
        return True

    # --- moves -------------------------------------------------------------------------------------------------------

    async def move(self, target: EngineBackend, order: RequestMove) -> OperationItemResult:
        """Stop the request on its engine and continue it on `target`. Waits up to about `move_answer_s` seconds for the
        outcome or, if that is longer, up to twice the move's predicted time, but no longer than `slow_move_answer_s`.
        Raises MoveRefused if the request cannot leave its engine or `target` cannot accept it."""
        await self._check_decodable()
        self._check_movable()
        if target is self.backend:
            raise MoveRefused(f"the request is already assigned to engine {target.id}")
        self._check_takes_requests(target.id, target)
        self._check_answers(target.id)
        self._check_long_enough(target)
        assert self.backend is not None
        assert self._pump_task is not None
        assert self._attempted is not None
        step_s, now_s, left = self._attempted.step_s(), self._clock.now_s(), self._attempted.left
        move = MoveInProgress(order, self.backend, target, self._computed_tokens, step_s, now_s, left)
        self._move, self._awaited = move, None
        self._pump_task.cancel()
        predicted_s = min(2 * order.predicted_s, self._limits.slow_move_answer_s)
        patience_s = max(self._limits.move_answer_s, predicted_s)
        await until_set(self._clock, asyncio.Event(), patience_s, move.result)
        if self._move is move:  # the target has accepted the request and queued it
            self._answer_move(done=True)
        return await move.result

    def park_for(self, engine: EngineId, hold_s: float) -> OperationItemResult:
        """Stop the request on its engine and hold it for an engine that has not started yet. The request is held while
        that engine is expected, or for `hold_s` seconds if the engine is not expected. After that, any engine may run
        the request. Raises MoveRefused if the request cannot leave its engine or the new engine's context is too
        short."""
        self._check_movable()
        self._check_answers(engine)
        self._check_long_enough(self._fleet.get(engine))
        assert self._pump_task is not None
        tokens = self._computed_tokens
        self._await(engine, hold_s)
        self.record.moves += 1
        self._pump_task.cancel()
        return OperationItemResult(
            self.record.id,
            done=True,
            detail="",
            recomputed_tokens=tokens,
            method=MoveMethod.RECOMPUTE if tokens else None,
        )

    def redirect(self, engine: EngineId, hold_s: float) -> OperationItemResult:
        """Send a request that is on no engine to `engine`. If `engine` is not usable, the request waits for it as in
        `park_for`. Raises MoveRefused if the request has ended or is already on an engine, or if `engine` cannot accept
        the request."""
        target = self._fleet.get(engine)
        if self.record.done:
            raise MoveRefused("the request finished before the move")
        if self.backend is not None or self._move is not None:
            raise MoveRefused("the request is changing engines; try again later")
        if engine in self._refused_by:
            raise MoveRefused(f"engine {engine} has already refused the request")
        self._check_answers(engine)
        self._check_long_enough(target)
        if hold_s <= 0 and engine not in self._fleet.expected:
            self._check_takes_requests(engine, target)
        self._await(engine, hold_s)
        self._delay_s = 0.0
        self._interrupt()
        return OperationItemResult(self.record.id, done=True)

    @property
    def _computed_tokens(self) -> int:
        """The number of context tokens that the current engine has computed."""
        return self.record.context_tokens if self.record.state is RequestState.RUNNING else 0

    def _await(self, engine: EngineId, hold_s: float) -> None:
        self._awaited = AwaitedEvent(engine, self._clock.now_s() + hold_s, engine in self._fleet.expected)

    def _interrupt(self) -> None:
        """Make the task that waits for an engine restart its search."""
        if self._seeker is not None:
            self._interruptions += 1
            self._seeker.cancel()

    def _check_takes_requests(self, engine: EngineId, target: EngineBackend | None) -> None:
        if target is None or not target.usable:
            suspected = "" if target is None else target.suspect_because
            raise MoveRefused(
                f"engine {engine} accepts no requests: {suspected or 'it is draining or not in the routes'}"
            )
        if not target.offers(self.record.endpoint):
            raise MoveRefused(f"engine {engine} does not offer {PATHS[self.record.endpoint]}: {_HOW_TO_OFFER}")

    def _unable(self) -> frozenset[EngineId]:
        """Return the engines that cannot answer the request, for example because they do not serve its model."""
        others = frozenset() if self._passed is None else self._passed.unable()
        return others | self._fleet.without_model(self.record.body.get("model"))

    def _check_answers(self, engine: EngineId) -> None:
        if engine in self._unable():
            model = self.record.body.get("model")
            raise MoveRefused(f"engine {engine} cannot answer the request: it does not serve model {model!r}")

    def _check_long_enough(self, target: EngineBackend | None) -> None:
        if target is not None and self._ends_early_on(target):
            raise MoveRefused(
                f"the request may exceed the {target.context_limit_tokens:g}-token context of engine {target.id}"
            )

    def _ends_early_on(self, target: EngineBackend) -> bool:
        """Return whether the target's context limit might end the answer earlier than the current engine's limit."""
        here_tokens = float("inf") if self.backend is None else self.backend.context_limit_tokens
        return target.id in self._too_short() and target.context_limit_tokens < here_tokens

    def _too_short(self) -> frozenset[EngineId]:
        """Return the engines whose context limit might end the answer earlier than another engine's limit."""
        return self._fleet.too_short_for(self.record.prompt_tokens + (self.record.max_tokens or 0))

    def _check_movable(self) -> None:
        record = self.record
        if record.done:
            raise MoveRefused("the request finished before the move")
        if self._move is not None:
            raise MoveRefused(f"the request is already being moved to engine {self._move.target.id}")
        if self.backend is None or self._pump_task is None or self._pump_task.done():
            raise MoveRefused("the request is changing engines; try again later")
        if record.fixed_because:
            raise MoveRefused(f"the request cannot continue on another engine: {record.fixed_because}")

    async def _check_decodable(self) -> None:
        """Raise MoveRefused if the request has stop strings and its text cannot be decoded for the next engine."""
        if self.backend is None or self.record.fixed_because:
            return
        try:
            await stops_after_cut(self.record, self.backend, self._fleet)
        except TextUnknown as error:
            raise MoveRefused(f"the request cannot continue on another engine: {error}") from error

    def _answer_move(self, done: bool, detail: str = "") -> None:
        """Report the outcome of the current move, if there is one, and clear the move."""
        move, self._move = self._move, None
        if move is None:
            return
        if done:
            self.record.moves += 1
            move.taken()
        else:
            move.failed(detail, self._clock.now_s())

    def _arrived(self) -> None:
        """Report that the moved request has continued on its target."""
        move, self._move = self._move, None
        assert move is not None
        self.record.moves += 1
        move.arrived(self._clock.now_s(), self._fleet.in_background)

    # --- attempts ----------------------------------------------------------------------------------------------------

    async def _next_slot(self) -> EngineBackend | None:
        """Return the engine for the next attempt, or None if the record is done."""
        if self._complete():
            return None
        task = asyncio.current_task()
        assert task is not None
        cancelled_before = task.cancelling()
        self._seeker = task
        try:
            while not self.record.done:
                try:
                    return await self._seek_slot()
                except asyncio.CancelledError:
                    # As in asyncio.timeout: continue only if every cancellation came from this relay.
                    ours, self._interruptions = self._interruptions, 0
                    for _ in range(ours):
                        task.uncancel()
                    if not ours or task.cancelling() > cancelled_before:
                        raise
            return None
        finally:
            self._seeker = None

    async def _seek_slot(self) -> EngineBackend | None:
        if self._delay_s:
            self.record.detach()
            await self._clock.sleep(self._delay_s)
            self._delay_s = 0.0
        if not self._fleet.barrier_open:
            self._answer_move(done=False, detail="the pause barrier has closed")
        if self._move is not None and not self._move.submitted:
            self._move.submitted = True
            return self._move.target
        if self._awaited is not None:
            backend = await self._wait_for(self._awaited)
            self._awaited = None  # not reached after an interruption, which has set a newer one
            if backend is not None and backend.offers(self.record.endpoint):
                return backend
        back, self._back_to = self._back_to, None
        if back is not None and back.usable and self._fleet.barrier_open:
            return back
        return await self._wait_for_slot()

    async def _wait_for(self, awaited: AwaitedEvent) -> EngineBackend | None:
        """Return the engine for which the request is held. Return None if the engine did not start before the end of
        the wait or its context is too short."""
        was_expected = awaited.expected
        while True:
            backend = self._fleet.get(awaited.engine)
            expected = awaited.engine in self._fleet.expected
            left_s = awaited.until_s - self._clock.now_s()
            if backend is not None and backend.usable:  # a closed pause barrier does not end the wait
                if self._fleet.barrier_open or self._ends_early_on(backend):
                    return None if self._ends_early_on(backend) else backend
            elif not expected and (was_expected or left_s <= 0):
                return None
            was_expected = was_expected or expected
            self.record.detach()
            if left_s > 0:
                await until_set(self._clock, self._fleet.changed, left_s)
            else:
                await self._fleet.changed.wait()

    async def _wait_for_slot(self) -> EngineBackend | None:
        await self._fleet.find_model(self.record.body.get("model"))
        lacking = await self._fleet.lacking(self.record.endpoint)
        if lacking and not self._fleet.expected and lacking.issuperset(backend.id for backend in self._fleet):
            self._fail(404, f"no engine of the fleet offers {PATHS[self.record.endpoint]}: {_HOW_TO_OFFER}")
            return None
        try:
            return await self._fleet.place(
                self.record,
                without=self._refused_by | self._unable() | lacking,
                avoiding=self._hung_on | self._too_short(),
                again=self.record.attempt > 0,
                patience_s=self._limits.engine_wait_s,
            )
        except NoBackend as error:
            self._fail(503, str(error))
            return None

    async def _attempt(self, backend: EngineBackend) -> None:
        """Make one attempt, and decide how the request continues after it."""
        record = self.record
        self._sent_tokens = record.context_tokens
        backend.enter(record, self._clock.now_s())
        attempt_id, tokens_before = record.attempt_id, len(record.generated_ids)
        self.backend = backend
        arguments = record, backend, self._fleet
        attempt = EngineAttempt(*arguments) if self._passed is None else PassedAttempt(*arguments, self._passed)
        self._attempted = attempt
        coalesce = 1 if record.streaming else self._limits.coalesce_tokens
        move = self._move if self._move is not None and self._move.submitted else None
        self._pump_task = task = asyncio.create_task(self._pump(attempt, coalesce, move))
        over = asyncio.Event()  # cheaper than asyncio.wait
        task.add_done_callback(partial(_see_end, attempt_id, over))
        try:
            await over.wait()  # awaiting the task would not separate its cancellation from this coroutine's
        finally:
            try:
                if not task.done():
                    task.cancel()
                    await asyncio.wait({task})
            finally:  # a second cancellation may arrive while the first is handled
                # A task keeps its error, whose frames refer to this relay: a cycle that kept 64 MB bodies in memory.
                self.backend = self._pump_task = self._attempted = None
                self._fleet.release(backend, record)
                # A passed request has no id of its own on the engine; its closed connection aborts it.
                if (task.cancelled() or not record.done) and self._passed is None:
                    self._fleet.in_background(self._fleet.abort(backend, attempt_id))
        if len(record.generated_ids) > tokens_before:
            self._failures = 0
        if not record.done:
            self._settle(backend, task, attempt)

    async def _pump(self, attempt: EngineAttempt, coalesce_tokens: int, move: MoveInProgress | None) -> bool:
        await attempt.decide_form()
        return await attempt.run(attempt.request(coalesce_tokens, move), self._on_chunk)

    def _on_chunk(self, chunk: Chunk) -> None:
        """Count failovers, complete the move and notify the client. The record has already appended the chunk."""
        if self._failed and (chunk.token_ids or self.record.done):
            self._count_failovers()
        if self._move is not None and self._move.target is self.backend and (chunk.token_ids or chunk.finish_reason):
            self._arrived()
        if self.record.streaming:
            self._grown(self.record)

    def _count_failovers(self) -> None:
        """Count a failover for each failed engine, now that the request has continued."""
        failed, self._failed = self._failed, []
        for engine, computed in failed:
            self._fleet.failovers.count(engine, self._sent_tokens if computed else None, self._clock.now_s())

    def _settle(self, backend: EngineBackend, task: "asyncio.Task[bool]", attempt: EngineAttempt) -> None:
        """Decide how the request continues after an attempt that did not finish."""
        restarting, self._restarting = self._restarting, False
        stalled, self._stalled = self._stalled, False
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RequestRefused):
            self._after_refusal(backend, error)
        elif isinstance(error, NoConnection):
            self._after_shortage(error)
        elif isinstance(error, OrchestrRLError):
            self._after_failure(backend, error)
        elif error is not None:
            raise error
        elif stalled:
            self._back_off(backend, f"it produced no token for {self._limits.stall_s:g} s", 0.0)
        elif not task.cancelled() and attempt.joinable:  # otherwise the answer starts over; the engine did not fail
            # Another client of the engine aborted the request; the client of this gateway still needs its answer.
            self._back_off(backend, "it aborted the request", 0.0)
        if self.record.done:
            return
        if restarting and not self.record.delivered:  # the client may have received a part in the meantime
            self.record.forget_answer()
        elif (self.record.generated_ids or self.record.relayed) and (because := self.record.immovable_because):
            if self.record.delivered:
                lost = "broke off the answer, which cannot continue on another engine"
                self._fail(502, f"engine {self.record.engine} {lost}: {because}")
            else:
                self.record.forget_answer()

    def _after_refusal(self, backend: EngineBackend, refusal: RequestRefused) -> None:
        """Handle a refusal of the request by an engine. If a move brought the request to this engine, the request
        returns to the source of the move. If the request has tokens or has been moved, and another engine may accept
        it, it is sent to another engine. Otherwise, the request fails."""
        self._refused_by.add(backend.id)
        others = any(other.routed and other.id not in self._refused_by for other in self._fleet)
        if self._move is not None and self._move.target is backend:
            self._back_to = self._move.source
            self._answer_move(done=False, detail=f"refused by {backend.id}: {refusal}")
        elif not (others and (self.record.generated_ids or self.record.moves)):
            self.record.fail(RequestFailure(refusal.status, refusal.body), self._clock.now_s())

    def _after_failure(self, backend: EngineBackend, error: OrchestrRLError) -> None:
        """Mark an engine that was unreachable or broke off its answer as suspected dead, and schedule the next
        attempt."""
        self._fleet.suspect(backend, str(error))
        if self._move is not None and self._move.target is backend:
            self._back_to = self._move.source
            self._answer_move(done=False, detail=f"{backend.id} failed: {error}")
        self._back_off(backend, str(error), error.after_s if isinstance(error, Retryable) else 0.0)

    def _after_shortage(self, shortage: NoConnection) -> None:
        """Delay the next attempt until a connection may be free. The engine is not marked as suspected dead, because
        connections become free when other requests end."""
        if self._move is not None and self._move.submitted:
            self._back_to = self._move.source
            self._answer_move(done=False, detail=str(shortage))
        self._delay_s = shortage.after_s

    def _back_off(self, backend: EngineBackend, because: str, asked_s: float) -> None:
        """Count a failed attempt, and delay the next attempt or, after too many failures, fail the request. The first
        failure in a row causes no delay, because another engine may be usable. `asked_s` is the delay in seconds that
        the engine requested."""
        self._failures += 1
        shown = self.record.relayed_tokens or not self.record.relayed  # a whole answer counts as running from the start
        self._failed.append((backend.id, bool(shown) and self.record.state is RequestState.RUNNING))
        if self._failures > self._limits.failures:
            self._fail(503, f"{self._failures} consecutive attempts failed, the last on {backend.id}: {because}")
        elif self._failures > 1:
            doubled_s = self._limits.retry_first_s * 2.0 ** (self._failures - 2)
            self._delay_s = min(self._limits.retry_cap_s, max(doubled_s, asked_s))

    def _fail(self, status: int, message: str) -> None:
        logger.warning("request %s failed: %s", self.record.id, message)
        self.record.fail(RequestFailure(status, error_body(message, status)), self._clock.now_s())

    def _complete(self) -> bool:
        """Return whether the record is done. If the answer was cut after its last token, but before its engine reported
        the end, finish the record first."""
        record = self.record
        if record.done:
            return True
        ids = record.generated_ids
        if not ids:
            return False
        now_s = self._clock.now_s()
        sampling = sampling_fields(record.endpoint, record.body)
        if record.max_tokens is not None and len(ids) >= record.max_tokens:
            record.finish("length", None, now_s)
        elif ids[-1] in (sampling.get("stop_token_ids") or ()) and len(ids) > (sampling.get("min_tokens") or 0):
            record.finish("stop", ids[-1], now_s)
        return record.done

    # --- stalled engines ---------------------------------------------------------------------------------------------

    def stalled(self, now_s: float) -> bool:
        """Return whether the request has received no token for `stall_s` seconds. A request that is still waiting or
        cannot continue elsewhere is stalled only if its engine produces no token for other requests either."""
        backend, record = self.backend, self.record
        if backend is None or self._pump_task is None or self._pump_task.done() or self._move is not None:
            return False
        if not self._fleet.barrier_open:
            return False
        last_s = record.progressed_s
        if record.state is RequestState.WAITING or record.immovable_because:
            last_s = max(last_s, backend.progressed_s)
        return now_s - last_s > self._limits.stall_s

    async def leave_stalled(self) -> None:
        """Cancel the attempt on a stalled engine, unless the engine is paused or computes a non-streamed answer."""
        backend, task = self.backend, self._pump_task
        if backend is None or task is None:
            return
        excused = False
        try:
            excused = (self.record.relayed and await self._computes(backend)) or await backend.engine.is_paused()
        except Permanent as error:
            logger.debug("%s does not report whether it is paused: %s", backend.id, error)
        except (Retryable, OutcomeUnknown) as error:
            self._fleet.suspect(backend, str(error))
        if self._pump_task is not task or task.done() or self._move is not None:
            return
        if excused:
            self.record.progressed_s = self._clock.now_s()
            return
        logger.warning("request %s: %s produced no token for %g s", self.record.id, backend.id, self._limits.stall_s)
        self._hung_on.add(backend.id)
        self._stalled = True
        task.cancel()

    async def _computes(self, backend: EngineBackend) -> bool:
        """Return whether the engine has computed any tokens since the last call, for any request. The engine's token
        counters are compared with their values at the last call, because the progress of a non-streamed answer is not
        visible."""
        metrics = await backend.engine.metrics()
        before, computed = self._computed_before, metrics.generation_tokens_total + metrics.prompt_tokens_total
        self._computed_before = computed
        return before != computed


def _see_end(attempt_id: str, over: asyncio.Event, task: "asyncio.Task[bool]") -> None:
    over.set()
    # The relay may have been ended or cancelled at the same moment, and then does not read the error.
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, OrchestrRLError):
        logger.error("attempt %s failed with an unexpected error", attempt_id, exc_info=error)
