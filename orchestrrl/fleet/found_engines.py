"""The engines that a daemon finds when it starts, and whether anybody has a request there."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from orchestrrl.core.clock import Clock
from orchestrrl.fleet.deployers.base import DeployedInstance, EngineLife
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.state import FleetState
from planner.model import EngineId


class SnapshotSource(Protocol):
    """What this needs of the control plane."""

    state: FleetState
    clock: Clock


class EngineOwner(Protocol):
    """Who owns the engines."""

    @property
    def deployed(self) -> Mapping[EngineId, DeployedInstance]: ...

    @property
    def busy(self) -> bool: ...


class FoundFleet:
    """For `GenCircuits.begin`."""

    def __init__(self, control_plane: SnapshotSource, deployment: EngineOwner) -> None:
        self._control_plane = control_plane
        self._deployment = deployment

    def serving(self) -> Sequence[EngineSpec]:
        """Of one whose record was lost nobody knows what its ranks say to each other."""
        return [
            found.spec
            for _, found in sorted(self._deployment.deployed.items())
            if found.spec is not None and found.life is EngineLife.ALIVE and not found.lent
        ]

    def redeploying(self) -> bool:
        return self._deployment.busy

    def idle(self) -> bool | None:
        """As engines and gateways say. None while one of the engines, or every gateway, has said nothing yet."""
        snapshot = self._control_plane.state.snapshot(self._control_plane.clock.now_s())
        heard = {view.id: view for view in snapshot.engines if view.age_s is not None}
        serving = [spec.engine for spec in self.serving()]
        if snapshot.requests or any(view.running or view.waiting for view in heard.values()):
            return False
        known = snapshot.requests_age_s is not None and all(engine in heard for engine in serving)
        return True if known else None
