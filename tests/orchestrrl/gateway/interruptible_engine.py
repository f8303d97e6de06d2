"""An engine client that stops reading at a given number of tokens, so that a test can intervene."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing

from orchestrrl.engines.base import Chunk, GenerationRequest
from orchestrrl.engines.vllm import VllmEngine


class InterruptibleEngine(VllmEngine):
    """An engine client that reads an attempt up to a number of tokens and then waits for `released`. `holds` has the
    numbers for the next attempts in order. Further tokens from the server are not read, as after a cut."""

    def __init__(self, url: str, holds: deque[int], released: asyncio.Event) -> None:
        super().__init__(url)
        self._holds = holds
        self._released = released

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        hold = self._holds.popleft() if self._holds else None
        tokens = 0
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk
                tokens += len(chunk.token_ids)
                if hold is not None and tokens >= hold:
                    await self._released.wait()
