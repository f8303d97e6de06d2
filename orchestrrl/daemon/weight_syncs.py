"""The daemon's weight syncs, put together: who asks peers, who closes the pause barrier, whose circuits serve."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from orchestrrl.core.config.schema import Config
from orchestrrl.core.nodes import NodeRegistry
from orchestrrl.core.offload import Offload
from orchestrrl.core.operations import FrozenRequests, PauseMode
from orchestrrl.core.operator_pauses import PauseRegistry
from orchestrrl.daemon.fleet_coordinator import FleetCoordinator
from orchestrrl.daemon.weight_circuits import circuits_of
from orchestrrl.fabric.coordinator import CircuitCoordinator
from orchestrrl.fleet.pause_barrier import PauseBarrier, PauseRequest
from orchestrrl.fleet.pause_lease import PauseState
from orchestrrl.fleet.redeployment.turn import DeploymentTurn
from orchestrrl.weights.controller.controller import WeightSync
from orchestrrl.weights.controller.peer_hub import PeerHub
from orchestrrl.weights.controller.stale_versions import StaleVersions
from orchestrrl.weights.controller.state import EngineNow
from planner.model import EngineHealth, EngineId


@dataclass(frozen=True, slots=True)
class WeightSyncParts:
    """`syncs` is kept running as a task; `hub` is whom peers attach to."""

    hub: PeerHub
    syncs: WeightSync


def weights_of(
    config: Config,
    fleet: FleetCoordinator,
    fabric: CircuitCoordinator | None,
    turn: DeploymentTurn,
    stale: StaleVersions,
    pause_registry: PauseRegistry,
    offload: Offload,
) -> WeightSyncParts:
    """For the daemon."""
    settings, clock, journal = config.weights, fleet.clock, fleet.journal
    hub = PeerHub(clock, journal.generation, settings.patience_s, config.limits.nodes)

    def engines() -> Mapping[EngineId, EngineNow]:
        return {
            view.id: EngineNow(
                str(view.configuration or ""), view.health in (EngineHealth.OK, EngineHealth.SLOW), view.url
            )
            for view in fleet.state.engines(clock.now_s())
        }

    syncs = WeightSync(
        hub,
        BarrierFence(fleet.barrier, fleet.nodes, lambda version: source_of(version, hub)),
        circuits_of(config, fabric, lambda: {id: state.peer for id, state in hub.peers.items()}),
        journal,
        pause_registry,
        clock,
        settings,
        engines=engines,
        deploying=lambda: turn.busy,
        stale=stale,
        offload=offload,
    )
    return WeightSyncParts(hub, syncs)


def source_of(version: int, hub: PeerHub) -> str:
    """The folder of a version that engines which are started later load it from: where every peer of engines has it
    under the same path. On one machine one peer is enough for that."""
    peers = [peer for peer in hub.attached().values() if peer.engines or peer.serves or peer.ranks_of]
    folders = {peer.folder for peer in peers}
    if len(folders) != 1 or "" in folders:
        return ""
    has = all(any(held.version == version and held.complete for held in peer.held) for peer in peers)
    return f"{folders.pop()}/v{version}" if has else ""


class BarrierFence:
    """Over the fleet's barrier. `source` tells the folder that has a version wherever engines are started later; empty:
    there is none that all of them could read."""

    def __init__(self, barrier: PauseBarrier, nodes: NodeRegistry, source: Callable[[int], str]) -> None:
        self._barrier = barrier
        self._nodes = nodes
        self._source = source

    @property
    def state(self) -> PauseState:
        return self._barrier.state

    def is_manned(self) -> bool:
        return bool(self._nodes.gateways())

    async def pause(self, holder: str, *, empty: bool, lease_s: float, deadline_s: float) -> str:
        frozen = FrozenRequests.TAKEN_BACK if empty else FrozenRequests.RECOMPUTE
        wish = PauseRequest(PauseMode.KEEP, frozen, holder, lease_s, deadline_s, weights_change=True)
        state = await self._barrier.pause(wish)
        assert state.lease is not None
        return state.lease.id

    async def renew(self, lease: str, lease_s: float) -> None:
        await self._barrier.renew(lease, lease_s)

    async def resume(self, lease: str, version: int | None, without: Collection[EngineId], reason: str) -> None:
        source = "" if version is None else self._source(version)
        await self._barrier.resume(lease, version, without, reason, source)

    def set_version(self, engines: Collection[EngineId], version: int, reason: str) -> None:
        self._barrier.set_version(engines, version, reason, self._source(version))

    def forget(self, engines: Collection[EngineId], why: str) -> None:
        self._barrier.forget(engines, why)
