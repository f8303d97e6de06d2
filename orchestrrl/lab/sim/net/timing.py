"""How long collectives take on a network, and what they put on its tiers. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np

from orchestrrl.lab.sim.net.fluid import TOLERANCE, finish_routed_s
from orchestrrl.lab.sim.net.model import Floats, FlowRoutes, GpuFlows, LinkNetwork, LinkTier
from orchestrrl.lab.sim.net.problem import routes_of
from orchestrrl.lab.sim.net.transfer import MessageTransfer


def seconds(network: LinkNetwork, transfers: Sequence[MessageTransfer], *, tolerance: float = TOLERANCE) -> Floats:
    """[transfer], all beginning together. Each ends when its last flow does, its rounds' latency later. A message of
    one round takes as long as the slowest; those of several rounds go from server to server, in turn over every flow
    that leaves one: they take these flows' mean each."""
    flows = GpuFlows.joined([each.flows for each in transfers])
    routes = routes_of(network, flows)
    finish_s = finish_routed_s(network, flows, routes, tolerance=tolerance)
    elapsed_s, begin = np.array([each.overhead_s for each in transfers], np.float64), 0
    for i, each in enumerate(transfers):
        end = begin + len(each.flows)
        if end > begin:
            elapsed_s[i] += finish_s[begin:end].max() + _latency_s(network, each, routes.latency_s[begin:end])
        begin = end
    return elapsed_s


def _latency_s(network: LinkNetwork, transfer: MessageTransfer, latency_s: Floats) -> float:
    """Of all rounds; `latency_s` [flow]."""
    if transfer.rounds <= 1:
        return float(latency_s.max()) * transfer.rounds
    per_server = network.servers.gpus_per_server
    leaves = transfer.flows.src // per_server != transfer.flows.dst // per_server
    return float(latency_s[leaves].mean() if leaves.any() else latency_s.mean()) * transfer.rounds


def tier_bytes(network: LinkNetwork, flows: GpuFlows, routes: FlowRoutes | None = None) -> Mapping[LinkTier, float]:
    """Bytes over the links of each tier, both ends of a tier's path counted: up to a switch and down from it. `routes`:
    for who has them already."""
    routes = routes_of(network, flows) if routes is None else routes
    of_entry = np.repeat(flows.bytes, np.diff(routes.begin)) * routes.share
    by_link = np.bincount(routes.link, of_entry, len(network.tier))
    known = list(LinkTier)
    tiers = np.array([known.index(each) for each in network.tier], np.int64)
    total = np.bincount(tiers, by_link, len(known))
    return {tier: float(total[i]) for i, tier in enumerate(known) if total[i] > 0}
