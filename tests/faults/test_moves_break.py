"""Tests of moves with a failure: of the source engine, of the destination, of both, or without free KV.

Each fault falls into its window with certainty: an engine that is paused, that is stopped or that needs minutes for a
prompt keeps a request where it is until the test has observed it there and acted.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from front import Front, Question, check, session, start_engine, start_gateway, until

from orchestrrl.lab.testbed.engines import LocalEngine
from tests.orchestrrl.gateway.processes import GatewayProcess

numbers = itertools.count(50_000)
SLOW = {"speed": 0.5}  # 27 tokens a second
BRISK = {"speed": 10}
FAST = {"speed": 50}
NEVER = {"prefill_tokens_per_s": 0.5}  # a prompt of 200 tokens takes longer than the test waits
MOVED = 10  # tokens that a request has at least when it is moved

Start = Callable[..., Awaitable[Front]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start engines with these flags, in their order, and a gateway in front of them."""
    engines: list[LocalEngine] = []
    gateways: list[GatewayProcess] = []
    async with session() as http:

        async def starting(*flags: dict[str, object]) -> Front:
            starts = (start_engine(f"e{index}", tmp_path, **each) for index, each in enumerate(flags))
            engines.extend(await asyncio.gather(*starts))
            gateways.append(await start_gateway(engines, tmp_path))
            return Front(engines, gateways[0], http)

        yield starting
    for gateway in gateways:
        await gateway.stop()
    for engine in engines:
        engine.kill()


def question(max_tokens: int, *, stream: bool = False, prompt_tokens: int = 200) -> Question:
    return Question(next(numbers), prompt_tokens, max_tokens, stream)


@pytest.mark.smoke
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_destination_engine_dies_during_prefill(start: Start, stream: bool) -> None:
    """It dies during prefill: the request returns to the source with every token it had."""
    front = await start(BRISK, NEVER)
    asked = question(4000, stream=stream)
    answering = front.asking(asked)
    source = (await front.running(asked, MOVED))["engine"]
    assert source == "e0"
    moving = asyncio.create_task(front.move((asked, "e1")))
    there = await front.waiting_at(asked, "e1")
    assert there["attempt"] == 2
    assert MOVED <= there["generated_tokens"] < 4000

    async def prefills() -> bool:
        return (await front.metrics(1)).running == 1

    await until(prefills)
    front.engines[1].kill()
    check(asked, await answering)
    (result,) = await moving
    assert result["done"] or "e1 failed" in result["detail"], result  # done: it had waited there for some seconds
    (ended,) = await front.finished(asked)
    assert ended["engine"] == "e0"
    await front.idle(0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_source_engine_dies_after_the_move(start: Start, stream: bool) -> None:
    """It dies after the request left, and before the destination has generated a token."""
    front = await start(SLOW, FAST)
    asked = question(400, stream=stream)
    answering = front.asking(asked)
    await front.running(asked, MOVED)
    await front.pause(1)
    moving = asyncio.create_task(front.move((asked, "e1")))
    at_cut = await front.waiting_at(asked, "e1")
    front.engines[0].kill()
    assert (await front.waiting_at(asked, "e1"))["generated_tokens"] == at_cut["generated_tokens"]
    await front.resume(1)
    check(asked, await answering)
    (result,) = await moving
    assert result["done"], result
    (ended,) = await front.finished(asked)
    assert (ended["engine"], ended["moves"]) == ("e1", 1)
    # And the token of its first probe: no token of e0 was generated again.
    assert (await front.idle(1)).generation_tokens_total == 400 - at_cut["generated_tokens"] + 1


async def test_stopped_source_engine_dies_after_the_move(start: Start) -> None:
    """It never receives the abort, and dies with all its requests."""
    front = await start(SLOW, FAST)
    asked = [question(400, stream=index % 2 == 0) for index in range(6)]
    await front.pause(1)  # it fills, and accepts no more than its share of them
    answering = [front.asking(each) for each in asked]
    there = {item["id"] for item in await front.running_at("e0", 3)}
    front.freeze(0)
    await front.resume(1)
    moving = [each for each in asked if each.id in there]
    results = await front.move(*((each, "e1") for each in moving))
    assert all(result["done"] for result in results), results
    front.engines[0].kill()
    for each, answer in zip(asked, await asyncio.gather(*answering), strict=True):
        check(each, answer)
    assert {item["engine"] for item in await front.finished(*asked)} == {"e1"}


async def test_both_engines_of_a_move_die(start: Start) -> None:
    """A third engine continues, from the tokens that the gateway has."""
    front = await start(SLOW, NEVER, FAST)
    asked = question(400)
    await front.pause(2)  # and no token is generated there too early
    answering = front.asking(asked)
    await front.running(asked, MOVED)
    moving = asyncio.create_task(front.move((asked, "e1")))
    at_cut = await front.waiting_at(asked, "e1")
    front.engines[0].kill()
    front.engines[1].kill()
    await moving
    await front.waiting_at(asked, "e2")
    await front.resume(2)
    check(asked, await answering)
    (ended,) = await front.finished(asked)
    assert ended["engine"] == "e2"
    assert (await front.idle(2)).generation_tokens_total == 400 - at_cut["generated_tokens"] + 1


async def test_client_that_leaves_during_a_move_frees_both_engines(start: Start) -> None:
    front = await start(SLOW, NEVER)
    asked = question(4000, stream=True)
    answering = front.asking(asked)
    await front.running(asked, MOVED)
    moving = asyncio.create_task(front.move((asked, "e1")))
    await front.waiting_at(asked, "e1")
    answering.cancel()
    (result,) = await moving
    assert result["done"] or "the client disconnected" in result["detail"], result
    (ended,) = await front.finished(asked)
    assert ended["finish_reason"] == "abort"
    await front.idle(0)
    await front.idle(1)


@pytest.mark.parametrize("together", [True, False], ids=["one order", "two orders"])
async def test_one_of_two_concurrent_moves_is_carried_out(start: Start, together: bool) -> None:
    """They go to two engines that generate no token until both orders have been judged."""
    front = await start(SLOW, FAST, FAST)
    asked = question(400, stream=True)
    answering = front.asking(asked)
    await front.running(asked, MOVED)
    await front.pause(1)
    await front.pause(2)
    if together:
        results = await front.move((asked, "e1"), (asked, "e2"))
    else:
        first, second = await asyncio.gather(front.move((asked, "e1")), front.move((asked, "e2")))
        results = first + second
    assert sorted(result["done"] for result in results) == [False, True], results
    (taken,) = (("e1", "e2")[index] for index, result in enumerate(results) if result["done"])
    (refused,) = (result for result in results if not result["done"])
    # Of two orders, one may be in progress while the other's move runs.
    message = (
        f"the request is already being moved to engine {taken}",
        *([] if together else [f"the request must be assigned to engine e0, got {taken}"]),
    )
    assert refused["detail"].endswith(message)
    waiting = [(await front.metrics(engine)).waiting for engine in (1, 2)]
    assert waiting == [taken == "e1", taken == "e2"]  # on one engine, once
    await front.resume(1)
    await front.resume(2)
    check(asked, await answering)
    (ended,) = await front.finished(asked)
    assert (ended["engine"], ended["moves"]) == (taken, 1)


async def test_many_concurrent_moves_of_the_same_requests_lose_nothing(start: Start) -> None:
    """Three senders order moves at once, each to another engine, until the answers are complete."""
    front = await start(BRISK, BRISK, BRISK)
    asked = [question(1500, stream=index % 2 == 0) for index in range(6)]
    answering = [front.asking(each) for each in asked]
    await asyncio.gather(*(front.running(each) for each in asked))
    done = 0

    async def order(engine: str) -> None:
        nonlocal done
        while not all(task.done() for task in answering):
            results = await front.move(*((each, engine) for each in asked))
            done += sum(result["done"] for result in results)

    ordering = asyncio.gather(*(order(engine) for engine in ("e0", "e1", "e2")))
    for each, answer in zip(asked, await asyncio.gather(*answering), strict=True):
        check(each, answer)
    await ordering
    ended = await front.finished(*asked)
    assert sum(item["moves"] for item in ended) == done > len(asked)
    for engine in range(3):
        await front.idle(engine)


SMALL = {"kv_capacity_tokens": 4096, "max_model_len": 4096}


async def test_move_to_an_engine_without_free_kv_waits(start: Start) -> None:
    """The request waits there until KV is free, and loses nothing."""
    front = await start(SLOW, {"speed": 2} | SMALL)
    holder = question(300, prompt_tokens=3700)
    asked = question(400, stream=True, prompt_tokens=600)
    answering = [front.asking(asked)]
    await front.running(asked, MOVED)
    answering.append(front.asking(holder))  # e1 has fewer requests
    assert (await front.running(holder))["engine"] == "e1"
    await front.pause(1)
    (result,) = await front.move((asked, "e1"))
    assert result["done"], result
    full = await front.metrics(1)
    assert (full.running, full.waiting) == (1, 1)
    room_tokens = (1 - full.kv_usage_fraction) * full.kv_capacity_tokens
    at_cut = await front.waiting_at(asked, "e1")
    assert room_tokens < at_cut["prompt_tokens"] + at_cut["generated_tokens"]
    await front.resume(1)
    for each, answer in zip((asked, holder), await asyncio.gather(*answering), strict=True):
        check(each, answer)
    assert {item["engine"] for item in await front.finished(asked, holder)} == {"e1"}
    await front.idle(1)


async def test_destination_engine_runs_out_of_kv(start: Start) -> None:
    """The destination has KV for both at first, and then for one: it preempts, and both end correctly."""
    front = await start(SLOW, BRISK | SMALL)
    holder, asked = question(3000, prompt_tokens=1000), question(3000, stream=True, prompt_tokens=900)
    answering = [front.asking(asked)]
    await front.running(asked, MOVED)
    answering.append(front.asking(holder))
    assert (await front.running(holder))["engine"] == "e1"
    (result,) = await front.move((asked, "e1"))
    assert result["done"], result
    for each, answer in zip((asked, holder), await asyncio.gather(*answering), strict=True):
        check(each, answer)
    assert (await front.idle(1)).preemptions_total > 0
    assert {item["engine"] for item in await front.finished(asked, holder)} == {"e1"}


async def test_request_that_can_never_fit_at_the_destination_stays(start: Start) -> None:
    front = await start(BRISK, BRISK | SMALL)
    await front.pause(1)
    asked = question(1000, prompt_tokens=5000)
    answering = front.asking(asked)
    await front.running(asked, MOVED)
    await front.pause(0)
    (result,) = await front.move((asked, "e1"))
    assert not result["done"]
    assert result["detail"] == "the request may exceed the 4096-token context of engine e1"
    await front.resume(0)
    check(asked, await answering)
    (ended,) = await front.finished(asked)
    assert (ended["engine"], ended["moves"]) == ("e0", 0)
