"""The simulator's deployer passes the conformance suite of deployers. Its engines start in a short real time."""

from collections.abc import Callable

from orchestrrl.core.clock import WallClock
from orchestrrl.fleet.deployers.base import DeployedInstance, Deployer
from orchestrrl.fleet.deployers.conformance import BEHAVIOUR, LAST_WORDS, DeployerConformance, EngineBehaviour
from orchestrrl.lab.deployers.simulated import SimulatedDeployer
from planner.model import ConfigurationId, EngineId

UP_AFTER_S = 0.02


class TestSimulated(DeployerConformance):
    def setup_method(self) -> None:
        self.up: set[str] = set()
        self.machines: dict[str, SimulatedDeployer] = {}

    async def make_deployer(self, fleet: str) -> Deployer:
        if fleet not in self.machines:
            switch_s = {ConfigurationId(name): UP_AFTER_S for name in ("tp1", "tp2")}
            self.machines[fleet] = SimulatedDeployer(
                WallClock(), switch_s, self._started(fleet), self._stopped(fleet), domain=fleet
            )
        return self.machines[fleet]

    async def answers(self, url: str) -> bool:
        return url in self.up

    def _started(self, fleet: str) -> Callable[[DeployedInstance], None]:
        def started(deployed: DeployedInstance) -> None:
            assert deployed.spec is not None
            match EngineBehaviour(deployed.spec.environment[BEHAVIOUR]):
                case EngineBehaviour.EXITS:
                    self.machines[fleet].fail(deployed.engine, LAST_WORDS)
                case EngineBehaviour.HANGS:
                    pass
                case _:
                    self.up.add(deployed.url)

        return started

    def _stopped(self, fleet: str) -> Callable[[EngineId], None]:
        return lambda engine: self.up.discard(f"http://{engine}.{fleet}")
