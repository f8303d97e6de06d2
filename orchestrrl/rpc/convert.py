"""Between protobuf and the model, both ways. The only file that knows both.

`x_to_pb` and `x_from_pb` for each message. A message that makes no sense raises ValueError with the field's name.
"""

from orchestrrl.engines.base import Capabilities, PauseMode
from orchestrrl.operations import (
    AbortRequests,
    Action,
    ItemResult,
    MoveMethod,
    MoveRequests,
    Operation,
    OperationId,
    OperationResult,
    OperationStatus,
    PauseEngine,
    ProbeEngine,
    RequestMove,
    ResumeEngine,
    Route,
    SetRoutes,
)
from orchestrrl.reports import (
    EngineReport,
    EngineSample,
    FinishedRequest,
    GatewayReport,
    NodeHello,
    NodeKind,
    ReportAck,
)
from orchestrrl.rpc.pb import agent_pb2, telemetry_pb2
from planner.model import EngineHealth, EngineId, NodeId, RequestId, RequestState, RequestView

_HEALTH_TO_PB = {
    EngineHealth.OK: telemetry_pb2.ENGINE_HEALTH_OK,
    EngineHealth.SLOW: telemetry_pb2.ENGINE_HEALTH_SLOW,
    EngineHealth.GONE: telemetry_pb2.ENGINE_HEALTH_GONE,
    EngineHealth.NONSENSE: telemetry_pb2.ENGINE_HEALTH_NONSENSE,
}
_HEALTH_FROM_PB = {pb: health for health, pb in _HEALTH_TO_PB.items()}

_STATE_TO_PB = {
    RequestState.WAITING: telemetry_pb2.REQUEST_STATE_WAITING,
    RequestState.NEW: telemetry_pb2.REQUEST_STATE_WAITING,
    RequestState.RUNNING: telemetry_pb2.REQUEST_STATE_RUNNING,
}

_KIND_TO_PB = {NodeKind.AGENT: agent_pb2.NODE_KIND_AGENT, NodeKind.GATEWAY: agent_pb2.NODE_KIND_GATEWAY}
_KIND_FROM_PB = {pb: kind for kind, pb in _KIND_TO_PB.items()}

_STATUS_TO_PB = {
    OperationStatus.DONE: agent_pb2.OPERATION_STATUS_DONE,
    OperationStatus.PARTIAL: agent_pb2.OPERATION_STATUS_PARTIAL,
    OperationStatus.FAILED: agent_pb2.OPERATION_STATUS_FAILED,
    OperationStatus.REFUSED: agent_pb2.OPERATION_STATUS_REFUSED,
    OperationStatus.UNKNOWN: agent_pb2.OPERATION_STATUS_UNKNOWN,
}
_STATUS_FROM_PB = {pb: status for status, pb in _STATUS_TO_PB.items()}

_METHOD_TO_PB = {
    MoveMethod.RECOMPUTE: agent_pb2.MOVE_METHOD_RECOMPUTE,
    MoveMethod.TRANSFER: agent_pb2.MOVE_METHOD_TRANSFER,
}
_METHOD_FROM_PB = {pb: method for method, pb in _METHOD_TO_PB.items()}


def _required(name: str, value: str) -> str:
    if not value:
        raise ValueError(f"{name} must not be empty")
    return value


# --- telemetry -------------------------------------------------------------------------------------------------------


def health_to_pb(health: EngineHealth) -> telemetry_pb2.EngineHealth.ValueType:
    return _HEALTH_TO_PB[health]


def capabilities_to_pb(capabilities: Capabilities) -> telemetry_pb2.EngineCapabilities:
    return telemetry_pb2.EngineCapabilities(
        engine=capabilities.engine,
        version=capabilities.version,
        models=capabilities.models,
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
    )


def capabilities_from_pb(message: telemetry_pb2.EngineCapabilities) -> Capabilities:
    return Capabilities(
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
        health_detail=report.health_detail,
        sample=engine_sample_to_pb(report.sample) if report.sample else None,
        capabilities=capabilities_to_pb(report.capabilities) if report.capabilities else None,
    )


def engine_report_from_pb(message: telemetry_pb2.EngineReport) -> EngineReport:
    if message.health not in _HEALTH_FROM_PB:
        raise ValueError(f"health must be specified, got {message.health}")
    return EngineReport(
        agent=NodeId(_required("agent_id", message.agent_id)),
        sequence=message.sequence,
        engine=EngineId(_required("engine_id", message.engine_id)),
        url=message.url,
        health=_HEALTH_FROM_PB[message.health],
        health_detail=message.health_detail,
        sample=engine_sample_from_pb(message.sample) if message.HasField("sample") else None,
        capabilities=capabilities_from_pb(message.capabilities) if message.HasField("capabilities") else None,
    )


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
    )


def request_from_pb(message: telemetry_pb2.RequestProgress) -> RequestView:
    """A request without a state counts as waiting while it has no token."""
    running = message.state == telemetry_pb2.REQUEST_STATE_RUNNING or (
        message.state == telemetry_pb2.REQUEST_STATE_UNSPECIFIED and message.generated_tokens > 0
    )
    return RequestView(
        id=RequestId(_required("request_id", message.request_id)),
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
    )


def finished_to_pb(finished: FinishedRequest) -> telemetry_pb2.FinishedRequest:
    return telemetry_pb2.FinishedRequest(
        request_id=finished.id,
        engine_id=finished.engine or "",
        prompt_tokens=finished.prompt_tokens,
        generated_tokens=finished.generated_tokens,
        finish_reason=finished.finish_reason,
        moves=finished.moves,
        tag=finished.tag,
        duration_s=finished.duration_s,
    )


def finished_from_pb(message: telemetry_pb2.FinishedRequest) -> FinishedRequest:
    return FinishedRequest(
        id=RequestId(_required("request_id", message.request_id)),
        engine=EngineId(message.engine_id) if message.engine_id else None,
        prompt_tokens=message.prompt_tokens,
        generated_tokens=message.generated_tokens,
        finish_reason=message.finish_reason,
        moves=message.moves,
        tag=message.tag,
        duration_s=message.duration_s,
    )


def gateway_report_to_pb(report: GatewayReport) -> telemetry_pb2.GatewayReport:
    return telemetry_pb2.GatewayReport(
        gateway_id=report.gateway,
        sequence=report.sequence,
        sampled_unix_s=report.sampled_s,
        url=report.url,
        in_flight=[request_to_pb(request) for request in report.in_flight],
        finished=[finished_to_pb(finished) for finished in report.finished],
    )


def gateway_report_from_pb(message: telemetry_pb2.GatewayReport) -> GatewayReport:
    return GatewayReport(
        gateway=NodeId(_required("gateway_id", message.gateway_id)),
        sequence=message.sequence,
        sampled_s=message.sampled_unix_s,
        url=message.url,
        in_flight=tuple(request_from_pb(request) for request in message.in_flight),
        finished=tuple(finished_from_pb(finished) for finished in message.finished),
    )


def ack_to_pb(ack: ReportAck) -> telemetry_pb2.ReportAck:
    return telemetry_pb2.ReportAck(sequence=ack.sequence, generation=ack.generation)


def ack_from_pb(message: telemetry_pb2.ReportAck) -> ReportAck:
    return ReportAck(sequence=message.sequence, generation=message.generation)


# --- nodes and operations --------------------------------------------------------------------------------------------


def hello_to_pb(hello: NodeHello) -> agent_pb2.NodeHello:
    return agent_pb2.NodeHello(
        node_id=hello.node,
        kind=_KIND_TO_PB[hello.kind],
        engine_ids=hello.engines,
        version=hello.version,
        url=hello.url,
    )


def hello_from_pb(message: agent_pb2.NodeHello) -> NodeHello:
    if message.kind not in _KIND_FROM_PB:
        raise ValueError(f"kind must be specified, got {message.kind}")
    return NodeHello(
        node=NodeId(_required("node_id", message.node_id)),
        kind=_KIND_FROM_PB[message.kind],
        engines=tuple(EngineId(engine) for engine in message.engine_ids),
        version=message.version,
        url=message.url,
    )


def route_to_pb(route: Route) -> agent_pb2.Route:
    return agent_pb2.Route(
        engine_id=route.engine,
        url=route.url,
        health=telemetry_pb2.ENGINE_HEALTH_UNSPECIFIED if route.health is None else _HEALTH_TO_PB[route.health],
        load_index=route.load_index,
        kv_capacity_tokens=route.kv_capacity_tokens,
        kv_free_tokens=route.kv_free_tokens,
        max_sequences=route.max_sequences,
        draining=route.draining,
        kv_version=route.kv_version,
    )


def route_from_pb(message: agent_pb2.Route) -> Route:
    return Route(
        engine=EngineId(_required("engine_id", message.engine_id)),
        url=message.url,
        health=_HEALTH_FROM_PB.get(message.health),
        load_index=message.load_index if message.HasField("load_index") else None,
        kv_capacity_tokens=message.kv_capacity_tokens,
        kv_free_tokens=message.kv_free_tokens,
        max_sequences=message.max_sequences,
        draining=message.draining,
        kv_version=message.kv_version,
    )


def operation_to_pb(operation: Operation) -> agent_pb2.Operation:
    message = agent_pb2.Operation(
        operation_id=operation.id, generation=operation.generation, valid_until_unix_s=operation.valid_until_s
    )
    match operation.action:
        case SetRoutes(routes):
            message.set_routes.SetInParent()
            message.set_routes.routes.extend(route_to_pb(route) for route in routes)
        case MoveRequests(moves):
            message.move_requests.SetInParent()
            message.move_requests.moves.extend(
                agent_pb2.RequestMove(
                    request_id=move.request,
                    from_engine_id=move.from_engine,
                    to_engine_id=move.to_engine,
                    hold_s=move.hold_s,
                    method=_METHOD_TO_PB[move.method],
                    predicted_s=move.predicted_s,
                    other_s=move.other_s,
                )
                for move in moves
            )
        case PauseEngine(engine, mode):
            message.pause_engine.CopyFrom(agent_pb2.PauseEngine(engine_id=engine, mode=mode))
        case ResumeEngine(engine):
            message.resume_engine.CopyFrom(agent_pb2.ResumeEngine(engine_id=engine))
        case AbortRequests(engine, requests):
            message.abort_requests.CopyFrom(agent_pb2.AbortRequests(engine_id=engine, request_ids=requests))
        case ProbeEngine(engine):
            message.probe_engine.CopyFrom(agent_pb2.ProbeEngine(engine_id=engine))
    return message


def operation_from_pb(message: agent_pb2.Operation) -> Operation:
    return Operation(
        id=OperationId(_required("operation_id", message.operation_id)),
        generation=message.generation,
        valid_until_s=message.valid_until_unix_s,
        action=_action_from_pb(message),
    )


def _action_from_pb(message: agent_pb2.Operation) -> Action:
    match message.WhichOneof("action"):
        case "set_routes":
            return SetRoutes(tuple(route_from_pb(route) for route in message.set_routes.routes))
        case "move_requests":
            return MoveRequests(tuple(_move_from_pb(move) for move in message.move_requests.moves))
        case "pause_engine":
            return PauseEngine(EngineId(message.pause_engine.engine_id), PauseMode(message.pause_engine.mode))
        case "resume_engine":
            return ResumeEngine(EngineId(message.resume_engine.engine_id))
        case "abort_requests":
            ids = tuple(RequestId(request) for request in message.abort_requests.request_ids)
            return AbortRequests(EngineId(message.abort_requests.engine_id), ids)
        case "probe_engine":
            return ProbeEngine(EngineId(message.probe_engine.engine_id))
        case _:
            raise ValueError("action must be one that this version knows")


def _move_from_pb(move: agent_pb2.RequestMove) -> RequestMove:
    return RequestMove(
        RequestId(_required("request_id", move.request_id)),
        EngineId(_required("from_engine_id", move.from_engine_id)),
        EngineId(_required("to_engine_id", move.to_engine_id)),
        move.hold_s,
        _METHOD_FROM_PB.get(move.method, MoveMethod.RECOMPUTE),
        move.predicted_s,
        move.other_s,
    )


def result_to_pb(result: OperationResult) -> agent_pb2.OperationResult:
    return agent_pb2.OperationResult(
        operation_id=result.operation,
        node_id=result.node,
        status=_STATUS_TO_PB[result.status],
        detail=result.detail,
        duration_s=result.duration_s,
        items=[
            agent_pb2.ItemResult(
                id=item.id,
                done=item.done,
                detail=item.detail,
                recomputed_tokens=item.recomputed_tokens,
                duration_s=item.duration_s,
                method=agent_pb2.MOVE_METHOD_UNSPECIFIED if item.method is None else _METHOD_TO_PB[item.method],
                loaded_tokens=item.loaded_tokens,
                predicted_s=item.predicted_s,
            )
            for item in result.items
        ],
    )


def result_from_pb(message: agent_pb2.OperationResult) -> OperationResult:
    return OperationResult(
        operation=OperationId(_required("operation_id", message.operation_id)),
        node=NodeId(message.node_id),
        status=_STATUS_FROM_PB.get(message.status, OperationStatus.UNKNOWN),
        detail=message.detail,
        duration_s=message.duration_s,
        items=tuple(
            ItemResult(
                id=item.id,
                done=item.done,
                detail=item.detail,
                recomputed_tokens=item.recomputed_tokens,
                duration_s=item.duration_s,
                method=_METHOD_FROM_PB.get(item.method),
                loaded_tokens=item.loaded_tokens,
                predicted_s=item.predicted_s,
            )
            for item in message.items
        ),
    )
