"""Tests of events during a redeployment that are not its steps, on a virtual clock."""

import asyncio
import dataclasses
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from builders import engine_report, sample
from redeployment_harness import CONFIG, Client, FakeEngine, Harness

from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, ProblemFaults, Retryable
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.core.operation import OBSERVE_AGAIN_S, OperationRun, OperationState, StepState
from orchestrrl.core.operations import MoveRequests, Operation, OperationItemResult, OperationResult
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.redeployment_wiring import RedeployedFleet
from orchestrrl.fleet.deployers.base import EngineLife
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.redeployment.actions import POLL_S
from orchestrrl.fleet.redeployment.steps import (
    RedeployRequest,
)
from orchestrrl.fleet.state import EngineFacts
from planner.model import EngineHealth, EngineId

TO_TP2 = RedeployRequest((("tp2", 0),), reason="requested by the test")
A, B, W = EngineId("a"), EngineId("b"), EngineId("w")


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """Provide two narrow engines with requests, and one that is not part of the redeployment."""
    harness = Harness(tmp_path)
    harness.place("a", "tp1", 0)
    harness.place("b", "tp1", 1)
    harness.place("w", "tp2", 2, 3)
    for number in range(6):
        harness.gateway.put(f"r{number}", "abw"[number % 3])
    return harness


def check_whole(harness: Harness, *engines: str) -> None:
    """Check that the fleet is exactly these engines, and that all requests are on them."""
    assert set(harness.machines.alive()) == set(engines) == {str(engine) for engine in harness.gateway.usable()}
    assert {str(view.engine) for view in harness.gateway.requests.values()} <= set(engines)
    assert not harness.gateway.held
    assert not harness.plane.fleet.routes.draining
    assert not harness.plane.fleet.routes.expected


async def test_maintenance_continues_after_engines_end(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        tending = asyncio.create_task(redeployer.maintain())
        for engine in (A, B):
            harness.machines.engines[engine].life = EngineLife.ENDED
            await harness.clock.advance(5.0)
            assert not tending.done(), tending.exception()
            assert harness.machines.stops[-1] == engine  # its GPUs are free again
        check_whole(harness, "w")
        assert {route.engine for route in harness.gateway.routes.routes} == redeployer.deployed.keys() == {W}
        assert harness.watched == [{"a", "b", "w"}, {"b", "w"}, {"w"}]
        assert harness.engines_noted(EntryKind.ENGINE_STOPPED) == [("a", True, "died"), ("b", True, "died")]
        tending.cancel()


async def test_engines_of_a_removed_configuration_continue_to_serve(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.config = parse_config(CONFIG.replace("id: tp1", "id: narrow"))
    async with harness.daemon():
        check_whole(harness, "a", "b", "w")
        assert harness.plane.fleet.state.configuration_of(A) is None
        reported = [record.message for record in caplog.records if "not configured" in record.message]
        assert reported == [f"engine {engine} runs as tp1, which is not configured" for engine in "ab"]


async def test_engines_that_ended_while_the_daemon_was_down_are_cleaned_up(harness: Harness) -> None:
    harness.machines.engines[A].life = EngineLife.ENDED
    async with harness.daemon() as redeployer:
        check_whole(harness, "b", "w")
        assert redeployer.deployed.keys() == {B, W}
        assert harness.machines.stops == [A]
        assert harness.engines_noted(EntryKind.ENGINE_STOPPED) == [("a", True, "died")]


async def test_deleted_engine_frees_its_gpus(harness: Harness) -> None:
    """The engine was deleted externally: the deployer does not list it any more."""
    async with harness.daemon() as redeployer:
        tending = asyncio.create_task(redeployer.maintain())
        del harness.machines.engines[A]
        await harness.clock.advance(5.0)
        check_whole(harness, "b", "w")
        redeployer.begin(RedeployRequest((("tp1", 2), ("tp2", 1))))
        report = await harness.until_ended()
        assert report.state is OperationState.DONE
        check_whole(harness, "b", "w", f"{report.id}.0")
        tending.cancel()


async def test_scan_overtaken_by_a_redeployment_is_ignored(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        listed = redeployer._deployer.list_engines
        may_answer = asyncio.Event()

        async def slowly() -> object:
            answer = await listed()
            await may_answer.wait()
            return answer

        redeployer._deployer.list_engines = slowly
        tending = asyncio.create_task(redeployer.maintain())
        await harness.clock.advance(2.0)
        redeployer._deployer.list_engines = listed
        redeployer.begin(TO_TP2)
        await harness.clock.advance(1.0)
        assert "s1.0" in harness.machines.engines
        may_answer.set()
        report = await harness.until_ended()
        assert report.state is OperationState.DONE
        check_whole(harness, "s1.0", "w")
        tending.cancel()


def breaks(harness: Harness) -> None:
    """Make new engines start but answer no request."""
    harness.machines.faults["probe", "tp2"] = Permanent("is broken")


def tell_tokens(harness: Harness, engine: str, tokens: int) -> None:
    """Report an engine's token counter since its start, as its watch does."""
    read = dataclasses.replace(sample(harness.clock.now_s()), generation_tokens_total=tokens)
    harness.sequence = getattr(harness, "sequence", 0) + 1
    reported = engine_report(engine, sequence=harness.sequence, sample=read)
    harness.plane.fleet.engine_reported(reported, 1)


async def test_engine_restarted_while_undoing_keeps_its_weight_version(harness: Harness) -> None:
    """Its token counter restarts at 0, which for any other engine means lost weights."""
    async with harness.daemon() as redeployer:
        harness.plane.fleet.barrier.set_version([A, B, W], 7, "", "/ckpt/7")
        for engine in harness.machines.engines.values():
            engine.weights = 7
        tell_tokens(harness, "a", 1000)
        assert harness.plane.fleet.barrier._generated == {A: 1000}
        breaks(harness)
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        tell_tokens(harness, "a", 17)
        await harness.clock.advance(1.0)
        assert harness.plane.fleet.barrier.state.versions[A] == 7
        check_whole(harness, "a", "b", "w")


async def test_undo_reports_no_weights_of_engines_that_it_did_not_load(harness: Harness) -> None:
    """An engine that missed the last update and was left out returns as it was."""
    async with harness.daemon() as redeployer:
        harness.plane.fleet.barrier.set_version([A, B, W], 6, "", "/ckpt/6")
        harness.plane.fleet.barrier.set_version([A, B], 7, "", "/ckpt/7")
        harness.plane.fleet.barrier.set_version([W], 6)
        harness.plane.fleet.barrier._take(
            dataclasses.replace(harness.plane.fleet.barrier.state, newest=7, newest_source="/ckpt/7"), "test"
        )
        harness.plane.fleet._barrier_changed()
        harness.machines.engines[W].weights = 6
        harness.machines.engines[A].weights = harness.machines.engines[B].weights = 7
        breaks(harness)
        redeployer.begin(RedeployRequest((("tp2", 2),)))
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        assert harness.plane.fleet.barrier.state.versions == {A: 7, B: 7, W: 6}
        assert not harness.plane.fleet.barrier.state.serves(W)


async def test_removed_engines_do_not_determine_the_fleets_weights(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        harness.plane.fleet.barrier.set_version([A, B, W], 7, "", "/ckpt/7")
        for engine in harness.machines.engines.values():
            engine.weights = 7
        redeployer.begin(TO_TP2)
        new = EngineId(f"{(await harness.until_ended()).id}.0")
        assert harness.plane.fleet.barrier.state.versions == {new: 7, W: 7}
        harness.plane.fleet.barrier.set_version([new, W], 8, "", "/ckpt/8")
        assert harness.plane.fleet.barrier.state.newest == 8
        await harness.clock.advance(2.0)
        check_whole(harness, new, "w")


async def test_engine_restarted_while_undoing_is_verified_by_the_next_daemon(harness: Harness) -> None:
    """It runs when the next daemon starts, but nothing else is known of it."""
    async with harness.daemon() as redeployer:
        harness.plane.fleet.barrier.set_version([A, B, W], 7, "", "/ckpt/7")
        for engine in harness.machines.engines.values():
            engine.weights = 7
        breaks(harness)
        harness.machines.hangs.add(("probe", "a"))
        redeployer.begin(TO_TP2)
        await harness.clock.advance(16.0)
        assert harness.machines.starts["a"] == 1
    harness.machines.hangs.clear()
    async with harness.daemon():
        await harness.clock.advance(0.5)
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        check_whole(harness, "a", "b", "w")
        assert harness.machines.engines[A].weights == 7
        assert harness.plane.fleet.barrier.state.versions == {A: 7, B: 7, W: 7}
        assert harness.machines.starts["a"] == 1


async def test_engine_with_wrong_weights_is_not_admitted(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgets(client: Client, policy_version: int) -> None: ...

    monkeypatch.setattr(Client, "name_weights", forgets)

    def outdated(engine: FakeEngine) -> None:
        engine.weights = 6 if engine.spec.configuration == "tp2" else 7

    harness.machines.made = outdated
    async with harness.daemon() as redeployer:
        harness.plane.fleet.barrier.set_version([A, B, W], 7, "", "/ckpt/7")
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert (report.state, report.detail) == (
            OperationState.ROLLED_BACK,
            "verify of s1.0: its weights are version 6, the fleet's are version 7",
        )


async def test_unhealthy_engine_is_waited_for(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ill(client: Client) -> bool:
        return False

    async with harness.daemon() as redeployer:
        with monkeypatch.context() as patched:
            patched.setattr(Client, "healthy", ill)
            redeployer.begin(TO_TP2)
            await harness.clock.advance(5.0)
            assert redeployer.report().engines == ("s1.0", "w")
            assert harness.gateway.usable() == ["w"]
        assert (await harness.until_ended()).state is OperationState.DONE
        check_whole(harness, "s1.0", "w")


async def test_undo_loads_weights_that_changed_meanwhile(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        harness.plane.fleet.barrier.set_version([A, B, W], 7, "", "/ckpt/7")
        for engine in harness.machines.engines.values():
            engine.weights = 7
        redeployer.begin(TO_TP2)
        await harness.clock.advance(1.0)
        harness.plane.fleet.barrier.set_version([W], 8, "", "/ckpt/8")
        harness.machines.engines[W].weights = 8
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        assert "the fleet's weights changed from version 7 to 8 during the redeployment" in report.detail
        assert {engine.weights for engine in harness.machines.engines.values()} == {8}
        assert harness.plane.fleet.barrier.state.versions == {A: 8, B: 8, W: 8}
        check_whole(harness, "a", "b", "w")


async def test_engine_removed_by_an_operator_does_not_stop_the_redeployment(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        harness.plane.fleet.barrier.set_version([A, B, W], 7, "", "/ckpt/7")
        for engine in harness.machines.engines.values():
            engine.weights = 7
        breaks(harness)
        redeployer.begin(TO_TP2)
        await harness.clock.advance(0.5)
        harness.gateway.held.clear()
        harness.gateway.requests.clear()
        harness.plane.fleet.membership_changes._change(
            "remove", A, harness.plane.fleet.membership_changes.membership.with_removed(A), ""
        )
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK, report.detail
        check_whole_but(harness, "a")


def check_whole_but(harness: Harness, removed: str) -> None:
    assert removed not in {str(engine) for engine in harness.gateway.usable()}
    assert not harness.plane.fleet.routes.draining
    assert not harness.plane.fleet.routes.expected


async def test_drained_engine_gets_no_requests_of_leaving_engines(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        harness.plane.fleet.membership_changes.drain(W)
        redeployer.begin(RedeployRequest((("tp2", 1),)))
        report = await harness.until_ended()
        assert report.state is OperationState.DONE, report.detail
        assert harness.gateway.on(W) == ["r2", "r5"]
        assert report.requests_moved == 0
        assert set(harness.gateway.usable()) == {f"{report.id}.0"}


async def test_refused_request_moves_to_another_engine(harness: Harness) -> None:
    """An engine that stays is unhealthy, which its gateway has noticed but the daemon has not."""
    perform = harness.gateway._perform

    def refusing(operation: Operation) -> OperationResult:
        assert isinstance(operation.action, MoveRequests)
        taken = tuple(move for move in operation.action.moves if move.to_engine != W)
        refused = [move for move in operation.action.moves if move.to_engine == W]
        done = perform(dataclasses.replace(operation, action=MoveRequests(taken)))
        items = (*done.items, *(OperationItemResult(move.request, False, "w takes no requests") for move in refused))
        return dataclasses.replace(done, items=items)

    harness.gateway._perform = refusing  # type: ignore[method-assign]
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.DONE, report.detail
        assert report.requests_moved == 0
        assert report.requests_parked == 4


async def test_engine_without_metrics_is_not_stopped(harness: Harness) -> None:
    harness.machines.faults["metrics", "a"] = Permanent("is too busy")
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        assert report.detail == "evacuate of a: timed out after 5 s: its metrics cannot be read: is too busy"
        assert harness.machines.stops == []
        check_whole(harness, "a", "b", "w")


async def test_failed_stop_leaves_the_engine_serving(harness: Harness) -> None:
    harness.machines.faults["stop", "a"] = Permanent("does not end")
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert (report.state, report.detail) == (
            OperationState.ROLLED_BACK,
            "stop of a: does not end; stop of a: does not end",
        )
        check_whole(harness, "a", "b", "w")
        assert harness.watched[-1] == {"a", "b", "w"}
        assert harness.engines_noted(EntryKind.ENGINE_STOPPED)[:1] == [("a", False, "does not end")]


async def test_request_unknown_to_gateways_is_reported(harness: Harness) -> None:
    harness.gateway.requests.clear()
    async with harness.daemon() as redeployer:
        harness.gateway.on = lambda engine: ["elsewhere"] * 3  # type: ignore[method-assign,assignment]
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        assert "it has 3 requests that no gateway has reported" in report.detail


async def test_engine_removed_by_an_operator_is_not_in_the_target(harness: Harness) -> None:
    harness.gateway.requests.clear()
    async with harness.daemon() as redeployer:
        await harness.plane.fleet.membership_changes.remove(B)
        redeployer.begin(RedeployRequest((("tp1", 2), ("tp2", 1))))
        report = await harness.until_ended()
        assert report.state is OperationState.DONE
        check_whole(harness, "a", "w", f"{report.id}.0")


async def test_unverified_engines_get_no_requests_of_drained_ones(harness: Harness) -> None:
    harness.machines.hangs.add(("layout", "tp2"))
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await harness.clock.advance(4.0)
        tell_tokens(harness, "s1.0", 1)  # its watch reports it healthy
        tell_tokens(harness, "w", 1)
        harness.plane.fleet.membership_changes.drain(W, move=True)
        await harness.clock.advance(3.0)
        ordered = [entry.body["operation"]["action"]["moves"] for entry in harness.entries(EntryKind.OPERATION_INTENT)]
        assert "w" not in {move["from_engine"] for moves in ordered for move in moves}
        harness.machines.hangs.clear()
        await harness.until_ended()


async def test_deployer_that_fails_at_the_end_does_not_leave_the_redeployment_open(
    harness: Harness,
) -> None:
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await harness.clock.advance(1.0)
        listed, refusals = redeployer._deployer.list_engines, []

        async def refusing() -> object:
            if not refusals:
                refusals.append(harness.clock.now_s())
                raise Retryable("the API server is away", 1.0)
            return await listed()

        redeployer._deployer.list_engines = refusing
        report = await harness.until_ended()
        assert report.state is OperationState.DONE
        assert len(refusals) == 1
        assert [entry.subject for entry in harness.entries(EntryKind.REDEPLOYMENT_ENDED)] == [report.id]
        check_whole(harness, f"{report.id}.0", "w")


async def test_undo_waits_for_a_deployer_that_cannot_list_engines(harness: Harness) -> None:
    breaks(harness)
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await harness.clock.advance(5.0)
        deployer: Any = redeployer._deployer
        listed, asked_s = deployer.list_engines, []

        async def refusing() -> object:
            asked_s.append(harness.clock.now_s())
            if len(asked_s) < 3:
                raise Retryable("the API server is away", 1.0)
            return await listed()

        deployer.list_engines = refusing
        assert (await harness.until_ended()).state is OperationState.ROLLED_BACK
        check_whole(harness, "a", "b", "w")
        assert [later - before for before, later in pairwise(asked_s[:3])] == [OBSERVE_AGAIN_S] * 2


async def test_steps_have_ended_when_the_daemon_closes_the_deployer(harness: Harness) -> None:
    meddle, closed = harness.machines.meddle, []

    async def hanging(what: str, engine: FakeEngine | EngineSpec) -> None:
        if what == "stop":
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(9):  # its cleanup
                    await asyncio.sleep(0)
                closed.append(harness.redeployer._deployer.closed)
        await meddle(what, engine)

    harness.machines.meddle = hanging  # type: ignore[method-assign]
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await harness.clock.advance(2.0)
    assert closed == [False, False]


async def test_defect_in_the_redeployment_leaves_no_engine_fenced(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(run: OperationRun[Any], failure: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(OperationRun, "_end", broken)
    breaks(harness)
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await harness.clock.advance(1.0)
        assert harness.plane.fleet.routes.expected
        await harness.clock.advance(20.0)
        assert not redeployer.redeploying()
        assert not harness.plane.fleet.routes.draining
        assert not harness.plane.fleet.routes.expected
        assert [record.message for record in caplog.records if "failed with a defect" in record.message] == [
            "a redeployment failed with a defect: of ours"
        ]


@pytest.mark.parametrize(
    ("error", "every_s"), [(Retryable("no room", 0.7), 0.7), (OutcomeUnknown("no answer"), POLL_S)], ids=str
)
async def test_start_without_a_result_is_requested_again(
    harness: Harness, error: OrchestrRLError, every_s: float
) -> None:
    meddle, asked_s = harness.machines.meddle, []

    async def refusing(what: str, engine: FakeEngine | EngineSpec) -> None:
        if what == "start":
            asked_s.append(harness.clock.now_s())
            if len(asked_s) < 3:
                raise error
        await meddle(what, engine)

    harness.machines.meddle = refusing  # type: ignore[method-assign]
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        assert (await harness.until_ended()).state is OperationState.DONE
        assert [later - before for before, later in pairwise(asked_s)] == pytest.approx([every_s] * 2)


async def test_redeployment_without_an_end_is_not_resumed_after_a_later_one(harness: Harness) -> None:
    """Its end could not be journalled, e.g. because the disk was full."""
    async with harness.daemon() as redeployer:
        append = harness.plane.journal.append

        def full(at_s: float, kind: EntryKind, subject: str, body: Any) -> int:
            if kind is EntryKind.REDEPLOYMENT_ENDED:
                raise Permanent("disk full")
            return append(at_s, kind, subject, body)

        harness.plane.journal.append = full
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.DONE
        harness.plane.journal.append = append
        redeployer.begin(RedeployRequest((("tp1", 2), ("tp2", 1))))
        back = await harness.until_ended()
        assert back.state is OperationState.DONE
    async with harness.daemon() as redeployer:
        await harness.until_ended()
        assert harness.machines.stops == ["a", "b", "w"]
        check_whole(harness, f"{back.id}.0", f"{back.id}.1", f"{report.id}.0")


async def test_defect_in_a_step_is_undone_like_a_failure(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        harness.machines.faults["layout", "tp2"] = ZeroDivisionError("of a test")  # type: ignore[assignment]
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        assert "ZeroDivisionError('of a test')" in report.detail
        check_whole(harness, "a", "b", "w")


async def test_full_disk_does_not_keep_old_engines_from_serving(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        harness.plane.fleet.barrier.set_version([A, B, W], 7, "", "/ckpt/7")
        for engine in harness.machines.engines.values():
            engine.weights = 7
        breaks(harness)
        redeployer.begin(TO_TP2)
        await harness.clock.advance(5.0)

        def full(at_s: float, kind: EntryKind, subject: str, body: Any) -> int:
            raise Permanent("disk full")

        append, harness.plane.journal.append = harness.plane.journal.append, full
        with suppress(AssertionError):
            await harness.until_ended()
        harness.plane.journal.append = append
        await harness.clock.advance(2.0)
        assert harness.redeployer.report().state is OperationState.ROLLED_BACK
        check_whole(harness, "a", "b", "w")
        assert harness.plane.fleet.barrier.state.versions == {A: 7, B: 7, W: 7}


async def test_unknown_engine_that_cannot_be_stopped_does_not_block_the_daemon(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
    harness.machines.engines[EngineId("stranger")] = FakeEngine(harness.spec("stranger", "tp1", 3), 0.0)
    harness.machines.faults["stop", "stranger"] = OutcomeUnknown("processes do not end on SIGKILL")
    async with harness.daemon():
        assert {f"{report.id}.0", "w"} == set(harness.gateway.usable())
        assert harness.engines_noted(EntryKind.ENGINE_STOPPED)[-1] == (
            "stranger",
            False,
            "processes do not end on SIGKILL",
        )


@pytest.mark.parametrize("when", ["reload", "restart"])
async def test_removed_configurations_do_not_keep_engines_from_returning(harness: Harness, when: str) -> None:
    breaks(harness)
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await harness.clock.advance(2.0)
        assert "s1.0" in harness.machines.engines
        text = CONFIG.replace("id: tp1", "id: narrow").replace("id: tp2", "id: wide")
        harness.config = parse_config(text)
        if when == "reload":
            harness.plane.reconfigure(harness.config)
            report = await harness.until_ended()
    if when == "restart":
        async with harness.daemon():
            report = await harness.until_ended()
            assert report.state is OperationState.ROLLED_BACK, report.detail
            check_whole(harness, "a", "b", "w")
    assert report.state is OperationState.ROLLED_BACK, report.detail


async def test_redeployment_without_a_journal_entry_is_not_started(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        append = harness.plane.journal.append

        def full(at_s: float, kind: EntryKind, subject: str, body: Any) -> int:
            if kind is EntryKind.REDEPLOYMENT_BEGAN:
                raise Permanent("disk full")
            return append(at_s, kind, subject, body)

        harness.plane.journal.append = full
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        assert report.detail == "not begun, because the intent cannot be journalled: disk full"
        check_whole(harness, "a", "b", "w")


async def test_next_redeployment_can_start_when_the_end_is_reported(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        listed = redeployer._deployer.list_engines

        async def slowly() -> object:
            await harness.clock.sleep(0.5)
            return await listed()

        redeployer._deployer.list_engines = slowly

        async def follow() -> str:
            done = set()
            async for report in redeployer.watch(redeployer.begin(TO_TP2)):
                done.add(sum(reported.state is StepState.DONE for reported in report.steps))
            assert report.state is OperationState.DONE
            assert len(done) > 3  # of each step that takes time
            return str(redeployer.begin(RedeployRequest((("tp1", 2), ("tp2", 1)))))

        following = asyncio.create_task(follow())
        for _ in range(60):
            await harness.clock.advance(0.5)
        assert following.result() == "s2"
        assert (await harness.until_ended()).state is OperationState.DONE


async def test_fault_names_the_owners_of_the_missing_gpus(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        harness.plane.fleet.membership_changes.drain(W)
        with pytest.raises(ProblemFaults, match=r"the 2 GPUs .*; the other GPUs belong to w \(drained by an operator"):
            redeployer.begin(RedeployRequest((("tp2", 2),)))
        harness.machines.engines[A].life = EngineLife.UNKNOWN
        await redeployer._scan()
        with pytest.raises(
            ProblemFaults, match=r"the 1 GPUs .*; the other GPUs belong to a, w \(.*their state is unknown"
        ):
            redeployer.begin(RedeployRequest((("tp2", 2),)))
        harness.machines.engines[A].life = EngineLife.ALIVE
        await redeployer._scan()
        harness.plane.fleet.membership_changes.drain(W)
        added = EngineFacts("elsewhere", "http://elsewhere:8000", "tp1", (3,))
        harness.machines.engines[W].life = EngineLife.ENDED
        await redeployer._bury((await redeployer._deployer.list_engines())[2])
        harness.plane.fleet.membership_changes.add(added)
        with pytest.raises(ProblemFaults, match=r"the other GPUs belong to elsewhere \(not started by this deployer"):
            redeployer.begin(RedeployRequest((("tp2", 2),)))


@pytest.mark.parametrize("killed_after", [10, 20])
async def test_barrier_closed_at_the_next_start_brings_its_weights(
    harness: Harness, killed_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer continues its update while the daemon is down. The redeployment waits for it, and for nothing after
    that."""
    async with harness.daemon() as redeployer:
        harness.plane.fleet.barrier.set_version([A, B, W], 7, "", "/ckpt/7")
        for engine in harness.machines.engines.values():
            engine.weights = 7
        harness.killed_after = killed_after
        redeployer.begin(TO_TP2)
        await harness.clock.advance(8.0)
    harness.killed_after = None
    closed = ["the pause barrier is closed"]
    monkeypatch.setattr(RedeployedFleet, "redeployment_hold", lambda plane: closed[0])
    async with harness.daemon():
        await harness.clock.advance(2.0)
        stops = list(harness.machines.stops)
        there = list(harness.machines.alive())
        harness.plane.fleet.barrier.set_version(there, 8, "", "/ckpt/8")
        for engine in harness.machines.engines.values():
            engine.weights = 8
        await harness.clock.advance(2.0)
        assert harness.machines.stops == stops
        closed[0] = ""
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        check_whole(harness, "a", "b", "w")
        assert harness.plane.fleet.barrier.state.versions == {A: 8, B: 8, W: 8}
        assert {engine.weights for engine in harness.machines.engines.values()} == {8}


async def test_reload_does_not_restore_a_stopped_engine(harness: Harness) -> None:
    """A reload must not restore an engine that a redeployment has stopped."""
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        harness.plane.reconfigure(harness.config)
        await harness.clock.advance(2.0)
        check_whole(harness, f"{report.id}.0", "w")


async def test_late_report_of_a_stopped_engine_does_not_restore_it(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        tell_tokens(harness, "a", 5)
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        for health in (EngineHealth.OK, EngineHealth.GONE):  # a delayed report, and what follows
            harness.sequence += 1  # type: ignore[attr-defined]
            reported = engine_report("a", sequence=harness.sequence, health=health)  # type: ignore[attr-defined]
            harness.plane.fleet.engine_reported(reported, 1)
        await harness.clock.advance(2.0)
        assert {route.engine for route in harness.gateway.routes.routes} == {f"{report.id}.0", "w"}
