"""The problem of `orchestrrl fabric allocate` as a document."""

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from orchestrrl.cli.problem import ProblemPart, ids_exist, unique, values_at
from orchestrrl.core.errors import path_of, shorten

if TYPE_CHECKING:
    from planner.fabric.allocate import AllocationProblem

MOST_PORTS = 2**16  # of one endpoint; beyond any switch, and circuits are dealt out one by one
SLOWEST_GBPS, FASTEST_GBPS, MOST_BYTES = 1e-9, 1e12, 1e30  # what goes beyond is a slip, and its seconds no number


class AllocateEndpointPart(ProblemPart):
    id: str
    ports: int = Field(ge=0, le=MOST_PORTS)


class DemandPart(ProblemPart):
    src: str
    dst: str
    bytes: float = Field(ge=0, le=MOST_BYTES)


def _ends(value: Any) -> Any:
    """A pair written as circuits are in the answer is a pair too."""
    return [value["a"], value["b"]] if isinstance(value, dict) and value.keys() == {"a", "b"} else value


EligiblePart = Annotated[list[str], BeforeValidator(_ends), Field(min_length=2, max_length=2)]


class AllocateProblem(ProblemPart):
    link_gbps: float = Field(ge=SLOWEST_GBPS, le=FASTEST_GBPS)
    endpoints: list[AllocateEndpointPart]
    demand: list[DemandPart]
    eligible: list[EligiblePart] | None
    failed_ports: dict[str, Annotated[int, Field(ge=0)]]


def _two_ends(document: Any) -> Iterator[str]:
    for location, each in values_at(document, "demand[]"):
        if isinstance(each, dict) and isinstance(each.get("src"), str) and each["src"] == each.get("dst"):
            yield f"{path_of((*location, 'dst'))}: must differ from src, got {shorten(each['dst'])}"
    for location, each in values_at(document, "eligible[]"):
        ends = _ends(each)
        if isinstance(ends, list) and len(ends) == 2 and isinstance(ends[0], str) and ends[0] == ends[1]:
            yield f"{path_of(location)}: must be two endpoints, got {shorten(each)}"


CHECKS = (
    unique("endpoints[].id"),
    ids_exist("demand[].src", "endpoints[].id"),
    ids_exist("demand[].dst", "endpoints[].id"),
    ids_exist("eligible[][]", "endpoints[].id"),
    ids_exist("eligible[].a", "endpoints[].id"),
    ids_exist("eligible[].b", "endpoints[].id"),
    _two_ends,
    ids_exist("failed_ports{}", "endpoints[].id"),
)


def problem_of(read: AllocateProblem) -> "AllocationProblem":
    from planner.fabric.allocate import AllocationProblem
    from planner.fabric.model import EndpointId, pair_of

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
