"""Convert reports of weight syncs to messages and back. Reading a state or phase that only a newer daemon defines
raises ValueError."""

from dataclasses import replace

from orchestrrl.rpc.codec import Codec
from orchestrrl.rpc.pb import weights_pb2 as pb
from orchestrrl.weights.controller.reports import EdgeTime, PeerStatus, SyncReport, WeightsStatus

SYNC = Codec(
    SyncReport,
    pb.SyncReport,
    id="sync_id",
    published="published_ranks",
    slowest=Codec(EdgeTime, pb.SyncEdge, src="src_peer_id", dst="dst_peer_id"),
)
STATUS = Codec(
    WeightsStatus,
    pb.WeightsStatus,
    committed="committed_version",
    sync=SYNC,
    peers=Codec(PeerStatus, pb.WeightsPeer, id="peer_id", ranks_of="ranks_of_engine_ids"),
)


def report_to_pb(report: SyncReport, *, edges: bool = True) -> pb.SyncReport:
    """Convert the report of a sync. If `edges` is False, omit the slowest edges, which a list of many syncs does not
    need."""
    return SYNC.to_pb(report if edges else replace(report, slowest=()))
