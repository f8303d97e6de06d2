"""Two small networks for tests: one non-blocking switch, and ToRs below spines that may be oversubscribed."""

from dataclasses import dataclass

import numpy as np

from orchestrrl.lab.sim.net.model import FlowRoutes, Ints, LinkNetwork, LinkTier, Servers


@dataclass(frozen=True, slots=True)
class _Tables:
    """A router over these links: NVLink out of and into each GPU, links out of and into each NIC, and links up from and
    down to each ToR."""

    servers: Servers
    rails: bool
    servers_per_tor: int

    @property
    def tors(self) -> int:
        pods = -(-self.servers.count // self.servers_per_tor)
        return pods * (self.servers.nics_per_server if self.rails else 1)

    def tor_of(self, nic: Ints) -> Ints:
        server, place = np.divmod(nic, self.servers.nics_per_server)
        pod = server // self.servers_per_tor
        return pod * self.servers.nics_per_server + place if self.rails else pod

    def __call__(self, src: Ints, dst: Ints) -> FlowRoutes:
        servers = self.servers
        inside = src // servers.gpus_per_server == dst // servers.gpus_per_server
        a, b = servers.nic_of(src), servers.nic_of(dst)
        up, down = self.tor_of(a), self.tor_of(b)
        above = ~inside & (up != down)
        nic, tor = 2 * servers.gpus, 2 * servers.gpus + 2 * servers.nics
        first = np.where(inside, src, nic + a)
        last = np.where(inside, servers.gpus + dst, nic + servers.nics + b)
        table = np.stack((first, tor + up, tor + self.tors + down, last), axis=1)
        taken = np.stack((np.ones_like(above), above, above, np.ones_like(above)), axis=1)
        begin = np.concatenate(([0], np.cumsum(taken.sum(axis=1))))
        link = table[taken]
        hops = np.where(inside, 0, np.where(above, 3, 1))
        latency_s = (hops + 1) * servers.propagation_s + hops * servers.processing_s
        return FlowRoutes(begin, link, np.ones(len(link)), np.where(inside, 0.0, latency_s))


def two_tiers(
    servers: Servers, *, servers_per_tor: int = 4, oversubscribed: float = 1.0, rails: bool = False
) -> LinkNetwork:
    """Return a network of ToRs below one spine. `rails`: NICs of the same index share a ToR."""
    tables = _Tables(servers, rails, servers_per_tor)
    below = servers_per_tor * (1 if rails else servers.nics_per_server)
    uplink = below * servers.nic_bytes_per_s / oversubscribed
    capacity = np.concatenate(
        (
            np.full(2 * servers.gpus, servers.nvlink_bytes_per_s),
            np.full(2 * servers.nics, servers.nic_bytes_per_s),
            np.full(2 * tables.tors, uplink),
        )
    )
    tier = (
        (LinkTier.NVLINK,) * (2 * servers.gpus)
        + (LinkTier.NIC,) * (2 * servers.nics)
        + (LinkTier.AGG,) * (2 * tables.tors)
    )
    return LinkNetwork(servers, capacity, tier, tables, "two tiers")


def one_switch(servers: Servers) -> LinkNetwork:
    return two_tiers(servers, servers_per_tor=servers.count)
