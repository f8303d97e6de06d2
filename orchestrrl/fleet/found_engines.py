"""The engines that a daemon finds when it starts, and whether anybody has a request there."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from orchestrrl.core.clock import Clock
from orchestrrl.fleet.deployers.base import Deployed, Life
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.state import State
from planner.model import EngineId


class Plane(Protocol):
    """What this needs of the control plane."""

    state: State
    clock: Clock


class Deployment(Protocol):
    """Who owns the engines."""

    @property
    def deployed(self) -> Mapping[EngineId, Deployed]: ...

    @property
    def busy(self) -> bool: ...


class FoundFleet:
    """For `GenCircuits.begin`."""

    def __init__(self, plane: Plane, deployment: Deployment) -> None:
        self._plane = plane
        self._deployment = deployment

    def serving(self) -> Sequence[EngineSpec]:
        """Of one whose record was lost nobody knows what its ranks say to each other."""
        return [
            found.spec
            for _, found in sorted(self._deployment.deployed.items())
            if found.spec is not None and found.life is Life.ALIVE and not found.lent
        ]

    def switching(self) -> bool:
        return self._deployment.busy

    def idle(self) -> bool | None:
        """As engines and gateways say. None while one of the engines, or every gateway, has said nothing yet."""
        snapshot = self._plane.state.snapshot(self._plane.clock.now_s())
        heard = {view.id: view for view in snapshot.engines if view.age_s is not None}
        serving = [spec.engine for spec in self.serving()]
        if snapshot.requests or any(view.running or view.waiting for view in heard.values()):
            return False
        known = snapshot.requests_age_s is not None and all(engine in heard for engine in serving)
        return True if known else None
