"""Between what is told of weight syncs and the service Weights' messages, both ways."""

from orchestrrl.rpc.pb import weights_pb2 as pb
from orchestrrl.weights.controller.reports import (
    EdgeTime,
    EngineStatus,
    EngineSync,
    PeerStatus,
    PhaseTime,
    SyncPhase,
    SyncReport,
    SyncState,
    WeightsStatus,
)
from planner.model import EngineId


def report_to_pb(report: SyncReport, *, edges: bool = True) -> pb.SyncReport:
    """`edges` False: without the slowest ones, where many syncs are listed."""
    return pb.SyncReport(
        sync_id=report.id,
        version=report.version,
        state=report.state,
        began_unix_s=report.began_s,
        ended_unix_s=report.ended_s,
        code=report.code,
        detail=report.detail,
        backend=report.backend,
        attempt=report.attempt,
        world=report.world,
        published_ranks=report.published,
        phases=[
            pb.SyncPhase(phase=took.phase, began_unix_s=took.began_s, ended_unix_s=took.ended_s)
            for took in report.phases
        ],
        engines=map(_engine_to_pb, report.engines),
        bytes=report.bytes,
        carried_bytes=report.carried_bytes,
        arrived_bytes=report.arrived_bytes,
        estimate_s=report.estimate_s,
        lower_bound_s=report.lower_bound_s,
        naive_s=report.naive_s,
        waves=report.waves,
        edges=report.edges,
        mended_edges=report.mended_edges,
        slowest=map(_edge_to_pb, report.slowest if edges else ()),
        notes=report.notes,
        trainer_step_json=report.trainer_step_json,
    )


def report_from_pb(message: pb.SyncReport) -> SyncReport:
    """Raises ValueError for a state or phase of a newer daemon."""
    return SyncReport(
        id=message.sync_id,
        version=message.version,
        state=SyncState(message.state),
        began_s=message.began_unix_s,
        code=message.code,
        detail=message.detail,
        ended_s=message.ended_unix_s if message.HasField("ended_unix_s") else None,
        backend=message.backend,
        attempt=message.attempt,
        world=message.world,
        published=tuple(message.published_ranks),
        phases=tuple(map(_phase_from_pb, message.phases)),
        engines=tuple(map(_engine_from_pb, message.engines)),
        bytes=message.bytes,
        carried_bytes=message.carried_bytes,
        arrived_bytes=message.arrived_bytes,
        estimate_s=message.estimate_s,
        lower_bound_s=message.lower_bound_s,
        naive_s=message.naive_s,
        waves=message.waves,
        edges=message.edges,
        mended_edges=message.mended_edges,
        slowest=tuple(map(_edge_from_pb, message.slowest)),
        notes=tuple(message.notes),
        trainer_step_json=message.trainer_step_json,
    )


def status_to_pb(status: WeightsStatus) -> pb.WeightsStatus:
    return pb.WeightsStatus(
        committed_version=status.committed,
        sync=None if status.sync is None else report_to_pb(status.sync),
        quarantined=map(_engine_to_pb, status.quarantined),
        peers=map(_peer_to_pb, status.peers),
    )


def status_from_pb(message: pb.WeightsStatus) -> WeightsStatus:
    """Raises ValueError as `report_from_pb` does."""
    return WeightsStatus(
        committed=message.committed_version if message.HasField("committed_version") else None,
        sync=report_from_pb(message.sync) if message.HasField("sync") else None,
        quarantined=tuple(map(_engine_from_pb, message.quarantined)),
        peers=tuple(map(_peer_from_pb, message.peers)),
    )


def _phase_from_pb(message: pb.SyncPhase) -> PhaseTime:
    ended_s = message.ended_unix_s if message.HasField("ended_unix_s") else None
    return PhaseTime(SyncPhase(message.phase), message.began_unix_s, ended_s)


def _engine_to_pb(engine: EngineStatus) -> pb.EngineSync:
    return pb.EngineSync(engine_id=engine.engine, state=engine.state, detail=engine.detail, install_s=engine.install_s)


def _engine_from_pb(message: pb.EngineSync) -> EngineStatus:
    return EngineStatus(EngineId(message.engine_id), EngineSync(message.state), message.detail, message.install_s)


def _edge_to_pb(edge: EdgeTime) -> pb.SyncEdge:
    return pb.SyncEdge(
        src_peer_id=edge.src,
        dst_peer_id=edge.dst,
        phase=edge.phase,
        bytes=edge.bytes,
        seconds=edge.seconds,
        planned_s=edge.planned_s,
    )


def _edge_from_pb(message: pb.SyncEdge) -> EdgeTime:
    return EdgeTime(
        message.src_peer_id, message.dst_peer_id, message.phase, message.bytes, message.seconds, message.planned_s
    )


def _peer_to_pb(peer: PeerStatus) -> pb.WeightsPeer:
    return pb.WeightsPeer(
        peer_id=peer.id,
        role=peer.role,
        host=peer.host,
        attached=peer.attached,
        engine_ids=peer.engines,
        versions=peer.versions,
        pod=peer.pod,
        tor=peer.tor,
        ranks_of_engine_ids=peer.ranks_of,
    )


def _peer_from_pb(message: pb.WeightsPeer) -> PeerStatus:
    return PeerStatus(
        message.peer_id,
        message.role,
        message.host,
        message.attached,
        tuple(EngineId(each) for each in message.engine_ids),
        tuple(message.versions),
        message.pod,
        message.tor,
        tuple(EngineId(each) for each in message.ranks_of_engine_ids),
    )
