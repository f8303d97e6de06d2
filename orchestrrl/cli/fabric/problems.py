"""Models of the JSON documents that `orchestrrl fabric allocate`, `place` and `transition` read, and checks of these
documents."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from orchestrrl.cli.problem import Check, ProblemPart, ids_exist, unique, values_at
from orchestrrl.core.errors import path_of, shorten
from planner.fabric.model import Cabling, EndpointId, OcsId, PortPair, pair_of, port_pair

if TYPE_CHECKING:  # slow to import, and each command needs only one of them
    from planner.fabric.allocate import AllocationProblem
    from planner.fabric.place import PlacingProblem
    from planner.fabric.transition import TransitionProblem

MOST_PORTS = 2**16  # per endpoint; larger than any switch, and circuits are allocated one at a time
SLOWEST_GBPS, FASTEST_GBPS, MOST_BYTES = 1e-9, 1e12, 1e30  # values outside are typing errors and overflow seconds

Port = Annotated[int, Field(ge=0, lt=2**31)]
Fibres = dict[str, dict[int, str]]  # switch -> port -> endpoint


class CabledSwitchPart(ProblemPart):
    id: str
    ports: dict[str, list[Port]]


class CrossConnectPart(ProblemPart):
    switch: str
    port_a: Port
    port_b: Port


def cabling(switches: list[CabledSwitchPart]) -> Cabling:
    return Cabling.of(
        {OcsId(each.id): {EndpointId(name): ports for name, ports in each.ports.items()} for each in switches}
    )


def fibres(document: Any) -> Fibres:
    """Return the endpoint at each port of each switch, from a document of any shape. Malformed parts are skipped."""
    found: Fibres = {}
    for _, switch in values_at(document, "switches[]", dict):
        if isinstance(switch.get("id"), str):
            owners = found.setdefault(switch["id"], {})
            for (_, endpoint, _), port in values_at(switch, "ports.*[]", int):
                owners.setdefault(port, str(endpoint))
    return found


def _one_fibre_a_port(document: Any) -> Iterator[str]:
    first: dict[tuple[str, int], str] = {}
    for location, switch in values_at(document, "switches[]", dict):
        for inner, port in values_at(switch, "ports.*[]", int):
            path = path_of((*location, *inner))
            at = shorten(switch.get("id")), port
            if first.setdefault(at, path) != path:
                yield f"{path}: is already fibred by {first[at]}, got {port}"


CABLING_CHECKS: tuple[Check, ...] = (unique("switches[].id"), _one_fibre_a_port)


def cross_connects(*names: str, ends_differ: bool = False) -> Check:
    """Return a check that, in each of the lists `names`, every port of a cross-connect has a fibre and is used only
    once. With `ends_differ`, the check also requires that each cross-connect joins two different endpoints."""

    def check(document: Any) -> Iterator[str]:
        known = fibres(document)
        for name in names:
            first: dict[tuple[str, int], str] = {}
            for location, each in values_at(document, f"{name}[]", dict):
                switch = each.get("switch")
                if not isinstance(switch, str):
                    continue
                if switch not in known:
                    yield f"{path_of((*location, 'switch'))}: does not exist, got {shorten(switch)}"
                fibred = known.get(switch, {})
                ports = {side: each[side] for side in ("port_a", "port_b") if type(each.get(side)) is int}
                for side, port in ports.items():
                    path = path_of((*location, side))
                    if switch in known and port not in fibred:
                        yield f"{path}: must have a fibre on {shorten(switch)}, got {port}"
                    elif first.setdefault((switch, port), path) != path:
                        yield f"{path}: is already used by {first[switch, port]}, got {port}"
                ends = [fibred[port] for port in set(ports.values()) if port in fibred]
                if ends_differ and len(ends) == 2 and ends[0] == ends[1]:
                    yield f"{path_of(location)}: must join two endpoints, got two ports of {shorten(ends[0])}"

    return check


def port_pairs(parts: Iterable[CrossConnectPart]) -> frozenset[PortPair]:
    return frozenset(port_pair(OcsId(part.switch), part.port_a, part.port_b) for part in parts)


class AllocateEndpointPart(ProblemPart):
    id: str
    ports: int = Field(ge=0, le=MOST_PORTS)


class DemandPart(ProblemPart):
    src: str
    dst: str
    bytes: float = Field(ge=0, le=MOST_BYTES)


def _ends(value: Any) -> Any:
    """Convert a pair written as an object with the keys `a` and `b`, as in results, to a list of two items. Return any
    other value unchanged."""
    return [value["a"], value["b"]] if isinstance(value, dict) and value.keys() == {"a", "b"} else value


EligiblePart = Annotated[list[str], BeforeValidator(_ends), Field(min_length=2, max_length=2)]


class AllocateProblem(ProblemPart):
    link_gbps: float = Field(ge=SLOWEST_GBPS, le=FASTEST_GBPS)
    endpoints: list[AllocateEndpointPart]
    demand: list[DemandPart]
    eligible: list[EligiblePart] | None
    failed_ports: dict[str, Annotated[int, Field(ge=0)]]


def _two_ends(document: Any) -> Iterator[str]:
    for location, each in values_at(document, "demand[]", dict):
        if isinstance(each.get("src"), str) and each["src"] == each.get("dst"):
            yield f"{path_of((*location, 'dst'))}: must differ from src, got {shorten(each['dst'])}"
    for location, each in values_at(document, "eligible[]"):
        ends = _ends(each)
        if isinstance(ends, list) and len(ends) == 2 and isinstance(ends[0], str) and ends[0] == ends[1]:
            yield f"{path_of(location)}: must be two endpoints, got {shorten(each)}"


ALLOCATE_CHECKS = (
    unique("endpoints[].id"),
    ids_exist("demand[].src|dst", "endpoints[].id"),
    ids_exist("eligible[][]", "endpoints[].id"),
    ids_exist("eligible[].a|b", "endpoints[].id"),
    _two_ends,
    ids_exist("failed_ports{}", "endpoints[].id"),
)


def allocation_problem(read: AllocateProblem) -> "AllocationProblem":
    from planner.fabric.allocate import AllocationProblem

    demand: defaultdict[tuple[EndpointId, EndpointId], float] = defaultdict(float)
    for each in read.demand:
        demand[EndpointId(each.src), EndpointId(each.dst)] += each.bytes
    return AllocationProblem(
        link_gbps=read.link_gbps,
        ports={EndpointId(each.id): each.ports for each in read.endpoints},
        demand=dict(demand),
        eligible=None
        if read.eligible is None
        else frozenset(pair_of(EndpointId(a), EndpointId(b)) for a, b in read.eligible),
        failed_ports={EndpointId(endpoint): count for endpoint, count in read.failed_ports.items()},
    )


class CircuitPart(ProblemPart):
    a: str
    b: str
    count: int = Field(ge=0, lt=2**31)


class PlaceProblem(ProblemPart):
    switches: list[CabledSwitchPart]
    circuits: list[CircuitPart]
    current: list[CrossConnectPart]
    failed_ports: dict[str, list[Port]]


def _circuits(document: Any) -> Iterator[str]:
    """Yield an error message for each entry of `circuits` that joins an endpoint to itself or repeats the pair of an
    earlier entry, in either order."""
    first: dict[tuple[str, str], str] = {}
    for location, each in values_at(document, "circuits[]", dict):
        a, b = each.get("a"), each.get("b")
        if not isinstance(a, str) or not isinstance(b, str):
            continue
        path, pair = path_of(location), (min(a, b), max(a, b))
        if a == b:
            yield f"{path}.b: must differ from a, got {shorten(b)}"
        elif first.setdefault(pair, path) != path:
            yield f"{path}: is the same pair as {first[pair]}, got {shorten([a, b])}"


def _failed(document: Any) -> Iterator[str]:
    known = fibres(document)
    first: dict[tuple[str, int], str] = {}
    for location, port in values_at(document, "failed_ports.*[]", int):
        switch, path = str(location[1]), path_of(location)
        if switch not in known:
            continue
        if port not in known[switch]:
            yield f"{path}: must have a fibre on {shorten(switch)}, got {port}"
        elif first.setdefault((switch, port), path) != path:
            yield f"{path}: is already used by {first[switch, port]}, got {port}"


PLACE_CHECKS = (
    *CABLING_CHECKS,
    ids_exist("circuits[].a|b", "switches[].ports{}"),
    _circuits,
    cross_connects("current"),
    ids_exist("failed_ports{}", "switches[].id"),
    _failed,
)


def placing_problem(read: PlaceProblem) -> "PlacingProblem":
    from planner.fabric.place import PlacingProblem

    return PlacingProblem(
        cabling=cabling(read.switches),
        circuits={pair_of(EndpointId(each.a), EndpointId(each.b)): each.count for each in read.circuits if each.count},
        current=port_pairs(read.current),
        failed_ports={OcsId(switch): frozenset(ports) for switch, ports in read.failed_ports.items()},
    )


class TransitionFile(ProblemPart):
    switches: list[CabledSwitchPart]
    current: list[CrossConnectPart]
    target: list[CrossConnectPart]
    max_moves_per_stage: int = Field(ge=1, lt=2**53)
    min_fraction: float = Field(ge=0, le=1)


TRANSITION_CHECKS = (*CABLING_CHECKS, cross_connects("current", "target", ends_differ=True))


def transition_problem(read: TransitionFile) -> "TransitionProblem":
    from planner.fabric.transition import TransitionProblem

    current, target = port_pairs(read.current), port_pairs(read.target)
    return TransitionProblem(cabling(read.switches), current, target, read.max_moves_per_stage, read.min_fraction)
