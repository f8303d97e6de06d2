"""The Control service's calls about the pause barrier, policy versions and cancelling: what trainers ask."""

import logging

from orchestrrl.daemon.wiring import Daemon
from orchestrrl.rpc.codec import optional
from orchestrrl.rpc.codecs import pause as pause_codec
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.rpc.pb import control_pb2_grpc
from orchestrrl.rpc.refusals import Context
from planner.model import EngineId, RequestId

logger = logging.getLogger(__name__)


class PauseService(control_pb2_grpc.ControlServicer):
    """The part of the Control service that pauses and resumes the fleet."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.control_plane, self.fleet = daemon.control_plane, daemon.fleet
        self.plans, self.journal, self.clock = daemon.fleet.plans, daemon.fleet.journal, daemon.fleet.clock
        self.now_s = self.clock.now_s

    async def PauseFleet(self, request: pb.PauseFleetRequest, context: Context) -> pb.PauseBarrier:
        await self.fleet.barrier.pause(pause_codec.REQUEST.from_pb(request))
        return self._barrier()

    async def RenewPause(self, request: pb.RenewPauseRequest, context: Context) -> pb.PauseBarrier:
        await self.fleet.barrier.renew(request.lease_id, request.lease_s)
        return self._barrier()

    async def ResumeFleet(self, request: pb.ResumeFleetRequest, context: Context) -> pb.PauseBarrier:
        version = optional(request, "policy_version")
        without = [EngineId(engine) for engine in request.without_engine_ids]
        version, left_out = await self._waiting_weights(request.lease_id, version)
        await self._prepare(request.lease_id)
        there = {view.id for view in self.fleet.state.engines(self.now_s())}
        lacking = {*left_out, *self._restarted(version)} & there  # some may have been removed meanwhile
        without += sorted(lacking.difference(without))
        await self.fleet.barrier.resume(request.lease_id, version, without, request.reason, request.weights_source)
        return self._barrier()

    async def _waiting_weights(self, lease_id: str, told: int | None) -> tuple[int | None, tuple[EngineId, ...]]:
        """Those that wait for a closed barrier are installed before it opens: their version, and who has not got it.
        Where another is told it is that one. Without a lease: of whoever holds the pause barrier."""
        lease, weights = self.fleet.barrier.state.lease, self.daemon.weights.syncs
        if lease is None or lease_id not in ("", lease.id):
            return told, ()
        return await weights.before_resume(lease.until_s, told)

    def _restarted(self, version: int | None) -> list[EngineId]:
        """Of a version that we brought: who has lost it since."""
        weights = self.daemon.weights.syncs
        if version is None or weights.book.fleet.version != version:
            return []
        return weights.restarted()

    async def _prepare(self, lease_id: str) -> None:
        """Whoever resumes again, or too late, finds requests going on."""
        lease, prepare = self.fleet.barrier.state.lease, self.daemon.before_resume
        if (
            prepare is not None
            and lease is not None
            and lease_id in ("", lease.id)
            and (words := await prepare(lease.until_s))
        ):
            logger.info("before the pause barrier opens: %s", words)

    async def SetPolicyVersion(
        self, request: pb.SetPolicyVersionRequest, context: Context
    ) -> pb.SetPolicyVersionResponse:
        engines = [EngineId(engine) for engine in request.engine_ids]
        newest = self.fleet.barrier.set_version(engines, request.policy_version, request.reason, request.weights_source)
        return pb.SetPolicyVersionResponse(policy_version=newest)

    async def CancelRequests(self, request: pb.CancelRequestsRequest, context: Context) -> pb.CancelRequestsResponse:
        cancelled = await self.fleet.canceller.cancel(
            [RequestId(id) for id in request.request_ids], request.group_ids, request.reason
        )
        return pb.CancelRequestsResponse(cancelled_ids=cancelled.requests, silent_node_ids=cancelled.silent)

    async def GetPauseBarrier(self, request: pb.GetPauseBarrierRequest, context: Context) -> pb.PauseBarrier:
        return self._barrier()

    def _barrier(self) -> pb.PauseBarrier:
        return pause_codec.barrier_to_pb(self.fleet.barrier)
