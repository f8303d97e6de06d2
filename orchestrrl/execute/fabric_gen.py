"""Circuits of Gen follow the deployment: when engines are about to serve, their traffic becomes the next period.

At that boundary the engines that left are empty and those that come have no requests yet, so no window is needed;
engines that stay keep what they need at every stage of the transition. Section 5.2 of the paper.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrrl.clock import Clock
from orchestrrl.errors import OrchestrRLError
from orchestrrl.execute.fabric import Coordinator
from planner.fabric.deployment_intent import DeployedEngine, deployment_intent
from planner.fabric.intent import Intent
from planner.fabric.topology import Role, Site
from planner.model import EngineId, GpuId, Parallelism
from planner.models import Model

logger = logging.getLogger(__name__)

PERIOD = "generation"


class Serving(Protocol):
    """An engine that is to serve. `gpus` are the fleet's, which the site may number otherwise."""

    @property
    def engine(self) -> EngineId: ...

    @property
    def parallelism(self) -> Parallelism: ...

    @property
    def gpus(self) -> tuple[GpuId, ...]: ...


@dataclass(frozen=True, slots=True)
class Volumes:
    """What an engine is taken to say until the next switch."""

    model: Model
    tokens: float  # that an engine's sequences decode
    first_gpu: int = 0  # of the site, which is the fleet's GPU 0


class GenCircuits:
    """`within_s`: serving is never held up for longer."""

    def __init__(
        self,
        fabric: Coordinator,
        volumes: Volumes,
        clock: Clock,
        within_s: float,
    ) -> None:
        self._fabric = fabric
        self._volumes = volumes
        self._clock = clock
        self._within_s = within_s

    async def follow(self, engines: Iterable[Serving]) -> str:
        """Give these engines their circuits; what became of it, in words. Whatever happens, they may serve then."""
        try:
            intent = self.intent(list(engines))
            if not intent.traffic:
                return "no traffic beyond a GPU"
            period = self._fabric.expect(intent, boundary=True)
        except (OrchestrRLError, ValueError) as error:
            logger.error("the circuits of the deployment cannot be chosen: %s", error)
            return f"circuits stay as they are: {error}"
        over = asyncio.ensure_future(self._fabric.until_over(period))
        alarm = asyncio.ensure_future(self._clock.sleep(self._within_s))
        try:
            await asyncio.wait({over, alarm}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            alarm.cancel()
            over.cancel()
        report = period.report
        if not report.over:
            return f"circuits are still being changed after {self._within_s:g} s: {report.state}"
        words = f"circuits {report.state}: {report.moves} cross-connects changed"
        return f"{words} ({report.code}: {report.detail})" if report.detail else words

    def intent(self, engines: Sequence[Serving]) -> Intent:
        """What they will say to each other, and to those that train. Raises ValueError for a layout that does not
        fit its GPUs."""
        first_gpu, tokens = self._volumes.first_gpu, self._volumes.tokens
        deployed = [
            DeployedEngine(
                each.engine,
                tuple(GpuId(gpu + first_gpu) for gpu in each.gpus),
                each.parallelism,
                tokens,
                tokens,
            )
            for each in engines
        ]
        return deployment_intent(self._volumes.model, deployed, period=PERIOD, trainers=_trainers(self._fabric.site))


def _trainers(site: Site) -> list[GpuId]:
    """The GPUs of PoDs that train, by number."""
    return sorted(gpu for server in site.servers if site.pod[server.pod].role is Role.TRAIN for gpu in server.gpus)
