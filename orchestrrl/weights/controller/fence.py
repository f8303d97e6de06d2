"""The pause barrier as a weight sync uses it: nobody's request runs from `pause` to `resume`. What gateways do is
gateway/pause.py's."""

from collections.abc import Collection, Mapping
from typing import Protocol

from orchestrrl.core.operations import FrozenRequests
from planner.model import EngineId


class ClosedLease(Protocol):
    """The lease by which the fleet is paused. As text, who holds it, for people."""

    @property
    def id(self) -> str: ...
    @property
    def holder(self) -> str: ...
    @property
    def frozen(self) -> FrozenRequests: ...


class FleetVersions(Protocol):
    """Whether the fleet is paused, and which weights its engines have; see fleet/pause_lease.py."""

    @property
    def lease(self) -> ClosedLease | None: ...
    @property
    def versions(self) -> Mapping[EngineId, int]: ...
    @property
    def newest(self) -> int | None: ...
    @property
    def left_out(self) -> Collection[EngineId]: ...


class FleetFence(Protocol):
    """Errors are those of fleet/pause_barrier.py."""

    @property
    def state(self) -> FleetVersions: ...

    def is_manned(self) -> bool:
        """Whether a gateway is attached, which brings engines to rest. If none is, peers do."""
        ...

    async def pause(self, holder: str, *, empty: bool, lease_s: float, deadline_s: float) -> str:
        """The lease's id, once all is at rest. `empty`: engines have no requests then."""
        ...

    async def renew(self, lease: str, lease_s: float) -> None: ...

    async def resume(self, lease: str, version: int | None, without: Collection[EngineId], reason: str) -> None: ...

    def set_version(self, engines: Collection[EngineId], version: int, reason: str) -> None: ...

    def forget(self, engines: Collection[EngineId], why: str) -> None:
        """Nobody knows what they have: no requests go there, where the fleet's version is known."""
        ...
