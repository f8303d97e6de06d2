"""Accepted reports in any order leave a state that every view can send."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.config.schema import LimitSettings
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.operations import OperationResult
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.metrics import DaemonCollector
from orchestrrl.daemon.wiring import Daemon, build_daemon
from orchestrrl.rpc.codecs import control as control_codec
from orchestrrl.rpc.codecs import node as node_codec
from orchestrrl.rpc.codecs import telemetry as telemetry_codec
from orchestrrl.rpc.pb import agent_pb2, control_pb2, telemetry_pb2
from orchestrrl.rpc.ranges import checking

CONFIG = """
mode: act
fleet:
  gpus: {count: 2}
  configurations:
    - {id: tp1, gpus: 1, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 100000, max_sequences: 4,
       prefill_tokens_per_s: 9000, switch_s: 1.5}
  engines:
    - {id: e0, url: "http://e0", configuration: tp1, gpus: [0]}
    - {id: e1, url: "http://e1", configuration: tp1, gpus: [1]}
"""
# For each kind of number: usual values, the bounds, and values beyond them.
fractions = st.floats(0, 1) | st.sampled_from([0.0, 1.0, 0.25, 0.5, 0.75, 1.0005])
rates = st.sampled_from([0.0, 5e-324, 1.0, 20.0, 5000.0, 1e9, 1e9, 1e10])
floats = st.floats(0, 253402300799.0) | st.sampled_from(
    [0.0, 1e-9, 1.0, 20.0, 1000.0, 1e9, 253402300799.0, 1e308, -1.0]
)
smalls = st.sampled_from([0, 1, 2, 100, 5000, 2**24, 2**31, 2**32 - 1])
bigs = st.integers(0, 2**63 - 1) | st.sampled_from([0, 1, 100_000, 2**53, 2**63 - 1, 2**63])
engine_ids = st.sampled_from(["e0", "e1", "e2", "", "e" * 1024])


def optional(values: Any) -> Any:
    return st.none() | values


samples = st.fixed_dictionaries({
    "sampled_unix_s": floats, "running": smalls, "waiting": smalls, "kv_usage_fraction": fractions,
    "kv_capacity_tokens": bigs, "generation_tokens_total": bigs, "prompt_tokens_total": bigs, "preemptions_total": bigs,
    "decode_tokens_per_s": optional(rates), "scrape_s": floats,
}).map(lambda fields: telemetry_pb2.EngineSample(**fields))  # fmt: skip
capabilities = st.builds(telemetry_pb2.EngineCapabilities, max_model_len_tokens=smalls, max_sequences=smalls)
engine_reports = st.fixed_dictionaries({
    "agent_id": st.just("a"), "sequence": bigs, "engine_id": engine_ids, "health": st.sampled_from([1, 1, 1, 2, 3, 4]),
    "sample": optional(samples), "capabilities": optional(capabilities),
}).map(lambda fields: telemetry_pb2.EngineReport(**fields))  # fmt: skip
requests = st.fixed_dictionaries({
    "request_id": st.sampled_from([f"r{n}" for n in range(6)]), "engine_id": engine_ids,
    "state": st.sampled_from([0, 1, 2]), "prompt_tokens": smalls, "generated_tokens": smalls,
    "max_tokens": optional(smalls), "movable": st.just(True), "moves": smalls, "age_s": floats, "quiet_s": floats,
    "policy_version": optional(bigs), "group_id": st.sampled_from(["", "g"]), "group_enough": smalls,
}).map(lambda fields: telemetry_pb2.RequestProgress(**fields))  # fmt: skip
finished = st.fixed_dictionaries({
    "request_id": st.sampled_from(["f0", "f1"]), "generated_tokens": smalls, "prompt_tokens": smalls,
    "finish_reason": st.sampled_from(["stop", "length", "abort"]), "duration_s": floats,
}).map(lambda fields: telemetry_pb2.FinishedRequest(**fields))  # fmt: skip
barriers = st.builds(
    telemetry_pb2.BarrierReport, phase=st.sampled_from([0, 1, 2, 3]), lease_until_unix_s=floats, running=smalls,
    frozen=smalls, held=smalls, policy_version=bigs,
)  # fmt: skip
gateway_reports = st.builds(
    telemetry_pb2.GatewayReport, gateway_id=st.sampled_from(["gw", "gw2"]), sequence=bigs, sampled_unix_s=floats,
    in_flight=st.lists(requests, max_size=4), finished=st.lists(finished, max_size=2), barrier=barriers,
)  # fmt: skip
results = st.builds(
    agent_pb2.OperationResult, operation_id=st.just("1-1"), status=st.sampled_from([0, 1, 2, 3, 4, 5]),
    duration_s=floats, items=st.lists(
        st.builds(agent_pb2.ItemResult, id=st.just("r0"), done=st.booleans(), recomputed_tokens=smalls,
                  loaded_tokens=smalls, duration_s=floats, predicted_s=floats), max_size=2),
)  # fmt: skip


def passes(message: Any) -> bool:
    try:
        for _ in checking(message, LimitSettings()):
            pass
    except OrchestrRLError:
        return False
    return True


def fold(plane: ControlPlane, message: Any, stream: int) -> None:
    match message:
        case telemetry_pb2.EngineReport():
            plane.fleet.engine_reported(telemetry_codec.ENGINE_REPORT.from_pb(message), stream)
        case telemetry_pb2.GatewayReport():
            plane.fleet.gateway_reported(telemetry_codec.GATEWAY_REPORT.from_pb(message), stream)
        case _:
            result: OperationResult = node_codec.RESULT.from_pb(message)
            plane.fleet.result_received(result)
            plane.fleet.state.fold_result(result)


def look(parts: Daemon) -> None:
    """Send every view."""
    plane = parts.control_plane
    snapshot = plane.fleet.state.snapshot(plane.clock.now_s())
    views: list[Any] = [
        control_codec.status_to_pb(parts, "test"),
        control_pb2.ListWorkersResponse(workers=control_codec.workers_to_pb(plane, snapshot)),
        control_pb2.ListRequestsResponse(requests=map(telemetry_codec.REQUEST.to_pb, snapshot.requests)),
    ]
    if plane.balance is not None:
        views.append(control_codec.balance_to_pb(plane.balance, plane.fleet.latest_moves))
    views += [control_codec.PLAN.to_pb(plan) for plan in plane.plans.newest(0)]
    views += [control_codec.ENTRY.to_pb(entry) for entry in plane.journal.tail(1000)]
    for view in views:
        assert type(view).FromString(view.SerializeToString()) == view
    registry = CollectorRegistry()
    registry.register(DaemonCollector(parts))
    assert b"orchestrrl_workers" in generate_latest(registry)


@given(
    st.lists(st.tuples(engine_reports | gateway_reports | results, st.floats(0, 30)), min_size=1, max_size=8),
    st.integers(1, 8),
)
def test_every_view_shows_accepted_reports(messages: list[tuple[Any, float]], tick_every: int) -> None:
    async def run(folder: Path) -> None:
        clock = VirtualClock(1000.0)
        with Journal(folder / "journal.sqlite", clock.now_s()) as journal:
            parts = build_daemon(parse_config(CONFIG), journal, clock)
            plane = parts.control_plane
            for place, (message, later_s) in enumerate(messages):
                if passes(message):
                    fold(plane, message, place)
                await clock.advance(later_s)
                look(parts)
                if place % tick_every == 0:
                    plane.fast_tick()
                    await plane.slow_tick()
                    look(parts)
            await plane.fleet.close(0.0)

    with TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


def test_only_valid_reports_are_accepted() -> None:
    """Check that the interceptor accepts valid reports and refuses others; otherwise the property above would be
    vacuous."""
    sane = telemetry_pb2.EngineSample(kv_usage_fraction=1.0, kv_capacity_tokens=2**63 - 1, decode_tokens_per_s=1e4)
    assert passes(telemetry_pb2.EngineReport(agent_id="a", engine_id="e0", health=1, sample=sane))
    sane.kv_usage_fraction = 1.0000001
    assert not passes(telemetry_pb2.EngineReport(agent_id="a", engine_id="e0", health=1, sample=sane))
