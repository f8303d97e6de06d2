"""The daemon's barrier under a virtual clock, between gateways that behave: they keep leases by themselves."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from barrier_house import CONFIG, E0, E1, Gateway, House
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
from orchestrrl.fleet.redeployment.outcomes import RedeploymentOutcome
from orchestrrl.fleet.reports import BarrierPhase, FinishedRequest
from planner.model import Act, Mode, Plan, RequestId, RequestView, Snapshot


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "journal.sqlite")
    made.start()
    yield made
    assert made.journal is not None
    made.journal.close()


# --- pausing and resuming


async def test_all_gateways_close_and_open_and_routes_carry_the_version(house: House) -> None:
    async with house.running("gw0", "gw1"):
        lease = await house.pause(holder="trainer", lease_s=30.0)
        assert [gateway.phase for gateway in house.gateways.values()] == [BarrierPhase.QUIET] * 2
        assert house.plane.barrier.state.phase is BarrierPhase.QUIET
        action = house.gateways["gw1"].of(CloseBarrier)[0].action
        assert isinstance(action, CloseBarrier)
        assert (action.holder, action.mode, action.frozen) == ("trainer", PauseMode.KEEP, FrozenRequests.RECOMPUTE)
        assert action.lease_until_s == pytest.approx(house.plane.barrier.state.lease.until_s)  # type: ignore[union-attr]
        await house.resume(lease, 12, (E1,))
        assert [gateway.phase for gateway in house.gateways.values()] == [BarrierPhase.OPEN] * 2
        for gateway in house.gateways.values():
            assert [(r.engine, r.policy_version, r.newest_policy_version, r.draining) for r in gateway.routes] == [
                ("e0", 12, 12, False),
                ("e1", None, 12, True),
            ]
            assert [order.action for order in gateway.of(OpenBarrier)] == [OpenBarrier(lease, 12, (E1,))]
        assert [(rest.engine, rest.done, rest.policy_version) for rest in house.plane.barrier.rests()] == [
            ("e0", True, 12),
            ("e1", False, None),
        ]
        assert house.plane.barrier.set_version([E1], 12) == 12
        await house.clock.advance(0.1)
        assert [(r.policy_version, r.draining) for r in house.gateways["gw0"].routes] == [(12, False), (12, False)]
    assert house.events() == ["pause", "quiet", "resume", "version"]
    assert house.plane.barrier.totals.paused_s == pytest.approx(0.25, abs=0.25)


async def test_the_versions_are_known_before_gateways_open(house: House) -> None:
    async with house.running():
        lease = await house.pause()
        await house.resume(lease, 3)
        newest = house.entries(EntryKind.BARRIER)[-1].sequence
        sent = [entry for entry in house.entries(EntryKind.OPERATION_INTENT) if "open_barrier" in str(entry.body)]
        assert newest < sent[0].sequence
        assert [route.policy_version for route in house.gateways["gw0"].routes_at_opening] == [3, 3]
        await house.resume(lease, 3)  # its answer got lost: the same again
        with pytest.raises(Permanent, match=r"has ended \(resumed\)"):
            await house.resume(lease, 4)
        with pytest.raises(Permanent, match="the pause barrier is open"):
            await house.resume("", 4)


async def test_one_lease_at_a_time(house: House) -> None:
    async with house.running():
        lease = await house.pause(holder="one", lease_s=30.0)
        with pytest.raises(Permanent, match=f"held by another: lease {lease} of one, until 00:17:1"):
            await house.pause(holder="two")
        await house.resume("")  # an operator
        assert house.plane.barrier.state.opened.detail == "opened by another than one"  # type: ignore[union-attr]
        await house.pause(holder="two")


async def test_without_gateways_nothing_can_be_brought_to_rest(house: House) -> None:
    with pytest.raises(Permanent, match="no gateway is attached"):
        await house.plane.barrier.pause(PauseRequest())
    assert house.events() == []
    with pytest.raises(ProblemFaults) as caught:
        await house.plane.barrier.pause(PauseRequest(lease_s=-1.0, deadline_s=float("nan")))
    assert len(caught.value.faults) == 2


async def test_a_drain_takes_as_long_as_it_may(house: House) -> None:
    async with house.running():
        house.gateways["gw0"].drains_s = 100.0
        asked = asyncio.create_task(house.plane.barrier.pause(PauseRequest(PauseMode.WAIT, deadline_s=120.0)))
        await house.clock.advance(50.0)
        assert house.plane.barrier.state.phase is BarrierPhase.CLOSING
        assert not asked.done()
        await house.clock.advance(51.0)
        assert (await asked).phase is BarrierPhase.QUIET


async def test_engines_are_paused_when_no_gateway_has_anything_to_finish(house: House) -> None:
    """The first one to be done would freeze what the others wait for."""
    async with house.running("gw0", "gw1"):
        house.gateways["gw1"].drains_s = 40.0
        asked = asyncio.create_task(house.plane.barrier.pause(PauseRequest(PauseMode.WAIT, deadline_s=120.0)))
        await house.clock.advance(20.0)
        house.gateways["gw2"] = late = Gateway(house.plane, house.clock, "gw2", drains_s=30.0)
        late.start()
        for told_s in (20.0, 5.0):  # a renewal does not pause them either
            await house.renew(house.plane.barrier.state.lease.id, 60.0)  # type: ignore[union-attr]
            await house.clock.advance(told_s)
            orders = [gateway.of(CloseBarrier) for gateway in house.gateways.values()]
            assert {order.action.engines_run for each in orders for order in each} == {True}  # type: ignore[union-attr]
            assert not asked.done()
        await house.clock.advance(10.0)
        assert (await asked).phase is BarrierPhase.QUIET
        orders = [gateway.of(CloseBarrier) for gateway in house.gateways.values()]
        assert [each[-1].action.engines_run for each in orders] == [False] * 3  # type: ignore[union-attr]
        assert [gateway.phase for gateway in house.gateways.values()] == [BarrierPhase.QUIET] * 3


@pytest.mark.parametrize("fault", ["slow", "silent", "gone", "refuses"])
async def test_where_one_gateway_does_not_come_to_rest_all_go_on(house: House, fault: str) -> None:
    async with house.running("gw0", "gw1"):
        bad = house.gateways["gw1"]
        bad.drains_s = 1000.0 if fault in ("slow", "gone") else 0.1
        bad.broken = fault == "silent"
        bad.lease = "another" if fault == "refuses" else ""
        bad.until_s = 1e9
        asked = asyncio.create_task(house.plane.barrier.pause(PauseRequest(lease_s=60.0, deadline_s=5.0)))
        await house.clock.advance(1.0)
        if fault == "gone":
            await bad.stop()
        await house.within(30.0, asked)
        expected = {
            "slow": "gateway gw1 did not come to rest: not quiet by the deadline: 3 requests",
            "silent": "the fleet did not come to rest: not in time; gateway gw1 still has 0 running",
            "gone": "the fleet did not come to rest: gateway gw1 has gone away; gateway gw1",
            "refuses": "gateway gw1 did not come to rest: this lease is over",
        }
        with pytest.raises(Retryable, match=expected[fault]):
            await asked
        assert house.gateways["gw0"].phase is BarrierPhase.OPEN
        assert house.plane.barrier.state.phase is BarrierPhase.OPEN
        assert house.plane.barrier.state.opened.how is LeaseEnd.GAVE_UP  # type: ignore[union-attr]
    assert house.events() == ["pause", "gave_up"]


async def test_whoever_stops_waiting_leaves_nothing_closed(house: House) -> None:
    async with house.running():
        house.gateways["gw0"].drains_s = 1000.0
        asked = asyncio.create_task(house.plane.barrier.pause(PauseRequest()))
        await house.clock.advance(1.0)
        asked.cancel()
        await house.clock.advance(1.0)
        assert asked.cancelled()
        assert (house.gateways["gw0"].phase, house.plane.barrier.state.phase) == (BarrierPhase.OPEN, BarrierPhase.OPEN)


async def test_one_may_begin_while_another_gives_up(house: House) -> None:
    async with house.running("gw0", "gw1"):
        house.gateways["gw1"].broken = True
        first = asyncio.create_task(house.plane.barrier.pause(PauseRequest(deadline_s=2.0)))
        await house.clock.advance(9.0)
        assert (house.plane.barrier.state.phase, first.done()) == (BarrierPhase.OPEN, False), "gw1 has still to answer"
        house.gateways["gw1"].broken = False
        house.gateways["gw0"].drains_s = 10.0
        second = asyncio.create_task(house.plane.barrier.pause(PauseRequest()))
        await house.clock.advance(5.0)
        with pytest.raises(Retryable, match="the fleet did not come to rest: not in time; gateway gw1"):
            await first
        await house.clock.advance(8.0)
        assert (await second).phase is BarrierPhase.QUIET
        await house.resume()
        house.gateways["gw0"].drains_s = 1000.0
        first = asyncio.create_task(house.plane.barrier.pause(PauseRequest()))
        await house.clock.advance(1.0)
        house.gateways["gw0"].drains_s = 0.1
        opening = asyncio.create_task(house.plane.barrier.resume("", None, ()))
        await asyncio.sleep(0)
        second = asyncio.create_task(house.plane.barrier.pause(PauseRequest()))
        await house.clock.advance(8.0)
        assert (await opening).opened is not None
        with pytest.raises(Retryable, match="somebody has opened the pause barrier"):
            await first
        assert (await second).phase is BarrierPhase.QUIET


async def test_an_operator_may_open_while_it_closes(house: House) -> None:
    async with house.running():
        house.gateways["gw0"].drains_s = 1000.0
        asked = asyncio.create_task(house.plane.barrier.pause(PauseRequest()))
        await house.clock.advance(1.0)
        await house.resume("")
        await house.clock.advance(1.0)
        with pytest.raises(Retryable, match="somebody has opened the pause barrier"):
            await asked
        assert house.gateways["gw0"].phase is BarrierPhase.OPEN
    assert house.events() == ["pause", "resume"]


@pytest.mark.parametrize("name", ["gw0", "gw1"])
async def test_engines_that_were_not_brought_to_rest_are_told_and_get_no_requests(house: House, name: str) -> None:
    async with house.running("gw0", "gw1"):
        house.gateways[name].unpaused = {E1: "connection refused"}
        lease = await house.pause()
        assert [(rest.engine, rest.done, rest.detail) for rest in house.plane.barrier.rests()] == [
            ("e0", True, ""),
            ("e1", False, "connection refused"),
        ]
        await house.resume(lease, 2)
        assert [(r.policy_version, r.draining) for r in house.gateways["gw0"].routes] == [(2, False), (None, True)]
        house.gateways[name].unpaused = {}
        await house.resume(await house.pause(), 3)
        assert [(r.policy_version, r.draining) for r in house.gateways["gw0"].routes] == [(3, False), (3, False)]


# --- leases


async def test_a_renewed_lease_lasts_and_then_ends_by_itself(house: House) -> None:
    async with house.running("gw0", "gw1"):
        lease = await house.pause(lease_s=10.0)
        for _ in range(5):
            await house.clock.advance(7.0)
            await house.renew(lease, 10.0)
        assert [gateway.phase for gateway in house.gateways.values()] == [BarrierPhase.QUIET] * 2
        await house.clock.advance(11.0)
        assert [gateway.phase for gateway in house.gateways.values()] == [BarrierPhase.OPEN] * 2
        state = house.plane.barrier.state
        assert state.opened is not None
        assert (state.phase, state.opened.how) == (BarrierPhase.OPEN, LeaseEnd.EXPIRED)
        assert "weights that were being changed may be mixed" in state.opened.detail
        for ask in (house.renew(lease, 10.0), house.resume(lease)):
            with pytest.raises(Permanent, match=r"has ended \(expired\): requests have gone on since"):
                await ask
        assert house.plane.barrier.totals.expired == 1
        assert house.plane.barrier.paused_s == pytest.approx(45.0, abs=2.0)
        assert [gateway.of(OpenBarrier) for gateway in house.gateways.values()] == [[], []]
    assert house.events()[-1] == "expired"


async def test_a_renewal_that_a_gateway_did_not_hear_fails(house: House) -> None:
    async with house.running("gw0", "gw1"):
        lease = await house.pause(lease_s=60.0)
        house.gateways["gw1"].broken = True
        with pytest.raises(Retryable, match=r"some may open at 00:17:4. UTC: gw1: has not answered in time"):
            await house.renew(lease, 60.0)
        house.gateways["gw1"].broken = False
        await house.renew(lease, 60.0)
        await house.gateways["gw1"].stop()
        with pytest.raises(Retryable, match="gw1: is not attached"):
            await house.renew(lease, 90.0)
        await house.clock.advance(61.0)  # by then it has opened, if it is still there
        await house.renew(lease, 60.0)
        with pytest.raises(ProblemFaults, match="lease_id: must not be empty"):
            await house.renew("", 60.0)


async def test_a_gateway_that_comes_while_closed_closes_and_later_hears_nothing(house: House) -> None:
    async with house.running():
        lease = await house.pause(lease_s=60.0, deadline_s=2.0)
        await house.clock.advance(5.0)
        for name in ("gw1", "gw2"):
            house.gateways[name] = Gateway(house.plane, house.clock, name)
        house.gateways["gw1"].start()
        await house.clock.advance(1.0)
        assert (house.gateways["gw1"].phase, house.gateways["gw1"].lease) == (BarrierPhase.QUIET, lease)
        await house.resume(lease)
        house.gateways["gw2"].start()
        await house.clock.advance(5.0)
        assert house.gateways["gw2"].orders == []


async def test_a_gateway_that_comes_while_the_fleet_comes_to_rest_is_waited_for(house: House) -> None:
    async with house.running():
        house.gateways["gw0"].drains_s = 2.0
        asked = asyncio.create_task(house.plane.barrier.pause(PauseRequest()))
        await house.clock.advance(1.0)
        late = house.gateways["gw1"] = Gateway(house.plane, house.clock, "gw1", drains_s=5.0)
        late.start()
        await house.clock.advance(3.0)
        assert not asked.done()
        await house.clock.advance(3.0)
        assert (await asked).phase is BarrierPhase.QUIET


async def test_a_gateway_that_missed_the_opening_is_told_again(house: House) -> None:
    async with house.running("gw0", "gw1"):
        lease = await house.pause(lease_s=600.0)
        away = house.gateways["gw1"]
        away.leave()
        await house.resume(lease, 4)
        assert away.phase is BarrierPhase.QUIET
        away.come_back()
        await house.clock.advance(5.0)
        assert (away.phase, [order.action for order in away.of(OpenBarrier)]) == (
            BarrierPhase.OPEN,
            [OpenBarrier(lease, 4)],
        )


async def test_a_gateway_that_missed_an_opening_before_the_last_is_told_and_keeps_its_versions(house: House) -> None:
    async with house.running("gw0", "gw1"):
        lease = await house.pause(lease_s=600.0)
        away = house.gateways["gw1"]
        away.leave()
        await house.resume(lease, 4)
        await house.resume(await house.pause(), 5)
        away.come_back()
        await house.clock.advance(5.0)
        assert (away.phase, [order.action for order in away.of(OpenBarrier)]) == (
            BarrierPhase.OPEN,
            [OpenBarrier(lease)],
        )
        assert [r.policy_version for r in away.routes] == [5, 5]


@pytest.mark.parametrize("process", ["the same", "another"])
@pytest.mark.parametrize("again", [False, True])
async def test_a_gateway_does_not_close_for_a_lease_that_is_over(house: House, process: str, again: bool) -> None:
    """It went while it was closing, and nobody could tell it of the end."""
    async with house.running("gw0", "gw1"):
        house.gateways["gw1"].drains_s = 1000.0
        asked = asyncio.create_task(house.plane.barrier.pause(PauseRequest(lease_s=3600.0, deadline_s=600.0)))
        await house.clock.advance(1.0)
        gone = house.gateways["gw1"]
        gone.leave()
        await house.within(10.0, asked)
        with pytest.raises(Retryable, match="gateway gw1 has gone away"):
            await asked
        gone.drains_s = 0.1
        if process == "another":
            await gone.stop()
            house.gateways["gw1"] = Gateway(house.plane, house.clock, "gw1")
        come = house.gateways["gw1"]
        come.start() if process == "another" else come.come_back()
        if again:
            await house.pause()
            assert [gateway.phase for gateway in house.gateways.values()] == [BarrierPhase.QUIET] * 2
            await house.resume()
        await house.clock.advance(1.0)
        assert [gateway.phase for gateway in house.gateways.values()] == [BarrierPhase.OPEN] * 2


async def test_a_gateway_that_somebody_else_closed_is_left_alone(house: House) -> None:
    async with house.running("gw0", "gw1"):
        await house.resume(await house.pause())
        by_hand = house.gateways["gw1"]
        by_hand.lease, by_hand.until_s = "by hand", 1e9
        told = len(by_hand.orders)
        await house.clock.advance(10.0)
        assert len(by_hand.orders) == told


async def test_a_gateway_that_does_not_answer_is_not_told_over_and_over(house: House) -> None:
    async with house.running("gw0", "gw1"):
        lease = await house.pause(lease_s=600.0)
        away = house.gateways["gw1"]
        away.leave()
        await house.resume(lease)
        away.broken, away.deaf = True, True
        away.come_back()
        await house.clock.advance(4.0)
        assert len(away.of(OpenBarrier)) == 1


# --- restarts


async def test_a_restarted_daemon_knows_barrier_lease_and_versions(house: House) -> None:
    async with house.running("gw0", "gw1"):
        house.plane.barrier.set_version([E0, E1], 7)
        lease = await house.pause(lease_s=30.0, holder="trainer")
        await house.restart()
        assert house.plane.barrier.state.phase is BarrierPhase.QUIET
        assert [gateway.phase for gateway in house.gateways.values()] == [BarrierPhase.QUIET] * 2
        assert [len(gateway.of(CloseBarrier)) for gateway in house.gateways.values()] == [1, 1]
        await house.renew(lease, 30.0)
        await house.resume(lease, 8)
        assert [r.policy_version for r in house.gateways["gw1"].routes] == [8, 8]
        await house.restart()
        await house.clock.advance(1.0)
        assert [(r.policy_version, r.newest_policy_version) for r in house.gateways["gw0"].routes] == [(8, 8)] * 2


async def test_an_engine_that_got_its_weights_after_a_restart_keeps_them(house: House) -> None:
    """As one that a redeployment has started anew under its old name; once told, a further restart is seen as ever."""
    async with house.running():
        barrier = house.plane.barrier

        def generated(tokens: int) -> None:
            barrier.sampled(E0, sample(total=tokens))

        barrier.set_version([E0, E1], 7)
        generated(1000)
        barrier.set_version([E0], 7, "brought by a redeployment")
        generated(40)
        assert barrier.state.versions == {E0: 7, E1: 7}
        generated(39)
        assert barrier.state.versions == {E1: 7}


async def test_a_daemon_that_is_away_until_the_lease_ends_says_so(house: House) -> None:
    async with house.running():
        lease = await house.pause(lease_s=5.0)
        await house.end()
        await house.clock.advance(10.0)
        assert house.gateways["gw0"].phase is BarrierPhase.OPEN
        await house.restart()
        with pytest.raises(Permanent, match="requests have gone on since"):
            await house.resume(lease, 8)
        assert house.plane.barrier.state.newest is None


async def test_a_daemon_that_died_while_the_fleet_came_to_rest_opens_it(house: House) -> None:
    async with house.running():
        house.gateways["gw0"].drains_s = 1000.0
        asked = asyncio.create_task(house.plane.barrier.pause(PauseRequest(lease_s=600.0)))
        await house.clock.advance(1.0)
        await house.restart()
        asked.cancel()
        assert house.plane.barrier.state.phase is BarrierPhase.OPEN
        assert house.gateways["gw0"].phase is BarrierPhase.OPEN
        await house.pause()  # it can be closed again at once


async def test_a_daemon_that_died_before_it_told_gateways_to_open_has_them_do_so(house: House) -> None:
    async with house.running("gw0", "gw1"):
        lease = await house.pause()
        barrier = house.plane.barrier
        barrier._take(barrier.state.resumed(lease, house.clock.now_s(), [E0, E1], 7, []), "resume")  # and no more
        await house.restart()
        assert [gateway.phase for gateway in house.gateways.values()] == [BarrierPhase.OPEN] * 2
        await house.resume(await house.pause())  # it can be closed again at once
        assert house.plane.barrier.state.versions == {E0: 7, E1: 7}
        await house.restart()
        await house.clock.advance(5.0)
        orders = [o for gateway in house.gateways.values() for o in gateway.of(OpenBarrier)]
        assert len(orders) == 2, "told once more each, which they refuse"
        await house.pause()


# --- the loops


async def test_nothing_moves_while_the_barrier_is_closed_nor_just_after(house: House) -> None:
    async with house.running():
        plane, gateway = house.plane, house.gateways["gw0"]
        gateway.in_flight = [request(f"r{n}", "e0") for n in range(12)]
        lease = await house.pause()
        await house.clock.advance(2.0)
        assert plane.balance is not None
        assert plane.balance.verdict.code == "barrier_closed"
        with pytest.raises(
            Permanent, match="requests stand still while weights change: the pause barrier is quiet, lease"
        ):
            await plane.move(RequestId("r1"), E1)
        plan = await plane.slow_tick()
        assert (plan.verdict.code, plan.acted) == ("barrier_closed", False)
        assert not house.entries(EntryKind.OPERATION_INTENT)[1:]
        await house.resume(lease, 1)
        await house.clock.advance(1.0)
        assert plane.balance.verdict.code == "barrier_opened"
        await house.clock.advance(3.0)
        assert plane.balance.verdict.code not in ("barrier_closed", "barrier_opened")


async def test_a_plan_that_was_made_before_the_barrier_closed_is_not_carried_out(house: House) -> None:
    config = CONFIG.replace("fast: {", "fast: {policy: none, ").replace("fleet:", "slow: {epsilon_s: 1}\nfleet:")
    plane = house.start(config)
    async with house.running():
        gateway = house.gateways["gw0"]
        gateway.in_flight = [request(f"r{n}", "e0") for n in range(12)]
        await house.clock.advance(1.0)

        async def long_thought(decide: Callable[[], Plan]) -> Plan:
            plan = decide()
            await house.clock.sleep(5.0)
            return plan

        plane._offload = long_thought
        thinking = asyncio.create_task(plane.slow_tick())
        await house.clock.advance(1.0)
        lease = await house.pause()
        await house.clock.advance(6.0)
        plan = await thinking
        assert (plan.decision, isinstance(plan.verdict, Act)) == ("rebalance", True)
        assert plane.plans.get(plan.id).acted_detail == "requests were brought to rest before anything was done"
        assert gateway.of(MoveRequests) == []
        await house.resume(lease)


async def test_a_pause_waits_for_engines_that_are_being_changed(house: House) -> None:
    class Changing:
        busy = True

        async def carry_out(self, plan: Plan, snapshot: Snapshot) -> RedeploymentOutcome:
            raise AssertionError("nothing is to be changed while the pause barrier closes")

    async with house.running():
        house.plane.deployment = deployment = Changing()
        asked = asyncio.create_task(house.plane.barrier.pause(PauseRequest(deadline_s=30.0)))
        await house.clock.advance(10.0)
        assert house.gateways["gw0"].of(CloseBarrier) == []
        deployment.busy = False
        await house.clock.advance(1.0)
        assert (await asked).phase is BarrierPhase.QUIET
        await house.resume()
        deployment.busy = True
        asked = asyncio.create_task(house.plane.barrier.pause(PauseRequest(deadline_s=5.0)))
        await house.clock.advance(6.0)
        with pytest.raises(Retryable, match="engines are being started or stopped"):
            await asked


async def test_an_engine_that_restarts_has_lost_its_weights(house: House) -> None:
    async with house.running():
        gateway = house.gateways["gw0"]
        gateway.generated = {"e1": 0}
        await house.clock.advance(1.0)
        assert [r.draining for r in gateway.routes] == [False, False], "nobody speaks of versions"
        gateway.generated = {"e1": 500}
        house.plane.barrier.set_version([E0, E1], 4)
        await house.clock.advance(1.0)
        gateway.generated = {"e1": 20}
        await house.clock.advance(1.0)
        assert [(r.policy_version, r.draining) for r in gateway.routes] == [(4, False), (None, True)]
        gateway.in_flight = [request("r1", "e0")]
        gateway.report()
        with pytest.raises(Permanent, match="engine e1 has not the fleet's weights: see `orchestrrl barrier`"):
            await house.plane.move(RequestId("r1"), E1)
        await house.pause()
        await house.resume(version=5)
        assert [(r.policy_version, r.draining) for r in gateway.routes] == [(5, False), (5, False)]
    assert "forgotten" in house.events()


async def test_what_a_plan_foresaw_is_held_against_the_time_in_which_requests_ran(house: House) -> None:
    async with house.running():
        plane, gateway = house.plane, house.gateways["gw0"]
        gateway.in_flight = [request("r0", "e0")]
        await house.clock.advance(1.0)
        plan = await plane.slow_tick()
        began_s = house.clock.now_s()
        for _ in range(2):
            lease = await house.pause()
            await house.clock.advance(10.0)
            await house.resume(lease)
            await house.clock.advance(4.0)
        gateway.in_flight = []
        await house.clock.advance(1.0)
        step = plane.state.step
        assert step is not None
        assert step.ended_s is not None
        assert step.ended_s - began_s == pytest.approx(29.0, abs=2.0)
        assert plane.plans.get(plan.id).actual_makespan_s == pytest.approx(step.ended_s - began_s - 20.0, abs=2.0)


async def test_kv_is_handed_over_between_engines_of_one_version_only(house: House) -> None:
    links = "connector: kv_handover, weights: w, inter_node_gbps_per_gpu: 8.0, latency_s: 0.01, kv_bytes_per_token: 1e3"
    plane = house.start(CONFIG.replace("fleet:", f"fleet:\n  kv_transfer: {{{links}}}").replace("act", "advise"))
    assert plane.mode is Mode.ADVISE
    async with house.running():
        for version, method in ((1, "transfer"), (2, "recompute")):
            plane.barrier.set_version([E0], 1)
            plane.barrier.set_version([E1], version)
            views = plane.state.engines(house.clock.now_s())
            kv = plane.routes.kv_versions(views)
            assert (kv[E0] == kv[E1]) == (method == "transfer")
        assert [route.kv_version for route in house.gateways["gw0"].routes] == ["tp2/w"] * 2


# --- cancelling


async def test_requests_and_groups_are_ended_wherever_they_are(house: House) -> None:
    async with house.running("gw0", "gw1"):
        for name in ("gw0", "gw1"):
            house.gateways[name].in_flight = [in_group(f"{name}-{n}", "g", 0) for n in range(2)]
            house.gateways[name].in_flight.append(in_group(f"{name}-other", "h", 0))
        asked = asyncio.create_task(house.plane.canceller.cancel([RequestId("gw1-other")], ["g"], ""))
        await house.clock.advance(0.5)
        assert (await asked).requests == ("gw0-0", "gw0-1", "gw1-0", "gw1-1", "gw1-other")
        house.gateways["gw1"].broken = True
        asked = asyncio.create_task(house.plane.canceller.cancel([], ["h"], "over"))
        await house.clock.advance(10.0)
        assert ((await asked).requests, (await asked).silent) == (("gw0-other",), ("gw1",))
        with pytest.raises(ProblemFaults, match="must name something"):
            await house.plane.canceller.cancel([], [], "")


async def test_a_group_that_has_enough_over_all_gateways_is_ended_everywhere(house: House) -> None:
    async with house.running("gw0", "gw1"):
        gw0, gw1 = house.gateways["gw0"], house.gateways["gw1"]
        gw0.in_flight = [in_group(f"a{n}", "g") for n in range(2)] + [in_group("x", "h")]
        gw1.in_flight = [in_group(f"b{n}", "g") for n in range(4)]
        await house.clock.advance(0.5)
        gw0.done = [ended("a9", "g"), ended("a8", "g", "abort")]
        await house.clock.advance(0.5)
        assert (gw0.of(CancelRequests), gw1.of(CancelRequests)) == ([], [])
        gw1.done = [ended("b9", "g", "length")]
        await house.clock.advance(0.5)
        for gateway in (gw0, gw1):
            assert [order.action for order in gateway.of(CancelRequests)] == [CancelRequests((), ("g",), "redundant")]
        assert [r.id for r in gw0.in_flight] == ["x"]
        assert house.plane.canceller.totals["redundant"] == 6


async def test_a_gateway_that_is_alone_knows_by_itself(house: House) -> None:
    async with house.running():
        house.gateways["gw0"].in_flight = [in_group(f"a{n}", "g") for n in range(2)]
        house.gateways["gw0"].done = [ended("b0", "g"), ended("b1", "g")]
        await house.clock.advance(1.0)
        assert house.gateways["gw0"].of(CancelRequests) == []


def in_group(id: str, group: str, enough: int = 2) -> RequestView:
    view = request(id)
    return RequestView(view.id, view.engine, view.state, 100, 10, group=group, group_enough=enough)


def ended(id: str, group: str, reason: str = "stop") -> FinishedRequest:
    told = finished(id, reason=reason)
    return FinishedRequest(told.id, told.engine, 100, 50, reason, group=group, group_enough=2)
