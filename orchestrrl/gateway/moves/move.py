"""One move of one request: the order, its result, and the KV that is transferred with the request.

A KV version identifies the configuration and the weights with which KV was computed. KV is valid only for the same
configuration and weights. It is therefore loaded only if three KV versions are equal: the version when the attempt
began, the source's present version and the target's version. Otherwise, or after any error, the context is computed
again.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.operations import OperationItemResult
from orchestrrl.engines.handover import LeftKv, entry_id
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.integrations.instrument.kv_scheduler import DEFAULT_WAIT_S, MAX_WAIT_S
from planner.model import MoveMethod, RequestMove

# A destination waits for KV that is still being written for this fraction of the predicted recomputation time.
WAIT_SHARE = 0.5
COUNTED_WITHIN_S = 5.0  # timeout of the engine's metrics; a busy engine answers late


def left_by(record: RequestRecord, backend: EngineBackend, fleet: EngineBackends) -> LeftKv | None:
    """Return the KV entry that the record's current attempt on engine `backend` leaves when it is cut, or None if no
    other engine can use the entry."""
    version = backend.kv_version
    if not version or record.immovable_because or fleet.kv_versions[version] < 2:
        return None
    return LeftKv(version, entry_id(fleet.incarnation, record.id, record.attempt))


def wait_s(order: RequestMove) -> float:
    """Return the time in seconds for which the destination waits for KV before it recomputes the context."""
    return min(MAX_WAIT_S, WAIT_SHARE * order.other_s) if order.other_s > 0 else DEFAULT_WAIT_S


class KvLoadCount:
    """Counts the tokens whose KV an engine loads for one request. The count is the growth of the engine's total minus
    the tokens counted for concurrent loads. It may be wrong if a concurrent load fails or other gateways load KV on the
    engine."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend
        if backend.loads_open == 0 or backend.loads_before is None:
            backend.loads_before, backend.loads_found_tokens = asyncio.create_task(_loaded_total(backend)), 0
        self._before = backend.loads_before
        backend.loads_open += 1

    async def tokens(self, most: int) -> int | None:
        """Return the number of loaded tokens, at most `most`, or None if the engine does not report its total. Must be
        called only once, after the request has continued."""
        backend = self._backend
        try:
            async with asyncio.timeout(COUNTED_WITHIN_S):
                before = await asyncio.shield(self._before)
                after = await _loaded_total(backend)
            if before is None or after is None:
                return None
            found = min(most, max(0, after - before - backend.loads_found_tokens))
            backend.loads_found_tokens += found
            return found
        except TimeoutError:
            return None
        finally:
            backend.loads_open -= 1

    def forget(self) -> None:
        """Discard the count. The caller must call this method if it does not call `tokens`."""
        self._backend.loads_open -= 1


async def _loaded_total(backend: EngineBackend) -> int | None:
    try:
        return (await backend.engine.metrics()).loaded_tokens_total
    except OrchestrRLError:
        return None  # if the engine is down, the move itself will fail


class MoveRefused(Exception):
    """Raised if a move cannot be started. The request is not affected."""


@dataclass(eq=False)
class MoveInProgress:
    """A move that has been ordered and whose outcome is not known yet. `result` is set once, with the outcome."""

    order: RequestMove
    source: EngineBackend
    target: EngineBackend
    context_tokens: int  # computed by the source
    step_s: float  # duration of a decode step at the source
    cut_s: float
    left: LeftKv | None  # the KV left at the source
    submitted: bool = False

    def __post_init__(self) -> None:
        # If the source's version has changed since the attempt began, part of the KV comes from other weights.
        goes_by_kv = (
            self.order.method is MoveMethod.TRANSFER
            and self.context_tokens > 0
            and self.left is not None
            and self.left.version == self.source.kv_version == self.target.kv_version
        )
        self.load = self.left if goes_by_kv else None  # the KV to load; None: the context is computed again
        self.result: asyncio.Future[OperationItemResult] = asyncio.get_running_loop().create_future()
        self._count = None if self.load is None else KvLoadCount(self.target)

    def taken(self) -> None:
        """Report the move as done before the target's first token, because the caller's time limit has passed."""
        self._forget_count()
        self.result.set_result(self._outcome(0.0, None if self.load is not None else 0))

    def failed(self, detail: str, now_s: float) -> None:
        self._forget_count()
        outcome = OperationItemResult(self.order.request, done=False, detail=detail, duration_s=now_s - self.cut_s)
        self.result.set_result(outcome)

    def arrived(self, now_s: float, in_background: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Report the move as done, after the target's first token or the end of the answer. If KV was to be loaded, a
        task started with `in_background` counts the loaded tokens before the report."""
        # Loading or recomputing also yields the next token, which a decode step would have produced anyway.
        duration_s = max(0.0, now_s - self.cut_s - self.step_s)
        if self._count is None:
            self.result.set_result(self._outcome(duration_s, 0))
        else:
            in_background(self._report_loaded(self._count, duration_s))

    async def _report_loaded(self, count: KvLoadCount, duration_s: float) -> None:
        """Count the tokens whose KV the target loaded, and set the result of the move."""
        loaded: int | None = None
        try:
            loaded = await count.tokens(self.context_tokens - 1)
        finally:
            if not self.result.done():  # a cancelled caller cancels the future
                self.result.set_result(self._outcome(duration_s, loaded))

    def _forget_count(self) -> None:
        if self._count is not None:
            self._count.forget()

    def _outcome(self, duration_s: float, loaded_tokens: int | None) -> OperationItemResult:
        """Return the result of a completed move. `loaded_tokens` is None if it is unknown whether the target loaded the
        requested KV."""
        if loaded_tokens:
            method, recomputed = MoveMethod.TRANSFER, self.context_tokens - loaded_tokens
        else:
            method, recomputed = MoveMethod.RECOMPUTE, self.context_tokens
        return OperationItemResult(
            id=self.order.request,
            done=True,
            recomputed_tokens=0 if loaded_tokens is None else recomputed,
            duration_s=duration_s,
            method=None if loaded_tokens is None or not self.context_tokens else method,
            loaded_tokens=loaded_tokens or 0,
            predicted_s=self.order.predicted_s,
        )
