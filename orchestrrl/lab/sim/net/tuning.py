"""What NCCL's protocols and algorithms cost beside the network, and which it would take. Pure.

Constants are those of NCCL's own tuning model (github.com/NVIDIA/nccl, v2.28, src/graph/tuning.cc): baseLatencies,
hwLatencies of NVLink and of the network, the network's overhead per message, llMaxBws. A step over the network there
is a whole one, through a switch; the switch's part is taken off here, since the simulator's routes have it.
"""

from dataclasses import dataclass
from enum import StrEnum

from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.net.shapes import RankShape, tree_depth

NET_OVERHEAD_S = 1e-6  # per message; three times with Simple in a ring inside servers
ONE_SWITCH_S = 2 * 1e-6 + 0.8e-6  # two links and a switch, as `Servers` has them


class Algorithm(StrEnum):
    RING = "ring"
    TREE = "tree"


class Protocol(StrEnum):
    LL = "ll"  # 4 bytes of data with 4 of a flag
    LL128 = "ll128"  # 120 bytes of 128 are data
    SIMPLE = "simple"


@dataclass(frozen=True, slots=True)
class Latency:
    base_s: float
    nvlink_s: float
    net_s: float


LATENCIES = {
    (Algorithm.TREE, Protocol.LL): Latency(6.8e-6, 0.6e-6, 5.0e-6),
    (Algorithm.TREE, Protocol.LL128): Latency(14.0e-6, 1.25e-6, 8.5e-6),
    (Algorithm.TREE, Protocol.SIMPLE): Latency(8.4e-6, 4.0e-6, 14.0e-6),
    (Algorithm.RING, Protocol.LL): Latency(6.6e-6, 0.6e-6, 2.7e-6),
    (Algorithm.RING, Protocol.LL128): Latency(14.0e-6, 1.9e-6, 4.0e-6),
    (Algorithm.RING, Protocol.SIMPLE): Latency(8.4e-6, 3.4e-6, 14.0e-6),
}
WIRE = {Protocol.LL: 2.0, Protocol.LL128: 128 / 120, Protocol.SIMPLE: 1.0}  # bytes sent per byte of data
LL_BYTES_PER_S = {1: 141e9, 2: 39e9}  # of all channels, one server of Hopper GPUs and two
LL_MANY_BYTES_PER_S = 20.4e9  # three servers and more
TREE_SHARE = 0.92  # of a tree's rate, what it reaches
RING_PLATEAU = 1.4  # all-reduce by Simple over servers: how much longer its steps take than the constants


@dataclass(frozen=True, slots=True)
class Choice:
    algorithm: Algorithm
    protocol: Protocol
    overhead_s: float
    rounds: int  # over the network

    @property
    def wire(self) -> float:
        return WIRE[self.protocol]


def ring_choice(shape: RankShape, protocol: Protocol, laps: int) -> Choice:
    """`laps`: 2 of an all-reduce, 1 of what goes around once."""
    latency, servers = LATENCIES[Algorithm.RING, protocol], shape.servers
    steps, across = laps * (shape.ranks - 1), laps * (servers - 1)
    nvlink_s = latency.nvlink_s
    if servers > 1:
        nvlink_s = max(nvlink_s, NET_OVERHEAD_S * (3 if protocol is Protocol.SIMPLE else 1))
    exposed = Algorithm.TREE if servers == shape.ranks else Algorithm.RING  # nothing inside servers to hide it
    step_s = _host_s(LATENCIES[exposed, protocol], protocol)
    plateau = RING_PLATEAU if laps == 2 and protocol is Protocol.SIMPLE and servers > 1 else 1.0
    return Choice(
        Algorithm.RING, protocol, plateau * (latency.base_s + (steps - across) * nvlink_s + across * step_s), across
    )


def tree_choice(shape: RankShape, protocol: Protocol) -> Choice:
    latency, servers = LATENCIES[Algorithm.TREE, protocol], shape.servers
    rounds = 2 * tree_depth(servers)
    inside = 2 * (-(-shape.ranks // servers) - 1)
    overhead_s = latency.base_s + inside * latency.nvlink_s + rounds * _host_s(latency, protocol)
    return Choice(Algorithm.TREE, protocol, overhead_s, rounds)


def p2p_overhead_s(across: bool) -> float:
    """Of a send and its receive, with what else of them is in the same group call."""
    latency = LATENCIES[Algorithm.RING, Protocol.SIMPLE]
    return latency.base_s + (_host_s(latency, Protocol.SIMPLE) if across else latency.nvlink_s)


def _host_s(latency: Latency, protocol: Protocol) -> float:
    return latency.net_s + NET_OVERHEAD_S * (2 if protocol is Protocol.SIMPLE else 1) - ONE_SWITCH_S


def best(shape: RankShape, size: float, laps: int, servers: Servers, tree: bool) -> Choice:
    """By the alpha-beta model: what takes `size` bytes once (or twice) around in the shortest time on a network that is
    in nobody's way."""
    choices = [ring_choice(shape, protocol, laps) for protocol in Protocol]
    if tree and shape.servers > 1:
        choices += [tree_choice(shape, protocol) for protocol in Protocol]
    return min(choices, key=lambda each: _seconds(each, shape, size, laps, servers))


def _seconds(choice: Choice, shape: RankShape, size: float, laps: int, servers: Servers) -> float:
    rate = servers.nvlink_bytes_per_s
    if shape.servers > 1:
        rate = min(rate, servers.nic_bytes_per_s * shape.channels)
    rate /= choice.wire
    if choice.protocol is Protocol.LL:
        rate = min(rate, LL_BYTES_PER_S.get(shape.servers, LL_MANY_BYTES_PER_S))
    lap = laps * (shape.ranks - 1) / shape.ranks if choice.algorithm is Algorithm.RING else laps / TREE_SHARE
    return choice.overhead_s + choice.rounds * ONE_SWITCH_S + lap * size / rate
