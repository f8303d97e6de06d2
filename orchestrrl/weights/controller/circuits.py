"""The network of a weight sync: what the controller asks of circuits, and a network without any."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from orchestrrl.core.config.weights import NetworkSettings
from orchestrrl.weights.controller.planning import PlannedSync
from orchestrrl.weights.controller.reports import SyncPhase
from orchestrrl.weights.model import Peer
from planner.model import PeerId
from planner.sync_tree.network import NetworkStation, SyncNetwork

OnPhase = Callable[[SyncPhase], None]
Peers = Callable[[], Mapping[PeerId, Peer]]


@dataclass(frozen=True, slots=True)
class BroughtUp:
    """The network as it really is, and what of the circuits is not as the plan had it, and why; nothing: all is, and
    the plan holds as it was made."""

    network: SyncNetwork
    notes: tuple[str, ...] = ()


class SyncCircuits(Protocol):
    """What the coordinator of syncs asks for."""

    def network(self) -> SyncNetwork:
        """What a sync could have."""
        ...

    async def bring_up(
        self, sync_id: str, planned: PlannedSync, on_phase: OnPhase, *, still: bool = False
    ) -> BroughtUp:
        """`still`: the trainer sends nothing until this is over."""
        ...

    async def tear_down(self, sync_id: str) -> tuple[str, ...]:
        """What became of it, in words."""
        ...


class PacketNetwork:
    """Without an optical fabric: `weights.network` of the configuration, and where peers say they are."""

    def __init__(self, settings: NetworkSettings, peers: Peers) -> None:
        self._settings = settings
        self._peers = peers

    def network(self) -> SyncNetwork:
        settings = self._settings
        return SyncNetwork(
            settings.link_gbps,
            {id: named_station(peer, settings.nic_gbps) for id, peer in self._peers().items()},
            {pod.id: pod.boundary_circuits for pod in settings.pods},
            {tor.id: tor.circuits for tor in settings.tors},
        )

    async def bring_up(
        self, sync_id: str, planned: PlannedSync, on_phase: OnPhase, *, still: bool = False
    ) -> BroughtUp:
        return BroughtUp(self.network())

    async def tear_down(self, sync_id: str) -> tuple[str, ...]:
        return ()


def named_station(peer: Peer, nic_gbps: float) -> NetworkStation:
    return NetworkStation(peer.place.pod, peer.place.tor, peer.place.nic_gbps or nic_gbps)
