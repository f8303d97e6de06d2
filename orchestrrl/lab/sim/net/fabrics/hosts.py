"""Build the links and routes of a network, and the part inside servers that all fabrics share. The functions have no
side effects.

NVLink is modelled as a switch inside a server, with full bandwidth for each GPU in both directions. NVLink's latency is
unpublished, but lower than a NIC's. The propagation time of one link is used instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import Shares, SimulatedFailures
from orchestrrl.lab.sim.net.model import Bools, Floats, FlowRouter, FlowRoutes, Ints, LinkNetwork, LinkTier, Servers


@dataclass(slots=True)
class Wiring:
    """The links of a network while it is built. Links that are added together have consecutive numbers."""

    _capacity: list[Floats] = field(default_factory=list)
    _tier: list[LinkTier] = field(default_factory=list)
    _ends: list[Ints] = field(default_factory=list)

    def lay(self, tier: LinkTier, bytes_per_s: Floats | float, tail: Ints | int, head: Ints | int) -> int:
        """Add links from nodes `tail` to nodes `head`. Return the number of the first link."""
        capacity, tails, heads = np.broadcast_arrays(np.asarray(bytes_per_s, dtype=np.float64), tail, head)
        return self.lay_each([tier] * capacity.size, capacity.ravel(), tails.ravel(), heads.ravel())

    def lay_each(self, tiers: Sequence[LinkTier], bytes_per_s: Floats, tail: Ints, head: Ints) -> int:
        first = len(self._tier)
        self._capacity.append(bytes_per_s)
        self._tier += tiers
        self._ends.append(np.stack([tail, head], axis=1).astype(np.int64))
        return first

    def network(self, servers: Servers, router: FlowRouter, name: str) -> LinkNetwork:
        """Return the network of the collected links, with routes from `router`. The network's router raises ValueError
        for a route over a link without capacity."""
        capacity = np.concatenate(self._capacity)

        def passable(src: Ints, dst: Ints) -> FlowRoutes:
            routes = router(src, dst)
            if len(shut := np.flatnonzero(capacity[routes.link] <= 0)):
                flow = int(np.searchsorted(routes.begin, shut[0], side="right")) - 1
                link = routes.link[shut[0]]
                raise ValueError(f"no path from GPU {src[flow]} to GPU {dst[flow]}: link {link} has failed")
            return routes

        return LinkNetwork(servers, capacity, tuple(self._tier), passable, name, np.concatenate(self._ends))


@dataclass(slots=True)
class LinkRows:
    """The links of flows, in path order, while routes are built. A flow may have several parallel legs, each with a
    share of the flow's bytes."""

    flow: Ints  # [leg], ascending
    share: Floats  # [leg]
    _parts: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)

    def add(self, leg: Ints, link: Ints, share: Floats | None = None) -> None:
        """Add to each leg in `leg`, an ascending array, the link at the same index of `link`. `share` is the fraction
        of the leg's traffic that uses the link. If it is None, all traffic of the leg uses the link."""
        self._parts.append((leg, link, self.share[leg] if share is None else self.share[leg] * share))

    def routes(self, latency_s: Floats) -> FlowRoutes:
        """Return the routes of the flows. `latency_s` is the latency of each leg. The latency of a flow is that of its
        slowest leg."""
        legs = len(self.flow)
        leg, link, share = (np.concatenate(each) for each in zip(*self._parts, strict=True))
        order = np.argsort(leg, kind="stable")
        link, share = link[order], share[order]
        first = np.concatenate([[0], np.cumsum(np.bincount(leg, minlength=legs))])
        legs_begin = np.flatnonzero(np.diff(self.flow, prepend=-1))
        begin = np.concatenate([first[legs_begin], first[-1:]])
        if len(legs_begin) == legs:
            return FlowRoutes(begin, link, share, latency_s)
        return _merged(begin, link, share, np.maximum.reduceat(latency_s, legs_begin))


def _merged(begin: Ints, link: Ints, share: Floats, latency_s: Floats) -> FlowRoutes:
    """Return the routes with each link at most once per flow. The shares of repeated links are added up."""
    flow = np.repeat(np.arange(len(begin) - 1), np.diff(begin))
    width = int(link.max(initial=0)) + 1
    codes, place = np.unique(flow * width + link, return_inverse=True)
    counts = np.bincount(codes // width, minlength=len(begin) - 1)
    return FlowRoutes(
        np.concatenate([[0], np.cumsum(counts)]),
        codes % width,
        np.asarray(np.bincount(place, share, minlength=len(codes)), np.float64),
        latency_s,
    )


def expand(begin: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return two arrays with one item for each entry of the compressed rows whose numbers are in `rows`: the position
    of the entry's row in `rows`, and the index of the entry. As in FlowRoutes, `begin` contains the index of each row's
    first entry."""
    counts = (begin[1:] - begin[:-1])[rows]
    owner = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, begin[:-1][rows][owner] + within


@dataclass(frozen=True, eq=False)
class Legs:
    """Parts of flows between one source NIC and one destination NIC. Legs of a flow are adjacent in the arrays. A leg
    that stays inside a server has no NICs (NO_NIC)."""

    flow: Ints  # [leg], ascending
    share: Floats  # [leg], of the flow's bytes
    src: Ints  # [leg], GPU
    dst: Ints
    src_nic: Ints
    dst_nic: Ints

    def __len__(self) -> int:
        return len(self.flow)

    def spread(self, counts: Ints) -> tuple["Legs", Ints]:
        """Split each leg into the number of equal legs given in `counts`. Return the new legs, and the index of the
        original leg of each new leg."""
        was = np.repeat(np.arange(len(self)), counts)
        found = Legs(*(getattr(self, each.name)[was] for each in fields(self)))
        return replace(found, share=found.share / counts[was]), was


NO_NIC = -1  # the last row of a table by NIC
# Adds the links of some legs to the rows, and returns their latency in seconds.
Between = Callable[[LinkRows, Legs, Ints], Floats]


@dataclass(frozen=True, eq=False)
class HostNetwork:
    """The part of a network inside servers: NVLink and NICs. With `rails`, a message for a GPU on another rail first
    goes over NVLink to the GPU of that rail in the sender's server (NCCL's PXN). `place` contains, for each GPU of a
    server, the index of the NIC that the GPU uses. If `place` is None, each GPU uses its nearest NIC."""

    servers: Servers
    failed: SimulatedFailures
    rails: bool = False
    place: tuple[int, ...] | None = None

    @property
    def nodes(self) -> int:
        """The number of NICs and NVLink switches, which are the first nodes. Other nodes are numbered from this number
        on."""
        return self.servers.nics + self.servers.count

    @cached_property
    def nic_works(self) -> Bools:
        if unknown := sorted(each for each in self.failed.nics if not 0 <= each < self.servers.nics):
            raise ValueError(f"failed NICs must be in 0..{self.servers.nics - 1}, got {unknown[0]}")
        works = np.ones(self.servers.nics, np.bool_)
        works[list(self.failed.nics)] = False
        return works

    @cached_property
    def _stand_ins(self) -> tuple[Ints, Ints]:
        """The NICs that carry each NIC's traffic, in compressed rows. A working NIC carries its own traffic. The
        traffic of a failed NIC is carried by all working NICs of its server or, if `place` is not None, by those of
        them that are in `place`. The last row is for NO_NIC."""
        own = self.servers.nics_per_server
        usable = sorted(set(self.place)) if self.place else list(range(own))
        rows: list[list[int]] = []
        for nic in range(self.servers.nics):
            first = nic - nic % own
            rows.append([nic] if self.nic_works[nic] else [first + n for n in usable if self.nic_works[first + n]])
        rows.append([NO_NIC])
        begin = np.cumsum([0, *map(len, rows)])
        return begin, np.array([nic for row in rows for nic in row], np.int64)

    def lay(self, wiring: Wiring, ports: Ints) -> int:
        """Add the NVLink links, and each NIC's links to and from the node `ports[nic]`. Return the number of the link
        from NIC 0 to its port."""
        nics = np.arange(self.servers.nics)
        self.lay_nvlink(wiring)
        capacity = np.where(self.nic_works, self.servers.nic_bytes_per_s, 0.0)
        first = wiring.lay(LinkTier.NIC, capacity, nics, ports)
        wiring.lay(LinkTier.NIC, capacity, ports, nics)
        return first

    def lay_nvlink(self, wiring: Wiring) -> None:
        """Add the NVLink links, numbered 0 to 2 * gpus - 1: first the links out of each GPU, then the links into each
        GPU."""
        servers, gpus = self.servers, np.arange(self.servers.gpus)
        switch = servers.nics + gpus // servers.gpus_per_server
        wiring.lay(LinkTier.NVLINK, servers.nvlink_bytes_per_s, servers.nic_of(gpus), switch)
        wiring.lay(LinkTier.NVLINK, servers.nvlink_bytes_per_s, switch, servers.nic_of(gpus))

    def server_of(self, gpus: Ints) -> Ints:
        return gpus // self.servers.gpus_per_server

    def check(self, src: Ints, dst: Ints) -> None:
        """Raise ValueError if the source or destination GPU of a flow does not exist, or if both are the same GPU."""
        if np.any(src == dst):
            raise ValueError(f"source and destination of a flow must differ, got GPU {src[src == dst][0]} for both")
        for gpus in (src, dst):
            if len(gpus) and not (gpus.min() >= 0 and gpus.max() < self.servers.gpus):
                raise ValueError(f"GPUs must be in 0..{self.servers.gpus - 1}, got {gpus.min()}..{gpus.max()}")

    def legs(self, src: Ints, dst: Ints, direct: Bools | None = None) -> Legs:
        """Return the legs of flows between the GPUs `src` and `dst`. Flows for which `direct` is true use circuits
        between servers. Their legs have no NICs."""
        self.check(src, dst)
        servers, flow = self.servers, np.arange(len(src))
        inside = self.server_of(src) == self.server_of(dst)
        if direct is not None:
            inside |= direct
        src_nic, dst_nic = self._nic(src), self._nic(dst)
        if self.rails:  # use the destination's rail
            src_nic = src_nic - src_nic % servers.nics_per_server + dst_nic % servers.nics_per_server
        src_nic, dst_nic = np.where(inside, NO_NIC, src_nic), np.where(inside, NO_NIC, dst_nic)
        legs = Legs(flow, np.ones(len(src)), src, dst, src_nic, dst_nic)
        if self.nic_works.all():
            return legs
        legs, src_nic = self._spread(legs, legs.src_nic)
        legs = replace(legs, src_nic=src_nic)
        if self.rails:
            level = legs.dst_nic - legs.dst_nic % servers.nics_per_server + legs.src_nic % servers.nics_per_server
            stays = (legs.src_nic == NO_NIC) | ~self.nic_works[level]
            legs = replace(legs, dst_nic=np.where(stays, legs.dst_nic, level))
        legs, dst_nic = self._spread(legs, legs.dst_nic)
        return replace(legs, dst_nic=dst_nic)

    def _nic(self, gpus: Ints) -> Ints:
        if self.place is None:
            return self.servers.nic_of(gpus)
        server, place = np.divmod(gpus, self.servers.gpus_per_server)
        return np.asarray(server * self.servers.nics_per_server + np.array(self.place)[place])

    def _spread(self, legs: Legs, nics: Ints) -> tuple[Legs, Ints]:
        """Replace failed NICs: split each leg whose NIC in `nics` has failed into one leg for each working NIC of the
        same server. Return the new legs and the NIC of each new leg. Raises ValueError if no NIC of the server works.
        """
        begin, stand_ins = self._stand_ins
        counts = np.diff(begin)[nics]
        if not counts.all():
            raise ValueError(f"no NIC works on the server of failed NIC {nics[counts == 0][0]}")
        return legs.spread(counts)[0], stand_ins[expand(begin, nics)[1]]

    def routes(self, legs: Legs, first_up: int, between: Between, direct: Between | None = None) -> FlowRoutes:
        """Return the routes of the legs' flows. `first_up` is the number that `lay` returned. `between` adds the part
        of the path between the source NIC's link to its port and the destination NIC's link from its port, and returns
        the latency of this part. `direct` adds the path between servers for legs without NICs."""
        rows = LinkRows(legs.flow, legs.share)
        inside, outside = np.flatnonzero(legs.src_nic == NO_NIC), np.flatnonzero(legs.src_nic != NO_NIC)
        latency_s = np.zeros(len(legs))
        rows.add(inside, legs.src[inside])
        latency_s[inside] = self.servers.propagation_s + (0.0 if direct is None else direct(rows, legs, inside))
        rows.add(inside, self.servers.gpus + legs.dst[inside])
        latency_s += self._relayed(rows, outside, legs.src, legs.src_nic, out=True)
        rows.add(outside, first_up + legs.src_nic[outside])
        latency_s[outside] += 2 * self.servers.propagation_s + between(rows, legs, outside)
        rows.add(outside, first_up + self.servers.nics + legs.dst_nic[outside])
        latency_s += self._relayed(rows, outside, legs.dst, legs.dst_nic, out=False)
        return rows.routes(latency_s)

    def _beside(self, nics: Ints) -> Ints:
        """Return the first GPU at each of the given NICs."""
        server, place = np.divmod(nics, self.servers.nics_per_server)
        per_nic = self.servers.gpus_per_server // self.servers.nics_per_server
        return np.asarray(server * self.servers.gpus_per_server + place * per_nic)

    def _relayed(self, rows: LinkRows, legs: Ints, gpus: Ints, nics: Ints, out: bool) -> Floats:
        """Add an NVLink hop for each of `legs` whose GPU uses a NIC of another GPU. The hop leads from the leg's GPU to
        the first GPU at that NIC if `out` is true, and in the opposite direction otherwise. Return the latency that the
        hop adds to each leg, in seconds."""
        legs = legs[self.servers.nic_of(gpus[legs]) != nics[legs]]
        one, other = (gpus, self._beside(nics)) if out else (self._beside(nics), gpus)
        rows.add(legs, one[legs])
        rows.add(legs, self.servers.gpus + other[legs])
        latency_s = np.zeros(len(rows.flow))
        latency_s[legs] = self.servers.propagation_s
        return latency_s


def left(lost: Shares, count: int) -> Floats:
    """Return the working fraction of each bundle of links, as an array indexed by bundle. Raises ValueError if a bundle
    does not exist or a lost fraction is not in 0..1."""
    found = np.ones(count)
    for bundle, share in lost.items():
        if not (0 <= bundle < count and 0 <= share <= 1):
            raise ValueError(
                f"lost uplinks must be fractions 0 to 1 of bundles 0 to {count - 1}, got {share} of bundle {bundle}"
            )
        found[bundle] -= share
    return found


def sums_between(one: Ints, other: Ints, size: Floats, count: int) -> Floats:
    """Return the total size of the flows between any two of `count` nodes, as a matrix indexed by [from, to] with a
    zero diagonal. `one` and `other` are the source and the destination of each flow, and `size` is its size."""
    sums = np.bincount(one * count + other, size, minlength=count**2).astype(np.float64).reshape(count, count)
    np.fill_diagonal(sums, 0.0)
    return sums
