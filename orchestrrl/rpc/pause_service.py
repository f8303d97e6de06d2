"""The Control service's calls about the pause barrier, policy versions and cancelling: what trainers ask."""

import logging

from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.rpc.codecs import pause as pause_codec
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.rpc.refusals import Context, refusing
from planner.model import EngineId, RequestId

logger = logging.getLogger(__name__)


class PauseService:
    """Each method answers the call of its name."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._control_plane = control_plane

    async def pause(self, request: pb.PauseFleetRequest, context: Context) -> pb.PauseBarrier:
        async with refusing(context):
            await self._control_plane.barrier.pause(pause_codec.REQUEST.from_pb(request))
        return self.seen()

    async def renew(self, request: pb.RenewPauseRequest, context: Context) -> pb.PauseBarrier:
        async with refusing(context):
            await self._control_plane.barrier.renew(request.lease_id, request.lease_s)
        return self.seen()

    async def resume(self, request: pb.ResumeFleetRequest, context: Context) -> pb.PauseBarrier:
        version = request.policy_version if request.HasField("policy_version") else None
        without = [EngineId(engine) for engine in request.without_engine_ids]
        async with refusing(context):
            version, left_out = await self._waiting_weights(request.lease_id, version)
            await self._prepare(request.lease_id)
            there = {view.id for view in self._control_plane.state.engines(self._control_plane.clock.now_s())}
            lacking = {*left_out, *self._restarted(version)} & there  # some may have been removed meanwhile
            without += sorted(lacking.difference(without))
            await self._control_plane.barrier.resume(
                request.lease_id, version, without, request.reason, request.weights_source
            )
        return self.seen()

    async def _waiting_weights(self, lease_id: str, told: int | None) -> tuple[int | None, tuple[EngineId, ...]]:
        """Those that wait for a closed barrier are installed before it opens: their version, and who has not got it.
        Where another is told it is that one. Without a lease: of whoever holds the pause barrier."""
        lease, weights = self._control_plane.barrier.state.lease, self._control_plane.weights
        if weights is None or lease is None or lease_id not in ("", lease.id):
            return told, ()
        return await weights.before_resume(lease.until_s, told)

    def _restarted(self, version: int | None) -> list[EngineId]:
        """Of a version that we brought: who has lost it since."""
        weights = self._control_plane.weights
        if weights is None or version is None or weights.book.fleet.version != version:
            return []
        return weights.restarted()

    async def _prepare(self, lease_id: str) -> None:
        """Whoever resumes again, or too late, finds requests going on."""
        lease, prepare = self._control_plane.barrier.state.lease, self._control_plane.before_resume
        if (
            prepare is not None
            and lease is not None
            and lease_id in ("", lease.id)
            and (words := await prepare(lease.until_s))
        ):
            logger.info("before the pause barrier opens: %s", words)

    async def set_version(self, request: pb.SetPolicyVersionRequest, context: Context) -> pb.SetPolicyVersionResponse:
        engines = [EngineId(engine) for engine in request.engine_ids]
        async with refusing(context):
            newest = self._control_plane.barrier.set_version(
                engines, request.policy_version, request.reason, request.weights_source
            )
        return pb.SetPolicyVersionResponse(policy_version=newest)

    async def cancel(self, request: pb.CancelRequestsRequest, context: Context) -> pb.CancelRequestsResponse:
        async with refusing(context):
            cancelled = await self._control_plane.canceller.cancel(
                [RequestId(id) for id in request.request_ids], request.group_ids, request.reason
            )
        return pb.CancelRequestsResponse(cancelled_ids=cancelled.requests, silent_node_ids=cancelled.silent)

    def seen(self) -> pb.PauseBarrier:
        return pause_codec.barrier_to_pb(self._control_plane.barrier)
