"""Values of the network simulator: servers, links, routes, flows, and the messages of a collective.

GPUs are numbered through the cluster, server by server: GPU g is on server g // gpus_per_server, in place
g % gpus_per_server, and so is NIC n. Links are directed and may stand for a bundle of equal ones between the same two
switches: packets are sprayed over all of them, so that a bundle behaves as one link of their summed rate.
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
    """Where a link lies, for bandwidth by tier in reports."""

    NVLINK = "nvlink"
    NIC = "nic"  # between a server and its ToR
    AGG = "agg"  # between ToRs of a PoD: packet switches above them, or circuits
    CORE = "core"  # between PoDs
    DIRECT = "direct"  # circuits that end at NICs


@checked(frozen=True, slots=True)
class Servers:
    """The machines that a fabric joins. Defaults as section 7.2 of the OrchestrRL paper has them (arXiv 2601.01209)."""

    count: Annotated[int, Field(ge=1)]
    gpus_per_server: Annotated[int, Field(ge=1)] = 8
    nics_per_server: Annotated[int, Field(ge=1)] = 8
    nic_gbps: Annotated[float, Field(gt=0)] = 200.0
    # One way, of each GPU: half of what is quoted for both ways together.
    nvlink_bytes_per_s: Annotated[float, Field(gt=0)] = 200e9
    propagation_s: Annotated[float, Field(ge=0)] = 1e-6  # of each link
    processing_s: Annotated[float, Field(ge=0)] = 0.8e-6  # of each switch that is passed
    # Of an IP packet, of which RoCEv2 takes IPv4 20, UDP 8, BTH 12, ICRC 4.
    mtu_bytes: Annotated[float, Field(gt=ROCE_BYTES)] = 9216.0
    # Around it, of Ethernet: header 14, FCS 4, preamble and gap 20.
    frame_bytes: Annotated[float, Field(ge=0)] = 38.0

    def __post_init__(self) -> None:
        if self.gpus_per_server % self.nics_per_server:
            raise ValueError(
                f"gpus_per_server ({self.gpus_per_server}) must be a multiple of nics_per_server,"
                f" got {self.nics_per_server}"
            )

    @property
    def gpus(self) -> int:
        return self.count * self.gpus_per_server

    @property
    def nics(self) -> int:
        return self.count * self.nics_per_server

    @property
    def payload_share(self) -> float:
        """Of a NIC's rate, what is left of it beside headers."""
        return (self.mtu_bytes - ROCE_BYTES) / (self.mtu_bytes + self.frame_bytes)

    @property
    def nic_bytes_per_s(self) -> float:
        """Payload, one way, of one NIC."""
        return self.nic_gbps * GBPS * self.payload_share

    def nic_of(self, gpus: Ints) -> Ints:
        """The NIC beside each GPU."""
        server, place = np.divmod(gpus, self.gpus_per_server)
        return np.asarray(server * self.nics_per_server + place * self.nics_per_server // self.gpus_per_server)


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no one answer to ==
class GpuFlows:
    """Bytes from GPUs to GPUs that begin together."""

    src: Ints  # [flow], GPU
    dst: Ints  # [flow], GPU
    bytes: Floats  # [flow]

    def __post_init__(self) -> None:
        if not len(self.src) == len(self.dst) == len(self.bytes):
            raise ValueError(f"as many of each are needed, got {len(self.src)}, {len(self.dst)}, {len(self.bytes)}")

    def __len__(self) -> int:
        return len(self.src)

    @classmethod
    def none(cls) -> "GpuFlows":
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))

    @classmethod
    def of(cls, rows: list[tuple[int, int, float]]) -> "GpuFlows":
        """From (src, dst, bytes)."""
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
        """[flow], whether it goes from server to server."""
        return np.asarray(self.src // servers.gpus_per_server != self.dst // servers.gpus_per_server)

    def merged(self) -> tuple["GpuFlows", Ints]:
        """Return one flow between any two GPUs, of all bytes from the one to the other, and [flow] which of them it
        is part of."""
        width = int(self.dst.max(initial=0)) + 1
        pairs, of = np.unique(self.src * width + self.dst, return_inverse=True)
        size = np.bincount(of, self.bytes, len(pairs)).astype(np.float64)
        return GpuFlows(pairs // width, pairs % width, size), of


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no one answer to ==
class FlowRoutes:
    """Of each flow the links that it takes, in rows one behind the other: row f is `begin[f]` to `begin[f + 1]`.
    `share` of the flow's bytes pass the link: less than 1 where it is spread over several paths, more than 1 where a
    path comes by twice."""

    begin: Ints  # [flow + 1]
    link: Ints  # [entry]
    share: Floats  # [entry]
    latency_s: Floats  # [flow]: of the first byte, propagation and processing


class FlowRouter(Protocol):
    """Pure: the same flows take the same routes."""

    def __call__(self, src: Ints, dst: Ints) -> FlowRoutes:
        """Of flows between GPUs, src other than dst. Raises ValueError where there is no way."""
        ...


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no one answer to ==
class LinkNetwork:
    """Links, and who takes which. What a fabric is at one time."""

    servers: Servers
    capacity_bytes_per_s: Floats  # [link], payload
    tier: tuple[LinkTier, ...]  # [link]
    router: FlowRouter = field(repr=False, compare=False)
    name: str = ""
    ends: Ints | None = None  # [link, from and to], nodes. The nodes 0 to servers.nics are NICs with their GPUs

    def __post_init__(self) -> None:
        if len(self.tier) != len(self.capacity_bytes_per_s):
            raise ValueError(f"{len(self.capacity_bytes_per_s)} links, and tiers of {len(self.tier)}")
        if not np.all(self.capacity_bytes_per_s >= 0):
            raise ValueError("capacities must be >= 0")

    def routes(self, flows: GpuFlows) -> FlowRoutes:
        """As the router has them; a flow from a GPU to itself takes no link and no time."""
        moves = flows.src != flows.dst
        found = self.router(flows.src[moves], flows.dst[moves])
        length, latency_s = np.zeros(len(flows), np.int64), np.zeros(len(flows))
        length[moves], latency_s[moves] = np.diff(found.begin), found.latency_s
        return FlowRoutes(np.concatenate(([0], np.cumsum(length))), found.link, found.share, latency_s)


@dataclass(frozen=True, slots=True)
class MessageTransfer:
    """`rounds` are messages between servers that wait for each other. What does not depend on the network is in
    `overhead_s`: launching, and steps inside a server."""

    flows: GpuFlows
    rounds: int = 1
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds < 0 or not self.overhead_s >= 0:
            raise ValueError(f"rounds and overhead_s must be >= 0, got {self.rounds} and {self.overhead_s}")
