"""Requests with stop strings move and fail over, unless their text cannot be decoded."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.ledger.pieces import RecordCutter, give_back, put_together
from orchestrrl.gateway.moves import detokenizer
from orchestrrl.gateway.moves.movable import continued, immovable_because
from tests.orchestrrl.gateway.fakes import DecodeStream, World, chat_prompt, undisturbed, world
from tests.orchestrrl.gateway.stop_reference import reference_answer
from tests.orchestrrl.gateway.test_decoding import decode_by, dropped
from tests.orchestrrl.gateway.test_relay import PROMPT, finish, move

MAX_TOKENS = 60
TOKENS, TEXT, REASON = undisturbed(PROMPT, MAX_TOKENS)
STOP = TEXT[14:19]  # a text that occurs in the middle of the answer
MESSAGES = [{"role": "user", "content": "what?"}]


def expected(prompt: list[int], body: dict[str, Any]) -> tuple[list[int], str, str, str | None]:
    tokens, _, reason = undisturbed(prompt, MAX_TOKENS, min_tokens=body.get("min_tokens", 0))
    return reference_answer(body, tokens, DecodeStream(prompt).step, reason)


def answer_of(record: RequestRecord) -> tuple[list[int], str, str | None, Any]:
    return list(record.generated_ids), record.text, record.finish_reason, record.stop_reason


def asked(w: World, stop: Any = STOP, **body: Any) -> Any:
    return w.ask(prompt=PROMPT, max_tokens=MAX_TOKENS, stop=stop, **body)


async def change_engine(w: World, record: RequestRecord) -> None:
    moving = move(w, "e1" if record.engine == "e0" else "e0")
    await w.settle()
    await w.step()
    result = await moving
    assert result.done, result.detail


@pytest.mark.parametrize("body", [{}, {"include_stop_str_in_output": True}, {"min_tokens": 25}, {"stop": [STOP, "\0"]}])
@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_moved_answer_ends_at_its_stop_string(body: dict[str, Any], tokens_per_step: int, stream: bool) -> None:
    whole = expected(PROMPT, {"stop": STOP, **body})
    for cuts in range(1, len(whole[0]) // tokens_per_step, 4):
        w = world()
        for engine in w.engines.values():
            engine.tokens_per_step = tokens_per_step
        async with w.gateway.request_group(asked(w, stream=stream, logprobs=0, **body)) as job:
            await w.settle()
            (record,) = job.records
            for _ in range(cuts):
                await w.step()
            await change_engine(w, record)
            if not record.done:
                await w.step()
            if not record.done:
                await change_engine(w, record)
            await finish(w, job)
            assert answer_of(record) == whole
            assert len(record.logprobs or ()) == len(whole[0])
            assert not any(engine.attempts for engine in w.engines.values())
            assert "".join(delta.text for delta in record.take_undelivered()) == (whole[1] if stream else "")


async def test_moved_chat_ends_at_its_stop_string() -> None:
    prompt = chat_prompt(MESSAGES)
    stop = undisturbed(prompt, MAX_TOKENS)[1][5:8]
    w = world()
    ask = w.ask(CompletionEndpoint.CHAT, messages=MESSAGES, max_tokens=MAX_TOKENS, stop=[stop])
    async with w.gateway.request_group(ask) as job:
        await w.settle()
        await w.step()
        await w.step()
        await change_engine(w, job.records[0])
        await finish(w, job)
        assert answer_of(job.records[0]) == expected(prompt, {"stop": stop})


@pytest.mark.parametrize("tokens", range(1, 12, 3))
async def test_text_that_an_aborting_engine_flushes_is_withheld(tokens: int) -> None:
    w = world()
    async with w.gateway.request_group(asked(w, stream=True)) as job:
        await w.settle()
        for _ in range(tokens):
            await w.step()
        w.engines[str(job.records[0].engine)].give_up_all()
        await w.settle()
        await finish(w, job)
        assert answer_of(job.records[0]) == expected(PROMPT, {"stop": STOP})


async def test_stored_answer_ends_at_its_stop_string() -> None:
    w = world()
    async with w.gateway.request_group(asked(w)) as job:
        await w.settle()
        for _ in range(12):
            await w.step()
        piece = RecordCutter(0, job.records[0], prompt_wanted=True).cut()
        assert piece is not None
    again = asked(w)
    assert give_back(again.records[0], put_together([piece])[0], 0.0)
    async with w.gateway.request_group(again) as job:
        await w.settle()
        await finish(w, job)
        assert answer_of(job.records[0]) == expected(PROMPT, {"stop": STOP})


# --- text that cannot be decoded --------------------------------------------------------------------------------------


async def other_text(token_ids: Sequence[int]) -> str:
    return f"not the text of {len(token_ids)} tokens"


async def running(w: World, monkeypatch: pytest.MonkeyPatch, decode: Any, job: Any) -> RequestRecord:
    """Run the request for some steps, on engines that decode with `decode`."""
    monkeypatch.setattr(detokenizer, "ANSWER_WITHIN_S", 0.01)
    for engine in w.engines.values():
        decode_by(engine, decode)
    await w.settle()
    for _ in range(10):
        await w.step()
    (record,) = job.records
    assert isinstance(record, RequestRecord)
    return record


@pytest.mark.parametrize(("decode", "because"), [(dropped, "no engine decodes the text"), (other_text, "text differs")])
async def test_undecodable_request_stays_on_its_engine(
    decode: Any, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world()
    async with w.gateway.request_group(asked(w, stream=True)) as job:
        record = await running(w, monkeypatch, decode, job)
        result = await asyncio.wait_for(move(w, "e1" if record.engine == "e0" else "e0"), 10)
        assert not result.done
        assert because in result.detail
        await finish(w, job)
        assert answer_of(record) == expected(PROMPT, {"stop": STOP})
        assert record.attempt == 1


async def test_undecodable_request_starts_over_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world()
    async with w.gateway.request_group(asked(w)) as job:
        record = await running(w, monkeypatch, dropped, job)
        w.engines[str(record.engine)].die()
        await finish(w, job)
        assert answer_of(record) == expected(PROMPT, {"stop": STOP})
        assert record.immovable_because.startswith("stop: no engine decodes the text")


async def test_undecodable_stream_ends_with_an_error_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world()
    async with w.gateway.request_group(asked(w, stream=True)) as job:
        record = await running(w, monkeypatch, dropped, job)
        record.take_undelivered()
        w.engines[str(record.engine)].die()
        await finish(w, job)
        assert record.failure is not None
        assert "cannot continue on another engine: stop: no engine decodes" in str(record.failure.error)


async def test_missing_text_of_split_chunk_starts_the_answer_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines decode the text before the cut, and fail when a stop string ends in a chunk of several tokens."""
    w = world()
    calls = 0
    decode = w.engines["e0"].detokenize

    async def at_first(token_ids: Sequence[int]) -> str:
        nonlocal calls
        calls += 1
        return await (decode if calls < 7 else dropped)(token_ids)

    async with w.gateway.request_group(asked(w)) as job:
        record = await running(w, monkeypatch, at_first, job)
        await change_engine(w, record)
        for engine in w.engines.values():
            engine.tokens_per_step = 40
        await finish(w, job)
        assert answer_of(record) == expected(PROMPT, {"stop": STOP})
        assert record.immovable_because.startswith("stop: no engine decodes the text")


def test_continued_request_has_no_stop_strings() -> None:
    body = {"prompt": [1], "stop": ["x"], "stop_token_ids": [3], "include_stop_str_in_output": True}
    assert immovable_because(CompletionEndpoint.COMPLETIONS, body) == ""
    new = continued(CompletionEndpoint.COMPLETIONS, body, [1], [2], 9)
    assert "stop" not in new
    assert (new["stop_token_ids"], new["include_stop_str_in_output"]) == ([3], True)
