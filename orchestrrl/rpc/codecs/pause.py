"""Between the daemon's gate and the Control service's messages."""

from orchestrrl.fleet.pause_barrier import PauseBarrier, PauseRequest
from orchestrrl.rpc.codecs.node import frozen_from_pb, frozen_to_pb, gate_mode_from_pb, gate_mode_to_pb
from orchestrrl.rpc.codecs.telemetry import gate_to_pb as report_to_pb
from orchestrrl.rpc.pb import control_pb2 as pb


def wish_from_pb(message: pb.PauseGateRequest) -> PauseRequest:
    return PauseRequest(
        mode=gate_mode_from_pb(message.mode),
        frozen=frozen_from_pb(message.frozen),
        holder=message.holder,
        lease_s=message.lease_s,
        deadline_s=message.deadline_s,
    )


def gate_to_pb(keeper: PauseBarrier) -> pb.Gate:
    """As it stands now. A lease's own fields are there while it lasts."""
    state, lease = keeper.state, keeper.state.lease
    gate = pb.Gate(
        phase=state.phase,
        policy_version=state.newest,
        weights_source=state.newest_source,
        gateways=[
            pb.GatewayGate(node_id=node, report=report_to_pb(report) if report else None)
            for node, report in keeper.gateways().items()
        ],
        engines=[
            pb.EngineRest(engine_id=rest.engine, done=rest.done, detail=rest.detail, policy_version=rest.policy_version)
            for rest in keeper.rests()
        ],
        detail=state.opened.detail if state.opened else "",
    )
    if lease is not None:
        gate.lease_id = lease.id
        gate.holder = lease.holder
        gate.mode = gate_mode_to_pb(lease.mode)
        gate.frozen = frozen_to_pb(lease.frozen)
        gate.lease_until_unix_s = lease.until_s
    return gate
