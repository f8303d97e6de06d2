"""Between protobuf and the model, both ways: telemetry. With node.py, control.py and ocs.py the
only files that know both.

`x_to_pb` and `x_from_pb` for each message. A message that makes no sense raises ValueError with the field's name.
"""

from orchestrrl.core.errors import cut
from orchestrrl.core.nodes import GatewayEngine
from orchestrrl.engines.base import EngineCapabilities
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
from orchestrrl.rpc.codecs.serving import serving_from_pb, serving_to_pb
from orchestrrl.rpc.pb import telemetry_pb2
from orchestrrl.rpc.ranges import MOST_NAME_CHARACTERS
from planner.model import EngineHealth, EngineId, NodeId, RequestId, RequestState, RequestView

MOST_OUTSIDE_CHARACTERS = 2000
MOST_REASON_CHARACTERS = 200
MOST_MODELS = 256  # names that one engine serves

_HEALTH_TO_PB = {
    EngineHealth.OK: telemetry_pb2.ENGINE_HEALTH_OK,
    EngineHealth.SLOW: telemetry_pb2.ENGINE_HEALTH_SLOW,
    EngineHealth.GONE: telemetry_pb2.ENGINE_HEALTH_GONE,
    EngineHealth.NONSENSE: telemetry_pb2.ENGINE_HEALTH_NONSENSE,
}
_HEALTH_FROM_PB = {pb: health for health, pb in _HEALTH_TO_PB.items()}

_PHASE_TO_PB = {
    BarrierPhase.OPEN: telemetry_pb2.BARRIER_PHASE_OPEN,
    BarrierPhase.CLOSING: telemetry_pb2.BARRIER_PHASE_CLOSING,
    BarrierPhase.QUIET: telemetry_pb2.BARRIER_PHASE_QUIET,
}
_PHASE_FROM_PB = {pb: phase for phase, pb in _PHASE_TO_PB.items()}

_STATE_TO_PB = {
    RequestState.WAITING: telemetry_pb2.REQUEST_STATE_WAITING,
    RequestState.NEW: telemetry_pb2.REQUEST_STATE_WAITING,
    RequestState.RUNNING: telemetry_pb2.REQUEST_STATE_RUNNING,
}


def required(name: str, value: str) -> str:
    if not value:
        raise ValueError(f"{name} must not be empty")
    return value


def outside_text(text: str, most: int = MOST_OUTSIDE_CHARACTERS) -> str:
    """What an engine, a client or an error wrote, as a message can hold it and the daemon takes it."""
    return cut(text.encode(errors="replace").decode(), most)


def _outside_name(text: str) -> str:
    """The same for a name, which the daemon takes where it is printable."""
    return "".join(each if each.isprintable() else "?" for each in outside_text(text, MOST_NAME_CHARACTERS))


def health_to_pb(health: EngineHealth) -> telemetry_pb2.EngineHealth.ValueType:
    return _HEALTH_TO_PB[health]


def health_from_pb(health: telemetry_pb2.EngineHealth.ValueType) -> EngineHealth | None:
    """None where it is not specified."""
    return _HEALTH_FROM_PB.get(health)


def capabilities_to_pb(capabilities: EngineCapabilities) -> telemetry_pb2.EngineCapabilities:
    return telemetry_pb2.EngineCapabilities(
        engine=capabilities.engine,
        version=outside_text(capabilities.version),
        models=map(_outside_name, capabilities.models[:MOST_MODELS]),
        token_ids=capabilities.token_ids,
        abort_requests=capabilities.abort_requests,
        pause=capabilities.pause,
        collective_rpc=capabilities.collective_rpc,
        weight_transfer=capabilities.weight_transfer,
        sleep=capabilities.sleep,
        scale_elastic_ep=capabilities.scale_elastic_ep,
        tokens_endpoint=capabilities.tokens_endpoint,
        max_model_len_tokens=capabilities.max_model_len_tokens,
        max_sequences=capabilities.max_sequences,
        serving=serving_to_pb(capabilities.serving),
    )


def capabilities_from_pb(message: telemetry_pb2.EngineCapabilities) -> EngineCapabilities:
    return EngineCapabilities(
        engine=message.engine,
        version=message.version,
        models=tuple(message.models),
        token_ids=message.token_ids,
        abort_requests=message.abort_requests,
        pause=message.pause,
        collective_rpc=message.collective_rpc,
        weight_transfer=message.weight_transfer,
        sleep=message.sleep,
        scale_elastic_ep=message.scale_elastic_ep,
        tokens_endpoint=message.tokens_endpoint,
        max_model_len_tokens=message.max_model_len_tokens if message.HasField("max_model_len_tokens") else None,
        max_sequences=message.max_sequences if message.HasField("max_sequences") else None,
        serving=serving_from_pb(message.serving),
    )


def engine_sample_to_pb(sample: EngineSample) -> telemetry_pb2.EngineSample:
    return telemetry_pb2.EngineSample(
        sampled_unix_s=sample.sampled_s,
        running=sample.running,
        waiting=sample.waiting,
        kv_usage_fraction=sample.kv_usage_fraction,
        kv_capacity_tokens=sample.kv_capacity_tokens,
        generation_tokens_total=sample.generation_tokens_total,
        prompt_tokens_total=sample.prompt_tokens_total,
        preemptions_total=sample.preemptions_total,
        decode_tokens_per_s=sample.decode_tokens_per_s,
        scrape_s=sample.scrape_s,
    )


def engine_sample_from_pb(message: telemetry_pb2.EngineSample) -> EngineSample:
    return EngineSample(
        sampled_s=message.sampled_unix_s,
        running=message.running,
        waiting=message.waiting,
        kv_usage_fraction=message.kv_usage_fraction,
        kv_capacity_tokens=message.kv_capacity_tokens,
        generation_tokens_total=message.generation_tokens_total,
        prompt_tokens_total=message.prompt_tokens_total,
        preemptions_total=message.preemptions_total,
        decode_tokens_per_s=message.decode_tokens_per_s if message.HasField("decode_tokens_per_s") else None,
        scrape_s=message.scrape_s,
    )


def engine_report_to_pb(report: EngineReport) -> telemetry_pb2.EngineReport:
    return telemetry_pb2.EngineReport(
        agent_id=report.agent,
        sequence=report.sequence,
        engine_id=report.engine,
        url=report.url,
        health=_HEALTH_TO_PB[report.health],
        health_detail=outside_text(report.health_detail),
        sample=engine_sample_to_pb(report.sample) if report.sample else None,
        capabilities=capabilities_to_pb(report.capabilities) if report.capabilities else None,
        incarnation=report.incarnation,
        sent_unix_s=report.times.sent_s,
        ack_sent_unix_s=report.times.ack_sent_s,
        ack_received_unix_s=report.times.ack_received_s,
        server_id=report.server,
    )


def engine_report_from_pb(message: telemetry_pb2.EngineReport) -> EngineReport:
    if message.health not in _HEALTH_FROM_PB:
        raise ValueError(f"health must be specified, got {message.health}")
    return EngineReport(
        agent=NodeId(required("agent_id", message.agent_id)),
        sequence=message.sequence,
        engine=EngineId(required("engine_id", message.engine_id)),
        url=message.url,
        health=_HEALTH_FROM_PB[message.health],
        health_detail=message.health_detail,
        sample=engine_sample_from_pb(message.sample) if message.HasField("sample") else None,
        capabilities=capabilities_from_pb(message.capabilities) if message.HasField("capabilities") else None,
        incarnation=message.incarnation,
        times=_times_from_pb(message),
        server=message.server_id,
    )


def _times_from_pb(message: telemetry_pb2.EngineReport | telemetry_pb2.GatewayReport) -> SendTimes:
    return SendTimes(message.sent_unix_s, message.ack_sent_unix_s, message.ack_received_unix_s)


def gateway_engine_to_pb(engine: GatewayEngine) -> telemetry_pb2.GatewayEngine:
    return telemetry_pb2.GatewayEngine(
        engine_id=engine.engine, url=engine.url, server_id=engine.server, known_as=engine.known_as or ""
    )


def gateway_engine_from_pb(message: telemetry_pb2.GatewayEngine) -> GatewayEngine:
    known_as = EngineId(message.known_as) if message.known_as else None
    return GatewayEngine(EngineId(required("engine_id", message.engine_id)), message.url, message.server_id, known_as)


def request_to_pb(request: RequestView) -> telemetry_pb2.RequestProgress:
    return telemetry_pb2.RequestProgress(
        request_id=request.id,
        engine_id=request.engine or "",
        state=_STATE_TO_PB[request.state],
        prompt_tokens=request.prompt_tokens,
        generated_tokens=request.generated_tokens,
        max_tokens=request.max_tokens,
        group_id=request.group,
        tag=request.tag,
        movable=request.movable,
        movable_detail=request.movable_detail,
        moves=request.moves,
        age_s=request.age_s,
        quiet_s=request.quiet_s,
        policy_version=request.policy_version,
        group_enough=request.group_enough,
    )


def request_from_pb(message: telemetry_pb2.RequestProgress) -> RequestView:
    """A request without a state counts as waiting while it has no token."""
    running = message.state == telemetry_pb2.REQUEST_STATE_RUNNING or (
        message.state == telemetry_pb2.REQUEST_STATE_UNSPECIFIED and message.generated_tokens > 0
    )
    return RequestView(
        id=RequestId(required("request_id", message.request_id)),
        engine=EngineId(message.engine_id) if message.engine_id else None,
        state=RequestState.RUNNING if running else RequestState.WAITING,
        prompt_tokens=message.prompt_tokens,
        generated_tokens=message.generated_tokens,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        group=message.group_id,
        tag=message.tag,
        movable=message.movable,
        moves=message.moves,
        age_s=message.age_s,
        movable_detail=message.movable_detail,
        quiet_s=message.quiet_s,
        policy_version=message.policy_version if message.HasField("policy_version") else None,
        group_enough=message.group_enough,
    )


def finished_to_pb(finished: FinishedRequest) -> telemetry_pb2.FinishedRequest:
    return telemetry_pb2.FinishedRequest(
        request_id=finished.id,
        engine_id=finished.engine or "",
        prompt_tokens=finished.prompt_tokens,
        generated_tokens=finished.generated_tokens,
        finish_reason=outside_text(finished.finish_reason, MOST_REASON_CHARACTERS),
        moves=finished.moves,
        tag=finished.tag,
        duration_s=finished.duration_s,
        group_id=finished.group,
        group_enough=finished.group_enough,
    )


def finished_from_pb(message: telemetry_pb2.FinishedRequest) -> FinishedRequest:
    return FinishedRequest(
        id=RequestId(required("request_id", message.request_id)),
        engine=EngineId(message.engine_id) if message.engine_id else None,
        prompt_tokens=message.prompt_tokens,
        generated_tokens=message.generated_tokens,
        finish_reason=message.finish_reason,
        moves=message.moves,
        tag=message.tag,
        duration_s=message.duration_s,
        group=message.group_id,
        group_enough=message.group_enough,
    )


def barrier_to_pb(barrier: BarrierReport) -> telemetry_pb2.BarrierReport:
    return telemetry_pb2.BarrierReport(
        phase=_PHASE_TO_PB[barrier.phase],
        lease_id=barrier.lease,
        lease_until_unix_s=barrier.lease_until_s,
        running=barrier.running,
        frozen=barrier.frozen,
        held=barrier.held,
        policy_version=barrier.policy_version,
    )


def barrier_from_pb(message: telemetry_pb2.BarrierReport) -> BarrierReport:
    """A phase that is not specified is open: gateways that know of no barrier have none."""
    return BarrierReport(
        phase=_PHASE_FROM_PB.get(message.phase, BarrierPhase.OPEN),
        lease=message.lease_id,
        lease_until_s=message.lease_until_unix_s,
        running=message.running,
        frozen=message.frozen,
        held=message.held,
        policy_version=message.policy_version if message.HasField("policy_version") else None,
    )


def failovers_to_pb(failovers: EngineFailovers) -> telemetry_pb2.EngineFailovers:
    return telemetry_pb2.EngineFailovers(
        engine_id=failovers.engine,
        sequence=failovers.sequence,
        last_unix_s=failovers.last_s,
        failovers=failovers.counts.failovers,
        requests_recomputed=failovers.counts.requests_recomputed,
        tokens_recomputed=failovers.counts.tokens_recomputed,
    )


def failovers_from_pb(message: telemetry_pb2.EngineFailovers) -> EngineFailovers:
    return EngineFailovers(
        engine=EngineId(message.engine_id),
        sequence=message.sequence,
        last_s=message.last_unix_s,
        counts=FailoverCounts(message.failovers, message.requests_recomputed, message.tokens_recomputed),
    )


def gateway_report_to_pb(report: GatewayReport) -> telemetry_pb2.GatewayReport:
    return telemetry_pb2.GatewayReport(
        gateway_id=report.gateway,
        sequence=report.sequence,
        sampled_unix_s=report.sampled_s,
        url=report.url,
        in_flight=[request_to_pb(request) for request in report.in_flight],
        finished=[finished_to_pb(finished) for finished in report.finished],
        barrier=barrier_to_pb(report.barrier),
        failovers=[failovers_to_pb(failovers) for failovers in report.failovers],
        incarnation=report.incarnation,
        sent_unix_s=report.times.sent_s,
        ack_sent_unix_s=report.times.ack_sent_s,
        ack_received_unix_s=report.times.ack_received_s,
        engines=None
        if report.engines is None
        else telemetry_pb2.GatewayEngines(engines=map(gateway_engine_to_pb, report.engines)),
    )


def gateway_report_from_pb(message: telemetry_pb2.GatewayReport) -> GatewayReport:
    return gateway_report_of(
        message, tuple(map(request_from_pb, message.in_flight)), tuple(map(finished_from_pb, message.finished))
    )


def gateway_report_of(
    message: telemetry_pb2.GatewayReport, in_flight: tuple[RequestView, ...], finished: tuple[FinishedRequest, ...]
) -> GatewayReport:
    """The report, with its requests as they were converted before."""
    return GatewayReport(
        gateway=NodeId(required("gateway_id", message.gateway_id)),
        sequence=message.sequence,
        sampled_s=message.sampled_unix_s,
        url=message.url,
        in_flight=in_flight,
        finished=finished,
        barrier=barrier_from_pb(message.barrier),
        failovers=tuple(failovers_from_pb(failovers) for failovers in message.failovers),
        incarnation=message.incarnation,
        times=_times_from_pb(message),
        engines=tuple(map(gateway_engine_from_pb, message.engines.engines)) if message.HasField("engines") else None,
    )


def ack_to_pb(ack: ReportAck) -> telemetry_pb2.ReportAck:
    return telemetry_pb2.ReportAck(sequence=ack.sequence, generation=ack.generation, sent_unix_s=ack.sent_s)


def ack_from_pb(message: telemetry_pb2.ReportAck) -> ReportAck:
    return ReportAck(sequence=message.sequence, generation=message.generation, sent_s=message.sent_unix_s)
