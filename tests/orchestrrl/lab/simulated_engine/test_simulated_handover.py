"""KV handover between simulated engines: which KV is loaded, and the resulting responses."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrrl.engines.base import CompletionEndpoint, GenerationRequest
from orchestrrl.engines.handover import loading, saving
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from orchestrrl.lab.simulated_engine.server import SimulatedOptions, SimulatedServer

# Prefill runs at 100 tokens/s; KV transfer at 10,000 tokens/s with a latency of 0.01 s.
SHAPE: dict[str, Any] = {
    "prefill_tokens_per_s": 100.0,
    "kv_bytes_per_token": 1e6,
    "kv_gbps": 80.0,
    "kv_latency_s": 0.01,
    "speed": 20.0,
    "tick_s": 0.005,
}
PROMPT = list(range(1000, 1400))
TOKENS = 60


@dataclass
class Pair:
    engines: list[SimulatedEngine]
    directory: Path

    async def ask(
        self, engine: int, prompt: list[int], max_tokens: int, params: Mapping[str, Any], stop_at: int | None = None
    ) -> list[int]:
        """Return the response's tokens, cut at `stop_at` or slightly later."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **params}
        ids: list[int] = []
        name = f"r{engine}-{len(prompt)}-{max_tokens}"
        async for chunk in self.engines[engine].generate(GenerationRequest(name, CompletionEndpoint.COMPLETIONS, body)):
            ids += chunk.token_ids
            if stop_at is not None and len(ids) >= stop_at:
                stop_at = None
                await self.engines[engine].abort([name])
        return ids

    async def loaded(self, engine: int) -> int:
        total = (await self.engines[engine].metrics()).loaded_tokens_total
        assert total is not None
        return total

    async def prefilled(self, engine: int) -> int:
        return (await self.engines[engine].metrics()).prompt_tokens_total


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    options = SimulatedOptions(kv_directory=tmp_path, **SHAPE)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(SimulatedServer(options)) for _ in range(2)]
        engines = [SimulatedEngine(server.url) for server in servers]
        yield Pair(engines, tmp_path)
        for engine in engines:
            await engine.close()


async def test_request_continues_with_its_kv(pair: Pair) -> None:
    undisturbed = await pair.ask(0, PROMPT, TOKENS, {})
    part = await pair.ask(0, PROMPT, 10 * TOKENS, saving("v1", "a"), stop_at=20)
    assert 20 <= len(part) < 10 * TOKENS
    context = [*PROMPT, *part[:20]]  # the engine may generate more tokens before it stops
    rest = await pair.ask(1, context, TOKENS - 20, loading("v1", "a"))
    assert part[:20] + rest == undisturbed
    assert await pair.loaded(1) == len(context) - 1
    assert await pair.prefilled(1) == 1
    assert list(pair.directory.iterdir()) == []


@pytest.mark.parametrize("spoilt", ["weights", "tokens", "missing"])
async def test_mismatched_kv_is_recomputed(pair: Pair, spoilt: str) -> None:
    prompt = [PROMPT[0] + 1, *PROMPT[1:]] if spoilt == "tokens" else PROMPT
    part = await pair.ask(0, PROMPT, 10 * TOKENS, saving("v1", "a"), stop_at=20)
    undisturbed = await pair.ask(0, [*prompt, *part[:20]], TOKENS, {})
    entry = "b" if spoilt == "missing" else "a"
    params = loading("v2" if spoilt == "weights" else "v1", entry, wait_s=0.05)
    assert await pair.ask(1, [*prompt, *part[:20]], TOKENS, params) == undisturbed
    assert await pair.loaded(1) == 0
    assert await pair.prefilled(1) == len(PROMPT) + 20


async def test_finished_request_saves_no_kv(pair: Pair) -> None:
    await pair.ask(0, PROMPT, TOKENS, saving("v1", "a"))
    assert list(pair.directory.iterdir()) == []


async def test_finished_request_saves_its_kv_if_asked_for(pair: Pair) -> None:
    answer = await pair.ask(0, PROMPT, TOKENS, saving("v1", "a", at_end=True))
    next_turn = [*PROMPT, *answer, 7, 8]
    undisturbed = await pair.ask(0, next_turn, TOKENS, {})
    assert await pair.ask(1, next_turn, TOKENS, loading("v1", "a", "b", at_end=True)) == undisturbed
    assert await pair.loaded(1) == len(PROMPT) + TOKENS - 1  # the answer's last token has no KV
    assert [path.name for path in pair.directory.iterdir()] == ["b"]


async def test_invalid_transfer_parameters_are_ignored(pair: Pair) -> None:
    params = {"kv_transfer_params": {"handover": {"save": 3}}}
    assert len(await pair.ask(0, PROMPT, TOKENS, params)) == TOKENS
