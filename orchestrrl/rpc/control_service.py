"""The Control service: what operators and trainers ask. It translates and nothing more; the control plane answers."""

from collections.abc import AsyncIterator

import grpc

from orchestrrl import __version__
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.core.ttl import lifetime_faults
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.fleet.membership_changes import NewEngine
from orchestrrl.rpc.codecs import control as control_codec
from orchestrrl.rpc.codecs import telemetry as telemetry_codec
from orchestrrl.rpc.pause_service import PauseService
from orchestrrl.rpc.pb import control_pb2, control_pb2_grpc
from orchestrrl.rpc.redeployment_service import RedeploymentService
from orchestrrl.rpc.refusals import Context, read, refusing, status_text
from planner.model import ConfigurationId, EngineId, PlanId, RequestId


class ControlService(control_pb2_grpc.ControlServicer):
    def __init__(self, control_plane: ControlPlane) -> None:
        self._control_plane = control_plane
        self._barrier = PauseService(control_plane)
        self._redeployments = RedeploymentService(control_plane)

    async def GetStatus(self, request: control_pb2.GetStatusRequest, context: Context) -> control_pb2.Status:
        return control_codec.status_to_pb(self._control_plane, __version__)

    async def ListWorkers(
        self, request: control_pb2.ListWorkersRequest, context: Context
    ) -> control_pb2.ListWorkersResponse:
        snapshot = self._control_plane.state.snapshot(self._control_plane.clock.now_s())
        return control_pb2.ListWorkersResponse(workers=control_codec.workers_to_pb(self._control_plane, snapshot))

    def _engine(self, name: str) -> EngineId:
        """The engine that is meant, also by a name that only nodes use."""
        return self._control_plane.state.engine_called(EngineId(name), self._control_plane.clock.now_s())

    async def ListRequests(
        self, request: control_pb2.ListRequestsRequest, context: Context
    ) -> control_pb2.ListRequestsResponse:
        requests = self._control_plane.state.snapshot(self._control_plane.clock.now_s()).requests
        engine = self._engine(request.engine_id)
        found = [view for view in requests if not engine or view.engine == engine]
        listed = found[: request.limit] if request.limit else found
        return control_pb2.ListRequestsResponse(
            requests=[telemetry_codec.REQUEST.to_pb(view) for view in listed], total=len(found)
        )

    async def GetPlan(self, request: control_pb2.GetPlanRequest, context: Context) -> control_pb2.Plan:
        if not request.plan_id and self._control_plane.plans.latest is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no plan has been made yet")
        try:
            plan = (
                self._control_plane.plans.get(PlanId(request.plan_id))
                if request.plan_id
                else self._control_plane.plans.latest
            )
        except Permanent as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, status_text(error))
        assert plan is not None
        return control_codec.PLAN.to_pb(plan)

    async def ListPlans(self, request: control_pb2.ListPlansRequest, context: Context) -> control_pb2.ListPlansResponse:
        plans = self._control_plane.plans.newest(request.limit)
        return control_pb2.ListPlansResponse(plans=[control_codec.PLAN.to_pb(plan) for plan in plans])

    async def WatchPlans(
        self, request: control_pb2.WatchPlansRequest, context: Context
    ) -> AsyncIterator[control_pb2.PlanEvent]:
        await context.send_initial_metadata(())
        async for event in self._control_plane.plans.watch():
            yield control_codec.PLAN_EVENT.to_pb(event)

    async def OverridePlan(self, request: control_pb2.OverridePlanRequest, context: Context) -> control_pb2.PlanControl:
        known = [configuration.id for configuration in self._control_plane.config.fleet.configuration_values()]
        async with refusing(context):
            wanted = ConfigurationId(request.configuration)
            control = self._control_plane.plans.override(wanted, known, request.reason, request.ttl_s)
        return control_codec.CONTROL.to_pb(control)

    async def PinPlan(self, request: control_pb2.PinPlanRequest, context: Context) -> control_pb2.PlanControl:
        async with refusing(context):
            control = self._control_plane.plans.pin(request.reason, request.ttl_s)
        return control_codec.CONTROL.to_pb(control)

    async def ReleasePlan(self, request: control_pb2.ReleasePlanRequest, context: Context) -> control_pb2.PlanControl:
        async with refusing(context):
            control = self._control_plane.plans.release(request.reason)
        return control_codec.CONTROL.to_pb(control)

    async def GetBalance(self, request: control_pb2.GetBalanceRequest, context: Context) -> control_pb2.Balance:
        if self._control_plane.balance is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the fast loop has not decided anything yet")
        return control_codec.balance_to_pb(self._control_plane.balance, self._control_plane.latest_moves)

    async def SetMode(self, request: control_pb2.SetModeRequest, context: Context) -> control_pb2.SetModeResponse:
        mode = await read(context, request.mode, control_codec.MODE.from_pb)
        async with refusing(context):
            previous = self._control_plane.set_mode(mode, request.reason)
            if request.reason:  # who gives one has seen what the mode was for
                self._control_plane.journal.confirm_damage(self._control_plane.clock.now_s(), request.reason)
        return control_pb2.SetModeResponse(
            mode=control_codec.MODE.to_pb(mode), previous=control_codec.MODE.to_pb(previous)
        )

    async def MoveRequest(
        self, request: control_pb2.MoveRequestRequest, context: Context
    ) -> control_pb2.MoveRequestResponse:
        async with refusing(context):
            outcome = await self._control_plane.move(RequestId(request.request_id), EngineId(request.to_engine_id))
        item = outcome.items[0]
        operation = outcome.operations[0].operation if outcome.operations else ""
        return control_pb2.MoveRequestResponse(done=item.done, detail=item.detail, operation_id=operation)

    async def PauseFleet(self, request: control_pb2.PauseFleetRequest, context: Context) -> control_pb2.PauseBarrier:
        return await self._barrier.pause(request, context)

    async def RenewPause(self, request: control_pb2.RenewPauseRequest, context: Context) -> control_pb2.PauseBarrier:
        return await self._barrier.renew(request, context)

    async def ResumeFleet(self, request: control_pb2.ResumeFleetRequest, context: Context) -> control_pb2.PauseBarrier:
        return await self._barrier.resume(request, context)

    async def GetPauseBarrier(
        self, request: control_pb2.GetPauseBarrierRequest, context: Context
    ) -> control_pb2.PauseBarrier:
        return self._barrier.seen()

    async def SetPolicyVersion(
        self, request: control_pb2.SetPolicyVersionRequest, context: Context
    ) -> control_pb2.SetPolicyVersionResponse:
        return await self._barrier.set_version(request, context)

    async def CancelRequests(
        self, request: control_pb2.CancelRequestsRequest, context: Context
    ) -> control_pb2.CancelRequestsResponse:
        return await self._barrier.cancel(request, context)

    async def AddEngine(self, request: control_pb2.AddEngineRequest, context: Context) -> control_pb2.Worker:
        new = NewEngine(request.engine_id, request.url, request.configuration, tuple(request.gpus), request.pool)
        async with refusing(context):
            self._control_plane.membership_changes.add(new, request.reason)
        self._control_plane.barrier.forget([EngineId(request.engine_id)], "was added")
        return control_codec.worker_to_pb(self._control_plane, EngineId(request.engine_id))

    async def DrainEngine(self, request: control_pb2.DrainEngineRequest, context: Context) -> control_pb2.Worker:
        engine = self._engine(request.engine_id)
        async with refusing(context):
            if request.undo and request.move_requests:
                raise ProblemFaults(["move_requests: cannot go with undo, got both"])
            if request.undo:
                self._control_plane.membership_changes.undrain(engine, request.reason)
            else:
                self._control_plane.membership_changes.drain(engine, request.move_requests, request.reason)
        return control_codec.worker_to_pb(self._control_plane, engine)

    async def RemoveEngine(
        self, request: control_pb2.RemoveEngineRequest, context: Context
    ) -> control_pb2.RemoveEngineResponse:
        engine = self._engine(request.engine_id)
        async with refusing(context):
            removal = await self._control_plane.membership_changes.remove(engine, request.force, request.reason)
        self._control_plane.barrier.forget([engine], "was removed")
        return control_pb2.RemoveEngineResponse(
            engine_id=request.engine_id,
            requests_moved=removal.requests_moved,
            requests_left=removal.requests_left,
        )

    async def SetPause(self, request: control_pb2.SetPauseRequest, context: Context) -> control_pb2.SetPauseResponse:
        pause_registry = self._control_plane.pause_registry
        async with refusing(context):
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
        return control_pb2.SetPauseResponse(pauses=control_codec.pauses_to_pb(pause_registry.pauses), changed=changed)

    async def Redeploy(
        self, request: control_pb2.RedeployRequest, context: Context
    ) -> AsyncIterator[control_pb2.RedeploymentReport]:
        async for report in self._redeployments.redeploy(request, context):
            yield report

    async def GetRedeployment(
        self, request: control_pb2.GetRedeploymentRequest, context: Context
    ) -> control_pb2.RedeploymentReport:
        return await self._redeployments.get(request, context)

    async def ListRedeployments(
        self, request: control_pb2.ListRedeploymentsRequest, context: Context
    ) -> control_pb2.ListRedeploymentsResponse:
        return await self._redeployments.history(request, context)

    async def CancelRedeployment(
        self, request: control_pb2.CancelRedeploymentRequest, context: Context
    ) -> control_pb2.RedeploymentReport:
        return await self._redeployments.cancel(request, context)

    async def WatchJournal(
        self, request: control_pb2.WatchJournalRequest, context: Context
    ) -> AsyncIterator[control_pb2.JournalEntry]:
        await context.send_initial_metadata(())
        journal, kinds = self._control_plane.journal, tuple(request.kinds)
        last = journal.last_sequence
        for entry in journal.tail(request.tail, kinds):
            yield control_codec.ENTRY.to_pb(entry)
        if request.follow:
            async for entry in journal.follow(last, kinds):
                yield control_codec.ENTRY.to_pb(entry)
