"""Tests of redeployments on a virtual clock: after any failure, or if the daemon is killed at any point, the fleet ends
in the old or the new state, with every request on a serving engine."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from builders import engine_report, sample
from redeployment_harness import UP_AFTER_S, FakeEngine, Harness

from orchestrrl.core.errors import Permanent, ProblemFaults, Retryable
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.core.operation import OperationState, StepState
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.fleet.deployers.base import EngineLife
from orchestrrl.fleet.redeployment.steps import (
    RedeployRequest,
    ServedWeights,
    StepKind,
)
from planner.model import Act, ConfigurationId, EngineId, GpuId, Plan, PlanId, PlannedInstance

TO_TP2 = RedeployRequest((("tp2", 0),), reason="requested by the test")


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """Provide two narrow engines with requests, and one on GPUs 2 and 3 that is not part of the redeployment."""
    harness = Harness(tmp_path)
    harness.place("a", "tp1", 0)
    harness.place("b", "tp1", 1)
    harness.place("w", "tp2", 2, 3)
    for number in range(6):
        harness.gateway.put(f"r{number}", "abw"[number % 3])
    return harness


def serving(harness: Harness) -> set[str]:
    return {str(engine) for engine in harness.gateway.usable()}


def check_whole(harness: Harness, engines: set[str], requests: int = 6) -> None:
    """Check that the fleet is exactly these engines, that all of them get requests, and that no request is
    elsewhere."""
    assert set(harness.machines.alive()) == engines
    assert serving(harness) == engines
    assert {str(route.engine) for route in harness.gateway.routes.routes} == engines
    assert not harness.gateway.held
    assert len(harness.gateway.requests) == requests
    assert {str(view.engine) for view in harness.gateway.requests.values()} <= engines
    assert not harness.plane.fleet.routes.draining
    assert not harness.plane.fleet.routes.expected


def is_new(engine: str) -> bool:
    return engine.startswith("s")


async def test_two_narrow_engines_become_a_wide_one(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        assert harness.watched == [{"a", "b", "w"}]
        id = redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert (report.id, report.state) == (id, OperationState.DONE)
        check_whole(harness, {f"{id}.0", "w"})
        assert harness.gateway.cut == []
        assert harness.machines.stops == ["a", "b"]
        assert (report.requests_parked, report.requests_moved) == (3, 1)  # the wide one that stays takes its share
        assert report.closed_s is not None
        assert report.elapsed_s is not None
        assert report.engines == (f"{id}.0", "w")
        assert harness.watched == [{"a", "b", "w"}, {"b", "w"}, {"w"}, {f"{id}.0", "w"}]
        assert {f"{reported.step.kind} {reported.step.engine or ''}": reported.detail for reported in report.steps} == {
            "fence ": "2 engines accept no new requests",
            "evacuate a": "2 requests left",
            "evacuate b": "2 requests left",
            "stop a": "",
            "stop b": "",
            "start s1.0": "http://s1.0",
            "ready s1.0": "a token in 0.01 s",
            "load_weights s1.0": "no weight version is set: it keeps its own",
            "warm_up s1.0": "16 tokens",
            "verify s1.0": "TP=2 DP=1 EP=False, KV of 2000 tokens",
            "admit ": "requests go to 1 engines",
            "commit ": "",
        }
        assert [reported.step.kind for reported in report.steps if reported.step.engine in (None, f"{id}.0")] == [
            StepKind.FENCE,
            StepKind.START,
            StepKind.READY,
            StepKind.LOAD,
            StepKind.WARM_UP,
            StepKind.VERIFY,
            StepKind.ADMIT,
            StepKind.COMMIT,
        ]
        with pytest.raises(Permanent, match="nothing to redeploy"):
            redeployer.begin(TO_TP2)
        assert redeployer.draft(TO_TP2)[1] == ()
    steps = harness.entries(EntryKind.REDEPLOYMENT_STEP)
    assert [entry.body["state"] for entry in steps if entry.body["kind"] == "start"] == ["running", "done"]
    assert all(entry.body["valid_until_s"] > entry.at_s for entry in steps if entry.body["state"] == "running")
    assert harness.engines_noted(EntryKind.ENGINE_STOPPED) == [("a", True, ""), ("b", True, "")]
    (started,) = harness.entries(EntryKind.ENGINE_STARTED)
    assert (started.subject, started.body["done"], started.body["configuration"]) == ("s1.0", True, "tp2")
    assert (started.body["gpus"], started.body["expected_s"]) == ([0, 1], 1.5)
    assert started.body["elapsed_s"] >= UP_AFTER_S


async def test_later_daemon_recovers_the_redeployment(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
    async with harness.daemon() as redeployer:
        check_whole(harness, {f"{report.id}.0", "w"})
        assert redeployer.history() == [report] == [redeployer.report(report.id)]
        with pytest.raises(Permanent, match="no redeployment 's9'"):
            redeployer.report("s9")
        assert harness.plane.plans.last_redeploy_s == report.ended_s
        redeployer.begin(RedeployRequest((("tp1", 2), ("tp2", 0))))
        back = await harness.until_ended()
        assert back.state is OperationState.DONE
        check_whole(harness, {f"{back.id}.0", f"{back.id}.1", "w"})


STEPS = 32  # journal entries of the redeployment below: its beginning, and each step before and after


@pytest.mark.parametrize("after", range(STEPS))
async def test_killed_daemon_leaves_the_old_or_the_new_fleet(harness: Harness, after: int) -> None:
    """Kills it at every entry: before the step was done, and after it."""
    harness.killed_after = after
    async with harness.daemon() as redeployer:
        id = redeployer.begin(TO_TP2)
        await harness.clock.advance(30.0)
    written = len(harness.entries(EntryKind.REDEPLOYMENT_STEP, EntryKind.REDEPLOYMENT_BEGAN))
    assert written == min(after + 1, STEPS - 7)
    harness.killed_after = None
    await harness.clock.advance(3.0)
    async with harness.daemon():
        report = await harness.until_ended()
        assert report.id == id
        assert not {StepState.PENDING, StepState.RUNNING} & {reported.state for reported in report.steps}
        if report.state is OperationState.DONE:
            check_whole(harness, {f"{id}.0", "w"})
        else:
            assert report.state is OperationState.ROLLED_BACK
            check_whole(harness, {"a", "b", "w"})
        steps = harness.entries(EntryKind.REDEPLOYMENT_STEP)
        fenced = [entry.body["began_s"] for entry in steps if entry.body["kind"] == "fence"]
        admitted = [entry.at_s for entry in steps if (entry.body["kind"], entry.body["state"]) == ("admit", "done")]
        closed_s = admitted[-1] - fenced[0] if fenced else None  # to any engine
        assert report.closed_s == pytest.approx(closed_s)
        assert "w" not in harness.machines.stops
    async with harness.daemon():  # and nothing follows
        assert not harness.redeployer.redeploying()


async def test_daemon_killed_again_while_undoing_leaves_a_whole_fleet(harness: Harness) -> None:
    harness.killed_after = 10
    for after in (10, 14, 17, 21, 24):
        harness.killed_after = after
        async with harness.daemon() as redeployer:
            if after == 10:
                redeployer.begin(TO_TP2)
            await harness.clock.advance(10.0)
    harness.killed_after = None
    async with harness.daemon():
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        check_whole(harness, {"a", "b", "w"})


async def test_stopped_engine_of_an_earlier_daemon_is_not_routed_to(harness: Harness) -> None:
    """Another engine may have its address now."""
    async with harness.daemon() as redeployer:
        new = EngineId(f"{redeployer.begin(TO_TP2)}.0")
        while new not in harness.machines.alive():
            await harness.clock.advance(0.1)
        harness.plane.fleet.engine_reported(engine_report(new), 1)
        await harness.clock.advance(1.0)
        (routes,) = harness.entries(EntryKind.ROUTES)[-1:]
        assert str(new) in str(routes.body)
        harness.killed_after = 0
    del harness.machines.engines[new]
    harness.killed_after = None
    async with harness.daemon():
        assert str(new) not in {str(route.engine) for route in harness.gateway.routes.routes}
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        check_whole(harness, {"a", "b", "w"})


@pytest.mark.parametrize(
    ("what", "reports"),
    [
        ("start", "start of s1.0"),
        ("healthy", "ready of s1.0: timed out after 10 s"),
        ("probe", "ready of s1.0: timed out after 10 s"),
        ("layout", "verify of s1.0"),
        ("score", "verify of s1.0"),
        ("excerpt", "warm_up of s1.0"),
    ],
)
@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_failure_of_a_new_engine_in_any_step_restores_the_old_ones(
    harness: Harness, what: str, reports: str, how: str
) -> None:
    if how == "fails":
        harness.machines.faults[what, "s1.0"] = Permanent("is broken")
    else:
        harness.machines.hangs.add((what, "s1.0"))
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        assert reports in report.detail
        assert "is broken" in report.detail or "timed out" in report.detail
        check_whole(harness, {"a", "b", "w"})
        assert harness.gateway.cut == []


def dies(engine: FakeEngine) -> None:
    engine.life = EngineLife.ENDED


def answers_wrongly(engine: FakeEngine) -> None:
    engine.logprob = -1.2


def laid_out_wrongly(engine: FakeEngine) -> None:
    engine.tp = 1


def too_small(engine: FakeEngine) -> None:
    engine.capacity_tokens = 1500


@pytest.mark.parametrize(
    ("made", "reports"),
    [
        (dies, "ready of s1.0: engine s1.0 ended while it started: died"),
        (answers_wrongly, "differ by 0.2 nats a token, limit 0.1"),
        (laid_out_wrongly, "has another layout: TP 1 instead of 2"),
        (too_small, "has KV for 1500 tokens, plans require 2000"),
    ],
)
async def test_wrong_new_engine_fails_verification(harness: Harness, made: object, reports: str) -> None:
    def meddle(engine: FakeEngine) -> None:
        if is_new(engine.spec.engine):
            made(engine)  # type: ignore[operator]

    harness.machines.made = meddle
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        assert reports in report.detail
        check_whole(harness, {"a", "b", "w"})
        failed, *back = harness.engines_noted(EntryKind.ENGINE_STARTED)
        assert failed[:2] == ("s1.0", False)
        assert reports.endswith(failed[2]) or reports in failed[2]
        assert [reported[:2] for reported in back] == [("a", True), ("b", True)]


async def test_failed_undo_leaves_the_other_engines_serving(harness: Harness) -> None:
    harness.machines.faults["start", "tp2"] = Permanent("no such image")
    harness.machines.faults["start", "b"] = Retryable("no room", 1.0)
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.DEGRADED
        assert "start of b: timed out after 5 s: no room" in report.detail
        check_whole(harness, {"a", "w"})
        del harness.machines.faults["start", "b"]
        redeployer.begin(RedeployRequest((("tp1", 2), ("tp2", 0))))  # an operator repairs it
        report = await harness.until_ended()
        assert report.state is OperationState.DONE
        assert len(harness.machines.alive()) == 3


async def test_unmovable_requests_are_waited_for_or_abort_the_redeployment(harness: Harness) -> None:
    harness.gateway.put("stuck", "a", movable=False)
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        why = "1 requests remain, 1 of them cannot move"
        assert f"evacuate of a: timed out after 5 s: {why}" in report.detail
        assert harness.machines.stops == []
        check_whole(harness, {"a", "b", "w"}, 7)
        redeployer.begin(TO_TP2)
        await harness.clock.advance(1.0)
        del harness.gateway.requests[next(id for id in harness.gateway.requests if id == "stuck")]
        assert (await harness.until_ended()).state is OperationState.DONE


@pytest.mark.parametrize("after_s", [0.1, 0.6, 1.2, 2.0])
async def test_operator_may_cancel_a_redeployment(harness: Harness, after_s: float) -> None:
    async with harness.daemon() as redeployer:
        id = redeployer.begin(TO_TP2)
        await harness.clock.advance(after_s)
        try:
            redeployer.cancel(id, "changed my mind")
        except Permanent:
            assert (await harness.until_ended()).state is OperationState.DONE
            return
        report = await harness.until_ended()
        assert (report.state, report.detail) == (OperationState.ROLLED_BACK, "called off: changed my mind")
        assert {reported.detail for reported in report.steps if reported.state is StepState.FAILED} <= {"interrupted"}
        check_whole(harness, {"a", "b", "w"})
        with pytest.raises(Permanent, match="is not running"):
            redeployer.cancel(id, "")


async def test_redeployment_cannot_be_cancelled_after_admission(harness: Harness) -> None:
    async def slowly(engines: object) -> str:
        await harness.clock.sleep(1.0)
        return ""

    async with harness.daemon() as redeployer:
        redeployer._control_plane.circuits_follow = slowly
        id = redeployer.begin(TO_TP2)
        while (
            next(reported for reported in redeployer.report().steps if reported.step.kind is StepKind.ADMIT).began_s
            is None
        ):
            await harness.clock.advance(0.1)
        with pytest.raises(Permanent, match="can no longer be cancelled"):
            redeployer.cancel(id, "")
        assert (await harness.until_ended()).state is OperationState.DONE


async def test_second_redeployment_and_closed_barrier_are_refused(harness: Harness) -> None:
    closed = ["the pause barrier is closed: by a trainer"]
    async with harness.daemon() as redeployer:
        with pytest.raises(Permanent, match="no redeployment is running"):
            redeployer.cancel("", "")
        redeployer._control_plane.redeployment_hold = lambda: closed.pop() if closed else ""
        with pytest.raises(Permanent, match="the pause barrier is closed: by a trainer"):
            redeployer.begin(TO_TP2)
        id = redeployer.begin(TO_TP2)
        with pytest.raises(Permanent, match=rf"another change of the deployment is in progress \({id}\)"):
            redeployer.begin(TO_TP2)
        with pytest.raises(Permanent, match="redeployment s7 is not running"):
            redeployer.cancel("s7", "")
        assert (await harness.until_ended()).state is OperationState.DONE


# --- plans


async def plan_of(harness: Harness, *instances: tuple[str, str, tuple[int, ...], bool]) -> Plan:
    """Return a remembered plan of engines, each with its configuration, its GPUs, and whether it is kept. All requests
    of other engines are planned for the first one."""
    plan, snapshot = await harness.plane._plan()
    requests = tuple(view.id for view in snapshot.requests if view.engine != "w")
    fleet = [
        PlannedInstance(EngineId(name), ConfigurationId(configuration), tuple(map(GpuId, gpus)), kept, 0, 0.0, 0.0, 0.0)
        for name, configuration, gpus, kept in instances
    ]
    fleet[0] = dataclasses.replace(fleet[0], requests=requests)
    verdict = Act("reconfigure", "the tail is long")
    plan = dataclasses.replace(plan, id=PlanId("p7"), instances=tuple(fleet), verdict=verdict)
    harness.plane.plans.add(plan, "")
    return plan


WIDER = ("p7-0", "tp2", (0, 1), False), ("w", "tp2", (2, 3), True)


async def test_plan_is_carried_out_and_its_result_returned(harness: Harness) -> None:
    harness.machines.lasts_s["stop", "tp1"] = 2.0
    async with harness.daemon() as redeployer:
        deployer: Any = redeployer._deployer
        listed, plan = deployer.list_engines, await plan_of(harness, *WIDER)

        async def slowly() -> object:
            await harness.clock.sleep(0.25)
            return await listed()

        deployer.list_engines = slowly
        carrying = asyncio.create_task(redeployer.carry_out(plan))
        await asyncio.sleep(0)
        assert redeployer.redeploying()
        deployer.list_engines = listed
        await harness.clock.advance(1.0)
        assert harness.watched[-1] == {"w"}  # they are not watched while they stop
        with pytest.raises(Permanent, match="in progress"):
            await redeployer.carry_out(plan)
        report = await harness.until_ended()
        outcome = await carrying
        assert (report.plan, report.reason, report.state) == ("p7", "the tail is long", OperationState.DONE)
        assert (outcome.done, outcome.detail) == (True, "2 engines stopped, 1 started, 4 requests moved")
        assert outcome.ended_s == report.ended_s
        (start,) = outcome.starts  # from when the engines on their GPUs began to stop
        assert (start.configuration, start.expected_s) == ("tp2", 1.5)
        assert start.elapsed_s == pytest.approx(2.0 + UP_AFTER_S)
        check_whole(harness, {"p7-0", "w"})
        assert sorted(harness.gateway.on(EngineId("p7-0"))) == ["r0", "r1", "r3", "r4"]
    assert harness.entries(EntryKind.DEPLOYMENT_ENDED) == []  # returned to the caller


async def test_requests_that_returned_while_the_daemon_was_down_are_evacuated_again(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.place("a", "tp1", 0)
    harness.place("b", "tp1", 1)
    harness.gateway.put("r0", "a")
    harness.machines.hangs.add(("stop", "tp1"))
    async with harness.daemon() as redeployer:
        await plan_of(harness, ("p7-0", "tp2", (2, 3), False))
        redeployer.begin(RedeployRequest(plan="p7"))
        await harness.clock.advance(4.0)
        assert harness.gateway.on(EngineId("a")) == []
    harness.machines.hangs.clear()
    harness.gateway.put("late", "a")
    async with harness.daemon():
        report = await harness.until_ended()
        assert (report.state, harness.gateway.cut) == (OperationState.DONE, [])
        check_whole(harness, {"p7-0"}, 2)


async def test_plan_for_a_changed_fleet_changes_nothing(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        plan = await plan_of(harness, *WIDER)
        harness.machines.engines[EngineId("w")].life = EngineLife.ENDED  # and no scan has run since
        carrying = asyncio.create_task(redeployer.carry_out(plan))
        await harness.clock.advance(1.0)
        with pytest.raises(Permanent, match="keeps engine w, which no longer exists"):
            carrying.result()
        assert not redeployer.redeploying()
        with pytest.raises(Permanent, match="there was no redeployment yet"):
            redeployer.report()


@pytest.mark.parametrize("breaks", [False, True])
async def test_operator_can_have_a_plan_carried_out(harness: Harness, breaks: bool) -> None:
    if breaks:
        harness.machines.faults["probe", "p7-0"] = Permanent("is broken")
    async with harness.daemon() as redeployer:
        await plan_of(harness, *WIDER)
        redeployer.begin(RedeployRequest(plan="p7"))
        report = await harness.until_ended()
        assert (report.plan, report.reason) == ("p7", "by an operator")
        check_whole(harness, {"a", "b", "w"} if breaks else {"p7-0", "w"})
        message = "2 engines stopped, 1 started, 4 requests moved"
        if breaks:
            why = "rolled back: ready of p7-0: timed out after 10 s: is broken"
            message = f"{why} (3 engines stopped, 2 started, 4 requests moved)"
        for kind in (EntryKind.DEPLOYMENT_ENDED, EntryKind.PLAN_ACTED):
            (entry,) = harness.entries(kind)
            assert (entry.subject, entry.body["done"], entry.body["detail"]) == ("p7", not breaks, message)


@pytest.mark.parametrize("tensors_only", [False, True])
async def test_weights_are_loaded_and_reported(harness: Harness, tensors_only: bool) -> None:
    async with harness.daemon() as redeployer:
        harness.plane.fleet.barrier.set_version([EngineId("a"), EngineId("b"), EngineId("w")], 7, "", "/ckpt/7")
        for engine in harness.machines.engines.values():
            engine.weights = 7
        if not tensors_only:
            harness.machines.faults["load_weights", "tp2"] = Permanent("it was started with them")
        weights = ServedWeights(7, "/ckpt/7", tensors_only)
        redeployer._control_plane.current_weights = lambda: weights
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.DONE, report.detail
        new = EngineId(f"{report.id}.0")
        assert harness.machines.engines[new].spec.weights == ("" if tensors_only else "/ckpt/7")
        (loaded,) = [reported.detail for reported in report.steps if reported.step.kind is StepKind.LOAD]
        assert loaded == ("version 7" if tensors_only else "was started with version 7")
        assert harness.machines.engines[new].weights == 7
        assert harness.plane.fleet.barrier.state.versions[new] == 7
        check_whole(harness, {new, "w"})


async def test_unknown_weight_location_prevents_the_start(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        harness.plane.fleet.barrier.set_version([EngineId("a"), EngineId("b"), EngineId("w")], 7)
        with pytest.raises(Permanent, match="whose location is unknown; run `orchestrrl engines set-version 7"):
            redeployer.begin(TO_TP2)
        check_whole(harness, {"a", "b", "w"})


async def test_unknown_engines_are_stopped_and_known_ones_adopted(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
    harness.machines.engines[EngineId("stranger")] = FakeEngine(harness.spec("stranger", "tp1", 9), 0.0)
    async with harness.daemon():
        check_whole(harness, {f"{report.id}.0", "w"})
        assert harness.machines.stops[-1] == "stranger"
        assert harness.engines_noted(EntryKind.ENGINE_STOPPED)[-1] == ("stranger", True, "belonged to no deployment")


async def test_engine_that_ended_is_cleaned_up_and_can_be_replaced(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        harness.machines.engines[EngineId("a")].life = EngineLife.ENDED
        await redeployer._scan()
        redeployer.begin(RedeployRequest((("tp1", 2), ("tp2", 0))))
        report = await harness.until_ended()
        assert report.state is OperationState.DONE
        check_whole(harness, {f"{report.id}.0", "b", "w"})


async def test_sleeping_engines_are_woken_to_undo(tmp_path: Path) -> None:
    harness = Harness(tmp_path, sleepers=True, keep_asleep=True)
    harness.place("a", "tp1", 0)
    harness.place("b", "tp1", 1)
    async with harness.daemon() as redeployer:
        tell_capabilities(harness, "a", "b")
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.DONE
        assert {str(id) for id, engine in harness.machines.engines.items() if engine.lent} == {"a", "b"}
        assert all(harness.machines.engines[EngineId(name)].sleeping for name in "ab")
    async with harness.daemon() as redeployer:  # they stay asleep
        assert {str(id) for id, engine in harness.machines.engines.items() if engine.lent} == {"a", "b"}
        harness.machines.faults["check", "tp1"] = ProblemFaults(["tp1: is not installed any more"])  # to be started
        redeployer.begin(RedeployRequest((("tp1", 2),)))
        back = await harness.until_ended()
        assert back.state is OperationState.DONE
        assert StepKind.WAKE in [reported.step.kind for reported in back.steps]
        check_whole(harness, {"a", "b"}, 0)
        assert harness.machines.starts.keys() == {f"{report.id}.0", f"{report.id}.1"}


async def test_sleeping_engines_are_stopped_if_none_are_kept(tmp_path: Path) -> None:
    harness = Harness(tmp_path, sleepers=True)
    harness.place("a", "tp1", 0)
    harness.place("b", "tp1", 1)
    async with harness.daemon() as redeployer:
        tell_capabilities(harness, "a", "b")
        harness.machines.faults["stop", "b"] = Permanent("does not end")
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert (report.state, report.detail) == (OperationState.DONE, "retire of b: does not end")
        assert [str(id) for id, engine in harness.machines.engines.items() if engine.lent] == ["b"]
        del harness.machines.faults["stop", "b"]


async def test_elastic_engines_are_scaled_instead_of_restarted(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.machines.can_scale = True
    harness.place("a", "ep2", 0, 1)
    harness.place("b", "tp2", 2, 3)
    harness.gateway.put("r0", "a")
    harness.gateway.put("r1", "b")
    async with harness.daemon() as redeployer:
        tell_capabilities(harness, "a", "b")
        redeployer.begin(RedeployRequest((("ep4", 1),)))
        report = await harness.until_ended()
        assert report.state is OperationState.DONE, report.detail
        check_whole(harness, {"a"}, 2)
        assert (harness.machines.engines[EngineId("a")].dp, harness.machines.stops) == (4, ["b"])
        assert harness.machines.starts == {}
        assert harness.plane.fleet.state.configuration_of(EngineId("a")) == "ep4"
        redeployer.begin(RedeployRequest((("ep2", 1), ("tp2", 1))))
        report = await harness.until_ended()
        assert report.state is OperationState.DONE, report.detail
        (started,) = harness.machines.starts
        check_whole(harness, {"a", started}, 2)
        assert harness.machines.engines[EngineId("a")].dp == 2
        harness.machines.faults["score", "a"] = Permanent("is broken")
        redeployer.begin(RedeployRequest((("ep4", 1),)))
        report = await harness.until_ended()
        assert report.state is OperationState.DEGRADED  # it fails while undoing, too
        assert serving(harness) == {started}  # no incorrect engine keeps GPUs


@pytest.mark.parametrize("after", range(0, 40, 3))
async def test_killed_daemon_that_scales_leaves_a_whole_fleet(tmp_path: Path, after: int) -> None:
    harness = Harness(tmp_path)
    harness.machines.can_scale = True
    harness.place("a", "ep2", 0, 1)
    harness.place("b", "tp2", 2, 3)
    harness.gateway.put("r0", "a")
    harness.killed_after = after
    async with harness.daemon() as redeployer:
        tell_capabilities(harness, "a", "b")
        redeployer.begin(RedeployRequest((("ep4", 1),)))
        await harness.clock.advance(30.0)
    harness.killed_after = None
    async with harness.daemon():
        report = await harness.until_ended()
        done = report.state is OperationState.DONE
        check_whole(harness, {"a"} if done else {"a", "b"}, 1)
        engine = harness.machines.engines[EngineId("a")]
        assert (engine.dp, len(engine.spec.gpus)) == ((4, 4) if done else (2, 2))


async def test_unstartable_target_is_rejected_before_any_stop(harness: Harness) -> None:
    harness.machines.faults["check", "tp2"] = ProblemFaults(["tp2.arguments: contradict the layout, got --tp 3"])
    async with harness.daemon() as redeployer:
        with pytest.raises(ProblemFaults, match="contradict the layout"):
            redeployer.begin(TO_TP2)
        check_whole(harness, {"a", "b", "w"})
        assert not redeployer.redeploying()


async def test_all_engines_can_stop_once_requests_have_finished(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        redeployer.begin(RedeployRequest((("nothing", 0),)))
        await harness.clock.advance(2.0)
        assert harness.machines.stops == []
        harness.gateway.requests.clear()
        report = await harness.until_ended()
        assert report.state is OperationState.DONE
        assert harness.machines.engines == {}


async def test_sleeping_engines_end_too_if_all_are_to_stop(tmp_path: Path) -> None:
    harness = Harness(tmp_path, sleepers=True, keep_asleep=True)
    harness.place("a", "tp1", 0)
    harness.place("b", "tp1", 1)
    async with harness.daemon() as redeployer:
        tell_capabilities(harness, "a", "b")
        redeployer.begin(RedeployRequest((("tp2", 1),)))
        await harness.until_ended()
        assert len(harness.machines.engines) == 3
        redeployer.begin(RedeployRequest((("nothing", 0),)))
        assert (await harness.until_ended()).state is OperationState.DONE
        assert harness.machines.engines == {}
        with pytest.raises(Permanent, match="nothing to redeploy"):
            redeployer.begin(RedeployRequest((("nothing", 0),)))


def tell_capabilities(harness: Harness, *engines: str) -> None:
    """Report the engine's capabilities, as its watch does."""
    machines = harness.machines
    offers = EngineCapabilities("fake", "1", ("fake",), sleep=machines.can_sleep, scale_elastic_ep=machines.can_scale)
    for engine in engines:
        reported = engine_report(engine, sample=sample(harness.clock.now_s()))
        harness.plane.fleet.engine_reported(dataclasses.replace(reported, capabilities=offers), 1)
