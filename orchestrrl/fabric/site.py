"""A site in one YAML file: read with every fault at once, and written. What it means: `planner/fabric/topology.py`."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from orchestrrl.core.documents import parse_yaml, read_text
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fabric.site_checks import faults_between
from orchestrrl.fabric.site_parts import SitePart, numbers_text, read_parts
from planner.fabric.topology import DEVICES, Pod, Reservation, Server, Site, Switch, SwitchModel, Tor, Uplink

_NEEDED = ("pods", "tors", "servers", "switches")


def read_site(path: Path | str) -> Site:
    """The site that the file describes. Raises ProblemFaults with every fault."""
    return parse_site(read_text(path))


def parse_site(text: str) -> Site:
    """Raises ProblemFaults with every fault."""
    return site_from(parse_yaml(text))


def site_from(document: object) -> Site:
    """Raises ProblemFaults with every fault."""
    site, parts, faults = read_parts(document)
    faults += faults_between(parts)
    if site is None or faults:
        raise ProblemFaults(faults)
    return _site(site)


def _site(part: SitePart) -> Site:
    devices = dict(DEVICES)
    for name, own in part.devices.items():
        devices[name] = SwitchModel(name, own.reconfiguration_s, own.ports)
    return Site(
        link_gbps=part.link_gbps,
        nic_gbps=part.nic_gbps,
        pods=tuple(Pod(**dict(each)) for each in part.pods),
        tors=tuple(Tor(**dict(each)) for each in part.tors),
        uplinks=tuple(Uplink(**dict(each)) for each in part.uplinks),
        servers=tuple(Server(**dict(each)) for each in part.servers),
        switches=tuple(Switch(**{**dict(each), "device": devices[each.device]}) for each in part.switches),
        reservations=tuple(Reservation(**{**dict(each), "ports": frozenset(each.ports)}) for each in part.reserved),
    )


def site_document(site: Site) -> dict[str, Any]:
    """What the file holds, as plain values."""
    own = {each.device.name: each.device for each in site.switches if DEVICES.get(each.device.name) != each.device}
    document: dict[str, Any] = {
        "link_gbps": _number(site.link_gbps),
        "nic_gbps": _number(site.nic_gbps),
        "pods": [_part(pod, role=str(pod.role)) for pod in site.pods],
        "tors": list(map(_part, site.tors)),
        "uplinks": list(map(_part, site.uplinks)),
        "servers": [_part(server, gpus=numbers_text(server.gpus), tors=list(server.tors)) for server in site.servers],
        "devices": {
            name: {"reconfiguration_s": _number(device.reconfiguration_s), "ports": device.ports}
            for name, device in sorted(own.items())
        },
        "switches": [
            _part(
                switch,
                tier=str(switch.tier),
                device=switch.device.name,
                ports={endpoint: numbers_text(numbers) for endpoint, numbers in switch.ports.items()},
            )
            for switch in site.switches
        ],
        "reserved": [_part(each, ports=numbers_text(sorted(each.ports))) for each in site.reservations],
    }
    return {field: value for field, value in document.items() if value not in ({}, []) or field in _NEEDED}


def _part(value: Pod | Tor | Uplink | Server | Switch | Reservation, **plain: object) -> dict[str, Any]:
    """The fields of a part that are given, some of them as the document has them."""
    own = {field.name: getattr(value, field.name) for field in fields(value)} | plain
    return {name: each for name, each in own.items() if each is not None}


def site_text(site: Site) -> str:
    """The file that describes the site, one line for each part; `parse_site` reads the same site from it."""
    lines: list[str] = []
    for field, value in site_document(site).items():
        if isinstance(value, list):
            lines += [f"{field}:", *(f"  - {_flow(part)}" for part in value)]
        elif isinstance(value, dict):
            lines += [f"{field}:", *(f"  {_flow(name)}: {_flow(part)}" for name, part in value.items())]
        else:
            lines.append(f"{field}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
    return text.removesuffix("...\n").rstrip()


def _number(value: float) -> float:
    return int(value) if value == int(value) else value
