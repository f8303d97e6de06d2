"""The values that a circuit plan is made from, and the plan itself; `materialize.py` makes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from planner.fabric.model import EndpointId, OcsId, Pair, PortPair
from planner.fabric.topology import ServerId

Directed = Mapping[tuple[EndpointId, EndpointId], float]  # bytes from one endpoint to another


@dataclass(frozen=True, slots=True)
class FabricFailures:
    """Components that must not be used. The ranks of a failed server are placed elsewhere by the job."""

    ports: frozenset[tuple[OcsId, int]] = frozenset()
    switches: frozenset[OcsId] = frozenset()
    cross_connects: frozenset[PortPair] = frozenset()
    nics: frozenset[tuple[ServerId, int]] = frozenset()  # their traffic crosses NVLink to a healthy NIC
    servers: frozenset[ServerId] = frozenset()

    def __or__(self, other: "FabricFailures") -> "FabricFailures":
        return FabricFailures(*(getattr(self, each.name) | getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True, slots=True)
class FabricState:
    """The circuits that are up, the failures, and the circuits that an operator pinned."""

    current: frozenset[PortPair] = frozenset()
    failures: FabricFailures = field(default_factory=FabricFailures)
    pinned: frozenset[PortPair] = frozenset()  # their ports cannot be used otherwise


@dataclass(frozen=True, slots=True)
class TierPlan:
    """The circuits of one PoD's aggregation layer, or of the core if `pod` is None. In a PoD, if a ToR needs a lift but
    has none, the pair of the ToR and its PoD is listed as unserved."""

    pod: EndpointId | None
    circuits: Mapping[Pair, int]
    completion_s: float  # of the slowest pair served
    unserved: tuple[Pair, ...] = ()  # have demand but no circuit: several hops or the packet side
    unplaced: Mapping[Pair, int] = field(default_factory=dict)  # allocated, but no switch had ports for both ends


@dataclass(frozen=True, slots=True)
class FabricPlan:
    """The circuits of one period, and the cross-connects on every switch that carry them."""

    tiers: tuple[TierPlan, ...]
    cross_connects: frozenset[PortPair]
    completion_s: float
    notes: tuple[str, ...] = ()  # effects of failures, and circuits that could not be carried
