"""The pause barrier over gRPC, as trainers use it, with a gateway at the other end of a stream."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from builders import GATEWAY, engine_report, gateway_hello, gateway_report, request, sample
from changeable_daemon import changeable
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.schema import ListenSettings
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.operations import (
    CancelRequests,
    CloseBarrier,
    OpenBarrier,
    OperationItemResult,
    OperationResult,
    OperationStatus,
)
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.metrics import DaemonCollector
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.fleet.reports import BarrierPhase, BarrierReport
from orchestrrl.rpc.codecs import node as node_codec
from orchestrrl.rpc.pb import agent_pb2, agent_pb2_grpc, control_pb2_grpc
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.rpc.server import DaemonServer
from orchestrrl.rpc.switches_service import SwitchesService

DEADLINE_S = 120.0


@dataclass
class Harness:
    parts: Any  # of the daemon
    channel: grpc.aio.Channel
    orders: list[Any] = field(default_factory=list)
    answering: bool = True

    @property
    def plane(self) -> ControlPlane:
        plane: ControlPlane = self.parts.control_plane
        return plane

    @property
    def control(self) -> "control_pb2_grpc.ControlAsyncStub":
        return control_pb2_grpc.ControlStub(self.channel)

    async def gateway(self) -> None:
        """Run a gateway that carries out orders at once."""
        call = agent_pb2_grpc.NodeStub(self.channel).Attach()
        await call.write(agent_pb2.NodeMessage(hello=node_codec.HELLO.to_pb(gateway_hello("e0", "e1"))))
        async for message in call:
            action = node_codec.OPERATION.from_pb(message).action
            match action:
                case CloseBarrier() | OpenBarrier():
                    items = (
                        OperationItemResult("e0", True),
                        OperationItemResult("e1", True, "its requests were taken back"),
                    )
                case CancelRequests():
                    items = (OperationItemResult("r1", True),)
                case _:
                    continue
            self.orders.append(action)
            result = OperationResult(message.operation_id, GATEWAY, OperationStatus.DONE, items=items)  # type: ignore[arg-type]
            if self.answering:
                await call.write(agent_pb2.NodeMessage(result=node_codec.RESULT.to_pb(result)))


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    clock = WallClock()
    with Journal(tmp_path / "journal.sqlite", clock.now_s()) as journal:
        parts = changeable(build_daemon(parse_config("mode: act"), journal, clock))
        plane = parts.control_plane
        server = await DaemonServer.start(
            parts, ListenSettings(address="127.0.0.1:0"), SwitchesService({}, parts.circuits)
        )
        async with grpc.aio.insecure_channel(server.address) as channel:
            made = Harness(parts, channel)
            gateway = asyncio.create_task(made.gateway())
            async with asyncio.timeout(DEADLINE_S):
                while not plane.fleet.nodes.gateways():
                    await asyncio.sleep(0.01)
            plane.fleet.engine_reported(engine_report("e0", 1, sample()), 0)
            report = BarrierReport(BarrierPhase.CLOSING, "g", 5.0, running=3, frozen=2, held=1)
            plane.fleet.gateway_reported(gateway_report(request("r1"), barrier=report), 0)
            yield made
            gateway.cancel()
            await asyncio.wait({gateway})
        await server.stop(0.1)


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_pause_renew_and_resume(harness: Harness) -> None:
    async with asyncio.timeout(DEADLINE_S):
        order = pb.PauseFleetRequest(mode=agent_pb2.PAUSE_MODE_ABORT, holder="trainer", lease_s=30.0)
        barrier = await harness.control.PauseFleet(order)
        assert (barrier.phase, barrier.holder, barrier.mode) == ("quiet", "trainer", agent_pb2.PAUSE_MODE_ABORT)
        assert barrier.frozen == agent_pb2.FROZEN_REQUESTS_RECOMPUTE
        assert 0 < barrier.lease_until_unix_s - harness.plane.clock.now_s() <= 30.0
        assert not barrier.HasField("policy_version")
        assert [(e.engine_id, e.done, e.detail) for e in barrier.engines] == [
            ("e0", True, ""),
            ("e1", True, "its requests were taken back"),
        ]
        (gateway,) = barrier.gateways
        assert (gateway.node_id, gateway.report.running, gateway.report.frozen, gateway.report.held) == ("gw", 3, 2, 1)
        code, words = await refused(harness.control.PauseFleet(pb.PauseFleetRequest()))
        assert (code, "held by lease" in words) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        renewed = await harness.control.RenewPause(pb.RenewPauseRequest(lease_id=barrier.lease_id, lease_s=90.0))
        assert renewed.lease_until_unix_s > barrier.lease_until_unix_s + 50.0
        moved = harness.control.MoveRequest(pb.MoveRequestRequest(request_id="r1", to_engine_id="e1"))
        assert (await refused(moved))[0] is grpc.StatusCode.FAILED_PRECONDITION
        resume = pb.ResumeFleetRequest(lease_id=barrier.lease_id, policy_version=0, without_engine_ids=["e1"])
        opened = await harness.control.ResumeFleet(resume)
        assert (opened.phase, opened.lease_id, opened.policy_version) == ("open", "", 0)
        assert [(e.engine_id, e.done, e.HasField("policy_version")) for e in opened.engines] == [
            ("e0", True, True),
            ("e1", False, False),
        ]
        told = await harness.control.SetPolicyVersion(pb.SetPolicyVersionRequest(engine_ids=["e1"], policy_version=0))
        assert told.policy_version == 0
        assert [e.done for e in (await harness.control.GetPauseBarrier(pb.GetPauseBarrierRequest())).engines] == [
            True,
            True,
        ]
        workers = (await harness.control.ListWorkers(pb.ListWorkersRequest())).workers
        assert [worker.policy_version for worker in workers] == [0, 0]
        assert (await harness.control.GetStatus(pb.GetStatusRequest())).barrier.phase == "open"
        assert opened.weights_source == ""
    assert [type(order) for order in harness.orders] == [CloseBarrier, CloseBarrier, OpenBarrier]


async def test_preparations_run_before_barrier_opens(harness: Harness) -> None:
    phases: list[str] = []

    async def prepare(until_s: float) -> str:
        assert until_s == barrier.lease_until_unix_s
        phases.append(harness.plane.fleet.barrier.state.phase)
        return "circuits committed"

    harness.parts.before_resume = prepare
    async with asyncio.timeout(DEADLINE_S):
        barrier = await harness.control.PauseFleet(pb.PauseFleetRequest(holder="trainer"))
        await refused(harness.control.ResumeFleet(pb.ResumeFleetRequest(lease_id="another's")))
        assert phases == []
        for _ in range(2):  # the answer may have been lost
            await harness.control.ResumeFleet(pb.ResumeFleetRequest(lease_id=barrier.lease_id))
    assert phases == ["quiet"]


async def test_weights_source_is_stored_with_version(harness: Harness) -> None:
    async with asyncio.timeout(DEADLINE_S):
        barrier = await harness.control.PauseFleet(pb.PauseFleetRequest(holder="trainer"))
        resume = pb.ResumeFleetRequest(lease_id=barrier.lease_id, policy_version=4, weights_source="/shared/4")
        for _ in range(2):  # the answer may have been lost
            assert (await harness.control.ResumeFleet(resume)).weights_source == "/shared/4"
        other = pb.ResumeFleetRequest(lease_id=barrier.lease_id, policy_version=4, weights_source="/shared/5")
        assert (await refused(harness.control.ResumeFleet(other)))[0] is grpc.StatusCode.FAILED_PRECONDITION
        told = pb.SetPolicyVersionRequest(engine_ids=["e0", "e1"], policy_version=6, weights_source="/shared/6")
        await harness.control.SetPolicyVersion(told)
        assert (await harness.control.GetPauseBarrier(pb.GetPauseBarrierRequest())).weights_source == "/shared/6"
        await harness.control.SetPolicyVersion(pb.SetPolicyVersionRequest(engine_ids=["e0", "e1"], policy_version=7))
        assert (await harness.control.GetPauseBarrier(pb.GetPauseBarrierRequest())).weights_source == ""


async def test_all_faults_of_a_pause_request_are_reported(harness: Harness) -> None:
    code, words = await refused(harness.control.PauseFleet(pb.PauseFleetRequest(lease_s=-1.0, deadline_s=1e9)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words.splitlines() == [
        "lease_s: must be from 0 (the default) to 86400, got -1.0",
        "deadline_s: must be from 0 (the default) to 86400, got 1000000000.0",
    ]
    code, words = await refused(harness.control.SetPolicyVersion(pb.SetPolicyVersionRequest(engine_ids=["e7", "e8"])))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words.splitlines() == [f"engine_ids: must be a known engine (e0, e1), got '{e}'" for e in ("e7", "e8")]
    assert (await refused(harness.control.CancelRequests(pb.CancelRequestsRequest())))[0] is (
        grpc.StatusCode.INVALID_ARGUMENT
    )


async def test_removed_engine_does_not_count_and_added_engine_has_no_version(harness: Harness) -> None:
    async def told(version: int, *engines: str) -> int:
        order = pb.SetPolicyVersionRequest(engine_ids=engines, policy_version=version)
        return (await harness.control.SetPolicyVersion(order)).policy_version

    async with asyncio.timeout(DEADLINE_S):
        assert await told(4, "e0", "e1") == 4
        await harness.control.RemoveEngine(pb.RemoveEngineRequest(engine_id="e1"))
        assert await told(5, "e0") == 5
        await harness.control.AddEngine(pb.AddEngineRequest(engine_id="e1", url="http://other"))
        barrier = await harness.control.GetPauseBarrier(pb.GetPauseBarrierRequest())
    assert [(e.engine_id, e.HasField("policy_version"), e.done) for e in barrier.engines] == [
        ("e0", True, True),
        ("e1", False, False),
    ]


async def test_unknown_leases_are_refused(harness: Harness) -> None:
    for call in (
        harness.control.RenewPause(pb.RenewPauseRequest(lease_id="old")),
        harness.control.ResumeFleet(pb.ResumeFleetRequest(lease_id="old")),
        harness.control.ResumeFleet(pb.ResumeFleetRequest()),
    ):
        assert (await refused(call))[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_barrier_opens_when_waiting_trainer_disconnects(harness: Harness) -> None:
    harness.answering = False
    asked = harness.control.PauseFleet(pb.PauseFleetRequest())
    async with asyncio.timeout(DEADLINE_S):
        while not harness.orders:
            await asyncio.sleep(0.01)
        asked.cancel()
        while not isinstance(harness.orders[-1], OpenBarrier):
            await asyncio.sleep(0.01)
    assert harness.plane.fleet.barrier.state.phase is BarrierPhase.OPEN


async def test_cancel_returns_ended_requests(harness: Harness) -> None:
    async with asyncio.timeout(DEADLINE_S):
        answer = await harness.control.CancelRequests(pb.CancelRequestsRequest(request_ids=["r1", "r2"], reason="over"))
    assert (list(answer.cancelled_ids), list(answer.silent_node_ids)) == (["r1"], [])
    assert harness.orders == [CancelRequests(("r1", "r2"), (), "over")]  # type: ignore[arg-type]


async def test_barrier_metrics(harness: Harness) -> None:
    async with asyncio.timeout(DEADLINE_S):
        barrier = await harness.control.PauseFleet(pb.PauseFleetRequest())
        closed = metrics(harness.parts)
        await harness.control.ResumeFleet(pb.ResumeFleetRequest(lease_id=barrier.lease_id, policy_version=3))
        await harness.control.CancelRequests(pb.CancelRequestsRequest(request_ids=["r1"]))
    opened = metrics(harness.parts)
    assert [closed["orchestrrl_barrier", phase] for phase in BarrierPhase] == [0, 0, 1]
    assert [opened["orchestrrl_barrier", phase] for phase in BarrierPhase] == [1, 0, 0]
    assert ("orchestrrl_policy_version",) not in closed
    assert opened["orchestrrl_policy_version",] == 3
    assert opened["orchestrrl_worker_policy_version", "e0"] == 3
    assert opened["orchestrrl_barrier_held_seconds_total",] > 0
    assert opened["orchestrrl_barrier_leases_expired_total",] == 0
    assert opened["orchestrrl_requests_cancelled_total", "cancelled"] == 1
    assert opened["orchestrrl_requests_cancelled_total", "redundant"] == 0


def metrics(parts: Any) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(DaemonCollector(parts))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert all(family.documentation for family in families)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
