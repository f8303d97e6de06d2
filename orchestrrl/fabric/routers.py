"""The routers of a fabric as the configuration has them, in `fabric.routers` and `fabric.steering`, and their faults.

A ToR's fibres have no names in a site's file. `interfaces` names what the ToR calls them, in the file's order: by id of
the switch they end at, then as listed there.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv4Network
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ocs_drivers.base import OcsDriver
from orchestrrl.core.clock import Clock, WallClock
from orchestrrl.core.documents import Name, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:  # heavy, and most configurations have none of it
    from orchestrrl.core.config.schema import Config
    from orchestrrl.core.journal.store import Journal
    from orchestrrl.fabric.packet_routing import FabricRouting
    from orchestrrl.fabric.route_drivers.base import RouteDriver
    from planner.fabric.model import EndpointId
    from planner.fabric.steering import Domain
    from planner.fabric.topology import Site


class PacketSideSettings(Section):
    """A ToR's interface to the electrical network that is always there, and its own address on it."""

    interface: Name
    address: Name


class RouterSettings(Section):
    """One ToR as packets see it; `options` are its driver's."""

    tor: Name
    driver: Name
    options: dict[str, Any] = Field(default_factory=dict)
    address: Name  # its own, answered on every interface
    prefixes: tuple[Name, ...] = Field(default=(), strict=False)  # of the hosts behind it
    interfaces: tuple[Name, ...] = Field(strict=False)  # of its fibres, in the order of the site's file
    packet_side: PacketSideSettings | None = None


class SteeringSettings(Section):
    """How routers are changed."""

    link_up_s: NonNegativeFloat = 2.0  # how long light is waited for, once switches are done
    neighbour_s: NonNegativeFloat = 1.0  # and then for the ToR at the far end to answer
    settle_s: NonNegativeFloat = 0.002  # for packets that are under way on a circuit whose routes have gone
    look_again_s: PositiveFloat = 5.0  # between two looks for links that went dark, and routers that failed
    # As how many circuits in a row the packet side counts; null: packets take it only where no circuits lead.
    packet_hops: PositiveInt | None = None


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
    from planner.fabric.steering import INTERFACE

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


def domain_of(routers: Iterable[RouterSettings], packet_hops: int | None = None) -> "Domain":
    from planner.fabric.model import EndpointId
    from planner.fabric.steering import Domain, PacketSide, Router

    return Domain(
        {
            EndpointId(each.tor): Router(
                each.address,
                each.prefixes,
                None if each.packet_side is None else PacketSide(each.packet_side.interface, each.packet_side.address),
            )
            for each in routers
        },
        packet_hops,
    )


def routing_of(
    config: "Config",
    switches: Mapping[str, OcsDriver],
    journal: "Journal",
    clock: Clock,
    routers: "Mapping[EndpointId, RouteDriver] | None" = None,
) -> "FabricRouting | None":
    """For the daemon: it keeps `tend` as a task. `routers` stand in for those of the configuration. None where nobody
    here steers."""
    site, section = config.site_value(), config.fabric
    if site is None or section is None or not section.routers:
        return None
    from orchestrrl.fabric.packet_routing import FabricRouting
    from orchestrrl.fabric.rerouting import Limits, Steering
    from orchestrrl.fabric.route_drivers.registry import make_driver
    from orchestrrl.fabric.switch_reader import Glass
    from planner.fabric.light import interfaces_at
    from planner.fabric.model import EndpointId

    drivers = routers or {
        EndpointId(each.tor): make_driver(each.driver, each.tor, each.options, clock) for each in section.routers
    }
    how = section.steering
    limits = Limits(how.link_up_s, how.neighbour_s, how.settle_s)
    return FabricRouting(
        site,
        interfaces_at(site, {EndpointId(each.tor): each.interfaces for each in section.routers}),
        Steering(drivers, domain_of(section.routers, how.packet_hops), clock, limits, asyncio.to_thread),
        Glass(site, {switch.id: switches[switch.id] for switch in site.switches}).look,
        journal,
        clock,
        look_again_s=how.look_again_s,
        offload=asyncio.to_thread,
    )
