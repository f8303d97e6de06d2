"""The interceptor of the daemon's gRPC server over a channel: invalid bytes, ranges, limits and defects."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_fuzz import Method, reflected_methods
from prometheus_client import CollectorRegistry, generate_latest

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.schema import ListenSettings
from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.store import Journal
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.metrics import DaemonCollector
from orchestrrl.daemon.wiring import Daemon, build_daemon
from orchestrrl.rpc.pb import agent_pb2, agent_pb2_grpc, control_pb2, control_pb2_grpc, telemetry_pb2
from orchestrrl.rpc.server import DaemonServer
from orchestrrl.rpc.switches_service import SwitchesService

DEADLINE_S = 120.0
SMALL = """
limits: {message_bytes: 65536, calls: 3, requests_per_report: 5, requests: 8, engines: 4, gateways: 2, nodes: 2}
"""
HEALTHS = ("OK", "SLOW", "GONE", "NONSENSE")
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass
class Harness:
    parts: Daemon
    channel: grpc.aio.Channel
    address: str

    @property
    def plane(self) -> ControlPlane:
        return self.parts.control_plane

    @property
    def control(self) -> "control_pb2_grpc.ControlAsyncStub":
        return control_pb2_grpc.ControlStub(self.channel)

    def stream(self, path: str, *raws: bytes) -> Any:
        """Call a streaming method with these messages and no more."""
        return self.channel.stream_stream(path, None, None)(_each(raws), timeout=DEADLINE_S)

    async def reports(self, path: str, *messages: Any) -> Any:
        """Return how a telemetry stream with these messages ends: status code, text, and the preceding
        acknowledgements."""
        call = self.stream(f"/orchestrrl.v1.Telemetry/{path}", *(each.SerializeToString() for each in messages))
        acks, error = 0, None
        try:
            async for _ in call:
                acks += 1
        except grpc.aio.AioRpcError as caught:
            error = caught
        return error and error.code(), error and error.details(), acks


async def _each(raws: Sequence[bytes]) -> AsyncIterator[bytes]:
    for raw in raws:
        yield raw


@pytest.fixture
def config() -> str:
    return ""


@pytest.fixture
async def harness(tmp_path: Path, config: str) -> AsyncIterator[Harness]:
    clock = WallClock()
    with Journal(tmp_path / "journal.sqlite", clock.now_s()) as journal:
        parts = build_daemon(parse_config(config), journal, clock)
        server = await DaemonServer.start(
            parts, ListenSettings(address="127.0.0.1:0"), SwitchesService({}, parts.circuits)
        )
        async with asyncio.timeout(DEADLINE_S), grpc.aio.insecure_channel(server.address) as channel:
            yield Harness(parts, channel, server.address)
        await server.stop(0.1)


def engine_report(**fields: Any) -> telemetry_pb2.EngineReport:
    sample = {"kv_usage_fraction": 0.5, "kv_capacity_tokens": 262144, **fields.pop("sample", {})}
    whole = {"agent_id": "a", "engine_id": "e0", "sequence": 1, "health": 1, **fields}
    return telemetry_pb2.EngineReport(**whole, sample=telemetry_pb2.EngineSample(**sample))


def gateway_report(requests: int, gateway: str = "gw", engines: int = 1, **fields: Any) -> telemetry_pb2.GatewayReport:
    in_flight = [
        telemetry_pb2.RequestProgress(request_id=f"{gateway}-{n}", engine_id=f"e{n % engines}") for n in range(requests)
    ]
    return telemetry_pb2.GatewayReport(gateway_id=gateway, sequence=1, in_flight=in_flight, **fields)


async def ending(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


# --- Bytes that are not a message


async def _raw_ending(harness: Harness, method: Method, raw: bytes) -> tuple[grpc.StatusCode, str]:
    kind = f"{'stream' if method.streams_in else 'unary'}_{'stream' if method.streams_out else 'unary'}"
    made = getattr(harness.channel, kind)(method.path, None, None)
    call = made(_each([raw]) if method.streams_in else raw, timeout=DEADLINE_S)
    return await ending(call.read() if method.streams_out else call)


async def test_malformed_bytes_are_invalid_argument_of_every_method(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    methods = await reflected_methods(harness.channel)
    assert {"/grpc.health.v1.Health/Watch", "/orchestrrl.v1.Control/GetStatus", "/orchestrrl.v1.Node/Attach"} <= {
        method.path for method in methods
    }
    for method in methods:
        caplog.clear()
        code, words = await _raw_ending(harness, method, b"\x0a\xff\xff\xff\xff\x0f")
        assert (code, words) == (
            INVALID,
            "(message): must be a message of the method's type, got 6 bytes that cannot be decoded",
        ), method.path
        assert len(caplog.records) == 1, method.path
        assert caplog.records[0].exc_info is None
        assert method.path in caplog.records[0].getMessage()
    assert (await harness.control.GetStatus(control_pb2.GetStatusRequest())).generation > 0


async def test_text_that_is_not_utf8_is_refused(harness: Harness) -> None:
    call = harness.channel.unary_unary("/orchestrrl.v1.Control/SetMode", None, None)
    code, words = await ending(call(b"\x08\x01\x12\x03\xed\xa0\x80"))
    assert (code, words) == (
        INVALID,
        "(message): must be a message of the method's type, got 7 bytes that cannot be decoded",
    )


# --- Ranges

BAD_SAMPLES: list[tuple[dict[str, Any], str]] = [
    ({"kv_usage_fraction": 1.0005}, "sample.kv_usage_fraction: must be >= 0 and <= 1, got 1.0005"),
    ({"kv_usage_fraction": math.nan}, "sample.kv_usage_fraction: must be >= 0 and <= 1, got nan"),
    ({"kv_usage_fraction": math.inf}, "sample.kv_usage_fraction: must be >= 0 and <= 1, got inf"),
    ({"kv_usage_fraction": -0.1}, "sample.kv_usage_fraction: must be >= 0 and <= 1, got -0.1"),
    ({"decode_tokens_per_s": -1.0}, "sample.decode_tokens_per_s: must be >= 0 and <= 1000000000, got -1.0"),
    ({"decode_tokens_per_s": 1e308}, "sample.decode_tokens_per_s: must be >= 0 and <= 1000000000, got 1e+308"),
    ({"scrape_s": math.nan}, "sample.scrape_s: must be >= 0 and <= 253402300799, got nan"),
    ({"kv_capacity_tokens": 2**63}, f"sample.kv_capacity_tokens: must be >= 0 and <= {2**63 - 1}, got {2**63}"),
]


@pytest.mark.parametrize(("sample", "fault"), BAD_SAMPLES)
async def test_number_out_of_range_is_refused_without_effect(
    harness: Harness, sample: dict[str, Any], fault: str
) -> None:
    assert await harness.reports("ReportEngines", engine_report(sample=sample)) == (INVALID, fault, 0)
    assert not harness.plane.fleet.state.engines(harness.plane.clock.now_s())


async def test_all_faults_of_a_message_are_reported(harness: Harness) -> None:
    bad = engine_report(agent_id="", engine_id="e" * 1025, health=9, sample=dict.fromkeys(("scrape_s",), math.nan))
    code, words, _ = await harness.reports("ReportEngines", bad)
    assert code is INVALID
    assert words.splitlines() == [
        "agent_id: must not be empty, got ''",
        "engine_id: must be at most 1024 characters, got 1025",
        f"health: must be one of {', '.join(f'ENGINE_HEALTH_{word}' for word in HEALTHS)}, got 9",
        "sample.scrape_s: must be >= 0 and <= 253402300799, got nan",
    ]


@pytest.mark.parametrize("url", ["http://[", "http://127.0.0.1:99999", "e0:8000", "http://"])
async def test_engine_with_invalid_url_is_refused(harness: Harness, url: str) -> None:
    fault = f"url: must be an http:// or https:// URL, got {url!r}"
    assert await harness.reports("ReportEngines", engine_report(url=url)) == (INVALID, fault, 0)


async def test_invalid_message_ends_stream_after_previous_messages(harness: Harness) -> None:
    good, bad = engine_report(), engine_report(sequence=2, sample={"kv_usage_fraction": 2.0})
    code, words, acks = await harness.reports("ReportEngines", good, bad, engine_report(sequence=3, engine_id="e1"))
    assert (code, acks) == (INVALID, 1)
    assert "sample.kv_usage_fraction" in words
    assert [view.id for view in harness.plane.fleet.state.engines(harness.plane.clock.now_s())] == ["e0"]


async def test_invalid_request_is_reported_by_index(harness: Harness) -> None:
    report = gateway_report(3)
    report.in_flight[1].age_s = -1.0
    report.in_flight[2].request_id = ""
    report.barrier.lease_until_unix_s = math.inf
    code, words, _ = await harness.reports("ReportRequests", report)
    assert code is INVALID
    assert words.splitlines() == [
        "in_flight[1].age_s: must be >= 0 and <= 253402300799, got -1.0",
        "in_flight[2].request_id: must not be empty, got ''",
        "barrier.lease_until_unix_s: must be >= 0 and <= 253402300799, got inf",
    ]


async def test_message_with_many_faults_reports_the_first(harness: Harness) -> None:
    report = gateway_report(5000)
    for request in report.in_flight:
        request.quiet_s = math.nan
    code, words, _ = await harness.reports("ReportRequests", report)
    assert code is INVALID
    assert words.splitlines()[-1] == "(message): has further faults"


async def test_node_result_with_invalid_number_ends_attachment(harness: Harness) -> None:
    call = agent_pb2_grpc.NodeStub(harness.channel).Attach()
    await call.write(agent_pb2.NodeMessage(hello=agent_pb2.NodeHello(node_id="n", kind=1)))
    await call.write(agent_pb2.NodeMessage(result=agent_pb2.OperationResult(operation_id="1-1", duration_s=math.nan)))
    code, words = await ending(call.read())
    assert (code, words) == (INVALID, "result.duration_s: must be >= 0 and <= 253402300799, got nan")


@pytest.mark.parametrize("field", ["lease_s", "deadline_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e308, -1.0, 5e-324, -math.inf])
async def test_invalid_pause_times_are_refused(harness: Harness, field: str, value: float) -> None:
    code, words = await ending(harness.control.PauseFleet(control_pb2.PauseFleetRequest(**{field: value})))
    assert code is INVALID
    assert words.startswith(f"{field}: must be ")


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e308, -1.0])
async def test_invalid_lifetimes_are_refused(harness: Harness, value: float) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: harness.control.PinPlan(control_pb2.PinPlanRequest(ttl_s=value)),
        lambda: harness.control.SetPause(control_pb2.SetPauseRequest(part="sync", paused=True, ttl_s=value)),
        lambda: harness.control.RenewPause(control_pb2.RenewPauseRequest(lease_id="x", lease_s=value)),
    ]
    for call in calls:
        assert (await ending(call()))[0] is INVALID
    assert (await harness.control.GetStatus(control_pb2.GetStatusRequest())).plan_control.state == "free"


async def test_policy_version_too_large_for_journal_is_refused(harness: Harness) -> None:
    wanted = control_pb2.SetPolicyVersionRequest(engine_ids=["e0"], policy_version=2**64 - 1)
    code, words = await ending(harness.control.SetPolicyVersion(wanted))
    assert (code, words) == (INVALID, f"policy_version: must be >= 0 and <= {2**63 - 1}, got {2**64 - 1}")


# --- Limits


@pytest.mark.parametrize("config", [SMALL])
async def test_input_beyond_limit_is_refused_with_setting(harness: Harness) -> None:
    code, words, acks = await harness.reports("ReportRequests", gateway_report(5), gateway_report(6))
    assert (code, acks) == (EXHAUSTED, 1)
    assert words == "in_flight: must have at most 5 items (limits.requests_per_report), got 6"
    code, words, _ = await harness.reports("ReportRequests", gateway_report(4, "gw2"))
    assert (code, "limits.requests)" in words) == (EXHAUSTED, True)
    code, words, _ = await harness.reports("ReportRequests", gateway_report(5, engines=5))
    assert (code, "limits.engines" in words) == (EXHAUSTED, True)
    assert (await harness.reports("ReportRequests", gateway_report(1, "gw2")))[0] is None
    code, words, _ = await harness.reports("ReportRequests", gateway_report(1, "gw3"))
    assert (code, "limits.gateways" in words) == (EXHAUSTED, True)
    names = [engine_report(engine_id=f"e{n}") for n in range(5)]
    code, words, acks = await harness.reports("ReportEngines", *names)
    assert (code, "limits.engines" in words, acks) == (EXHAUSTED, True, 4)
    big = engine_report()
    big.capabilities.models.extend(["x" * 4000] * 20)
    code, words, _ = await harness.reports("ReportEngines", big)
    assert (code, "must be at most 65536 bytes (limits.message_bytes)" in words) == (EXHAUSTED, True)
    assert len((await harness.control.ListWorkers(control_pb2.ListWorkersRequest())).workers) == 4


@pytest.mark.parametrize("config", [SMALL])
async def test_limits_of_calls_and_nodes_are_released(harness: Harness) -> None:
    stub = agent_pb2_grpc.NodeStub(harness.channel)

    async def attach(node: str) -> Any:
        call = stub.Attach()
        await call.write(agent_pb2.NodeMessage(hello=agent_pb2.NodeHello(node_id=node, kind=1)))
        return call

    calls = [await attach(node) for node in ("n0", "n1")]
    async with asyncio.timeout(DEADLINE_S):
        while len(harness.plane.fleet.nodes.states()) < 2:
            await asyncio.sleep(0.01)
    code, words = await ending((await attach("n2")).read())
    assert (code, "limits.nodes" in words) == (EXHAUSTED, True)
    watch = harness.control.WatchPlans(control_pb2.WatchPlansRequest())
    await watch.initial_metadata()
    code, words = await ending(harness.control.GetStatus(control_pb2.GetStatusRequest()))
    assert (code, words) == (
        EXHAUSTED,
        "(call): at most 3 calls may be open at a time (limits.calls), got 4; try again later",
    )
    watch.cancel()
    calls[0].cancel()
    async with asyncio.timeout(DEADLINE_S):
        while sum(state.attached for state in harness.plane.fleet.nodes.states()) > 1:
            await asyncio.sleep(0.01)
    third = await attach("n2")  # replaces the disconnected one
    async with asyncio.timeout(DEADLINE_S):
        while {state.attachment.hello.node for state in harness.plane.fleet.nodes.states()} != {"n1", "n2"}:
            await asyncio.sleep(0.01)
    third.cancel()
    calls[1].cancel()


@pytest.mark.parametrize("config", ["limits: {connections: 2}"])
async def test_connections_are_limited_per_address(harness: Harness) -> None:
    await harness.control.GetPauseBarrier(control_pb2.GetPauseBarrierRequest())
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(harness.address, options) as second:
        await control_pb2_grpc.ControlStub(second).GetPauseBarrier(control_pb2.GetPauseBarrierRequest())
        async with grpc.aio.insecure_channel(harness.address, options) as third:
            code, _ = await ending(
                control_pb2_grpc.ControlStub(third).GetPauseBarrier(control_pb2.GetPauseBarrierRequest())
            )
            assert code is grpc.StatusCode.UNAVAILABLE
        await control_pb2_grpc.ControlStub(second).GetPauseBarrier(control_pb2.GetPauseBarrierRequest())


async def test_other_calls_are_answered_during_large_report(harness: Harness) -> None:
    report = gateway_report(60_000, engines=64)
    whole = asyncio.ensure_future(harness.reports("ReportRequests", report))
    answered = 0
    while not whole.done():
        await harness.control.GetPauseBarrier(control_pb2.GetPauseBarrierRequest())
        answered += not whole.done()
    assert (await whole) == (None, None, 1)
    assert answered >= 3  # a single turn of the event loop would have allowed only one


# --- Defects


async def test_unexpected_exception_ends_one_call_and_is_logged_once(
    harness: Harness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(harness.plane.fleet.state, "snapshot", fails)
    for _ in range(3):
        code, words = await ending(harness.control.ListRequests(control_pb2.ListRequestsRequest()))
        assert (code, words) == (grpc.StatusCode.INTERNAL, "internal error, see the server's log")
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]
    monkeypatch.undo()
    registry = CollectorRegistry()
    registry.register(DaemonCollector(harness.parts))
    assert (
        'orchestrrl_defects_total{part="orchestrrl.v1.Control/ListRequests"} 3.0' in generate_latest(registry).decode()
    )
    assert (await harness.control.ListRequests(control_pb2.ListRequestsRequest())).total == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyError("secret"), grpc.StatusCode.INTERNAL),
        (Permanent("the disk is full"), grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
async def test_error_in_received_stream_ends_call_with_its_status(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, code: Any
) -> None:
    def fails(_: object) -> None:
        raise error

    monkeypatch.setattr(harness.parts.fleet, "result_received", fails)
    call = agent_pb2_grpc.NodeStub(harness.channel).Attach()
    await call.write(agent_pb2.NodeMessage(hello=agent_pb2.NodeHello(node_id="n", kind=1)))
    await call.write(agent_pb2.NodeMessage(result=agent_pb2.OperationResult(operation_id="1-1")))
    assert (await ending(call.read()))[0] is code
    assert harness.plane.defects.counts["orchestrrl.v1.Node/Attach"] == (code is grpc.StatusCode.INTERNAL)
    assert not any(record.name == "asyncio" for record in caplog.records)


async def test_answer_to_disconnected_client_logs_no_traceback(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that no traceback is logged; gRPC's core logs one occasionally, at deadlines of milliseconds."""
    core = logging.getLogger("grpc._cython.cygrpc")
    for error in (grpc.aio.InternalError("execute_batch"), ValueError("x")):
        try:
            raise error
        except (grpc.aio.InternalError, ValueError):
            core.exception("raised in core")
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]
