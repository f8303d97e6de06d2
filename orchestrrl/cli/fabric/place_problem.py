"""The problem of `orchestrrl fabric place` as a document."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from orchestrrl.cli.fabric.cabling import (
    CABLING_CHECKS,
    CabledSwitchPart,
    CrossConnectPart,
    Port,
    cabling,
    cross_connects,
    fibres,
    port_pairs,
)
from orchestrrl.cli.problem import ProblemPart, values_at
from orchestrrl.core.errors import path_of, shorten

if TYPE_CHECKING:
    from planner.fabric.place import PlacingProblem


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
    """Pairs are of two endpoints that have fibres, and stand once, whichever end comes first."""
    known = {endpoint for _, endpoint in values_at(document, "switches[].ports{}")}
    first: dict[tuple[str, str], str] = {}
    for location, each in values_at(document, "circuits[]"):
        ends = {side: each.get(side) for side in ("a", "b")} if isinstance(each, dict) else {}
        for side, end in ends.items():
            if isinstance(end, str) and end not in known:
                yield f"{path_of((*location, side))}: does not exist, got {shorten(end)}"
        a, b = ends.get("a"), ends.get("b")
        if not isinstance(a, str) or not isinstance(b, str):
            continue
        path, pair = path_of(location), (min(a, b), max(a, b))
        if a == b:
            yield f"{path}.b: must be another endpoint than a, got {shorten(b)}"
        elif first.setdefault(pair, path) != path:
            yield f"{path}: is the pair of {first[pair]} already, got {shorten([a, b])}"


def _failed(document: Any) -> Iterator[str]:
    known = fibres(document)
    failed = document.get("failed_ports") if isinstance(document, dict) else None
    for switch, ports in failed.items() if isinstance(failed, dict) else ():
        if switch not in known:
            yield f"{path_of(('failed_ports', switch))}: does not exist, got {shorten(switch)}"
            continue
        first: dict[int, str] = {}
        for place, port in enumerate(ports) if isinstance(ports, list) else ():
            path = path_of(("failed_ports", switch, place))
            if type(port) is not int:
                continue
            if port not in known[switch]:
                yield f"{path}: has no fibre on {shorten(switch)}, got {port}"
            elif first.setdefault(port, path) != path:
                yield f"{path}: is used already by {first[port]}, got {port}"


CHECKS = (*CABLING_CHECKS, _circuits, cross_connects("current"), _failed)


def problem_of(read: PlaceProblem) -> "PlacingProblem":
    from planner.fabric.model import EndpointId, OcsId, pair_of
    from planner.fabric.place import PlacingProblem

    return PlacingProblem(
        cabling=cabling(read.switches),
        circuits={pair_of(EndpointId(each.a), EndpointId(each.b)): each.count for each in read.circuits if each.count},
        current=port_pairs(read.current),
        failed_ports={OcsId(switch): frozenset(ports) for switch, ports in read.failed_ports.items()},
    )
