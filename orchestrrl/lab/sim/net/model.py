"""Types of the network simulator: servers, links, routes, flows, and the messages of a collective.

GPUs are numbered across the cluster, server by server: GPU g is on server g // gpus_per_server, at index g %
gpus_per_server. NICs are numbered in the same way. Links are directed. One link may represent a bundle of equal links
between the same two switches: packets are sprayed over the bundle, so that the bundle behaves as one link of the summed
rate.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass as checked

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

GBPS = 1e9 / 8  # bytes per second
ROCE_BYTES = 44.0  # of headers in a packet's MTU


class LinkTier(StrEnum):
    """The network tier of a link. Reports group bandwidth by tier."""

    NVLINK = "nvlink"
    NIC = "nic"  # between a server and its ToR
    AGG = "agg"  # between ToRs of a PoD: packet switches above them, or circuits
    CORE = "core"  # between PoDs
    DIRECT = "direct"  # circuits that end at NICs


@checked(frozen=True, slots=True)
class Servers:
    """The servers of a fabric. The defaults are the values in section 7.2 of the OrchestrRL paper (arXiv
    2601.01209)."""

    count: Annotated[int, Field(ge=1)]
    gpus_per_server: Annotated[int, Field(ge=1)] = 8
    nics_per_server: Annotated[int, Field(ge=1)] = 8
    nic_gbps: Annotated[float, Field(gt=0)] = 200.0
    # Per GPU and direction: half of the quoted bidirectional bandwidth.
    nvlink_bytes_per_s: Annotated[float, Field(gt=0)] = 200e9
    propagation_s: Annotated[float, Field(ge=0)] = 1e-6  # of each link
    processing_s: Annotated[float, Field(ge=0)] = 0.8e-6  # of each switch on the path
    # Size of an IP packet, including RoCEv2's headers: IPv4 20, UDP 8, BTH 12, ICRC 4.
    mtu_bytes: Annotated[float, Field(gt=ROCE_BYTES)] = 9216.0
    # Ethernet's overhead per packet: header 14, FCS 4, preamble and gap 20.
    frame_bytes: Annotated[float, Field(ge=0)] = 38.0

    def __post_init__(self) -> None:
        if self.gpus_per_server % self.nics_per_server:
            raise ValueError(
                f"gpus_per_server must be a multiple of nics_per_server ({self.nics_per_server}),"
                f" got {self.gpus_per_server}"
            )

    @property
    def gpus(self) -> int:
        return self.count * self.gpus_per_server

    @property
    def nics(self) -> int:
        return self.count * self.nics_per_server

    @property
    def payload_share(self) -> float:
        """The fraction of a NIC's rate that carries payload."""
        return (self.mtu_bytes - ROCE_BYTES) / (self.mtu_bytes + self.frame_bytes)

    @property
    def nic_bytes_per_s(self) -> float:
        """The payload bandwidth of one NIC in one direction, in bytes per second."""
        return self.nic_gbps * GBPS * self.payload_share

    def nic_of(self, gpus: Ints) -> Ints:
        """Return the nearest NIC of each GPU."""
        server, place = np.divmod(gpus, self.gpus_per_server)
        return np.asarray(server * self.nics_per_server + place * self.nics_per_server // self.gpus_per_server)


@dataclass(frozen=True, slots=True, eq=False)  # == of arrays has no single truth value
class GpuFlows:
    """Flows between GPUs that start at the same time."""

    src: Ints  # [flow], GPU
    dst: Ints  # [flow], GPU
    bytes: Floats  # [flow]

    def __post_init__(self) -> None:
        if not len(self.src) == len(self.dst) == len(self.bytes):
            raise ValueError(
                f"src, dst and bytes must be equally long, got {len(self.src)}, {len(self.dst)}, {len(self.bytes)}"
            )

    def __len__(self) -> int:
        return len(self.src)

    @classmethod
    def none(cls) -> "GpuFlows":
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))

    @classmethod
    def of(cls, rows: list[tuple[int, int, float]]) -> "GpuFlows":
        """Build flows from rows of (src, dst, bytes)."""
        if not rows:
            return cls.none()
        src, dst, size = zip(*rows, strict=True)
        return cls(np.array(src, np.int64), np.array(dst, np.int64), np.array(size, np.float64))

    @classmethod
    def joined(cls, parts: "list[GpuFlows]") -> "GpuFlows":
        if not parts:
            return cls.none()
        return cls(
            np.concatenate([each.src for each in parts]),
            np.concatenate([each.dst for each in parts]),
            np.concatenate([each.bytes for each in parts]),
        )

    def times(self, factor: float) -> "GpuFlows":
        return GpuFlows(self.src, self.dst, self.bytes * factor)

    def only(self, these: Bools) -> "GpuFlows":
        return GpuFlows(self.src[these], self.dst[these], self.bytes[these])

    def cross(self, servers: Servers) -> Bools:
        """Return whether each flow is between different servers, as an array indexed by flow."""
        return np.asarray(self.src // servers.gpus_per_server != self.dst // servers.gpus_per_server)

    def merged(self) -> tuple["GpuFlows", Ints]:
        """Merge flows with the same source and destination. Return the merged flows, and an array that maps each
        original flow to the index of its merged flow."""
        width = int(self.dst.max(initial=0)) + 1
        pairs, of = np.unique(self.src * width + self.dst, return_inverse=True)
        size = np.bincount(of, self.bytes, len(pairs)).astype(np.float64)
        return GpuFlows(pairs // width, pairs % width, size), of


@dataclass(frozen=True, slots=True, eq=False)  # == of arrays has no single truth value
class FlowRoutes:
    """The links of each flow in compressed rows. Row f consists of the entries `begin[f]` to `begin[f + 1] - 1`.
    `share` is the fraction of the flow's bytes that cross the link. It is less than 1 if the flow is spread over
    several paths, and more than 1 if a path crosses the link twice."""

    begin: Ints  # [flow + 1]
    link: Ints  # [entry]
    share: Floats  # [entry]
    latency_s: Floats  # [flow], propagation and processing of the first byte


class FlowRouter(Protocol):
    """A function that returns the routes of flows. It has no side effects, and the same flows always take the same
    routes."""

    def __call__(self, src: Ints, dst: Ints) -> FlowRoutes:
        """Return the routes of flows between different GPUs. Raises ValueError if a flow has no path."""
        ...


@dataclass(frozen=True, slots=True, eq=False)  # == of arrays has no single truth value
class LinkNetwork:
    """The links and routes of a fabric in one configuration of its circuits."""

    servers: Servers
    capacity_bytes_per_s: Floats  # [link], payload
    tier: tuple[LinkTier, ...]  # [link]
    router: FlowRouter = field(repr=False, compare=False)
    name: str = ""
    ends: Ints | None = None  # [link, from and to], nodes. The nodes 0 to servers.nics are NICs with their GPUs

    def __post_init__(self) -> None:
        if len(self.tier) != len(self.capacity_bytes_per_s):
            raise ValueError(f"tiers must match the links, got {len(self.tier)} for {len(self.capacity_bytes_per_s)}")
        if not np.all(self.capacity_bytes_per_s >= 0):
            raise ValueError("capacity_bytes_per_s must be >= 0 for every link")

    def routes(self, flows: GpuFlows) -> FlowRoutes:
        """Return the routes of the flows. A flow from a GPU to itself uses no link and has no latency."""
        moves = flows.src != flows.dst
        found = self.router(flows.src[moves], flows.dst[moves])
        length, latency_s = np.zeros(len(flows), np.int64), np.zeros(len(flows))
        length[moves], latency_s[moves] = np.diff(found.begin), found.latency_s
        return FlowRoutes(np.concatenate(([0], np.cumsum(length))), found.link, found.share, latency_s)


@dataclass(frozen=True, slots=True)
class MessageTransfer:
    """The flows of a message or collective. `rounds` counts the dependent message steps between servers. `overhead_s`
    is the time that does not depend on the network: kernel launch and the steps inside a server."""

    flows: GpuFlows
    rounds: int = 1
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds < 0 or not self.overhead_s >= 0:
            raise ValueError(f"rounds and overhead_s must be >= 0, got {self.rounds} and {self.overhead_s}")
