"""The problem of `orchestrrl fabric transition` as a document."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from orchestrrl.cli.problem import Location, ProblemPart, unique, values_at
from orchestrrl.core.errors import path_of, shorten

if TYPE_CHECKING:
    from planner.fabric.model import PortPair
    from planner.fabric.transition import TransitionProblem

MOST_PORTS = 2**20  # beyond any switch


class TransitionSwitchPart(ProblemPart):
    id: str = Field(min_length=1)
    ports: dict[str, list[Annotated[int, Field(ge=0, lt=MOST_PORTS)]]]


class TransitionCrossConnectPart(ProblemPart):
    switch: str
    port_a: int = Field(ge=0, lt=MOST_PORTS)
    port_b: int = Field(ge=0, lt=MOST_PORTS)


class TransitionFile(ProblemPart):
    switches: list[TransitionSwitchPart]
    current: list[TransitionCrossConnectPart]
    target: list[TransitionCrossConnectPart]
    max_moves_per_stage: int = Field(ge=1, lt=2**53)
    min_fraction: float = Field(ge=0, le=1)


def _port_owners(document: Any) -> dict[str, dict[int, tuple[str, str]]]:
    """For each switch the endpoint of each port, and the path at which it says so first."""
    owners: dict[str, dict[int, tuple[str, str]]] = {}
    for location, endpoint, port, switch in _fibres(document):
        owners.setdefault(switch, {}).setdefault(port, (endpoint, path_of(location)))
    return owners


def _fibres(document: Any) -> Iterator[tuple[Location, str, int, str]]:
    for location, switch in values_at(document, "switches[]"):
        ports = switch.get("ports") if isinstance(switch, dict) else None
        if not isinstance(ports, dict) or not isinstance(switch.get("id"), str):
            continue
        for endpoint, numbers in ports.items():
            for place, port in enumerate(numbers if isinstance(numbers, list) else ()):
                if type(port) is int:
                    yield (*location, "ports", endpoint, place), endpoint, port, switch["id"]


def _fibred_once(document: Any) -> Iterator[str]:
    owners = _port_owners(document)
    for location, _, port, switch in _fibres(document):
        first = owners[switch][port][1]
        if first != path_of(location):
            yield f"{path_of(location)}: is fibred already by {first}, got {port}"


def _cross_connects(document: Any) -> Iterator[str]:
    """They lie on switches that exist, join fibred ports of two endpoints, and use each port once."""
    owners = _port_owners(document)
    switches = {value for _, value in values_at(document, "switches[].id") if isinstance(value, str)}
    for name in ("current", "target"):
        first: dict[tuple[str, int], str] = {}
        for location, part in values_at(document, f"{name}[]"):
            switch = part.get("switch") if isinstance(part, dict) else None
            if not isinstance(switch, str):
                continue
            if switch not in switches:
                yield f"{path_of((*location, 'switch'))}: does not exist, got {shorten(switch)}"
                continue
            ports = [(side, part.get(side)) for side in ("port_a", "port_b") if type(part.get(side)) is int]
            for side, port in ports:
                path = path_of((*location, side))
                if port not in owners.get(switch, {}):
                    yield f"{path}: has no fibre on {shorten(switch)}, got {port}"
                elif first.setdefault((switch, port), path) != path:
                    yield f"{path}: is used already by {first[switch, port]}, got {port}"
            ends = [owners[switch][port][0] for _, port in ports if port in owners.get(switch, {})]
            if len(set(dict(ports).values())) == 2 and len(ends) == 2 and ends[0] == ends[1]:
                yield f"{path_of(location)}: must join two endpoints, got two ports of {shorten(ends[0])}"


CHECKS = (unique("switches[].id"), _fibred_once, _cross_connects)


def problem_of(read: TransitionFile) -> "TransitionProblem":
    from planner.fabric.model import Cabling, EndpointId, OcsId, port_pair
    from planner.fabric.transition import TransitionProblem

    def up(parts: Iterable[TransitionCrossConnectPart]) -> "frozenset[PortPair]":
        return frozenset(port_pair(OcsId(part.switch), part.port_a, part.port_b) for part in parts)

    cabling = Cabling.of(
        {
            OcsId(each.id): {EndpointId(endpoint): ports for endpoint, ports in each.ports.items()}
            for each in read.switches
        }
    )
    return TransitionProblem(cabling, up(read.current), up(read.target), read.max_moves_per_stage, read.min_fraction)
