"""The Control service for operators and trainers. This module only translates messages. The control plane carries out
the requests."""

import logging
from collections.abc import AsyncIterator

import grpc

from orchestrrl import __version__
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.operation import OperationState
from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.core.ttl import lifetime_faults
from orchestrrl.daemon.wiring import Daemon
from orchestrrl.fleet.redeployment.book import read_history
from orchestrrl.fleet.redeployment.controller import RedeploymentController
from orchestrrl.fleet.redeployment.steps import RedeploymentReport
from orchestrrl.fleet.state import EngineFacts
from orchestrrl.rpc.codec import optional
from orchestrrl.rpc.codecs import control as control_codec
from orchestrrl.rpc.codecs import telemetry as telemetry_codec
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.rpc.pb import control_pb2_grpc
from orchestrrl.rpc.refusals import Context, status_text
from planner.model import ConfigurationId, EngineId, GpuId, PlanId, RequestId

logger = logging.getLogger(__name__)

# Minimum interval between reports of a redeployment. The report of a large fleet has thousands of steps.
TOLD_EVERY_S = 0.1
NO_DEPLOYER = (
    "no deployer is configured: set fleet.deployer in the daemon's configuration, and how engines are started in "
    "fleet.launch"
)


class ControlService(control_pb2_grpc.ControlServicer):
    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.control_plane, self.fleet = daemon.control_plane, daemon.fleet
        self.plans, self.journal, self.clock = daemon.fleet.plans, daemon.fleet.journal, daemon.fleet.clock
        self.now_s = self.clock.now_s

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.Status:
        return control_codec.status_to_pb(self.daemon, __version__)

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersResponse:
        snapshot = self.fleet.state.snapshot(self.now_s())
        return pb.ListWorkersResponse(workers=control_codec.workers_to_pb(self.control_plane, snapshot))

    def _engine(self, name: str) -> EngineId:
        """Return the id of the engine with this name. The name may be the fleet's name for the engine or a name that
        only nodes use."""
        return self.fleet.state.engine_called(EngineId(name), self.now_s())

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:
        requests = self.fleet.state.snapshot(self.now_s()).requests
        engine = self._engine(request.engine_id)
        found = [view for view in requests if not engine or view.engine == engine]
        listed = found[: request.limit] if request.limit else found
        return pb.ListRequestsResponse(
            requests=[telemetry_codec.REQUEST.to_pb(view) for view in listed], total=len(found)
        )

    async def GetPlan(self, request: pb.GetPlanRequest, context: Context) -> pb.Plan:
        if not request.plan_id and self.plans.latest is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no plan has been made yet")
        try:
            plan = self.plans.get(PlanId(request.plan_id)) if request.plan_id else self.plans.latest
        except Permanent as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, status_text(error))
        assert plan is not None
        return control_codec.PLAN.to_pb(plan)

    async def ListPlans(self, request: pb.ListPlansRequest, context: Context) -> pb.ListPlansResponse:
        plans = self.plans.newest(request.limit)
        return pb.ListPlansResponse(plans=[control_codec.PLAN.to_pb(plan) for plan in plans])

    async def WatchPlans(self, request: pb.WatchPlansRequest, context: Context) -> AsyncIterator[pb.PlanEvent]:
        async for event in self.plans.watch():
            yield control_codec.PLAN_EVENT.to_pb(event)

    async def OverridePlan(self, request: pb.OverridePlanRequest, context: Context) -> pb.PlanControl:
        known = [configuration.id for configuration in self.control_plane.config.fleet.configuration_values()]
        wanted = ConfigurationId(request.configuration)
        control = self.plans.override(wanted, known, request.reason, request.ttl_s)
        return control_codec.CONTROL.to_pb(control)

    async def PinPlan(self, request: pb.PinPlanRequest, context: Context) -> pb.PlanControl:
        return control_codec.CONTROL.to_pb(self.plans.pin(request.reason, request.ttl_s))

    async def ReleasePlan(self, request: pb.ReleasePlanRequest, context: Context) -> pb.PlanControl:
        return control_codec.CONTROL.to_pb(self.plans.release(request.reason))

    async def GetBalance(self, request: pb.GetBalanceRequest, context: Context) -> pb.Balance:
        if self.control_plane.balance is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the fast loop has not made a decision yet")
        return control_codec.balance_to_pb(self.control_plane.balance, self.fleet.latest_moves)

    async def SetMode(self, request: pb.SetModeRequest, context: Context) -> pb.SetModeResponse:
        mode = control_codec.MODE.from_pb(request.mode)
        previous = self.control_plane.mode.set(mode, request.reason)
        if request.reason:  # a reason implies that the operator has seen why the mode was set
            self.journal.confirm_damage(self.now_s(), request.reason)
        return pb.SetModeResponse(mode=control_codec.MODE.to_pb(mode), previous=control_codec.MODE.to_pb(previous))

    async def MoveRequest(self, request: pb.MoveRequestRequest, context: Context) -> pb.MoveRequestResponse:
        outcome = await self.fleet.move(RequestId(request.request_id), EngineId(request.to_engine_id))
        item = outcome.items[0]
        operation = outcome.operations[0].operation if outcome.operations else ""
        return pb.MoveRequestResponse(done=item.done, detail=item.detail, operation_id=operation)

    async def AddEngine(self, request: pb.AddEngineRequest, context: Context) -> pb.Worker:
        new = EngineFacts(
            EngineId(request.engine_id),
            request.url,
            ConfigurationId(request.configuration) if request.configuration else None,
            tuple(map(GpuId, request.gpus)),
            pool=request.pool,
        )
        self.fleet.membership_changes.add(new, request.reason)
        self.fleet.barrier.forget([EngineId(request.engine_id)], "was added")
        return control_codec.worker_to_pb(self.control_plane, EngineId(request.engine_id))

    async def DrainEngine(self, request: pb.DrainEngineRequest, context: Context) -> pb.Worker:
        engine = self._engine(request.engine_id)
        if request.undo and request.move_requests:
            raise ProblemFaults(["move_requests: must not be combined with undo, got both"])
        if request.undo:
            self.fleet.membership_changes.undrain(engine, request.reason)
        else:
            self.fleet.membership_changes.drain(engine, request.move_requests, request.reason)
        return control_codec.worker_to_pb(self.control_plane, engine)

    async def RemoveEngine(self, request: pb.RemoveEngineRequest, context: Context) -> pb.RemoveEngineResponse:
        engine = self._engine(request.engine_id)
        removal = await self.fleet.membership_changes.remove(engine, request.force, request.reason)
        self.fleet.barrier.forget([engine], "was removed")
        return pb.RemoveEngineResponse(
            engine_id=request.engine_id, requests_moved=removal.requests_moved, requests_left=removal.requests_left
        )

    async def SetPause(self, request: pb.SetPauseRequest, context: Context) -> pb.SetPauseResponse:
        pause_registry = self.control_plane.pause_registry
        faults = lifetime_faults(request.ttl_s, until="resumed") if request.paused else []
        if request.part not in list(PauseScope):
            faults = [f"part: must be one of {', '.join(PauseScope)}, got {request.part!r}", *faults]
        if faults:
            raise ProblemFaults(faults)
        changed = True
        if request.paused:
            pause_registry.pause(PauseScope(request.part), request.reason, request.ttl_s)
        else:
            changed = pause_registry.resume(PauseScope(request.part), request.reason)
        return pb.SetPauseResponse(pauses=control_codec.pauses_to_pb(pause_registry.pauses), changed=changed)

    async def WatchJournal(self, request: pb.WatchJournalRequest, context: Context) -> AsyncIterator[pb.JournalEntry]:
        journal, kinds = self.journal, tuple(request.kinds)
        last = journal.last_sequence
        for entry in journal.tail(request.tail, kinds):
            yield control_codec.ENTRY.to_pb(entry)
        if request.follow:
            async for entry in journal.follow(last, kinds):
                yield control_codec.ENTRY.to_pb(entry)

    # The pause barrier, policy versions and cancelling, for trainers.

    async def PauseFleet(self, request: pb.PauseFleetRequest, context: Context) -> pb.PauseBarrier:
        await self.fleet.barrier.pause(control_codec.PAUSE_REQUEST.from_pb(request))
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
        """If a weight version waits for a closed pause barrier, install it before the barrier opens. Return the version
        with which the barrier opens, and the engines that do not have this version. `told` is the version that the
        caller reports. An empty `lease_id` refers to the present lease. If the lease does not exist, nothing is
        installed."""
        lease, weights = self.fleet.barrier.state.lease, self.daemon.weights.syncs
        if lease is None or lease_id not in ("", lease.id):
            return told, ()
        return await weights.before_resume(lease.until_s, told)

    def _restarted(self, version: int | None) -> list[EngineId]:
        """Return the engines that lost `version` because they were restarted. The result is empty if this daemon did
        not install that version."""
        weights = self.daemon.weights.syncs
        if version is None or weights.book.fleet.version != version:
            return []
        return weights.restarted()

    async def _prepare(self, lease_id: str) -> None:
        """Prepare circuits before the pause barrier opens. Does nothing if the lease has ended, because requests are
        then running already."""
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
        return control_codec.barrier_to_pb(self.fleet.barrier)

    # Redeployments, which change the set of engines in steps: started, watched, cancelled.

    async def Redeploy(self, request: pb.RedeployRequest, context: Context) -> AsyncIterator[pb.RedeploymentReport]:
        redeployer, wish = self._redeploying(), control_codec.redeploy_from_pb(request)
        if request.dry_run:
            draft = redeployer.draft(wish)
            yield control_codec.draft_to_pb(*draft)
            return
        redeployment = redeployer.begin(wish)
        seen = redeployer.report(redeployment)
        yield control_codec.redeployment_to_pb(seen)
        async for report in redeployer.watch(redeployment):
            if report != seen:
                seen = report
                yield control_codec.redeployment_to_pb(report)
            if seen.state is OperationState.RUNNING:
                await self.clock.sleep(TOLD_EVERY_S)

    async def GetRedeployment(self, request: pb.GetRedeploymentRequest, context: Context) -> pb.RedeploymentReport:
        if self.daemon.redeployer is not None:
            try:
                return control_codec.redeployment_to_pb(self.daemon.redeployer.report(request.redeployment_id))
            except Permanent as error:
                await context.abort(grpc.StatusCode.NOT_FOUND, status_text(error))
        found = next((report for report in self._recorded() if request.redeployment_id in ("", report.id)), None)
        if found is None:
            wanted = (
                f"no redeployment {request.redeployment_id!r}"
                if request.redeployment_id
                else "no redeployment has been made yet"
            )
            await context.abort(grpc.StatusCode.NOT_FOUND, status_text(wanted))
        return control_codec.redeployment_to_pb(found)

    async def ListRedeployments(
        self, request: pb.ListRedeploymentsRequest, context: Context
    ) -> pb.ListRedeploymentsResponse:
        if self.daemon.redeployer is not None:
            reports = self.daemon.redeployer.history(request.limit)
        else:
            reports = self._recorded()[: request.limit or None]
        return pb.ListRedeploymentsResponse(
            redeployments=(control_codec.redeployment_to_pb(report, steps=False) for report in reports)
        )

    async def CancelRedeployment(
        self, request: pb.CancelRedeploymentRequest, context: Context
    ) -> pb.RedeploymentReport:
        redeployer = self._redeploying()
        return control_codec.redeployment_to_pb(redeployer.cancel(request.redeployment_id, request.reason))

    def _recorded(self) -> list[RedeploymentReport]:
        """Return the reports of redeployments in the journal, newest first. Earlier daemons that had a deployer wrote
        these reports."""
        return list(reversed(read_history(self.journal).values()))

    def _redeploying(self) -> RedeploymentController:
        if self.daemon.redeployer is None:
            raise Permanent(NO_DEPLOYER)
        return self.daemon.redeployer
