"""A controllable engine in memory: it answers, is slow, refuses, returns nonsense, restarts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import Chunk, EngineCapabilities, EngineSample, GenerationRequest


@dataclass
class FakeEngine:
    clock: Clock
    url: str = "http://127.0.0.1:8000"
    current: EngineSample = field(default_factory=lambda: EngineSample(2, 0, 0.1, 1000, 0, 0, 0))
    offers: EngineCapabilities = field(default_factory=lambda: EngineCapabilities("fake", "1", ("m",), pause=True))
    error: Exception | None = None
    capabilities_error: Exception | None = None
    answer_s: float = 0.0  # response time of metrics
    calls: list[str] = field(default_factory=list)
    closed: bool = False

    async def metrics(self) -> EngineSample:
        await self.clock.sleep(self.answer_s)
        if self.error:
            raise self.error
        return self.current

    def generate_tokens(self, tokens: int) -> None:
        self.current = replace(self.current, generation_tokens_total=self.current.generation_tokens_total + tokens)

    async def capabilities(self) -> EngineCapabilities:
        self.calls.append("capabilities")
        if self.capabilities_error:
            raise self.capabilities_error
        return self.offers

    async def healthy(self) -> bool:
        return self.error is None

    async def probe(self) -> float:
        self.calls.append("probe")
        return 0.125

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.calls.append(f"abort {' '.join(request_ids)}")

    async def pause(self, mode: PauseMode, *, drop_kv: bool = False) -> None:
        if not self.offers.pause:
            raise Permanent("cannot pause")
        self.calls.append(f"pause {mode}")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def is_paused(self) -> bool:
        return False

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return ""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        await asyncio.sleep(0)
        yield Chunk(finish_reason="stop")

    async def close(self) -> None:
        self.closed = True
