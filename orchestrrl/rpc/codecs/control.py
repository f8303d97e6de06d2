"""Between the daemon's values and the Control service's messages. Beside telemetry.py because nodes do not need it."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping

from balancer.balance import BalanceDecision
from orchestrrl.core.defects import Defect
from orchestrrl.core.journal.store import JournalEntry
from orchestrrl.core.nodes import NodeState
from orchestrrl.core.operator_pauses import OperatorPause, PauseScope
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.plan_book import PlanEvent
from orchestrrl.fleet.move_orders import MovedRequest
from orchestrrl.fleet.reports import FailoverCounts
from orchestrrl.rpc.codecs.fabric import control_of_fabric_to_pb, period_to_pb
from orchestrrl.rpc.codecs.pause import barrier_to_pb
from orchestrrl.rpc.codecs.redeployment import notable_to_pb
from orchestrrl.rpc.codecs.telemetry import capabilities_to_pb, health_to_pb
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
    RequestState,
    Snapshot,
    StepTimeEstimates,
)

SET_ASIDE_SHOWN = 16

_MODE_TO_PB = {Mode.ADVISE: pb.MODE_ADVISE, Mode.ACT: pb.MODE_ACT}
_MODE_FROM_PB = {message: mode for mode, message in _MODE_TO_PB.items()}


def mode_to_pb(mode: Mode) -> pb.Mode.ValueType:
    return _MODE_TO_PB[mode]


def mode_from_pb(message: pb.Mode.ValueType) -> Mode:
    if message not in _MODE_FROM_PB:
        raise ValueError(f"mode: must be advise or act, got {message}")
    return _MODE_FROM_PB[message]


def status_to_pb(control_plane: ControlPlane, version: str) -> pb.Status:
    now_s = control_plane.clock.now_s()
    snapshot = control_plane.state.snapshot(now_s)
    running = sum(request.state is RequestState.RUNNING for request in snapshot.requests)
    totals, latest = control_plane.state.totals, control_plane.plans.latest
    failovers = sum(control_plane.state.failovers.values(), FailoverCounts())
    return pb.Status(
        version=version,
        mode=mode_to_pb(control_plane.mode),
        generation=control_plane.journal.generation,
        now_unix_s=now_s,
        uptime_s=now_s - control_plane.started_s,
        workers=workers_to_pb(control_plane, snapshot),
        nodes=[_node_to_pb(node, now_s) for node in control_plane.nodes.states()],
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
        plan_control=control_to_pb(control_plane.plans.control),
        balance_reason=_verdict(control_plane.balance) if control_plane.balance else "no decision yet",
        plan_calibration=_calibration_to_pb(control_plane.plans.calibration),
        barrier=barrier_to_pb(control_plane.barrier),
        redeployment=notable_to_pb(next(iter(control_plane.redeployer.history(1)), None))
        if control_plane.redeployer
        else None,
        pauses=pauses_to_pb(control_plane.pause_registry.pauses),
        fabric_control=control_of_fabric_to_pb(control_plane.fabric.overrides.control)
        if control_plane.fabric
        else None,
        fabric_period=period_to_pb(next(iter(control_plane.fabric.reports(1)), None)) if control_plane.fabric else None,
        remarks=control_plane.node_remarks(),
        balance_policy=control_plane.balance.policy.name if control_plane.balance else "",
        balance_policy_reason=control_plane.balance.policy.reason if control_plane.balance else "",
        mode_reason=control_plane.mode_reason,
        defects=[
            _defect_to_pb(defect, control_plane.defects.counts[defect.part]) for defect in control_plane.defects.latest
        ],
        journal_damage=control_plane.journal.damage,
        journal_set_aside=[
            pb.UnreadEntry(sequence=sequence, detail=detail)
            for sequence, detail in list(control_plane.journal.set_aside.items())[:SET_ASIDE_SHOWN]
        ],
    )


def _defect_to_pb(defect: Defect, total: int) -> pb.Defect:
    return pb.Defect(
        part=defect.part,
        type=defect.type,
        place=defect.place,
        message=defect.message,
        first_unix_s=defect.first_s,
        last_unix_s=defect.last_s,
        running=defect.running,
        total=total,
    )


def pauses_to_pb(pauses: Mapping[PauseScope, OperatorPause]) -> list[pb.Pause]:
    return [
        pb.Pause(part=part, reason=pause.reason, since_unix_s=pause.since_s, expires_unix_s=pause.expires_s)
        for part, pause in pauses.items()
    ]


def workers_to_pb(control_plane: ControlPlane, snapshot: Snapshot) -> list[pb.Worker]:
    held = Counter(request.engine for request in snapshot.requests)
    remarks = control_plane.remarks(engine.id for engine in snapshot.engines)
    others = control_plane.state.names(snapshot.now_s).others
    step_times = control_plane.planning.step_times(snapshot)
    workers = []
    for engine in snapshot.engines:
        worker = _worker_to_pb(engine, held[engine.id], step_times[engine.id], control_plane)
        worker.remarks.extend(remarks.get(engine.id, ()))
        worker.other_names.extend(sorted({name for _, name in others.get(engine.id, ())}))
        workers.append(worker)
    return workers


def worker_to_pb(control_plane: ControlPlane, engine: EngineId) -> pb.Worker:
    """The one engine; little more than its name where it was drained and is not seen any more."""
    snapshot = control_plane.state.snapshot(control_plane.clock.now_s())
    found = next((worker for worker in workers_to_pb(control_plane, snapshot) if worker.engine_id == engine), None)
    return found or pb.Worker(engine_id=engine, draining=engine in control_plane.membership_changes.membership.draining)


def _worker_to_pb(
    engine: EngineView, requests: int, step_times: StepTimeEstimates, control_plane: ControlPlane
) -> pb.Worker:
    capabilities = control_plane.state.capabilities(engine.id)
    return pb.Worker(
        engine_id=engine.id,
        url=engine.url,
        configuration=engine.configuration or "",
        health=health_to_pb(engine.health),
        health_detail=engine.health_detail,
        running=engine.running,
        waiting=engine.waiting,
        kv_capacity_tokens=engine.kv_capacity_tokens,
        kv_free_tokens=engine.kv_free_tokens,
        decode_tokens_per_s=engine.decode_tokens_per_s,
        load_index=control_plane.balance.load_index.get(engine.id) if control_plane.balance else None,
        age_s=engine.age_s,
        preemptions_total=engine.preemptions_total,
        max_sequences=engine.max_sequences,
        capabilities=capabilities_to_pb(capabilities) if capabilities else None,
        draining=engine.draining,
        pool=engine.pool,
        policy_version=engine.policy_version,
        requests=requests,
        reported=control_plane.state.reported(engine.id),
        step_times_source=step_times.source,
        step_times_detail=step_times.detail,
    )


def _node_to_pb(node: NodeState, now_s: float) -> pb.NodeStatus:
    return pb.NodeStatus(
        node_id=node.hello.node,
        kind=node.hello.kind,
        attached=node.attached,
        age_s=now_s - node.last_report_s,
        url=node.hello.url,
    )


def plan_to_pb(plan: Plan) -> pb.Plan:
    return pb.Plan(
        plan_id=plan.id,
        created_unix_s=plan.created_s,
        decision=plan.decision,
        reason_code=plan.verdict.code,
        reason=plan.verdict.detail,
        current_configuration=plan.current_configuration or "",
        proposed_configuration=plan.proposed_configuration or "",
        proposed_instances=plan.proposed_instances,
        current_makespan_s=plan.current_makespan_s,
        proposed_makespan_s=plan.proposed_makespan_s,
        redeploy_cost_s=plan.redeploy_cost_s,
        lower_bound_s=plan.lower_bound_s,
        solve_s=plan.solve_s,
        alternatives=[_alternative_to_pb(alternative) for alternative in plan.alternatives],
        inputs_age_s=plan.inputs_age_s or 0.0,
        requests_running=plan.requests_running,
        requests_waiting=plan.requests_waiting,
        bin_tokens=plan.remaining.bin_tokens,
        remaining_counts=plan.remaining.counts,
        forecast_method=plan.forecast_method,
        actual_makespan_s=plan.actual_makespan_s,
        acted=plan.acted,
        acted_detail=plan.acted_detail,
        migration_cost_s=plan.migration_cost_s,
        gap=plan.gap,
        instances=[_instance_to_pb(instance) for instance in plan.instances],
        moves_count=plan.moves_count,
        moves=[
            pb.PlannedMove(
                request_id=move.request,
                from_engine_id=move.source,
                to_engine_id=move.destination,
                method=move.method,
                cost_s=move.cost_s,
            )
            for move in plan.moves
        ],
        forgone_code=plan.forgone.code if plan.forgone else "",
        forgone=plan.forgone.detail if plan.forgone else "",
        knowledge=plan.knowledge,
        scenarios=plan.scenarios,
        correction=plan.correction,
        notes=plan.notes,
        predicted_s=plan.predicted_s,
    )


def _alternative_to_pb(alternative: Alternative) -> pb.Alternative:
    return pb.Alternative(
        configuration=alternative.configuration or "",
        instances=alternative.instances,
        makespan_s=alternative.makespan_s,
        redeploy_cost_s=alternative.redeploy_cost_s,
        infeasible_because=alternative.infeasible_because,
        name=alternative.name,
        decision=alternative.decision,
        migration_cost_s=alternative.migration_cost_s,
        low_s=alternative.low_s,
        high_s=alternative.high_s,
        parts=[pb.FleetPart(configuration=part.configuration, instances=part.instances) for part in alternative.parts],
    )


def _instance_to_pb(instance: PlannedInstance) -> pb.PlannedInstance:
    return pb.PlannedInstance(
        engine_id=instance.id,
        configuration=instance.configuration,
        gpus=instance.gpus,
        kept=instance.kept,
        requests_count=instance.requests_count,
        decode_s=instance.decode_s,
        migration_s=instance.migration_s,
        switch_s=instance.switch_s,
        request_ids=instance.requests,
    )


def _calibration_to_pb(calibration: Calibration) -> pb.PlanCalibration:
    return pb.PlanCalibration(
        steps=calibration.steps, error=calibration.error, bias=calibration.bias, correction=calibration.correction
    )


def control_to_pb(control: OperatorControl) -> pb.PlanControl:
    return pb.PlanControl(
        state=control.state,
        configuration=control.configuration or "",
        reason=control.reason,
        expires_unix_s=control.expires_s,
    )


def plan_event_to_pb(event: PlanEvent) -> pb.PlanEvent:
    return pb.PlanEvent(plan=plan_to_pb(event.plan) if event.plan else None, control=control_to_pb(event.control))


def balance_to_pb(decision: BalanceDecision, ended_moves: Iterable[MovedRequest] = ()) -> pb.Balance:
    balance = decision.balance
    return pb.Balance(
        decided_unix_s=decision.decided_s,
        load_index=[
            pb.WorkerLoad(engine_id=engine, before=before, after=balance.load_after[engine])
            for engine, before in balance.load_before.items()
        ],
        spread_before=balance.spread_before,
        spread_after=balance.spread_after,
        theta=decision.theta,
        moves=[
            pb.BalanceMove(
                request_id=move.request,
                from_engine_id=move.source,
                to_engine_id=move.destination,
                state=move.state,
            )
            for move in balance.moves
        ],
        stopped_because=balance.stopped_because,
        verdict_reason=_verdict(decision),
        inputs_age_s=decision.inputs_age_s or 0.0,
        ended_moves=map(_ended_move_to_pb, ended_moves),
        policy=decision.policy.name,
        policy_reason=decision.policy.reason,
    )


def _ended_move_to_pb(moved: MovedRequest) -> pb.EndedMove:
    move, item = moved.move, moved.item
    return pb.EndedMove(
        ended_unix_s=moved.ended_s,
        request_id=move.request,
        from_engine_id=move.from_engine,
        to_engine_id=move.to_engine,
        ordered_method=move.method,
        method=item.method or "",
        predicted_s=move.predicted_s,
        actual_s=item.duration_s,
        loaded_tokens=item.loaded_tokens,
        recomputed_tokens=item.recomputed_tokens,
    )


def entry_to_pb(entry: JournalEntry) -> pb.JournalEntry:
    return pb.JournalEntry(
        sequence=entry.sequence,
        at_unix_s=entry.at_s,
        generation=entry.generation,
        kind=entry.kind,
        subject_id=entry.subject,
        body_json=json.dumps(entry.body),
    )


def _verdict(decision: BalanceDecision) -> str:
    return f"{decision.verdict.code}: {decision.verdict.detail}"
