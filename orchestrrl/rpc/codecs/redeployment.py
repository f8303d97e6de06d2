"""Between redeployments and the Control service's messages."""

from collections.abc import Sequence

from orchestrrl.core.operation import OperationState, Stage, StepDirection, StepReport, StepState, steps_in
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.redeployment.steps import (
    Redeployment,
    RedeploymentReport,
    RedeployRequest,
    RedeployStep,
)
from orchestrrl.rpc.pb import control_pb2 as pb

PLANNED = "planned"


def pause_request_from_pb(message: pb.RedeployRequest) -> RedeployRequest:
    targets = tuple((target.configuration, target.engines) for target in message.targets)
    return RedeployRequest(targets, message.plan_id, message.reason)


def draft_to_pb(redeployment: Redeployment, stages: Sequence[Stage[RedeployStep]]) -> pb.RedeploymentReport:
    """What would be done. It has no id, and nothing can be asked of it later."""
    return pb.RedeploymentReport(
        plan_id=redeployment.plan,
        reason=redeployment.reason,
        created_unix_s=redeployment.created_s,
        state=PLANNED,
        old_engines=map(_engine_to_pb, redeployment.old),
        new_engines=map(_engine_to_pb, redeployment.new),
        engine_ids=[spec.engine for spec in redeployment.old],
        steps=[_step_to_pb(step, StepDirection.FORWARD, StepState.PENDING) for step in steps_in(stages)],
    )


def report_to_pb(report: RedeploymentReport, *, steps: bool = True) -> pb.RedeploymentReport:
    """`steps` False: without them, where many are listed: a large fleet's are thousands."""
    return pb.RedeploymentReport(
        redeployment_id=report.id,
        plan_id=report.plan,
        reason=report.reason,
        created_unix_s=report.created_s,
        state=report.state,
        old_engines=map(_engine_to_pb, report.old),
        new_engines=map(_engine_to_pb, report.new),
        engine_ids=report.engines,
        steps=map(_taken_to_pb, report.steps if steps else ()),
        detail=report.detail,
        ended_unix_s=report.ended_s,
        requests_moved=report.requests_moved,
        requests_parked=report.requests_parked,
        closed_s=report.closed_s,
    )


def notable_to_pb(report: RedeploymentReport | None) -> pb.RedeploymentReport | None:
    """The report where the fleet's status has to tell of it: it is under way, or has left engines missing."""
    if report is None or report.state not in (OperationState.RUNNING, OperationState.DEGRADED):
        return None
    return report_to_pb(report)


def _engine_to_pb(spec: EngineSpec) -> pb.RedeployEngine:
    return pb.RedeployEngine(engine_id=spec.engine, configuration=spec.configuration, gpus=spec.gpus)


def _taken_to_pb(taken: StepReport[RedeployStep]) -> pb.RedeployStep:
    message = _step_to_pb(taken.step, taken.direction, taken.state)
    message.detail = taken.detail
    if taken.began_s is not None:
        message.began_unix_s = taken.began_s
    if taken.elapsed_s is not None:
        message.elapsed_s = taken.elapsed_s
    return message


def _step_to_pb(step: RedeployStep, direction: StepDirection, state: StepState) -> pb.RedeployStep:
    return pb.RedeployStep(
        number=step.number,
        stage=step.stage,
        kind=step.kind,
        engine_id=step.engine or "",
        direction=direction,
        state=state,
        within_s=step.within_s,
    )
