"""Interactions of the gateway's parts: the ledger on disk with groups, versions and restarts; routes with the pause
barrier; short contexts with engines that leave."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrrl.core.operations import (
    EngineRoute,
    FrozenRequests,
    OpenBarrier,
    PauseMode,
)
from orchestrrl.fleet.reports import BarrierPhase
from orchestrrl.gateway.ledger import store as store_module
from orchestrrl.gateway.ledger.store import LedgerStore, RetentionPolicy
from planner.model import EngineId, RequestId, RequestMove
from tests.orchestrrl.gateway.barriers import close, open_barrier, order
from tests.orchestrrl.gateway.fakes import FakeEngine, RunningGroup, World, world
from tests.orchestrrl.gateway.test_relay import PROMPT, assert_undisturbed, finish, move


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BATCH_S", 0.001)


def begun(path: Path, engines: int = 2) -> World:
    w = world(engines)
    w.gateway.store = LedgerStore(RetentionPolicy(path, from_s=0.0), w.clock)
    w.gateway.store.start()
    return w


async def ended(w: World) -> None:
    assert w.gateway.store is not None
    await w.gateway.store.close()


def named(w: World, request_id: str = "r", **body: Any) -> RunningGroup:
    group = body.pop("group", "")
    ask = w.ask(request_id=request_id, **body)
    for record in ask.records:
        record.group = group or record.group
    return w.gateway.request_group(ask, body)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until the condition holds, since the ledger's threads run asynchronously."""
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


def routes(w: World, *names: str, **fields: Any) -> list[EngineRoute]:
    return [EngineRoute(EngineId(name), w.engines[name].url, **fields) for name in names]


# --- the ledger on disk -----------------------------------------------------------------------------------------------


async def test_stored_answer_counts_once_in_its_group(tmp_path: Path) -> None:
    w = begun(tmp_path / "ledger")
    asked = {"prompt": PROMPT, "group": "g", "group_enough": 2}
    async with named(w, "long", max_tokens=40, **asked) as long:
        async with named(w, "short", max_tokens=2, **asked) as short:
            await w.settle()
            await finish(w, short)
        async with named(w, "short", max_tokens=2, **asked) as again:
            await w.settle()
            assert again.done
            assert not long.done
        async with named(w, "other", max_tokens=2, **asked) as other:
            await w.settle()
            await finish(w, other)
        assert (long.records[0].finish_reason, long.records[0].stop_reason) == ("abort", "redundant")
    await ended(w)


async def test_version_lag_of_a_stored_answer_is_counted_once(tmp_path: Path) -> None:
    w = begun(tmp_path / "ledger")
    await w.gateway.barrier.set_version((EngineId("e0"), EngineId("e1")), 3)
    for _ in range(2):
        async with named(w, prompt=PROMPT, max_tokens=3) as job:
            await w.settle()
            await finish(w, job)
    assert w.gateway.version_lags == {0: 1}
    await ended(w)


async def test_stored_answer_ends_no_other_request_of_its_id(tmp_path: Path) -> None:
    """The first of n answers to `r` has the id `r-0`."""
    w = begun(tmp_path / "ledger")
    async with named(w, "r-0", prompt=PROMPT, max_tokens=2) as job:
        await w.settle()
        await finish(w, job)
    async with named(w, "r", prompt=PROMPT, max_tokens=20, n=2) as samples:
        await w.settle()
        async with named(w, "r-0", prompt=PROMPT, max_tokens=2) as job:
            await w.settle()
            assert job.done
        assert set(w.gateway.relays) == {"r-0", "r-1"}
        assert len(w.gateway.ledger) == 2
        await finish(w, samples)
    await ended(w)


@pytest.mark.parametrize("on_stale", ["abort", "restart"])
async def test_returning_client_with_stale_answer_gets_abort_or_restart(tmp_path: Path, on_stale: str) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 20, "max_version_lag": 1, "on_stale": on_stale}
    first = begun(tmp_path / "ledger")
    first.gateway.set_routes(routes(first, "e0", "e1", policy_version=3, newest_policy_version=3))
    async with named(first, **asked) as job:
        await first.settle()
        await first.step()
        await first.step()
    await ended(first)

    then = begun(tmp_path / "ledger")
    then.gateway.set_routes(routes(then, "e0", "e1", policy_version=5, newest_policy_version=5))
    assert then.gateway.barrier.report().policy_version == 5
    async with named(then, **asked) as job:
        await then.settle()
        if on_stale == "abort":
            assert (job.records[0].finish_reason, job.records[0].stop_reason) == ("abort", "max_version_lag")
            assert len(job.records[0].generated_ids) == 2
            assert not any(engine.seen for engine in then.engines.values())
        else:
            await finish(then, job)
            assert_undisturbed(job, PROMPT, 20)
            assert job.records[0].versions.oldest == 5
    assert sum(then.gateway.barrier.stale_total.values()) == 1
    await ended(then)


async def test_restarted_answer_is_not_continued_from_the_ledger(tmp_path: Path) -> None:
    first = begun(tmp_path / "ledger")
    async with named(first, prompt=PROMPT, max_tokens=20) as job:
        await first.settle()
        await first.step()
        assert first.gateway.store is not None
        first.gateway.store._collect_progress(list(first.gateway.store._entries.values()))
        await (await close(first, frozen=FrozenRequests.RESTART))
        await open_barrier(first, 7)
        assert not job.records[0].generated_ids
    await ended(first)

    then = begun(tmp_path / "ledger")
    async with named(then, prompt=PROMPT, max_tokens=20) as job:
        await then.settle()
        assert not job.records[0].generated_ids
        await finish(then, job)
        assert_undisturbed(job, PROMPT, 20)
    await ended(then)
    again = begun(tmp_path / "ledger")
    async with named(again, prompt=PROMPT, max_tokens=20) as job:
        assert_undisturbed(job, PROMPT, 20)
    await ended(again)


async def test_cancelled_answer_is_returned_again_as_it_ended(tmp_path: Path) -> None:
    w = begun(tmp_path / "ledger")
    async with named(w, prompt=PROMPT, max_tokens=20) as job:
        await w.settle()
        await w.step()
        w.gateway.cancel([RequestId("r")], (), "operator")
        await w.settle()
        made = list(job.records[0].generated_ids)
    async with named(w, prompt=PROMPT, max_tokens=20) as job:
        assert (job.records[0].finish_reason, job.records[0].stop_reason) == ("abort", "operator")
        assert list(job.records[0].generated_ids) == made
    await ended(w)


# --- the pause barrier
# ---------------------------------------------------------------------------------------------------------


async def test_barrier_can_be_closed_again_while_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world()
    resume = FakeEngine.resume

    async def slowly(engine: FakeEngine) -> None:
        await w.clock.sleep(1.0)
        await resume(engine)

    monkeypatch.setattr(FakeEngine, "resume", slowly)
    await (await close(w, lease="first"))
    opening = asyncio.create_task(w.gateway.barrier.open(OpenBarrier("first")))
    await w.settle()
    closing = await close(w, lease="second")
    await w.clock.advance(3.0)
    await opening
    assert all(item.done for item in await closing)
    assert w.gateway.barrier.report().phase is BarrierPhase.QUIET
    assert all(engine.paused for engine in w.engines.values())
    opening = asyncio.create_task(w.gateway.barrier.open(OpenBarrier("second")))
    await w.clock.advance(3.0)
    await opening


async def test_paused_engine_that_leaves_the_routes_is_resumed() -> None:
    w = world()
    await (await close(w))
    w.gateway.set_routes(routes(w, "e0"))
    await w.settle()
    assert w.engines["e1"].paused
    await open_barrier(w)
    assert not w.engines["e1"].paused
    assert [backend.id for backend in w.fleet] == ["e0"]


async def test_excluded_engine_that_leaves_the_routes_is_resumed() -> None:
    w = world()
    await (await close(w))
    await open_barrier(w, 1, without=("e1",))
    assert w.engines["e1"].paused
    w.gateway.set_routes(routes(w, "e0"))
    await w.clock.advance(1.0)
    assert not w.engines["e1"].paused
    assert [backend.id for backend in w.fleet] == ["e0"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_engine_changes_its_address_while_barrier_is_closed(mode: PauseMode, first: bool) -> None:
    """Its requests neither stay frozen on the old server nor run there."""
    w = world(1)
    old = w.engines["e0"]
    w.engines["e0"] = new = FakeEngine(url="http://new")
    by_url = {old.url: old, new.url: new}
    w.fleet._connect = by_url.__getitem__
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        old.step()
        await w.settle()
        if first:
            w.gateway.set_routes(routes(w, "e0"))
            await w.settle()
        closing = await close(w, mode)
        if not first:
            w.gateway.set_routes(routes(w, "e0"))
        for _ in range(30 if mode is PauseMode.WAIT else 1):
            old.step()
            await w.clock.advance(0.1)
        assert closing.done()
        before = len(job.records[0].generated_ids)
        old.step()
        await w.settle()
        assert len(job.records[0].generated_ids) == before
        await open_barrier(w)
        for _ in range(40):
            old.step()
            await w.step()
        assert job.done
        if job.records[0].stop_reason != "paused":
            assert_undisturbed(job, PROMPT, 20)
        await w.clock.advance(10.0)
        assert not old.paused
        assert not new.paused


async def test_request_placed_as_the_barrier_closes_is_withdrawn() -> None:
    w = world(1)
    w.fleet.routing = replace(w.fleet.routing, queue_depth=1)
    w.engines["e0"].can_pause = False
    async with w.gateway.request_group(w.ask(request_id="a", prompt=PROMPT, max_tokens=1)) as ahead:
        await w.settle()
        async with w.gateway.request_group(
            w.ask(request_id="b", prompt=PROMPT, max_tokens=20, presence_penalty=1.0)
        ) as behind:
            await w.settle()
            assert behind.records[0].engine is None
            backend = w.fleet.get(EngineId("e0"))
            assert backend is not None
            w.fleet.release(backend, ahead.records[0])  # its place has gone to the next waiter, which has not run yet
            closing = asyncio.create_task(w.gateway.barrier.close(order(w, PauseMode.ABORT)))
            await w.settle()
            assert behind.records[0].engine is None
            assert not backend.reserved
            closing.cancel()
            w.gateway.cancel([RequestId("a"), RequestId("b")], (), "")
            await w.settle()


async def test_version_set_while_barrier_is_open_applies_to_all_engines() -> None:
    w = world()
    w.engines["e1"].die()
    await (await close(w))
    await open_barrier(w, 1)
    w.engines["e1"].revive()
    await w.gateway.barrier.set_version((EngineId("e1"),), 1)
    await w.clock.advance(10.0)
    await w.gateway.barrier.open(OpenBarrier("", 2))
    assert {backend.id: (backend.policy_version, backend.outdated) for backend in w.fleet} == {
        "e0": (2, False),
        "e1": (2, False),
    }


# --- contexts that are too short --------------------------------------------------------------------------------------


async def test_removed_engine_with_longer_context_does_not_block_moves() -> None:
    w = world(3)
    for name in ("e0", "e1"):
        w.engines[name].model_length = 40
    w.gateway.set_routes([])
    w.gateway.set_routes(routes(w, "e0", "e1", "e2"))
    await w.settle()
    w.gateway.set_routes(routes(w, "e0", "e1"))
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.step()
        moving = move(w, "e1" if job.records[0].engine == "e0" else "e0")
        await w.settle()
        await w.step()
        assert (await moving).done
        await finish(w, job)


async def test_request_moves_between_engines_with_equally_short_context() -> None:
    w = world(3)
    for name in ("e0", "e1"):
        w.engines[name].model_length = 40
    w.gateway.set_routes([])
    w.gateway.set_routes(routes(w, "e0", "e1", "e2"))
    await w.settle()
    w.engines["e2"].die()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.settle()
        await w.step()
        moving = move(w, "e1" if job.records[0].engine == "e0" else "e0")
        await w.settle()
        await w.step()
        assert (await moving).done
        await finish(w, job)


async def test_request_is_not_held_for_engine_with_too_short_context() -> None:
    w = world(2)
    w.engines["e0"].model_length = 40
    w.gateway.set_routes([])
    w.gateway.set_routes(routes(w, "e0", "e1"))
    await w.settle()
    w.gateway.set_routes([replace(route, draining=route.engine == "e0") for route in routes(w, "e0", "e1")])
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.step()
        (result,) = await w.gateway.move([RequestMove(RequestId("r"), EngineId("e1"), EngineId("e0"), 5.0)])
        assert not result.done
        assert "may exceed" in result.detail
        await finish(w, job)


# --- tasks ------------------------------------------------------------------------------------------------------------


async def test_cancelled_held_request_leaves_no_task() -> None:
    w = world(1)
    before = asyncio.all_tasks()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)):
        await w.settle()
        await w.step()
        (result,) = await w.gateway.move([RequestMove(RequestId("r"), EngineId("e0"), EngineId("e9"), 500.0)])
        assert result.done
        await w.settle()
    await w.settle()
    assert asyncio.all_tasks() == before


async def test_place_of_leaving_waiter_goes_to_the_next() -> None:
    w = world(1)
    w.fleet.routing = replace(w.fleet.routing, queue_depth=1)
    running = {}
    for name in ("ahead", "leaves", "next"):
        job = w.gateway.request_group(w.ask(request_id=name, prompt=PROMPT, max_tokens=1))
        running[name] = asyncio.create_task(job.run())
        await w.settle()
    backend = w.fleet.get(EngineId("e0"))
    assert backend is not None
    assert [waiter.record.id for waiter in w.fleet.queue] == ["leaves", "next"]
    running["leaves"].cancel()
    w.gateway.cancel([RequestId("ahead")], (), "")
    w.fleet.release(backend, w.gateway.relays[RequestId("ahead")].record)
    await w.settle()
    assert set(backend.records) == {"next"}
    await w.step()
    await running["next"]
    assert not backend.reserved
    assert backend.waiting == 0


async def test_engine_that_leaves_before_its_pause_is_not_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world()
    e1 = w.fleet.get(EngineId("e1"))
    assert e1 is not None
    e1.capabilities = None
    capabilities = FakeEngine.capabilities

    async def slowly(engine: FakeEngine) -> Any:
        await w.clock.sleep(1.0)
        return await capabilities(engine)

    monkeypatch.setattr(FakeEngine, "capabilities", slowly)
    closing = await close(w)
    w.gateway.set_routes(routes(w, "e0"))
    await w.clock.advance(3.0)
    await closing
    await open_barrier(w)
    assert [backend.id for backend in w.fleet] == ["e0"]
    assert not any(engine.paused for engine in w.engines.values())
