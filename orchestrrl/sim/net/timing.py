"""How long collectives take on a network, and what they put on its tiers. Pure."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np

from orchestrrl.sim.net.finish import TOLERANCE, finish_routed_s
from orchestrrl.sim.net.model import Floats, Flows, Network, Tier
from orchestrrl.sim.net.problem import routes_of
from orchestrrl.sim.net.transfer import Transfer


def seconds(network: Network, transfers: Sequence[Transfer], *, tolerance: float = TOLERANCE) -> Floats:
    """[transfer], all beginning together. Each ends when its last flow does, its rounds' latency later. A message of
    one round takes as long as the slowest; those of several rounds go from server to server, in turn over every flow
    that leaves one: they take these flows' mean each."""
    sending_s, waiting_s = _parts_s(network, transfers, tolerance)
    return sending_s + waiting_s + _overheads_s(transfers)


class Timer:
    """`seconds` on one network, each set of transfers worked out once: layers of a model repeat theirs. Sets whose
    bytes differ by a factor alone are one set."""

    def __init__(self, network: Network, *, tolerance: float = TOLERANCE) -> None:
        self.network = network
        self._tolerance = tolerance
        self._found: dict[bytes, tuple[Floats, Floats, float]] = {}  # and the largest flow's bytes

    def seconds(self, transfers: Sequence[Transfer]) -> Floats:
        largest = max((float(each.flows.bytes.max()) for each in transfers if len(each.flows)), default=0.0)
        key = _digest(transfers, largest or 1.0)
        if key not in self._found:
            self._found[key] = (*_parts_s(self.network, transfers, self._tolerance), largest or 1.0)
        sending_s, waiting_s, then = self._found[key]
        return sending_s * (largest / then) + waiting_s + _overheads_s(transfers)


def _digest(transfers: Sequence[Transfer], largest: float) -> bytes:
    found = blake2b(digest_size=16)
    for each in transfers:
        found.update(np.array([len(each.flows), each.rounds], np.int64).tobytes())
        found.update(each.flows.src.tobytes())
        found.update(each.flows.dst.tobytes())
        found.update(np.round(each.flows.bytes / largest, 12).tobytes())
    return found.digest()


def _parts_s(network: Network, transfers: Sequence[Transfer], tolerance: float) -> tuple[Floats, Floats]:
    """[transfer], until the last flow's last byte is sent, and latency: what grows with bytes, and what does not."""
    flows = Flows.joined([each.flows for each in transfers])
    routes = routes_of(network, flows)
    finish_s = finish_routed_s(network, flows, routes, tolerance=tolerance)
    sending_s, waiting_s, begin = np.zeros(len(transfers)), np.zeros(len(transfers)), 0
    for i, each in enumerate(transfers):
        end = begin + len(each.flows)
        if end > begin:
            sending_s[i] = finish_s[begin:end].max()
            waiting_s[i] = _latency_s(network, each, routes.latency_s[begin:end])
        begin = end
    return sending_s, waiting_s


def _latency_s(network: Network, transfer: Transfer, latency_s: Floats) -> float:
    """Of all rounds; `latency_s` [flow]."""
    if transfer.rounds <= 1:
        return float(latency_s.max()) * transfer.rounds
    per_server = network.servers.gpus_per_server
    leaves = transfer.flows.src // per_server != transfer.flows.dst // per_server
    return float(latency_s[leaves].mean() if leaves.any() else latency_s.mean()) * transfer.rounds


def _overheads_s(transfers: Sequence[Transfer]) -> Floats:
    return np.array([each.overhead_s for each in transfers], np.float64)


def tier_bytes(network: Network, flows: Flows) -> Mapping[Tier, float]:
    """Bytes over the links of each tier, both ends of a tier's path counted: up to a switch and down from it."""
    routes = routes_of(network, flows)
    of_entry = np.repeat(flows.bytes, np.diff(routes.begin)) * routes.share
    by_link = np.bincount(routes.link, of_entry, len(network.tier))
    known = list(Tier)
    tiers = np.array([known.index(each) for each in network.tier], np.int64)
    total = np.bincount(tiers, by_link, len(known))
    return {tier: float(total[i]) for i, tier in enumerate(known) if total[i] > 0}
