"""One request's life: what its client gets, whatever happens to the engines."""

import asyncio
from collections.abc import Sequence

import pytest

from orchestrrl.core.operations import (
    EngineRoute,
    OperationItemResult,
)
from orchestrrl.engines.base import CompletionEndpoint, RequestRefused
from planner.model import EngineId, RequestId, RequestMove, RequestState
from tests.orchestrrl.gateway.fakes import RunningGroup, World, chat_prompt, undisturbed, world

PROMPT = list(b"what is the answer?")


def move(
    w: World, target: str, request_id: str = "r", source: str | None = None
) -> "asyncio.Task[OperationItemResult]":
    async def run() -> OperationItemResult:
        record = w.gateway.ledger.get(RequestId(request_id))
        here = source or (record.engine if record else None) or ""
        (result,) = await w.gateway.move([RequestMove(RequestId(request_id), EngineId(here), EngineId(target))])
        return result

    return asyncio.create_task(run())


async def finish(w: World, job: RunningGroup, steps: int = 400) -> None:
    for _ in range(steps):
        if job.done:
            return
        await w.step()
        await w.clock.advance(0.1)
    raise AssertionError(f"not done after {steps} steps: {job.records}")


def assert_undisturbed(job: RunningGroup, prompt: list[int], max_tokens: int) -> None:
    (record,) = job.records
    tokens, text, finish_reason = undisturbed(prompt, max_tokens)
    assert list(record.generated_ids) == tokens
    assert record.text == text
    assert record.finish_reason == finish_reason


@pytest.mark.parametrize(("stream", "coalesce_tokens"), [(False, 8), (True, 1)])
async def test_only_what_is_not_streamed_is_asked_for_in_chunks_of_several_tokens(
    stream: bool, coalesce_tokens: int
) -> None:
    w = world(coalesce_tokens=8)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30, stream=stream)):
        await w.step()
        await w.step()
        (source,) = [name for name, engine in w.engines.items() if engine.attempts]
        target = "e1" if source == "e0" else "e0"
        moving = asyncio.create_task(w.gateway.move([RequestMove(RequestId("r"), EngineId(source), EngineId(target))]))
        await w.settle()
        await w.step()
        assert (await moving)[0].done
        seen = [request.coalesce_tokens for engine in w.engines.values() for request in engine.seen]
        assert seen == [coalesce_tokens] * 2


async def test_a_request_that_nothing_happens_to() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
    assert len(w.gateway.ledger) == 0
    assert [summary.generated_tokens for summary in w.gateway.ledger.finished] == [len(job.records[0].generated_ids)]


@pytest.mark.parametrize("tokens_before", range(12))
async def test_a_move_after_any_token_leaves_no_trace_in_tokens_text_and_logprobs(tokens_before: int) -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30, logprobs=1)) as job:
        await w.settle()
        for _ in range(tokens_before):
            await w.step()
        moving = move(w, "e1", source="e0")
        await w.settle()
        await w.step()
        result = await moving
        assert result.done, result.detail
        assert result.recomputed_tokens == (len(PROMPT) + tokens_before if tokens_before else 0)
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
        (record,) = job.records
        assert record.moves == 1
        assert record.logprobs is not None
        assert [item.token for item in record.logprobs] == [f"<{token}>" for token in record.generated_ids]
        assert "r~1" in w.engines["e0"].aborted
        continued = w.engines["e1"].seen[-1]
        assert continued.body["max_tokens"] == 30 - tokens_before
        assert not w.engines["e0"].attempts


@pytest.mark.parametrize("first", range(1, 7))
@pytest.mark.parametrize("further", range(1, 9))
async def test_two_moves_may_both_fall_inside_a_character(first: int, further: int) -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        for tokens, source, target in ((first, "e0", "e1"), (further, "e1", "e0")):
            for _ in range(tokens):
                await w.step()
            moving = move(w, target, source=source)
            await w.settle()
            await w.step()
            assert (await moving).done
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)


async def test_min_tokens_and_several_tokens_a_step_across_two_moves() -> None:
    w = world()
    for engine in w.engines.values():
        engine.tokens_per_step = 3
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=200, min_tokens=150)) as job:
        await w.settle()
        for target in ("e1", "e0", "e1"):
            await w.step()
            moving = move(w, target)
            await w.settle()
            await w.step()
            assert (await moving).done
        await finish(w, job)
        (record,) = job.records
        tokens, text, _ = undisturbed(PROMPT, 200, min_tokens=150)
        assert list(record.generated_ids) == tokens
        assert record.text == text


async def test_a_chat_request_goes_on_as_a_completion() -> None:
    w = world()
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_completion_tokens": 25, "logprobs": True, "top_logprobs": 2, "temperature": 0.0}
    async with w.gateway.request_group(w.ask(CompletionEndpoint.CHAT, **body)) as job:
        await w.settle()
        await w.step()
        await w.step()
        moving = move(w, "e1")
        await w.settle()
        await w.step()
        assert (await moving).done
        continued = w.engines["e1"].seen[-1]
        assert continued.endpoint is CompletionEndpoint.COMPLETIONS
        assert continued.body["max_tokens"] == 23
        assert continued.body["logprobs"] == 2
        assert continued.body["temperature"] == 0.0
        assert not continued.body.keys() & {"messages", "top_logprobs", "max_completion_tokens"}
        await finish(w, job)
        assert_undisturbed(job, chat_prompt(messages), 25)


async def test_chat_without_max_tokens_may_fill_the_context_wherever_it_runs() -> None:
    w = world()
    messages = [{"role": "user", "content": "hello"}]
    async with w.gateway.request_group(w.ask(CompletionEndpoint.CHAT, messages=messages)) as job:
        await w.settle()
        await w.step()
        assert job.records[0].max_tokens == 4096 - len(chat_prompt(messages))
        moving = move(w, "e1")
        await w.settle()
        await w.step()
        assert (await moving).done
        assert w.engines["e1"].seen[-1].body["max_tokens"] == 4096 - len(chat_prompt(messages)) - 1


async def test_chat_without_max_tokens_stays_where_the_context_length_is_unknown() -> None:
    w = world()
    for engine in w.engines.values():
        engine.model_length = None
    async with w.gateway.request_group(
        w.ask(CompletionEndpoint.CHAT, messages=[{"role": "user", "content": "hello"}])
    ) as job:
        await w.settle()
        await w.step()
        result = await move(w, "e1")
        assert not result.done
        assert "context length" in result.detail
        assert job.records[0].fixed_because


async def test_a_waiting_request_is_asked_again_as_it_was() -> None:
    w = world()
    w.engines["e0"].max_sequences = 0
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20, presence_penalty=0.5)) as job:
        await w.settle()
        moving = move(w, "e1")
        await w.settle()
        await w.clock.advance(2.5)
        result = await moving
        assert result.done
        assert result.recomputed_tokens == 0
        assert w.engines["e1"].seen[-1].body == w.engines["e0"].seen[-1].body
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 20)


async def test_a_running_request_that_would_change_its_answer_stays() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20, presence_penalty=0.5)) as job:
        await w.settle()
        await w.step()
        result = await move(w, "e1")
        assert not result.done
        assert "presence_penalty" in result.detail
        await finish(w, job)
        assert job.records[0].attempt == 1


async def test_finished_before_the_move() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=2)) as job:
        await finish(w, job)
        result = await move(w, "e1", source="e0")
        assert not result.done
        assert result.detail == "finished before the move"
    assert (await move(w, "e1", source="e0")).detail == "finished before the move"
    assert (await move(w, "e1", request_id="never", source="e0")).detail == "no such request"


async def test_the_second_of_two_moves_at_once_is_refused() -> None:
    w = world(3)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        await w.step()
        first = move(w, "e1", source="e0")
        second = move(w, "e2", source="e0")
        await w.settle()
        await w.step()
        assert (await first).done
        assert "already" in (await second).detail
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 20)


async def test_a_destination_that_refuses_sends_the_request_back() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        await w.step()
        w.engines["e1"].refuses = RequestRefused("too long", 400, {"error": {"message": "too long"}})
        moving = move(w, "e1")
        await w.settle()
        await w.step()
        result = await moving
        assert not result.done
        assert "too long" in result.detail
        assert job.records[0].engine == "e0"
        assert job.records[0].moves == 0
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 20)


async def test_a_waiting_request_that_its_destination_refuses_late_goes_on_elsewhere() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        moving = move(w, "e1")
        await w.clock.advance(w.gateway.limits.move_answer_s)
        assert (await moving).done
        (attempt,) = w.engines["e1"].attempts.values()
        attempt.chunks.put_nowait(RequestRefused("too long", 400, {"error": {"message": "too long"}}))
        await w.settle()
        assert (job.failure, job.records[0].engine) == (None, "e0")
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 20)


async def test_a_destination_that_is_dead_sends_the_request_back() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        await w.step()
        w.engines["e1"].dead = True
        moving = move(w, "e1")
        await w.settle()
        await w.step()
        assert not (await moving).done
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 20)


async def test_a_move_to_where_it_is_to_a_draining_engine_or_to_none() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        await w.step()
        assert "already" in (await move(w, "e0")).detail
        assert "not in the routes" in (await move(w, "e7")).detail
        assert "is now on" in (await move(w, "e0", source="e1")).detail
        assert job.records[0].attempt == 1


async def test_max_tokens_reached_at_the_cut() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=5)) as job:
        await w.settle()
        for _ in range(4):
            await w.step()
        # The engine has made the last token, and dies before it says that this was all.
        (attempt,) = w.engines["e0"].attempts.values()
        attempt.left = 100
        w.engines["e0"].step()
        await w.settle()
        w.engines["e0"].die()
        await w.settle()
        assert job.done
        assert_undisturbed(job, PROMPT, 5)
        assert not w.engines["e1"].seen


async def test_an_engine_that_dies_has_its_requests_continued() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=40)) as job:
        await w.settle()
        for _ in range(7):
            await w.step()
        w.engines["e0"].die()
        await w.settle()
        assert job.records[0].engine == "e1"
        assert [backend.id for backend in w.fleet if backend.usable] == ["e1"]
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 40)
        w.engines["e0"].revive()
        await w.clock.advance(6.0)
        assert [backend.id for backend in w.fleet if backend.usable] == ["e0", "e1"]


async def test_without_any_engine_the_gateway_holds_the_request_for_a_while() -> None:
    w = world(1, engine_wait_s=30.0)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=40)) as job:
        await w.settle()
        for _ in range(7):
            await w.step()
        w.engines["e0"].die()
        await w.settle()
        (record,) = job.records
        assert record.engine is None
        assert record.view(0.0).state is RequestState.WAITING
        await w.clock.advance(20.0)
        w.engines["e0"].revive()
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 40)


async def test_without_any_engine_for_too_long_the_client_is_told() -> None:
    w = world(1, engine_wait_s=30.0)
    w.engines["e0"].dead = True
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=40)) as job:
        await w.settle()
        await w.clock.advance(31.0)
        assert job.failure is not None
        assert job.failure.status == 503
        assert job.failure.error["error"]["code"] == 503


async def test_attempts_that_fail_in_a_row_are_further_and_further_apart() -> None:
    w = world(9, failures=9, retry_first_s=1.0, retry_cap_s=5.0)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=40)):
        await w.settle()
        waited_s = []
        for attempts in range(1, 7):
            failed_s = w.clock.now_s()
            for engine in w.engines.values():
                if engine.attempts:
                    engine.die()
            await w.settle()
            while sum(len(engine.seen) for engine in w.engines.values()) == attempts:
                await w.clock.advance(0.25)
                await w.settle()
            waited_s.append(w.clock.now_s() - failed_s)
        assert waited_s == [0, 1, 2, 4, 5, 5]


async def test_a_request_that_kills_engines_kills_few() -> None:
    w = world(9, failures=3)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=40)) as job:
        for _ in range(9):
            await w.settle()
            for engine in w.engines.values():
                if engine.attempts:
                    engine.die()
            await w.clock.advance(1.0)
        assert job.failure is not None
        assert "consecutive attempts failed" in job.failure.error["error"]["message"]
        assert sum(engine.dead for engine in w.engines.values()) == 4


async def test_a_refusal_is_passed_on_as_it_is() -> None:
    w = world()
    body = {"error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}}
    for engine in w.engines.values():
        engine.refuses = RequestRefused("no such model", 404, body)
    async with w.gateway.request_group(w.ask(prompt=PROMPT)) as job:
        await w.settle()
        assert job.failure is not None
        assert job.failure.status == 404
        assert job.failure.error == body


async def test_an_answer_that_cannot_be_continued_starts_over_while_the_client_has_seen_nothing() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20, stop=["zzz"])) as job:
        await w.settle()
        for _ in range(5):
            await w.step()
        w.engines["e0"].die()
        await w.settle()
        assert not job.records[0].generated_ids
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 20)


async def test_an_answer_that_cannot_be_continued_and_was_delivered_in_part_is_an_error() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20, stop=["zzz"], stream=True)) as job:
        await w.settle()
        await w.step()
        assert job.records[0].take_undelivered()
        w.engines["e0"].die()
        await w.settle()
        assert job.failure is not None
        assert job.failure.status == 502
        assert "stop string" in job.failure.error["error"]["message"]


async def test_what_somebody_else_aborts_on_the_engine_goes_on() -> None:
    w = world(1)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        for _ in range(5):
            await w.step()
        w.engines["e0"].give_up_all()
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 20)


async def test_an_engine_that_moved_house_while_its_old_one_was_rechecked_is_rechecked_too() -> None:
    w = world(3)
    old = w.fleet.get(EngineId("e0"))
    assert old is not None
    w.fleet.suspect(old, "no answer")
    w.gateway.set_routes([EngineRoute(EngineId("e0"), "http://e2"), EngineRoute(EngineId("e1"), "http://e1")])
    new = w.fleet.get(EngineId("e0"))
    assert new is not None
    w.fleet.suspect(new, "no answer yet")
    await w.clock.advance(1.0)
    assert (new.engine.url, new.suspect_because) == ("http://e2", "")


async def test_an_engine_that_hangs_is_left() -> None:
    w = world(stall_s=40.0)
    watching = asyncio.create_task(w.gateway.watch())
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        await w.step()
        w.engines["e0"].hangs = True
        await w.clock.advance(39.0)
        assert job.records[0].engine == "e0"
        await w.clock.advance(20.0)
        assert job.records[0].engine == "e1"
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 20)
    watching.cancel()


async def test_a_paused_engine_does_not_hang() -> None:
    w = world(stall_s=40.0)
    watching = asyncio.create_task(w.gateway.watch())
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        await w.step()
        w.engines["e0"].paused = True
        await w.clock.advance(300.0)
        assert job.records[0].engine == "e0"
        w.engines["e0"].paused = False
        await finish(w, job)
        assert job.records[0].attempt == 1
    watching.cancel()


async def test_a_request_that_waits_its_turn_is_not_taken_for_hanging() -> None:
    w = world(1, stall_s=40.0)
    w.engines["e0"].max_sequences = 1
    watching = asyncio.create_task(w.gateway.watch())
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=2000, min_tokens=2000)):
        await w.settle()
        async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=5, request_id="later")) as later:
            for _ in range(20):
                await w.step()
                await w.clock.advance(10.0)
            assert later.records[0].attempt == 1
    watching.cancel()


async def test_a_client_that_leaves_frees_the_engine() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        await w.step()
    await w.settle()
    assert not w.engines["e0"].attempts
    assert w.engines["e0"].aborted == ["r~1"]
    assert len(w.gateway.ledger) == 0
    assert job.records[0].finish_reason == "abort"
    assert all(backend.running == 0 and backend.waiting == 0 and backend.running_tokens == 0 for backend in w.fleet)


async def test_n_answers_have_their_own_seeds_and_ids() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=4, n=3, seed=10)) as job:
        await finish(w, job)
        assert [record.id for record in job.records] == ["r-0", "r-1", "r-2"]
    seeds = sorted(request.body["seed"] for engine in w.engines.values() for request in engine.seen)
    assert seeds == [10, 11, 12]
    assert all("n" not in request.body for engine in w.engines.values() for request in engine.seen)


async def test_who_is_cancelled_twice_leaves_nothing_behind() -> None:
    w = world()

    async def asked() -> None:
        await w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)).run()

    asking = asyncio.create_task(asked())
    await w.settle()
    await w.step()
    asking.cancel()
    await asyncio.sleep(0)  # it has begun to leave, and is cancelled again
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await w.settle()
    assert len(w.gateway.ledger) == 0
    assert all(not backend.records for backend in w.gateway.fleet)
    assert "r~1" in w.engines["e0"].aborted


async def test_an_answer_does_not_go_where_it_would_end_early() -> None:
    w = world(3)
    w.engines["e0"].model_length = w.engines["e2"].model_length = 40
    w.gateway.set_routes([])
    w.gateway.set_routes([EngineRoute(EngineId(name), engine.url) for name, engine in w.engines.items()])
    await w.settle()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        assert job.records[0].engine == "e1"
        await w.step()
        result = await move(w, "e2")
        assert (result.done, result.detail) == (False, "may exceed the context length of e2, 40 tokens")
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        assert job.records[0].engine == "e0"
    # Better there than nowhere.
    w.engines["e1"].die()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.settle()
        assert job.records[0].engine in ("e0", "e2")


async def test_a_request_goes_to_its_new_engine_before_the_text_at_the_cut_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = world()
    decode, answered = w.engines["e1"].detokenize, asyncio.Event()

    async def slow(token_ids: Sequence[int]) -> str:
        await answered.wait()
        return await decode(token_ids)

    monkeypatch.setattr(w.engines["e1"], "detokenize", slow)
    for engine in w.engines.values():
        engine.tokens_per_step = 3  # whether a chunk of several ends on a whole character has to be asked
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.step()
        (record,) = job.records
        moving = move(w, "e1", source="e0")
        await w.settle()
        assert len(w.engines["e1"].attempts) == 1
        await w.step()
        before = len(record.generated_ids)
        answered.set()
        await w.settle()
        assert len(record.generated_ids) > before
        assert (await moving).done
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)


async def test_a_client_that_leaves_while_the_text_at_the_cut_is_asked_for_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = world()
    left = asyncio.Event()

    async def never(token_ids: Sequence[int]) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return ""

    monkeypatch.setattr(w.engines["e1"], "detokenize", never)
    for engine in w.engines.values():
        engine.tokens_per_step = 3
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)):
        await w.settle()
        await w.step()
        moving = move(w, "e1", source="e0")
        await w.settle()
        await w.step()
    await w.settle()
    assert left.is_set()
    assert not w.engines["e1"].attempts
    assert not (await moving).done
