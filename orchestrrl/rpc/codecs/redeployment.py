"""How redeployments are written as messages of the Control service."""

from collections.abc import Sequence
from dataclasses import replace

from orchestrrl.core.operation import OperationState, Stage, StepDirection, StepReport, steps_in
from orchestrrl.fleet.redeployment.steps import (
    Redeployment,
    RedeploymentId,
    RedeploymentReport,
    RedeployRequest,
    RedeployStep,
)
from orchestrrl.rpc.codec import Codec, Flat, Via
from orchestrrl.rpc.pb import control_pb2 as pb

PLANNED = "planned"

# How an engine is started stays in the daemon.
_ENGINE = Via(
    to_pb=lambda spec: pb.RedeployEngine(engine_id=spec.engine, configuration=spec.configuration, gpus=spec.gpus)
)
REPORT = Codec(
    RedeploymentReport,
    pb.RedeploymentReport,
    id="redeployment_id",
    old=("old_engines", _ENGINE),
    new=("new_engines", _ENGINE),
    steps=Codec(StepReport[RedeployStep], pb.RedeployStep, step=Flat()),
)


def request_from_pb(message: pb.RedeployRequest) -> RedeployRequest:
    targets = tuple((target.configuration, target.engines) for target in message.targets)
    return RedeployRequest(targets, message.plan_id, message.reason)


def draft_to_pb(redeployment: Redeployment, stages: Sequence[Stage[RedeployStep]]) -> pb.RedeploymentReport:
    """What would be done. It has no id, and nothing can be asked of it later."""
    message = REPORT.to_pb(
        RedeploymentReport(
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
    )
    message.state = PLANNED
    return message


def report_to_pb(report: RedeploymentReport, *, steps: bool = True) -> pb.RedeploymentReport:
    """`steps` False: without them, where many are listed: a large fleet's are thousands."""
    return REPORT.to_pb(report if steps else replace(report, steps=()))


def notable_to_pb(report: RedeploymentReport | None) -> pb.RedeploymentReport | None:
    """The report where the fleet's status has to tell of it: it is under way, or has left engines missing."""
    if report is None or report.state not in (OperationState.RUNNING, OperationState.DEGRADED):
        return None
    return report_to_pb(report)
