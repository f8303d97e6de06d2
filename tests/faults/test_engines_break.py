"""Tests of engines that hang, stop sending, or answer with status 500, half a JSON or half an event: answers must be
complete and correct.

One engine fails as each request selects (bad_engine.py), the other is a correct simulated one; both, and the gateway,
are processes. Tokens of the failing engine are kept, and the other engine generates the rest.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from bad_engine import (
    AT_ONCE,
    DEAF,
    ENDLESS_MIDWAY,
    MIDWAY,
    RESET_MIDWAY,
    SILENT,
    SILENT_MIDWAY,
    TOKENS_BEFORE,
)
from front import (
    PATH,
    Front,
    Question,
    check,
    forget_peak,
    resident_bytes,
    resident_peak_bytes,
    session,
    start_bad_engine,
    start_engine,
    start_gateway,
    until,
)

from orchestrrl.engines.openai_chunks import MOST_LINE_BYTES
from orchestrrl.lab.testbed.engines import LocalEngine
from tests.orchestrrl.gateway.processes import GatewayProcess

# A short limit for engines that hang. If the good engine is slower than that once, no request is lost either.
STALL = ("--stall-s", "3")
REQUESTS = 6
SLACK_BYTES = 64 << 20
numbers = itertools.count(step=100)  # no two requests of this file are alike


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[LocalEngine], GatewayProcess]]:
    log_dir = tmp_path_factory.mktemp("broken")

    async def start() -> tuple[list[LocalEngine], GatewayProcess]:
        bad, good = await asyncio.gather(start_bad_engine(log_dir), start_engine("good", log_dir, speed=20))
        return [bad, good], await start_gateway([bad, good], log_dir, *STALL)

    engines, gateway = asyncio.run(start())
    yield engines, gateway
    asyncio.run(gateway.stop())
    for engine in engines:
        engine.kill()


@pytest.fixture
async def front(processes: tuple[list[LocalEngine], GatewayProcess]) -> AsyncIterator[Front]:
    """Start a gateway; the failing engine is e0, the correct one e1."""
    async with session() as http:
        yield Front(*processes, http)


async def seen(front: Front, what: str, fault: str) -> int:
    """Return the failing engine's counts: requests `asked` with this fault, or `left` by their client."""
    async with front.http.get(front.engines[0].url + "/seen") as response:
        return int((await response.json())[what].get(fault, 0))


def questions(fault: str, count: int = REQUESTS, max_tokens: int = 40) -> list[Question]:
    first = next(numbers)
    return [
        Question(first + index, max_tokens=max_tokens, stream=index % 2 == 0, more={"user": fault})
        for index in range(count)
    ]


@pytest.mark.parametrize("fault", [*AT_ONCE, *MIDWAY, RESET_MIDWAY, ENDLESS_MIDWAY, SILENT, SILENT_MIDWAY, DEAF])
async def test_answers_are_complete_and_correct(front: Front, fault: str) -> None:
    asked = questions(fault)
    await front.trusts("e0", "e1")
    forget_peak(front.gateway.pid)
    before_bytes = resident_bytes(front.gateway.pid)
    await front.ask_all(asked)
    grew_bytes = resident_peak_bytes(front.gateway.pid) - before_bytes
    broken = await seen(front, "asked", fault)
    assert broken > 0
    assert grew_bytes < (broken * MOST_LINE_BYTES if fault == ENDLESS_MIDWAY else 0) + SLACK_BYTES
    ended = await front.finished(*asked)
    assert {item["engine"] for item in ended} == {"e1"}
    assert {item["generated_tokens"] for item in ended} == {40}
    await front.idle(1)
    if fault in (SILENT, SILENT_MIDWAY, ENDLESS_MIDWAY, DEAF):

        async def all_left() -> bool:
            return await seen(front, "left", fault) == await seen(front, "asked", fault)

        await until(all_left)  # no abandoned request remains on it
    if fault == DEAF:
        async with front.http.post(front.engines[0].url + "/hear") as response:
            assert response.status == 200


async def test_tokens_before_the_failure_are_not_generated_again(front: Front) -> None:
    (asked,) = questions(RESET_MIDWAY, count=1)
    await front.trusts("e0", "e1")
    before = (await front.idle(1)).generation_tokens_total
    check(asked, await front.ask(asked))
    made = (await front.idle(1)).generation_tokens_total - before
    assert made == asked.max_tokens - TOKENS_BEFORE


SILENTS = (SILENT,)


@pytest.fixture
async def alone(front: Front, tmp_path: Path) -> AsyncIterator[Front]:
    """Start the failing engine alone, behind a gateway of its own."""
    gateway = await start_gateway(front.engines[:1], tmp_path, "--stall-s", "1")
    yield Front(front.engines[:1], gateway, front.http)
    await gateway.stop()


async def test_engine_that_returns_few_tokens_per_attempt_returns_all(alone: Front) -> None:
    await alone.ask_all(questions("half an event, cut", count=2, max_tokens=5 * TOKENS_BEFORE - 1))


async def test_error_is_returned_without_another_engine(alone: Front) -> None:
    """The error comes after at most six attempts, in OpenAI's format, streamed or not."""
    faults = ("500", "half a json", "cut in its head", "closes", "not http", "head without end", *SILENTS)
    asked = [question for fault in faults for question in questions(fault, count=2)]
    before = {fault: await seen(alone, "asked", fault) for fault in faults}
    refusals = await asyncio.gather(*(alone.refused(question) for question in asked))
    for question, (status, error) in zip(asked, refusals, strict=True):
        assert status == 503, (question.more, error)
        assert error["code"] == 503
        assert "consecutive attempts failed" in error["message"]
    for fault in faults:
        assert 0 < await seen(alone, "asked", fault) - before[fault] <= 2 * 6
    assert {item["finish_reason"] for item in await alone.finished(*asked)} == {"error"}


async def test_stream_that_cannot_continue_ends_with_an_error_and_no_repeated_token(alone: Front) -> None:
    """The request is pinned to the engine where it began, and some of it was delivered."""
    (asked,) = questions(RESET_MIDWAY, count=1)
    body = {**asked.body, "stream": True, "presence_penalty": 0.5}
    ids: list[int] = []
    errors = []
    async with alone.http.post(alone.url + PATH, json=body, headers={"X-Request-Id": asked.id}) as response:
        assert response.status == 200
        lines = [line[len(b"data: ") :] async for line in response.content if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]\n"
    for line in lines:
        event = json.loads(line)
        errors += [event["error"]] if "error" in event else []
        ids += [token for choice in event.get("choices", []) for token in choice["token_ids"]]
    assert ids == asked.answer[0][:TOKENS_BEFORE]
    (error,) = errors
    assert error["code"] == 502
    assert "presence_penalty" in error["message"]


async def test_engine_that_stops_in_mid_stream_and_continues_loses_nothing(tmp_path: Path) -> None:
    """SIGSTOP: the engine keeps its connections open and sends nothing. Its later output reaches no client."""
    # 15 s for an answer: every request on it is in its middle when it is stopped. The other engine is fast.
    engines = await asyncio.gather(start_engine("e0", tmp_path, speed=0.5), start_engine("e1", tmp_path, speed=20))
    gateway = await start_gateway(engines, tmp_path, *STALL)
    async with session() as http:
        front = Front(engines, gateway, http)
        asked = [Question(next(numbers), max_tokens=400, stream=index % 2 == 0) for index in range(8)]
        await front.pause(1)  # it fills, and accepts no more than its share of them
        answering = [front.asking(question) for question in asked]
        await front.running_at("e0", 3)
        front.freeze(0)
        await front.resume(1)
        assert all(0 < item["generated_tokens"] < 400 for item in await front.running_at("e0", 3))
        for question, answer in zip(asked, await asyncio.gather(*answering), strict=True):
            check(question, answer)
        assert {item["engine"] for item in await front.finished(*asked)} == {"e1"}
        front.thaw(0)
        await front.idle(0)
        await front.trusts("e0", "e1")
        await front.ask_all(Question(next(numbers), stream=index % 2 == 0) for index in range(4))
    await gateway.stop()
    for engine in engines:
        engine.kill()
