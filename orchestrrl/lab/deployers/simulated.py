"""A deployer in virtual time: engines answer after their redeployment time. Which GPU serves whom outlives each
deployer."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent
from orchestrrl.fleet.deployers.base import DeployedInstance, EngineLife
from orchestrrl.fleet.deployers.command_line import EngineSpec
from planner.model import ConfigurationId, EngineId, GpuId


@dataclass(slots=True)
class _Engine:
    deployed: DeployedInstance
    coming_up: asyncio.Task[None] | None = None  # None: it has come up


class SimulatedMachines:
    """The GPUs of one fleet, and the engines on them. `started` and `stopped` are told of every engine that comes to
    life, and of every one that ends."""

    def __init__(
        self,
        clock: Clock,
        switch_s: Mapping[ConfigurationId, float],
        started: Callable[[DeployedInstance], None],
        stopped: Callable[[EngineId], None],
        domain: str = "sim",  # of their URLs
    ) -> None:
        self._clock = clock
        self._switch_s = switch_s
        self._started = started
        self._stopped = stopped
        self._domain = domain
        self._engines: dict[EngineId, _Engine] = {}
        self.starts_total = 0

    @property
    def engines(self) -> tuple[DeployedInstance, ...]:
        """By id."""
        return tuple(self._engines[engine].deployed for engine in sorted(self._engines))

    def get(self, engine: EngineId) -> DeployedInstance | None:
        held = self._engines.get(engine)
        return None if held is None else held.deployed

    def check(self, spec: EngineSpec) -> None:
        """Raises Permanent for a configuration that nobody knows."""
        if spec.configuration not in self._switch_s:
            known = ", ".join(sorted(self._switch_s))
            raise Permanent(f"unknown configuration {spec.configuration!r}; known: {known}")

    def start(self, spec: EngineSpec) -> DeployedInstance:
        engine = self._take(spec)
        self.starts_total += 1
        engine.coming_up = asyncio.create_task(self._come_up(engine, self._switch_s[spec.configuration]))
        return engine.deployed

    def place(self, spec: EngineSpec) -> DeployedInstance:
        """An engine that is there from the beginning."""
        engine = self._take(spec)
        self._started(engine.deployed)
        return engine.deployed

    def fail(self, engine: EngineId, detail: str) -> None:
        """It ends by itself: its GPUs are its own until somebody clears it away."""
        held = self._engines[engine]
        held.deployed = replace(held.deployed, life=EngineLife.ENDED, detail=detail)
        self._end(held)

    def remove(self, engine: EngineId) -> None:
        """As a stop, or as a crash after which somebody has cleared up: its GPUs are free at once."""
        held = self._engines.pop(engine, None)
        if held is not None and held.deployed.life is EngineLife.ALIVE:
            self._end(held)

    def become(self, deployed: DeployedInstance) -> None:
        """What is told of an engine. Raises Permanent for GPUs that another has."""
        self._check_free(deployed.engine, deployed.gpus if not deployed.lent else ())
        self._engines[deployed.engine].deployed = deployed

    def close(self) -> None:
        for engine in self._engines.values():
            if engine.coming_up is not None:
                engine.coming_up.cancel()

    def _end(self, engine: _Engine) -> None:
        if engine.coming_up is not None:
            engine.coming_up.cancel()
        else:
            self._stopped(engine.deployed.engine)

    def _take(self, spec: EngineSpec) -> _Engine:
        self.check(spec)
        self._check_free(spec.engine, spec.gpus)
        url = f"http://{spec.engine}.{self._domain}"
        engine = _Engine(DeployedInstance(spec.engine, spec.configuration, spec.gpus, url, spec=spec))
        self._engines[spec.engine] = engine
        return engine

    def _check_free(self, engine: EngineId, gpus: tuple[GpuId, ...]) -> None:
        others = (held.deployed for held in self._engines.values() if not held.deployed.lent)
        owner = {gpu: other.engine for other in others if other.engine != engine for gpu in other.gpus}
        if taken := sorted(gpu for gpu in gpus if gpu in owner):
            owners = ", ".join(f"{gpu} by {owner[gpu]}" for gpu in taken)
            raise Permanent(f"engine {engine} cannot have GPUs that are in use: {owners}")

    async def _come_up(self, engine: _Engine, after_s: float) -> None:
        await self._clock.sleep(after_s)
        engine.coming_up = None
        self._started(engine.deployed)


class SimulatedDeployer:
    """One daemon's hands on the machines."""

    can_lend = True
    can_scale = True

    def __init__(self, machines: SimulatedMachines) -> None:
        self._machines = machines

    def check(self, spec: EngineSpec) -> None:
        self._machines.check(spec)

    async def start(self, spec: EngineSpec) -> DeployedInstance:
        held = self._machines.get(spec.engine)
        if held is None:
            return self._machines.start(spec)
        if held.spec != spec:
            raise Permanent(f"engine {spec.engine} runs already, as {held.configuration} on GPUs {list(held.gpus)}")
        return held

    async def stop(self, engine: EngineId) -> None:
        self._machines.remove(engine)

    async def status(self, engine: EngineId) -> DeployedInstance | None:
        return self._machines.get(engine)

    async def list_engines(self) -> tuple[DeployedInstance, ...]:
        return self._machines.engines

    async def lend(self, engine: EngineId, lent: bool) -> None:
        held = self._machines.get(engine)
        if held is None:
            raise Permanent(f"there is no engine {engine} that could lend its GPUs")
        self._machines.become(replace(held, lent=lent))

    async def scale(self, spec: EngineSpec) -> DeployedInstance:
        held = self._machines.get(spec.engine)
        if held is None or held.life is not EngineLife.ALIVE:
            raise Permanent(f"there is no engine {spec.engine} that runs and could be scaled")
        scaled = replace(held, configuration=spec.configuration, gpus=spec.gpus, spec=spec)
        self._machines.become(scaled)
        return scaled

    async def close(self) -> None:
        """There is nothing to release."""
