"""Convert the daemon's state and decisions to messages of the Control service. Nodes do not use this module."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from google.protobuf.message import Message

from balancer.balance import BalanceDecision
from orchestrrl.core.defects import Defect
from orchestrrl.core.journal.store import JournalEntry
from orchestrrl.core.nodes import NodeState
from orchestrrl.core.operation import OperationState, Stage, StepDirection, StepReport, steps_in
from orchestrrl.core.operator_pauses import OperatorPause, PauseScope
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.plan_book import PlanEvent
from orchestrrl.daemon.wiring import Daemon
from orchestrrl.fleet.move_orders import MovedRequest
from orchestrrl.fleet.pause_barrier import EngineAtRest, PauseBarrier, PauseRequest
from orchestrrl.fleet.redeployment.steps import (
    Redeployment,
    RedeploymentId,
    RedeploymentReport,
    RedeployRequest,
    RedeployStep,
)
from orchestrrl.fleet.reports import FailoverCounts
from orchestrrl.rpc.codec import LOCAL, Codec, EnumCodec, Flat, Via, rows_to_pb
from orchestrrl.rpc.codecs.fabric import CONTROL as FABRIC_CONTROL
from orchestrrl.rpc.codecs.fabric import PERIOD
from orchestrrl.rpc.codecs.node import FROZEN, PAUSE_MODE
from orchestrrl.rpc.codecs.telemetry import BARRIER, CAPABILITIES
from orchestrrl.rpc.pb import control_pb2 as pb
from planner.admission import OperatorControl
from planner.calibration import Calibration
from planner.model import (
    Alternative,
    EngineId,
    EngineView,
    Mode,
    Plan,
    PlannedInstance,
    PlannedMove,
    RequestState,
    Snapshot,
)

_Message = TypeVar("_Message", bound=Message)

SET_ASIDE_SHOWN = 16

MODE = EnumCodec(Mode, pb.Mode.DESCRIPTOR)
CONTROL = Codec(OperatorControl, pb.PlanControl, since_s=LOCAL)
PLAN = Codec(
    Plan,
    pb.Plan,
    id="plan_id",
    verdict=Flat(code="reason_code", detail="reason"),
    forgone=Flat(code="forgone_code", detail="forgone"),
    remaining=Flat(counts="remaining_counts"),
    alternatives=Codec(Alternative, pb.Alternative),
    instances=Codec(PlannedInstance, pb.PlannedInstance, id="engine_id"),
    moves=Codec(PlannedMove, pb.PlannedMove, source="from_engine_id", destination="to_engine_id"),
    predicted_s="predicted_s",
)
PLAN_EVENT = Codec(PlanEvent, pb.PlanEvent, plan=PLAN, control=CONTROL)
ENTRY = Codec(JournalEntry, pb.JournalEntry, body=("body_json", Via(json.dumps, json.loads)))
_CALIBRATION = Codec(Calibration, pb.PlanCalibration, correction="correction")
_DEFECT = Codec(Defect, pb.Defect, beside="total")
_PAUSE = Codec(OperatorPause, pb.Pause, beside="part")
_ENGINE = Codec(
    EngineView,
    pb.Worker,
    beside="load_index capabilities requests reported remarks other_names step_times_source step_times_detail",
    id="engine_id",
    gpus=LOCAL,
    outdated=LOCAL,
)
_BALANCE = Codec(
    BalanceDecision,
    pb.Balance,
    beside="load_index ended_moves",
    balance=Flat(
        load_before=LOCAL,
        load_after=LOCAL,
        moves=Via(
            to_pb=lambda move: pb.BalanceMove(
                request_id=move.request, from_engine_id=move.from_engine, to_engine_id=move.to_engine, state=move.state
            )
        ),
    ),
    verdict=("verdict_reason", Via(to_pb=lambda verdict: f"{verdict.code}: {verdict.detail}")),
    policy=Flat(name="policy", reason="policy_reason"),
    packing=LOCAL,
)
_MOVED = Codec(
    MovedRequest,
    pb.EndedMove,
    move=Flat(method="ordered_method", hold_s=LOCAL, other_s=LOCAL, fixed_s=LOCAL, state=LOCAL),
    item=Flat(id=LOCAL, done=LOCAL, detail=LOCAL, duration_s="actual_s", predicted_s=LOCAL),
)
PAUSE_REQUEST = Codec(PauseRequest, pb.PauseFleetRequest, mode=PAUSE_MODE, frozen=FROZEN, weights_change=LOCAL)
_AT_REST = Codec(EngineAtRest, pb.EngineAtRest)
# Launch settings of an engine are not sent.
_LAUNCHED = Via(
    to_pb=lambda spec: pb.RedeployEngine(engine_id=spec.engine, configuration=spec.configuration, gpus=spec.gpus)
)
REDEPLOYMENT = Codec(
    RedeploymentReport,
    pb.RedeploymentReport,
    id="redeployment_id",
    old=("old_engines", _LAUNCHED),
    new=("new_engines", _LAUNCHED),
    steps=Codec(StepReport[RedeployStep], pb.RedeployStep, step=Flat()),
)


def status_to_pb(daemon: Daemon, version: str) -> pb.Status:
    control_plane = daemon.control_plane
    now_s = control_plane.clock.now_s()
    snapshot = control_plane.fleet.state.snapshot(now_s)
    running = sum(request.state is RequestState.RUNNING for request in snapshot.requests)
    totals, latest, fabric = control_plane.fleet.state.totals, control_plane.plans.latest, daemon.fabric.coordinator
    failovers = sum(control_plane.fleet.state.failovers.values(), FailoverCounts())
    balance, redeployer, journal = control_plane.balance, daemon.redeployer, control_plane.journal
    return pb.Status(
        version=version,
        mode=MODE.to_pb(control_plane.mode.current),
        generation=journal.generation,
        now_unix_s=now_s,
        uptime_s=now_s - control_plane.started_s,
        workers=workers_to_pb(control_plane, snapshot),
        nodes=[_node_to_pb(node, now_s) for node in control_plane.fleet.nodes.states()],
        requests_running=running,
        requests_waiting=len(snapshot.requests) - running,
        requests_finished=totals.finished,
        moves_done=totals.moves_done,
        moves_failed=totals.moves_failed,
        tokens_recomputed=totals.tokens_recomputed,
        tokens_loaded=totals.tokens_loaded,
        failovers=failovers.failovers,
        failover_requests_recomputed=failovers.requests_recomputed,
        failover_tokens_recomputed=failovers.tokens_recomputed,
        plan_id=latest.id if latest else "",
        plan_control=CONTROL.to_pb(control_plane.plans.control),
        plan_calibration=_CALIBRATION.to_pb(control_plane.plans.calibration),
        balance_reason=f"{balance.verdict.code}: {balance.verdict.detail}" if balance else "no decision yet",
        balance_policy=balance.policy.name if balance else "",
        balance_policy_reason=balance.policy.reason if balance else "",
        barrier=barrier_to_pb(control_plane.fleet.barrier),
        redeployment=notable_to_pb(next(iter(redeployer.history(1)), None)) if redeployer else None,
        pauses=pauses_to_pb(control_plane.pause_registry.pauses),
        fabric_control=FABRIC_CONTROL.to_pb(fabric.overrides.control) if fabric else None,
        fabric_period=next(map(PERIOD.to_pb, fabric.reports(1)), None) if fabric else None,
        remarks=control_plane.fleet.node_remarks(),
        mode_reason=control_plane.mode.reason,
        defects=[
            _with(_DEFECT.to_pb(defect), total=control_plane.defects.counts[defect.part])
            for defect in control_plane.defects.latest
        ],
        journal_damage=journal.damage,
        journal_set_aside=rows_to_pb(pb.UnreadEntry, islice(journal.set_aside.items(), SET_ASIDE_SHOWN)),
    )


def pauses_to_pb(pauses: Mapping[PauseScope, OperatorPause]) -> list[pb.Pause]:
    return [_with(_PAUSE.to_pb(pause), part=part) for part, pause in pauses.items()]


def workers_to_pb(control_plane: ControlPlane, snapshot: Snapshot) -> list[pb.Worker]:
    held = Counter(request.engine for request in snapshot.requests)
    remarks = control_plane.fleet.remarks(engine.id for engine in snapshot.engines)
    others = control_plane.fleet.state.names(snapshot.now_s).others
    step_times = control_plane.planning.step_times(snapshot)
    balance, state = control_plane.balance, control_plane.fleet.state
    return [
        _with(
            _ENGINE.to_pb(engine),
            load_index=balance.load_index.get(engine.id) if balance else None,
            capabilities=CAPABILITIES.to_pb(found) if (found := state.capabilities(engine.id)) else None,
            requests=held[engine.id],
            reported=state.reported(engine.id),
            remarks=remarks.get(engine.id, ()),
            other_names=sorted({name for _, name in others.get(engine.id, ())}),
            step_times_source=step_times[engine.id].source,
            step_times_detail=step_times[engine.id].detail,
        )
        for engine in snapshot.engines
    ]


def worker_to_pb(control_plane: ControlPlane, engine: EngineId) -> pb.Worker:
    """Return the message that describes one engine. If the engine is no longer reported, only its id and whether it is
    drained are set."""
    snapshot = control_plane.fleet.state.snapshot(control_plane.clock.now_s())
    found = next((worker for worker in workers_to_pb(control_plane, snapshot) if worker.engine_id == engine), None)
    return found or pb.Worker(
        engine_id=engine, draining=engine in control_plane.fleet.membership_changes.membership.draining
    )


def _node_to_pb(node: NodeState, now_s: float) -> pb.NodeStatus:
    return pb.NodeStatus(
        node_id=node.attachment.hello.node,
        kind=node.attachment.hello.kind,
        attached=node.attached,
        age_s=now_s - node.last_report_s,
        url=node.attachment.hello.url,
    )


def balance_to_pb(decision: BalanceDecision, ended_moves: Iterable[MovedRequest] = ()) -> pb.Balance:
    message, balance = _BALANCE.to_pb(decision), decision.balance
    message.load_index.extend(
        rows_to_pb(
            pb.WorkerLoad, ((engine, load, balance.load_after[engine]) for engine, load in balance.load_before.items())
        )
    )
    message.ended_moves.extend(map(_MOVED.to_pb, ended_moves))
    return message


def _with(message: _Message, **fields: Any) -> _Message:
    """Merge the given fields into the message, and return the message."""
    message.MergeFrom(type(message)(**fields))
    return message


def barrier_to_pb(keeper: PauseBarrier) -> pb.PauseBarrier:
    """Return the present state of the pause barrier. The fields of the lease are set only while a lease exists."""
    state, lease = keeper.state, keeper.state.lease
    barrier = pb.PauseBarrier(
        phase=state.phase,
        policy_version=state.newest,
        weights_source=state.newest_source,
        gateways=[
            pb.GatewayAtBarrier(node_id=node, report=BARRIER.to_pb(report) if report else None)
            for node, report in keeper.gateways().items()
        ],
        engines=map(_AT_REST.to_pb, keeper.rests()),
        detail=state.opened.detail if state.opened else "",
    )
    if lease is not None:
        barrier.lease_id = lease.id
        barrier.holder = lease.holder
        barrier.mode = PAUSE_MODE.to_pb(lease.mode)
        barrier.frozen = FROZEN.to_pb(lease.frozen)
        barrier.lease_until_unix_s = lease.until_s
    return barrier


def redeploy_from_pb(message: pb.RedeployRequest) -> RedeployRequest:
    targets = tuple((target.configuration, target.engines) for target in message.targets)
    return RedeployRequest(targets, message.plan_id, message.reason)


def draft_to_pb(redeployment: Redeployment, stages: Sequence[Stage[RedeployStep]]) -> pb.RedeploymentReport:
    """Return the report of a planned redeployment. The report has no id, so it cannot be queried later."""
    report = RedeploymentReport(
        RedeploymentId(""),
        redeployment.plan,
        redeployment.reason,
        redeployment.created_s,
        OperationState.RUNNING,
        redeployment.old,
        redeployment.new,
        engines=tuple(spec.engine for spec in redeployment.old),
        steps=tuple(StepReport(step, StepDirection.FORWARD) for step in steps_in(stages)),
    )
    message = REDEPLOYMENT.to_pb(report)
    message.state = "planned"
    return message


def redeployment_to_pb(report: RedeploymentReport, *, steps: bool = True) -> pb.RedeploymentReport:
    """Convert the report of a redeployment. If `steps` is False, omit the steps, because the report of a large fleet
    has thousands of them."""
    return REDEPLOYMENT.to_pb(report if steps else replace(report, steps=()))


def notable_to_pb(report: RedeploymentReport | None) -> pb.RedeploymentReport | None:
    """Convert the report of a redeployment that the fleet's status must show, because it is running or has left engines
    missing. Return None for any other redeployment, or if `report` is None."""
    if report is None or report.state not in (OperationState.RUNNING, OperationState.DEGRADED):
        return None
    return redeployment_to_pb(report)
