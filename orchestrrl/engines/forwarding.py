"""Forward a client's HTTP request to an engine unchanged, and read the engine's answer as it arrives."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, cast

from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.engines.base import Engine
from orchestrrl.engines.exchange import RETRY_AFTER_S, EngineConnection, EngineExchange


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A client's request. `target` is the path with the query, in ASCII."""

    method: str
    target: str
    body: bytes = field(default=b"", repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # may include credentials
    content_type: str = "application/json"


class ForwardingEngine(Protocol):
    """A client of an engine with an HTTP API."""

    def forward(self, request: ForwardedRequest) -> EngineExchange:
        """Return an exchange whose request is not yet sent."""
        ...


def forwards(engine: Engine) -> bool:
    """Return whether the engine's client is a ForwardingEngine."""
    return hasattr(engine, "forward")


@asynccontextmanager
async def forwarded(
    engine: Engine, request: ForwardedRequest, head_within_s: float | None = None
) -> AsyncIterator[EngineConnection]:
    """Send the request and yield the engine's answer, whose status and headers have arrived. If the block raises, the
    request is aborted. Raises Permanent if the engine product has no HTTP API, Retryable if the status does not arrive
    within `head_within_s` seconds, and the errors of EngineExchange."""
    if not forwards(engine):
        raise Permanent(f"{engine.url}: {type(engine).__name__} does not forward requests")
    exchange = cast(ForwardingEngine, engine).forward(request)
    try:
        try:
            async with asyncio.timeout(head_within_s):
                answer = await exchange.begin()
        except TimeoutError as error:
            raise Retryable(f"{engine.url}: no answer within {head_within_s:g} s", RETRY_AFTER_S) from error
        yield answer
    except BaseException:
        exchange.close()
        raise
    exchange.leave()
