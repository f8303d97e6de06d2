"""The meaning of telemetry and operations beyond their types; ../test_codec.py has the tests common to all codecs."""

import re
from typing import Any

import pytest
from builders import GATEWAY

from orchestrrl.core.config.schema import LimitSettings
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.operations import (
    OperationId,
    OperationItemResult,
    OperationResult,
    OperationStatus,
)
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.fleet.reports import (
    EngineReport,
    FinishedRequest,
    GatewayReport,
)
from orchestrrl.rpc.codecs import node as node_codec
from orchestrrl.rpc.codecs import telemetry as codec
from orchestrrl.rpc.pb import agent_pb2, telemetry_pb2
from orchestrrl.rpc.ranges import checking
from planner.model import EngineHealth, EngineId, NodeId, RequestId, RequestState


def test_request_without_state_waits_until_first_token() -> None:
    silent = telemetry_pb2.RequestProgress(request_id="a")
    assert codec.REQUEST.from_pb(silent).state is RequestState.WAITING
    silent.generated_tokens = 1
    assert codec.REQUEST.from_pb(silent).state is RequestState.RUNNING


def test_status_of_later_version_is_unknown() -> None:
    message = agent_pb2.OperationResult(operation_id="1", node_id=GATEWAY, status=99)  # type: ignore[arg-type]
    assert node_codec.RESULT.from_pb(message).status is OperationStatus.UNKNOWN


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"engine_id": ""}, "failovers[0].engine_id: must not be empty, got ''"),
        ({"last_unix_s": float("nan")}, "failovers[0].last_unix_s: must be >= 0 and <= 253402300799, got nan"),
        ({"last_unix_s": float("-inf")}, "failovers[0].last_unix_s: must be >= 0 and <= 253402300799, got -inf"),
        (
            {"tokens_recomputed": 2**64 - 1},
            "failovers[0].tokens_recomputed: must be >= 0 and <= 1099511627776, got 18446744073709551615",
        ),
    ],
)
def test_impossible_failover_counts_are_refused(fields: dict[str, object], complaint: str) -> None:
    message = telemetry_pb2.EngineFailovers(**{"engine_id": "e0", **fields})  # type: ignore[arg-type]
    with pytest.raises(ProblemFaults, match=re.escape(complaint)):
        list(checking(telemetry_pb2.GatewayReport(gateway_id="g", failovers=[message]), LimitSettings()))


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"weight_bits": float("nan")}, "serving.weight_bits: must be >= 0.01 and <= 64, got nan"),
        ({"kv_bits": -8.0}, "serving.kv_bits: must be >= 0.01 and <= 64, got -8.0"),
        ({"tensor_parallel": 0}, "serving.tensor_parallel: must be >= 1 and <= 65536, got 0"),
        ({"data_parallel": 2**32 - 1}, "serving.data_parallel: must be >= 1 and <= 65536, got 4294967295"),
        ({"sizes": {"layers": 2**32 - 1}}, "serving.sizes.layers: must be >= 1 and <= 16777216, got 4294967295"),
        ({"sizes": {"layers": 0}}, "serving.sizes.layers: must be >= 1 and <= 16777216, got 0"),
        ({"sizes": {"weight_bits": 0.0}}, "serving.sizes.weight_bits: must be >= 0.01 and <= 64, got 0.0"),
    ],
)
def test_serving_facts_out_of_range_are_refused_by_field(fields: dict[str, Any], fault: str) -> None:
    message = telemetry_pb2.EngineCapabilities(serving=telemetry_pb2.ServingFacts(**fields))
    with pytest.raises(ProblemFaults, match=re.escape(fault)):
        list(checking(message, LimitSettings()))


def test_absent_serving_facts_are_accepted() -> None:
    list(checking(telemetry_pb2.EngineCapabilities(serving=telemetry_pb2.ServingFacts()), LimitSettings()))


def test_contradicting_model_sizes_are_refused_by_field() -> None:
    sizes = telemetry_pb2.ModelSizes(
        layers=1, hidden=1, q_heads=1, kv_heads=1, head_dim=1, vocab=1, experts=8, experts_per_token=9
    )
    message = telemetry_pb2.EngineCapabilities(serving=telemetry_pb2.ServingFacts(sizes=sizes))
    with pytest.raises(ValueError, match=re.escape("experts_per_token must be within 1..8, got 9")):
        codec.CAPABILITIES.from_pb(message)


def test_texts_of_engines_and_errors_are_sent_in_accepted_form() -> None:
    long, models = "x" * 100_000, tuple(f"lora-{n}" for n in range(1000))
    report = EngineReport(
        NodeId("a"),
        1,
        EngineId("e0"),
        "http://e0",
        EngineHealth.NONSENSE,
        long,
        None,
        EngineCapabilities("v", long, models),
    )
    done = FinishedRequest(RequestId("r"), None, 1, 1, long)
    gateway = GatewayReport(GATEWAY, 1, 0.0, "", (), (done,))
    result = OperationResult(
        OperationId("1-1"),
        GATEWAY,
        OperationStatus.FAILED,
        f"\ud800{long}",
        items=(OperationItemResult("r", False, long),),
    )
    for message in (
        codec.ENGINE_REPORT.to_pb(report),
        codec.GATEWAY_REPORT.to_pb(gateway),
        node_codec.RESULT.to_pb(result),
    ):
        for _ in checking(message, LimitSettings()):
            pass
