"""Check the section `fabric` of the configuration against its site, its switches and its fleet.

A site's file does not name the fibres of a ToR. Therefore, the field `interfaces` in `fabric.routers` lists the ToR's
interface names in the order of its fibres: sorted by the id of the switch at the far end, then in the order in which
that switch lists them.
"""

from collections import Counter
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import ProblemFaults, few

if TYPE_CHECKING:  # slow to import, and most configurations have no fabric
    from planner.fabric.topology import Site


def router_faults(listing: Any, site: "Site") -> list[str]:
    """Return the faults of `fabric.routers`. Entries of a wrong type are skipped, because the schema reports them."""
    if not isinstance(listing, list):
        return []
    entries = [(f"fabric.routers[{index}]", entry) for index, entry in enumerate(listing) if isinstance(entry, dict)]
    faults = _tor_faults(entries, site)
    taken: dict[str, str] = {}
    networks: list[tuple[IPv4Network, str]] = []
    for path, entry in entries:
        faults += _interface_faults(path, entry, site)
        faults += _address_faults(path, entry, taken)
        faults += _prefix_faults(path, entry, networks)
        faults += _driver_faults(path, entry)
    return faults


_Entries = list[tuple[str, dict[Any, Any]]]


def _tor_faults(entries: _Entries, site: "Site") -> list[str]:
    faults = []
    first: dict[str, str] = {}
    for path, entry in entries:
        tor = entry.get("tor")
        if not isinstance(tor, str):
            continue
        if tor not in site.tor:
            faults.append(f"{path}.tor: must be a ToR of fabric.site, got {tor!r}")
        elif tor in first:
            faults.append(f"{path}.tor: must be named once, and {first[tor]} has it already, got {tor!r}")
        first.setdefault(tor, path)
    missing = [tor.id for tor in site.tors if tor.id not in first]
    if entries and missing:
        names = few(missing, 4, ", ")
        faults.append(
            f"fabric.routers: must list every ToR of fabric.site, or none (missing: {names}), got {len(first)}"
        )
    return faults


def _interface_faults(path: str, entry: dict[Any, Any], site: "Site") -> list[str]:
    from planner.fabric.light import fibres_of
    from planner.fabric.model import EndpointId
    from planner.fabric.route_plan import INTERFACE

    faults, tor, names = [], entry.get("tor"), entry.get("interfaces")
    texts = _texts(path, entry, "interfaces", "packet_side.interface")
    for where, name in texts:
        if not INTERFACE.fullmatch(name):
            faults.append(f"{where}: must be the name of an interface, got {name!r}")
    counts = Counter(name for _, name in texts)
    faults += [f"{where}: must be named once per ToR, got {name!r}" for where, name in texts if counts[name] > 1]
    if isinstance(names, list) and isinstance(tor, str) and tor in site.tor:
        fibres = fibres_of(site, EndpointId(tor))
        if len(names) != len(fibres):
            ends = few([f"{switch}:{port}" for switch, port in fibres], between=", ")
            faults.append(
                f"{path}.interfaces: must name an interface for each of {len(fibres)} fibres ({ends}), got {len(names)}"
            )
    return faults


def _address_faults(path: str, entry: dict[Any, Any], taken: dict[str, str]) -> list[str]:
    faults = []
    for where, address in _texts(path, entry, "address", "packet_side.address"):
        try:
            IPv4Address(address)
        except ValueError:
            faults.append(f"{where}: must be an IPv4 address, got {address!r}")
            continue
        if taken.setdefault(address, where) != where:
            faults.append(f"{where}: must be unique, and {taken[address]} has it already, got {address!r}")
    return faults


def _prefix_faults(path: str, entry: dict[Any, Any], networks: list[tuple[IPv4Network, str]]) -> list[str]:
    faults = []
    for where, prefix in _texts(path, entry, "prefixes"):
        try:
            network = IPv4Network(prefix)
        except ValueError:
            faults.append(f"{where}: must be an IPv4 network such as 10.0.2.0/24, got {prefix!r}")
            continue
        if str(network) != prefix:
            faults.append(f"{where}: must be written as {network}, got {prefix!r}")
        # A router that has lost the smaller of two prefixes would send its packets along the larger one.
        faults += [
            f"{where}: must not overlap with {other} of {there}, got {prefix!r}"
            for other, there in networks
            if other.overlaps(network)
        ]
        networks.append((network, where))
    return faults


def _driver_faults(path: str, entry: dict[Any, Any]) -> list[str]:
    driver, options = entry.get("driver"), entry.get("options", {})
    if not isinstance(driver, str) or not driver or not isinstance(options, dict):
        return []
    from orchestrrl.fabric.route_drivers.driver import make_driver

    try:
        make_driver(driver, str(entry.get("tor")), options, WallClock())  # opens nothing
    except ProblemFaults as error:
        return [f"{path}.{fault}" for fault in error.faults]
    return []


def _texts(path: str, entry: dict[Any, Any], *fields: str) -> list[tuple[str, str]]:
    """Return the non-empty strings in the given fields of an entry, each with its path. A field may contain a string or
    a list of strings. Values of other types are skipped, because the schema reports them."""
    found: list[tuple[str, Any]] = []
    for field in fields:
        value: Any = entry
        for name in field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, list):
            found += [(f"{path}.{field}[{index}]", each) for index, each in enumerate(value)]
        else:
            found.append((f"{path}.{field}", value))
    return [(where, each) for where, each in found if isinstance(each, str) and each]


def read_fabric_site(section: Any, folder: Path) -> tuple["Site | None", list[str]]:
    """Read the site that the section `fabric` names by a path relative to `folder`. Return the site and the faults of
    its file. The site is None if the section names no site or the file has faults."""
    path = section.get("site") if isinstance(section, dict) else None
    if not isinstance(path, str) or not path:
        return None, []
    from orchestrrl.fabric.site import read_site

    try:
        return read_site(folder / path), []
    except ProblemFaults as error:
        # An error about an unreadable file already contains its path.
        named = (fault if fault.startswith(str(folder / path)) else f"{path}: {fault}" for fault in error.faults)
        return None, [f"fabric.site: {fault}" for fault in named]


def fabric_faults(document: dict[Any, Any], site: "Site | None") -> list[str]:
    """Check the section `fabric` of the configuration against its site and the other sections, and return the faults.
    Without a site, nothing is checked."""
    if site is None:
        return []
    listing = document.get("ocs")
    entries = [entry for entry in listing if isinstance(entry, dict)] if isinstance(listing, list) else []
    driven = {entry["id"] for entry in entries if isinstance(entry.get("id"), str)}
    faults = [
        f"ocs: must list every switch of fabric.site, {switch.id!r} is missing"
        for switch in site.switches
        if switch.id not in driven
    ]
    section = document["fabric"]
    faults += _model_faults(document, section, site)
    return faults + router_faults(section.get("routers"), site)


def _model_faults(document: dict[Any, Any], section: Any, site: "Site") -> list[str]:
    from planner.cost.models import UnknownModel, model_named

    name, first_gpu = section.get("model"), section.get("first_fleet_gpu", 0)
    if not isinstance(name, str):
        return []
    faults = []
    try:
        model_named(name)
    except UnknownModel as error:
        faults.append(f"fabric.model: {error}, got {name!r}")
    fleet = document.get("fleet")
    if not isinstance(fleet, dict) or not fleet.get("deployer"):
        faults.append(f"fabric.model: requires fleet.deployer, whose redeployments the circuits follow, got {name!r}")
    gpus = fleet.get("gpus") if isinstance(fleet, dict) else None
    count = gpus.get("count") if isinstance(gpus, dict) else None
    if isinstance(count, int) and isinstance(first_gpu, int):
        nowhere = [gpu for gpu in range(first_gpu, first_gpu + count) if gpu not in site.server_of]
        if nowhere:
            faults.append(
                f"fabric.first_fleet_gpu: {len(nowhere)} of the fleet's {count} GPUs are not in fabric.site"
                f" ({nowhere[0]} is the first), got {first_gpu}"
            )
    return faults
