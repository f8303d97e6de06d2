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
    side = entry.get("packet_side")
    listed = [(f"{path}.interfaces[{i}]", name) for i, name in enumerate(names if isinstance(names, list) else [])]
    if isinstance(side, dict):
        listed.append((f"{path}.packet_side.interface", side.get("interface")))
    for where, name in listed:
        if isinstance(name, str) and name and not INTERFACE.fullmatch(name):
            faults.append(f"{where}: must be the name of an interface, got {name!r}")
    texts = [(where, name) for where, name in listed if isinstance(name, str)]
    counts = Counter(name for _, name in texts)
    faults += [f"{where}: is named twice on this ToR, got {name!r}" for where, name in texts if counts[name] > 1]
    if isinstance(names, list) and isinstance(tor, str) and tor in site.tor:
        fibres = fibres_of(site, EndpointId(tor))
        if len(names) != len(fibres):
            ends = ", ".join(f"{switch}:{port}" for switch, port in fibres[:8]) + (", ..." if len(fibres) > 8 else "")
            faults.append(f"{path}.interfaces: must name those of its {len(fibres)} fibres ({ends}), got {len(names)}")
    return faults


def _address_faults(path: str, entry: dict[Any, Any], taken: dict[str, str]) -> list[str]:
    faults, side = [], entry.get("packet_side")
    listed = [(f"{path}.address", entry.get("address"))]
    if isinstance(side, dict):
        listed.append((f"{path}.packet_side.address", side.get("address")))
    for where, address in listed:
        if not isinstance(address, str) or not address:
            continue
        try:
            IPv4Address(address)
        except ValueError:
            faults.append(f"{where}: must be an IPv4 address, got {address!r}")
            continue
        if taken.setdefault(address, where) != where:
            faults.append(f"{where}: is {taken[address]} already, got {address!r}")
    return faults


def _prefix_faults(path: str, entry: dict[Any, Any], networks: list[tuple[IPv4Network, str]]) -> list[str]:
    faults, prefixes = [], entry.get("prefixes")
    for index, prefix in enumerate(prefixes if isinstance(prefixes, list) else []):
        where = f"{path}.prefixes[{index}]"
        if not isinstance(prefix, str) or not prefix:
            continue
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
