"""The inputs and the result of circuit planning. `materialize.py` makes the plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from planner.fabric.model import EndpointId, OcsId, Pair, PortPair
from planner.fabric.topology import ServerId

Directed = Mapping[tuple[EndpointId, EndpointId], float]  # bytes from one endpoint to another


@dataclass(frozen=True, slots=True)
class FabricFailures:
    """Failed components, which a plan must not use. The job places the ranks of a failed server elsewhere."""

    ports: frozenset[tuple[OcsId, int]] = frozenset()
    switches: frozenset[OcsId] = frozenset()
    cross_connects: frozenset[PortPair] = frozenset()
    nics: frozenset[tuple[ServerId, int]] = frozenset()  # their traffic crosses NVLink to a healthy NIC
    servers: frozenset[ServerId] = frozenset()

    def __or__(self, other: "FabricFailures") -> "FabricFailures":
        return FabricFailures(*(getattr(self, each.name) | getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True, slots=True)
class FabricState:
    """The circuits that are up, the failures, and the circuits that an operator has pinned."""

    current: frozenset[PortPair] = frozenset()
    failures: FabricFailures = field(default_factory=FabricFailures)
    pinned: frozenset[PortPair] = frozenset()  # their ports cannot be used otherwise


@dataclass(frozen=True, slots=True)
class TierPlan:
    """The circuits of one PoD's aggregation layer, or of the core if `pod` is None. If a ToR of a PoD needs a circuit
    to the core but has none, the pair of the ToR and its PoD is listed as unserved."""

    pod: EndpointId | None
    circuits: Mapping[Pair, int]
    completion_s: float  # of the slowest pair served
    unserved: tuple[Pair, ...] = ()  # have demand but no circuit: use several hops or the packet side
    unplaced: Mapping[Pair, int] = field(default_factory=dict)  # allocated, but no switch had ports for both ends


@dataclass(frozen=True, slots=True)
class FabricPlan:
    """The circuits of one period, and the cross-connects on every switch that carry them."""

    tiers: tuple[TierPlan, ...]
    cross_connects: frozenset[PortPair]
    completion_s: float
    notes: tuple[str, ...] = ()  # effects of failures, and circuits that could not be carried
