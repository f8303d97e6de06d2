"""What the network gives to instances that span servers: each GPU's rate in their pattern, all instances at once. Pure.

EP sends all-to-all among an instance's ranks, AFD from attention to FFN and back, wide TP round rings of rails. A rate
is what a GPU has to send over the time until the instance's last flow is through, as the roofline divides by it.
"""

from dataclasses import dataclass

import numpy as np

from orchestrrl.lab.sim.net.collectives import m2n
from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Period, SimulatedFabric
from orchestrrl.lab.sim.net.fluid import finish_routed_s
from orchestrrl.lab.sim.net.model import GpuFlows, Ints, LinkNetwork, Servers
from orchestrrl.lab.sim.net.problem import routes_of
from orchestrrl.lab.sim.rl.generation_fleet import UniformFleet

# Of each GPU. Large against latencies, so that rates are those of the links.
SENT_BYTES = 64e6


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """In the mean over instances. `extra_hop_s`: beyond what two links and one switch take."""

    bytes_per_s: float  # of each GPU
    slowest_bytes_per_s: float  # of the GPUs of the instance that gets least
    extra_hop_s: float


def leaves_servers(fleet: UniformFleet, servers: Servers) -> bool:
    return fleet.parallelism.gpus > servers.gpus_per_server


def pattern(fleet: UniformFleet, sent_bytes: float, servers: Servers) -> tuple[GpuFlows, Ints]:
    """What a fleet's instances send, `sent_bytes` by each GPU (under AFD, of the smaller side), and whose each flow
    is."""
    p = fleet.parallelism
    if p.afd:
        each = sent_bytes * min(p.attention_gpus, p.ffn_gpus) / (p.attention_gpus * p.ffn_gpus)
        both_ways = [
            m2n(src, dst, each, servers).flows
            for attention, ffn in zip(fleet.attention, fleet.ffn, strict=True)
            for src, dst in ((attention, ffn), (ffn, attention))
        ]
        flows = GpuFlows.joined(both_ways)
    elif p.dp > 1:
        src, dst = np.repeat(fleet.gpus, p.gpus, axis=1), np.tile(fleet.gpus, (1, p.gpus))
        other = src[0] != dst[0]  # the same places in each instance
        flows = _alike(src[:, other], dst[:, other], sent_bytes / (p.gpus - 1))
    else:
        flows = _alike(fleet.gpus, np.roll(fleet.gpus, -servers.gpus_per_server, axis=1), sent_bytes)
    return flows, np.repeat(np.arange(len(fleet)), len(flows) // max(1, len(fleet)))


def _alike(src: Ints, dst: Ints, bytes: float) -> GpuFlows:
    return GpuFlows(src.reshape(-1), dst.reshape(-1), np.full(src.size, bytes))


def gen_period(fleet: UniformFleet, servers: Servers, name: str) -> Period:
    """Of a stretch of generation in which this fleet is deployed."""
    demand = pattern(fleet, SENT_BYTES, servers)[0] if leaves_servers(fleet, servers) else GpuFlows.none()
    return Period.of(f"gen {name}", FabricStage.GEN, demand)


def exchange(fleet: UniformFleet, fabric: SimulatedFabric, name: str) -> TokenExchange:
    """On the fabric as it is made for this fleet alone."""
    return exchange_on(fabric.network(gen_period(fleet, fabric.servers, name)), fleet)


def exchange_on(network: LinkNetwork, fleet: UniformFleet) -> TokenExchange:
    servers = network.servers
    flows, instance = pattern(fleet, SENT_BYTES, servers)
    routes = routes_of(network, flows)
    wire_s, latency_s = np.zeros(len(fleet)), routes.latency_s
    np.maximum.at(wire_s, instance, finish_routed_s(network, flows, routes))
    nearest_s = 2 * servers.propagation_s + servers.processing_s
    return TokenExchange(
        SENT_BYTES / float(wire_s.mean()),
        SENT_BYTES / float(wire_s.max()),
        max(0.0, float(latency_s.max()) - nearest_s),
    )
