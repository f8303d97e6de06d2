"""The Control service's calls about redeployments: which engines there are, changed in steps, watched, taken back."""

from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from orchestrrl.core.errors import Permanent
from orchestrrl.core.operation import OperationState, Stage
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.fleet.redeployment.records import read_history
from orchestrrl.fleet.redeployment.steps import (
    Redeployment,
    RedeploymentId,
    RedeploymentReport,
    RedeployRequest,
    RedeployStep,
)
from orchestrrl.rpc.codecs.redeployment import draft_to_pb, report_to_pb, request_from_pb
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.rpc.refusals import Context, refuse, refusing, status_text

# At most: the report of a large fleet has thousands of steps, and all of them change.
TOLD_EVERY_S = 0.1
NO_DEPLOYER = (
    "nothing can start engines here: name what shall in fleet.deployer of the daemon's configuration, and how they are "
    "started in fleet.launch"
)


class RedeploymentsControl(Protocol):
    """Whoever carries redeployments out, one at a time. A redeployment runs by itself, whoever looks on."""

    def draft(self, wish: RedeployRequest) -> tuple[Redeployment, tuple[Stage[RedeployStep], ...]]:
        """What would be done. Raises ProblemFaults with all that is wrong with the wish, Permanent where it cannot be
        now."""
        ...

    def begin(self, wish: RedeployRequest) -> RedeploymentId:
        """Raises as `draft` does."""
        ...

    def report(self, id: str = "") -> RedeploymentReport:
        """Empty: the one under way, else the last. Raises Permanent where there is none."""
        ...

    def watch(self, id: str) -> AsyncIterator[RedeploymentReport]:
        """The report whenever it changes; ends after the last."""
        ...

    def cancel(self, id: str, reason: str) -> RedeploymentReport:
        """Empty: the one under way. Raises Permanent where it has ended or can no longer go back."""
        ...

    def history(self, limit: int) -> list[RedeploymentReport]:
        """Newest first; 0: all that are remembered."""
        ...


class RedeploymentService:
    """Each method answers the call of its name."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._control_plane = control_plane

    async def redeploy(self, request: pb.RedeployRequest, context: Context) -> AsyncIterator[pb.RedeploymentReport]:
        redeployer, wish = await self._redeploying(context), request_from_pb(request)
        if request.dry_run:
            async with refusing(context):
                draft = redeployer.draft(wish)
            yield draft_to_pb(*draft)
            return
        async with refusing(context):
            redeployment = redeployer.begin(wish)
        seen = redeployer.report(redeployment)
        yield report_to_pb(seen)
        async for report in redeployer.watch(redeployment):
            if report != seen:
                seen = report
                yield report_to_pb(report)
            if seen.state is OperationState.RUNNING:
                await self._control_plane.clock.sleep(TOLD_EVERY_S)

    async def get(self, request: pb.GetRedeploymentRequest, context: Context) -> pb.RedeploymentReport:
        if self._control_plane.redeployer is not None:
            try:
                return report_to_pb(self._control_plane.redeployer.report(request.redeployment_id))
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
        return report_to_pb(found)

    async def history(self, request: pb.ListRedeploymentsRequest, context: Context) -> pb.ListRedeploymentsResponse:
        if self._control_plane.redeployer is not None:
            reports = self._control_plane.redeployer.history(request.limit)
        else:
            reports = self._recorded()[: request.limit or None]
        return pb.ListRedeploymentsResponse(redeployments=(report_to_pb(report, steps=False) for report in reports))

    async def cancel(self, request: pb.CancelRedeploymentRequest, context: Context) -> pb.RedeploymentReport:
        redeployer = await self._redeploying(context)
        async with refusing(context):
            return report_to_pb(redeployer.cancel(request.redeployment_id, request.reason))

    def _recorded(self) -> list[RedeploymentReport]:
        """Of daemons that had a deployer, newest first."""
        return list(reversed(read_history(self._control_plane.journal).values()))

    async def _redeploying(self, context: Context) -> RedeploymentsControl:
        if self._control_plane.redeployer is None:
            await refuse(context, Permanent(NO_DEPLOYER))
        return self._control_plane.redeployer
