"""The pause barrier quiesces requests and lets them continue, whether its holder survives or not, and answers stay
correct."""

import asyncio

import pytest

from orchestrrl.core.errors import Permanent
from orchestrrl.core.operations import (
    EngineRoute,
    FrozenRequests,
    OpenBarrier,
    PauseMode,
)
from orchestrrl.fleet.reports import BarrierPhase
from planner.model import EngineId, RequestId, RequestMove
from tests.orchestrrl.gateway.barriers import LEASE_S, close, open_barrier, order, tokens_of
from tests.orchestrrl.gateway.fakes import beside, undisturbed, world
from tests.orchestrrl.gateway.test_relay import PROMPT, assert_undisturbed, finish


@pytest.mark.parametrize("frozen", [FrozenRequests.RECOMPUTE, FrozenRequests.CONTINUE])
async def test_frozen_requests_stop_and_continue_after_opening(frozen: FrozenRequests) -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        for _ in range(4):
            await w.step()
        closing = await close(w, frozen=frozen)
        assert closing.done()
        assert {item.id: item.done for item in closing.result()} == {"e0": True, "e1": True}
        assert w.gateway.barrier.report().phase is BarrierPhase.QUIET
        assert w.gateway.barrier.report().frozen == 1
        assert [engine.pauses for engine in w.engines.values()] == [[frozen is FrozenRequests.RECOMPUTE]] * 2
        before = tokens_of(job)
        await w.step()
        assert tokens_of(job) == before
        await open_barrier(w)
        assert w.gateway.barrier.report().phase is BarrierPhase.OPEN
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
        assert job.records[0].attempt == 1


async def test_withdrawn_requests_leave_engines_and_continue_anywhere() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        for _ in range(4):
            await w.step()
        was = job.records[0].engine
        closing = await close(w, frozen=FrozenRequests.TAKEN_BACK)
        await w.clock.advance(1.0)
        assert {item.id: (item.done, item.detail) for item in closing.result()} == {"e0": (True, ""), "e1": (True, "")}
        assert all(engine.paused and not engine.attempts for engine in w.engines.values())
        report = w.gateway.barrier.report()
        assert (report.phase, report.frozen, report.held) == (BarrierPhase.QUIET, 0, 1)
        await open_barrier(w, 1, without=(str(was),))
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
        assert job.records[0].engine != was
        assert [span.version for span in job.records[0].versions.spans(30)] == [None, 1]


async def test_immovable_request_stays_frozen_on_its_engine() -> None:
    w = world(1)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=6)) as job:
        await w.settle()
        await w.step()
        job.records[0].immovable_because = "the engine parses the answer"
        closing = await close(w, frozen=FrozenRequests.TAKEN_BACK)
        await w.clock.advance(1.0)
        (item,) = closing.result()
        assert item.done
        assert "1 requests cannot leave this engine" in item.detail
        await open_barrier(w)
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 6)


@pytest.mark.parametrize("weights_change", [False, True])
async def test_lease_that_ends_during_weight_change_clears_all_versions(weights_change: bool) -> None:
    w = world()
    await (await close(w, lease="1"))
    await open_barrier(w, 1, lease="1")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=20)) as job:
        await w.settle()
        await w.step()
        await (await close(w, lease="2", weights_change=weights_change))
        await w.clock.advance(LEASE_S + 2.0)
        await finish(w, job)
        versions = [span.version for span in job.records[0].versions.spans(20)]
        assert versions == ([1, None] if weights_change else [1])
        assert [backend.mixed for backend in w.gateway.fleet] == [weights_change] * 2
        await w.gateway.barrier.set_version(tuple(map(EngineId, w.engines)), 1)
        assert not any(backend.mixed for backend in w.gateway.fleet)


async def test_new_requests_wait_while_barrier_is_closed_beyond_engine_wait() -> None:
    w = world(engine_wait_s=5.0)
    await (await close(w))
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=5)) as job:
        await w.clock.advance(50.0)
        assert job.records[0].engine is None
        assert not any(engine.seen for engine in w.engines.values())
        assert w.gateway.barrier.report().held == 1
        await open_barrier(w)
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 5)


async def test_wait_mode_finishes_running_and_withdraws_waiting_requests() -> None:
    w = world(1)
    w.engines["e0"].max_sequences = 1
    async with w.gateway.request_group(w.ask(request_id="runs", prompt=PROMPT, max_tokens=6)) as runs:
        await w.settle()
        await w.step()
        async with w.gateway.request_group(w.ask(request_id="waits", prompt=PROMPT, max_tokens=6)) as waits:
            await w.settle()
            closing = await close(w, PauseMode.WAIT)
            assert waits.records[0].engine is None
            assert not closing.done()
            assert w.gateway.barrier.report().phase is BarrierPhase.CLOSING
            await finish(w, runs)
            assert_undisturbed(runs, PROMPT, 6)
            await w.clock.advance(1.0)
            assert closing.done()
            assert w.engines["e0"].paused
            await w.step()
            assert tokens_of(waits) == 0
            await open_barrier(w)
            await finish(w, waits)
            assert_undisturbed(waits, PROMPT, 6)


async def test_drained_gateway_does_not_pause_engines_of_draining_gateway() -> None:
    w = world(1)
    other = beside(w)
    async with other.gateway.request_group(other.ask(prompt=PROMPT, max_tokens=6)) as runs:
        await w.settle()
        await w.step()
        drained = await close(w, PauseMode.WAIT, engines_run=True)
        draining = await close(other, PauseMode.WAIT, engines_run=True)
        await w.clock.advance(1.0)
        assert (drained.done(), draining.done()) == (True, False)
        assert [each.gateway.barrier.report().phase for each in (w, other)] == [BarrierPhase.CLOSING] * 2
        await finish(other, runs)
        assert_undisturbed(runs, PROMPT, 6)
        await w.clock.advance(1.0)
        assert draining.done()
        assert not w.engines["e0"].paused
        for each in (w, other):
            assert [item.done for item in await (await close(each, PauseMode.WAIT))] == [True]
            assert each.gateway.barrier.report().phase is BarrierPhase.QUIET
        assert w.engines["e0"].paused
        await open_barrier(w)
        await open_barrier(other)
        assert not w.engines["e0"].paused


async def test_drained_gateway_opens_when_lease_ends_or_on_order() -> None:
    w = world()
    assert await (await close(w, PauseMode.WAIT, engines_run=True)) == ()
    await w.clock.advance(LEASE_S)
    assert w.gateway.barrier.opened_because == "the lease of trainer ended, and other gateways' requests still run"
    await (await close(w, PauseMode.WAIT, lease="second", engines_run=True))
    await open_barrier(w, lease="second")
    assert w.gateway.barrier.report().phase is BarrierPhase.OPEN
    assert [engine.pauses for engine in w.engines.values()] == [[], []]


async def test_abort_mode_ends_running_and_keeps_waiting_requests() -> None:
    w = world(1)
    w.engines["e0"].max_sequences = 1
    async with w.gateway.request_group(w.ask(request_id="runs", prompt=PROMPT, max_tokens=30)) as runs:
        await w.settle()
        await w.step()
        await w.step()
        async with w.gateway.request_group(w.ask(request_id="waits", prompt=PROMPT, max_tokens=6)) as waits:
            await w.settle()
            closing = await close(w, PauseMode.ABORT)
            await w.clock.advance(1.0)
            assert closing.done()
            (record,) = runs.records
            assert (record.finish_reason, record.stop_reason) == ("abort", "paused")
            assert list(record.generated_ids) == undisturbed(PROMPT, 30)[0][:2]
            assert w.engines["e0"].aborted == ["runs~1", "waits~1"]
            await open_barrier(w)
            await finish(w, waits)
            assert_undisturbed(waits, PROMPT, 6)


async def test_requests_are_withdrawn_from_engine_without_pause() -> None:
    w = world(1)
    w.engines["e0"].can_pause = False
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.step()
        closing = await close(w)
        await w.clock.advance(1.0)
        (item,) = closing.result()
        assert item.done
        assert "withdrawn" in item.detail
        assert w.gateway.barrier.report().held == 1
        await w.step()
        assert tokens_of(job) == 1
        await open_barrier(w, 1)
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
        assert job.records[0].attempt == 2


async def test_immovable_request_finishes_on_engine_without_pause() -> None:
    w = world(1)
    w.engines["e0"].can_pause = False
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=8, presence_penalty=0.5)) as job:
        await w.settle()
        await w.step()
        closing = await close(w)
        await w.clock.advance(1.0)
        assert not closing.done()
        assert w.gateway.barrier.report().running == 1
        await finish(w, job)
        await w.clock.advance(1.0)
        assert closing.done()


async def test_expired_lease_opens_the_barrier() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.step()
        await (await close(w))
        await w.clock.advance(LEASE_S - 1)
        w.gateway.barrier.renew("l", w.clock.now_s() + LEASE_S)
        await w.clock.advance(LEASE_S - 1)
        assert w.gateway.barrier.closed is not None
        await w.clock.advance(1.0)
        assert w.gateway.barrier.closed is None
        assert w.gateway.barrier.opened_because == "the lease of trainer ended"
        assert w.gateway.barrier.expired_total == 1
        assert w.gateway.barrier.closed_total_s == pytest.approx(2 * LEASE_S - 1)
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
    for late in (w.gateway.barrier.close(order(w)), w.gateway.barrier.open(OpenBarrier("l", 1))):
        with pytest.raises(Permanent, match=r"lease .* has already ended"):
            await late
    with pytest.raises(Permanent, match="not closed under lease"):
        w.gateway.barrier.renew("l", w.clock.now_s() + 1)


async def test_second_lease_is_refused_while_barrier_is_closed() -> None:
    w = world()
    await (await close(w))
    with pytest.raises(Permanent, match="trainer holds the pause barrier for another 60 s"):
        await w.gateway.barrier.close(order(w, lease="other"))
    with pytest.raises(Permanent, match="not closed under lease"):
        await w.gateway.barrier.open(OpenBarrier("other"))
    await open_barrier(w)
    await (await close(w, lease="other"))
    await open_barrier(w, lease="other")


async def test_repeated_close_renews_the_lease() -> None:
    w = world()
    first = await (await close(w))
    await w.clock.advance(30.0)
    again = await (await close(w))
    assert again == first
    assert [engine.pauses for engine in w.engines.values()] == [[True], [True]]
    assert w.gateway.barrier.report().lease_until_s == w.clock.now_s() + LEASE_S


async def test_barrier_opens_if_not_quiet_by_the_deadline() -> None:
    w = world(1)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.step()
        closing = await close(w, PauseMode.WAIT, quiet_by_s=w.clock.now_s() + 5.0)
        await w.clock.advance(5.0)
        with pytest.raises(Permanent, match="the engines were not quiet by the deadline: 1 requests still run: r"):
            await closing
        assert w.gateway.barrier.closed is None
        assert not w.engines["e0"].paused
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)


async def test_requests_survive_death_of_a_paused_engine() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.step()
        await (await close(w))
        w.engines["e0"].die()
        await w.settle()
        await w.clock.advance(1.0)
        assert job.records[0].engine is None
        await open_barrier(w, 3)
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)
        assert job.records[0].engine == "e1"


async def test_unreachable_engine_is_outdated_until_its_version_is_set() -> None:
    w = world()
    w.engines["e1"].die()
    closing = await close(w)
    await w.clock.advance(10.0)
    items = {item.id: item.done for item in closing.result()}
    assert items == {"e0": True, "e1": False}
    await open_barrier(w, 3)
    w.engines["e1"].revive()
    await w.clock.advance(10.0)
    e1 = w.fleet.get(EngineId("e1"))
    assert e1 is not None
    assert not e1.suspect_because
    assert not e1.usable
    await w.gateway.barrier.set_version((EngineId("e1"),), 3)
    assert e1.usable


async def test_excluded_engine_stays_paused_until_its_version_is_set() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.step()
        assert job.records[0].engine == "e0"
        await (await close(w))
        await open_barrier(w, 3, ("e0",))
        assert w.engines["e0"].paused
        await finish(w, job)
        assert job.records[0].engine == "e1"
        assert_undisturbed(job, PROMPT, 30)
        await w.gateway.barrier.set_version((EngineId("e0"),), 3)
        await w.clock.advance(1.0)
        assert not w.engines["e0"].paused
    with pytest.raises(Permanent, match=r"must be engines of this gateway \(.*\), got 'e7'"):
        await w.gateway.barrier.set_version((EngineId("e7"),), 3)
    await (await close(w, lease="m"))
    with pytest.raises(Permanent, match=r"without: must be engines of this gateway \(e0, e1\), got 'e7'"):
        await open_barrier(w, 4, ("e7",), lease="m")
    assert w.gateway.barrier.closed is not None


async def test_versions_in_routes_wake_excluded_engines() -> None:
    w = world()
    await (await close(w))
    await open_barrier(w, 3, ("e0",))
    routes = [
        EngineRoute(EngineId(name), engine.url, policy_version=3, newest_policy_version=3)
        for name, engine in w.engines.items()
    ]
    w.gateway.set_routes(routes)
    await w.clock.advance(1.0)
    assert not w.engines["e0"].paused
    assert [backend.usable for backend in w.fleet] == [True, True]
    # A new engine without the fleet's weights.
    w.gateway.set_routes([*routes[:1], EngineRoute(EngineId("e1"), w.engines["e1"].url, None, newest_policy_version=4)])
    assert [backend.usable for backend in w.fleet] == [True, False]


async def test_failed_resume_is_retried() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=12)) as job:
        await w.settle()
        await w.step()
        await (await close(w))
        w.engines["e0"].stuck = True
        await open_barrier(w)
        assert w.engines["e0"].paused
        await w.clock.advance(3.0)
        w.engines["e0"].stuck = False
        await w.clock.advance(6.0)
        assert not w.engines["e0"].paused
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 12)


async def test_open_without_lease_resumes_engines_paused_by_earlier_gateway() -> None:
    w = world()
    for engine in w.engines.values():
        engine.paused = True
    await open_barrier(w, lease="")
    assert not any(engine.paused for engine in w.engines.values())


async def test_engines_left_paused_by_dead_gateway_are_resumed() -> None:
    w = world()
    w.engines["e0"].paused = True
    routes = [EngineRoute(EngineId(name), engine.url) for name, engine in w.engines.items()]
    w.gateway.set_routes(routes[1:])
    w.gateway.set_routes(routes)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=12)) as job:
        await w.clock.advance(59.0)
        w.gateway.set_routes(routes)
        await w.settle()
        assert w.engines["e0"].paused
        await w.clock.advance(2.0)
        assert not w.engines["e0"].paused
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 12)


async def test_engine_found_paused_stays_paused_while_barrier_is_closed() -> None:
    w = world()
    w.engines["e0"].paused = True
    routes = [EngineRoute(EngineId(name), engine.url) for name, engine in w.engines.items()]
    w.gateway.set_routes(routes[1:])
    w.gateway.set_routes(routes)
    await w.clock.advance(30.0)
    await (await close(w))
    await w.clock.advance(50.0)
    assert w.engines["e0"].paused
    await open_barrier(w)
    assert not w.engines["e0"].paused


async def test_move_is_refused_while_barrier_is_closed() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=12)) as job:
        await w.settle()
        await w.step()
        await (await close(w))
        (result,) = await w.gateway.move([RequestMove(RequestId("r"), EngineId("e0"), EngineId("e1"))])
        assert (result.done, result.detail) == (False, "requests cannot move while the pause barrier is closed")
        await open_barrier(w)
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 12)


async def test_move_in_progress_fails_when_request_is_withdrawn() -> None:
    w = world()
    for engine in w.engines.values():
        engine.can_pause = False
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=12)) as job:
        await w.settle()
        await w.step()
        moving = asyncio.create_task(w.gateway.move([RequestMove(RequestId("r"), EngineId("e0"), EngineId("e1"))]))
        await w.settle()
        assert job.records[0].engine == "e1"
        closing = await close(w)
        await w.clock.advance(1.0)
        await closing
        (result,) = await moving
        assert (result.done, result.detail) == (False, "the request was withdrawn from its engine")
        await open_barrier(w)
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 12)


async def test_client_may_disconnect_while_barrier_is_closed() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=12)):
        await w.step()
        await (await close(w))
    await w.settle()
    assert len(w.gateway.ledger) == 0
    assert w.engines["e0"].aborted == ["r~1"]
    await open_barrier(w)


async def test_pause_does_not_count_as_stall() -> None:
    w = world(stall_s=10.0)
    watching = asyncio.create_task(w.gateway.watch())
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=12)) as job:
        await w.settle()
        await w.step()
        await (await close(w))
        await w.clock.advance(50.0)
        await open_barrier(w)
        await w.clock.advance(5.0)
        assert job.records[0].attempt == 1
        await finish(w, job)
    watching.cancel()
