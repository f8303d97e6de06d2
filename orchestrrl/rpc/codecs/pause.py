"""How the daemon's pause barrier is written as messages of the Control service."""

from orchestrrl.fleet.pause_barrier import EngineAtRest, PauseBarrier, PauseRequest
from orchestrrl.rpc.codec import LOCAL, Codec
from orchestrrl.rpc.codecs.node import FROZEN, PAUSE_MODE
from orchestrrl.rpc.codecs.telemetry import BARRIER
from orchestrrl.rpc.pb import control_pb2 as pb

REQUEST = Codec(PauseRequest, pb.PauseFleetRequest, mode=PAUSE_MODE, frozen=FROZEN, weights_change=LOCAL)
AT_REST = Codec(EngineAtRest, pb.EngineAtRest)


def barrier_to_pb(keeper: PauseBarrier) -> pb.PauseBarrier:
    """As it stands now. A lease's own fields are there while it lasts."""
    state, lease = keeper.state, keeper.state.lease
    barrier = pb.PauseBarrier(
        phase=state.phase,
        policy_version=state.newest,
        weights_source=state.newest_source,
        gateways=[
            pb.GatewayAtBarrier(node_id=node, report=BARRIER.to_pb(report) if report else None)
            for node, report in keeper.gateways().items()
        ],
        engines=map(AT_REST.to_pb, keeper.rests()),
        detail=state.opened.detail if state.opened else "",
    )
    if lease is not None:
        barrier.lease_id = lease.id
        barrier.holder = lease.holder
        barrier.mode = PAUSE_MODE.to_pb(lease.mode)
        barrier.frozen = FROZEN.to_pb(lease.frozen)
        barrier.lease_until_unix_s = lease.until_s
    return barrier
