"""Convert nodes, their orders and the results of orders to messages and back."""

from orchestrrl.core.nodes import NodeHello
from orchestrrl.core.operations import (
    CancelRequests,
    CloseBarrier,
    FrozenRequests,
    MoveRequests,
    OpenBarrier,
    Operation,
    OperationItemResult,
    OperationResult,
    OperationStatus,
    PauseMode,
    SetRoutes,
)
from orchestrrl.rpc.codec import LOCAL, Codec, EnumCodec, OneOf
from orchestrrl.rpc.codecs.telemetry import GATEWAY_ENGINE, OUTSIDE
from orchestrrl.rpc.pb import agent_pb2 as pb
from planner.model import MoveMethod, RequestMove

PAUSE_MODE = EnumCodec(PauseMode, pb.PauseMode.DESCRIPTOR, unspecified=PauseMode.KEEP)
FROZEN = EnumCodec(FrozenRequests, pb.FrozenRequests.DESCRIPTOR, unspecified=FrozenRequests.RECOMPUTE)
_METHOD = EnumCodec(MoveMethod, pb.MoveMethod.DESCRIPTOR, unspecified=MoveMethod.RECOMPUTE)
_STATUS = EnumCodec(OperationStatus, pb.OperationStatus.DESCRIPTOR, unspecified=OperationStatus.UNKNOWN)

HELLO = Codec(NodeHello, pb.NodeHello, engines="engine_ids", addresses=("engines", GATEWAY_ENGINE))
OPERATION = Codec(
    Operation,
    pb.Operation,
    id="operation_id",
    action=OneOf(
        "action",
        set_routes=Codec(SetRoutes, pb.SetRoutes, expected="expected_engine_ids"),
        move_requests=Codec(
            MoveRequests,
            pb.MoveRequests,
            moves=Codec(RequestMove, pb.RequestMove, method=_METHOD, fixed_s=LOCAL, state=LOCAL),
        ),
        close_barrier=Codec(CloseBarrier, pb.CloseBarrier, mode=PAUSE_MODE, frozen=FROZEN),
        open_barrier=Codec(OpenBarrier, pb.OpenBarrier, without="without_engine_ids"),
        cancel_requests=Codec(CancelRequests, pb.CancelRequests),
    ),
)
RESULT = Codec(
    OperationResult,
    pb.OperationResult,
    status=_STATUS,
    detail=OUTSIDE,
    items=Codec(OperationItemResult, pb.ItemResult, detail=OUTSIDE),
)
