"""What training and generation send while weights are on their way, as steady flows, and what that costs them. Pure.

Bursts are taken to be spread evenly: a flow wishes in each second what it sends in the mean. What stays inside a server
is left out, for NVLink carries many times what NICs bring.
"""

from dataclasses import dataclass

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.net.model import Floats, GpuFlows, Ints, LinkNetwork, Servers
from orchestrrl.lab.sim.net.problem import routes_of
from orchestrrl.lab.sim.rl.generation_bytes import token_flows
from orchestrrl.lab.sim.rl.generation_fleet import UniformFleet
from orchestrrl.lab.sim.rl.training import Recipe, training_flows
from orchestrrl.lab.sim.train.constants import MEGATRON, TrainConstants
from orchestrrl.lab.sim.train.model import TrainJob
from planner.cost.models import Model


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no one answer to ==
class Beside:
    """Those of a stage. `group` [flow]: flows of a group wait for each other."""

    stage: FabricStage
    flows: GpuFlows  # bytes: a second
    group: Ints

    @classmethod
    def of(cls, stage: FabricStage, flows: GpuFlows, group: Ints, servers: Servers) -> "Beside":
        """Between two GPUs there is one flow, of what all of theirs send."""
        size = servers.gpus_per_server
        far = np.flatnonzero((flows.src // size != flows.dst // size) & (flows.bytes > 0))
        pair = flows.src[far] * servers.gpus + flows.dst[far]
        pairs, first, which = np.unique(pair, return_index=True, return_inverse=True)
        sent = np.bincount(which, flows.bytes[far], len(pairs)).astype(np.float64)
        return cls(stage, GpuFlows(pairs // servers.gpus, pairs % servers.gpus, sent), group[far][first])

    def held_s(self, behind_s: Floats) -> float:
        """By which the stage is late: each group by its slowest flow, in the mean over groups. `behind_s` [flow]."""
        groups, which = np.unique(self.group, return_inverse=True)
        slowest_s = np.zeros(len(groups))
        np.maximum.at(slowest_s, which, behind_s)
        return float(slowest_s.mean()) if len(groups) else 0.0

    def has_way(self, network: LinkNetwork) -> bool:
        """Whether all of it has: circuits that are set for others may leave servers apart."""
        try:
            routes_of(network, self.flows)
        except ValueError:
            return False
        return True


def training_beside(
    job: TrainJob, recipe: Recipe, seconds: float, servers: Servers, constants: TrainConstants = MEGATRON
) -> Beside:
    """Of a training step that takes so long. All its GPUs wait for each other."""
    flows = training_flows(job, recipe, servers, constants).times(1 / seconds)
    return Beside.of(FabricStage.TRAIN, flows, np.zeros(len(flows), np.int64), servers)


def generation_beside(fleet: UniformFleet, model: Model, tokens_per_s: float, servers: Servers) -> Beside:
    """Of engines that pass so many tokens together. None of them waits for another."""
    flows = token_flows(fleet, model, servers).times(tokens_per_s)
    engine = np.zeros(servers.gpus, np.int64)
    engine[fleet.gpus] = np.arange(len(fleet))[:, None]
    return Beside.of(FabricStage.GEN, flows, engine[flows.src], servers)
