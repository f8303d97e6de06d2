"""What failures take away: ports, and NICs with those that stand in for them. Pure.

A cross-connect that failed takes both of its ports: nobody knows which end it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.fabric.model import OcsId
from planner.fabric.plan import FabricFailures
from planner.fabric.topology import Server, ServerId, Site

Port = tuple[OcsId, int]


def failed_ports(site: Site, failures: FabricFailures) -> frozenset[Port]:
    """All ports that nothing may end at, those of failed switches included."""
    of_switches = {
        (switch.id, port)
        for switch in site.switches
        if switch.id in failures.switches
        for ports in switch.ports.values()
        for port in ports
    }
    of_circuits = {(each.switch, port) for each in failures.cross_connects for port in each.ports}
    return frozenset(failures.ports | of_switches | of_circuits)


@dataclass(frozen=True, slots=True)
class NicMask:
    """`stand_in`: which NIC of the server carries the traffic of each of its NICs, itself where it is healthy; a server
    that has none left is not there."""

    stand_in: Mapping[ServerId, tuple[int, ...]]
    failed_servers: frozenset[ServerId]
    notes: tuple[str, ...]


def mask_nics(site: Site, failures: FabricFailures) -> NicMask:
    """Traffic of a failed NIC goes over NVLink to a healthy one: one on the same ToR if there is, else the next one.

    Several failed ones do not share a stand-in as long as there is another.
    """
    stand_in: dict[ServerId, tuple[int, ...]] = {}
    notes: list[str] = []
    for server in site.servers:
        if server.id in failures.servers:
            continue
        failed = [nic for nic in range(len(server.tors)) if (server.id, nic) in failures.nics]
        found = _stand_ins(server, failed)
        if found is None:
            notes.append(f"{server.id}: all {len(failed)} NICs have failed, it is cut off")
            continue
        stand_in[server.id] = found
        notes += [f"{server.id}: NIC {nic} is relayed over NIC {found[nic]}" for nic in failed]
    return NicMask(stand_in, failures.servers, tuple(notes))


def _stand_ins(server: Server, failed: list[int]) -> tuple[int, ...] | None:
    count = len(server.tors)
    if failed and len(failed) == count:
        return None
    found = list(range(count))
    extra = {nic: 0 for nic in range(count) if nic not in failed}
    for nic in failed:
        ranked = [
            (more, server.tors[other] != server.tors[nic], (other - nic) % count) for other, more in extra.items()
        ]
        found[nic] = (nic + min(ranked)[2]) % count
        extra[found[nic]] += 1
    return tuple(found)
