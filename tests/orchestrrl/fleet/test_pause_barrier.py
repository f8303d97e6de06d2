"""Tests of the daemon's barrier on a virtual clock, with behaving gateways that enforce leases themselves."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from barrier_harness import CONFIG, E0, E1, Gateway, Harness
from builders import finished, request, sample

from orchestrrl.core.errors import Permanent, ProblemFaults, Retryable
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.core.operations import (
    CancelRequests,
    CloseBarrier,
    FrozenRequests,
    MoveRequests,
    OpenBarrier,
    PauseMode,
)
from orchestrrl.fleet.pause_barrier import PauseRequest
from orchestrrl.fleet.pause_lease import LeaseEnd
from orchestrrl.fleet.reports import BarrierPhase, FinishedRequest
from planner.model import Act, Mode, Plan, RequestId, RequestView


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path / "journal.sqlite")
    made.start()
    yield made
    assert made.journal is not None
    made.journal.close()


# --- pausing and resuming


async def test_all_gateways_close_and_open_and_routes_carry_the_version(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        lease = await harness.pause(holder="trainer", lease_s=30.0)
        assert [gateway.phase for gateway in harness.gateways.values()] == [BarrierPhase.QUIET] * 2
        assert harness.plane.fleet.barrier.state.phase is BarrierPhase.QUIET
        action = harness.gateways["gw1"].of(CloseBarrier)[0].action
        assert isinstance(action, CloseBarrier)
        assert (action.holder, action.mode, action.frozen) == ("trainer", PauseMode.KEEP, FrozenRequests.RECOMPUTE)
        assert action.lease_until_s == pytest.approx(harness.plane.fleet.barrier.state.lease.until_s)  # type: ignore[union-attr]
        await harness.resume(lease, 12, (E1,))
        assert [gateway.phase for gateway in harness.gateways.values()] == [BarrierPhase.OPEN] * 2
        for gateway in harness.gateways.values():
            assert [(r.engine, r.policy_version, r.newest_policy_version, r.draining) for r in gateway.routes] == [
                ("e0", 12, 12, False),
                ("e1", None, 12, True),
            ]
            assert [order.action for order in gateway.of(OpenBarrier)] == [OpenBarrier(lease, 12, (E1,))]
        assert [(rest.engine, rest.done, rest.policy_version) for rest in harness.plane.fleet.barrier.rests()] == [
            ("e0", True, 12),
            ("e1", False, None),
        ]
        assert harness.plane.fleet.barrier.set_version([E1], 12) == 12
        await harness.clock.advance(0.1)
        assert [(r.policy_version, r.draining) for r in harness.gateways["gw0"].routes] == [(12, False), (12, False)]
    assert harness.events() == ["pause", "quiet", "resume", "version"]
    assert harness.plane.fleet.barrier.paused_s == pytest.approx(0.25, abs=0.25)


async def test_versions_are_set_before_gateways_open(harness: Harness) -> None:
    async with harness.running():
        lease = await harness.pause()
        await harness.resume(lease, 3)
        newest = harness.entries(EntryKind.BARRIER)[-1].sequence
        sent = [entry for entry in harness.entries(EntryKind.OPERATION_INTENT) if "open_barrier" in str(entry.body)]
        assert newest < sent[0].sequence
        assert [route.policy_version for route in harness.gateways["gw0"].routes_at_opening] == [3, 3]
        await harness.resume(lease, 3)  # its answer was lost: the same call again
        with pytest.raises(Permanent, match=r"has already ended \(resumed\)"):
            await harness.resume(lease, 4)
        with pytest.raises(Permanent, match="the pause barrier is open"):
            await harness.resume("", 4)


async def test_second_lease_is_refused(harness: Harness) -> None:
    async with harness.running():
        lease = await harness.pause(holder="one", lease_s=30.0)
        with pytest.raises(Permanent, match=f"held by lease {lease} of one, until 00:17:1"):
            await harness.pause(holder="two")
        await harness.resume("")  # an operator
        assert harness.plane.fleet.barrier.state.opened.detail == "opened by a caller other than one"  # type: ignore[union-attr]
        await harness.pause(holder="two")


async def test_pause_without_gateways_is_refused(harness: Harness) -> None:
    with pytest.raises(Permanent, match="no gateway is attached"):
        await harness.plane.fleet.barrier.pause(PauseRequest())
    assert harness.events() == []
    with pytest.raises(ProblemFaults) as caught:
        await harness.plane.fleet.barrier.pause(PauseRequest(lease_s=-1.0, deadline_s=float("nan")))
    assert len(caught.value.faults) == 2


async def test_drain_may_use_the_whole_deadline(harness: Harness) -> None:
    async with harness.running():
        harness.gateways["gw0"].drains_s = 100.0
        asked = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest(PauseMode.WAIT, deadline_s=120.0)))
        await harness.clock.advance(50.0)
        assert harness.plane.fleet.barrier.state.phase is BarrierPhase.CLOSING
        assert not asked.done()
        await harness.clock.advance(51.0)
        assert (await asked).phase is BarrierPhase.QUIET


async def test_engines_are_paused_once_all_gateways_have_finished(harness: Harness) -> None:
    """The first gateway to finish would freeze what others wait for."""
    async with harness.running("gw0", "gw1"):
        harness.gateways["gw1"].drains_s = 40.0
        asked = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest(PauseMode.WAIT, deadline_s=120.0)))
        await harness.clock.advance(20.0)
        harness.gateways["gw2"] = late = Gateway(harness.plane, harness.clock, "gw2", drains_s=30.0)
        late.start()
        for told_s in (20.0, 5.0):  # a renewal does not pause them either
            await harness.renew(harness.plane.fleet.barrier.state.lease.id, 60.0)  # type: ignore[union-attr]
            await harness.clock.advance(told_s)
            orders = [gateway.of(CloseBarrier) for gateway in harness.gateways.values()]
            assert {order.action.engines_run for each in orders for order in each} == {True}  # type: ignore[union-attr]
            assert not asked.done()
        await harness.clock.advance(10.0)
        assert (await asked).phase is BarrierPhase.QUIET
        orders = [gateway.of(CloseBarrier) for gateway in harness.gateways.values()]
        assert [each[-1].action.engines_run for each in orders] == [False] * 3  # type: ignore[union-attr]
        assert [gateway.phase for gateway in harness.gateways.values()] == [BarrierPhase.QUIET] * 3


@pytest.mark.parametrize("fault", ["slow", "silent", "gone", "refuses"])
async def test_one_gateway_that_fails_to_rest_resumes_all(harness: Harness, fault: str) -> None:
    async with harness.running("gw0", "gw1"):
        bad = harness.gateways["gw1"]
        bad.drains_s = 1000.0 if fault in ("slow", "gone") else 0.1
        bad.broken = fault == "silent"
        bad.lease = "another" if fault == "refuses" else ""
        bad.until_s = 1e9
        asked = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest(lease_s=60.0, deadline_s=5.0)))
        await harness.clock.advance(1.0)
        if fault == "gone":
            await bad.stop()
        await harness.within(30.0, asked)
        expected = {
            "slow": "cannot pause gateway gw1: not quiet by the deadline: 3 requests",
            "silent": "cannot pause the fleet: the pause deadline has passed; gateway gw1 still has 0 running",
            "gone": "cannot pause the fleet: gateway gw1 detached; gateway gw1",
            "refuses": "cannot pause gateway gw1: this lease is over",
        }
        with pytest.raises(Retryable, match=expected[fault]):
            await asked
        assert harness.gateways["gw0"].phase is BarrierPhase.OPEN
        assert harness.plane.fleet.barrier.state.phase is BarrierPhase.OPEN
        assert harness.plane.fleet.barrier.state.opened.how is LeaseEnd.GAVE_UP  # type: ignore[union-attr]
    assert harness.events() == ["pause", "gave_up"]


async def test_cancelled_pause_leaves_no_gateway_closed(harness: Harness) -> None:
    async with harness.running():
        harness.gateways["gw0"].drains_s = 1000.0
        asked = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest()))
        await harness.clock.advance(1.0)
        asked.cancel()
        await harness.clock.advance(1.0)
        assert asked.cancelled()
        assert (harness.gateways["gw0"].phase, harness.plane.fleet.barrier.state.phase) == (
            BarrierPhase.OPEN,
            BarrierPhase.OPEN,
        )


async def test_new_pause_may_begin_while_another_is_undone(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        harness.gateways["gw1"].broken = True
        first = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest(deadline_s=2.0)))
        await harness.clock.advance(9.0)
        assert (harness.plane.fleet.barrier.state.phase, first.done()) == (BarrierPhase.OPEN, False), (
            "gw1 has still to answer"
        )
        harness.gateways["gw1"].broken = False
        harness.gateways["gw0"].drains_s = 10.0
        second = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest()))
        await harness.clock.advance(5.0)
        with pytest.raises(Retryable, match="cannot pause the fleet: the pause deadline has passed; gateway gw1"):
            await first
        await harness.clock.advance(8.0)
        assert (await second).phase is BarrierPhase.QUIET
        await harness.resume()
        harness.gateways["gw0"].drains_s = 1000.0
        first = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest()))
        await harness.clock.advance(1.0)
        harness.gateways["gw0"].drains_s = 0.1
        opening = asyncio.create_task(harness.plane.fleet.barrier.resume("", None, ()))
        await asyncio.sleep(0)
        second = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest()))
        await harness.clock.advance(8.0)
        assert (await opening).opened is not None
        with pytest.raises(Retryable, match="the pause barrier was opened"):
            await first
        assert (await second).phase is BarrierPhase.QUIET


async def test_operator_may_open_a_closing_barrier(harness: Harness) -> None:
    async with harness.running():
        harness.gateways["gw0"].drains_s = 1000.0
        asked = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest()))
        await harness.clock.advance(1.0)
        await harness.resume("")
        await harness.clock.advance(1.0)
        with pytest.raises(Retryable, match="the pause barrier was opened"):
            await asked
        assert harness.gateways["gw0"].phase is BarrierPhase.OPEN
    assert harness.events() == ["pause", "resume"]


@pytest.mark.parametrize("name", ["gw0", "gw1"])
async def test_engines_not_at_rest_are_reported_and_get_no_requests(harness: Harness, name: str) -> None:
    async with harness.running("gw0", "gw1"):
        harness.gateways[name].unpaused = {E1: "connection refused"}
        lease = await harness.pause()
        assert [(rest.engine, rest.done, rest.detail) for rest in harness.plane.fleet.barrier.rests()] == [
            ("e0", True, ""),
            ("e1", False, "connection refused"),
        ]
        await harness.resume(lease, 2)
        assert [(r.policy_version, r.draining) for r in harness.gateways["gw0"].routes] == [(2, False), (None, True)]
        harness.gateways[name].unpaused = {}
        await harness.resume(await harness.pause(), 3)
        assert [(r.policy_version, r.draining) for r in harness.gateways["gw0"].routes] == [(3, False), (3, False)]


# --- leases


async def test_renewed_lease_lasts_longer_and_then_expires(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        lease = await harness.pause(lease_s=10.0)
        for _ in range(5):
            await harness.clock.advance(7.0)
            await harness.renew(lease, 10.0)
        assert [gateway.phase for gateway in harness.gateways.values()] == [BarrierPhase.QUIET] * 2
        await harness.clock.advance(11.0)
        assert [gateway.phase for gateway in harness.gateways.values()] == [BarrierPhase.OPEN] * 2
        state = harness.plane.fleet.barrier.state
        assert state.opened is not None
        assert (state.phase, state.opened.how) == (BarrierPhase.OPEN, LeaseEnd.EXPIRED)
        assert "weights that were being changed may be mixed" in state.opened.detail
        for ask in (harness.renew(lease, 10.0), harness.resume(lease)):
            with pytest.raises(Permanent, match=r"has already ended \(expired\); requests have continued since"):
                await ask
        assert harness.plane.fleet.barrier.expired == 1
        assert harness.plane.fleet.barrier.paused_s == pytest.approx(45.0, abs=2.0)
        assert [gateway.of(OpenBarrier) for gateway in harness.gateways.values()] == [[], []]
    assert harness.events()[-1] == "expired"


async def test_renewal_that_a_gateway_missed_fails(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        lease = await harness.pause(lease_s=60.0)
        harness.gateways["gw1"].broken = True
        with pytest.raises(
            Retryable, match=r"on some gateways, which may resume requests at 00:17:4. UTC: gw1: did not answer in time"
        ):
            await harness.renew(lease, 60.0)
        harness.gateways["gw1"].broken = False
        await harness.renew(lease, 60.0)
        await harness.gateways["gw1"].stop()
        with pytest.raises(Retryable, match="gw1: is not attached"):
            await harness.renew(lease, 90.0)
        await harness.clock.advance(61.0)  # by then it has opened, if it still runs
        await harness.renew(lease, 60.0)
        with pytest.raises(ProblemFaults, match="lease_id: must not be empty"):
            await harness.renew("", 60.0)


async def test_gateway_that_attaches_while_closed_closes(harness: Harness) -> None:
    async with harness.running():
        lease = await harness.pause(lease_s=60.0, deadline_s=2.0)
        await harness.clock.advance(5.0)
        for name in ("gw1", "gw2"):
            harness.gateways[name] = Gateway(harness.plane, harness.clock, name)
        harness.gateways["gw1"].start()
        await harness.clock.advance(1.0)
        assert (harness.gateways["gw1"].phase, harness.gateways["gw1"].lease) == (BarrierPhase.QUIET, lease)
        await harness.resume(lease)
        harness.gateways["gw2"].start()
        await harness.clock.advance(5.0)
        assert harness.gateways["gw2"].orders == []


@pytest.mark.parametrize("weights_change", [False, True])
async def test_gateway_that_attaches_during_a_weight_change_gets_the_new_version(
    harness: Harness, weights_change: bool
) -> None:
    """Otherwise it would record the previous version for tokens that engines generate between two orders."""
    async with harness.running():
        await harness.resume(await harness.pause(), 4)
        lease = await harness.pause(weights_change=weights_change)
        late = harness.gateways["gw1"] = Gateway(harness.plane, harness.clock, "gw1")
        late.start()
        await harness.clock.advance(1.0)
        known = None if weights_change else 4
        assert {(route.policy_version, route.newest_policy_version) for route in late.routes} == {(known, known)}
        await harness.resume(lease, 5)
        await harness.clock.advance(1.0)
        assert {(route.policy_version, route.newest_policy_version) for route in late.routes} == {(5, 5)}


async def test_pause_waits_for_a_gateway_that_attaches_meanwhile(harness: Harness) -> None:
    async with harness.running():
        harness.gateways["gw0"].drains_s = 2.0
        asked = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest()))
        await harness.clock.advance(1.0)
        late = harness.gateways["gw1"] = Gateway(harness.plane, harness.clock, "gw1", drains_s=5.0)
        late.start()
        await harness.clock.advance(3.0)
        assert not asked.done()
        await harness.clock.advance(3.0)
        assert (await asked).phase is BarrierPhase.QUIET


async def test_gateway_that_missed_the_opening_is_ordered_again(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        lease = await harness.pause(lease_s=600.0)
        away = harness.gateways["gw1"]
        away.leave()
        await harness.resume(lease, 4)
        assert away.phase is BarrierPhase.QUIET
        away.come_back()
        await harness.clock.advance(5.0)
        assert (away.phase, [order.action for order in away.of(OpenBarrier)]) == (
            BarrierPhase.OPEN,
            [OpenBarrier(lease, 4)],
        )


async def test_gateway_that_missed_an_earlier_opening_keeps_its_versions(
    harness: Harness,
) -> None:
    async with harness.running("gw0", "gw1"):
        lease = await harness.pause(lease_s=600.0)
        away = harness.gateways["gw1"]
        away.leave()
        await harness.resume(lease, 4)
        await harness.resume(await harness.pause(), 5)
        away.come_back()
        await harness.clock.advance(5.0)
        assert (away.phase, [order.action for order in away.of(OpenBarrier)]) == (
            BarrierPhase.OPEN,
            [OpenBarrier(lease)],
        )
        assert [r.policy_version for r in away.routes] == [5, 5]


@pytest.mark.parametrize("process", ["the same", "another"])
@pytest.mark.parametrize("again", [False, True])
async def test_gateway_does_not_close_for_a_lease_that_is_over(harness: Harness, process: str, again: bool) -> None:
    """It detached while closing, so the end of the lease could not be sent to it."""
    async with harness.running("gw0", "gw1"):
        harness.gateways["gw1"].drains_s = 1000.0
        asked = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest(lease_s=3600.0, deadline_s=600.0)))
        await harness.clock.advance(1.0)
        gone = harness.gateways["gw1"]
        gone.leave()
        await harness.within(10.0, asked)
        with pytest.raises(Retryable, match="gateway gw1 detached"):
            await asked
        gone.drains_s = 0.1
        if process == "another":
            await gone.stop()
            harness.gateways["gw1"] = Gateway(harness.plane, harness.clock, "gw1")
        come = harness.gateways["gw1"]
        come.start() if process == "another" else come.come_back()
        if again:
            await harness.pause()
            assert [gateway.phase for gateway in harness.gateways.values()] == [BarrierPhase.QUIET] * 2
            await harness.resume()
        await harness.clock.advance(1.0)
        assert [gateway.phase for gateway in harness.gateways.values()] == [BarrierPhase.OPEN] * 2


async def test_gateway_closed_by_another_daemon_is_left_alone(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        await harness.resume(await harness.pause())
        by_hand = harness.gateways["gw1"]
        by_hand.lease, by_hand.until_s = "by hand", 1e9
        reported = len(by_hand.orders)
        await harness.clock.advance(10.0)
        assert len(by_hand.orders) == reported


async def test_unresponsive_gateway_is_not_ordered_repeatedly(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        lease = await harness.pause(lease_s=600.0)
        away = harness.gateways["gw1"]
        away.leave()
        await harness.resume(lease)
        away.broken, away.deaf = True, True
        away.come_back()
        await harness.clock.advance(4.0)
        assert len(away.of(OpenBarrier)) == 1


# --- restarts


async def test_restarted_daemon_recovers_barrier_lease_and_versions(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        harness.plane.fleet.barrier.set_version([E0, E1], 7)
        lease = await harness.pause(lease_s=30.0, holder="trainer")
        await harness.restart()
        assert harness.plane.fleet.barrier.state.phase is BarrierPhase.QUIET
        assert [gateway.phase for gateway in harness.gateways.values()] == [BarrierPhase.QUIET] * 2
        assert [len(gateway.of(CloseBarrier)) for gateway in harness.gateways.values()] == [1, 1]
        await harness.renew(lease, 30.0)
        await harness.resume(lease, 8)
        assert [r.policy_version for r in harness.gateways["gw1"].routes] == [8, 8]
        await harness.restart()
        await harness.clock.advance(1.0)
        assert [(r.policy_version, r.newest_policy_version) for r in harness.gateways["gw0"].routes] == [(8, 8)] * 2


async def test_engine_that_got_weights_after_a_restart_keeps_them(harness: Harness) -> None:
    """A redeployment may restart an engine under its old name. A later restart is detected as usual."""
    async with harness.running():
        barrier = harness.plane.fleet.barrier

        def generated(tokens: int) -> None:
            barrier.sampled(E0, sample(total=tokens))

        barrier.set_version([E0, E1], 7)
        generated(1000)
        barrier.set_version([E0], 7, "brought by a redeployment")
        generated(40)
        assert barrier.state.versions == {E0: 7, E1: 7}
        generated(39)
        assert barrier.state.versions == {E1: 7}


async def test_restarted_daemon_reports_a_lease_that_expired_meanwhile(harness: Harness) -> None:
    async with harness.running():
        lease = await harness.pause(lease_s=5.0)
        await harness.end()
        await harness.clock.advance(10.0)
        assert harness.gateways["gw0"].phase is BarrierPhase.OPEN
        await harness.restart()
        with pytest.raises(Permanent, match="requests have continued since"):
            await harness.resume(lease, 8)
        assert harness.plane.fleet.barrier.state.newest is None


async def test_restarted_daemon_opens_an_incomplete_pause(harness: Harness) -> None:
    async with harness.running():
        harness.gateways["gw0"].drains_s = 1000.0
        asked = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest(lease_s=600.0)))
        await harness.clock.advance(1.0)
        await harness.restart()
        asked.cancel()
        assert harness.plane.fleet.barrier.state.phase is BarrierPhase.OPEN
        assert harness.gateways["gw0"].phase is BarrierPhase.OPEN
        await harness.pause()  # it can be closed again at once


async def test_restarted_daemon_sends_the_last_opening_to_gateways(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        lease = await harness.pause()
        barrier = harness.plane.fleet.barrier
        barrier._take(barrier.state.resumed(lease, harness.clock.now_s(), [E0, E1], 7, []), "resume")  # exactly once
        await harness.restart()
        assert [gateway.phase for gateway in harness.gateways.values()] == [BarrierPhase.OPEN] * 2
        await harness.resume(await harness.pause())  # it can be closed again at once
        assert harness.plane.fleet.barrier.state.versions == {E0: 7, E1: 7}
        await harness.restart()
        await harness.clock.advance(5.0)
        orders = [o for gateway in harness.gateways.values() for o in gateway.of(OpenBarrier)]
        assert len(orders) == 2, "each got one more order, which it refused"
        await harness.pause()


# --- the loops


async def test_requests_do_not_move_while_the_barrier_is_closed_nor_just_after(harness: Harness) -> None:
    async with harness.running():
        plane, gateway = harness.plane, harness.gateways["gw0"]
        gateway.in_flight = [request(f"r{n}", "e0") for n in range(12)]
        lease = await harness.pause()
        await harness.clock.advance(2.0)
        assert plane.balance is not None
        assert plane.balance.verdict.code == "barrier_closed"
        with pytest.raises(
            Permanent, match="requests are paused while weights change; the pause barrier is quiet: lease"
        ):
            await plane.fleet.move(RequestId("r1"), E1)
        plan = await plane.slow_tick()
        assert (plan.verdict.code, plan.acted) == ("barrier_closed", False)
        assert not harness.entries(EntryKind.OPERATION_INTENT)[1:]
        await harness.resume(lease, 1)
        await harness.clock.advance(1.0)
        assert plane.balance.verdict.code == "barrier_opened"
        await harness.clock.advance(3.0)
        assert plane.balance.verdict.code not in ("barrier_closed", "barrier_opened")


async def test_plan_made_before_the_barrier_closed_is_not_carried_out(harness: Harness) -> None:
    config = CONFIG.replace("fast: {", "fast: {policy: none, ").replace("fleet:", "slow: {epsilon_s: 1}\nfleet:")
    plane = harness.start(config)
    async with harness.running():
        gateway = harness.gateways["gw0"]
        gateway.in_flight = [request(f"r{n}", "e0") for n in range(12)]
        await harness.clock.advance(1.0)

        async def long_thought(decide: Callable[[], Plan]) -> Plan:
            plan = decide()
            await harness.clock.sleep(5.0)
            return plan

        plane._offload = long_thought
        thinking = asyncio.create_task(plane.slow_tick())
        await harness.clock.advance(1.0)
        lease = await harness.pause()
        await harness.clock.advance(6.0)
        plan = await thinking
        assert (plan.decision, isinstance(plan.verdict, Act)) == ("rebalance", True)
        assert plane.plans.get(plan.id).acted_detail == "the fleet was paused before anything was done"
        assert gateway.of(MoveRequests) == []
        await harness.resume(lease)


async def test_pause_waits_for_engines_that_are_being_changed(harness: Harness) -> None:
    turn = harness.plane._turn
    async with harness.running():
        changing = turn.preparing()
        changing.__enter__()
        asked = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest(deadline_s=30.0)))
        await harness.clock.advance(10.0)
        assert harness.gateways["gw0"].of(CloseBarrier) == []
        changing.__exit__(None, None, None)
        await harness.clock.advance(1.0)
        assert (await asked).phase is BarrierPhase.QUIET
        await harness.resume()
        with turn.preparing():
            asked = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest(deadline_s=5.0)))
            await harness.clock.advance(6.0)
        with pytest.raises(Retryable, match="engines are being started or stopped"):
            await asked


async def test_restarted_engine_loses_its_weight_version(harness: Harness) -> None:
    async with harness.running():
        gateway = harness.gateways["gw0"]
        gateway.generated = {"e1": 0}
        await harness.clock.advance(1.0)
        assert [r.draining for r in gateway.routes] == [False, False], "no version is set"
        gateway.generated = {"e1": 500}
        harness.plane.fleet.barrier.set_version([E0, E1], 4)
        await harness.clock.advance(1.0)
        gateway.generated = {"e1": 20}
        await harness.clock.advance(1.0)
        assert [(r.policy_version, r.draining) for r in gateway.routes] == [(4, False), (None, True)]
        gateway.in_flight = [request("r1", "e0")]
        gateway.report()
        with pytest.raises(Permanent, match="engine e1 does not have the fleet's weights; see `orchestrrl barrier`"):
            await harness.plane.fleet.move(RequestId("r1"), E1)
        await harness.pause()
        await harness.resume(version=5)
        assert [(r.policy_version, r.draining) for r in gateway.routes] == [(5, False), (5, False)]
    assert "forgotten" in harness.events()


async def test_predictions_are_compared_with_unpaused_time(harness: Harness) -> None:
    async with harness.running():
        plane, gateway = harness.plane, harness.gateways["gw0"]
        gateway.in_flight = [request("r0", "e0")]
        await harness.clock.advance(1.0)
        plan = await plane.slow_tick()
        began_s = harness.clock.now_s()
        for _ in range(2):
            lease = await harness.pause()
            await harness.clock.advance(10.0)
            await harness.resume(lease)
            await harness.clock.advance(4.0)
        gateway.in_flight = []
        await harness.clock.advance(1.0)
        step = plane.fleet.state.step
        assert step is not None
        assert step.ended_s is not None
        assert step.ended_s - began_s == pytest.approx(29.0, abs=2.0)
        assert plane.plans.get(plan.id).actual_makespan_s == pytest.approx(step.ended_s - began_s - 20.0, abs=2.0)


async def test_kv_is_transferred_only_between_engines_of_one_version(harness: Harness) -> None:
    links = "connector: kv_handover, weights: w, inter_node_gbps_per_gpu: 8.0, latency_s: 0.01, kv_bytes_per_token: 1e3"
    plane = harness.start(CONFIG.replace("fleet:", f"fleet:\n  kv_transfer: {{{links}}}").replace("act", "advise"))
    assert plane.mode.current is Mode.ADVISE
    async with harness.running():
        for version, method in ((1, "transfer"), (2, "recompute")):
            plane.fleet.barrier.set_version([E0], 1)
            plane.fleet.barrier.set_version([E1], version)
            views = plane.fleet.state.engines(harness.clock.now_s())
            kv = plane.fleet.routes.kv_versions(views)
            assert (kv[E0] == kv[E1]) == (method == "transfer")
        assert [route.kv_version for route in harness.gateways["gw0"].routes] == ["tp2/w"] * 2


# --- cancelling


async def test_named_requests_and_groups_are_cancelled_on_all_gateways(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        for name in ("gw0", "gw1"):
            harness.gateways[name].in_flight = [in_group(f"{name}-{n}", "g", 0) for n in range(2)]
            harness.gateways[name].in_flight.append(in_group(f"{name}-other", "h", 0))
        asked = asyncio.create_task(harness.plane.fleet.canceller.cancel([RequestId("gw1-other")], ["g"], ""))
        await harness.clock.advance(0.5)
        assert (await asked).requests == ("gw0-0", "gw0-1", "gw1-0", "gw1-1", "gw1-other")
        harness.gateways["gw1"].broken = True
        asked = asyncio.create_task(harness.plane.fleet.canceller.cancel([], ["h"], "over"))
        await harness.clock.advance(10.0)
        assert ((await asked).requests, (await asked).silent) == (("gw0-other",), ("gw1",))
        with pytest.raises(ProblemFaults, match="must contain at least one id"):
            await harness.plane.fleet.canceller.cancel([], [], "")


async def test_group_with_enough_answers_is_cancelled_on_all_gateways(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        gw0, gw1 = harness.gateways["gw0"], harness.gateways["gw1"]
        gw0.in_flight = [in_group(f"a{n}", "g") for n in range(2)] + [in_group("x", "h")]
        gw1.in_flight = [in_group(f"b{n}", "g") for n in range(4)]
        await harness.clock.advance(0.5)
        gw0.done = [ended("a9", "g"), ended("a8", "g", "abort")]
        await harness.clock.advance(0.5)
        assert (gw0.of(CancelRequests), gw1.of(CancelRequests)) == ([], [])
        gw1.done = [ended("b9", "g", "length")]
        await harness.clock.advance(0.5)
        for gateway in (gw0, gw1):
            assert [order.action for order in gateway.of(CancelRequests)] == [CancelRequests((), ("g",), "redundant")]
        assert [r.id for r in gw0.in_flight] == ["x"]
        assert harness.plane.fleet.canceller.totals["redundant"] == 6


async def test_single_gateway_cancels_without_an_order(harness: Harness) -> None:
    async with harness.running():
        harness.gateways["gw0"].in_flight = [in_group(f"a{n}", "g") for n in range(2)]
        harness.gateways["gw0"].done = [ended("b0", "g"), ended("b1", "g")]
        await harness.clock.advance(1.0)
        assert harness.gateways["gw0"].of(CancelRequests) == []


def in_group(id: str, group: str, enough: int = 2) -> RequestView:
    view = request(id)
    return RequestView(view.id, view.engine, view.state, 100, 10, group=group, group_enough=enough)


def ended(id: str, group: str, reason: str = "stop") -> FinishedRequest:
    reported = finished(id, reason=reason)
    return FinishedRequest(reported.id, reported.engine, 100, 50, reason, group=group, group_enough=2)
