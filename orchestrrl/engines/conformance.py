"""Conformance tests of the Engine protocol. Subclass `EngineConformance` in a test module with an `engine` fixture:

    class TestMine(EngineConformance):
        @pytest.fixture
        async def engine(self):
            engine = connect("mine", url)
            yield engine
            await engine.close()

The engine must be idle at first. Its limit on concurrent sequences must be low (for example 4), its context length must
be 16,384 tokens, and its KV cache must hold only slightly more tokens. If it generates more than 50 tokens/s for
requests of 1,000 tokens or more, tests that abort or pause requests may act too late. It must implement vLLM's HTTP
API. If the simulated engine and vLLM differ, vLLM is the reference.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp
import pytest

from orchestrrl.core.errors import Retryable
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import (
    Chunk,
    CompletionEndpoint,
    Engine,
    EngineCapabilities,
    EngineSample,
    GenerationRequest,
    RequestRefused,
)

DEADLINE_S = 120.0
POLL_S = 0.05
LOOKS_WHILE_FROZEN = 10
ATTEMPTS = 5
LONG_TOKENS = 16_000  # long enough that the test intervenes before the end
OVERLAPPING_TOKENS = 1_000  # long enough that requests sent together run together
ENOUGH_TOKENS = 1_500  # reaches its end, but takes long enough for the test to intervene
PROMPT = (84, 111, 100, 97, 121)
TEXT = "bado kuli"

_numbers = count()


@dataclass
class ConformanceRequest:
    """One request and the chunks received so far."""

    id: str
    chunks: list[Chunk] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def prompt_token_ids(self) -> tuple[int, ...] | None:
        return self.chunks[0].prompt_token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.chunks[-1].finish_reason if self.chunks else None

    async def done(self) -> "ConformanceRequest":
        """Wait until the request has ended, and return it. Raises the request's error if the request failed."""
        assert self.task is not None
        async with asyncio.timeout(DEADLINE_S):
            await self.task
        return self


class EngineUnderTest:
    """An engine with helpers that start, await and clean up requests."""

    def __init__(self, engine: Engine, capabilities: EngineCapabilities) -> None:
        self.engine = engine
        self.capabilities = capabilities
        self._started: list[ConformanceRequest] = []

    @property
    def seats(self) -> int:
        assert self.capabilities.max_sequences is not None
        return self.capabilities.max_sequences

    def start(
        self, prompt: Any = PROMPT, *, chat: bool = False, verbatim: bool = False, **body: Any
    ) -> ConformanceRequest:
        """Send a request, by default greedy and ignoring end-of-text. `verbatim` sends the body unchanged."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        defaults = {"model": self.capabilities.models[0], "temperature": 0, "ignore_eos": True}
        endpoint = CompletionEndpoint.CHAT if chat else CompletionEndpoint.COMPLETIONS
        run = ConformanceRequest(f"conformance-{time.time_ns()}-{next(_numbers)}")
        request = GenerationRequest(run.id, endpoint, {**defaults, **asked, **body}, verbatim=verbatim)
        run.task = asyncio.create_task(self._read(request, run))
        self._started.append(run)
        return run

    async def run(self, prompt: Any = PROMPT, **asked: Any) -> ConformanceRequest:
        return await self.start(prompt, **asked).done()

    async def abort(self, *runs: ConformanceRequest) -> list[str | None]:
        """Abort the requests and return their finish reasons."""
        await self.engine.abort([run.id for run in runs])
        return [(await run.done()).finish_reason for run in runs]

    async def _read(self, request: GenerationRequest, run: ConformanceRequest) -> None:
        async for chunk in self.engine.generate(request):
            run.chunks.append(chunk)

    async def until(self, condition: Callable[[EngineSample], bool]) -> EngineSample:
        """Poll the engine's metrics until the condition holds, and return the last sample. An unanswered poll is
        repeated, because an engine may be too busy to answer for a while."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with suppress(Retryable):
                    metrics = await self.engine.metrics()
                    if condition(metrics):
                        return metrics
                await asyncio.sleep(POLL_S)

    async def until_all_answer(self, *runs: ConformanceRequest, tokens: int = 1) -> None:
        """Wait until each request has generated at least `tokens` tokens."""
        async with asyncio.timeout(DEADLINE_S):
            while not all(len(run.token_ids) >= tokens for run in runs):
                await asyncio.sleep(POLL_S)

    async def until_idle(self) -> EngineSample:
        return await self.until(lambda m: m.running == 0 and m.waiting == 0 and m.kv_usage_fraction == 0)

    async def fill(self, tokens: int = LONG_TOKENS) -> tuple[list[ConformanceRequest], list[ConformanceRequest]]:
        """Start as many requests of `tokens` tokens as the engine can run at once, and queue two short requests.
        Returns the running requests and the waiting requests."""
        running = [self.start([*PROMPT, seat], max_tokens=tokens) for seat in range(self.seats)]
        await self.until_all_answer(*running)
        waiting = [self.start([*PROMPT, 100 + seat], max_tokens=50) for seat in range(2)]
        await self.until(lambda m: m.waiting >= len(waiting))
        return running, waiting

    async def clear(self) -> None:
        """Resume the engine, cancel all requests, and wait until the engine is idle."""
        await self.engine.resume()
        tasks = [run.task for run in self._started if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.until_idle()


@asynccontextmanager
async def at(engine: Engine) -> AsyncIterator[EngineUnderTest]:
    """Wait until the engine is idle, yield the helpers for one test, and clean up afterwards."""
    bench = EngineUnderTest(engine, await engine.capabilities())
    await bench.until_idle()
    try:
        yield bench
    finally:
        await bench.clear()


async def post(engine: Engine, path: str, body: Any) -> tuple[int, Any]:
    """Send one plain HTTP request, for endpoints outside the Engine protocol. Returns the status and the JSON
    answer."""
    async with aiohttp.ClientSession() as session:
        async with session.post(engine.url + path, json=body) as response:
            return response.status, await response.json()


# Field values that make a request invalid (status 400).
WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, -1, "many"),
    "prompt": ([], "", None, [-1], [10_000_000]),
    "temperature": (-1,),
    "top_p": (2,),
    "seed": ("a",),
    "logprobs": (100,),
}


class EngineConformance:
    """Conformance tests of the Engine protocol. Each test finds the engine idle and leaves it idle."""

    @pytest.fixture
    async def bench(self, engine: Engine) -> AsyncIterator[EngineUnderTest]:
        async with at(engine) as bench:
            yield bench

    async def test_capabilities(self, engine: Engine) -> None:
        found = await engine.capabilities()
        assert found.version
        assert found.models
        assert found.token_ids
        assert found.abort_requests
        assert found.pause
        assert found.max_model_len_tokens is not None
        assert found.max_sequences is not None

    async def test_healthy_and_probe(self, engine: Engine) -> None:
        assert await engine.healthy()
        assert await engine.probe() > 0

    async def test_token_ids_in_and_out(self, bench: EngineUnderTest) -> None:
        run = await bench.run(max_tokens=40)
        assert run.prompt_token_ids == PROMPT
        assert all(chunk.prompt_token_ids is None for chunk in run.chunks[1:])
        assert len(run.token_ids) == 40
        assert run.text
        assert [chunk.finish_reason for chunk in run.chunks if chunk.finish_reason] == ["length"]

    async def test_text_and_its_token_ids_give_the_same_answer(self, engine: Engine, bench: EngineUnderTest) -> None:
        by_text = await bench.run(TEXT, max_tokens=30)
        assert by_text.prompt_token_ids is not None
        assert await engine.detokenize(by_text.prompt_token_ids) == TEXT
        by_ids = await bench.run(list(by_text.prompt_token_ids), max_tokens=30)
        assert by_ids.token_ids == by_text.token_ids

    async def test_greedy_decoding_is_deterministic_alone_and_in_a_batch(self, bench: EngineUnderTest) -> None:
        alone = await bench.run(max_tokens=200)
        together = [bench.start(max_tokens=200)] + [bench.start([9, 8, 7 + n], max_tokens=150) for n in range(3)]
        assert [(await run.done()).finish_reason for run in together] == ["length"] * 4
        assert together[0].token_ids == alone.token_ids

    async def test_greedy_decoding_ignores_the_seed(self, bench: EngineUnderTest) -> None:
        runs = [await bench.run(max_tokens=50, seed=seed) for seed in (1, 2)]
        assert runs[0].token_ids == runs[1].token_ids

    async def test_prompt_with_partial_answer_continues_the_answer(self, bench: EngineUnderTest) -> None:
        whole = (await bench.run(max_tokens=300)).token_ids
        for cut in (1, 17, 128, 299):
            rest = await bench.run([*PROMPT, *whole[:cut]], max_tokens=300 - cut)
            assert rest.token_ids == whole[cut:]

    async def test_streamed_answer_equals_non_streamed_answer(self, engine: Engine, bench: EngineUnderTest) -> None:
        streamed = await bench.run(max_tokens=60)
        body = {"model": bench.capabilities.models[0], "prompt": list(PROMPT), "max_tokens": 60}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        status, answer = await post(engine, "/v1/completions", body)
        assert status == 200
        choice = answer["choices"][0]
        assert choice["token_ids"] == streamed.token_ids
        assert choice["text"] == streamed.text
        assert choice["finish_reason"] == "length"
        assert choice["prompt_token_ids"] == list(PROMPT)
        assert answer["usage"] == answer["usage"] | {"prompt_tokens": 5, "completion_tokens": 60}

    async def test_last_chunk_has_the_usage(self, bench: EngineUnderTest) -> None:
        *_, last = (await bench.run(max_tokens=7)).chunks
        assert last.usage is not None
        assert (last.usage["prompt_tokens"], last.usage["completion_tokens"]) == (len(PROMPT), 7)

    async def test_verbatim_request_returns_the_engines_own_answer(self, bench: EngineUnderTest) -> None:
        parsed = await bench.run(max_tokens=20)
        whole = await bench.run(max_tokens=20, verbatim=True, prompt_logprobs=0)
        (chunk,) = whole.chunks
        assert chunk.answer is not None
        assert chunk.finish_reason == "length"
        (choice,) = chunk.answer["choices"]
        assert choice["text"] == parsed.text
        assert len(choice["prompt_logprobs"]) == len(PROMPT)
        streamed = await bench.run(max_tokens=20, verbatim=True, stream=True)
        *events, last = streamed.chunks
        assert (last.event, last.finish_reason) == ({}, "length")
        parts = [each.event["choices"][0]["text"] for each in events if each.event]
        assert "".join(parts) == parsed.text

    async def test_max_tokens_is_capped_by_the_context_length(self, bench: EngineUnderTest) -> None:
        longest = bench.capabilities.max_model_len_tokens or 0
        run = await bench.run([5] * (longest - 3), max_tokens=100)
        assert len(run.token_ids) == 3
        assert run.finish_reason == "length"

    async def test_completions_have_16_tokens_by_default(self, bench: EngineUnderTest) -> None:
        assert len((await bench.run()).token_ids) == 16

    async def test_stop_token_ends_the_answer_and_is_included(self, bench: EngineUnderTest) -> None:
        whole = (await bench.run(max_tokens=40)).token_ids
        stop = whole[20]
        end = whole.index(stop) + 1
        run = await bench.run(max_tokens=40, stop_token_ids=[stop])
        assert run.token_ids == whole[:end]
        assert run.finish_reason == "stop"
        assert run.chunks[-1].stop_reason == stop
        held_back = await bench.run(max_tokens=end, stop_token_ids=[stop], min_tokens=end)
        assert len(held_back.token_ids) == end

    async def test_logprobs_of_completions(self, bench: EngineUnderTest) -> None:
        run = await bench.run(max_tokens=20, logprobs=2)
        _check_logprobs(run, alternatives=2)
        without = await bench.run(max_tokens=20)
        assert all(chunk.logprobs is None for chunk in without.chunks)
        assert without.token_ids == run.token_ids

    async def test_logprobs_of_chats(self, bench: EngineUnderTest) -> None:
        _check_logprobs(await bench.run(TEXT, chat=True, max_tokens=20, logprobs=True, top_logprobs=2), 2)

    async def test_chat_continues_as_a_completion_of_its_tokens(self, bench: EngineUnderTest) -> None:
        chat = await bench.run(TEXT, chat=True, max_tokens=60)
        assert chat.prompt_token_ids
        assert len(chat.token_ids) == 60
        assert chat.finish_reason == "length"
        rest = await bench.run([*chat.prompt_token_ids, *chat.token_ids[:25]], max_tokens=35)
        assert rest.token_ids == chat.token_ids[25:]

    async def test_metrics_count_requests_and_tokens(self, engine: Engine, bench: EngineUnderTest) -> None:
        before = await bench.until_idle()
        run = bench.start(max_tokens=LONG_TOKENS)
        busy = await bench.until(lambda m: m.running == 1 and m.kv_usage_fraction > 0)
        assert busy.kv_capacity_tokens > 0
        assert 0 < busy.kv_usage_fraction <= 1
        await bench.abort(run)
        short = await bench.run(max_tokens=30)
        after = await bench.until_idle()
        made = len(run.token_ids) + len(short.token_ids)
        assert after.prompt_tokens_total - before.prompt_tokens_total == 2 * len(PROMPT)
        # Tokens may be generated between the abort call and its effect.
        assert 0 <= after.generation_tokens_total - before.generation_tokens_total - made <= 8

    async def test_abort_ends_a_request_and_frees_its_kv(self, engine: Engine, bench: EngineUnderTest) -> None:
        for chat in (False, True):
            run = bench.start(TEXT, chat=chat, max_tokens=LONG_TOKENS)
            other = bench.start(max_tokens=LONG_TOKENS)
            await bench.until_all_answer(run, other)
            assert await bench.abort(run) == ["abort"]
            assert 0 < len(run.token_ids) < LONG_TOKENS
            assert (await bench.until(lambda m: m.running == 1)).kv_usage_fraction > 0
            await bench.abort(other)
            await bench.until_idle()
            partial = run.token_ids
            again = await bench.run(TEXT, chat=chat, max_tokens=len(partial))
            assert again.token_ids == partial

    async def test_abort_of_unknown_or_no_requests_has_no_effect(self, engine: Engine, bench: EngineUnderTest) -> None:
        run = bench.start(max_tokens=300)
        await bench.until_all_answer(run)
        await engine.abort(["unknown"])
        await engine.abort([])
        assert (await run.done()).finish_reason == "length"

    async def test_abort_of_a_waiting_request(self, engine: Engine, bench: EngineUnderTest) -> None:
        running, waiting = await bench.fill()
        assert await bench.abort(waiting[0]) == ["abort"]
        assert waiting[0].token_ids == []
        assert await bench.abort(*running) == ["abort"] * len(running)
        assert len((await waiting[1].done()).token_ids) == 50

    async def test_abort_right_after_sending(self, engine: Engine, bench: EngineUnderTest) -> None:
        runs = [bench.start(max_tokens=LONG_TOKENS) for _ in range(4)]
        await asyncio.sleep(0)
        assert await bench.abort(*runs) == ["abort"] * 4
        await bench.until_idle()

    async def test_closed_connection_aborts_its_request(self, bench: EngineUnderTest) -> None:
        running, waiting = await bench.fill()
        for run in (*waiting, *running):
            assert run.task is not None
            run.task.cancel()
        await bench.until_idle()

    async def test_pause_keep_freezes_requests_until_resume(self, engine: Engine, bench: EngineUnderTest) -> None:
        run = bench.start(max_tokens=LONG_TOKENS)
        await bench.until_all_answer(run)
        await engine.pause(PauseMode.KEEP)
        assert await engine.is_paused()
        newcomer = bench.start(max_tokens=5)
        made = []
        for _ in range(LOOKS_WHILE_FROZEN):
            made.append((await engine.metrics()).generation_tokens_total)
            await asyncio.sleep(POLL_S)
        assert made == [made[0]] * LOOKS_WHILE_FROZEN
        assert newcomer.token_ids == []
        frozen_at = len(run.token_ids)
        await engine.resume()
        assert not await engine.is_paused()
        assert len((await newcomer.done()).token_ids) == 5
        await _check_undisturbed(bench, run, frozen_at + 50)

    async def test_pause_keep_keeps_the_kv(self, engine: Engine, bench: EngineUnderTest) -> None:
        running = [bench.start([*PROMPT, seat], max_tokens=LONG_TOKENS) for seat in range(2)]
        await bench.until_all_answer(*running)
        before = await engine.metrics()
        await engine.pause(PauseMode.KEEP)
        assert await bench.abort(running[0]) == ["abort"]  # also possible during a pause
        frozen = await bench.until(lambda m: m.running + m.waiting == 1)
        assert frozen.running == 1
        assert frozen.kv_usage_fraction > 0
        assert frozen.preemptions_total == before.preemptions_total

    async def test_pause_keep_can_drop_the_kv(self, engine: Engine, bench: EngineUnderTest) -> None:
        run = bench.start(max_tokens=LONG_TOKENS)
        await bench.until_all_answer(run)
        await engine.pause(PauseMode.KEEP, drop_kv=True)
        assert await engine.is_paused()
        frozen_at = len(run.token_ids)
        await engine.resume()
        await _check_undisturbed(bench, run, frozen_at + 50)

    async def test_pause_abort_ends_running_and_waiting_requests(self, engine: Engine, bench: EngineUnderTest) -> None:
        running, waiting = await bench.fill()
        await engine.pause(PauseMode.ABORT)
        assert await engine.is_paused()
        assert [(await run.done()).finish_reason for run in (*running, *waiting)] == ["abort"] * (bench.seats + 2)
        assert all(0 < len(run.token_ids) < LONG_TOKENS for run in running)
        assert all(run.token_ids == [] for run in waiting)
        await bench.until(lambda m: m.running == 0 and m.kv_usage_fraction == 0)
        newcomer = bench.start(max_tokens=5)
        await bench.until(lambda m: m.running == 0)
        assert newcomer.token_ids == []
        await engine.resume()
        assert len((await newcomer.done()).token_ids) == 5

    async def test_pause_wait_lets_running_requests_finish(self, engine: Engine, bench: EngineUnderTest) -> None:
        running, waiting = await bench.fill(ENOUGH_TOKENS)
        await engine.pause(PauseMode.WAIT)
        assert [(await run.done()).finish_reason for run in running] == ["length"] * bench.seats
        assert await engine.is_paused()
        assert all(run.token_ids == [] for run in waiting)
        assert (await engine.metrics()).waiting == 2
        await engine.resume()
        assert [len((await run.done()).token_ids) for run in waiting] == [50, 50]

    async def test_preempted_requests_keep_their_tokens(self, engine: Engine, bench: EngineUnderTest) -> None:
        before = await engine.metrics()
        share = before.kv_capacity_tokens // bench.seats
        assert share + 300 < (bench.capabilities.max_model_len_tokens or 0), "the KV cache is too large to be filled"
        prompts = [[*PROMPT, *[seat] * (share - 300)] for seat in range(bench.seats)]
        for _ in range(5):  # on a busy host, the first request may end before the last is sent
            runs = [bench.start(prompt, max_tokens=OVERLAPPING_TOKENS) for prompt in prompts]
            together = [(await run.done()).token_ids for run in runs]
            if preempted := (await engine.metrics()).preemptions_total > before.preemptions_total:
                break
        assert preempted
        tokens = OVERLAPPING_TOKENS - 1
        assert together[-1][:tokens] == (await bench.run(prompts[-1], max_tokens=tokens)).token_ids

    async def test_invalid_requests_are_refused_with_an_error_object(self, bench: EngineUnderTest) -> None:
        too_long = [5] * ((bench.capabilities.max_model_len_tokens or 0) + 1)
        wrong = [{name: value} for name, values in WRONG_VALUES.items() for value in values]
        for body in [*wrong, {"prompt": too_long}, {"min_tokens": 50, "max_tokens": 10}]:
            await _check_refused(bench.start(**{"max_tokens": 5, **body}), 400)
        await _check_refused(bench.start(max_tokens=5, model="no-such-model"), 404)
        wrong_chats: list[dict[str, Any]] = [{"messages": []}, {"messages": "x"}, {"top_logprobs": 2}]
        for body in [*wrong_chats, {"max_tokens": 0}]:
            await _check_refused(bench.start(TEXT, chat=True, **{"max_tokens": 5, **body}), 400)

    async def test_tokenize_and_detokenize(self, engine: Engine) -> None:
        status, answer = await post(engine, "/tokenize", {"prompt": TEXT})
        assert status == 200
        assert answer["count"] == len(answer["tokens"])
        assert await engine.detokenize(answer["tokens"]) == TEXT
        assert (await post(engine, "/detokenize", {}))[0] == 400

    async def test_tokenized_chat_equals_its_prompt_tokens(self, engine: Engine, bench: EngineUnderTest) -> None:
        body = {"messages": [{"role": "user", "content": TEXT}]}
        _, answer = await post(engine, "/tokenize", body)
        assert (await bench.run(TEXT, chat=True, max_tokens=1)).prompt_token_ids == tuple(answer["tokens"])

    async def test_abort_endpoint_counts_ids_and_aborts_all_without_ids(
        self, engine: Engine, bench: EngineUnderTest
    ) -> None:
        assert await post(engine, "/abort_requests", {"request_ids": ["no", "body"]}) == (
            200,
            {"status": "aborted", "aborted": 2},
        )
        # A starved engine may answer only after it has generated all LONG_TOKENS; then nothing was aborted.
        for _ in range(ATTEMPTS):
            run = bench.start(max_tokens=LONG_TOKENS)
            await bench.until_all_answer(run)
            status, answer = await post(engine, "/abort_requests", {})
            assert status == 200
            await run.done()
            if answer["aborted"]:
                break
            assert run.finish_reason == "length"
        assert answer["aborted"] == 1
        assert run.finish_reason == "abort"
        assert len(run.token_ids) < LONG_TOKENS


async def _check_undisturbed(bench: EngineUnderTest, run: ConformanceRequest, tokens: int) -> None:
    """Check that the request reaches `tokens` tokens, and that they equal the tokens of the same request when it runs
    alone."""
    await bench.until_all_answer(run, tokens=tokens)
    await bench.abort(run)
    partial = run.token_ids
    assert (await bench.run(max_tokens=len(partial))).token_ids == partial


def _check_logprobs(run: ConformanceRequest, alternatives: int) -> None:
    for chunk in run.chunks:
        assert len(chunk.logprobs or ()) == len(chunk.token_ids)
        for item in chunk.logprobs or ():
            assert item.logprob <= 0
            assert 1 <= len(item.top) <= alternatives
            assert item.token in dict(item.top)  # greedy: the chosen token is among the likeliest


async def _check_refused(run: ConformanceRequest, status: int) -> None:
    with pytest.raises(RequestRefused) as refusal:
        await run.done()
    assert refusal.value.status == status
    error = refusal.value.body["error"]
    assert error["message"]
    assert error["type"]
    assert error["code"] == status
