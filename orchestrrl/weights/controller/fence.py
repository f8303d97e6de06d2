"""The gate as a weight sync uses it: nobody's request runs from `pause` to `resume`. What gateways do is
gateway/pause.py's."""

from collections.abc import Callable, Collection
from typing import Protocol

from orchestrrl.core.nodes import NodeRegistry
from orchestrrl.core.operations import FrozenRequests
from orchestrrl.engines.base import PauseMode
from orchestrrl.fleet.pause_barrier import GateKeeper, GateWish
from orchestrrl.fleet.pause_lease import GateState
from planner.model import EngineId


class Fence(Protocol):
    """Errors are GateKeeper's."""

    @property
    def state(self) -> GateState: ...

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

    def tell_restarts(self, restarted: Callable[[EngineId], None]) -> None:
        """It is called with each engine of which agents see that it has lost what it had."""
        ...


class GateFence:
    """Over the fleet's gate. `source` tells the folder that has a version wherever engines are started later; empty:
    there is none that all of them could read."""

    def __init__(self, gate: GateKeeper, nodes: NodeRegistry, source: Callable[[int], str]) -> None:
        self._gate = gate
        self._nodes = nodes
        self._source = source

    @property
    def state(self) -> GateState:
        return self._gate.state

    def is_manned(self) -> bool:
        return bool(self._nodes.gateways())

    async def pause(self, holder: str, *, empty: bool, lease_s: float, deadline_s: float) -> str:
        frozen = FrozenRequests.TAKEN_BACK if empty else FrozenRequests.RECOMPUTE
        wish = GateWish(PauseMode.KEEP, frozen, holder, lease_s, deadline_s, weights_change=True)
        state = await self._gate.pause(wish)
        assert state.lease is not None
        return state.lease.id

    async def renew(self, lease: str, lease_s: float) -> None:
        await self._gate.renew(lease, lease_s)

    async def resume(self, lease: str, version: int | None, without: Collection[EngineId], reason: str) -> None:
        source = "" if version is None else self._source(version)
        await self._gate.resume(lease, version, without, reason, source)

    def set_version(self, engines: Collection[EngineId], version: int, reason: str) -> None:
        self._gate.set_version(engines, version, reason, self._source(version))

    def forget(self, engines: Collection[EngineId], why: str) -> None:
        self._gate.forget(engines, why)

    def tell_restarts(self, restarted: Callable[[EngineId], None]) -> None:
        self._gate.restarted = restarted
