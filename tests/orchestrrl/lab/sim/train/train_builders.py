"""Builders for tests: a single switch, fabrics with circuits of a known effect, and jobs for closed forms."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import Inventory, Period, SimulatedFailures
from orchestrrl.lab.sim.net.model import FlowRoutes, Ints, LinkNetwork, LinkTier, Servers
from orchestrrl.lab.sim.train.model import TrainJob, TrainLayout
from planner.cost.hardware import gpu_named
from planner.cost.models import Model, model_named

DENSE = Model("small", 8, 1024, 8, 8, 128, 4096, 32000)
MOE = Model("small-moe", 8, 1024, 8, 8, 128, 0, 32000, 16, 2, 1024)


def star(servers: Servers, share: float = 1.0, *, apart: bool = False) -> LinkNetwork:
    """Return a network in which NICs connect to one switch, and GPUs of a server over NVLink. NICs have the fraction
    `share` of their rate. `apart`: there is no path between servers 2k and 2k + 1."""
    nics, gpus = servers.nics, servers.gpus

    def route(src: Ints, dst: Ints) -> FlowRoutes:
        home, away = src // servers.gpus_per_server, dst // servers.gpus_per_server
        near = home == away
        if apart and np.any(~near & (home // 2 == away // 2)):
            raise ValueError("no path between servers")
        up = np.where(near, 2 * nics + src, servers.nic_of(src))
        down = np.where(near, 2 * nics + gpus + dst, nics + servers.nic_of(dst))
        entries = np.stack([up, down], axis=1).ravel()
        latency_s = np.where(near, 0.0, 2 * servers.propagation_s + servers.processing_s)
        return FlowRoutes(2 * np.arange(len(src) + 1), entries, np.ones(len(entries)), latency_s)

    capacity = [servers.nic_bytes_per_s * share] * (2 * nics) + [servers.nvlink_bytes_per_s] * (2 * gpus)
    tiers = (LinkTier.NIC,) * (2 * nics) + (LinkTier.NVLINK,) * (2 * gpus)
    return LinkNetwork(servers, np.array(capacity), tiers, route, "star")


@dataclass(frozen=True)
class Circuits:
    """A fabric with one network per period name. Circuits change between periods with different networks."""

    servers: Servers
    by_name: Mapping[str, LinkNetwork] = field(default_factory=dict)
    reconfigures_s: float = 0.0
    name: str = "circuits"

    def network(self, period: Period | None = None) -> LinkNetwork:
        if period is not None:
            for name, network in self.by_name.items():
                if period.id.split()[0].endswith(name):
                    return network
        return star(self.servers)

    def changes(self, before: Period | None, after: Period) -> bool:
        return self.network(before) is not self.network(after) if self.by_name else False

    def without(self, failed: SimulatedFailures) -> "Circuits":
        return replace(self)

    def inventory(self) -> Inventory:
        return Inventory()


def static(servers: Servers) -> Circuits:
    return Circuits(servers)


def for_gradients(servers: Servers, share: float, reconfigures_s: float, *, apart: bool = False) -> Circuits:
    """Return a fabric whose circuits for forward and backward give gradients the fraction `share` of the NICs, and
    whose circuits for gradients give them all."""
    passes, gradients = star(servers, share, apart=apart), star(servers)
    return Circuits(servers, {"forward_backward": passes, "gradients": gradients}, reconfigures_s)


def job(
    layout: TrainLayout,
    *,
    model: str | Model = DENSE,
    sequences: int = 64,
    tokens: float = 4096,
    micro_sequences: int = 1,
    recompute: bool = False,
    gpu: str = "h800",
) -> TrainJob:
    named = model_named(model) if isinstance(model, str) else model
    return TrainJob(named, gpu_named(gpu), layout, sequences, tokens, micro_sequences, recompute=recompute)
