"""One move of one request: what was ordered, what is reported of it, and the KV that goes with it.

KV belongs to a version, of configuration and weights. It is loaded only where the request began, the engine that it
leaves and the one that it goes to are all of the same one; else, and whatever goes wrong, it is computed again.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.operations import OperationItemResult
from orchestrrl.engines.handover import entry_id
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.integrations.instrument.kv_scheduler import DEFAULT_WAIT_S, MAX_WAIT_S
from planner.model import MoveMethod, RequestMove

# Of what recomputing would take: so long a destination waits for KV that is still being written.
WAIT_SHARE = 0.5
COUNTED_WITHIN_S = 5.0  # a busy engine answers late, and the next moves wait for it


@dataclass(frozen=True, slots=True)
class LeftKv:
    """The KV that an attempt leaves where it is cut: an entry of the engines' connector."""

    version: str  # under which the attempt began
    entry: str


def left_by(record: RequestRecord, backend: EngineBackend, fleet: EngineBackends) -> LeftKv | None:
    """What the record's present attempt will leave on this engine; None where nobody could use it."""
    version = backend.kv_version
    if not version or record.immovable_because or fleet.kv_versions[version] < 2:
        return None
    return LeftKv(version, entry_id(fleet.incarnation, record.id, record.attempt))


def wait_s(order: RequestMove) -> float:
    """How long the destination should wait for KV before it recomputes."""
    return min(MAX_WAIT_S, WAIT_SHARE * order.other_s) if order.other_s > 0 else DEFAULT_WAIT_S


class KvLoadCount:
    """How many tokens an engine loads for one request: what its total grows by, less what was found to be those of
    others that load in the same while. Where some of these fail, or other gateways have requests load there, one may be
    taken for the other."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend
        if backend.loads_open == 0 or backend.loads_before is None:
            backend.loads_before, backend.loads_found_tokens = asyncio.create_task(_loaded_total(backend)), 0
        self._before = backend.loads_before
        backend.loads_open += 1

    async def tokens(self, most: int) -> int | None:
        """To be asked once, when the request goes on. None: the engine does not say."""
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
        """Instead: nobody wants to know any longer."""
        self._backend.loads_open -= 1


async def _loaded_total(backend: EngineBackend) -> int | None:
    try:
        return (await backend.engine.metrics()).loaded_tokens_total
    except OrchestrRLError:
        return None  # it answers requests, or the move will fail by that


class MoveRefused(Exception):
    """The move is not begun, and the request stays as it is."""


@dataclass(eq=False)
class MoveInProgress:
    """From the order until the request goes on at `target`, or does not. `result` is set once."""

    order: RequestMove
    source: EngineBackend
    target: EngineBackend
    context_tokens: int  # that the source had computed
    step_s: float  # a decode step at the source
    cut_s: float
    left: LeftKv | None  # at the source
    submitted: bool = False

    def __post_init__(self) -> None:
        # An engine whose version has changed since the attempt began has computed on with other weights.
        goes_by_kv = (
            self.order.method is MoveMethod.TRANSFER
            and self.context_tokens > 0
            and self.left is not None
            and self.left.version == self.source.kv_version == self.target.kv_version
        )
        self.load = self.left if goes_by_kv else None  # the KV to be loaded; None: the context is computed again
        self.result: asyncio.Future[OperationItemResult] = asyncio.get_running_loop().create_future()
        self._count = None if self.load is None else KvLoadCount(self.target)

    def taken(self) -> None:
        """The target has the request; nobody waits any longer to see it go on."""
        self._forget_count()
        self.result.set_result(self._outcome(0.0, None if self.load is not None else 0))

    def failed(self, detail: str, now_s: float) -> None:
        self._forget_count()
        outcome = OperationItemResult(self.order.request, done=False, detail=detail, duration_s=now_s - self.cut_s)
        self.result.set_result(outcome)

    def arrived(self, now_s: float, in_background: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """The target has made a token for it, or ended it."""
        # What is loaded or computed again yields the next token, which a step would have made anyway.
        duration_s = max(0.0, now_s - self.cut_s - self.step_s)
        if self._count is None:
            self.result.set_result(self._outcome(duration_s, 0))
        else:
            in_background(self._report_loaded(self._count, duration_s))

    async def _report_loaded(self, count: KvLoadCount, duration_s: float) -> None:
        """Find out whether the KV came, and say so."""
        loaded: int | None = None
        try:
            loaded = await count.tokens(self.context_tokens - 1)
        finally:
            if not self.result.done():  # who waited for it may have left
                self.result.set_result(self._outcome(duration_s, loaded))

    def _forget_count(self) -> None:
        if self._count is not None:
            self._count.forget()

    def _outcome(self, duration_s: float, loaded_tokens: int | None) -> OperationItemResult:
        """Of a move that is done. `loaded_tokens` None: KV was sent for, and nobody knows whether it came."""
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
