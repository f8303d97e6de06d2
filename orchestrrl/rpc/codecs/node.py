"""Between protobuf and the model, both ways: nodes, what they are ordered to do, and what came of it."""

from orchestrrl.core.nodes import NodeHello, NodeKind
from orchestrrl.core.operations import (
    AbortRequests,
    Action,
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
from orchestrrl.rpc.codecs.telemetry import (
    gateway_engine_from_pb,
    gateway_engine_to_pb,
    health_from_pb,
    health_to_pb,
    outside_text,
    required,
)
from orchestrrl.rpc.pb import agent_pb2, telemetry_pb2
from planner.model import EngineId, NodeId, RequestId

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

_PAUSE_MODE_TO_PB = {
    PauseMode.KEEP: agent_pb2.PAUSE_MODE_KEEP,
    PauseMode.WAIT: agent_pb2.PAUSE_MODE_WAIT,
    PauseMode.ABORT: agent_pb2.PAUSE_MODE_ABORT,
}
_PAUSE_MODE_FROM_PB = {pb: mode for mode, pb in _PAUSE_MODE_TO_PB.items()}

_FROZEN_TO_PB = {
    FrozenRequests.RECOMPUTE: agent_pb2.FROZEN_REQUESTS_RECOMPUTE,
    FrozenRequests.CONTINUE: agent_pb2.FROZEN_REQUESTS_CONTINUE,
    FrozenRequests.RESTART: agent_pb2.FROZEN_REQUESTS_RESTART,
    FrozenRequests.TAKEN_BACK: agent_pb2.FROZEN_REQUESTS_TAKEN_BACK,
}
_FROZEN_FROM_PB = {pb: frozen for frozen, pb in _FROZEN_TO_PB.items()}


def barrier_mode_to_pb(mode: PauseMode) -> agent_pb2.PauseMode.ValueType:
    return _PAUSE_MODE_TO_PB[mode]


def barrier_mode_from_pb(mode: agent_pb2.PauseMode.ValueType) -> PauseMode:
    return _PAUSE_MODE_FROM_PB.get(mode, PauseMode.KEEP)


def frozen_to_pb(frozen: FrozenRequests) -> agent_pb2.FrozenRequests.ValueType:
    return _FROZEN_TO_PB[frozen]


def frozen_from_pb(frozen: agent_pb2.FrozenRequests.ValueType) -> FrozenRequests:
    return _FROZEN_FROM_PB.get(frozen, FrozenRequests.RECOMPUTE)


def hello_to_pb(hello: NodeHello) -> agent_pb2.NodeHello:
    return agent_pb2.NodeHello(
        node_id=hello.node,
        kind=_KIND_TO_PB[hello.kind],
        engine_ids=hello.engines,
        version=hello.version,
        url=hello.url,
        incarnation=hello.incarnation,
        engines=map(gateway_engine_to_pb, hello.addresses),
        host_id=hello.host,
    )


def hello_from_pb(message: agent_pb2.NodeHello) -> NodeHello:
    if message.kind not in _KIND_FROM_PB:
        raise ValueError(f"kind must be specified, got {message.kind}")
    return NodeHello(
        node=NodeId(required("node_id", message.node_id)),
        kind=_KIND_FROM_PB[message.kind],
        engines=tuple(EngineId(engine) for engine in message.engine_ids),
        version=message.version,
        url=message.url,
        incarnation=message.incarnation,
        addresses=tuple(map(gateway_engine_from_pb, message.engines)),
        host=message.host_id,
    )


def route_to_pb(route: EngineRoute) -> agent_pb2.Route:
    return agent_pb2.Route(
        engine_id=route.engine,
        url=route.url,
        health=telemetry_pb2.ENGINE_HEALTH_UNSPECIFIED if route.health is None else health_to_pb(route.health),
        load_index=route.load_index,
        kv_capacity_tokens=route.kv_capacity_tokens,
        kv_free_tokens=route.kv_free_tokens,
        max_sequences=route.max_sequences,
        draining=route.draining,
        kv_version=route.kv_version,
        pool=route.pool,
        policy_version=route.policy_version,
        waiting=route.waiting,
        newest_policy_version=route.newest_policy_version,
    )


def route_from_pb(message: agent_pb2.Route) -> EngineRoute:
    return EngineRoute(
        engine=EngineId(required("engine_id", message.engine_id)),
        url=message.url,
        health=health_from_pb(message.health),
        load_index=message.load_index if message.HasField("load_index") else None,
        kv_capacity_tokens=message.kv_capacity_tokens,
        kv_free_tokens=message.kv_free_tokens,
        max_sequences=message.max_sequences,
        draining=message.draining,
        kv_version=message.kv_version,
        pool=message.pool,
        policy_version=message.policy_version if message.HasField("policy_version") else None,
        waiting=message.waiting if message.HasField("waiting") else None,
        newest_policy_version=message.newest_policy_version if message.HasField("newest_policy_version") else None,
    )


def operation_to_pb(operation: Operation) -> agent_pb2.Operation:
    message = agent_pb2.Operation(
        operation_id=operation.id, generation=operation.generation, valid_until_unix_s=operation.valid_until_s
    )
    match operation.action:
        case SetRoutes(routes, expected, expected_until_s):
            message.set_routes.SetInParent()
            message.set_routes.routes.extend(route_to_pb(route) for route in routes)
            message.set_routes.expected_engine_ids.extend(expected)
            if expected_until_s:
                message.set_routes.expected_until_unix_s = expected_until_s
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
        case CloseBarrier(lease, holder, barrier_mode, frozen, lease_until_s, quiet_by_s, engines_run, weights_change):
            message.close_barrier.CopyFrom(
                agent_pb2.CloseBarrier(
                    lease_id=lease,
                    holder=holder,
                    mode=barrier_mode_to_pb(barrier_mode),
                    frozen=frozen_to_pb(frozen),
                    lease_until_unix_s=lease_until_s,
                    quiet_by_unix_s=quiet_by_s,
                    engines_run=engines_run,
                    weights_change=weights_change,
                )
            )
        case OpenBarrier(lease, policy_version, without):
            message.open_barrier.CopyFrom(
                agent_pb2.OpenBarrier(lease_id=lease, policy_version=policy_version, without_engine_ids=without)
            )
        case CancelRequests(requests, groups, reason):
            message.cancel_requests.CopyFrom(
                agent_pb2.CancelRequests(request_ids=requests, group_ids=groups, reason=reason)
            )
    return message


def operation_from_pb(message: agent_pb2.Operation) -> Operation:
    return Operation(
        id=OperationId(required("operation_id", message.operation_id)),
        generation=message.generation,
        valid_until_s=message.valid_until_unix_s,
        action=_action_from_pb(message),
    )


def _action_from_pb(message: agent_pb2.Operation) -> Action:
    match message.WhichOneof("action"):
        case "set_routes":
            return SetRoutes(
                tuple(route_from_pb(route) for route in message.set_routes.routes),
                tuple(EngineId(engine) for engine in message.set_routes.expected_engine_ids),
                message.set_routes.expected_until_unix_s,
            )
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
        case "close_barrier":
            close = message.close_barrier
            return CloseBarrier(
                required("lease_id", close.lease_id),
                close.holder,
                barrier_mode_from_pb(close.mode),
                frozen_from_pb(close.frozen),
                close.lease_until_unix_s,
                close.quiet_by_unix_s,
                close.engines_run,
                close.weights_change,
            )
        case "open_barrier":
            opened = message.open_barrier
            return OpenBarrier(
                required("lease_id", opened.lease_id),
                opened.policy_version if opened.HasField("policy_version") else None,
                tuple(EngineId(engine) for engine in opened.without_engine_ids),
            )
        case "cancel_requests":
            cancel = message.cancel_requests
            named = tuple(RequestId(request) for request in cancel.request_ids)
            return CancelRequests(named, tuple(cancel.group_ids), cancel.reason)
        case _:
            raise ValueError("action must be one that this version knows")


def _move_from_pb(move: agent_pb2.RequestMove) -> RequestMove:
    return RequestMove(
        RequestId(required("request_id", move.request_id)),
        EngineId(move.from_engine_id),  # none: the gateway holds it
        EngineId(required("to_engine_id", move.to_engine_id)),
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
        detail=outside_text(result.detail),
        duration_s=result.duration_s,
        items=[
            agent_pb2.ItemResult(
                id=item.id,
                done=item.done,
                detail=outside_text(item.detail),
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
        operation=OperationId(required("operation_id", message.operation_id)),
        node=NodeId(message.node_id),
        status=_STATUS_FROM_PB.get(message.status, OperationStatus.UNKNOWN),
        detail=message.detail,
        duration_s=message.duration_s,
        items=tuple(
            OperationItemResult(
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
