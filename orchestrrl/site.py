"""A site in one YAML file: read with every fault at once, and written. What it means: `planner/fabric/topology.py`."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from orchestrrl.documents import parse_yaml, read_text
from orchestrrl.errors import ProblemFaults
from orchestrrl.site_checks import faults_between
from orchestrrl.site_parts import SitePart, numbers_text, read_parts
from planner.fabric.model import EndpointId, OcsId
from planner.fabric.topology import (
    DEVICES,
    Device,
    Pod,
    Reservation,
    Server,
    ServerId,
    Site,
    Switch,
    Tor,
    Uplink,
)
from planner.model import GpuId

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./@+-]*")
_OTHER_THAN_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def read_site(path: Path | str) -> Site:
    """The site that the file describes. Raises ProblemFaults with every fault."""
    return parse_site(read_text(path))


def parse_site(text: str) -> Site:
    """Raises ProblemFaults with every fault."""
    site, parts, faults = read_parts(parse_yaml(text))
    faults += faults_between(parts)
    if site is None or faults:
        raise ProblemFaults(faults)
    return _site(site)


def _site(part: SitePart) -> Site:
    devices = dict(DEVICES)
    for name, own in part.devices.items():
        devices[name] = Device(name, own.reconfiguration_s, own.ports)
    return Site(
        link_gbps=part.link_gbps,
        nic_gbps=part.nic_gbps,
        pods=tuple(Pod(EndpointId(each.id), each.role) for each in part.pods),
        tors=tuple(Tor(EndpointId(each.id), EndpointId(each.pod), each.rail) for each in part.tors),
        uplinks=tuple(Uplink(EndpointId(each.id), EndpointId(each.pod)) for each in part.uplinks),
        servers=tuple(
            Server(
                ServerId(each.id),
                EndpointId(each.pod),
                tuple(map(GpuId, each.gpus)),
                tuple(map(EndpointId, each.tors)),
            )
            for each in part.servers
        ),
        switches=tuple(
            Switch(
                OcsId(each.id),
                each.tier,
                None if each.pod is None else EndpointId(each.pod),
                devices[each.device],
                {EndpointId(endpoint): ports for endpoint, ports in each.ports.items()},
            )
            for each in part.switches
        ),
        reservations=tuple(
            Reservation(each.purpose, OcsId(each.switch), frozenset(each.ports)) for each in part.reserved
        ),
    )


def site_text(site: Site) -> str:
    """The file that describes the site; `parse_site` reads the same site from it."""
    lines = [f"link_gbps: {_number(site.link_gbps)}", f"nic_gbps: {_number(site.nic_gbps)}"]
    lines += _block("pods", [f"id: {_word(pod.id)}, role: {pod.role}" for pod in site.pods])
    lines += _block(
        "tors",
        [
            f"id: {_word(tor.id)}, pod: {_word(tor.pod)}" + ("" if tor.rail is None else f", rail: {tor.rail}")
            for tor in site.tors
        ],
    )
    lines += _block("uplinks", [f"id: {_word(uplink.id)}, pod: {_word(uplink.pod)}" for uplink in site.uplinks])
    lines += _block("servers", map(_server_line, site.servers))
    own = {each.device.name: each.device for each in site.switches if DEVICES.get(each.device.name) != each.device}
    if own:
        lines += ["devices:"]
        lines += [
            f"  {_word(name)}: {{reconfiguration_s: {_number(device.reconfiguration_s)}, ports: {device.ports}}}"
            for name, device in sorted(own.items())
        ]
    lines += _block("switches", map(_switch_line, site.switches))
    if site.reservations:
        lines += _block(
            "reserved",
            [
                f"purpose: {_word(each.purpose)}, switch: {_word(each.switch)},"
                f' ports: "{numbers_text(sorted(each.ports))}"'
                for each in site.reservations
            ],
        )
    return "\n".join(lines) + "\n"


def _block(name: str, elements: Iterable[str]) -> list[str]:
    lines = [f"  - {{{element}}}" for element in elements]
    return [f"{name}:", *lines] if lines else [f"{name}: []"]


def _server_line(server: Server) -> str:
    tors = ", ".join(map(_word, server.tors))
    return f'id: {_word(server.id)}, pod: {_word(server.pod)}, gpus: "{numbers_text(server.gpus)}", tors: [{tors}]'


def _switch_line(switch: Switch) -> str:
    pod = "" if switch.pod is None else f", pod: {_word(switch.pod)}"
    ports = ", ".join(f'{_word(endpoint)}: "{numbers_text(numbers)}"' for endpoint, numbers in switch.ports.items())
    return f"id: {_word(switch.id)}, tier: {switch.tier}{pod}, device: {_word(switch.device.name)}, ports: {{{ports}}}"


def _word(name: str) -> str:
    """Quoted where YAML would take it for something else than a word."""
    return name if _PLAIN.fullmatch(name) and name.lower() not in _OTHER_THAN_WORDS else json.dumps(name)


def _number(value: float) -> str:
    return repr(int(value) if value == int(value) else value)
