"""What a gateway is asked of the pause barrier, passed on to the daemon: it orders all gateways."""

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.message import Message

from orchestrrl.gateway.http.pause import (
    CancelBody,
    PauseBody,
    PauseRefusal,
    RenewBody,
    RequestBody,
    ResumeBody,
    SetVersionBody,
)
from orchestrrl.rpc.channel import CHANNEL_OPTIONS
from orchestrrl.rpc.codecs.node import FROZEN, PAUSE_MODE
from orchestrrl.rpc.pb import control_pb2, control_pb2_grpc
from orchestrrl.rpc.plain_values import plain

ANSWER_S = 30.0  # beyond what is waited for

_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


class DaemonPause:
    """The pause barrier of all gateways, at the daemon `target`."""

    def __init__(self, target: str) -> None:
        self._target = target

    async def __call__(self, body: RequestBody | None) -> Mapping[str, Any]:
        """The daemon's answer, as plain values. Raises Refusal."""
        name, message, patience_s = _call(body)
        try:
            async with grpc.aio.insecure_channel(self._target, options=CHANNEL_OPTIONS) as channel:
                method = getattr(control_pb2_grpc.ControlStub(channel), name)
                return plain(await method(message, timeout=patience_s))
        except grpc.aio.AioRpcError as error:
            status = _STATUSES.get(error.code(), 503)
            where = "" if error.code() in _STATUSES else "the daemon, which orders all gateways, cannot be asked: "
            raise PauseRefusal(status, f"{where}{error.details()}") from error


def _call(body: RequestBody | None) -> tuple[str, Message, float]:
    """Method, request, and how long to wait for the answer."""
    match body:
        case None:
            return "GetPauseBarrier", control_pb2.GetPauseBarrierRequest(), ANSWER_S
        case PauseBody():
            pause = control_pb2.PauseFleetRequest(
                mode=PAUSE_MODE.to_pb(body.mode),
                frozen=FROZEN.to_pb(body.frozen),
                holder=body.holder,
                lease_s=body.lease_s,
                deadline_s=body.within_s,
            )
            return "PauseFleet", pause, body.within_s + ANSWER_S
        case RenewBody():
            return "RenewPause", control_pb2.RenewPauseRequest(lease_id=body.lease_id, lease_s=body.lease_s), ANSWER_S
        case ResumeBody():
            resume = control_pb2.ResumeFleetRequest(
                lease_id=body.lease_id,
                policy_version=body.policy_version,
                weights_source=body.weights_source,
                without_engine_ids=body.without_engines,
                reason=body.reason,
            )
            return "ResumeFleet", resume, ANSWER_S
        case SetVersionBody():
            told = control_pb2.SetPolicyVersionRequest(
                engine_ids=body.engines,
                policy_version=body.policy_version,
                reason=body.reason,
                weights_source=body.weights_source,
            )
            return "SetPolicyVersion", told, ANSWER_S
        case CancelBody():
            cancel = control_pb2.CancelRequestsRequest(
                request_ids=body.requests, group_ids=body.groups, reason=body.reason
            )
            return "CancelRequests", cancel, ANSWER_S
        case other:
            raise TypeError(f"no call is known for {other!r}")
