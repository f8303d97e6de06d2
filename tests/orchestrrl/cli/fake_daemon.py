"""A daemon with fixed responses, served by grpc.aio in its own thread, because commands run their own event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc

from orchestrrl.rpc.channel import SERVER_OPTIONS
from orchestrrl.rpc.pb import agent_pb2, control_pb2_grpc, fabric_pb2, fabric_pb2_grpc, telemetry_pb2
from orchestrrl.rpc.pb import control_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]

CAPABILITIES = telemetry_pb2.EngineCapabilities(
    engine="vllm", version="0.32.0", models=["tiny"], pause=True, max_model_len_tokens=4096
)
WORKERS = [
    pb.Worker(
        engine_id="e0",
        url="http://127.0.0.1:8000",
        configuration="tp2",
        health=telemetry_pb2.ENGINE_HEALTH_OK,
        reported=True,
        running=12,
        waiting=3,
        kv_capacity_tokens=10000,
        kv_free_tokens=2500,
        decode_tokens_per_s=1234.5,
        load_index=0.00125,
        age_s=0.21,
        max_sequences=48,
        capabilities=CAPABILITIES,
        step_times_source="configured",
        step_times_detail="configured: tp2",
    ),
    pb.Worker(
        engine_id="e1",
        url="http://127.0.0.1:8001",
        health=telemetry_pb2.ENGINE_HEALTH_GONE,
        reported=True,
        health_detail="connection refused [Errno 111]",
        load_index=float("inf"),
        step_times_detail="no agent has reported what the engine serves",
    ),
]
CONTROL = pb.PlanControl(state="pinned", reason="benchmark", expires_unix_s=1_000_600.0)
PLAN = pb.Plan(
    plan_id="plan-3",
    created_unix_s=1_000_000.0,
    decision="keep",
    reason_code="gain_too_small",
    reason="gain 4.0 s is within epsilon 10 s",
    current_configuration="tp2",
    proposed_configuration="tp4",
    proposed_instances=2,
    current_makespan_s=430.0,
    proposed_makespan_s=423.5,
    redeploy_cost_s=2.0,
    lower_bound_s=400.0,
    solve_s=0.125,
    alternatives=[
        pb.Alternative(
            name="tp1 spread", configuration="tp1", infeasible_because="a request of 9000 tokens does not fit"
        ),
        pb.Alternative(name="as it stands", decision="keep", configuration="tp2", instances=4, makespan_s=430.0),
        pb.Alternative(
            name="mixed",
            decision="reconfigure",
            instances=3,
            makespan_s=420.0,
            redeploy_cost_s=2.0,
            migration_cost_s=4.5,
            low_s=401.0,
            high_s=452.0,
            parts=[pb.FleetPart(configuration="tp2", instances=2), pb.FleetPart(configuration="tp4", instances=1)],
        ),
        pb.Alternative(
            name="tp4 spread",
            decision="reconfigure",
            configuration="tp4",
            instances=2,
            makespan_s=423.5,
            redeploy_cost_s=2.0,
            migration_cost_s=0.5,
        ),
    ],
    migration_cost_s=0.5,
    gap=0.065,
    instances=[
        pb.PlannedInstance(
            engine_id="plan-3.0",
            configuration="tp4",
            gpus=[0, 1, 2, 3],
            requests_count=90,
            decode_s=423.5,
            switch_s=2.0,
        ),
        pb.PlannedInstance(
            engine_id="e9", configuration="tp4", gpus=[4, 5, 6, 7], kept=True, requests_count=70, decode_s=400.0
        ),
    ],
    moves_count=120,
    forgone_code="pinned",
    forgone="pinned by the operator",
    knowledge="forecast",
    scenarios=8,
    correction=1.25,
    notes=["x runs an unknown configuration"],
    predicted_s=430.0,
    inputs_age_s=0.3,
    requests_running=120,
    requests_waiting=40,
    bin_tokens=512,
    remaining_counts=[10, 40, 0, 2],
    forecast_method="empirical",
    actual_makespan_s=441.0,
)
BALANCE = pb.Balance(
    decided_unix_s=1_000_005.0,
    load_index=[pb.WorkerLoad(engine_id="e0", before=0.006, after=0.003), pb.WorkerLoad(engine_id="e1")],
    spread_before=0.006,
    spread_after=0.003,
    theta=0.0002,
    moves=[pb.BalanceMove(request_id="r7", from_engine_id="e0", to_engine_id="e1", state="waiting")],
    stopped_because="within_theta",
    verdict_reason="rebalance: load indices differ by 0.006",
    inputs_age_s=0.2,
    ended_moves=[
        pb.EndedMove(
            ended_unix_s=1_000_004.0,
            request_id="r5",
            from_engine_id="e1",
            to_engine_id="e0",
            ordered_method="transfer",
            method="recompute",
            predicted_s=0.25,
            actual_s=1.5,
            recomputed_tokens=12_000,
        )
    ],
)
STATUS = pb.Status(
    version="0.1.0",
    mode=pb.MODE_ADVISE,
    generation=3,
    now_unix_s=1_000_010.0,
    uptime_s=7384.0,
    workers=WORKERS,
    nodes=[pb.NodeStatus(node_id="agent-e0", kind="agent", attached=True, age_s=0.1)],
    requests_running=12,
    requests_waiting=3,
    requests_finished=4567,
    moves_done=8,
    moves_failed=1,
    tokens_recomputed=90000,
    tokens_loaded=70000,
    failovers=12,
    failover_requests_recomputed=9,
    failover_tokens_recomputed=34567,
    plan_id="plan-3",
    plan_control=CONTROL,
    balance_reason="within_theta: spread 0.0001",
    balance_policy="load_index",
    balance_policy_reason="no step times for e1: [its GPU] is not known",
    plan_calibration=pb.PlanCalibration(steps=7, error=0.084, bias=0.031, correction=0.97),
)
BARRIER = pb.PauseBarrier(
    phase="quiet",
    lease_id="g3-1",
    holder="weights of step 12",
    mode=agent_pb2.PAUSE_MODE_KEEP,
    frozen=agent_pb2.FROZEN_REQUESTS_RECOMPUTE,
    lease_until_unix_s=1_000_060.0,
    policy_version=11,
    gateways=[
        pb.GatewayAtBarrier(
            node_id="gw0",
            report=telemetry_pb2.BarrierReport(
                phase=telemetry_pb2.BARRIER_PHASE_QUIET, lease_id="g3-1", frozen=1200, held=3, policy_version=11
            ),
        ),
        pb.GatewayAtBarrier(node_id="gw1"),
    ],
    engines=[
        pb.EngineAtRest(engine_id="e0", done=True, policy_version=11),
        pb.EngineAtRest(engine_id="e1", detail="connection refused [Errno 111]"),
    ],
)
OPEN_BARRIER = pb.PauseBarrier(
    phase="open", policy_version=12, engines=BARRIER.engines, detail="resumed by weights of step 12"
)
REQUESTS = [
    telemetry_pb2.RequestProgress(
        request_id="r1",
        engine_id="e0",
        state=telemetry_pb2.REQUEST_STATE_RUNNING,
        prompt_tokens=100,
        generated_tokens=2345,
        max_tokens=4096,
        movable=True,
        age_s=12.5,
    ),
    telemetry_pb2.RequestProgress(
        request_id="r2",
        state=telemetry_pb2.REQUEST_STATE_WAITING,
        prompt_tokens=100,
        movable=False,
        movable_detail="a grammar guides it",
    ),
]
JOURNAL = [
    pb.JournalEntry(
        sequence=1, at_unix_s=1e6, generation=3, kind="mode", subject_id="act", body_json='{"reason": "go"}'
    ),
    pb.JournalEntry(
        sequence=2,
        at_unix_s=1e6 + 1,
        generation=3,
        kind="operation.result",
        subject_id="op1",
        body_json='{"done": true}',
    ),
]


class FakeDaemon(control_pb2_grpc.ControlServicer):
    """A daemon that records every order in `received`. With `empty`, it behaves as if it had just started."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.empty = False
        self.plans = [PLAN]
        self.address = ""

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.Status:  # type: ignore[override]
        return pb.Status(version="0.1.0", mode=pb.MODE_ADVISE) if self.empty else STATUS

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersResponse:  # type: ignore[override]
        return pb.ListWorkersResponse(workers=[] if self.empty else WORKERS)

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:  # type: ignore[override]
        self.received.append(request)
        return pb.ListRequestsResponse(requests=[] if self.empty else REQUESTS, total=0 if self.empty else 7)

    async def GetPlan(self, request: pb.GetPlanRequest, context: Context) -> pb.Plan:  # type: ignore[override]
        if self.empty:
            await refuse(context, grpc.StatusCode.NOT_FOUND, "no plan has been made yet")
        found = next((plan for plan in self.plans if request.plan_id in ("", plan.plan_id)), None)
        if found is None:
            await refuse(context, grpc.StatusCode.NOT_FOUND, f"no plan {request.plan_id!r}")
        return found

    async def ListPlans(self, request: pb.ListPlansRequest, context: Context) -> pb.ListPlansResponse:  # type: ignore[override]
        self.received.append(request)
        return pb.ListPlansResponse(plans=[] if self.empty else self.plans)

    async def WatchPlans(self, request: pb.WatchPlansRequest, context: Context) -> AsyncIterator[pb.PlanEvent]:  # type: ignore[override]
        yield pb.PlanEvent(plan=None if self.empty else PLAN, control=CONTROL)

    async def OverridePlan(self, request: pb.OverridePlanRequest, context: Context) -> pb.PlanControl:  # type: ignore[override]
        self.received.append(request)
        if request.configuration == "tp3":
            faults = "configuration: is not one of tp2, tp4, got 'tp3'\nreason: must not be empty"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, faults)
        return pb.PlanControl(state="overridden", configuration=request.configuration, reason=request.reason)

    async def PinPlan(self, request: pb.PinPlanRequest, context: Context) -> pb.PlanControl:  # type: ignore[override]
        self.received.append(request)
        return CONTROL

    async def ReleasePlan(self, request: pb.ReleasePlanRequest, context: Context) -> pb.PlanControl:  # type: ignore[override]
        self.received.append(request)
        return pb.PlanControl(state="free")

    async def GetBalance(self, request: pb.GetBalanceRequest, context: Context) -> pb.Balance:  # type: ignore[override]
        if self.empty:
            await refuse(context, grpc.StatusCode.NOT_FOUND, "the fast loop has not made a decision yet")
        return BALANCE

    async def SetMode(self, request: pb.SetModeRequest, context: Context) -> pb.SetModeResponse:  # type: ignore[override]
        self.received.append(request)
        return pb.SetModeResponse(mode=request.mode, previous=pb.MODE_ADVISE)

    async def MoveRequest(self, request: pb.MoveRequestRequest, context: Context) -> pb.MoveRequestResponse:  # type: ignore[override]
        self.received.append(request)
        match request.request_id:
            case "r1":
                return pb.MoveRequestResponse(done=True, operation_id="op9")
            case "r2":
                return pb.MoveRequestResponse(done=False, detail="a grammar guides it")
            case "late":
                await refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, "no result from the gateway")
        return await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, f"no request {request.request_id!r}")

    async def PauseFleet(self, request: pb.PauseFleetRequest, context: Context) -> pb.PauseBarrier:  # type: ignore[override]
        self.received.append(request)
        if request.holder == "too late":
            await refuse(context, grpc.StatusCode.ABORTED, "cannot pause gateway gw0: 3 requests still run")
        return BARRIER

    async def RenewPause(self, request: pb.RenewPauseRequest, context: Context) -> pb.PauseBarrier:  # type: ignore[override]
        self.received.append(request)
        if request.lease_id != BARRIER.lease_id:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "lease g2-1 has already ended (expired)")
        return BARRIER

    async def ResumeFleet(self, request: pb.ResumeFleetRequest, context: Context) -> pb.PauseBarrier:  # type: ignore[override]
        self.received.append(request)
        return OPEN_BARRIER

    async def GetPauseBarrier(self, request: pb.GetPauseBarrierRequest, context: Context) -> pb.PauseBarrier:  # type: ignore[override]
        return pb.PauseBarrier(phase="open") if self.empty else BARRIER

    async def SetPolicyVersion(  # type: ignore[override]
        self, request: pb.SetPolicyVersionRequest, context: Context
    ) -> pb.SetPolicyVersionResponse:
        self.received.append(request)
        return pb.SetPolicyVersionResponse(policy_version=12)

    async def CancelRequests(self, request: pb.CancelRequestsRequest, context: Context) -> pb.CancelRequestsResponse:  # type: ignore[override]
        self.received.append(request)
        silent = ["gw1"] if "slow" in request.group_ids else []
        return pb.CancelRequestsResponse(cancelled_ids=["r1", "r2"], silent_node_ids=silent)

    async def WatchJournal(self, request: pb.WatchJournalRequest, context: Context) -> AsyncIterator[pb.JournalEntry]:  # type: ignore[override]
        self.received.append(request)
        for entry in JOURNAL:
            yield entry


async def refuse(context: Context, code: grpc.StatusCode, details: str) -> NoReturn:
    await context.abort(code, details)


class SilentFabric(fabric_pb2_grpc.FabricServicer):
    """A fabric service that ends each call without a report, as a daemon does that stops."""

    async def AnnouncePeriod(  # type: ignore[override]
        self, request: fabric_pb2.AnnouncePeriodRequest, context: Context
    ) -> AsyncIterator[fabric_pb2.PeriodReport]:
        for report in ():
            yield report


class Serving:
    """Context manager that serves a daemon and sets `daemon.address`: `with Serving(daemon, "127.0.0.1:0"):`."""

    def __init__(self, daemon: FakeDaemon, address: str = "127.0.0.1:0") -> None:
        self._daemon = daemon
        self._address = address
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        assert self._ready.wait(60)
        return self._daemon

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        control_pb2_grpc.add_ControlServicer_to_server(self._daemon, server)
        fabric_pb2_grpc.add_FabricServicer_to_server(SilentFabric(), server)
        port = server.add_insecure_port(self._address)
        await server.start()
        unix = self._address.startswith("unix:")
        self._daemon.address = self._address if unix else f"127.0.0.1:{port}"
        self._ready.set()
        await self._end.wait()
        await server.stop(grace=None)
