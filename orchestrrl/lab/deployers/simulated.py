"""A deployer in virtual time. Engines are ready when the redeployment time of their configuration has passed."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent
from orchestrrl.fleet.deployers.base import DeployedInstance, EngineLife, FixedGpusDeployer, check_free
from orchestrrl.fleet.deployers.command_line import EngineSpec
from planner.model import ConfigurationId, EngineId


class SimulatedDeployer(FixedGpusDeployer):
    """A deployer that runs simulated engines on the GPUs of one fleet. `started` is called for each engine that becomes
    ready, and `stopped` is called for each ready engine that ends."""

    keeps_gpus = "simulated engines neither sleep nor scale"

    def __init__(
        self,
        clock: Clock,
        switch_s: Mapping[ConfigurationId, float],
        started: Callable[[DeployedInstance], None],
        stopped: Callable[[EngineId], None],
        domain: str = "sim",  # domain of the engines' URLs
    ) -> None:
        self._clock = clock
        self._switch_s = switch_s
        self._started = started
        self._stopped = stopped
        self._domain = domain
        self._engines: dict[EngineId, DeployedInstance] = {}
        self._coming_up: dict[EngineId, asyncio.Task[None]] = {}
        self.starts_total = 0

    def check(self, spec: EngineSpec) -> None:
        if spec.configuration not in self._switch_s:
            known = ", ".join(sorted(self._switch_s))
            raise Permanent(f"unknown configuration {spec.configuration!r}; known: {known}")

    async def start(self, spec: EngineSpec) -> DeployedInstance:
        if (held := await self.status(spec.engine)) is not None:
            if held.spec != spec:
                raise Permanent(f"engine {spec.engine} already runs as {held.configuration} on GPUs {list(held.gpus)}")
            return held
        deployed = self._take(spec)
        self.starts_total += 1
        coming_up = self._come_up(spec.engine, self._switch_s[spec.configuration])
        self._coming_up[spec.engine] = asyncio.create_task(coming_up)
        return deployed

    async def stop(self, engine: EngineId) -> None:
        self.remove(engine)

    async def status(self, engine: EngineId) -> DeployedInstance | None:
        return self._engines.get(engine)

    async def list_engines(self) -> tuple[DeployedInstance, ...]:
        return tuple(self._engines[engine] for engine in sorted(self._engines))

    async def close(self) -> None:
        """Do nothing, because engines outlive the daemon."""

    # --- events on the machines

    def place(self, spec: EngineSpec) -> DeployedInstance:
        """Add an engine that is ready immediately."""
        deployed = self._take(spec)
        self._started(deployed)
        return deployed

    def fail(self, engine: EngineId, detail: str) -> None:
        """End an engine as a crash would. The engine's GPUs stay reserved until the engine is stopped."""
        self._engines[engine] = replace(self._engines[engine], life=EngineLife.ENDED, detail=detail)
        self._end(engine)

    def remove(self, engine: EngineId) -> None:
        """Remove an engine, as happens when it is stopped, or when it crashes and is cleaned up. The engine's GPUs are
        free immediately."""
        held = self._engines.pop(engine, None)
        if held is not None and held.life is EngineLife.ALIVE:
            self._end(engine)

    def shut_down(self) -> None:
        for coming_up in self._coming_up.values():
            coming_up.cancel()

    def _end(self, engine: EngineId) -> None:
        if (coming_up := self._coming_up.pop(engine, None)) is not None:
            coming_up.cancel()
        else:
            self._stopped(engine)

    def _take(self, spec: EngineSpec) -> DeployedInstance:
        self.check(spec)
        check_free(spec.engine, spec.gpus, {engine: held.gpus for engine, held in self._engines.items()})
        url = f"http://{spec.engine}.{self._domain}"
        deployed = DeployedInstance(spec.engine, spec.configuration, spec.gpus, url, spec=spec)
        self._engines[spec.engine] = deployed
        return deployed

    async def _come_up(self, engine: EngineId, after_s: float) -> None:
        await self._clock.sleep(after_s)
        del self._coming_up[engine]
        self._started(self._engines[engine])
