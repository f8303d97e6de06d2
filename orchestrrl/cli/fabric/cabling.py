"""Switches, their fibres and what is cross-connected, as problems about the fabric write them; checked in any shape."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from orchestrrl.cli.problem import Check, ProblemPart, unique, values_at
from orchestrrl.core.errors import path_of, shorten

if TYPE_CHECKING:
    from planner.fabric.model import Cabling, PortPair

Port = Annotated[int, Field(ge=0, lt=2**31)]
Fibres = dict[str, dict[int, str]]  # of each switch, the endpoint at each port


class CabledSwitchPart(ProblemPart):
    id: str
    ports: dict[str, list[Port]]


class CrossConnectPart(ProblemPart):
    switch: str
    port_a: Port
    port_b: Port


def cabling(switches: list[CabledSwitchPart]) -> "Cabling":
    from planner.fabric.model import Cabling, EndpointId, OcsId

    return Cabling.of(
        {OcsId(each.id): {EndpointId(name): ports for name, ports in each.ports.items()} for each in switches}
    )


def fibres(document: Any) -> Fibres:
    """What can be read of the switches of a document that may have any shape."""
    found: Fibres = {}
    for _, switch in values_at(document, "switches[]"):
        if isinstance(switch, dict) and isinstance(switch.get("id"), str):
            owners = found.setdefault(switch["id"], {})
            for _, endpoint, port in _ports(switch):
                owners.setdefault(port, endpoint)
    return found


def _ports(switch: Any) -> Iterator[tuple[tuple[int | str, ...], str, int]]:
    """Where it stands, its endpoint, and each port."""
    endpoints = switch.get("ports") if isinstance(switch, dict) else None
    for endpoint, ports in endpoints.items() if isinstance(endpoints, dict) else ():
        for place, port in enumerate(ports) if isinstance(ports, list) else ():
            if type(port) is int:
                yield ("ports", endpoint, place), endpoint, port


def _one_fibre_a_port(document: Any) -> Iterator[str]:
    first: dict[tuple[str, int], str] = {}
    for location, switch in values_at(document, "switches[]"):
        for inner, _, port in _ports(switch):
            path = path_of((*location, *inner))
            at = shorten(switch.get("id")), port
            if first.setdefault(at, path) != path:
                yield f"{path}: is fibred already by {first[at]}, got {port}"


CABLING_CHECKS: tuple[Check, ...] = (unique("switches[].id"), _one_fibre_a_port)


def cross_connects(*names: str, ends_differ: bool = False) -> Check:
    """Return a check that the cross-connects in each of the lists `names` join ports that have a fibre, each used once,
    and with `ends_differ` ports of two endpoints."""

    def check(document: Any) -> Iterator[str]:
        known = fibres(document)
        for name in names:
            first: dict[tuple[str, int], str] = {}
            for location, each in values_at(document, f"{name}[]"):
                switch = each.get("switch") if isinstance(each, dict) else None
                if not isinstance(switch, str):
                    continue
                if switch not in known:
                    yield f"{path_of((*location, 'switch'))}: does not exist, got {shorten(switch)}"
                fibred = known.get(switch, {})
                ports = {side: each[side] for side in ("port_a", "port_b") if type(each.get(side)) is int}
                for side, port in ports.items():
                    path = path_of((*location, side))
                    if switch in known and port not in fibred:
                        yield f"{path}: has no fibre on {shorten(switch)}, got {port}"
                    elif first.setdefault((switch, port), path) != path:
                        yield f"{path}: is used already by {first[switch, port]}, got {port}"
                ends = [fibred[port] for port in set(ports.values()) if port in fibred]
                if ends_differ and len(ends) == 2 and ends[0] == ends[1]:
                    yield f"{path_of(location)}: must join two endpoints, got two ports of {shorten(ends[0])}"

    return check


def port_pairs(parts: Iterable[CrossConnectPart]) -> "frozenset[PortPair]":
    from planner.fabric.model import OcsId, port_pair

    return frozenset(port_pair(OcsId(part.switch), part.port_a, part.port_b) for part in parts)
