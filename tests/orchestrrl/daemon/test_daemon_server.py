"""Tests of the served interface, as seen by a client that has only the .proto files, and by nodes."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from builders import GATEWAY, engine_report, gateway_hello, gateway_report, request, sample
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.schema import ListenSettings
from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.metrics import DaemonCollector
from orchestrrl.daemon.wiring import Daemon, build_daemon
from orchestrrl.fleet.reports import EngineFailovers, FailoverCounts
from orchestrrl.rpc.codecs import node as node_codec
from orchestrrl.rpc.codecs import telemetry as telemetry_codec
from orchestrrl.rpc.pb import agent_pb2, agent_pb2_grpc, control_pb2, control_pb2_grpc, telemetry_pb2_grpc
from orchestrrl.rpc.server import DaemonServer
from orchestrrl.rpc.switches_service import SwitchesService
from planner.model import EngineId

DEADLINE_S = 120.0
CONFIG = """
mode: act
fleet:
  gpus: {count: 2}
  configurations:
    - {id: tp2, gpus: 2, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 100000, max_sequences: 4,
       prefill_tokens_per_s: 9000, switch_s: 1.5}
"""


@dataclass
class Harness:
    parts: Daemon
    server: DaemonServer
    channel: grpc.aio.Channel
    socket: Path

    @property
    def plane(self) -> ControlPlane:
        return self.parts.control_plane

    @property
    def control(self) -> "control_pb2_grpc.ControlAsyncStub":
        return control_pb2_grpc.ControlStub(self.channel)

    def load(self) -> None:
        """Report some requests and an engine."""
        self.plane.fleet.engine_reported(engine_report("e0", 1, sample(decode_tokens_per_s=100.0)), 0)
        held = [request("a"), request("b", generated=0), request("c", None, generated=0)]
        self.plane.fleet.gateway_reported(gateway_report(*held), 0)


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    clock = WallClock()
    with Journal(tmp_path / "journal.sqlite", clock.now_s()) as journal:
        parts = build_daemon(parse_config(CONFIG), journal, clock)
        socket = tmp_path / "s"
        switches = SwitchesService({}, parts.circuits)
        server = await DaemonServer.start(parts, ListenSettings(address="127.0.0.1:0", socket=str(socket)), switches)
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Harness(parts, server, channel, socket)
        await server.stop(0.1)


async def soon(condition: Any) -> None:
    """Return when the condition holds; fail after the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


# --- a generic client with reflection


class Stranger:
    """A client that discovers the services by gRPC reflection."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        self._pool = descriptor_pool.DescriptorPool()

    async def services(self) -> set[str]:
        answer = await self._ask(reflection_pb2.ServerReflectionRequest(list_services=""))
        return {service.name for service in answer.list_services_response.service}

    async def learn(self, symbol: str) -> None:
        await self._add(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))

    async def _add(self, question: Any) -> None:
        answer = await self._ask(question)
        for raw in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            for dependency in file.dependency:
                await self._add(reflection_pb2.ServerReflectionRequest(file_by_filename=dependency))
            self._pool.Add(file)  # type: ignore[attr-defined]

    async def _ask(self, question: Any) -> Any:
        async for answer in self._reflection.ServerReflectionInfo(iter([question])):
            return answer
        raise AssertionError("no answer")

    def message(self, name: str) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))

    def stream(self, service: str, method: str, **fields: Any) -> Any:
        found = self._pool.FindServiceByName(service).FindMethodByName(method)
        ask, answer = (message_factory.GetMessageClass(t) for t in (found.input_type, found.output_type))
        call = self._channel.unary_stream(
            f"/{service}/{method}", request_serializer=ask.SerializeToString, response_deserializer=answer.FromString
        )
        return call(ask(**fields))


async def test_reflection_lists_the_services_and_a_generic_client_watches_plans(harness: Harness) -> None:
    stranger = Stranger(harness.channel)
    services = await stranger.services()
    assert {f"orchestrrl.v1.{name}" for name in ("Control", "Telemetry", "Node", "Switches")} <= services
    assert {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= services
    await stranger.learn("orchestrrl.v1.Control")
    harness.load()
    await harness.plane.slow_tick()
    events = stranger.stream("orchestrrl.v1.Control", "WatchPlans")
    async with asyncio.timeout(DEADLINE_S):
        first = await events.read()
        assert first.plan.reason_code
        assert (first.plan.requests_running, first.plan.requests_waiting) == (1, 2)
        assert first.control.state == "free"
        harness.plane.plans.pin("hands off", 0.0)
        assert (await events.read()).control.state == "pinned"
        await asyncio.sleep(0.002)  # plan ids contain a millisecond
        await harness.plane.slow_tick()
        second = await events.read()
        assert second.plan.plan_id != first.plan.plan_id
        assert (second.plan.reason_code, second.control.reason) == ("pinned", "hands off")


async def test_health_is_serving_for_each_service(harness: Harness) -> None:
    stub = health_pb2_grpc.HealthStub(harness.channel)
    for service in ("", "orchestrrl.v1.Control", "orchestrrl.v1.Node"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_unix_socket_serves_its_owner(harness: Harness) -> None:
    async with grpc.aio.insecure_channel(f"unix:{harness.socket}") as channel:
        status = await control_pb2_grpc.ControlStub(channel).GetStatus(control_pb2.GetStatusRequest())
    assert status.generation == harness.plane.journal.generation
    assert harness.socket.stat().st_mode & 0o777 == 0o600


async def test_port_in_use_is_reported(harness: Harness) -> None:
    with pytest.raises(Permanent, match=f"cannot listen on {harness.server.address}: it is in use"):
        await DaemonServer.start(
            harness.parts,
            ListenSettings(address=harness.server.address),
            SwitchesService({}, harness.parts.circuits),
        )


# --- Control


async def test_status_workers_and_requests_are_served(harness: Harness) -> None:
    harness.load()
    harness.plane.fleet.attach(gateway_hello("e0"))
    harness.plane.fast_tick()
    status = await harness.control.GetStatus(control_pb2.GetStatusRequest())
    assert (status.requests_running, status.requests_waiting, status.mode) == (1, 2, control_pb2.MODE_ACT)
    assert [(node.node_id, node.kind, node.attached) for node in status.nodes] == [("gw", "gateway", True)]
    assert status.balance_reason.startswith("within_theta: ")
    (worker,) = status.workers
    assert (worker.engine_id, worker.kv_free_tokens, worker.decode_tokens_per_s) == ("e0", 7500, 100.0)
    assert worker.HasField("load_index")
    listed = await harness.control.ListWorkers(control_pb2.ListWorkersRequest())
    assert [worker.engine_id for worker in listed.workers] == ["e0"]
    some = await harness.control.ListRequests(control_pb2.ListRequestsRequest(engine_id="e0", limit=1))
    assert ([r.request_id for r in some.requests], some.total) == (["a"], 2)
    assert (await harness.control.ListRequests(control_pb2.ListRequestsRequest())).total == 3


async def test_balance_is_available_after_the_first_tick(harness: Harness) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await harness.control.GetBalance(control_pb2.GetBalanceRequest())
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    harness.load()
    harness.plane.fast_tick()
    balance = await harness.control.GetBalance(control_pb2.GetBalanceRequest())
    assert [load.engine_id for load in balance.load_index] == ["e0"]
    assert balance.verdict_reason.startswith("within_theta: ")


async def test_plans_are_found_by_id(harness: Harness) -> None:
    harness.load()
    plan = await harness.plane.slow_tick()
    assert (await harness.control.GetPlan(control_pb2.GetPlanRequest())).plan_id == plan.id
    assert (await harness.control.GetPlan(control_pb2.GetPlanRequest(plan_id=plan.id))).plan_id == plan.id
    assert [p.plan_id for p in (await harness.control.ListPlans(control_pb2.ListPlansRequest(limit=5))).plans] == [
        plan.id
    ]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await harness.control.GetPlan(control_pb2.GetPlanRequest(plan_id="p9"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_overrides_pins_and_releases_are_applied(harness: Harness) -> None:
    control = await harness.control.OverridePlan(
        control_pb2.OverridePlanRequest(configuration="tp2", reason="why", ttl_s=60)
    )
    assert (control.state, control.configuration, control.reason) == ("overridden", "tp2", "why")
    assert control.expires_unix_s > WallClock().now_s()
    assert (await harness.control.PinPlan(control_pb2.PinPlanRequest())).state == "pinned"
    assert (await harness.control.ReleasePlan(control_pb2.ReleasePlanRequest())).state == "free"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await harness.control.OverridePlan(control_pb2.OverridePlanRequest(configuration="tp9", ttl_s=-1))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").splitlines() == [
        "ttl_s: must be >= 0 (0: until released), got -1",
        "configuration: is not a known configuration (known: tp2), got 'tp9'",
    ]


async def test_mode_is_set_and_reported(harness: Harness) -> None:
    answer = await harness.control.SetMode(control_pb2.SetModeRequest(mode=control_pb2.MODE_ADVISE, reason="careful"))
    assert (answer.mode, answer.previous) == (control_pb2.MODE_ADVISE, control_pb2.MODE_ACT)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await harness.control.SetMode(control_pb2.SetModeRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_journal_is_tailed_and_followed(harness: Harness) -> None:
    harness.plane.mode.set(harness.plane.mode.current, "one")
    tail = [e async for e in harness.control.WatchJournal(control_pb2.WatchJournalRequest(tail=1))]
    assert [(entry.kind, json.loads(entry.body_json)["reason"]) for entry in tail] == [("mode", "one")]
    call = harness.control.WatchJournal(control_pb2.WatchJournalRequest(tail=5, follow=True, kinds=["mode"]))
    async with asyncio.timeout(DEADLINE_S):
        first = await call.read()
        harness.plane.plans.pin("not asked for", 0.0)
        harness.plane.mode.set(harness.plane.mode.current, "two")
        second = await call.read()
    assert [json.loads(e.body_json)["reason"] for e in (first, second)] == ["one", "two"]  # type: ignore[union-attr]
    call.cancel()


# --- nodes


async def test_move_is_sent_to_the_gateway_and_its_result_returned(harness: Harness) -> None:
    harness.load()
    harness.plane.fleet.engine_reported(engine_report("e1", 1, sample()), 0)
    call = agent_pb2_grpc.NodeStub(harness.channel).Attach()
    await call.write(agent_pb2.NodeMessage(hello=node_codec.HELLO.to_pb(gateway_hello("e0", "e1"))))
    async with asyncio.timeout(DEADLINE_S):
        routes = await call.read()
        assert [route.engine_id for route in routes.set_routes.routes] == ["e0", "e1"]
        asked = harness.control.MoveRequest(control_pb2.MoveRequestRequest(request_id="a", to_engine_id="e1"))
        order = await call.read()
        assert order.generation == harness.plane.journal.generation
        item = agent_pb2.ItemResult(id="a", done=True, recomputed_tokens=110)
        result = agent_pb2.OperationResult(
            operation_id=order.operation_id, node_id=GATEWAY, status=agent_pb2.OPERATION_STATUS_DONE, items=[item]
        )
        await call.write(agent_pb2.NodeMessage(result=result))
        answer = await asked
    assert (answer.done, answer.operation_id) == (True, order.operation_id)
    assert harness.plane.fleet.state.totals.tokens_recomputed == 110
    call.cancel()
    await soon(lambda: not harness.plane.fleet.nodes.gateways())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await harness.control.MoveRequest(control_pb2.MoveRequestRequest(request_id="a", to_engine_id="e9"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_reports_are_folded_and_acknowledged(harness: Harness) -> None:
    telemetry = telemetry_pb2_grpc.TelemetryStub(harness.channel)
    engines, gateways = telemetry.ReportEngines(), telemetry.ReportRequests()
    async with asyncio.timeout(DEADLINE_S):
        await engines.write(telemetry_codec.ENGINE_REPORT.to_pb(engine_report("e0", 7, sample(running=3))))
        await gateways.write(telemetry_codec.GATEWAY_REPORT.to_pb(gateway_report(request("a"), sequence=9)))
        acks = [await engines.read(), await gateways.read()]
    assert [ack.sequence for ack in acks] == [7, 9]
    assert {ack.generation for ack in acks} == {harness.plane.journal.generation}
    snapshot = harness.plane.fleet.state.snapshot(harness.plane.clock.now_s())
    assert [view.running for view in snapshot.engines] == [3]
    assert [view.id for view in snapshot.requests] == ["a"]
    engines.cancel()
    gateways.cancel()


async def test_agents_reports_count_again_once_the_other_stream_has_ended(harness: Harness) -> None:
    """A client that only has the .proto sends no incarnation: two streams of one id may be one agent that
    reconnected."""
    telemetry = telemetry_pb2_grpc.TelemetryStub(harness.channel)
    first = telemetry.ReportEngines()

    async def say(call: Any, sequence: int, running: int) -> None:
        await call.write(telemetry_codec.ENGINE_REPORT.to_pb(engine_report("e0", sequence, sample(running=running))))
        ack = await call.read()
        assert (ack.sequence, ack.sent_unix_s > 0) == (sequence, True)

    def running() -> int:
        return next(
            view.running for view in harness.plane.fleet.state.engines(harness.plane.clock.now_s()) if view.id == "e0"
        )

    await say(first, 1, 1)
    second = telemetry.ReportEngines()  # also the newer one by the daemon's stream count
    await say(second, 1, 2)
    await say(first, 2, 3)
    assert running() == 2
    second.cancel()
    sequence = 2
    async with asyncio.timeout(DEADLINE_S):
        while running() != 3:
            sequence += 1
            await say(first, sequence, 3)
    first.cancel()


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (
            agent_pb2.NodeMessage(result=agent_pb2.OperationResult(operation_id="1-1")),
            "the first message must be a hello, got result",
        ),
        (
            agent_pb2.NodeMessage(hello=agent_pb2.NodeHello()),
            "hello.node_id: must not be empty, got ''\n"
            "hello.kind: must be one of NODE_KIND_AGENT, NODE_KIND_GATEWAY, got 0",
        ),
    ],
)
async def test_node_without_an_id_is_refused(harness: Harness, message: agent_pb2.NodeMessage, complaint: str) -> None:
    call = agent_pb2_grpc.NodeStub(harness.channel).Attach()
    await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, complaint)


# --- failovers


async def test_failovers_are_counted_once_and_journalled(harness: Harness) -> None:
    harness.load()
    first = EngineFailovers(EngineId("e0"), 2, 10.0, FailoverCounts(3, 2, 500))
    second = EngineFailovers(EngineId("e1"), 3, 11.0, FailoverCounts(1, 0, 0))
    for sequence, failovers in ((2, (first,)), (3, (first, second)), (2, (first,)), (4, ())):
        harness.plane.fleet.gateway_reported(gateway_report(sequence=sequence, failovers=failovers), 0)
    status = await harness.control.GetStatus(control_pb2.GetStatusRequest())
    assert (status.failovers, status.failover_requests_recomputed, status.failover_tokens_recomputed) == (4, 2, 500)
    assert (status.moves_done, status.tokens_recomputed) == (0, 0)
    registry = CollectorRegistry()
    registry.register(DaemonCollector(harness.parts))
    assert registry.get_sample_value("orchestrrl_failovers_total", {"engine": "e0"}) == 3
    assert registry.get_sample_value("orchestrrl_failover_requests_recomputed_total", {"engine": "e0"}) == 2
    assert registry.get_sample_value("orchestrrl_failover_recomputed_tokens_total", {"engine": "e0"}) == 500
    assert registry.get_sample_value("orchestrrl_failovers_total", {"engine": "e1"}) == 1
    noted = harness.plane.journal.tail(9, (EntryKind.ENGINE_FAILOVERS,))
    assert [(entry.subject, entry.body) for entry in noted] == [
        ("e0", {"gateway": "gw", "failovers": 3, "requests_recomputed": 2, "tokens_recomputed": 500}),
        ("e1", {"gateway": "gw", "failovers": 1, "requests_recomputed": 0, "tokens_recomputed": 0}),
    ]


# --- metrics


async def test_every_metric_has_a_help_text_and_a_unique_name(harness: Harness) -> None:
    harness.load()
    harness.plane.fast_tick()
    await harness.plane.slow_tick()
    harness.plane.fleet.gateway_reported(gateway_report(sequence=2), 0)
    registry = CollectorRegistry()
    registry.register(DaemonCollector(harness.parts))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert all(family.documentation for family in families)
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    assert "orchestrrl_plan_actual_makespan_seconds" in names
    assert {"orchestrrl_plan_seconds", "orchestrrl_plan_correction_ratio", "orchestrrl_plan_calibration_steps"} <= set(
        names
    )
    values = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert values["orchestrrl_workers", "ok"] == 1
    assert values["orchestrrl_mode", "act"] == 1
    assert values["orchestrrl_operations_open",] == 0
