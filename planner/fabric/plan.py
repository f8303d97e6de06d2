"""What a decision about circuits says, and what it is taken from. Values only; `materialize.py` decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from planner.fabric.model import EndpointId, OcsId, Pair, PortPair
from planner.fabric.topology import ServerId

Directed = Mapping[tuple[EndpointId, EndpointId], float]  # bytes from one endpoint to another


@dataclass(frozen=True, slots=True)
class FabricFailures:
    """What is not to be used. A server that failed has its ranks replaced by whoever placed them."""

    ports: frozenset[tuple[OcsId, int]] = frozenset()
    switches: frozenset[OcsId] = frozenset()
    cross_connects: frozenset[PortPair] = frozenset()
    nics: frozenset[tuple[ServerId, int]] = frozenset()  # their traffic is relayed over NVLink to a healthy one
    servers: frozenset[ServerId] = frozenset()

    def __or__(self, other: "FabricFailures") -> "FabricFailures":
        return FabricFailures(*(getattr(self, each.name) | getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True, slots=True)
class FabricState:
    """What is up, what is broken, and what an operator wants to stay."""

    current: frozenset[PortPair] = frozenset()
    failures: FabricFailures = field(default_factory=FabricFailures)
    pinned: frozenset[PortPair] = frozenset()  # their ports are nobody else's


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Circuits of one PoD's aggregation layer, or of the core (`pod` None). In a PoD, a ToR that has traffic for others
    and no lift is unserved as a pair with its PoD."""

    pod: EndpointId | None
    circuits: Mapping[Pair, int]
    completion_s: float  # of the slowest pair that is served
    unserved: tuple[Pair, ...] = ()  # have demand and no circuit: several hops or the packet side
    unplaced: Mapping[Pair, int] = field(default_factory=dict)  # allotted, but no switch had ports for both ends


@dataclass(frozen=True, slots=True)
class FabricPlan:
    """Circuits of one period and the cross-connects that carry them, on every switch."""

    tiers: tuple[TierPlan, ...]
    cross_connects: frozenset[PortPair]
    completion_s: float
    notes: tuple[str, ...] = ()  # what failures cost, what could not be carried
