"""The contract of a simulated fabric: its network in a communication period, components, and options' faults."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Any, TypeVar

from pydantic import Field

from orchestrrl.lab.sim.net.model import GpuFlows, Ints, LinkNetwork, Servers
from planner.fabric.generate import ImpossibleSite, ShapeFault

Shares = Mapping[int, float]
Count = Annotated[int, Field(ge=1)]
Radix = Annotated[int, Field(ge=2)]  # ports of a packet switch


class FabricStage(StrEnum):
    TRAIN = "train"
    GEN = "gen"
    WEIGHT_SYNC = "weight_sync"


@dataclass(frozen=True, slots=True)
class Period:
    """A stretch in which the traffic keeps its form (section 5.2 of the OrchestrRL paper): forward and backward,
    gradients, generation between two deployments, a broadcast of weights. One id, one demand."""

    id: str
    stage: FabricStage = field(compare=False)
    demand: GpuFlows = field(compare=False)  # bytes that are expected in it

    @classmethod
    def of(cls, name: str, stage: FabricStage, demand: GpuFlows) -> "Period":
        """With an id that no other demand has."""
        digest = sha256()
        for each in (demand.src, demand.dst, demand.bytes):
            digest.update(each.tobytes())
        return cls(f"{name} {digest.hexdigest()[:16]}", stage, demand)


@dataclass(frozen=True, slots=True)
class Inventory:
    """Components of the network, by the rate of their links. GPUs' own NICs are counted: fabrics differ in how many of
    them they use."""

    transceivers: int = 0
    nics: int = 0
    electrical_ports: int = 0
    ocs_ports: int = 0
    patch_panel_ports: int = 0
    fibers: int = 0

    def __add__(self, other: "Inventory") -> "Inventory":
        return Inventory(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no one answer to ==
class Pods:
    """Which servers lie close together. `apart`: there is less room between two PoDs than inside one, so that what
    exchanges much had better stay in one; otherwise a way out of it is longer, and no narrower."""

    of: Ints  # [server], numbered from 0
    apart: bool


@dataclass(frozen=True, slots=True)
class SimulatedFailures:
    """What does not work. A NIC that is down has its GPU's traffic relayed over NVLink to the server's others; of
    switches and links the share of a bundle that is lost is named: {"tor": {3: 0.25}} is a quarter of what ToR 3 has
    above it."""

    nics: frozenset[int] = frozenset()
    tor_uplinks: Shares = field(default_factory=dict)  # by ToR: the share of its uplinks, or of its OCS ports
    pod_uplinks: Shares = field(default_factory=dict)  # by PoD: the share of what joins it to the core

    def __hash__(self) -> int:
        return hash((self.nics, *(tuple(sorted(each.items())) for each in (self.tor_uplinks, self.pod_uplinks))))


NOTHING = SimulatedFailures()
Built = TypeVar("Built", bound="SimulatedFabric")


@dataclass(frozen=True, eq=False)
class SimulatedFabric(ABC):
    """One that is built; by default it has no circuits, and is the same network in every period. `reconfigures_s`: what
    changing circuits takes; 0: there are none."""

    servers: Servers
    failed: SimulatedFailures = field(default=NOTHING, kw_only=True)
    name: str = field(default="", kw_only=True)
    _circuits: dict[Period | None, Any] = field(default_factory=dict, init=False)
    _networks: dict[Hashable, LinkNetwork] = field(default_factory=dict, init=False)

    @property
    def reconfigures_s(self) -> float:
        return 0.0

    @property
    @abstractmethod
    def pods(self) -> Pods: ...

    def network(self, period: Period | None = None) -> LinkNetwork:
        """As it is once it has been made for the period. None: as it is at rest."""
        circuits = self.circuits_of(period)
        if circuits not in self._networks:
            self._networks[circuits] = self._network(circuits)
        return self._networks[circuits]

    def changes(self, before: Period | None, after: Period) -> bool:
        """Whether circuits have to be changed between the two."""
        return bool(self.circuits_of(before) != self.circuits_of(after))

    def circuits_of(self, period: Period | None) -> Any:
        """Return what tells the circuits of a period from those of others; it can be hashed."""
        if period not in self._circuits:
            self._circuits[period] = self._circuits_for(period)
        return self._circuits[period]

    def _circuits_for(self, period: Period | None) -> Any:
        """Work out what `circuits_of` returns."""
        return None

    @abstractmethod
    def _network(self, circuits: Any) -> LinkNetwork:
        """Lay the network with the circuits that `circuits_of` has returned."""

    @abstractmethod
    def inventory(self) -> Inventory: ...

    def without(self: Built, failed: SimulatedFailures) -> Built:
        """What is left of it. Of a bundle that fails twice the larger share is lost."""
        one, other = self.failed, failed
        both = SimulatedFailures(
            one.nics | other.nics,
            _larger(one.tor_uplinks, other.tor_uplinks),
            _larger(one.pod_uplinks, other.pod_uplinks),
        )
        return replace(self, failed=both)


def _larger(one: Shares, other: Shares) -> Shares:
    return {each: max(one.get(each, 0.0), other.get(each, 0.0)) for each in sorted({*one, *other})}


def refuse(*faults: ShapeFault) -> None:
    """Raises ImpossibleSite where there are any."""
    if faults:
        raise ImpossibleSite(faults)
