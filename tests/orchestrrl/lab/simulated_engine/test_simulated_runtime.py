"""The simulated engine's runtime in virtual time, with steps of known duration."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.lab.simulated_engine.endings import AnswerPart
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.requests import read_completion
from orchestrrl.lab.simulated_engine.runtime import Runtime, SimulatedAnswer
from orchestrrl.lab.simulated_engine.sampling import SimulatedRequest
from orchestrrl.lab.simulated_engine.tokens import EOS, LengthModel, TokenModel

STEP_S = 0.5
MODEL = TokenModel(lengths=LengthModel((0.0, 1.0), (12, 12)))
OPTIONS = SimulatedOptions(
    alpha_s=STEP_S, beta_s=0.0, gamma_s=0.0, kv_capacity_tokens=4096, max_model_len_tokens=1000, tick_s=0.1
)
PROMPT = [1, 2, 3]


def ask(**body: object) -> SimulatedRequest:
    (request,) = read_completion(
        CompletionEndpoint.COMPLETIONS, {"prompt": PROMPT, "ignore_eos": True, **body}, OPTIONS, MODEL
    ).requests
    return request


@asynccontextmanager
async def running(max_num_seqs: int = 4, speed: float = 1.0) -> AsyncIterator[tuple[Runtime, VirtualClock]]:
    clock = VirtualClock()
    runtime = Runtime(OPTIONS.model_copy(update={"max_num_seqs": max_num_seqs, "speed": speed}), MODEL, clock)
    pace = asyncio.create_task(runtime.run())
    yield runtime, clock
    pace.cancel()


async def _all(answer: SimulatedAnswer) -> tuple[list[int], AnswerPart]:
    token_ids: list[int] = []
    async for part in answer.parts():
        token_ids += part.token_ids
    return token_ids, part


async def test_tokens_follow_the_clock() -> None:
    async with running() as (runtime, clock):
        answer = runtime.submit(ask(max_tokens=10), "a")
        await clock.advance(STEP_S * 4 + 0.2)
        assert answer.made == 4
        await clock.advance(STEP_S * 6)
        assert answer.finished
        token_ids, last = await _all(answer)
        assert (len(token_ids), last.finish_reason) == (10, "length")
        assert (runtime.running, runtime.waiting, runtime.kv_usage_fraction) == (0, 0, 0.0)
        assert runtime.finished_total == {"stop": 0, "length": 1, "abort": 0}


async def test_speed_scales_time() -> None:
    async with running(speed=10.0) as (runtime, clock):
        answer = runtime.submit(ask(max_tokens=100), "a")
        await clock.advance(STEP_S * 2 + 0.2)
        assert answer.made == pytest.approx(20, abs=4)  # a tick is two steps


async def test_idle_engine_accumulates_no_time() -> None:
    async with running() as (runtime, clock):
        await clock.advance(1000)
        answer = runtime.submit(ask(max_tokens=10), "a")
        await clock.advance(STEP_S + 0.2)
        assert answer.made == 1


async def test_finished_response_continues_with_eos_only() -> None:
    async with running() as (runtime, clock):
        whole = runtime.submit(ask(ignore_eos=False, max_tokens=50), "a")
        await clock.advance(STEP_S * 13)
        token_ids, last = await _all(whole)
        assert (len(token_ids), token_ids[-1], last.finish_reason) == (12, EOS, "stop")
        rest = runtime.submit(ask(prompt=[*PROMPT, *token_ids[:-2]], ignore_eos=False, max_tokens=50), "b")
        await clock.advance(STEP_S * 3)
        assert (await _all(rest))[0] == token_ids[-2:]


async def test_min_tokens_delay_the_end() -> None:
    async with running() as (runtime, clock):
        answer = runtime.submit(ask(ignore_eos=False, min_tokens=20, max_tokens=50), "a")
        await clock.advance(STEP_S * 30)
        assert len((await _all(answer))[0]) == 21


async def test_abort_by_engine_id_aborts_all_requests_with_it() -> None:
    async with running(max_num_seqs=1) as (runtime, clock):
        first, second, other = (runtime.submit(ask(max_tokens=10), name) for name in ("a", "a", "b"))
        await clock.advance(STEP_S * 2 + 0.2)
        runtime.abort(["a", "unknown"])
        assert [len((await _all(answer))[0]) for answer in (first, second)] == [2, 0]
        await clock.advance(STEP_S * 11)
        assert other.finished


async def test_keep_preempts_unless_the_cache_is_kept() -> None:
    async with running(max_num_seqs=2) as (runtime, clock):
        answers = [runtime.submit(ask(max_tokens=10), name) for name in "abc"]
        await clock.advance(STEP_S * 2 + 0.2)
        await runtime.pause(PauseMode.KEEP, clear_cache=False)
        assert (runtime.running, runtime.waiting) == (2, 1)
        await runtime.pause(PauseMode.KEEP)
        assert (runtime.running, runtime.waiting, runtime.kv_usage_fraction) == (0, 3, 0.0)
        assert runtime.scheduler.preemptions_total == 2
        await clock.advance(100)
        assert [answer.made for answer in answers] == [2, 1, 0]  # the second joined at the second step
        runtime.resume()
        await clock.advance(STEP_S * 30)
        assert all(answer.finished for answer in answers)


async def test_wait_drains_running_and_holds_waiting_requests() -> None:
    async with running(max_num_seqs=1) as (runtime, clock):
        first, second = (runtime.submit(ask(max_tokens=10), name) for name in "ab")
        await clock.advance(STEP_S * 2 + 0.2)
        pausing = asyncio.create_task(runtime.pause(PauseMode.WAIT))
        await clock.advance(STEP_S)
        third = runtime.submit(ask(max_tokens=10), "c")
        assert not pausing.done()
        await clock.advance(STEP_S * 10)
        assert pausing.done()
        assert (first.finished, second.made, third.made, runtime.waiting) == (True, 0, 0, 2)
        runtime.resume()
        await clock.advance(STEP_S * 25)
        assert (second.finished, third.finished) == (True, True)


async def test_abort_mode_ends_all_and_holds_new_requests() -> None:
    async with running(max_num_seqs=1) as (runtime, clock):
        answers = [runtime.submit(ask(max_tokens=10), name) for name in "ab"]
        await clock.advance(STEP_S * 2 + 0.2)
        await runtime.pause(PauseMode.ABORT)
        assert [(await _all(answer))[1].finish_reason for answer in answers] == ["abort", "abort"]
        newcomer = runtime.submit(ask(max_tokens=10), "c")
        await clock.advance(STEP_S * 5)
        assert (newcomer.made, runtime.waiting) == (0, 1)
        runtime.resume()
        await clock.advance(STEP_S * 11)
        assert newcomer.finished
