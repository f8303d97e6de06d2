"""Generate regular sites: rail-aligned PoDs, fibres spread over the switches, and lanes reserved for responses.

Each switch of a PoD has fibres to each ToR and uplink of the PoD, and each core switch has fibres to each uplink. Any
two endpoints of a PoD, or of the core, can therefore be connected on each of its switches. If one switch has too few
ports, the fibres are spread over several switches.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Annotated, Any, get_type_hints

from planner.fabric.model import EndpointId, OcsId
from planner.fabric.topology import (
    DEVICES,
    RESPONSES,
    Pod,
    PodRole,
    Reservation,
    Server,
    ServerId,
    Site,
    Switch,
    SwitchModel,
    Tier,
    Tor,
    Uplink,
)
from planner.model import GpuId

MOST_GPUS = 2**20  # beyond any site; larger numbers are mistakes and would exhaust memory
MOST_FIBRES = 2**22
MOST_GBPS = 10_000.0
_TOR_NICS = 32  # half of a ToR's 64 ports go to servers


@dataclass(frozen=True, slots=True)
class ShapeFault:
    """An invalid parameter of a site and its current value. `message` states the problem or the required change."""

    parameter: str
    message: str
    value: object


class ImpossibleSite(ValueError):
    """Raised if no site can have the given parameters. `faults` lists everything that is wrong."""

    def __init__(self, faults: Iterable[ShapeFault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(f"{each.parameter}: {each.message}, got {each.value}" for each in self.faults))


@dataclass(frozen=True, slots=True)
class SiteNumber:
    """One numeric parameter of a site's shape: its description, its usual value and its minimum."""

    text: str
    usual: str = ""
    least: int = 1


@dataclass(frozen=True, slots=True)
class SiteShape:
    """The parameters of a regular site. A parameter that is None has its usual value. Raises ImpossibleSite if
    parameters are invalid.

    The default NICs, links and switches are those of the paper's simulations (section 7). By default, ToRs have as much
    capacity to the switches as to their servers, and the uplinks of a PoD have half of that capacity.
    """

    train_pods: Annotated[int, SiteNumber("PoDs that train.", least=0)] = 1
    gen_pods: Annotated[int, SiteNumber("PoDs that generate.", least=0)] = 1
    servers_per_pod: Annotated[int, SiteNumber("Servers per PoD.")] = 8
    gpus_per_server: Annotated[int, SiteNumber("GPUs per server.")] = 8
    nics_per_server: Annotated[int, SiteNumber("NICs per server.")] = 8
    # If fewer than NICs, several NICs of a server are on one ToR.
    rails: Annotated[int | None, SiteNumber("ToRs that one server's NICs connect to.", usual="one per NIC")] = None
    servers_per_tor: Annotated[
        int | None, SiteNumber("Maximum servers per ToR.", usual="as many as fit on 32 ports")
    ] = None
    tor_uplinks: Annotated[int | None, SiteNumber("Fibres per ToR.", usual="capacity up equals capacity down")] = None
    uplinks_per_pod: Annotated[int, SiteNumber("Bundles that a PoD's lanes to the core form.")] = 1
    core_lanes: Annotated[
        int | None, SiteNumber("Lanes from each PoD to the core.", usual="half of its ToRs' fibres")
    ] = None
    response_lanes: Annotated[
        int | None,
        SiteNumber(
            "Lanes of each Gen PoD reserved for responses.", "1 if Train PoDs keep half of their lanes", least=0
        ),
    ] = None
    link_gbps: Annotated[float, SiteNumber("Gbps of a circuit, per direction.")] = 200.0
    nic_gbps: Annotated[float, SiteNumber("Gbps of a NIC, per direction.")] = 200.0
    agg_device: SwitchModel = DEVICES["piezo_polatis"]
    core_device: SwitchModel = DEVICES["piezo_polatis"]
    agg_switches: Annotated[int | None, SiteNumber("Switches per PoD.", usual="the fewest with enough ports")] = None
    core_switches: Annotated[int | None, SiteNumber("Core switches.", usual="the fewest with enough ports")] = None

    def __post_init__(self) -> None:
        faults = list(_out_of_bounds(self)) or list(_at_odds(self))
        if faults:
            raise ImpossibleSite(faults)

    @property
    def pods(self) -> int:
        return self.train_pods + self.gen_pods

    @property
    def rail_count(self) -> int:
        return self.nics_per_server if self.rails is None else self.rails

    @property
    def nics_per_rail(self) -> int:
        """The number of NICs that one server has on each rail."""
        return self.nics_per_server // self.rail_count

    @property
    def blocks(self) -> int:
        """The number of blocks per PoD. A block is a group of servers that share ToRs."""
        most = self.servers_per_tor or max(1, _TOR_NICS // self.nics_per_rail)
        return -(-self.servers_per_pod // most)

    @property
    def tor_fibres(self) -> int:
        most_servers = -(-self.servers_per_pod // self.blocks)
        return self.tor_uplinks or math.ceil(most_servers * self.nics_per_rail * self.nic_gbps / self.link_gbps)

    @property
    def uplinks(self) -> int:
        """The number of uplinks per PoD; 0 if the site has only one PoD and therefore no core."""
        return self.uplinks_per_pod if self.pods > 1 else 0

    @property
    def uplink_lanes(self) -> int:
        """The number of fibres per uplink."""
        lanes = self.core_lanes or self.blocks * self.rail_count * self.tor_fibres // 2
        return max(1, lanes // self.uplinks_per_pod)


def site_numbers() -> Mapping[str, tuple[Any, SiteNumber]]:
    """Return the type and the description of each numeric parameter of a shape, by name."""
    hints = get_type_hints(SiteShape, include_extras=True)
    return {
        name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items() if hasattr(hint, "__metadata__")
    }


def _out_of_bounds(shape: SiteShape) -> Iterator[ShapeFault]:
    for name, (kind, number) in site_numbers().items():
        value = getattr(shape, name)
        if kind is float and not 0 < value <= MOST_GBPS:
            yield ShapeFault(name, f"must be > 0 and <= {MOST_GBPS:g}", value)
        elif kind is not float and value is not None and not number.least <= value <= MOST_GPUS:
            yield ShapeFault(name, f"must be >= {number.least} and <= {MOST_GPUS}", value)


def _at_odds(shape: SiteShape) -> Iterator[ShapeFault]:
    gpus, nics = shape.gpus_per_server, shape.nics_per_server
    if not shape.pods:
        yield ShapeFault("gen_pods", "must be >= 1 together with train_pods", shape.gen_pods)
    if gpus % nics and nics % gpus:
        yield ShapeFault(
            "nics_per_server", f"must divide a server's {gpus} GPUs evenly, or be a multiple of them", nics
        )
    if nics % shape.rail_count:
        yield ShapeFault("rails", f"must divide the {nics} NICs of a server", shape.rail_count)
        return
    if shape.core_lanes is not None and shape.core_lanes % shape.uplinks_per_pod:
        message = f"must be a multiple of the {shape.uplinks_per_pod} uplinks of a PoD"
        yield ShapeFault("core_lanes", message, shape.core_lanes)
    total = shape.pods * shape.servers_per_pod * max(gpus, nics)
    if total > MOST_GPUS:
        yield ShapeFault(
            "servers_per_pod", f"must give at most {MOST_GPUS} GPUs or NICs over all servers, not {total}", total
        )
    fibres = shape.blocks * shape.rail_count * shape.tor_fibres + 2 * shape.uplinks * shape.uplink_lanes
    if shape.pods * fibres > MOST_FIBRES:
        worst = "tor_uplinks" if shape.tor_uplinks else "core_lanes" if shape.core_lanes else "servers_per_pod"
        message = f"must give at most {MOST_FIBRES} fibres over all PoDs, not {shape.pods * fibres}"
        yield ShapeFault(worst, message, getattr(shape, worst))


def regular_site(shape: SiteShape) -> Site:
    """Return a site of this shape that passes the checks of `orchestrrl/fabric/site.py`.

    Raises ImpossibleSite if no site has this shape.
    """
    faults: list[ShapeFault] = []
    agg = _fewest_switches(_agg_fibres(shape), shape.agg_device.ports, shape.agg_switches)
    core = _fewest_switches(_core_fibres(shape), shape.core_device.ports, shape.core_switches)
    if agg is None:
        faults.append(_agg_too_small(shape))
    if core is None:
        faults.append(_core_too_small(shape))
    if agg is None or core is None:
        raise ImpossibleSite(faults)
    return _site(shape, agg, core)


def _agg_fibres(shape: SiteShape) -> Counter[int]:
    """Return, for each number of fibres, how many endpoints of a PoD have that number."""
    return Counter({shape.tor_fibres: shape.blocks * shape.rail_count}) + Counter({shape.uplink_lanes: shape.uplinks})


def _core_fibres(shape: SiteShape) -> Counter[int]:
    return Counter({shape.uplink_lanes: shape.pods * shape.uplinks})


def _fewest_switches(fibres: Counter[int], radix: int, wanted: int | None) -> int | None:
    """Return the smallest number of switches whose ports suffice if the fibres are spread evenly and each endpoint has
    a fibre to each switch. If `wanted` is given, only that number is considered. Return None if no number suffices."""
    if not +fibres:
        return 0
    for switches in range(1, min(fibres) + 1) if wanted is None else (wanted,):
        if switches <= min(fibres) and _most_ports(fibres, switches) <= radix:
            return switches
    return None


def _most_ports(fibres: Counter[int], switches: int) -> int:
    """Return the number of ports used on the fullest switch if the fibres are spread over `switches` switches."""
    return sum(endpoints * -(-count // switches) for count, endpoints in fibres.items())


def _agg_too_small(shape: SiteShape) -> ShapeFault:
    fibres = _agg_fibres(shape)
    endpoints = f"{_number(shape.blocks * shape.rail_count, 'ToR')} and {_number(shape.uplinks, 'uplink')} of a PoD"
    if shape.agg_switches is not None:
        return _given("agg", shape.agg_switches, fibres, shape.agg_device)
    if fibres.total() > shape.agg_device.ports:
        change = "take fewer servers_per_pod, more servers_per_tor or another device"
    elif shape.uplinks and shape.uplink_lanes < shape.tor_fibres:
        change = f"raise core_lanes ({shape.uplink_lanes * shape.uplinks}), lower tor_uplinks ({shape.tor_fibres})"
    else:
        change = f"raise tor_uplinks ({shape.tor_fibres}), lower core_lanes ({shape.uplink_lanes * shape.uplinks})"
    most = min(fibres)
    need = _most_ports(fibres, most)
    message = f"must have more ports for the {endpoints}: even over {most} switches one needs {need}; {change}"
    return ShapeFault("agg_device", message, f"{shape.agg_device.name} ({shape.agg_device.ports} ports)")


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _core_too_small(shape: SiteShape) -> ShapeFault:
    fibres = _core_fibres(shape)
    if shape.core_switches is not None:
        return _given("core", shape.core_switches, fibres, shape.core_device)
    message = (
        f"must have a port for one fibre of each of {fibres.total()} uplinks;"
        " take fewer PoDs or uplinks_per_pod, or another device"
    )
    return ShapeFault("core_device", message, f"{shape.core_device.name} ({shape.core_device.ports} ports)")


def _given(tier: str, switches: int, fibres: Counter[int], device: SwitchModel) -> ShapeFault:
    if switches > min(fibres):
        message = (
            f"must be <= {min(fibres)}, as each endpoint needs a fibre to each switch, and some have only that many"
        )
        return ShapeFault(f"{tier}_switches", message, switches)
    need = _most_ports(fibres, switches)
    return ShapeFault(
        f"{tier}_switches", f"one of them needs {need} ports, and a {device.name} has {device.ports}", switches
    )


def _site(shape: SiteShape, agg: int, core: int) -> Site:
    pods = [
        Pod(EndpointId(name), role)
        for role, count in ((PodRole.TRAIN, shape.train_pods), (PodRole.GEN, shape.gen_pods))
        for name in _names(role, count)
    ]
    tors = {pod.id: _tors(shape, pod.id) for pod in pods}
    uplinks = {
        pod.id: [Uplink(EndpointId(name), pod.id) for name in _names(f"{pod.id}/up", shape.uplinks)] for pod in pods
    }
    lanes = {uplink.id: shape.uplink_lanes for of_pod in uplinks.values() for uplink in of_pod}
    switches = [
        switch
        for pod in pods
        for switch in _switches(
            f"{pod.id}/agg",
            agg,
            {tor.id: shape.tor_fibres for tor in tors[pod.id]} | {each.id: lanes[each.id] for each in uplinks[pod.id]},
            Tier.AGG,
            pod.id,
            shape.agg_device,
        )
    ]
    in_core = _switches("core", core, lanes, Tier.CORE, None, shape.core_device)
    return Site(
        link_gbps=shape.link_gbps,
        nic_gbps=shape.nic_gbps,
        pods=tuple(pods),
        tors=tuple(chain.from_iterable(tors.values())),
        uplinks=tuple(chain.from_iterable(uplinks.values())),
        servers=tuple(_servers(shape, pods, tors)),
        switches=(*switches, *in_core),
        reservations=tuple(_responses(shape, pods, uplinks, in_core)),
    )


def _names(stem: str, count: int) -> list[str]:
    """Return names of equal length, so that their alphabetical order is the order of their numbers."""
    width = len(str(count - 1))
    return [f"{stem}{number:0{width}}" for number in range(count)]


def _tors(shape: SiteShape, pod: EndpointId) -> list[Tor]:
    """Return a PoD's ToRs, ordered by block and rail. A ToR with several NICs of one server has no rail."""
    blocks = [f"{name}-" for name in _names(f"{pod}/b", shape.blocks)] if shape.blocks > 1 else [f"{pod}/"]
    return [
        Tor(EndpointId(name), pod, rail if shape.nics_per_rail == 1 else None)
        for block in blocks
        for rail, name in enumerate(_names(f"{block}r", shape.rail_count))
    ]


def _servers(shape: SiteShape, pods: Iterable[Pod], tors: Mapping[EndpointId, list[Tor]]) -> Iterator[Server]:
    """Yield the servers. GPUs are numbered consecutively over the site. The blocks of a PoD differ by at most one
    server."""
    gpu = 0
    for pod in pods:
        for number, name in enumerate(_names(f"{pod.id}/s", shape.servers_per_pod)):
            first = number * shape.blocks // shape.servers_per_pod * shape.rail_count
            cabled = tuple(tors[pod.id][first + nic // shape.nics_per_rail].id for nic in range(shape.nics_per_server))
            gpus = tuple(map(GpuId, range(gpu, gpu + shape.gpus_per_server)))
            yield Server(ServerId(name), pod.id, gpus, cabled)
            gpu += shape.gpus_per_server


def _switches(
    name: str, count: int, fibres: Mapping[EndpointId, int], tier: Tier, pod: EndpointId | None, device: SwitchModel
) -> list[Switch]:
    """Return `count` switches. Every endpoint is cabled to adjacent ports of each switch. If an endpoint's fibres do
    not divide evenly, the first switches get one more fibre each. All endpoints use the same first switches, so that
    the ports of any two endpoints match."""
    switches = []
    for number, id in enumerate(_names(name, count)):
        ports: dict[EndpointId, tuple[int, ...]] = {}
        port = 1
        for endpoint, total in fibres.items():
            here = total // count + (number < total % count)
            ports[endpoint] = tuple(range(port, port + here))
            port += here
        switches.append(Switch(OcsId(id), tier, pod, device, ports))
    return switches


def _response_lanes(shape: SiteShape) -> int:
    """Return the number of lanes that each Gen PoD reserves for responses. Raises ImpossibleSite if a PoD would have no
    unreserved lane left."""
    train, gen = shape.train_pods, shape.gen_pods
    lanes = shape.uplink_lanes * shape.uplinks
    if not train or not gen or shape.response_lanes == 0:
        return 0
    taken = -(-(shape.response_lanes or 1) * gen // min(train, gen))  # of the PoD that reserves most
    if shape.response_lanes is None:
        return 1 if 2 * taken <= lanes else 0
    if taken >= lanes:
        message = (
            f"must leave a lane free, but takes {taken} of the {lanes} lanes of a PoD, as {gen} Gen PoDs stream to"
            f" {train} Train PoDs; lower it (0 reserves none) or raise core_lanes"
        )
        raise ImpossibleSite([ShapeFault("response_lanes", message, shape.response_lanes)])
    return shape.response_lanes


def _responses(
    shape: SiteShape, pods: Iterable[Pod], uplinks: Mapping[EndpointId, list[Uplink]], core: Iterable[Switch]
) -> Iterator[Reservation]:
    """Yield the reservations for responses. Each reserved lane of a Gen PoD is paired with a lane of a Train PoD on the
    same switch. The reserved lanes use the last ports of each PoD, and are taken from the core switches round-robin.

    PoDs are cabled alike, so the n-th lanes of any two PoDs end on the same switch. Pairs are formed in groups, each
    with as many pairs as there are PoDs of the role with fewer PoDs. The n-th group uses each PoD at most once, with
    its n-th lane.
    """
    of_role = {role: [pod.id for pod in pods if pod.role is role] for role in PodRole}
    train, gen = of_role[PodRole.TRAIN], of_role[PodRole.GEN]
    kept: dict[OcsId, set[int]] = defaultdict(set)
    lanes: dict[EndpointId, list[tuple[OcsId, int]]] = {}
    for pod in (*train, *gen):
        ends = [
            [(switch.id, port) for uplink in uplinks[pod] for port in switch.ports[uplink.id]][::-1] for switch in core
        ]
        lanes[pod] = [end for row in zip_longest(*ends) for end in row if end is not None]
    for turn in range(_response_lanes(shape) * len(gen)):
        place = turn // min(len(train), len(gen))
        for pod in (train[turn % len(train)], gen[turn % len(gen)]):
            switch, port = lanes[pod][place]
            kept[switch].add(port)
    for switch, ports in sorted(kept.items()):
        yield Reservation(RESPONSES, switch, frozenset(ports))
