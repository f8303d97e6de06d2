"""The pause barrier: what runs comes to rest and goes on, whoever closed it is alive or not, and no answer is
harmed."""

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
async def test_what_is_frozen_stands_still_and_goes_on(frozen: FrozenRequests) -> None:
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


async def test_what_is_taken_back_leaves_engines_empty_and_goes_on_anywhere() -> None:
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


async def test_what_can_only_go_on_where_it_is_stays_there_frozen() -> None:
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
async def test_a_lease_that_ends_while_weights_change_leaves_nobody_with_a_version(weights_change: bool) -> None:
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


async def test_what_comes_while_it_is_closed_waits_here_and_longer_than_for_engines() -> None:
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


async def test_wait_lets_running_requests_finish_and_takes_waiting_ones_back() -> None:
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


async def test_who_has_nothing_left_lets_the_others_requests_finish() -> None:
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


async def test_who_waits_for_others_opens_when_the_lease_ends_or_when_told() -> None:
    w = world()
    assert await (await close(w, PauseMode.WAIT, engines_run=True)) == ()
    await w.clock.advance(LEASE_S)
    assert w.gateway.barrier.opened_because == "the lease of trainer ended, and other gateways' requests still run"
    await (await close(w, PauseMode.WAIT, lease="second", engines_run=True))
    await open_barrier(w, lease="second")
    assert w.gateway.barrier.report().phase is BarrierPhase.OPEN
    assert [engine.pauses for engine in w.engines.values()] == [[], []]


async def test_abort_ends_what_runs_with_what_it_has_and_loses_nothing_that_waits() -> None:
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


async def test_an_engine_that_cannot_be_paused_has_its_requests_taken_back() -> None:
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


async def test_what_cannot_be_continued_is_waited_for_on_an_engine_that_cannot_be_paused() -> None:
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


async def test_a_lease_that_is_not_renewed_ends_and_all_goes_on() -> None:
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
        with pytest.raises(Permanent, match="this lease has ended"):
            await late
    with pytest.raises(Permanent, match="not closed under this lease"):
        w.gateway.barrier.renew("l", w.clock.now_s() + 1)


async def test_one_lease_at_a_time() -> None:
    w = world()
    await (await close(w))
    with pytest.raises(Permanent, match="trainer keeps the pause barrier closed for 60 s more"):
        await w.gateway.barrier.close(order(w, lease="other"))
    with pytest.raises(Permanent, match="not closed under this lease"):
        await w.gateway.barrier.open(OpenBarrier("other"))
    await open_barrier(w)
    await (await close(w, lease="other"))
    await open_barrier(w, lease="other")


async def test_the_same_lease_again_renews_it_and_answers_as_before() -> None:
    w = world()
    first = await (await close(w))
    await w.clock.advance(30.0)
    again = await (await close(w))
    assert again == first
    assert [engine.pauses for engine in w.engines.values()] == [[True], [True]]
    assert w.gateway.barrier.report().lease_until_s == w.clock.now_s() + LEASE_S


async def test_not_quiet_in_time_is_open_again() -> None:
    w = world(1)
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=30)) as job:
        await w.settle()
        await w.step()
        closing = await close(w, PauseMode.WAIT, quiet_by_s=w.clock.now_s() + 5.0)
        await w.clock.advance(5.0)
        with pytest.raises(Permanent, match="not quiet by the deadline: 1 requests still run: r"):
            await closing
        assert w.gateway.barrier.closed is None
        assert not w.engines["e0"].paused
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 30)


async def test_an_engine_that_dies_while_paused_loses_nothing() -> None:
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


async def test_an_engine_that_was_not_there_has_not_got_the_weights() -> None:
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


async def test_an_engine_left_out_stays_paused_until_its_version_is_told() -> None:
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
    with pytest.raises(Permanent, match="unknown engine 'e7'"):
        await w.gateway.barrier.set_version((EngineId("e7"),), 3)
    await (await close(w, lease="m"))
    with pytest.raises(Permanent, match="without: unknown engine 'e7'; known: e0, e1"):
        await open_barrier(w, 4, ("e7",), lease="m")
    assert w.gateway.barrier.closed is not None


async def test_routes_tell_versions_and_wake_engines() -> None:
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
    # A newcomer that nobody has given the weights.
    w.gateway.set_routes([*routes[:1], EngineRoute(EngineId("e1"), w.engines["e1"].url, None, newest_policy_version=4)])
    assert [backend.usable for backend in w.fleet] == [True, False]


async def test_an_engine_that_does_not_resume_is_asked_again() -> None:
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


async def test_without_a_lease_engines_that_an_earlier_gateway_paused_are_resumed() -> None:
    w = world()
    for engine in w.engines.values():
        engine.paused = True
    await open_barrier(w, lease="")
    assert not any(engine.paused for engine in w.engines.values())


async def test_engines_that_a_dead_gateway_left_paused_are_resumed_after_a_while() -> None:
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


async def test_but_not_while_the_barrier_is_closed() -> None:
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


async def test_a_move_waits_for_no_barrier() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=12)) as job:
        await w.settle()
        await w.step()
        await (await close(w))
        (result,) = await w.gateway.move([RequestMove(RequestId("r"), EngineId("e0"), EngineId("e1"))])
        assert (result.done, result.detail) == (False, "the pause barrier is closed")
        await open_barrier(w)
        await finish(w, job)
        assert_undisturbed(job, PROMPT, 12)


async def test_a_move_that_is_under_way_is_told_when_the_request_is_taken_back() -> None:
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


async def test_the_client_may_leave_while_it_is_closed() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=12)):
        await w.step()
        await (await close(w))
    await w.settle()
    assert len(w.gateway.ledger) == 0
    assert w.engines["e0"].aborted == ["r~1"]
    await open_barrier(w)


async def test_standing_still_by_order_is_no_stall() -> None:
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
