"""Requests continue from their tokens when an engine dies, even if detokenization calls fail."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable
from orchestrrl.engines.base import Chunk, CompletionEndpoint, EngineCapabilities, RequestRefused
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.moves import detokenizer as decoding
from orchestrrl.gateway.moves.detokenizer import detokenize, unsent
from planner.model import EngineId, RequestId
from tests.orchestrrl.gateway.fakes import FakeEngine, RunningGroup, World, chat_prompt, undisturbed, world

REQUESTS = 500
MAX_TOKENS = 30
STEPS_BEFORE = 5  # includes cuts after complete characters, and inside characters of two, three and four bytes

Decode = Callable[[Sequence[int]], Awaitable[str]]


async def dropped(_: Sequence[int]) -> str:
    raise OutcomeUnknown("/detokenize: Server disconnected")


async def server_error(_: Sequence[int]) -> str:
    raise Retryable("/detokenize: 500: no tokenizer process", 1.0)


async def no_such_path(_: Sequence[int]) -> str:
    raise RequestRefused("/detokenize: 404: Not Found", 404, {})


async def nonsense(_: Sequence[int]) -> str:
    raise Permanent("/detokenize: the answer is not one of vllm: KeyError('prompt')")


async def hanging(_: Sequence[int]) -> str:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


FAULTS: dict[str, Decode] = {
    "dropped": dropped,
    "500": server_error,
    "404": no_such_path,
    "nonsense": nonsense,
    "hangs": hanging,
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "ANSWER_WITHIN_S", 0.01)


def decode_by(engine: FakeEngine, decode: Decode) -> list[int]:
    """Replace the engine's detokenization by `decode`. Returns a list that grows with each call."""
    calls: list[int] = []

    async def counted(token_ids: Sequence[int]) -> str:
        calls.append(len(token_ids))
        return await decode(token_ids)

    engine.detokenize = counted  # type: ignore[method-assign]
    return calls


async def ended(w: World, jobs: list[RunningGroup]) -> None:
    for _ in range(400):
        if all(job.done for job in jobs):
            return
        await w.step()
        await w.clock.advance(0.1)
        if not any(engine.attempts for engine in w.engines.values()):
            await asyncio.sleep(0.005)  # calls that hang end by wall clock
    raise AssertionError("not done")


def prompt_of(index: int) -> list[int]:
    return [*f"question {index}: ".encode(), 65 + index % 26]


def form_of(index: int) -> tuple[CompletionEndpoint, list[int], dict[str, Any]]:
    """Return a request form: stream or whole answer, text or token ids, completion or chat, alternating."""
    streamed = {"stream": index % 2 == 1, "return_token_ids": index % 3 == 0}
    if index % 5 == 4:
        messages = [{"role": "user", "content": f"question {index}"}]
        return CompletionEndpoint.CHAT, chat_prompt(messages), {"messages": messages, **streamed}
    ids = prompt_of(index)
    prompt = bytes(ids).decode() if index % 5 == 3 else ids
    return CompletionEndpoint.COMPLETIONS, ids, {"prompt": prompt, **streamed}


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_request_fails_if_no_engine_detokenizes(fault: str) -> None:
    w = world(engines=3)
    for engine in w.engines.values():
        decode_by(engine, FAULTS[fault])
    jobs = []
    for index in range(REQUESTS):
        endpoint, _, body = form_of(index)
        job = w.gateway.request_group(w.ask(endpoint, request_id=f"r{index}", max_tokens=MAX_TOKENS, **body))
        jobs.append(await job.__aenter__())
    await w.settle()
    for _ in range(STEPS_BEFORE):
        await w.step()
    victims = [job for job in jobs if job.records[0].engine == "e0"]
    assert any(not job.records[0].text_complete for job in victims)
    w.engines["e0"].die()
    await ended(w, jobs)
    for index, job in enumerate(jobs):
        (record,) = job.records
        assert job.failure is None
        tokens, text, finish_reason = undisturbed(form_of(index)[1], MAX_TOKENS)
        assert (list(record.generated_ids), record.text, record.finish_reason) == (tokens, text, finish_reason), index
        if record.streaming:
            assert "".join(delta.text for delta in record.take_undelivered()) == text
        await job.__aexit__()
    assert not w.engines["e1"].dead
    usable = [backend.id for backend in w.fleet if backend.usable]
    assert usable == ["e1", "e2"]  # a failing detokenizer does not affect an engine's health


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("cut", range(1, 9))
async def test_another_engine_detokenizes_if_the_continuing_one_fails(fault: str, cut: int) -> None:
    w = world(engines=3)
    refused = decode_by(w.engines["e1"], FAULTS[fault])
    jobs = []
    for index in range(24):
        job = w.gateway.request_group(
            w.ask(request_id=f"r{index}", prompt=prompt_of(index), max_tokens=MAX_TOKENS, stream=True)
        )
        jobs.append(await job.__aenter__())
    await w.settle()
    for _ in range(cut):
        await w.step()
    w.engines["e0"].die()
    await ended(w, jobs)
    for index, job in enumerate(jobs):
        tokens, text, _ = undisturbed(prompt_of(index), MAX_TOKENS)
        assert (list(job.records[0].generated_ids), job.records[0].text) == (tokens, text)
        await job.__aexit__()
    assert len(refused) <= 24  # and is tried last for a while


async def test_detokenizer_failure_inside_a_character_loses_no_text() -> None:
    """Each engine decodes the text at the cut, and then fails."""
    asked = failed = 0

    async def once(token_ids: Sequence[int]) -> str:
        nonlocal asked, failed
        asked += 1
        if asked > 1:
            failed += 1
            raise OutcomeUnknown("Server disconnected")
        return await FakeEngine().detokenize(token_ids)

    for cut in range(1, 9):
        asked = 0
        w = world()
        for engine in w.engines.values():
            decode_by(engine, once)
        async with w.gateway.request_group(w.ask(prompt=prompt_of(cut), max_tokens=MAX_TOKENS, stream=True)) as job:
            await w.settle()
            for _ in range(cut):
                await w.step()
            w.engines[str(job.records[0].engine)].die()
            await ended(w, [job])
            tokens, text, _ = undisturbed(prompt_of(cut), MAX_TOKENS)
            assert (list(job.records[0].generated_ids), job.records[0].text) == (tokens, text)
    assert failed


async def test_engine_of_another_model_is_not_used_to_detokenize() -> None:
    w = world(engines=3)
    strangers = decode_by(w.engines["e1"], nonsense)
    decode_by(w.engines["e0"], dropped)
    slots = {backend.id: backend for backend in w.fleet}
    for name, model in (("e0", "model"), ("e1", "other"), ("e2", "model")):
        slots[EngineId(name)].capabilities = EngineCapabilities("fake", "0", (model,), token_ids=True)
    assert await detokenize(w.fleet, slots[EngineId("e0")], list("漢".encode())) == "漢"
    assert not strangers


async def test_engine_that_failed_to_detokenize_is_preferred_again_later() -> None:
    w = world()
    first, second = (decode_by(w.engines[name], dropped) for name in ("e0", "e1"))
    backend = next(iter(w.fleet))
    for _ in range(4):
        with pytest.raises(Permanent, match="Server disconnected"):
            await detokenize(w.fleet, backend, [65])
    assert (len(first), len(second)) == (4, 4)
    second_decodes = decode_by(w.engines["e1"], FakeEngine().detokenize)
    assert await detokenize(w.fleet, backend, [65]) == "A"
    assert await detokenize(w.fleet, backend, [65]) == "A"
    assert len(first) == 5  # once more before the other answered, and not after that
    await w.clock.advance(decoding.AVOID_FOR_S + 1.0)
    assert await detokenize(w.fleet, backend, [65]) == "A"
    assert (len(first), len(second_decodes)) == (6, 3)


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=40)


@given(WORDS, WORDS, st.characters(codec="utf-8"))
def test_repeated_context_is_removed_from_the_text(prompt: str, sent: str, character: str) -> None:
    record = RequestRecord(
        RequestId("r"), CompletionEndpoint.COMPLETIONS, {"prompt": prompt}, streaming=False, arrived_s=0.0, max_tokens=9
    )
    record.prompt_tokens_estimate = len(prompt.encode()) // 4
    record.append(Chunk((1,), sent), sent, None, 0.0)
    assert unsent(Chunk((2,), prompt + sent + character), record) == character


@given(st.text("abc ", min_size=12, max_size=40), st.text("xyz ", min_size=1, max_size=60), st.integers(1, 8))
def test_new_text_without_context_is_kept(sent: str, new: str, tokens: int) -> None:
    record = RequestRecord(
        RequestId("r"), CompletionEndpoint.COMPLETIONS, {"prompt": [1]}, False, arrived_s=0.0, max_tokens=9
    )
    record.append(Chunk((1,), sent), sent, None, 0.0)
    if sent.strip():
        assert unsent(Chunk(tuple(range(tokens)), new), record) == new
