"""Adapt the circuits of generation to each deployment, by announcing the traffic of the new engines as the next period.

The end of a redeployment is a boundary: the departing engines are empty and the new engines have no requests yet, so no
window is needed. Engines that stay keep their bandwidth at every stage of the transition. This module implements
section 5.2 of the paper. A daemon that finds engines running at its start has missed their boundary, so it changes the
circuits as soon as no request is running.
"""

import logging
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from math import inf
from typing import Protocol

from orchestrrl.core.clock import Clock, within
from orchestrrl.core.config.schema import FabricSettings
from orchestrrl.core.errors import OrchestrRLError, Permanent, cut
from orchestrrl.fabric.coordinator import CircuitCoordinator
from planner.cost.models import Model
from planner.fabric.deployment_intent import DeployedEngine, deployment_intent
from planner.fabric.intent import Intent
from planner.fabric.topology import PodRole, Site
from planner.fabric.windows import NO_BOUNDARY
from planner.model import EngineId, GpuId, Parallelism

logger = logging.getLogger(__name__)

PERIOD = "generation"
REPORTED_WITHIN_S = 30.0  # how long a starting daemon waits for a report of every engine that it found
LOOK_S = 0.25
RESTED_S = 2.0  # without requests: longer than the gap between two requests
LOOKED_BACK = 64  # periods
SUMMARY_CHARACTERS = 160
SYNC_OVER_WITHIN_S = 5.0  # limit on holding the pause barrier, besides its lease


class ServingEngine(Protocol):
    """An engine that serves or will serve requests. `gpus` are GPU numbers of the fleet, which may differ from those of
    the site."""

    @property
    def engine(self) -> EngineId: ...

    @property
    def parallelism(self) -> Parallelism: ...

    @property
    def gpus(self) -> tuple[GpuId, ...]: ...


class StartingFleet(Protocol):
    """The engines that a starting daemon finds."""

    def serving(self) -> Sequence[ServingEngine]:
        """Return the engines that are running."""
        ...

    def redeploying(self) -> bool:
        """Return whether a redeployment is running. When it ends, circuits can be changed at a boundary."""
        ...

    def idle(self) -> bool | None:
        """Return whether no engine has a request, or None if an engine has not reported yet."""
        ...


class GenerationCircuits:
    """Announces circuits for the deployed engines. `settings` define the traffic that each engine of the `model` is
    assumed to have until the next redeployment. `within_s` is the maximum time in seconds by which serving is delayed.
    """

    def __init__(
        self, fabric: CircuitCoordinator, model: Model, settings: FabricSettings, clock: Clock, within_s: float
    ) -> None:
        self._fabric = fabric
        self._model = model
        self._settings = settings
        self._clock = clock
        self._within_s = within_s
        self._gpus_per_server = _gpus_per_server(fabric.site)
        self._followed = False
        self.defects = 0  # internal errors caught in `maintain`

    async def maintain(self, fleet: StartingFleet) -> None:
        """Run `begin`. Then, until cancelled, carry out each change of circuits that was not possible while requests
        ran, as soon as no request is running."""
        await self._safely(self.begin(fleet))
        while True:
            await self._clock.sleep(RESTED_S)
            await self._safely(self._catch_up(fleet))

    async def _catch_up(self, fleet: StartingFleet) -> None:
        if not fleet.redeploying() and self._missed() and await self._rest(fleet):
            await self._announce(fleet.serving(), boundary=True)

    async def _safely(self, work: Awaitable[object]) -> None:
        try:
            await work
        except OrchestrRLError as error:
            logger.error("circuits of the deployment were not changed: %s", error)
        except Exception:
            # An internal error must not stop the daemon: engines serve on the existing circuits.
            self.defects += 1
            logger.exception("circuits of the deployment were not changed")

    async def after_sync(self, fleet: StartingFleet, until_s: float = inf) -> str:
        """Restore the engines' circuits after a weight sync that changed circuits, before requests resume. Returns a
        summary, or "" if no sync changed circuits, no engine serves, or a redeployment is running. Requests resume at
        the time `until_s` even if the circuits are not restored by then. A trainer that does not use the pause barrier
        must announce `generation` itself, because the daemon cannot see when the trainer's broadcast ends."""
        if not self._fabric.sync_is_up or fleet.redeploying() or not (engines := fleet.serving()):
            return ""
        within_s = min(self._within_s, SYNC_OVER_WITHIN_S, until_s - self._clock.now_s())
        if within_s <= 0:
            return "circuits were not changed: no time left"
        return await self._announce(engines, boundary=True, within_s=within_s)

    def _missed(self) -> bool:
        """Return whether the last announced period of generation ended because it had no boundary."""
        latest = next((each for each in self._fabric.reports(LOOKED_BACK) if each.period == PERIOD), None)
        return latest is not None and latest.over and latest.code == NO_BOUNDARY

    async def begin(self, fleet: StartingFleet) -> str:
        """Wait until no request is running, then set up circuits for the engines that are already running and return a
        summary. If requests may be running, the engines' traffic is first announced without a boundary. This leaves the
        existing circuits up and lists the period as waiting. Returns early if a redeployment begins."""
        limit_s = self._clock.now_s() + REPORTED_WITHIN_S
        while not fleet.redeploying() and fleet.idle() is None and self._clock.now_s() < limit_s:
            await self._clock.sleep(LOOK_S)
        summary, at_rest = "", fleet.idle() is True
        while not self._followed and not fleet.redeploying() and (engines := fleet.serving()):
            summary = await self._announce(engines, boundary=at_rest)
            logger.info("engines were found running: %s", summary)
            if at_rest or not await self._rest(fleet):
                break
            at_rest = True
        return summary

    async def _rest(self, fleet: StartingFleet) -> bool:
        """Wait until no request has been running for `RESTED_S` seconds, and return True. Return False if a
        redeployment begins first."""
        since_s = self._clock.now_s()
        while self._clock.now_s() < since_s + RESTED_S:
            await self._clock.sleep(LOOK_S)
            if fleet.redeploying():
                return False
            if fleet.idle() is not True:
                since_s = self._clock.now_s()
        return True

    async def follow(self, engines: Iterable[ServingEngine]) -> str:
        """Set up circuits for these engines and return a summary. When the call returns, the engines may serve, even if
        the circuits were not changed."""
        self._followed = True
        return await self._announce(list(engines), boundary=True)

    async def _announce(
        self, engines: Sequence[ServingEngine], *, boundary: bool, within_s: float | None = None
    ) -> str:
        limit_s = self._within_s if within_s is None else within_s
        try:
            intent = self.intent(engines)
            if not intent.traffic:
                return "no traffic beyond a GPU"
            period = self._fabric.expect(intent, boundary=boundary)
        except (OrchestrRLError, ValueError) as error:
            logger.error("circuits for the deployment cannot be chosen: %s", error)
            return f"circuits were not changed: {error}"
        try:
            with suppress(Permanent):  # the time limit was reached
                await within(self._clock, limit_s, self._fabric.until_over(period))
        finally:
            report = period.report
            # Also on cancellation: a change that has begun is completed, and no further one begins while requests run.
            # Harmless if the period is over.
            self._fabric.withdraw(period, f"engines serve, at the latest after {limit_s:g} s")
        if not report.over:
            return f"circuits are still changing after {limit_s:g} s: {report.state}"
        changed = sum(commit.moves for commit in report.commits if commit.done)  # may be fewer than planned
        summary = f"circuits {report.state}: {changed} cross-connects changed"
        return f"{summary} ({cut(f'{report.code}: {report.detail}', SUMMARY_CHARACTERS)})" if report.detail else summary

    def intent(self, engines: Sequence[ServingEngine]) -> Intent:
        """Return the traffic of these engines among themselves and with the trainers. Raises ValueError if an engine's
        layout does not match its number of GPUs."""
        first_gpu, tokens = self._settings.first_fleet_gpu, self._settings.tokens_per_period
        deployed = [
            DeployedEngine(
                each.engine, tuple(GpuId(gpu + first_gpu) for gpu in each.gpus), each.parallelism, tokens, tokens
            )
            for each in engines
        ]
        return deployment_intent(
            self._model,
            deployed,
            period=PERIOD,
            trainers=_trainers(self._fabric.site),
            per_node=self._gpus_per_server,
        )


def _gpus_per_server(site: Site) -> int:
    """Return the number of GPUs of the largest server in a generating PoD. An engine with more GPUs performs reductions
    in two levels, inside and between servers."""
    return max((len(server.gpus) for server in site.servers if site.pod[server.pod].role is PodRole.GEN), default=1)


def _trainers(site: Site) -> list[GpuId]:
    """Return the GPUs of all training PoDs, in ascending order."""
    return sorted(gpu for server in site.servers if site.pod[server.pod].role is PodRole.TRAIN for gpu in server.gpus)
