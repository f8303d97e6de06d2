"""A simulated engine in this process and in virtual time. Its constants are known, and results do not depend on the
host."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import Chunk, CompletionEndpoint, EngineCapabilities, EngineSample, GenerationRequest
from orchestrrl.lab.simulated_engine.requests import read_completion
from orchestrrl.lab.simulated_engine.runtime import Runtime
from orchestrrl.lab.simulated_engine.server import SimulatedOptions
from orchestrrl.lab.simulated_engine.tokens import TokenModel

_Result = TypeVar("_Result")
TICK_S = 0.02


class VirtualEngine:
    """A simulated engine with the Engine protocol. `aborted` and `started` are the ids of requests it has received."""

    url = "virtual://engine"

    def __init__(
        self, options: SimulatedOptions, clock: VirtualClock, capabilities: EngineCapabilities | None = None
    ) -> None:
        self.started: list[str] = []
        self.aborted: list[str] = []
        self.prompts: list[tuple[int, ...]] = []
        self._options = options
        model = TokenModel(options.vocab_size, options.lengths, options.seed)
        self.runtime = Runtime(options.model_copy(update={"speed": 1.0, "tick_s": TICK_S}), model, clock)
        self._pace = asyncio.create_task(self.runtime.run())
        self._capabilities = capabilities or EngineCapabilities(
            engine="virtual",
            version="1",
            models=(options.model_name,),
            max_model_len_tokens=options.max_model_len_tokens,
            max_sequences=options.max_num_seqs,
        )

    async def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    async def metrics(self) -> EngineSample:
        return EngineSample(
            running=self.runtime.running,
            waiting=self.runtime.waiting,
            kv_usage_fraction=self.runtime.kv_usage_fraction,
            kv_capacity_tokens=self._options.kv_capacity_tokens,
            generation_tokens_total=self.runtime.scheduler.generated_tokens_total,
            prompt_tokens_total=self.runtime.prompt_tokens_total,
            preemptions_total=self.runtime.scheduler.preemptions_total,
        )

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        body = {**request.body, "stream": True, "return_token_ids": True}
        (ask,) = read_completion(CompletionEndpoint.COMPLETIONS, body, self._options, self.runtime.model).requests
        self.started.append(request.request_id)
        self.prompts.append(ask.prompt_ids)
        answer = self.runtime.submit(ask, request.request_id)
        try:
            async for part in answer.parts():
                yield Chunk(token_ids=tuple(part.token_ids), finish_reason=part.finish_reason)
        finally:
            self.runtime.drop(answer)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        self.runtime.abort(request_ids)

    async def healthy(self) -> bool:
        return True

    async def probe(self) -> float:
        return 0.0

    async def pause(self, mode: PauseMode, *, drop_kv: bool = False) -> None:
        await self.runtime.pause(mode)

    async def resume(self) -> None:
        self.runtime.resume()

    async def is_paused(self) -> bool:
        return self.runtime.pause_mode is not None

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return self.runtime.model.detokenize(token_ids)

    async def close(self) -> None:
        self._pace.cancel()


async def in_virtual_time(clock: VirtualClock, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Advance the clock until the work is done, and return its result."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await clock.advance(TICK_S)
    return task.result()
