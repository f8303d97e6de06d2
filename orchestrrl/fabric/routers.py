"""Check `fabric.routers` of the configuration against the site.

A ToR's fibres have no names in a site's file. `interfaces` names what the ToR calls them, in the file's order: by id of
the switch they end at, then as listed there.
"""

from collections import Counter
from ipaddress import IPv4Address, IPv4Network
from typing import TYPE_CHECKING, Any

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:  # heavy, and most configurations have none of it
    from planner.fabric.topology import Site


def router_faults(listing: Any, site: "Site") -> list[str]:
    """What is wrong with `fabric.routers`, as far as it is known what is meant."""
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
            faults.append(f"{path}.tor: is none of the site's, got {tor!r}")
        elif tor in first:
            faults.append(f"{path}.tor: is the ToR of {first[tor]} already, got {tor!r}")
        first.setdefault(tor, path)
    missing = [tor.id for tor in site.tors if tor.id not in first]
    if entries and missing:
        few = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        faults.append(f"fabric.routers: must have every ToR of fabric.site, or none (missing: {few}), got {len(first)}")
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
    faults += [f"{where}: is named twice on this ToR, got {name!r}" for where, name in texts if counts[name] > 1]
    if isinstance(names, list) and isinstance(tor, str) and tor in site.tor:
        fibres = fibres_of(site, EndpointId(tor))
        if len(names) != len(fibres):
            ends = ", ".join(f"{switch}:{port}" for switch, port in fibres[:8]) + (", ..." if len(fibres) > 8 else "")
            faults.append(f"{path}.interfaces: must name those of its {len(fibres)} fibres ({ends}), got {len(names)}")
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
            faults.append(f"{where}: is {taken[address]} already, got {address!r}")
    return faults


def _prefix_faults(path: str, entry: dict[Any, Any], networks: list[tuple[IPv4Network, str]]) -> list[str]:
    faults = []
    for where, prefix in _texts(path, entry, "prefixes"):
        try:
            network = IPv4Network(prefix)
        except ValueError:
            faults.append(f"{where}: must be an IPv4 network, as 10.0.2.0/24, got {prefix!r}")
            continue
        if str(network) != prefix:
            faults.append(f"{where}: must be written as {network}, got {prefix!r}")
        faults += [
            f"{where}: overlaps with {other} of {there}, got {prefix!r}"
            for other, there in networks
            if other.overlaps(network)
        ]
        networks.append((network, where))
    return faults


def _driver_faults(path: str, entry: dict[Any, Any]) -> list[str]:
    driver, options = entry.get("driver"), entry.get("options", {})
    if not isinstance(driver, str) or not driver or not isinstance(options, dict):
        return []
    from orchestrrl.fabric.route_drivers.registry import make_driver

    try:
        make_driver(driver, str(entry.get("tor")), options, WallClock())  # opens nothing
    except ProblemFaults as error:
        return [f"{path}.{fault}" for fault in error.faults]
    return []


def _texts(path: str, entry: dict[Any, Any], *fields: str) -> list[tuple[str, str]]:
    """The texts in these fields or lists of an entry, each with its path. Other values are the schema's business."""
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
