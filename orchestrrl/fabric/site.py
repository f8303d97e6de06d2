"""A site in one YAML file: read with every fault at once, and written. What it means: `planner/fabric/topology.py`.

Faults between the parts of a document carry path and value. Where a part could not be read, what would only follow from
its absence is not reported.
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

_ENDPOINTS = ("pods", "tors", "uplinks")  # share one name space: circuits end at them
_Fibre = tuple[str, int]  # switch and port


def _double_ids(parts: SiteParts) -> Iterator[str]:
    for kinds in (_ENDPOINTS, ("servers",), ("switches",)):
        first: dict[str, str] = {}
        for kind in kinds:
            for place, part in getattr(parts, kind).items():
                path = path_of((kind, place, "id"))
                if first.setdefault(part.id, path) != path:
                    yield f"{path}: is used already by {first[part.id]}, got {part.id!r}"


def _unknown_pods(parts: SiteParts) -> Iterator[str]:
    for kind in ("tors", "uplinks", "servers", "switches"):
        for place, part in getattr(parts, kind).items():
            path = path_of((kind, place, "pod"))
            if kind == "switches" and part.tier is Tier.CORE:
                if part.pod is not None:
                    yield f"{path}: must not be given, as the core belongs to no PoD, got {part.pod!r}"
            elif part.pod is None:
                yield f"{path}: is missing, as a switch of tier agg belongs to a PoD, got nothing"
            elif not parts.exists("pods", part.pod):
                yield f"{path}: is not one of pods, got {part.pod!r}"


def _servers(parts: SiteParts) -> Iterator[str]:
    tors = {tor.id: tor for tor in parts.tors.values()}
    owner: dict[int, str] = {}
    for place, server in parts.servers.items():
        path = path_of(("servers", place))
        gpus, nics = len(server.gpus), len(server.tors)
        if gpus % nics and nics % gpus:
            yield f"{path}.gpus: must be shared evenly by {nics} NICs (one for each of tors), got {gpus} GPUs"
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
                    yield f"{path}.tors[{nic}]: is not one of tors, got {name!r}"
                continue
            if tor.pod != server.pod and {tor.pod, server.pod} <= parts.ids["pods"]:
                yield f"{path}.tors[{nic}]: is a ToR of another PoD ({tor.pod}, not {server.pod}), got {name!r}"
            if tor.rail is not None and tor.rail != nic:
                yield f"{path}.tors[{nic}]: is rail {tor.rail}, whose NICs are number {tor.rail}, got {name!r}"


def _switches(parts: SiteParts) -> Iterator[str]:
    for name, device in parts.devices.items():
        if name in DEVICES:
            message = f"is known by that name already, with {DEVICES[name].ports} ports; take another name"
            yield f"devices.{name}: {message}, got {device.ports} ports"
    known = {name: device.ports for name, device in parts.devices.items()}
    known |= {name: device.ports for name, device in DEVICES.items()}
    for place, switch in parts.switches.items():
        path = path_of(("switches", place))
        if switch.device not in known and not parts.exists("devices", switch.device):
            names = ", ".join(sorted(known))
            yield f"{path}.device: is neither of devices nor known (known: {names}), got {switch.device!r}"
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
            spoken_for = f"port {numbers_text(ports)} of {switch.id} is fibred to {other} already"
            yield f"{where}: {spoken_for}, got {_text(numbers)}"
        if radix is not None and not all(1 <= port <= radix for port in numbers):
            yield f"{where}: must be ports 1 to {radix} of a {switch.device}, got {_text(numbers)}"


def _text(numbers: tuple[int, ...]) -> str:
    return shorten(numbers_text(numbers))


def _misplaced(parts: SiteParts, switch: SwitchPart, endpoint: str) -> str | None:
    """Why no fibre can go from there to the switch."""
    kinds = [kind for kind in _ENDPOINTS if endpoint in parts.ids[kind]]
    if not kinds:
        return None if any(kind in parts.broken for kind in _ENDPOINTS) else "is neither of tors nor of uplinks"
    if kinds == ["pods"]:
        return "is a PoD; fibres end at its ToRs and uplinks"
    if switch.tier is Tier.CORE:
        return "is a ToR; fibres to the core come from uplinks" if kinds == ["tors"] else None
    pod = parts.pod_of.get(endpoint)
    if pod != switch.pod and {pod, switch.pod} <= parts.ids["pods"]:
        return f"is in another PoD ({pod}, not {switch.pod})"
    return None


def _unfibred(parts: SiteParts) -> Iterator[str]:
    """ToRs and uplinks that no circuit can reach, and uplinks whose fibres have one end only."""
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
                f"uplinks[{place}]: must have as many fibres in its PoD as in the core (no far end for {ends}),"
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
    """PoDs that nothing can be joined with."""
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
    together: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # purpose, switch -> ports of each PoD
    unclear = set[tuple[str, str]]()  # whose ports have faults
    for place, kept in parts.reserved.items():
        path = path_of(("reserved", place))
        switch = switches.get(kept.switch)
        if switch is None:
            if not parts.exists("switches", kept.switch):
                yield f"{path}.switch: is not one of switches, got {kept.switch!r}"
            continue
        if switch.tier is not Tier.CORE:
            yield f"{path}.switch: must be a switch of the core, got {kept.switch!r} (tier {switch.tier})"
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
    """Reserved ports of which no circuit can be made on their switch."""
    role = {pod.id: pod.role for pod in parts.pods.values()}
    for (purpose, switch), ports in together.items():
        place = next(at for at, kept in parts.reserved.items() if (kept.purpose, kept.switch) == (purpose, switch))
        path = f"reserved[{place}].ports"
        most, (pod, count) = sum(ports.values()), ports.most_common(1)[0]
        by_role = {each: sum(number for name, number in ports.items() if role.get(name) is each) for each in PodRole}
        if purpose == RESPONSES and sum(by_role.values()) == most:
            if by_role[PodRole.TRAIN] != by_role[PodRole.GEN]:
                yield (
                    f"{path}: must be as many of train PoDs as of gen PoDs on {switch} for {purpose},"
                    f" got {by_role[PodRole.TRAIN]} and {by_role[PodRole.GEN]}"
                )
        elif 2 * count > most:
            yield f"{path}: must join PoDs in pairs on {switch} for {purpose}, got {count} of {most} ports of {pod!r}"


# In the order of the document's fields.
_CHECKS = (_double_ids, _unknown_pods, _servers, _switches, _unfibred, _cut_off, _reserved)

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
