"""The Control service's calls about switches: which engines there are, changed in steps, watched, taken back."""

from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from orchestrrl.core.errors import Permanent
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.fleet.redeployment.records import read_history
from orchestrrl.fleet.redeployment.steps import (
    Redeployment,
    RedeploymentReport,
    RedeploymentState,
    RedeployRequest,
    Stage,
    SwitchId,
)
from orchestrrl.rpc.codecs.redeployment import draft_to_pb, report_to_pb, wish_from_pb
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.rpc.refusals import Context, refuse, refusing, status_words

# At most: the report of a large fleet has thousands of steps, and all of them change.
TOLD_EVERY_S = 0.1
NO_DEPLOYER = (
    "nothing can start engines here: name what shall in fleet.deployer of the daemon's configuration, and how they are "
    "started in fleet.launch"
)


class RedeploymentsControl(Protocol):
    """Whoever carries switches out, one at a time. A switch runs by itself, whoever looks on."""

    def draft(self, wish: RedeployRequest) -> tuple[Redeployment, tuple[Stage, ...]]:
        """What would be done. Raises ProblemFaults with all that is wrong with the wish, Permanent where it cannot be
        now."""
        ...

    def begin(self, wish: RedeployRequest) -> SwitchId:
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

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def switch(self, request: pb.SwitchDeploymentRequest, context: Context) -> AsyncIterator[pb.SwitchReport]:
        switching, wish = await self._switching(context), wish_from_pb(request)
        if request.dry_run:
            async with refusing(context):
                draft = switching.draft(wish)
            yield draft_to_pb(*draft)
            return
        async with refusing(context):
            switch = switching.begin(wish)
        seen = switching.report(switch)
        yield report_to_pb(seen)
        async for report in switching.watch(switch):
            if report != seen:
                seen = report
                yield report_to_pb(report)
            if seen.state is RedeploymentState.RUNNING:
                await self._plane.clock.sleep(TOLD_EVERY_S)

    async def get(self, request: pb.GetSwitchRequest, context: Context) -> pb.SwitchReport:
        if self._plane.switching is not None:
            try:
                return report_to_pb(self._plane.switching.report(request.switch_id))
            except Permanent as error:
                await context.abort(grpc.StatusCode.NOT_FOUND, status_words(error))
        found = next((report for report in self._recorded() if request.switch_id in ("", report.id)), None)
        if found is None:
            wanted = f"no switch {request.switch_id!r}" if request.switch_id else "no switch has been made yet"
            await context.abort(grpc.StatusCode.NOT_FOUND, status_words(wanted))
        return report_to_pb(found)

    async def history(self, request: pb.ListDeploymentsRequest, context: Context) -> pb.ListDeploymentsResponse:
        if self._plane.switching is not None:
            reports = self._plane.switching.history(request.limit)
        else:
            reports = self._recorded()[: request.limit or None]
        return pb.ListDeploymentsResponse(switches=(report_to_pb(report, steps=False) for report in reports))

    async def cancel(self, request: pb.CancelSwitchRequest, context: Context) -> pb.SwitchReport:
        switching = await self._switching(context)
        async with refusing(context):
            return report_to_pb(switching.cancel(request.switch_id, request.reason))

    def _recorded(self) -> list[RedeploymentReport]:
        """Of daemons that had a deployer, newest first."""
        return list(reversed(read_history(self._plane.journal).values()))

    async def _switching(self, context: Context) -> RedeploymentsControl:
        if self._plane.switching is None:
            await refuse(context, Permanent(NO_DEPLOYER))
        return self._plane.switching
