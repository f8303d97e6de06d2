"""Checks of routes that hold on every fabric, shared by the tests of this folder."""

import numpy as np

from orchestrrl.lab.sim.net.model import FlowRoutes, GpuFlows, Ints, LinkNetwork, Servers


def all_pairs(servers: Servers) -> tuple[Ints, Ints]:
    src, dst = np.divmod(np.arange(servers.gpus**2), servers.gpus)
    return src[src != dst], dst[src != dst]


def owners(routes: FlowRoutes) -> Ints:
    """Return the flow of each entry, [entry]."""
    return np.repeat(np.arange(len(routes.begin) - 1), np.diff(routes.begin))


def load(network: LinkNetwork, flows: GpuFlows) -> np.ndarray:
    """Return the bytes over each link, [link]."""
    routes = network.router(flows.src, flows.dst)
    sent = routes.share * flows.bytes[owners(routes)]
    return np.bincount(routes.link, sent, minlength=len(network.capacity_bytes_per_s))


def slowest_s(network: LinkNetwork, flows: GpuFlows) -> float:
    """Return the transfer time of the most loaded link alone."""
    busy = load(network, flows)
    return float((busy[busy > 0] / network.capacity_bytes_per_s[busy > 0]).max(initial=0.0))


def check_routes(network: LinkNetwork, src: Ints, dst: Ints) -> FlowRoutes:
    """Check that traffic is conserved at each node except the two ends, that a link occurs once per flow, and that
    latencies are plausible."""
    routes, servers, ends = network.router(src, dst), network.servers, network.ends
    assert ends is not None
    assert len(ends) == len(network.tier)
    owner, flows, nodes = owners(routes), len(src), int(ends.max()) + 1
    balance = np.zeros((flows, nodes))
    np.add.at(balance, (owner, ends[routes.link, 1]), routes.share)
    np.add.at(balance, (owner, ends[routes.link, 0]), -routes.share)
    np.add.at(balance, (np.arange(flows), servers.nic_of(dst)), -1.0)
    np.add.at(balance, (np.arange(flows), servers.nic_of(src)), 1.0)
    assert np.abs(balance).max(initial=0.0) < 1e-9
    codes = owner * len(network.tier) + routes.link
    assert len(np.unique(codes)) == len(codes)
    assert (routes.share > 0).all()
    assert (network.capacity_bytes_per_s[routes.link] > 0).all()
    assert (routes.latency_s >= servers.propagation_s).all()
    assert (routes.latency_s < 1e-3).all()
    return routes


def check_order(network: LinkNetwork, src: Ints, dst: Ints) -> None:
    """Check that the links of each single-path flow are in path order."""
    routes, ends = network.router(src, dst), network.ends
    assert ends is not None
    owner = owners(routes)
    whole = np.bincount(owner, routes.share < 1, minlength=len(src)) == 0
    follows = (owner[1:] == owner[:-1]) & whole[owner[1:]]
    assert (ends[routes.link[1:], 0] == ends[routes.link[:-1], 1])[follows].all()
