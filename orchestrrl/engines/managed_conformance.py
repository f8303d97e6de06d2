"""The contract of an engine that is started for us, as tests: subclass `ManagedConformance` in a test module.

    class TestMine(ManagedConformance):
        layout = EngineLayout(tp=1, pp=1, dp=1, ep=False)

        @pytest.fixture
        async def engine(self): ...  # as EngineConformance has it

        @pytest.fixture
        def weights(self): ...  # a folder with the weights that it was started with, and one with others

The engine is otherwise idle, and has the weights that it was started with; each test leaves them in it. What an engine
cannot do it declares in its capabilities, and refuses.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest

from orchestrrl.core.errors import Permanent
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import CompletionEndpoint, Engine, GenerationRequest
from orchestrrl.engines.managed import AnswerExcerpt, ManagedEngine, ReportedLayout

PROMPT = tuple(range(65, 81))
TOKENS = 48
CACHED_TOKENS = 700  # several blocks
# Other numbers of ranks and batches sum in another order. Nats, as a mean over the tokens of an excerpt.
SAME_NATS = 1e-3
OTHER_NATS = 0.5
DEADLINE_S = 120.0


def mean_nats(excerpt: AnswerExcerpt, scores: tuple[float, ...]) -> float:
    """Mean |difference| of what two engines make of a text."""
    pairs = zip(excerpt.logprobs, scores, strict=True)
    return math.fsum(abs(one - other) for one, other in pairs) / len(scores)


class EngineOfBothKinds(Engine, ManagedEngine, Protocol):
    """Both protocols, as clients that can be deployed have them."""


@asynccontextmanager
async def restored(engine: EngineOfBothKinds, own: Path) -> AsyncIterator[None]:
    """For a test that loads other weights."""
    try:
        yield
    finally:
        await engine.load_weights(str(own), None)


class ManagedConformance:
    layout: ReportedLayout

    async def test_layout_is_what_it_was_started_with(self, engine: EngineOfBothKinds) -> None:
        assert await engine.layout() == self.layout

    async def test_an_excerpt_goes_on_to_its_length_and_is_the_same_again(self, engine: EngineOfBothKinds) -> None:
        excerpt = await engine.excerpt(PROMPT, TOKENS)
        assert excerpt.prompt_ids == PROMPT
        assert len(excerpt.token_ids) == len(excerpt.logprobs) == TOKENS
        assert all(logprob <= 0 for logprob in excerpt.logprobs)
        again = await engine.excerpt(PROMPT, TOKENS)
        assert again.token_ids == excerpt.token_ids
        assert mean_nats(excerpt, again.logprobs) < SAME_NATS

    async def test_an_excerpt_is_what_a_request_would_get(self, engine: EngineOfBothKinds) -> None:
        model = (await engine.capabilities()).models[0]
        body = {"model": model, "prompt": list(PROMPT), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        got: list[int] = []
        async for chunk in engine.generate(
            GenerationRequest("managed-conformance", CompletionEndpoint.COMPLETIONS, body)
        ):
            got += chunk.token_ids
        assert tuple(got) == (await engine.excerpt(PROMPT, TOKENS)).token_ids

    async def test_its_own_excerpt_scores_as_it_was_made(self, engine: EngineOfBothKinds) -> None:
        excerpt = await engine.excerpt(PROMPT, TOKENS)
        for _ in range(2):  # also where the prompt is cached by now
            scores = await engine.score(excerpt)
            assert len(scores) == TOKENS
            assert max(abs(a - b) for a, b in zip(scores, excerpt.logprobs, strict=True)) < SAME_NATS

    async def test_a_text_that_it_would_not_write_scores_lower(self, engine: EngineOfBothKinds) -> None:
        excerpt = await engine.excerpt(PROMPT, TOKENS)
        turned = AnswerExcerpt(PROMPT, tuple(reversed(excerpt.token_ids)), excerpt.logprobs)
        assert sum(await engine.score(turned)) < sum(excerpt.logprobs) - OTHER_NATS * TOKENS

    async def test_what_does_not_fit_is_refused(self, engine: EngineOfBothKinds) -> None:
        longest = (await engine.capabilities()).max_model_len_tokens
        assert longest is not None
        with pytest.raises(Permanent):
            await engine.excerpt([PROMPT[0]] * (longest + 1), 1)

    async def test_other_weights_are_seen_and_named(
        self, engine: EngineOfBothKinds, weights: tuple[Path, Path]
    ) -> None:
        own, other = weights
        before = await engine.excerpt(PROMPT, TOKENS)
        async with restored(engine, own):
            await engine.load_weights(str(other), 7)
            assert await engine.weight_version() == 7
            assert mean_nats(before, await engine.score(before)) > OTHER_NATS
            assert (await engine.excerpt(PROMPT, TOKENS)).token_ids != before.token_ids
        assert await engine.weight_version() is None  # nobody has told what these are called
        assert mean_nats(before, await engine.score(before)) < SAME_NATS
        assert not await engine.is_paused()

    async def test_a_prompt_that_is_cached_is_computed_anew_under_other_weights(
        self, engine: EngineOfBothKinds, weights: tuple[Path, Path]
    ) -> None:
        prompt = [20 + 7 * place % 400 for place in range(CACHED_TOKENS)]
        before = await engine.excerpt(prompt, TOKENS)
        assert (await engine.excerpt(prompt, TOKENS)).token_ids == before.token_ids
        async with restored(engine, weights[0]):
            await engine.load_weights(str(weights[1]), 7)
            after = await engine.excerpt(prompt, TOKENS)
            # A score reads no cached prefix: where the old weights' KV was used, it is another.
            assert mean_nats(after, await engine.score(after)) < SAME_NATS
        assert (await engine.excerpt(prompt, TOKENS)).token_ids == before.token_ids

    async def test_weights_that_are_there_already_can_be_named(
        self, engine: EngineOfBothKinds, weights: tuple[Path, Path]
    ) -> None:
        async with restored(engine, weights[0]):
            for version in (0, 8):
                await engine.name_weights(version)
                assert await engine.weight_version() == version

    async def test_an_engine_that_is_paused_stays_so_while_weights_come(
        self, engine: EngineOfBothKinds, weights: tuple[Path, Path]
    ) -> None:
        async with restored(engine, weights[0]):
            await engine.pause(PauseMode.KEEP)
            try:
                await engine.load_weights(str(weights[1]), 7)
                assert await engine.is_paused()
                assert not await engine.asleep()
            finally:
                await engine.resume()
        assert await engine.probe() > 0

    async def test_sleep_and_wake_or_a_clear_no(self, engine: EngineOfBothKinds) -> None:
        excerpt = await engine.excerpt(PROMPT, TOKENS)
        assert not await engine.asleep()
        if not (await engine.capabilities()).sleep:
            for order in (engine.sleep, engine.wake):
                with pytest.raises(Permanent, match="sleep"):
                    await order()
            assert not await engine.asleep()
            assert await engine.probe() > 0
            return
        for _ in range(2):
            await engine.sleep()
            assert await engine.asleep()
        with pytest.raises(Permanent, match="asleep"):
            await engine.load_weights("/nowhere", 1)
        for _ in range(2):
            await engine.wake()
            assert not await engine.asleep()
        async with asyncio.timeout(DEADLINE_S):
            assert mean_nats(excerpt, await engine.score(excerpt)) < SAME_NATS

    async def test_scale_or_a_clear_no(self, engine: EngineOfBothKinds) -> None:
        replicas = (await engine.layout()).dp or 1
        if not (await engine.capabilities()).scale_elastic_ep:
            with pytest.raises(Permanent, match="scaled"):
                await engine.scale(replicas + 1)
            return
        excerpt = await engine.excerpt(PROMPT, TOKENS)
        before = await engine.metrics()
        for dp in (replicas + 1, replicas + 1, replicas):
            await engine.scale(dp)
            assert (await engine.layout()).dp == dp
            assert (await engine.metrics()).kv_capacity_tokens == before.kv_capacity_tokens // replicas * dp
            assert mean_nats(excerpt, await engine.score(excerpt)) < SAME_NATS
        with pytest.raises(Permanent):
            await engine.scale(0)
