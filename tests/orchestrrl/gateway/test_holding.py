"""A request that is moved to an engine that has not started waits for it in the gateway, and loses no tokens."""

import asyncio

from orchestrrl.core.operations import (
    EngineRoute,
    OperationItemResult,
)
from planner.model import EngineId, RequestId, RequestMove
from tests.orchestrrl.gateway.fakes import World, undisturbed, world
from tests.orchestrrl.gateway.test_relay import PROMPT, assert_undisturbed, finish


async def hold(w: World, source: str, target: str, hold_s: float) -> OperationItemResult:
    move = RequestMove(RequestId("r"), EngineId(source), EngineId(target), hold_s)
    moving = asyncio.create_task(w.gateway.move([move]))
    await w.settle()
    if not moving.done():  # the move completes with the next token on its destination
        await w.step()
    (result,) = await moving
    return result


async def begun(w: World, tokens: int) -> None:
    await w.settle()
    for _ in range(tokens):
        await w.step()


async def test_held_request_continues_on_the_awaited_engine() -> None:
    w = world(2)
    # The test can connect to e1, but no route leads to it yet.
    w.fleet.set_routes([EngineRoute(EngineId("e0"), "http://e0")])
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await begun(w, 5)
        result = await hold(w, "e0", "e1", 60.0)
        assert result.done
        assert result.recomputed_tokens == len(PROMPT) + 5
        (record,) = job.records
        assert record.engine is None
        await w.clock.advance(30.0)
        assert record.engine is None
        w.fleet.set_routes([EngineRoute(EngineId("e1"), "http://e1")])
        await w.settle()
        assert record.engine == "e1"
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
        assert record.moves == 1


async def test_held_request_goes_to_another_engine_after_the_hold() -> None:
    w = world(2)
    w.fleet.set_routes([EngineRoute(EngineId("e0"), "http://e0")])
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await begun(w, 5)
        assert (await hold(w, "e0", "e1", 10.0)).done
        await w.clock.advance(11.0)
        await w.settle()
        (record,) = job.records
        assert record.engine == "e0"
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)


async def test_usable_engine_accepts_the_move_at_once() -> None:
    w = world(2)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await begun(w, 3)
        source = job.records[0].engine or ""
        other = {"e0": "e1", "e1": "e0"}[source]
        assert (await hold(w, source, other, 60.0)).done
        assert job.records[0].engine == other
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)


async def test_request_stays_without_hold_time() -> None:
    w = world(1)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await begun(w, 3)
        assert "not in the routes" in (await hold(w, "e0", "e7", 0.0)).detail
        assert job.records[0].engine == "e0"


async def test_complete_answer_does_not_wait_for_the_engine() -> None:
    w = world(1)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=5)) as job:
        await begun(w, 4)
        (attempt,) = w.engines["e0"].attempts.values()
        attempt.left = 100
        w.engines["e0"].step()
        await w.settle()
        await hold(w, "e0", "e1", 60.0)
        assert job.done
        tokens, _, _ = undisturbed(PROMPT, 5)
        assert list(job.records[0].generated_ids) == tokens
