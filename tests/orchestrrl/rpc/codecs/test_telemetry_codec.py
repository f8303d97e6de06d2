"""What goes onto the wire comes back the same."""

import re
from typing import Any

import pytest
from builders import GATEWAY
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.config.schema import LimitSettings
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.nodes import GatewayEngine, NodeHello, NodeKind
from orchestrrl.core.operations import (
    AbortRequests,
    CancelRequests,
    CloseBarrier,
    EngineRoute,
    FrozenRequests,
    MoveMethod,
    MoveRequests,
    OpenBarrier,
    Operation,
    OperationId,
    OperationItemResult,
    OperationResult,
    OperationStatus,
    PauseEngine,
    PauseMode,
    ProbeEngine,
    RequestMove,
    ResumeEngine,
    SetRoutes,
)
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.engines.serving import MOST_RANKS, MOST_SIZE, ServingFacts
from orchestrrl.fleet.reports import (
    BarrierPhase,
    BarrierReport,
    EngineFailovers,
    EngineReport,
    EngineSample,
    FailoverCounts,
    FinishedRequest,
    GatewayReport,
    ReportAck,
    SendTimes,
)
from orchestrrl.rpc.codecs import node as node_codec
from orchestrrl.rpc.codecs import telemetry as codec
from orchestrrl.rpc.pb import agent_pb2, telemetry_pb2
from orchestrrl.rpc.ranges import MOST_FAILOVER_TOKENS, checking
from planner.cost.models import Model
from planner.model import EngineHealth, EngineId, NodeId, RequestId, RequestState, RequestView

ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
words = st.text(st.characters(codec="utf-8"), max_size=8)
names = words.filter(str.isprintable)
counts = st.integers(0, 2**32 - 1)
totals = st.integers(0, 2**64 - 1)
numbers = st.floats(allow_nan=False)
engines, requests, nodes = ids.map(EngineId), ids.map(RequestId), ids.map(NodeId)


def tuples(elements):  # type: ignore[no-untyped-def]
    return st.lists(elements, max_size=3).map(tuple)


def optional(values):  # type: ignore[no-untyped-def]
    return st.none() | values


ranks = st.integers(1, MOST_RANKS)
sizes = st.integers(1, MOST_SIZE)
bits = st.floats(0.25, 64)
models = st.builds(
    Model, name=words, layers=sizes, hidden=sizes, q_heads=sizes, kv_heads=sizes, head_dim=sizes, ffn=sizes,
    vocab=sizes, experts=st.sampled_from([0, 8]), experts_per_token=st.integers(1, 8), expert_ffn=sizes,
    window_tokens=sizes, tied_embeddings=st.booleans(), weight_bits=bits, expert_bits=bits,
)  # fmt: skip
serving = st.builds(
    ServingFacts, model=words, sizes=optional(models), weight_bits=optional(bits), kv_bits=optional(bits),
    tp=optional(ranks), pp=optional(ranks), dp=optional(ranks), ep=optional(st.booleans()), device=words, gpu=words,
    gpu_detail=words,
)  # fmt: skip
capabilities = st.builds(
    EngineCapabilities, engine=words, version=words, models=tuples(names), token_ids=st.booleans(), pause=st.booleans(),
    max_model_len_tokens=optional(counts), max_sequences=optional(counts), serving=serving,
)  # fmt: skip
samples = st.builds(
    EngineSample, sampled_s=numbers, running=counts, waiting=counts, kv_usage_fraction=numbers,
    kv_capacity_tokens=totals, generation_tokens_total=totals, prompt_tokens_total=totals, preemptions_total=totals,
    decode_tokens_per_s=optional(numbers), scrape_s=numbers,
)  # fmt: skip
times = st.builds(SendTimes, sent_s=numbers, ack_sent_s=numbers, ack_received_s=numbers)
engine_reports = st.builds(
    EngineReport, agent=nodes, sequence=totals, engine=engines, url=words, health=st.sampled_from(EngineHealth),
    health_detail=words, sample=optional(samples), capabilities=optional(capabilities), incarnation=words, times=times,
    server=words,
)  # fmt: skip
gateway_engines = st.builds(GatewayEngine, engine=engines, url=words, server=words, known_as=optional(engines))
views = st.builds(
    RequestView, id=requests, engine=optional(engines),
    state=st.sampled_from([RequestState.WAITING, RequestState.RUNNING]), prompt_tokens=counts,
    generated_tokens=counts, max_tokens=optional(counts), group=words, tag=words, movable=st.booleans(), moves=counts,
    age_s=numbers, movable_detail=words, policy_version=optional(totals), group_enough=counts,
)  # fmt: skip
finished = st.builds(
    FinishedRequest, id=requests, engine=optional(engines), prompt_tokens=counts, generated_tokens=counts,
    finish_reason=words, moves=counts, tag=words, duration_s=numbers, group=words, group_enough=counts,
)  # fmt: skip
barriers = st.builds(
    BarrierReport, phase=st.sampled_from(BarrierPhase), lease=words, lease_until_s=numbers, running=counts,
    frozen=counts,
    held=counts, policy_version=optional(totals),
)  # fmt: skip
failovers = st.builds(
    EngineFailovers, engine=engines, sequence=totals, last_s=st.floats(allow_nan=False, allow_infinity=False),
    counts=st.builds(
        FailoverCounts, failovers=counts, requests_recomputed=counts,
        tokens_recomputed=st.integers(0, MOST_FAILOVER_TOKENS),
    ),
)  # fmt: skip
gateway_reports = st.builds(
    GatewayReport, gateway=nodes, sequence=totals, sampled_s=numbers, url=words, in_flight=tuples(views),
    finished=tuples(finished), barrier=barriers, failovers=tuples(failovers),
    incarnation=words, times=times, engines=optional(tuples(gateway_engines)),
)  # fmt: skip
routes = st.builds(
    EngineRoute, engine=engines, url=words, health=optional(st.sampled_from(EngineHealth)),
    load_index=optional(numbers), kv_capacity_tokens=totals, kv_free_tokens=totals, max_sequences=counts,
    draining=st.booleans(), kv_version=words, pool=words, policy_version=optional(totals), waiting=optional(counts),
    newest_policy_version=optional(totals),
)  # fmt: skip
moves = st.builds(
    RequestMove, requests, st.just(EngineId("")) | engines, engines, numbers, st.sampled_from(MoveMethod),
    predicted_s=numbers, other_s=numbers,
)  # fmt: skip
items = st.builds(
    OperationItemResult, words, st.booleans(), words, counts, numbers, optional(st.sampled_from(MoveMethod)),
    counts, numbers,
)  # fmt: skip
actions = st.one_of(
    st.builds(SetRoutes, tuples(routes), tuples(engines), numbers),
    st.builds(MoveRequests, tuples(moves)),
    st.builds(PauseEngine, engines, st.sampled_from(PauseMode)),
    st.builds(ResumeEngine, engines),
    st.builds(AbortRequests, engines, tuples(requests)),
    st.builds(ProbeEngine, engines),
    st.builds(
        CloseBarrier,
        ids,
        words,
        st.sampled_from(PauseMode),
        st.sampled_from(FrozenRequests),
        numbers,
        numbers,
        st.booleans(),
    ),
    st.builds(OpenBarrier, ids, optional(totals), tuples(engines)),
    st.builds(CancelRequests, tuples(requests), tuples(words), words),
)
operations = st.builds(
    Operation, id=ids.map(OperationId), generation=totals, valid_until_s=numbers, action=actions
)  # fmt: skip
results = st.builds(
    OperationResult, operation=ids.map(OperationId), node=nodes, status=st.sampled_from(OperationStatus), detail=words,
    duration_s=numbers, items=tuples(items),
)  # fmt: skip
hellos = st.builds(
    NodeHello,
    node=nodes,
    kind=st.sampled_from(NodeKind),
    engines=tuples(engines),
    version=words,
    url=words,
    incarnation=words,
    addresses=tuples(gateway_engines),
    host=words,
)


@given(engine_reports)
def test_engine_reports(report: EngineReport) -> None:
    assert codec.engine_report_from_pb(codec.engine_report_to_pb(report)) == report


@given(gateway_reports)
def test_gateway_reports(report: GatewayReport) -> None:
    assert codec.gateway_report_from_pb(codec.gateway_report_to_pb(report)) == report


@given(operations)
def test_operations(operation: Operation) -> None:
    message = agent_pb2.Operation.FromString(node_codec.operation_to_pb(operation).SerializeToString())
    assert node_codec.operation_from_pb(message) == operation


@given(results)
def test_results(result: OperationResult) -> None:
    assert node_codec.result_from_pb(node_codec.result_to_pb(result)) == result


@given(hellos)
def test_hellos(hello: NodeHello) -> None:
    assert node_codec.hello_from_pb(node_codec.hello_to_pb(hello)) == hello


def test_acks() -> None:
    ack = ReportAck(7, 3, 1e9)
    assert codec.ack_from_pb(codec.ack_to_pb(ack)) == ack


def test_a_request_without_a_state_waits_until_its_first_token() -> None:
    silent = telemetry_pb2.RequestProgress(request_id="a")
    assert codec.request_from_pb(silent).state is RequestState.WAITING
    silent.generated_tokens = 1
    assert codec.request_from_pb(silent).state is RequestState.RUNNING


def test_a_status_of_a_later_version_is_unknown() -> None:
    message = agent_pb2.OperationResult(operation_id="1", node_id=GATEWAY, status=99)  # type: ignore[arg-type]
    assert node_codec.result_from_pb(message).status is OperationStatus.UNKNOWN


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
def test_failovers_that_no_gateway_can_have_are_refused(fields: dict[str, object], complaint: str) -> None:
    message = telemetry_pb2.EngineFailovers(**{"engine_id": "e0", **fields})  # type: ignore[arg-type]
    with pytest.raises(ProblemFaults, match=re.escape(complaint)):
        list(checking(telemetry_pb2.GatewayReport(gateway_id="g", failovers=[message]), LimitSettings()))


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: codec.engine_report_from_pb(telemetry_pb2.EngineReport(agent_id="a")), "health must be specified"),
        (lambda: codec.engine_report_from_pb(telemetry_pb2.EngineReport(health=1)), "agent_id must not be empty"),
        (lambda: codec.gateway_report_from_pb(telemetry_pb2.GatewayReport()), "gateway_id must not be empty"),
        (lambda: node_codec.hello_from_pb(agent_pb2.NodeHello(node_id="n")), "kind must be specified, got 0"),
        (lambda: node_codec.operation_from_pb(agent_pb2.Operation(operation_id="1")), "action must be one that"),
        (lambda: node_codec.operation_from_pb(agent_pb2.Operation()), "operation_id must not be empty"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_named(call, complaint: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=complaint):
        call()


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"weight_bits": float("nan")}, "serving.weight_bits: must be above 0 and at most 64, got nan"),
        ({"kv_bits": -8.0}, "serving.kv_bits: must be above 0 and at most 64, got -8.0"),
        ({"tensor_parallel": 0}, "serving.tensor_parallel: must be within 1..65536, got 0"),
        ({"data_parallel": 2**32 - 1}, "serving.data_parallel: must be within 1..65536, got 4294967295"),
        ({"sizes": {"layers": 2**32 - 1}}, "serving.sizes.layers: must be <= 16777216, got 4294967295"),
        ({"sizes": {"weight_bits": 16.0, "expert_bits": 16.0}}, "serving.sizes.layers: must be >= 1, got 0"),
    ],
)
def test_serving_facts_out_of_range_are_refused_with_their_field(fields: dict[str, Any], fault: str) -> None:
    message = telemetry_pb2.EngineCapabilities(serving=telemetry_pb2.ServingFacts(**fields))
    with pytest.raises(ValueError, match=re.escape(fault)):
        codec.capabilities_from_pb(message)


def test_what_engines_and_errors_write_is_sent_as_the_daemon_takes_it() -> None:
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
        codec.engine_report_to_pb(report),
        codec.gateway_report_to_pb(gateway),
        node_codec.result_to_pb(result),
    ):
        for _ in checking(message, LimitSettings()):
            pass
