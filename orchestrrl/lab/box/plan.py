"""The plan of a site in a box: namespaces, addresses, and the two ends of each fibre. The functions have no side
effects.

ToR n is the namespace `t<n>` with the address 198.18.x.y, and its hosts have addresses in 10.x.y.0/24. Host n is
`h<n>`, and switch n is `o<n>`. A ToR's fibres are `swp1`, `swp2`, ... in the order of the site file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.fabric.light import Interface, fibres_of
from planner.fabric.model import EndpointId, OcsId, Port
from planner.fabric.topology import ServerId, Site
from planner.model import GpuId

HOSTS_PER_TOR = 200
TORS = 4000
# Rate of the electrical network between ToRs, as a fraction of a circuit's.
PACKET_SIDE_SHARE = 0.1

End = Interface | Port  # the far end of the fibre at a switch port


def is_fibre(end: End) -> bool:
    """Return whether the far end of a fibre is an interface of a ToR. Otherwise, it is a port of another switch, and
    the fibre is a lane."""
    return isinstance(end[1], str)


@dataclass(frozen=True, slots=True)
class Nic:
    """A NIC of a host with its address, and the cable to its ToR with the names of both interfaces."""

    interface: str
    address: str
    tor: EndpointId
    tor_interface: str


@dataclass(frozen=True)
class TestbedPlan:
    """Namespaces, addresses and cables of a site in a box. `ends` maps each switch port to the far end of its fibre.
    `bps_per_gbps` is the rate in the box, in bit/s, that represents 1 Gbps of the site."""

    site: Site
    bps_per_gbps: float
    tors: Mapping[EndpointId, str]  # namespaces
    hosts: Mapping[ServerId, str]
    switches: Mapping[OcsId, str]
    addresses: Mapping[EndpointId, str]
    gateways: Mapping[EndpointId, str]  # the hosts' gateway on their ToR
    prefixes: Mapping[EndpointId, str]
    packet_side: Mapping[EndpointId, str]
    interfaces: Mapping[EndpointId, tuple[str, ...]]  # interfaces of fibres
    nics: Mapping[ServerId, tuple[Nic, ...]]
    ends: Mapping[Port, End]

    def nic_of(self, gpu: GpuId) -> tuple[str, str]:
        """Return the namespace and the address from which a GPU sends."""
        server = self.site.server_of[gpu]
        return self.hosts[server.id], self.nics[server.id][server.nic(gpu)].address

    def tbf(self, gbps: float) -> str:
        """Return the tc arguments of a line in the box that represents a line of `gbps` on the site. The line's queue
        holds packets for 50 ms, or 30 kB if that is more. This is long enough for TCP to fill the line, and short
        enough for the queue to drain quickly."""
        bps = gbps * self.bps_per_gbps
        burst = max(8000, int(bps / 8 * 0.004))
        return f"tbf rate {int(bps)}bit burst {burst} limit {burst + max(30_000, int(bps / 8 * 0.05))}"


def plan_of(site: Site, circuit_mbps: float) -> TestbedPlan:
    """Return the plan of a site in a box whose circuits have the rate `circuit_mbps`. Raises ValueError if the site has
    too many ToRs or switches, or a ToR has too many NICs."""
    if len(site.tors) > TORS or len(site.switches) > TORS:
        raise ValueError(f"a box can hold at most {TORS} ToRs, got {len(site.tors)}")
    numbers = {tor.id: n for n, tor in enumerate(site.tors, start=1)}
    interfaces = {tor: tuple(f"swp{k}" for k in range(1, len(fibres_of(site, tor)) + 1)) for tor in numbers}
    return TestbedPlan(
        site,
        circuit_mbps * 1e6 / site.link_gbps,
        tors={tor: f"t{n}" for tor, n in numbers.items()},
        hosts={server.id: f"h{n}" for n, server in enumerate(site.servers, start=1)},
        switches={switch.id: f"o{n}" for n, switch in enumerate(site.switches, start=1)},
        addresses={tor: f"198.18.{n >> 8}.{n & 255}" for tor, n in numbers.items()},
        gateways={tor: f"10.{n >> 8}.{n & 255}.1" for tor, n in numbers.items()},
        prefixes={tor: f"10.{n >> 8}.{n & 255}.0/24" for tor, n in numbers.items()},
        packet_side={tor: f"198.19.{n >> 8}.{n & 255}" for tor, n in numbers.items()},
        interfaces=interfaces,
        nics=_nics(site, numbers),
        ends=_ends(site, interfaces),
    )


def _nics(site: Site, numbers: Mapping[EndpointId, int]) -> dict[ServerId, tuple[Nic, ...]]:
    taken = dict.fromkeys(numbers, 0)
    found: dict[ServerId, tuple[Nic, ...]] = {}
    for server in site.servers:
        nics = []
        for k, tor in enumerate(server.tors):
            taken[tor] += 1
            if taken[tor] > HOSTS_PER_TOR:
                raise ValueError(f"a ToR in a box can have at most {HOSTS_PER_TOR} NICs, {tor} has more")
            n = numbers[tor]
            nics.append(Nic(f"eth{k}", f"10.{n >> 8}.{n & 255}.{taken[tor] + 1}", tor, f"host{taken[tor]}"))
        found[server.id] = tuple(nics)
    return found


def _ends(site: Site, interfaces: Mapping[EndpointId, Sequence[str]]) -> dict[Port, End]:
    ends: dict[Port, End] = {
        port: (tor, interface)
        for tor, names in interfaces.items()
        for port, interface in zip(fibres_of(site, tor), names, strict=True)
    }
    for lane in site.lanes:
        agg, core = lane.ends
        ends[agg], ends[core] = core, agg
    return ends
