"""Regular sites from a few numbers: rail-aligned PoDs, fibres spread over the switches, a slice kept for responses.

Each switch of a PoD is fibred to each of its ToRs and uplinks, and each of the core to each uplink, so that any two
endpoints share every switch. Where a switch's ports do not suffice, more switches share the fibres.
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

MOST_GPUS = 2**20  # beyond any site; what is more is a slip, and would take all memory
MOST_FIBRES = 2**22
MOST_GBPS = 10_000.0
_TOR_NICS = 32  # of a ToR with 64 ports, one half goes down


@dataclass(frozen=True, slots=True)
class ShapeFault:
    """What is wrong with a parameter, or what to change. `value`: what it is."""

    parameter: str
    message: str
    value: object


class ImpossibleSite(ValueError):
    """No site has these parameters. With all faults."""

    def __init__(self, faults: Iterable[ShapeFault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(f"{each.parameter}: {each.message}, got {each.value}" for each in self.faults))


@dataclass(frozen=True, slots=True)
class SiteNumber:
    """What a number of a site's shape is, what it usually is where none is given, and the least that it may be."""

    text: str
    usual: str = ""
    least: int = 1


@dataclass(frozen=True, slots=True)
class SiteShape:
    """What a regular site is made of; None: as it usually is. Raises ImpossibleSite.

    By default NICs, links and switches are those of the paper's simulations (section 7), ToRs have as much capacity up
    as down, and half of that fits through a PoD's uplinks.
    """

    train_pods: Annotated[int, SiteNumber("PoDs that train.", least=0)] = 1
    gen_pods: Annotated[int, SiteNumber("PoDs that generate.", least=0)] = 1
    servers_per_pod: Annotated[int, SiteNumber("Servers of each PoD.")] = 8
    gpus_per_server: Annotated[int, SiteNumber("GPUs of each server.")] = 8
    nics_per_server: Annotated[int, SiteNumber("NICs of each server.")] = 8
    # With fewer than NICs, several NICs of a server are on one ToR.
    rails: Annotated[int | None, SiteNumber("ToRs that the NICs of one server are on.", usual="one for each NIC")] = (
        None
    )
    servers_per_tor: Annotated[
        int | None, SiteNumber("Servers on one ToR, at most.", usual="as many as 32 ports take")
    ] = None
    tor_uplinks: Annotated[int | None, SiteNumber("Fibres of each ToR.", usual="for as much capacity up as down")] = (
        None
    )
    uplinks_per_pod: Annotated[int, SiteNumber("Bundles that a PoD's lanes to the core are in.")] = 1
    core_lanes: Annotated[
        int | None, SiteNumber("Lanes of each PoD to the core.", usual="half of its ToRs' fibres")
    ] = None
    response_lanes: Annotated[
        int | None,
        SiteNumber(
            "Lanes of each Gen PoD that are kept for responses.", "1 if Train PoDs keep half of theirs", least=0
        ),
    ] = None
    link_gbps: Annotated[float, SiteNumber("Of a circuit, each way.")] = 200.0
    nic_gbps: Annotated[float, SiteNumber("Of a NIC, each way.")] = 200.0
    agg_device: SwitchModel = DEVICES["piezo_polatis"]
    core_device: SwitchModel = DEVICES["piezo_polatis"]
    agg_switches: Annotated[int | None, SiteNumber("Switches of each PoD.", usual="as few as have the ports")] = None
    core_switches: Annotated[int | None, SiteNumber("Switches of the core.", usual="as few as have the ports")] = None

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
        """Of one server."""
        return self.nics_per_server // self.rail_count

    @property
    def blocks(self) -> int:
        """Groups of a PoD's servers that share ToRs."""
        most = self.servers_per_tor or max(1, _TOR_NICS // self.nics_per_rail)
        return -(-self.servers_per_pod // most)

    @property
    def tor_fibres(self) -> int:
        most_servers = -(-self.servers_per_pod // self.blocks)
        return self.tor_uplinks or math.ceil(most_servers * self.nics_per_rail * self.nic_gbps / self.link_gbps)

    @property
    def uplinks(self) -> int:
        """Of each PoD. One PoD alone has no core."""
        return self.uplinks_per_pod if self.pods > 1 else 0

    @property
    def uplink_lanes(self) -> int:
        """Fibres of one uplink."""
        lanes = self.core_lanes or self.blocks * self.rail_count * self.tor_fibres // 2
        return max(1, lanes // self.uplinks_per_pod)


def site_numbers() -> Mapping[str, tuple[Any, SiteNumber]]:
    """The type of each number of a shape, and what it is."""
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
        yield ShapeFault("gen_pods", "there must be PoDs, of train_pods or gen_pods", shape.gen_pods)
    if gpus % nics and nics % gpus:
        yield ShapeFault("nics_per_server", f"must share {gpus} GPUs of a server evenly", nics)
    if nics % shape.rail_count:
        yield ShapeFault("rails", f"must divide the {nics} NICs of a server", shape.rail_count)
        return
    if shape.core_lanes is not None and shape.core_lanes % shape.uplinks_per_pod:
        message = f"must be a multiple of the {shape.uplinks_per_pod} uplinks of a PoD"
        yield ShapeFault("core_lanes", message, shape.core_lanes)
    total = shape.pods * shape.servers_per_pod * max(gpus, nics)
    if total > MOST_GPUS:
        yield ShapeFault(
            "servers_per_pod", f"all servers together have {total} GPUs or NICs, more than {MOST_GPUS}", total
        )
    fibres = shape.blocks * shape.rail_count * shape.tor_fibres + 2 * shape.uplinks * shape.uplink_lanes
    if shape.pods * fibres > MOST_FIBRES:
        worst = "tor_uplinks" if shape.tor_uplinks else "core_lanes" if shape.core_lanes else "servers_per_pod"
        message = f"all PoDs together have {shape.pods * fibres} fibres on switches, more than {MOST_FIBRES}"
        yield ShapeFault(worst, message, getattr(shape, worst))


def regular_site(shape: SiteShape) -> Site:
    """Sound by `orchestrrl/fabric/site.py`. Raises ImpossibleSite."""
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
    """How many endpoints of a PoD have how many fibres."""
    return Counter({shape.tor_fibres: shape.blocks * shape.rail_count}) + Counter({shape.uplink_lanes: shape.uplinks})


def _core_fibres(shape: SiteShape) -> Counter[int]:
    return Counter({shape.uplink_lanes: shape.pods * shape.uplinks})


def _fewest_switches(fibres: Counter[int], radix: int, wanted: int | None) -> int | None:
    """Over which the fibres of all endpoints can be spread evenly, each endpoint on each; None: there is no such
    number."""
    if not +fibres:
        return 0
    for switches in range(1, min(fibres) + 1) if wanted is None else (wanted,):
        if switches <= min(fibres) and _most_ports(fibres, switches) <= radix:
            return switches
    return None


def _most_ports(fibres: Counter[int], switches: int) -> int:
    """Of the fullest switch, if the fibres are spread over so many."""
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
    message = f"has too few ports for the {endpoints}: even over {most} switches one needs {need}; {change}"
    return ShapeFault("agg_device", message, f"{shape.agg_device.name} ({shape.agg_device.ports} ports)")


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _core_too_small(shape: SiteShape) -> ShapeFault:
    fibres = _core_fibres(shape)
    if shape.core_switches is not None:
        return _given("core", shape.core_switches, fibres, shape.core_device)
    message = (
        f"has too few ports for one fibre of each of {fibres.total()} uplinks;"
        " take fewer PoDs or uplinks_per_pod, or another device"
    )
    return ShapeFault("core_device", message, f"{shape.core_device.name} ({shape.core_device.ports} ports)")


def _given(tier: str, switches: int, fibres: Counter[int], device: SwitchModel) -> ShapeFault:
    if switches > min(fibres):
        message = f"must be <= {min(fibres)}, as each endpoint has a fibre to each switch, and some have no more"
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
    """Of one length, so that they sort as they count."""
    width = len(str(count - 1))
    return [f"{stem}{number:0{width}}" for number in range(count)]


def _tors(shape: SiteShape, pod: EndpointId) -> list[Tor]:
    """By block and rail. A ToR of several NICs of a server is of no rail."""
    blocks = [f"{name}-" for name in _names(f"{pod}/b", shape.blocks)] if shape.blocks > 1 else [f"{pod}/"]
    return [
        Tor(EndpointId(name), pod, rail if shape.nics_per_rail == 1 else None)
        for block in blocks
        for rail, name in enumerate(_names(f"{block}r", shape.rail_count))
    ]


def _servers(shape: SiteShape, pods: Iterable[Pod], tors: Mapping[EndpointId, list[Tor]]) -> Iterator[Server]:
    """GPUs are numbered through the site; blocks differ by no more than one server."""
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
    """Every endpoint on each of them, in ports side by side. What does not divide evenly goes to the first switches,
    for all alike: so the ports of any two endpoints match."""
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
    """Of each Gen PoD. Raises ImpossibleSite where nothing would be left."""
    train, gen = shape.train_pods, shape.gen_pods
    lanes = shape.uplink_lanes * shape.uplinks
    if not train or not gen or shape.response_lanes == 0:
        return 0
    taken = -(-(shape.response_lanes or 1) * gen // min(train, gen))  # of the PoD that gives most
    if shape.response_lanes is None:
        return 1 if 2 * taken <= lanes else 0
    if taken >= lanes:
        message = (
            f"takes {taken} of the {lanes} lanes of a PoD, as {gen} Gen PoDs stream to {train} Train PoDs, and must"
            " leave one; lower it (0: none are kept) or raise core_lanes"
        )
        raise ImpossibleSite([ShapeFault("response_lanes", message, shape.response_lanes)])
    return shape.response_lanes


def _responses(
    shape: SiteShape, pods: Iterable[Pod], uplinks: Mapping[EndpointId, list[Uplink]], core: Iterable[Switch]
) -> Iterator[Reservation]:
    """Each lane of a Gen PoD with one of a Train PoD on the same switch: the last ports of each, the switches in turn.

    PoDs are cabled alike, so the n-th lanes of any two end on one switch. Within a run of as many lanes as there are
    PoDs of the rarer role, each PoD gives its n-th lane at most once.
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
