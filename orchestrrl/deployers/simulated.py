"""A deployer in virtual time: engines answer after their switch time. It owns which GPU serves whom."""

import asyncio
from collections.abc import Callable, Mapping

from orchestrrl.clock import Clock
from orchestrrl.deployers.base import Deployed
from orchestrrl.deployers.command_line import EngineSpec
from orchestrrl.errors import Permanent
from planner.model import ConfigurationId, EngineId, GpuId


class SimulatedDeployer:
    """`started` and `stopped` are told of every engine that comes to life, and of every one that ends."""

    can_lend = False
    can_scale = False

    def __init__(
        self,
        clock: Clock,
        switch_s: Mapping[ConfigurationId, float],
        started: Callable[[Deployed], None],
        stopped: Callable[[EngineId], None],
    ) -> None:
        self._clock = clock
        self._switch_s = switch_s
        self._started = started
        self._stopped = stopped
        self._engines: dict[EngineId, Deployed] = {}
        self._starting: dict[EngineId, asyncio.Task[None]] = {}
        self._owner: dict[GpuId, EngineId] = {}
        self.starts_total = 0

    def check(self, spec: EngineSpec) -> None:
        if spec.configuration not in self._switch_s:
            known = ", ".join(sorted(self._switch_s))
            raise Permanent(f"unknown configuration {spec.configuration!r}; known: {known}")

    async def start(self, spec: EngineSpec) -> Deployed:
        held = self._engines.get(spec.engine)
        if held is not None:
            if held.spec == spec:
                return held
            raise Permanent(f"engine {spec.engine} runs already, as {held.configuration} on GPUs {list(held.gpus)}")
        self._take(spec)
        self.starts_total += 1
        self._starting[spec.engine] = asyncio.create_task(self._come_up(spec))
        return self._engines[spec.engine]

    def place(self, spec: EngineSpec) -> Deployed:
        """An engine that is there from the beginning."""
        self._take(spec)
        self._started(self._engines[spec.engine])
        return self._engines[spec.engine]

    def answers(self, engine: EngineId) -> bool:
        """It has come up by now."""
        return engine in self._engines and engine not in self._starting

    async def stop(self, engine: EngineId) -> None:
        self.kill(engine)

    def kill(self, engine: EngineId) -> None:
        """As a crash, or as a stop: its GPUs are free at once."""
        deployed = self._engines.pop(engine, None)
        if deployed is None:
            return
        for gpu in deployed.gpus:
            del self._owner[gpu]
        starting = self._starting.pop(engine, None)
        if starting is not None:
            starting.cancel()
        else:
            self._stopped(engine)

    async def status(self, engine: EngineId) -> Deployed | None:
        return self._engines.get(engine)

    async def list_engines(self) -> tuple[Deployed, ...]:
        return tuple(self._engines[engine] for engine in sorted(self._engines))

    async def lend(self, engine: EngineId, lent: bool) -> None:
        raise Permanent(f"engine {engine} does not sleep: simulated engines of the cluster are stopped")

    async def scale(self, spec: EngineSpec) -> Deployed:
        raise Permanent(f"engine {spec.engine} does not scale: simulated engines of the cluster are started anew")

    async def close(self) -> None:
        for starting in self._starting.values():
            starting.cancel()

    def _take(self, spec: EngineSpec) -> None:
        self.check(spec)
        taken = sorted(gpu for gpu in spec.gpus if gpu in self._owner)
        if taken:
            owners = ", ".join(f"{gpu} by {self._owner[gpu]}" for gpu in taken)
            raise Permanent(f"engine {spec.engine} cannot have GPUs that are in use: {owners}")
        url = f"http://{spec.engine}.sim"
        self._engines[spec.engine] = Deployed(spec.engine, spec.configuration, spec.gpus, url, spec=spec)
        self._owner.update(dict.fromkeys(spec.gpus, spec.engine))

    async def _come_up(self, spec: EngineSpec) -> None:
        await self._clock.sleep(self._switch_s[spec.configuration])
        del self._starting[spec.engine]
        self._started(self._engines[spec.engine])
