"""The Control service's calls about redeployments: which engines there are, changed in steps, watched, taken back."""

from collections.abc import AsyncIterator

import grpc

from orchestrrl.core.errors import Permanent
from orchestrrl.core.operation import OperationState
from orchestrrl.fleet.redeployment.book import read_history
from orchestrrl.fleet.redeployment.controller import RedeploymentController
from orchestrrl.fleet.redeployment.steps import RedeploymentReport
from orchestrrl.rpc.codecs.redeployment import draft_to_pb, report_to_pb, request_from_pb
from orchestrrl.rpc.pause_service import PauseService
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.rpc.refusals import Context, status_text

# At most: the report of a large fleet has thousands of steps, and all of them change.
TOLD_EVERY_S = 0.1
NO_DEPLOYER = (
    "nothing can start engines here: name what shall in fleet.deployer of the daemon's configuration, and how they are "
    "started in fleet.launch"
)


class RedeploymentService(PauseService):
    """The part of the Control service that changes which engines run."""

    async def Redeploy(self, request: pb.RedeployRequest, context: Context) -> AsyncIterator[pb.RedeploymentReport]:
        redeployer, wish = self._redeploying(), request_from_pb(request)
        if request.dry_run:
            draft = redeployer.draft(wish)
            yield draft_to_pb(*draft)
            return
        redeployment = redeployer.begin(wish)
        seen = redeployer.report(redeployment)
        yield report_to_pb(seen)
        async for report in redeployer.watch(redeployment):
            if report != seen:
                seen = report
                yield report_to_pb(report)
            if seen.state is OperationState.RUNNING:
                await self.clock.sleep(TOLD_EVERY_S)

    async def GetRedeployment(self, request: pb.GetRedeploymentRequest, context: Context) -> pb.RedeploymentReport:
        if self.daemon.redeployer is not None:
            try:
                return report_to_pb(self.daemon.redeployer.report(request.redeployment_id))
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

    async def ListRedeployments(
        self, request: pb.ListRedeploymentsRequest, context: Context
    ) -> pb.ListRedeploymentsResponse:
        if self.daemon.redeployer is not None:
            reports = self.daemon.redeployer.history(request.limit)
        else:
            reports = self._recorded()[: request.limit or None]
        return pb.ListRedeploymentsResponse(redeployments=(report_to_pb(report, steps=False) for report in reports))

    async def CancelRedeployment(
        self, request: pb.CancelRedeploymentRequest, context: Context
    ) -> pb.RedeploymentReport:
        redeployer = self._redeploying()
        return report_to_pb(redeployer.cancel(request.redeployment_id, request.reason))

    def _recorded(self) -> list[RedeploymentReport]:
        """Of daemons that had a deployer, newest first."""
        return list(reversed(read_history(self.journal).values()))

    def _redeploying(self) -> RedeploymentController:
        if self.daemon.redeployer is None:
            raise Permanent(NO_DEPLOYER)
        return self.daemon.redeployer
