"""Circuits of Gen follow the deployment: when engines are about to serve, their traffic becomes the next period.

At that boundary the engines that left are empty and those that come have no requests yet, so no window is needed;
engines that stay keep what they need at every stage of the transition. Section 5.2 of the paper. A daemon that finds
engines running has missed their boundary: it does what it would have done once nobody has a request.
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
HEARD_WITHIN_S = 30.0  # of a daemon's start, from every engine that it has found
LOOK_S = 0.25
RESTED_S = 2.0  # between two steps, not between two requests
LOOKED_BACK = 64  # periods
WORDS_CHARACTERS = 160
SYNC_OVER_WITHIN_S = 5.0  # the pause barrier is held for no longer, nor beyond its lease


class ServingEngine(Protocol):
    """An engine that is to serve. `gpus` are the fleet's, which the site may number otherwise."""

    @property
    def engine(self) -> EngineId: ...

    @property
    def parallelism(self) -> Parallelism: ...

    @property
    def gpus(self) -> tuple[GpuId, ...]: ...


class StartingFleet(Protocol):
    """The engines as a daemon that starts comes to know them."""

    def serving(self) -> Sequence[ServingEngine]:
        """Whoever has been found to run."""
        ...

    def redeploying(self) -> bool:
        """A redeployment is under way: its end is a boundary."""
        ...

    def idle(self) -> bool | None:
        """Nobody has a request. None: not every engine has been heard of yet."""
        ...


class GenerationCircuits:
    """`settings` give what an engine of the `model` is taken to say until the next redeployment. `within_s`: serving is
    never held up for longer."""

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
        self.defects = 0  # faults of ours that were met while tending

    async def maintain(self, fleet: StartingFleet) -> None:
        """`begin`; then, whenever circuits should have changed among requests (some were lost, say), change them once
        nobody has any. Until cancelled."""
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
            logger.error("circuits of the deployment are left as they are: %s", error)
        except Exception:
            # A fault of ours is no reason to stop the daemon: engines serve on the circuits that there are.
            self.defects += 1
            logger.exception("circuits of the deployment are left as they are")

    async def after_sync(self, fleet: StartingFleet, until_s: float = inf) -> str:
        """Requests are about to be let in again: where weights were brought over circuits of their own, engines get
        theirs back. What became of it, in words; nothing where there was no such sync, or a redeployment goes before. A
        trainer that does not use the pause barrier announces `generation` itself: nobody else knows when its broadcast
        is over. `until_s`: when requests are let in anyway."""
        if not self._fabric.sync_is_up or fleet.redeploying() or not (engines := fleet.serving()):
            return ""
        within_s = min(self._within_s, SYNC_OVER_WITHIN_S, until_s - self._clock.now_s())
        if within_s <= 0:
            return "circuits stay as they are: no time is left"
        return await self._announce(engines, boundary=True, within_s=within_s)

    def _missed(self) -> bool:
        """What was announced last waits for a boundary."""
        latest = next((each for each in self._fabric.reports(LOOKED_BACK) if each.period == PERIOD), None)
        return latest is not None and latest.over and latest.code == NO_BOUNDARY

    async def begin(self, fleet: StartingFleet) -> str:
        """Circuits for engines that run already, as soon as nobody has a request; what became of it, in words. Until
        then what is up stays, and says so in the list of periods. A redeployment goes before."""
        limit_s = self._clock.now_s() + HEARD_WITHIN_S
        while not fleet.redeploying() and fleet.idle() is None and self._clock.now_s() < limit_s:
            await self._clock.sleep(LOOK_S)
        words, at_rest = "", fleet.idle() is True
        while not self._followed and not fleet.redeploying() and (engines := fleet.serving()):
            words = await self._announce(engines, boundary=at_rest)
            logger.info("engines were found running: %s", words)
            if at_rest or not await self._rest(fleet):
                break
            at_rest = True
        return words

    async def _rest(self, fleet: StartingFleet) -> bool:
        """Once nobody has had a request for a while; False where a redeployment comes first."""
        since_s = self._clock.now_s()
        while self._clock.now_s() < since_s + RESTED_S:
            await self._clock.sleep(LOOK_S)
            if fleet.redeploying():
                return False
            if fleet.idle() is not True:
                since_s = self._clock.now_s()
        return True

    async def follow(self, engines: Iterable[ServingEngine]) -> str:
        """Give these engines their circuits; what became of it, in words. Whatever happens, they may serve then."""
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
            logger.error("the circuits of the deployment cannot be chosen: %s", error)
            return f"circuits stay as they are: {error}"
        try:
            with suppress(Permanent):  # its time is over
                await within(self._clock, limit_s, self._fabric.until_over(period))
        finally:
            report = period.report
            # Also where whoever waits is told to stop: what was begun comes to its end, nothing more is begun among
            # requests. Harmless where it is over.
            self._fabric.withdraw(period, f"engines serve, at the latest after {limit_s:g} s")
        if not report.over:
            return f"circuits are still being changed after {limit_s:g} s: {report.state}"
        changed = sum(commit.moves for commit in report.commits if commit.done)  # not all that were planned, maybe
        words = f"circuits {report.state}: {changed} cross-connects changed"
        return f"{words} ({cut(f'{report.code}: {report.detail}', WORDS_CHARACTERS)})" if report.detail else words

    def intent(self, engines: Sequence[ServingEngine]) -> Intent:
        """What they will say to each other, and to those that train. Raises ValueError for a layout that does not
        fit its GPUs."""
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
    """Beyond which an engine's ranks sum up in two levels: of the servers that generate, the largest."""
    return max((len(server.gpus) for server in site.servers if site.pod[server.pod].role is PodRole.GEN), default=1)


def _trainers(site: Site) -> list[GpuId]:
    """The GPUs of PoDs that train, by number."""
    return sorted(gpu for server in site.servers if site.pod[server.pod].role is PodRole.TRAIN for gpu in server.gpus)
