"""Redeployments over gRPC, as operators use them, on a daemon's server with a fake redeployer that needs no engines."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from changeable_daemon import changeable
from fake_redeployments import FakeSwitching
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.schema import ListenSettings
from orchestrrl.core.journal.kinds import REDEPLOYMENTS
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.operation import StepDirection
from orchestrrl.core.operation_journal import OperationJournal
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.metrics import DaemonCollector
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.fleet.redeployment.book import RecordedFleet, write_end
from orchestrrl.fleet.redeployment.steps import (
    StepKind,
)
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.rpc.pb import control_pb2_grpc
from orchestrrl.rpc.server import DaemonServer
from orchestrrl.rpc.switches_service import SwitchesService

DEADLINE_S = 120.0
TO_TP8 = pb.RedeployRequest(targets=[pb.RedeployTarget(configuration="tp8")], reason="the tail")


@dataclass
class Harness:
    parts: Any  # of the daemon
    redeployer: FakeSwitching
    channel: grpc.aio.Channel

    @property
    def control(self) -> "control_pb2_grpc.ControlAsyncStub":
        return control_pb2_grpc.ControlStub(self.channel)

    async def all_of(self, request: pb.RedeployRequest) -> list[pb.RedeploymentReport]:
        async with asyncio.timeout(DEADLINE_S):
            return [report async for report in self.control.Redeploy(request)]


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    clock = WallClock()
    with Journal(tmp_path / "journal.sqlite", clock.now_s()) as journal:
        parts = changeable(build_daemon(parse_config("mode: act"), journal, clock))
        parts.redeployer = redeployer = FakeSwitching(clock)
        server = await DaemonServer.start(
            parts, ListenSettings(address="127.0.0.1:0"), SwitchesService({}, parts.circuits)
        )
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Harness(parts, redeployer, channel)
        await redeployer.close()
        await server.stop(0.1)


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    return caught.value.code(), caught.value.details() or ""


async def test_dry_run_lists_every_step_and_changes_nothing(harness: Harness) -> None:
    request = pb.RedeployRequest()
    request.CopyFrom(TO_TP8)
    request.dry_run = True
    (draft,) = await harness.all_of(request)
    assert (draft.state, draft.redeployment_id, draft.reason) == ("planned", "", "the tail")
    assert [engine.engine_id for engine in draft.old_engines] == [f"e{n}" for n in range(8)]
    assert [(e.configuration, list(e.gpus)) for e in draft.new_engines] == [
        ("tp8", list(range(8))),
        ("tp8", list(range(8, 16))),
    ]
    assert [step.number for step in draft.steps] == list(range(1, len(draft.steps) + 1))
    assert {step.state for step in draft.steps} == {"pending"}
    kinds = list(dict.fromkeys(step.kind for step in draft.steps))
    bring_up = ["start", "ready", "load_weights", "warm_up", "verify"]
    assert kinds == ["fence", "evacuate", "stop", *bring_up, "admit", "commit"]
    assert all(step.within_s > 0 and not step.HasField("began_unix_s") for step in draft.steps)
    assert harness.redeployer.reports == {}


async def test_redeployment_is_reported_and_kept_in_history(harness: Harness) -> None:
    reports = await harness.all_of(TO_TP8)
    assert reports[0].state == "running"
    last = reports[-1]
    assert (last.redeployment_id, last.state, list(last.engine_ids)) == ("s1", "done", ["tp8-0.0", "tp8-0.1"])
    assert {step.state for step in last.steps} == {"done"}
    assert all(step.HasField("began_unix_s") and step.HasField("elapsed_s") for step in last.steps)
    assert (last.requests_moved, last.requests_parked) == (8, 24)
    assert last.closed_s > 0
    assert last.ended_unix_s >= last.created_unix_s
    done = [sum(step.state == "done" for step in report.steps) for report in reports]
    assert done == sorted(done)
    assert await harness.control.GetRedeployment(pb.GetRedeploymentRequest()) == last
    await harness.all_of(pb.RedeployRequest(plan_id="p1"))
    listed = (await harness.control.ListRedeployments(pb.ListRedeploymentsRequest())).redeployments
    assert [(report.redeployment_id, report.plan_id) for report in listed] == [("s2", "p1"), ("s1", "")]
    assert not any(report.steps for report in listed)
    newest = (await harness.control.ListRedeployments(pb.ListRedeploymentsRequest(limit=1))).redeployments
    assert [report.redeployment_id for report in newest] == ["s2"]
    assert (await harness.control.GetRedeployment(pb.GetRedeploymentRequest(redeployment_id="s1"))) == last


async def test_failure_and_rollback_are_reported(harness: Harness) -> None:
    harness.redeployer.failing[StepDirection.FORWARD, StepKind.READY] = "exited with 1: out of memory"
    last = (await harness.all_of(TO_TP8))[-1]
    assert last.state == "rolled_back"
    assert last.detail == "ready of tp8-0.0: exited with 1: out of memory"
    assert not last.HasField("closed_s")
    states = {(step.direction, step.state) for step in last.steps}
    assert states == {("forward", "done"), ("forward", "failed"), ("forward", "skipped"), ("back", "done")}
    harness.redeployer.failing[StepDirection.BACK, StepKind.START] = "no such GPU"
    last = (await harness.all_of(TO_TP8))[-1]
    assert (last.state, "e0" in last.engine_ids, len(last.engine_ids)) == ("degraded", False, 7)
    status = await harness.control.GetStatus(pb.GetStatusRequest())
    assert status.redeployment.state == "degraded"


async def test_all_faults_of_a_redeploy_request_are_reported(harness: Harness) -> None:
    targets = [pb.RedeployTarget(configuration="tp3"), pb.RedeployTarget(configuration="tp8", engines=9)]
    for dry_run in (True, False):
        request = pb.RedeployRequest(targets=targets, plan_id="p9", dry_run=dry_run)
        code, details = await refused(harness.all_of(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.splitlines() == [
            "plan_id: must be one of p1, got 'p9'",
            "targets[0].configuration: must be one of tp1, tp2, tp4, tp8, got 'tp3'",
            "targets[1].engines: take more GPUs than the 16 left, got 9",
        ]
    assert harness.redeployer.reports == {}


async def test_client_disconnect_does_not_end_redeployment(harness: Harness) -> None:
    harness.redeployer.held.clear()
    call = harness.control.Redeploy(TO_TP8)
    async with asyncio.timeout(DEADLINE_S):
        assert (await call.read()).state == "running"  # type: ignore[union-attr]
        call.cancel()
        while harness.redeployer.watchers:
            await asyncio.sleep(0.01)
        status = await harness.control.GetStatus(pb.GetStatusRequest())
        assert (status.redeployment.redeployment_id, status.redeployment.state) == ("s1", "running")
        another = await refused(harness.all_of(TO_TP8))
        assert another[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert "s1 is under way" in another[1]
        harness.redeployer.held.set()
        while (report := await harness.control.GetRedeployment(pb.GetRedeploymentRequest())).state == "running":
            await asyncio.sleep(0.01)
    assert report.state == "done"
    assert not (await harness.control.GetStatus(pb.GetStatusRequest())).HasField("redeployment")


async def test_redeployment_is_cancelled_with_or_without_id(harness: Harness) -> None:
    for named in ("", "s2"):
        harness.redeployer.held.clear()
        reports = aiter(harness.control.Redeploy(TO_TP8))
        async with asyncio.timeout(DEADLINE_S):
            await anext(reports)
            order = pb.CancelRedeploymentRequest(redeployment_id=named, reason="wrong one")
            assert (await harness.control.CancelRedeployment(order)).state == "running"
            last = [report async for report in reports][-1]
        assert (last.state, last.detail) == ("rolled_back", "called off: wrong one")
    code, details = await refused(harness.control.CancelRedeployment(pb.CancelRedeploymentRequest()))
    assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "no redeployment is running")


async def test_unknown_redeployments_are_not_found(harness: Harness) -> None:
    code, details = await refused(harness.control.GetRedeployment(pb.GetRedeploymentRequest()))
    assert (code, details) == (grpc.StatusCode.NOT_FOUND, "no redeployment has been made yet")
    code, _ = await refused(harness.control.CancelRedeployment(pb.CancelRedeploymentRequest()))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    await harness.all_of(TO_TP8)
    code, details = await refused(harness.control.GetRedeployment(pb.GetRedeploymentRequest(redeployment_id="s7")))
    assert (code, details) == (grpc.StatusCode.NOT_FOUND, "no redeployment 's7'")


async def test_journal_has_redeployments_without_deployer(harness: Harness) -> None:
    last = (await harness.all_of(TO_TP8))[-1]
    await harness.all_of(pb.RedeployRequest(plan_id="p1"))
    for report in reversed(harness.redeployer.history(0)):
        write_end(
            OperationJournal(harness.parts.control_plane.journal, harness.parts.control_plane.clock, REDEPLOYMENTS),
            report,
            RecordedFleet((), ()),
        )
    harness.parts.redeployer = None
    listed = (await harness.control.ListRedeployments(pb.ListRedeploymentsRequest())).redeployments
    assert [report.redeployment_id for report in listed] == ["s2", "s1"]
    assert len((await harness.control.ListRedeployments(pb.ListRedeploymentsRequest(limit=1))).redeployments) == 1
    assert await harness.control.GetRedeployment(pb.GetRedeploymentRequest(redeployment_id="s1")) == last
    assert (await harness.control.GetRedeployment(pb.GetRedeploymentRequest())).redeployment_id == "s2"
    code, details = await refused(harness.control.GetRedeployment(pb.GetRedeploymentRequest(redeployment_id="s7")))
    assert (code, details) == (grpc.StatusCode.NOT_FOUND, "no redeployment 's7'")


async def test_redeploy_without_deployer_names_settings(harness: Harness) -> None:
    harness.parts.redeployer = None
    for call in (harness.all_of(TO_TP8), harness.control.CancelRedeployment(pb.CancelRedeploymentRequest())):
        code, details = await refused(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "fleet.deployer" in details
    assert not (await harness.control.ListRedeployments(pb.ListRedeploymentsRequest())).redeployments
    code, details = await refused(harness.control.GetRedeployment(pb.GetRedeploymentRequest()))
    assert (code, details) == (grpc.StatusCode.NOT_FOUND, "no redeployment has been made yet")


async def test_metrics_count_each_redeployment_once(harness: Harness) -> None:
    collector = DaemonCollector(harness.parts)
    assert metrics(collector)["orchestrrl_redeployment_running",] == 0
    await harness.all_of(TO_TP8)
    harness.redeployer.failing[StepDirection.FORWARD, StepKind.READY] = "hung"
    for _ in range(2):
        await harness.all_of(pb.RedeployRequest(plan_id="p1", targets=[pb.RedeployTarget(configuration="tp2")]))
        metrics(collector)
        seen = metrics(collector)
        harness.redeployer.remembered = 1
    assert seen["orchestrrl_redeployments_total", "done"] == 1
    assert seen["orchestrrl_redeployments_total", "rolled_back"] == 2
    assert seen["orchestrrl_redeployments_total", "degraded"] == 0
    assert seen["orchestrrl_redeployment_step_seconds_count", "evacuate"] == 8 + 2 + 2
    assert seen["orchestrrl_redeployment_step_seconds_sum", "evacuate"] > 0
    assert seen["orchestrrl_redeployment_steps_failed_total", "ready"] == 2
    assert seen["orchestrrl_redeployment_closed_seconds_total",] > 0
    harness.redeployer.held.clear()
    call = harness.control.Redeploy(TO_TP8)
    async with asyncio.timeout(DEADLINE_S):
        await call.read()
    assert metrics(collector)["orchestrrl_redeployment_running",] == 1
    harness.parts.redeployer = None
    assert ("orchestrrl_redeployment_running",) not in metrics(collector)


def metrics(collector: DaemonCollector) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(collector)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert all(family.documentation for family in families)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
