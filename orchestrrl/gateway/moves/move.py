"""One move of one request: what was ordered, and what is told of how it went."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from orchestrrl.core.operations import OperationItemResult
from orchestrrl.gateway.moves.kv_handover import KvLoadCount, LeftKv
from orchestrrl.gateway.routing.backend import EngineBackend
from planner.model import MoveMethod, RequestMove


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
    load: LeftKv | None  # the KV that is left at the source; None: the context is computed again
    submitted: bool = False

    def __post_init__(self) -> None:
        self.result: asyncio.Future[OperationItemResult] = asyncio.get_running_loop().create_future()
        self._count = None if self.load is None else KvLoadCount(self.target)

    def taken(self) -> None:
        """The target has the request; nobody waits any longer to see it go on."""
        self._forget_count()
        self.result.set_result(self._outcome(0.0, None if self.load is not None else 0))

    def failed(self, detail: str, now_s: float) -> None:
        self._forget_count()
        self.result.set_result(
            OperationItemResult(
                self.order.request, done=False, detail=detail, recomputed_tokens=0, duration_s=now_s - self.cut_s
            )
        )

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
