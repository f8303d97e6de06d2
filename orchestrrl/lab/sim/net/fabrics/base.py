"""The interface of a simulated fabric: its network in a communication period, its components and its failures."""

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
    """A communication period, in which the traffic pattern is stable (section 5.2 of the OrchestrRL paper). Examples
    are forward and backward passes, the exchange of gradients, generation between two redeployments, and a weight
    broadcast. Each `id` belongs to exactly one demand."""

    id: str
    stage: FabricStage = field(compare=False)
    demand: GpuFlows = field(compare=False)  # bytes expected in the period

    @classmethod
    def of(cls, name: str, stage: FabricStage, demand: GpuFlows) -> "Period":
        """Build a period with an id that is unique to the demand, because the id contains a hash of the demand."""
        digest = sha256()
        for each in (demand.src, demand.dst, demand.bytes):
            digest.update(each.tobytes())
        return cls(f"{name} {digest.hexdigest()[:16]}", stage, demand)


@dataclass(frozen=True, slots=True)
class Inventory:
    """The number of network components of each type, including the NICs, whose number differs between fabrics."""

    transceivers: int = 0
    nics: int = 0
    electrical_ports: int = 0
    ocs_ports: int = 0
    patch_panel_ports: int = 0
    fibers: int = 0

    def __add__(self, other: "Inventory") -> "Inventory":
        return Inventory(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


@dataclass(frozen=True, slots=True, eq=False)  # == of arrays has no single truth value
class Pods:
    """The assignment of servers to PoDs. If `apart` is true, bandwidth between PoDs is lower than inside a PoD, so that
    GPUs that exchange much data should share a PoD. If it is false, paths between PoDs have more hops than paths inside
    a PoD, but the same bandwidth."""

    of: Ints  # [server], numbered from 0
    apart: bool


@dataclass(frozen=True, slots=True)
class SimulatedFailures:
    """The failed components of a fabric. The traffic of a failed NIC goes over NVLink to the server's other NICs.
    Failures of switches and links are given as the lost fraction of a bundle: `tor_uplinks={3: 0.25}` means that a
    quarter of the uplinks of ToR 3 has failed."""

    nics: frozenset[int] = frozenset()
    tor_uplinks: Shares = field(default_factory=dict)  # by ToR: lost fraction of its uplinks, or of its OCS ports
    pod_uplinks: Shares = field(default_factory=dict)  # by PoD: lost fraction of its links to the core

    def __hash__(self) -> int:
        return hash((self.nics, *(tuple(sorted(each.items())) for each in (self.tor_uplinks, self.pod_uplinks))))


NOTHING = SimulatedFailures()
Built = TypeVar("Built", bound="SimulatedFabric")


@dataclass(frozen=True, eq=False)
class SimulatedFabric(ABC):
    """Base class of simulated fabrics. By default a fabric has no circuits and the same network in every period.
    `reconfigures_s` is the duration of a circuit change in seconds, or 0 if the fabric has no circuits."""

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
        """Return the network as configured for the period. If `period` is None, return the network outside any
        period."""
        circuits = self.circuits_of(period)
        if circuits not in self._networks:
            self._networks[circuits] = self._network(circuits)
        return self._networks[circuits]

    def changes(self, before: Period | None, after: Period) -> bool:
        """Return whether circuits change between the two periods."""
        return bool(self.circuits_of(before) != self.circuits_of(after))

    def circuits_of(self, period: Period | None) -> Any:
        """Return a hashable value that identifies the circuits of a period."""
        if period not in self._circuits:
            self._circuits[period] = self._circuits_for(period)
        return self._circuits[period]

    def _circuits_for(self, period: Period | None) -> Any:
        """Compute the value that `circuits_of` caches and returns."""
        return None

    @abstractmethod
    def _network(self, circuits: Any) -> LinkNetwork:
        """Build the network with `circuits`, a value that `circuits_of` returned."""

    @abstractmethod
    def inventory(self) -> Inventory: ...

    def without(self: Built, failed: SimulatedFailures) -> Built:
        """Return the fabric with additional failures. If a bundle of links fails twice, the larger of the two fractions
        is lost."""
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
    """Raise ImpossibleSite if there are any faults."""
    if faults:
        raise ImpossibleSite(faults)
