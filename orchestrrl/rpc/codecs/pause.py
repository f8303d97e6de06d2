"""Between the daemon's barrier and the Control service's messages."""

from orchestrrl.fleet.pause_barrier import PauseBarrier, PauseRequest
from orchestrrl.rpc.codecs.node import barrier_mode_from_pb, barrier_mode_to_pb, frozen_from_pb, frozen_to_pb
from orchestrrl.rpc.codecs.telemetry import barrier_to_pb as report_to_pb
from orchestrrl.rpc.pb import control_pb2 as pb


def pause_request_from_pb(message: pb.PauseFleetRequest) -> PauseRequest:
    return PauseRequest(
        mode=barrier_mode_from_pb(message.mode),
        frozen=frozen_from_pb(message.frozen),
        holder=message.holder,
        lease_s=message.lease_s,
        deadline_s=message.deadline_s,
    )


def barrier_to_pb(keeper: PauseBarrier) -> pb.PauseBarrier:
    """As it stands now. A lease's own fields are there while it lasts."""
    state, lease = keeper.state, keeper.state.lease
    barrier = pb.PauseBarrier(
        phase=state.phase,
        policy_version=state.newest,
        weights_source=state.newest_source,
        gateways=[
            pb.GatewayAtBarrier(node_id=node, report=report_to_pb(report) if report else None)
            for node, report in keeper.gateways().items()
        ],
        engines=[
            pb.EngineAtRest(
                engine_id=rest.engine, done=rest.done, detail=rest.detail, policy_version=rest.policy_version
            )
            for rest in keeper.rests()
        ],
        detail=state.opened.detail if state.opened else "",
    )
    if lease is not None:
        barrier.lease_id = lease.id
        barrier.holder = lease.holder
        barrier.mode = barrier_mode_to_pb(lease.mode)
        barrier.frozen = frozen_to_pb(lease.frozen)
        barrier.lease_until_unix_s = lease.until_s
    return barrier
