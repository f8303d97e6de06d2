"""The engines that a daemon finds when it starts, and whether anybody has a request there."""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrrl.core.clock import Clock
from orchestrrl.fleet.deployers.base import EngineLife
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.redeployment.controller import RedeploymentController
from orchestrrl.fleet.state import FleetState


@dataclass(frozen=True, slots=True)
class FoundFleet:
    """For `GenerationCircuits`."""

    state: FleetState
    clock: Clock
    redeployer: RedeploymentController

    def serving(self) -> Sequence[EngineSpec]:
        """Of one whose record was lost nobody knows what its ranks say to each other."""
        return [
            found.spec
            for _, found in sorted(self.redeployer.deployed.items())
            if found.spec is not None and found.life is EngineLife.ALIVE and not found.lent
        ]

    def redeploying(self) -> bool:
        return self.redeployer.busy

    def idle(self) -> bool | None:
        """As engines and gateways say. None while one of the engines, or every gateway, has said nothing yet."""
        snapshot = self.state.snapshot(self.clock.now_s())
        heard = {view.id: view for view in snapshot.engines if view.age_s is not None}
        serving = [spec.engine for spec in self.serving()]
        if snapshot.requests or any(view.running or view.waiting for view in heard.values()):
            return False
        known = snapshot.requests_age_s is not None and all(engine in heard for engine in serving)
        return True if known else None
