"""Read and write the description of a site as one YAML file. Reading reports all faults at once.
`planner/fabric/topology.py` defines the meaning of the description.

Each fault is reported with its path and the invalid value. A fault that is only a consequence of an unreadable part is
not reported.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from orchestrrl.core.documents import parse_yaml, read_text
from orchestrrl.core.errors import ProblemFaults, path_of, shorten
from orchestrrl.fabric.site_parts import SitePart, SiteParts, SwitchPart, numbers_text, read_parts
from planner.fabric.topology import (
    DEVICES,
    RESPONSES,
    Pod,
    PodRole,
    Reservation,
    Server,
    Site,
    Switch,
    SwitchModel,
    Tier,
    Tor,
    Uplink,
)

_ENDPOINTS = ("pods", "tors", "uplinks")  # share one name space, as circuits end at them
_Fibre = tuple[str, int]  # switch and port


def _double_ids(parts: SiteParts) -> Iterator[str]:
    for kinds in (_ENDPOINTS, ("servers",), ("switches",)):
        first: dict[str, str] = {}
        for kind in kinds:
            for place, part in getattr(parts, kind).items():
                path = path_of((kind, place, "id"))
                if first.setdefault(part.id, path) != path:
                    yield f"{path}: must be unique, and {first[part.id]} uses it already, got {part.id!r}"


def _unknown_pods(parts: SiteParts) -> Iterator[str]:
    for kind in ("tors", "uplinks", "servers", "switches"):
        for place, part in getattr(parts, kind).items():
            path = path_of((kind, place, "pod"))
            if kind == "switches" and part.tier is Tier.CORE:
                if part.pod is not None:
                    yield f"{path}: must not be set for a switch of tier core, got {part.pod!r}"
            elif part.pod is None:
                yield f"{path}: must be set for a switch of tier agg, got nothing"
            elif not parts.exists("pods", part.pod):
                yield f"{path}: must be one of pods, got {part.pod!r}"


def _servers(parts: SiteParts) -> Iterator[str]:
    tors = {tor.id: tor for tor in parts.tors.values()}
    owner: dict[int, str] = {}
    for place, server in parts.servers.items():
        path = path_of(("servers", place))
        gpus, nics = len(server.gpus), len(server.tors)
        if gpus % nics and nics % gpus:
            yield f"{path}.gpus: must divide evenly among {nics} NICs (one per entry of tors), got {gpus} GPUs"
        taken: dict[str, list[int]] = defaultdict(list)
        for gpu in server.gpus:
            if gpu in owner:
                taken[owner[gpu]].append(gpu)
            owner.setdefault(gpu, path)
        for other, double in taken.items():
            yield f"{path}.gpus: GPU {numbers_text(double)} is in {other} already, got {_text(server.gpus)}"
        for nic, name in enumerate(server.tors):
            tor = tors.get(name)
            if tor is None:
                if not parts.exists("tors", name):
                    yield f"{path}.tors[{nic}]: must be one of tors, got {name!r}"
                continue
            if tor.pod != server.pod and {tor.pod, server.pod} <= parts.ids["pods"]:
                yield f"{path}.tors[{nic}]: must be a ToR of PoD {server.pod}, not of {tor.pod}, got {name!r}"
            if tor.rail is not None and tor.rail != nic:
                yield f"{path}.tors[{nic}]: must be at index {tor.rail}, as a ToR of rail {tor.rail}, got {name!r}"


def _switches(parts: SiteParts) -> Iterator[str]:
    for name, device in parts.devices.items():
        if name in DEVICES:
            message = f"must not redefine a built-in device, which has {DEVICES[name].ports} ports"
            yield f"devices.{name}: {message}, got {device.ports} ports"
    known = {name: device.ports for name, device in parts.devices.items()}
    known |= {name: device.ports for name, device in DEVICES.items()}
    for place, switch in parts.switches.items():
        path = path_of(("switches", place))
        if switch.device not in known and not parts.exists("devices", switch.device):
            names = ", ".join(sorted(known))
            yield f"{path}.device: must be one of devices or a built-in device (known: {names}), got {switch.device!r}"
        yield from _ports(path, switch, known.get(switch.device))
        for endpoint in switch.ports:
            fault = _misplaced(parts, switch, endpoint)
            if fault:
                yield f"{path}.ports: {fault}, got {endpoint!r}"


def _ports(path: str, switch: SwitchPart, radix: int | None) -> Iterator[str]:
    owner: dict[int, str] = {}
    for endpoint, numbers in switch.ports.items():
        where = f"{path}.ports.{endpoint}"
        taken: dict[str, list[int]] = defaultdict(list)
        for port in numbers:
            if port in owner:
                taken[owner[port]].append(port)
            owner.setdefault(port, endpoint)
        for other, ports in taken.items():
            spoken_for = f"port {numbers_text(ports)} of {switch.id} has a fibre to {other} already"
            yield f"{where}: {spoken_for}, got {_text(numbers)}"
        if radix is not None and not all(1 <= port <= radix for port in numbers):
            yield f"{where}: must be within 1..{radix}, the ports of a {switch.device}, got {_text(numbers)}"


def _text(numbers: tuple[int, ...]) -> str:
    return shorten(numbers_text(numbers))


def _misplaced(parts: SiteParts, switch: SwitchPart, endpoint: str) -> str | None:
    """Return the reason why no fibre can connect the endpoint and the switch, or None if a fibre can connect them."""
    kinds = [kind for kind in _ENDPOINTS if endpoint in parts.ids[kind]]
    if not kinds:
        return None if any(kind in parts.broken for kind in _ENDPOINTS) else "must be one of tors or uplinks"
    if kinds == ["pods"]:
        return "must be a ToR or an uplink, not a PoD"
    if switch.tier is Tier.CORE:
        return "must be an uplink, as ToRs have no fibres to the core" if kinds == ["tors"] else None
    pod = parts.pod_of.get(endpoint)
    if pod != switch.pod and {pod, switch.pod} <= parts.ids["pods"]:
        return f"must be in PoD {switch.pod}, not in {pod}"
    return None


def _unfibred(parts: SiteParts) -> Iterator[str]:
    """Yield a fault for each ToR or uplink that no circuit can reach. Also yield a fault for each uplink that has
    different numbers of fibres in its PoD and to the core."""
    if "switches" in parts.broken:
        return
    inside, core = _fibres(parts, Tier.AGG), _fibres(parts, Tier.CORE)
    for place, tor in parts.tors.items():
        if not inside[tor.id]:
            yield f"tors[{place}]: must have a fibre to a switch of its PoD {tor.pod}, got none ({tor.id!r})"
    for place, uplink in parts.uplinks.items():
        lower, upper = inside[uplink.id], core[uplink.id]
        if not lower and not upper:
            yield f"uplinks[{place}]: must have fibres, got none ({uplink.id!r})"
        elif len(lower) != len(upper):
            single = sorted(lower)[len(upper) :] or sorted(upper)[len(lower) :]
            ends = _ends(single)
            yield (
                f"uplinks[{place}]: must have as many fibres in its PoD as in the core ({ends} have no far end),"
                f" got {len(lower)} and {len(upper)} ({uplink.id!r})"
            )


def _ends(fibres: list[_Fibre]) -> str:
    ports: dict[str, list[int]] = defaultdict(list)
    for switch, port in fibres:
        ports[switch].append(port)
    return ", ".join(f"{switch}:{numbers_text(numbers)}" for switch, numbers in ports.items())


def _fibres(parts: SiteParts, tier: Tier) -> dict[str, list[_Fibre]]:
    found: dict[str, list[_Fibre]] = defaultdict(list)
    for switch in parts.switches.values():
        if switch.tier is tier:
            for endpoint, numbers in switch.ports.items():
                found[endpoint] += [(switch.id, port) for port in numbers]
    return found


def _cut_off(parts: SiteParts) -> Iterator[str]:
    """Yield a fault for each PoD that has no ToR or that no circuit can connect to another PoD."""
    with_tors = {tor.pod for tor in parts.tors.values()}
    for place, pod in parts.pods.items():
        if "tors" not in parts.broken and pod.id not in with_tors:
            yield f"pods[{place}]: must have a ToR, got none ({pod.id!r})"
    if parts.broken & {"switches", "uplinks"} or len(parts.pods) < 2:
        return
    core = _fibres(parts, Tier.CORE)
    reached = {uplink.pod for uplink in parts.uplinks.values() if core[uplink.id]}
    for place, pod in parts.pods.items():
        if pod.id not in reached:
            yield f"pods[{place}]: must have an uplink with fibres to the core, got none ({pod.id!r})"


def _reserved(parts: SiteParts) -> Iterator[str]:
    switches = {switch.id: switch for switch in parts.switches.values()}
    pod_of = {uplink.id: uplink.pod for uplink in parts.uplinks.values()}
    owner: dict[_Fibre, str] = {}
    together: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # (purpose, switch) -> ports of each PoD
    unclear = set[tuple[str, str]]()  # keys whose ports have faults
    for place, kept in parts.reserved.items():
        path = path_of(("reserved", place))
        switch = switches.get(kept.switch)
        if switch is None:
            if not parts.exists("switches", kept.switch):
                yield f"{path}.switch: must be one of switches, got {kept.switch!r}"
            continue
        if switch.tier is not Tier.CORE:
            yield f"{path}.switch: must be a core switch, got {kept.switch!r} (tier {switch.tier})"
            continue
        fibred = {port: endpoint for endpoint, numbers in switch.ports.items() for port in numbers}
        for port in kept.ports:
            fault = ""
            if port not in fibred:
                fault = f"port {port} of {kept.switch} has no fibre"
            elif (kept.switch, port) in owner:
                fault = f"port {port} is reserved already by {owner[kept.switch, port]}"
            elif fibred[port] in pod_of:
                together[kept.purpose, kept.switch][pod_of[fibred[port]]] += 1
            owner.setdefault((kept.switch, port), path)
            if fault:
                unclear.add((kept.purpose, kept.switch))
                yield f"{path}.ports: {fault}, got {_text(kept.ports)}"
    yield from _unpaired(parts, {key: ports for key, ports in together.items() if key not in unclear})


def _unpaired(parts: SiteParts, together: dict[tuple[str, str], Counter[str]]) -> Iterator[str]:
    """Yield a fault for each group of reserved ports that cannot all be connected in pairs on their switch. `together`
    maps each group, identified by purpose and switch, to the number of ports of each PoD."""
    role = {pod.id: pod.role for pod in parts.pods.values()}
    for (purpose, switch), ports in together.items():
        place = next(at for at, kept in parts.reserved.items() if (kept.purpose, kept.switch) == (purpose, switch))
        path = f"reserved[{place}].ports"
        most, (pod, count) = sum(ports.values()), ports.most_common(1)[0]
        by_role = {each: sum(number for name, number in ports.items() if role.get(name) is each) for each in PodRole}
        if purpose == RESPONSES and sum(by_role.values()) == most:
            if by_role[PodRole.TRAIN] != by_role[PodRole.GEN]:
                yield (
                    f"{path}: must have as many ports of train PoDs as of gen PoDs on {switch} for {purpose},"
                    f" got {by_role[PodRole.TRAIN]} and {by_role[PodRole.GEN]}"
                )
        elif 2 * count > most:
            message = f"must not be mostly of one PoD on {switch} for {purpose}"
            yield f"{path}: {message}, got {count} of {most} ports of {pod!r}"


# In the order of the document's fields.
_CHECKS = (_double_ids, _unknown_pods, _servers, _switches, _unfibred, _cut_off, _reserved)

_NEEDED = ("pods", "tors", "servers", "switches")


def read_site(path: Path | str) -> Site:
    """Return the site that the file describes. Raises ProblemFaults with every fault if the file cannot be read or is
    invalid."""
    return parse_site(read_text(path))


def parse_site(text: str) -> Site:
    """Return the site that the YAML text describes. Raises ProblemFaults with every fault if the text is invalid."""
    return site_from(parse_yaml(text))


def site_from(document: object) -> Site:
    """Build a site from a parsed document. Raises ProblemFaults with every fault if the document is invalid."""
    site, parts, faults = read_parts(document)
    faults += [fault for check in _CHECKS for fault in check(parts)]
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
    """Return the site as mappings, lists and plain values, in the structure of a site's file."""
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
    """Return the fields of a part as a mapping, without fields that are None. `plain` replaces the values of fields
    that have another form in the document."""
    own = {field.name: getattr(value, field.name) for field in fields(value)} | plain
    return {name: each for name, each in own.items() if each is not None}


def site_text(site: Site) -> str:
    """Return the YAML text that describes the site, with one line per part. If this text is passed to `parse_site`, the
    result is equal to `site`."""
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
    """Return the value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
    return text.removesuffix("...\n").rstrip()


def _number(value: float) -> float:
    return int(value) if value == int(value) else value
