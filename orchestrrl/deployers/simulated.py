"""A deployer in virtual time: engines appear after their switch time. It owns which GPU serves whom."""

from collections.abc import Callable, Mapping

from orchestrrl.clock import Clock
from orchestrrl.deployers.base import Deployed
from orchestrrl.errors import Permanent
from planner.model import ConfigurationId, EngineId, GpuId


class SimulatedDeployer:
    """`started` and `stopped` are told of every engine that comes to life, and of every one that ends."""

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
        self._owner: dict[GpuId, EngineId] = {}
        self.starts_total = 0

    async def start(self, engine: EngineId, configuration: ConfigurationId, gpus: tuple[GpuId, ...]) -> Deployed:
        held = self._engines.get(engine)
        if held is not None:
            if (held.configuration, held.gpus) == (configuration, gpus):
                return held
            raise Permanent(f"engine {engine} runs already, as {held.configuration} on GPUs {list(held.gpus)}")
        self._take(engine, configuration, gpus)
        self.starts_total += 1
        await self._clock.sleep(self._switch_s[configuration])
        if engine not in self._engines:
            raise Permanent(f"engine {engine} was stopped before it was up")
        return self._bring_up(engine)

    def place(self, engine: EngineId, configuration: ConfigurationId, gpus: tuple[GpuId, ...]) -> Deployed:
        """An engine that is there from the beginning."""
        self._take(engine, configuration, gpus)
        return self._bring_up(engine)

    async def stop(self, engine: EngineId) -> None:
        self.kill(engine)

    def kill(self, engine: EngineId) -> None:
        """As a crash, or as a stop: its GPUs are free at once."""
        deployed = self._engines.pop(engine, None)
        if deployed is None:
            return
        for gpu in deployed.gpus:
            del self._owner[gpu]
        if deployed.url:
            self._stopped(engine)

    async def observe(self) -> tuple[Deployed, ...]:
        return tuple(self._engines[engine] for engine in sorted(self._engines))

    def _take(self, engine: EngineId, configuration: ConfigurationId, gpus: tuple[GpuId, ...]) -> None:
        if configuration not in self._switch_s:
            known = ", ".join(sorted(self._switch_s))
            raise Permanent(f"unknown configuration {configuration!r}; known: {known}")
        taken = sorted(gpu for gpu in gpus if gpu in self._owner)
        if taken:
            owners = ", ".join(f"{gpu} by {self._owner[gpu]}" for gpu in taken)
            raise Permanent(f"engine {engine} cannot have GPUs that are in use: {owners}")
        self._engines[engine] = Deployed(engine, configuration, gpus)
        self._owner.update(dict.fromkeys(gpus, engine))

    def _bring_up(self, engine: EngineId) -> Deployed:
        waited = self._engines[engine]
        up = Deployed(engine, waited.configuration, waited.gpus, f"http://{engine}.sim")
        self._engines[engine] = up
        self._started(up)
        return up
