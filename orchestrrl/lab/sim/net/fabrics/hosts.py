"""What is the same below every fabric: NVLink inside a server, its NICs, and which of them a flow passes.

NVLink is a switch: each GPU has what it sends and what it receives to itself. Of its latency nothing is known but that
it is under that of a NIC; one link's propagation stands for all of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFailures
from orchestrrl.lab.sim.net.fabrics.wiring import LinkRows, Wiring
from orchestrrl.lab.sim.net.model import Floats, FlowRoutes, Ints, LinkTier, Servers

Bools = NDArray[np.bool_]
Shares = Mapping[int, float] | None
Between = Callable[[LinkRows, Ints], Floats]  # adds the links of some legs; the seconds that passing them takes


@dataclass(frozen=True, eq=False)
class Legs:
    """Flows as NICs see them. Those of a flow are side by side; a leg inside a server has no NICs (NO_NIC)."""

    flow: Ints  # [leg], ascending
    share: Floats  # [leg], of the flow's bytes
    src: Ints  # [leg], GPU
    dst: Ints
    src_nic: Ints
    dst_nic: Ints

    def __len__(self) -> int:
        return len(self.flow)


NO_NIC = -1


@dataclass(frozen=True, eq=False)
class HostNetwork:
    """`rails`: a message for a GPU in another place is handed to the GPU of that place first, so that it stays on one
    rail (NCCL's PXN). `place` of each GPU of a server is the NIC of the server that it uses; None: its own."""

    servers: Servers
    failed: SimulatedFailures
    rails: bool = False
    place: tuple[int, ...] | None = None

    @property
    def nodes(self) -> int:
        """NICs, then the NVLink switch of each server; others are numbered from here."""
        return self.servers.nics + self.servers.count

    @cached_property
    def nic_works(self) -> Bools:
        _check_ids("NICs", self.failed.nics, self.servers.nics)
        _check_ids("servers", self.failed.servers, self.servers.count)
        works = np.ones(self.servers.nics, np.bool_)
        works[list(self.failed.nics)] = False
        works.reshape(self.servers.count, -1)[list(self.failed.servers)] = False
        return works

    @cached_property
    def _stand_ins(self) -> tuple[Ints, Ints]:
        """Of each NIC those that carry its traffic, in rows: itself, or all that its server has left."""
        own = self.servers.nics_per_server
        usable = sorted(set(self.place)) if self.place else list(range(own))
        rows: list[list[int]] = []
        for nic in range(self.servers.nics):
            first = nic - nic % own
            rows.append([nic] if self.nic_works[nic] else [first + n for n in usable if self.nic_works[first + n]])
        begin = np.cumsum([0, *map(len, rows)])
        return begin, np.array([nic for row in rows for nic in row], np.int64)

    def lay(self, wiring: Wiring, ports: Ints) -> int:
        """`lay_nvlink`, then NICs: up to the node `ports[nic]`, down from it. Returns the number of NIC 0's link up."""
        nics = np.arange(self.servers.nics)
        self.lay_nvlink(wiring)
        capacity = np.where(self.nic_works, self.servers.nic_bytes_per_s, 0.0)
        first = wiring.lay(LinkTier.NIC, capacity, nics, ports)
        wiring.lay(LinkTier.NIC, capacity, ports, nics)
        return first

    def lay_nvlink(self, wiring: Wiring) -> None:
        """The links 0 to 2 * gpus: out of each GPU, into each."""
        servers, gpus = self.servers, np.arange(self.servers.gpus)
        switch = servers.nics + gpus // servers.gpus_per_server
        wiring.lay(LinkTier.NVLINK, servers.nvlink_bytes_per_s, servers.nic_of(gpus), switch)
        wiring.lay(LinkTier.NVLINK, servers.nvlink_bytes_per_s, switch, servers.nic_of(gpus))

    def server_of(self, gpus: Ints) -> Ints:
        return gpus // self.servers.gpus_per_server

    def check(self, src: Ints, dst: Ints) -> None:
        """Raises ValueError where a flow begins or ends in a server that failed, or where it begins."""
        if np.any(src == dst):
            raise ValueError(f"a flow goes from a GPU to another one, got {src[src == dst][0]} twice")
        for gpus in (src, dst):
            if len(gpus) and not (gpus.min() >= 0 and gpus.max() < self.servers.gpus):
                raise ValueError(f"GPUs are numbered 0 to {self.servers.gpus - 1}, got {gpus.min()} to {gpus.max()}")
            down = np.isin(self.server_of(gpus), list(self.failed.servers))
            if down.any():
                raise ValueError(f"GPU {gpus[down][0]} is in a server that failed")

    def legs(self, src: Ints, dst: Ints, direct: Bools | None = None) -> Legs:
        """`direct` [flow]: those that leave the server by a circuit of its own, as if they stayed inside."""
        self.check(src, dst)
        servers, flow = self.servers, np.arange(len(src))
        inside = self.server_of(src) == self.server_of(dst)
        if direct is not None:
            inside |= direct
        src_nic, dst_nic = self._nic(src), self._nic(dst)
        if self.rails:  # to the destination's rail first
            src_nic = src_nic - src_nic % servers.nics_per_server + dst_nic % servers.nics_per_server
        src_nic, dst_nic = np.where(inside, NO_NIC, src_nic), np.where(inside, NO_NIC, dst_nic)
        legs = Legs(flow, np.ones(len(src)), src, dst, src_nic, dst_nic)
        if self.nic_works.all():
            return legs
        legs = self._spread(legs, legs.src_nic)
        if self.rails:
            level = legs.dst_nic - legs.dst_nic % servers.nics_per_server + legs.src_nic % servers.nics_per_server
            stays = (legs.src_nic == NO_NIC) | ~self.nic_works[level]
            legs = Legs(legs.flow, legs.share, legs.src, legs.dst, legs.src_nic, np.where(stays, legs.dst_nic, level))
        return self._spread(legs, legs.dst_nic)

    def _nic(self, gpus: Ints) -> Ints:
        if self.place is None:
            return self.servers.nic_of(gpus)
        server, place = np.divmod(gpus, self.servers.gpus_per_server)
        return np.asarray(server * self.servers.nics_per_server + np.array(self.place)[place])

    def _spread(self, legs: Legs, nics: Ints) -> Legs:
        """Over the NICs that stand in for those of one side. Raises ValueError where none is left."""
        begin, stand_ins = self._stand_ins
        counts = np.where(nics == NO_NIC, 1, np.diff(begin)[nics])
        if not counts.all():
            raise ValueError(f"no NIC works any more beside NIC {nics[counts == 0][0]}")
        owner = np.repeat(np.arange(len(legs)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        inside = nics[owner] == NO_NIC
        chosen = np.where(inside, NO_NIC, stand_ins[np.where(inside, 0, begin[nics[owner]] + within)])
        return Legs(
            legs.flow[owner],
            legs.share[owner] / counts[owner],
            legs.src[owner],
            legs.dst[owner],
            chosen if nics is legs.src_nic else legs.src_nic[owner],
            chosen if nics is legs.dst_nic else legs.dst_nic[owner],
        )

    def routes(self, legs: Legs, first_up: int, between: Between, direct: Between | None = None) -> FlowRoutes:
        """`between`: from NICs' links up to NICs' links down, without the propagation of the NICs' own. `direct`: from
        server to server, of legs without NICs."""
        rows = LinkRows(legs.flow, legs.share)
        inside, outside = np.flatnonzero(legs.src_nic == NO_NIC), np.flatnonzero(legs.src_nic != NO_NIC)
        latency_s = np.zeros(len(legs))
        rows.add(inside, legs.src[inside])
        latency_s[inside] = self.servers.propagation_s + (0.0 if direct is None else direct(rows, inside))
        rows.add(inside, self.servers.gpus + legs.dst[inside])
        latency_s += self._handed(rows, outside, legs.src, legs.src_nic, out=True)
        rows.add(outside, first_up + legs.src_nic[outside])
        latency_s[outside] += 2 * self.servers.propagation_s + between(rows, outside)
        rows.add(outside, first_up + self.servers.nics + legs.dst_nic[outside])
        latency_s += self._handed(rows, outside, legs.dst, legs.dst_nic, out=False)
        return rows.routes(latency_s)

    def _beside(self, nics: Ints) -> Ints:
        """The first GPU of each NIC."""
        server, place = np.divmod(nics, self.servers.nics_per_server)
        per_nic = self.servers.gpus_per_server // self.servers.nics_per_server
        return np.asarray(server * self.servers.gpus_per_server + place * per_nic)

    def _handed(self, rows: LinkRows, legs: Ints, gpus: Ints, nics: Ints, out: bool) -> Floats:
        """Over NVLink between a GPU and the first one beside the NIC that it uses, where that is not its own."""
        legs = legs[self.servers.nic_of(gpus[legs]) != nics[legs]]
        one, other = (gpus, self._beside(nics)) if out else (self._beside(nics), gpus)
        rows.add(legs, one[legs])
        rows.add(legs, self.servers.gpus + other[legs])
        latency_s = np.zeros(len(rows.flow))
        latency_s[legs] = self.servers.propagation_s
        return latency_s


def _check_ids(what: str, ids: frozenset[int], count: int) -> None:
    if unknown := sorted(each for each in ids if not 0 <= each < count):
        raise ValueError(f"there are {what} 0 to {count - 1}, got {unknown[0]} as failed")


def joined(one: SimulatedFailures, other: SimulatedFailures) -> SimulatedFailures:
    """Of a bundle that both name the larger share is lost."""
    return SimulatedFailures(
        one.nics | other.nics,
        one.servers | other.servers,
        _larger(one.tor_uplinks, other.tor_uplinks),
        _larger(one.pod_uplinks, other.pod_uplinks),
    )


def _larger(one: Shares, other: Shares) -> dict[int, float]:
    one, other = one or {}, other or {}
    return {each: max(one.get(each, 0.0), other.get(each, 0.0)) for each in sorted({*one, *other})}


def left(lost: Shares, count: int) -> Floats:
    """[bundle], the share of each that works."""
    found = np.ones(count)
    for bundle, share in (lost or {}).items():
        if not (0 <= bundle < count and 0 <= share <= 1):
            raise ValueError(f"there are bundles 0 to {count - 1}, of which 0 to 1 is lost; got {share} of {bundle}")
        found[bundle] -= share
    return found
