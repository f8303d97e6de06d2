"""An attempt of a request that is passed through: one engine receives the client's request unchanged, and the client
receives the engine's answer unchanged."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from orchestrrl.engines.base import Chunk, GenerationRequest
from orchestrrl.engines.exchange import EngineConnection
from orchestrrl.engines.forwarding import ForwardedRequest, forwarded
from orchestrrl.gateway.attempt import EngineAttempt
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends
from planner.model import EngineId

PASSED = "passed"  # the finish reason of a request that was passed through
# Sends the engine's answer to the client, and calls its last argument at each part that arrives.
Deliver = Callable[[EngineBackend, EngineConnection, Callable[[], None]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class PassedCall:
    """A client's request, the delivery of its answer, and the engines that cannot answer it."""

    request: ForwardedRequest
    deliver: Deliver
    unable: Callable[[], frozenset[EngineId]]


class PassedAttempt(EngineAttempt):
    """One attempt of a request that is passed through."""

    def __init__(self, record: RequestRecord, backend: EngineBackend, fleet: EngineBackends, call: PassedCall) -> None:
        super().__init__(record, backend, fleet)
        self._call = call

    async def decide_form(self) -> None:
        self._record.relayed = True
        self._backend.run_whole(self._record)

    async def run(self, request: GenerationRequest, on_chunk: Callable[[Chunk], None]) -> bool:
        """Send the client's request instead of `request`, and deliver the answer. Raises the errors of the engine's
        client if the engine fails."""
        async with forwarded(self._backend.engine, self._call.request) as answer:
            await self._call.deliver(self._backend, answer, self._received)
        # The daemon does not count its length, which is unknown.
        self._record.finish(PASSED, None, self._fleet.clock.now_s())
        on_chunk(Chunk(finish_reason=PASSED))
        return True

    def _received(self) -> None:
        self._relay(Chunk(event={}))
