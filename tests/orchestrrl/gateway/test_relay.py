"""One request's client receives the correct answer, despite engine failures and moves."""

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
async def test_only_non_streamed_requests_use_coalesced_chunks(stream: bool, coalesce_tokens: int) -> None:
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


async def test_undisturbed_request() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
    assert len(w.gateway.ledger) == 0
    assert [summary.generated_tokens for summary in w.gateway.ledger.finished] == [len(job.records[0].generated_ids)]


@pytest.mark.parametrize("tokens_before", range(12))
async def test_move_after_any_token_keeps_tokens_text_and_logprobs(tokens_before: int) -> None:
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
async def test_two_moves_inside_one_character_keep_the_text(first: int, further: int) -> None:
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


async def test_two_moves_keep_min_tokens_with_several_tokens_per_step() -> None:
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


async def test_moved_chat_continues_as_a_completion() -> None:
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


async def test_moved_chat_without_max_tokens_may_fill_the_context() -> None:
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


async def test_chat_without_max_tokens_stays_if_context_length_is_unknown() -> None:
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


async def test_moved_waiting_request_is_sent_unchanged() -> None:
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


async def test_running_request_whose_answer_would_change_stays() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20, presence_penalty=0.5)) as job:
        await w.settle()
        await w.step()
        result = await move(w, "e1")
        assert not result.done
        assert "presence_penalty" in result.detail
        await finish(w, job)
        assert job.records[0].attempt == 1


async def test_move_of_a_finished_request_is_refused() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=2)) as job:
        await finish(w, job)
        result = await move(w, "e1", source="e0")
        assert not result.done
        assert result.detail == "the request finished before the move"
    assert (await move(w, "e1", source="e0")).detail == "the request finished before the move"
    assert (await move(w, "e1", request_id="never", source="e0")).detail == "no such request"


async def test_second_of_two_concurrent_moves_is_refused() -> None:
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


async def test_request_returns_if_destination_refuses_it() -> None:
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


async def test_waiting_request_refused_late_continues_elsewhere() -> None:
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


async def test_request_returns_if_destination_is_dead() -> None:
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


async def test_move_to_same_draining_or_unknown_engine_is_refused() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        await w.step()
        assert "already" in (await move(w, "e0")).detail
        assert "not in the routes" in (await move(w, "e7")).detail
        assert "must be assigned to engine e1" in (await move(w, "e0", source="e1")).detail
        assert job.records[0].attempt == 1


async def test_answer_complete_at_the_cut_ends_without_another_attempt() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=5)) as job:
        await w.settle()
        for _ in range(4):
            await w.step()
        # The engine has generated the last token, and dies before it sends the finish_reason.
        (attempt,) = w.engines["e0"].attempts.values()
        attempt.left = 100
        w.engines["e0"].step()
        await w.settle()
        w.engines["e0"].die()
        await w.settle()
        assert job.done
        assert_undisturbed(job, PROMPT, 5)
        assert not w.engines["e1"].seen


async def test_requests_of_a_dead_engine_continue() -> None:
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


async def test_gateway_holds_a_request_while_no_engine_is_usable() -> None:
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


async def test_request_fails_after_too_long_without_an_engine() -> None:
    w = world(1, engine_wait_s=30.0)
    w.engines["e0"].dead = True
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=40)) as job:
        await w.settle()
        await w.clock.advance(31.0)
        assert job.failure is not None
        assert job.failure.status == 503
        assert job.failure.error["error"]["code"] == 503


async def test_consecutive_failed_attempts_back_off() -> None:
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


async def test_request_that_kills_engines_fails_after_few_attempts() -> None:
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


async def test_engine_refusal_is_forwarded_unchanged() -> None:
    w = world()
    body = {"error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}}
    for engine in w.engines.values():
        engine.refuses = RequestRefused("no such model", 404, body)
    async with w.gateway.request_group(w.ask(prompt=PROMPT)) as job:
        await w.settle()
        assert job.failure is not None
        assert job.failure.status == 404
        assert job.failure.error == body


async def test_immovable_undelivered_answer_starts_over() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20, presence_penalty=1.0)) as job:
        await w.settle()
        for _ in range(5):
            await w.step()
        w.engines["e0"].die()
        await w.settle()
        assert not job.records[0].generated_ids
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 20)


async def test_immovable_partly_delivered_answer_is_an_error() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20, presence_penalty=1.0, stream=True)) as job:
        await w.settle()
        await w.step()
        assert job.records[0].take_undelivered()
        w.engines["e0"].die()
        await w.settle()
        assert job.failure is not None
        assert job.failure.status == 502
        assert "presence_penalty" in job.failure.error["error"]["message"]


async def test_request_aborted_by_another_client_continues() -> None:
    w = world(1)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        for _ in range(5):
            await w.step()
        w.engines["e0"].give_up_all()
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 20)


async def test_engine_with_new_address_is_rechecked_while_old_one_is() -> None:
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


async def test_request_leaves_a_stalled_engine() -> None:
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


async def test_paused_engine_is_not_stalled() -> None:
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


async def test_waiting_request_is_not_stalled() -> None:
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


async def test_client_disconnect_frees_the_engine() -> None:
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


async def test_n_answers_have_distinct_seeds_and_ids() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=4, n=3, seed=10)) as job:
        await finish(w, job)
        assert [record.id for record in job.records] == ["r-0", "r-1", "r-2"]
    seeds = sorted(request.body["seed"] for engine in w.engines.values() for request in engine.seen)
    assert seeds == [10, 11, 12]
    assert all("n" not in request.body for engine in w.engines.values() for request in engine.seen)


async def test_request_cancelled_twice_leaves_no_state() -> None:
    w = world()

    async def asked() -> None:
        await w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)).run()

    asking = asyncio.create_task(asked())
    await w.settle()
    await w.step()
    asking.cancel()
    await asyncio.sleep(0)  # it is being cancelled, and is cancelled again
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await w.settle()
    assert len(w.gateway.ledger) == 0
    assert all(not backend.records for backend in w.gateway.fleet)
    assert "r~1" in w.engines["e0"].aborted


async def test_request_avoids_engines_with_too_short_context() -> None:
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
        assert (result.done, result.detail) == (
            False,
            "the request may exceed the 40-token context of engine e2",
        )
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        assert job.records[0].engine == "e0"
    # It is still used if there is no other engine.
    w.engines["e1"].die()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.settle()
        assert job.records[0].engine in ("e0", "e2")


async def test_moved_request_is_sent_before_the_text_at_the_cut_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = world()
    decode, answered = w.engines["e1"].detokenize, asyncio.Event()

    async def slow(token_ids: Sequence[int]) -> str:
        await answered.wait()
        return await decode(token_ids)

    monkeypatch.setattr(w.engines["e1"], "detokenize", slow)
    for engine in w.engines.values():
        engine.tokens_per_step = 3  # for a chunk of several tokens, detokenize decides
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


async def test_client_disconnect_while_decoding_the_cut_leaves_no_state(
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
