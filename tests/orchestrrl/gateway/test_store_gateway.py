"""Requests that are cut after any number of tokens and repeated at another gateway on the same ledger. The answer is
the
undisturbed one, and stored tokens are not generated again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.ledger import store as store_module
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.ledger.store import LedgerStore, RetentionPolicy
from orchestrrl.gateway.moves.movable import sampling_fields
from tests.orchestrrl.gateway.fakes import (
    EOS,
    RunningGroup,
    World,
    chat_prompt,
    logprob_of,
    prompt_of,
    undisturbed,
    world,
)

PROMPT = "12 ab"
MAX_TOKENS = 24
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[CompletionEndpoint, dict[str, Any]] = {
    CompletionEndpoint.COMPLETIONS: {
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "min_tokens": MAX_TOKENS,
        "logprobs": 0,
    },
    CompletionEndpoint.CHAT: {
        "messages": MESSAGES,
        "max_tokens": MAX_TOKENS,
        "min_tokens": MAX_TOKENS,
        "logprobs": True,
    },
    CompletionEndpoint.GENERATE: {
        "token_ids": list(PROMPT.encode()),
        "sampling_params": {"max_tokens": MAX_TOKENS, "min_tokens": MAX_TOKENS, "logprobs": 1},
        "output_mode": "text",
    },
}
PROMPTS = {
    CompletionEndpoint.COMPLETIONS: list(PROMPT.encode()),
    CompletionEndpoint.CHAT: chat_prompt(MESSAGES),
    CompletionEndpoint.GENERATE: list(PROMPT.encode()),
}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BATCH_S", 0.001)


async def begun(path: Path) -> World:
    there = world()
    there.gateway.store = LedgerStore(RetentionPolicy(path, from_s=0.0), there.clock)
    there.gateway.store.start()
    return there


async def ended(there: World) -> None:
    assert there.gateway.store is not None
    await there.gateway.store.close()


def job_of(there: World, endpoint: CompletionEndpoint, **more: Any) -> RunningGroup:
    body = {**BODIES[endpoint], **more}
    return there.gateway.request_group(there.ask(endpoint, **body), body)


async def answered(there: World, job: RunningGroup) -> None:
    running = asyncio.create_task(job.run())
    while not running.done():
        await there.step()
        await asyncio.sleep(0)
    await running


def check(record: RequestRecord, endpoint: CompletionEndpoint) -> None:
    tokens, text, reason = undisturbed(PROMPTS[endpoint], MAX_TOKENS, min_tokens=MAX_TOKENS)
    assert (list(record.generated_ids), record.text, record.finish_reason) == (tokens, text, reason)
    context = PROMPTS[endpoint]
    expected = [logprob_of([*context, *tokens[:index]], token) for index, token in enumerate(tokens)]
    assert record.logprobs is not None
    assert [item.logprob for item in record.logprobs] == [item.logprob for item in expected]


@pytest.mark.parametrize("endpoint", list(CompletionEndpoint))
@pytest.mark.parametrize("stream", [False, True])
async def test_answer_cut_after_any_number_of_tokens_is_resumed(
    tmp_path: Path, endpoint: CompletionEndpoint, stream: bool
) -> None:
    """Including cuts inside a character, which has several tokens here."""
    for cut in range(1, MAX_TOKENS - 1):
        first = await begun(tmp_path / f"ledger{cut}")
        job = job_of(first, endpoint, stream=stream)
        running = asyncio.create_task(job.run())
        await first.settle()
        for _ in range(cut):
            await first.step()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await ended(first)

        then = await begun(tmp_path / f"ledger{cut}")
        again = job_of(then, endpoint, stream=not stream)
        await answered(then, again)
        (record,) = again.records
        check(record, endpoint)
        if not stream:
            deltas = record.take_undelivered()
            assert "".join(delta.text for delta in deltas) == record.text
            assert [token for delta in deltas for token in delta.chunk.token_ids] == list(record.generated_ids)
        (request,) = [request for engine in then.engines.values() for request in engine.seen]
        assert len(prompt_of(request)) == len(PROMPTS[endpoint]) + cut
        assert sampling_fields(request.endpoint, request.body)["max_tokens"] == MAX_TOKENS - cut
        if endpoint is CompletionEndpoint.GENERATE:
            assert record.choice_fields["sampling_mask"] == [[token] for token in record.generated_ids]
        await ended(then)


async def test_stored_answer_needs_no_engine_and_keeps_its_creation_time(tmp_path: Path) -> None:
    first = await begun(tmp_path / "ledger")
    await answered(first, job_of(first, CompletionEndpoint.COMPLETIONS))
    await ended(first)
    then = await begun(tmp_path / "ledger")
    await then.clock.advance(500.0)
    again = job_of(then, CompletionEndpoint.COMPLETIONS, stream=True)
    received: list[RequestRecord] = []
    await again.run(received.append)
    check(again.records[0], CompletionEndpoint.COMPLETIONS)
    assert received
    assert not any(engine.seen for engine in then.engines.values())
    assert again.request.form.created_unix_s == 1000
    await ended(then)


async def test_request_with_one_finished_sample_is_resumed(tmp_path: Path) -> None:
    first = await begun(tmp_path / "ledger")
    job = job_of(first, CompletionEndpoint.COMPLETIONS, n=2, seed=None)
    async with job:
        await first.settle()
        job.records[0].finish("stop", EOS, 0.0)
        for _ in range(5):
            await first.step()
    await ended(first)
    then = await begun(tmp_path / "ledger")
    again = job_of(then, CompletionEndpoint.COMPLETIONS, n=2, seed=None)
    await answered(then, again)
    assert (again.records[0].finish_reason, again.records[0].stop_reason) == ("stop", EOS)
    check(again.records[1], CompletionEndpoint.COMPLETIONS)
    await ended(then)
