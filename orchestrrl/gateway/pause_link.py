"""What a gateway is asked of the pause barrier, passed on to the daemon: it orders all gateways."""

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.message import Message

from orchestrrl.gateway.http.field_types import HttpRefusal
from orchestrrl.gateway.http.pause import CancelBody, PauseBody, RenewBody, RequestBody, ResumeBody, SetVersionBody
from orchestrrl.rpc.channel import CHANNEL_OPTIONS
from orchestrrl.rpc.codecs.node import FROZEN, PAUSE_MODE
from orchestrrl.rpc.pb import control_pb2, control_pb2_grpc
from orchestrrl.rpc.plain_values import plain

ANSWER_S = 30.0  # beyond what is waited for

_METHODS: Mapping[type[RequestBody | None], str] = {
    type(None): "GetPauseBarrier",
    PauseBody: "PauseFleet",
    RenewBody: "RenewPause",
    ResumeBody: "ResumeFleet",
    SetVersionBody: "SetPolicyVersion",
    CancelBody: "CancelRequests",
}
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
        """The daemon's answer, as plain values. Raises HttpRefusal."""
        name, message, patience_s = _call(body)
        try:
            async with grpc.aio.insecure_channel(self._target, options=CHANNEL_OPTIONS) as channel:
                method = getattr(control_pb2_grpc.ControlStub(channel), name)
                return plain(await method(message, timeout=patience_s))
        except grpc.aio.AioRpcError as error:
            status = _STATUSES.get(error.code(), 503)
            where = "" if error.code() in _STATUSES else "the daemon, which orders all gateways, cannot be asked: "
            raise HttpRefusal(f"{where}{error.details()}", status=status) from error


def _call(body: RequestBody | None) -> tuple[str, Message, float]:
    """Method, request, and how long to wait for the answer."""
    name = _METHODS[type(body)]
    fields = {} if body is None else body.model_dump(exclude_none=True)
    patience_s = ANSWER_S
    if isinstance(body, PauseBody):
        fields |= {
            "mode": PAUSE_MODE.to_pb(body.mode),
            "frozen": FROZEN.to_pb(body.frozen),
            "deadline_s": body.within_s,
        }
        patience_s += body.within_s
    return name, getattr(control_pb2, f"{name}Request")(**fields), patience_s
