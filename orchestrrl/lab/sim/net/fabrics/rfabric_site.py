"""Where an RFabric's servers are on its site, and the site with no more fibres than they need. Pure.

Sites are regular: all PoDs are built alike, for as many servers as the largest has. Where others have fewer, a ToR has
as large a part of its fibres as it has servers of its places, and a PoD of its lanes to the core, rounded up. ToRs that
are alone on their rails have none. Nobody would buy more, and circuits must not use what nobody buys.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from orchestrrl.lab.sim.net.model import Ints
from planner.fabric.model import EndpointId
from planner.fabric.topology import Server, Site, Switch, Tier


def evenly(count: int, per_pod: int) -> Ints:
    """[server], its place in as few PoDs as have room: so that what is divided evenly over servers, as stages of a
    pipeline are, is divided as PoDs are."""
    pods = -(-count // per_pod)
    pod = np.arange(count) * pods // max(1, count)
    first = np.searchsorted(pod, pod)
    return np.asarray(pod * per_pod + np.arange(count) - first, np.int64)


def fitted(site: Site, place: Ints) -> Site:
    """With servers in these of its places alone."""
    here = [site.servers[number] for number in place.tolist()]
    wanted = _wanted(site, here)
    ordered = sorted(site.switches, key=lambda each: (each.tier, each.pod or "", each.id))
    switches = [
        switch
        for _, group in groupby(ordered, key=lambda each: (each.tier, each.pod))
        for switch in _trimmed(site, list(group), wanted)
    ]
    there = {(switch.id, port) for switch in switches for ports in switch.ports.values() for port in ports}
    kept = [
        replace(each, ports=frozenset(port for port in each.ports if (each.switch, port) in there))
        for each in site.reservations
    ]
    return replace(site, switches=tuple(switches), reservations=tuple(each for each in kept if each.ports))


def _wanted(site: Site, here: Sequence[Server]) -> Mapping[EndpointId, int]:
    """Fibres of each ToR and uplink in its PoD."""
    if len(site.tors) == len({tor.rail for tor in site.tors}):
        return Counter()
    fibres = {endpoint: len(ends) for endpoint, ends in site.fibres[Tier.AGG].items()}
    tors, tor_places = _by_tor(here), _by_tor(site.servers)
    pods, pod_places = (Counter(each.pod for each in some) for some in (here, site.servers))
    return {tor.id: -(-fibres[tor.id] * tors[tor.id] // tor_places[tor.id]) for tor in site.tors} | {
        each.id: -(-fibres[each.id] * pods[each.pod] // pod_places[each.pod]) for each in site.uplinks
    }


def _by_tor(servers: Iterable[Server]) -> Counter[EndpointId]:
    return Counter(tor for each in servers for tor in set(each.tors))


def _trimmed(site: Site, group: Sequence[Switch], wanted: Mapping[EndpointId, int]) -> list[Switch]:
    """Evenly over the switches of a PoD or of the core, what does not divide on the first ones, as a site is laid."""
    found = []
    for number, switch in enumerate(group):
        ports = {}
        for endpoint, numbers in switch.ports.items():
            count = wanted[endpoint] // len(group) + (number < wanted[endpoint] % len(group))
            ports[endpoint] = _chosen(site, switch, numbers, count)
        found.append(replace(switch, ports=ports))
    return found


def _chosen(site: Site, switch: Switch, ports: Sequence[int], count: int) -> tuple[int, ...]:
    """Those that are kept for a purpose first, but for a half that has none."""
    reserved = [port for port in ports if (switch.id, port) in site.reserved][: count // 2]
    free = [port for port in ports if (switch.id, port) not in site.reserved]
    return tuple(sorted([*free[: count - len(reserved)], *reserved]))
