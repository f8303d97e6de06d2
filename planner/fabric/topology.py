"""A site: PoDs, servers, ToRs, uplinks, optical switches, and the fibres between them.

    GPU - NIC - ToR ==(OCS-Agg of its PoD)== ToR           inside a PoD
    GPU - NIC - ToR ==(OCS-Agg)== uplink ==(OCS-Core)== uplink ==(OCS-Agg)== ToR     between PoDs

An uplink is a bundle of fibres (lanes) between the OCS-Agg switches of a PoD and the OCS-Core. A lane has a port at
either end. ToRs switch packets; everything above the ToRs is optical. This is the topology of section 5.1 of the paper.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NewType, Protocol, TypeVar

from planner.fabric.model import Cabling, EndpointId, OcsId, Port
from planner.model import GpuId

ServerId = NewType("ServerId", str)


class PodRole(StrEnum):
    TRAIN = "train"
    GEN = "gen"


class Tier(StrEnum):
    AGG = "agg"
    CORE = "core"


@dataclass(frozen=True, slots=True)
class SwitchModel:
    """An optical switch model: its reconfiguration time and number of ports, as in table 2 of the paper."""

    name: str
    reconfiguration_s: float
    ports: int  # numbered from 1

    def __post_init__(self) -> None:
        if not 0 < self.reconfiguration_s < float("inf"):
            raise ValueError(f"reconfiguration_s must be finite and > 0, got {self.reconfiguration_s}")
        if self.ports < 2:
            raise ValueError(f"ports must be >= 2, got {self.ports}")


DEVICES = {
    device.name: device
    for device in (
        SwitchModel("rotornet_infocus", 1e-5, 128),
        SwitchModel("mems_3d_calient", 0.010, 320),
        SwitchModel("piezo_polatis", 0.025, 576),
        SwitchModel("liquid_crystal_coherent", 0.100, 512),
        SwitchModel("robotic_telescent", 120.0, 1008),
    )
}


@dataclass(frozen=True, slots=True)
class Pod:
    id: EndpointId
    role: PodRole


@dataclass(frozen=True, slots=True)
class Tor:
    id: EndpointId
    pod: EndpointId
    rail: int | None = None  # the index of the NICs connected to it; None: not rail-aligned


@dataclass(frozen=True, slots=True)
class Uplink:
    id: EndpointId
    pod: EndpointId


@dataclass(frozen=True, slots=True)
class Server:
    """A server. NIC i is cabled to `tors[i]`. The GPUs are assigned to the NICs evenly, in order. NVLink connects all
    GPUs of the server."""

    id: ServerId
    pod: EndpointId
    gpus: tuple[GpuId, ...]
    tors: tuple[EndpointId, ...]

    def nic(self, gpu: GpuId) -> int:
        """Return the index of the NIC that the GPU uses."""
        return self.gpus.index(gpu) * len(self.tors) // len(self.gpus)


@dataclass(frozen=True, slots=True)
class Switch:
    """An optical switch. `ports` lists the ports of each ToR or uplink, in the order of its fibres."""

    id: OcsId
    tier: Tier
    pod: EndpointId | None  # None for a core switch
    device: SwitchModel
    ports: Mapping[EndpointId, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Core ports reserved for one purpose, such as the slice that carries responses."""

    purpose: str
    switch: OcsId
    ports: frozenset[int]


RESPONSES = "responses"  # the purpose of lanes that stream responses from Gen to Train


@dataclass(frozen=True, slots=True, order=True)
class Lane:
    """One fibre of an uplink, from a port of an OCS-Agg to a port of an OCS-Core."""

    uplink: EndpointId
    agg: OcsId
    agg_port: int
    core: OcsId
    core_port: int

    @property
    def ends(self) -> tuple[Port, Port]:
        """The lane's port on a switch of its PoD, and its port on a core switch."""
        return (self.agg, self.agg_port), (self.core, self.core_port)


@dataclass(frozen=True)
class Site:
    """A valid site. `orchestrrl/fabric/site.py` reads it from a site file and checks it."""

    link_gbps: float  # of a circuit, per direction
    nic_gbps: float
    pods: tuple[Pod, ...]
    tors: tuple[Tor, ...]
    uplinks: tuple[Uplink, ...]
    servers: tuple[Server, ...]
    switches: tuple[Switch, ...]
    reservations: tuple[Reservation, ...] = ()

    @cached_property
    def pod(self) -> Mapping[EndpointId, Pod]:
        return {pod.id: pod for pod in self.pods}

    @cached_property
    def tor(self) -> Mapping[EndpointId, Tor]:
        return {tor.id: tor for tor in self.tors}

    @cached_property
    def switch(self) -> Mapping[OcsId, Switch]:
        return {switch.id: switch for switch in self.switches}

    @cached_property
    def server_of(self) -> Mapping[GpuId, Server]:
        return {gpu: server for server in self.servers for gpu in server.gpus}

    @cached_property
    def pod_of(self) -> Mapping[EndpointId, EndpointId]:
        """The PoD of each ToR and uplink."""
        return {tor.id: tor.pod for tor in self.tors} | {uplink.id: uplink.pod for uplink in self.uplinks}

    def tor_of(self, gpu: GpuId) -> EndpointId:
        """Return the ToR that the GPU's NIC is cabled to."""
        server = self.server_of[gpu]
        return server.tors[server.nic(gpu)]

    @cached_property
    def tors_of(self) -> Mapping[EndpointId, tuple[Tor, ...]]:
        """The ToRs of each PoD."""
        return _of_pods(self.pods, self.tors)

    @cached_property
    def uplinks_of(self) -> Mapping[EndpointId, tuple[Uplink, ...]]:
        """The uplinks of each PoD."""
        return _of_pods(self.pods, self.uplinks)

    @cached_property
    def servers_of(self) -> Mapping[EndpointId, tuple[Server, ...]]:
        """The servers of each PoD."""
        return _of_pods(self.pods, self.servers)

    @cached_property
    def agg_switches_of(self) -> Mapping[EndpointId, tuple[Switch, ...]]:
        """The aggregation switches of each PoD."""
        return _of_pods(self.pods, [switch for switch in self.switches if switch.tier is Tier.AGG])

    @cached_property
    def core_switches(self) -> tuple[Switch, ...]:
        return tuple(switch for switch in self.switches if switch.tier is Tier.CORE)

    @cached_property
    def cabling(self) -> Cabling:
        """The cabling of all switches. The endpoints on a PoD's switches are its ToRs and uplinks; the endpoints on
        core switches are PoDs, with the ports of all their uplinks."""
        ports: dict[OcsId, dict[int, EndpointId]] = {switch.id: {} for switch in self.switches}
        for (switch, port), endpoint in self.owner.items():
            in_core = self.switch[switch].tier is Tier.CORE
            ports[switch][port] = self.pod_of[endpoint] if in_core else endpoint
        return Cabling(ports)

    @cached_property
    def fibres(self) -> Mapping[Tier, Mapping[EndpointId, tuple[Port, ...]]]:
        """The switch ports of each ToR and uplink, by tier. The ports are ordered by switch id and, on one switch, as
        in its `ports`."""
        found: dict[Tier, dict[EndpointId, list[Port]]] = {tier: {} for tier in Tier}
        for switch in sorted(self.switches, key=lambda each: each.id):
            for endpoint, numbers in switch.ports.items():
                found[switch.tier].setdefault(endpoint, []).extend((switch.id, port) for port in numbers)
        return {tier: {name: tuple(ends) for name, ends in of_tier.items()} for tier, of_tier in found.items()}

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """All lanes. The k-th port of an uplink in its PoD and its k-th port in the core, in the order of `fibres`,
        belong to one lane."""
        inside, core = self.fibres[Tier.AGG], self.fibres[Tier.CORE]
        return tuple(
            Lane(uplink.id, agg, agg_port, core_switch, core_port)
            for uplink in self.uplinks
            for (agg, agg_port), (core_switch, core_port) in zip(
                inside.get(uplink.id, ()), core.get(uplink.id, ()), strict=True
            )
        )

    @cached_property
    def lane_at(self) -> Mapping[Port, Lane]:
        """The lane at each core port that has one."""
        return {lane.ends[1]: lane for lane in self.lanes}

    @cached_property
    def owner(self) -> Mapping[Port, EndpointId]:
        """The ToR or uplink that is cabled to each port of each switch."""
        return {
            (switch.id, port): endpoint
            for switch in self.switches
            for endpoint, ports in switch.ports.items()
            for port in ports
        }

    @cached_property
    def reserved(self) -> Mapping[Port, str]:
        """The purpose of each reserved port."""
        return {(each.switch, port): each.purpose for each in self.reservations for port in each.ports}


class _InPod(Protocol):
    @property
    def pod(self) -> EndpointId | None: ...


_Part = TypeVar("_Part", bound=_InPod)


def _of_pods(pods: Iterable[Pod], parts: Iterable[_Part]) -> Mapping[EndpointId, tuple[_Part, ...]]:
    found: dict[EndpointId, list[_Part]] = {pod.id: [] for pod in pods}
    for part in parts:
        if part.pod is not None:
            found[part.pod].append(part)
    return {pod: tuple(of_pod) for pod, of_pod in found.items()}
