"""The Control service: what operators and trainers ask. It translates and nothing more; the control plane answers."""

from collections.abc import AsyncIterator

import grpc

from orchestrrl import __version__
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.core.ttl import lifetime_faults
from orchestrrl.fleet.state import EngineFacts
from orchestrrl.rpc.codecs import control as control_codec
from orchestrrl.rpc.codecs import telemetry as telemetry_codec
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.rpc.redeployment_service import RedeploymentService
from orchestrrl.rpc.refusals import Context, status_text
from planner.model import ConfigurationId, EngineId, GpuId, PlanId, RequestId


class ControlService(RedeploymentService):
    """The whole service: what is not about pauses or redeployments is here."""

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.Status:
        return control_codec.status_to_pb(self.daemon, __version__)

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersResponse:
        snapshot = self.fleet.state.snapshot(self.now_s())
        return pb.ListWorkersResponse(workers=control_codec.workers_to_pb(self.control_plane, snapshot))

    def _engine(self, name: str) -> EngineId:
        """The engine that is meant, also by a name that only nodes use."""
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
        control = self.plans.pin(request.reason, request.ttl_s)
        return control_codec.CONTROL.to_pb(control)

    async def ReleasePlan(self, request: pb.ReleasePlanRequest, context: Context) -> pb.PlanControl:
        control = self.plans.release(request.reason)
        return control_codec.CONTROL.to_pb(control)

    async def GetBalance(self, request: pb.GetBalanceRequest, context: Context) -> pb.Balance:
        if self.control_plane.balance is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the fast loop has not decided anything yet")
        return control_codec.balance_to_pb(self.control_plane.balance, self.fleet.latest_moves)

    async def SetMode(self, request: pb.SetModeRequest, context: Context) -> pb.SetModeResponse:
        mode = control_codec.MODE.from_pb(request.mode)
        previous = self.control_plane.mode.set(mode, request.reason)
        if request.reason:  # who gives one has seen what the mode was for
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
            raise ProblemFaults(["move_requests: cannot go with undo, got both"])
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
