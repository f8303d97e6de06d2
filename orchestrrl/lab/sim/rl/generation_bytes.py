"""What generation puts on the tiers of a network: the exchanges of its engines, token by token. Pure.

As the roofline counts them (planner/cost/roofline.py): tensor parallelism sums up twice in each layer, experts that are
spread have each token sent to its experts and back, and so have the FFN GPUs under AFD. Of several configurations each
is taken to have the whole fleet to itself, as for what they get of the network (see generation_profiles.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.net.model import GpuFlows, Ints, Servers
from orchestrrl.lab.sim.net.timing import tier_bytes
from orchestrrl.lab.sim.rl.generation_exchange import gen_period, pattern
from orchestrrl.lab.sim.rl.generation_fleet import GenGpus, UniformFleet, deployed
from planner.cost.models import Model
from planner.cost.profile import Parallelism
from planner.cost.roofline import ACTIVATION_BYTES
from planner.model import ConfigurationId

TierBytes = Mapping[str, float]


def token_flows(fleet: UniformFleet, model: Model, servers: Servers) -> GpuFlows:
    """That a token causes as it passes an engine, in the mean over the fleet: each instance has as many tokens."""
    p = fleet.parallelism
    vector = model.layers * model.hidden * ACTIVATION_BYTES
    parts = _summed_up(fleet, (1.0 if p.afd else 2.0) * vector, servers)
    if p.afd or (p.dp > 1 and model.moe):
        copies = float(model.experts_per_token if model.moe else 1)
        if p.afd:
            copies = min(copies, p.ffn_gpus)
        else:
            copies *= (p.gpus - p.tp) / p.gpus  # the others are on the token's own GPUs
        flows, _ = pattern(fleet, 1.0, servers)
        parts.append(flows.times(2.0 * vector * copies / float(flows.bytes.sum())))
    return GpuFlows.joined(parts)


def _summed_up(fleet: UniformFleet, size: float, servers: Servers) -> list[GpuFlows]:
    """A token's vectors, over the GPUs of its attention replica: rings in servers, and round servers rail by rail."""
    tp, each = fleet.parallelism.tp, servers.gpus_per_server
    if tp == 1:
        return []
    inside = min(tp, each)
    replicas = fleet.attention.reshape(-1, tp)
    given = 2.0 * (inside - 1) / inside * size / len(replicas)
    found = [_rings(replicas.reshape(-1, inside), 1, given)] if inside > 1 else []
    if tp > each:
        nodes = tp // each
        found.append(_rings(replicas, each, 2.0 * (nodes - 1) / nodes / each * size / len(replicas)))
    return found


def _rings(members: Ints, apart: int, given: float) -> GpuFlows:
    """[ring, member]: each to the one so many places on."""
    src, dst = members.reshape(-1), np.roll(members, -apart, axis=1).reshape(-1)
    return GpuFlows(src, dst, np.full(len(src), given))


@dataclass
class Exchanged:
    """Of engines on a fabric; each configuration is looked at once."""

    fabric: SimulatedFabric
    where: GenGpus
    model: Model
    _of_token: dict[ConfigurationId, TierBytes] = field(default_factory=dict)

    def of(self, configuration: ConfigurationId, parallelism: Parallelism, tokens: float) -> TierBytes:
        """Of so many tokens that pass engines of this configuration, generated or prefilled."""
        if configuration not in self._of_token:
            servers = self.fabric.servers
            fleet = deployed(parallelism, self.where, servers, self.fabric.pods)
            network = self.fabric.network(gen_period(fleet, servers, configuration))
            found = tier_bytes(network, token_flows(fleet, self.model, servers))
            self._of_token[configuration] = {tier.value: size for tier, size in found.items()}
        return {tier: size * tokens for tier, size in self._of_token[configuration].items()}


def summed(parts: "list[TierBytes]") -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        for tier, size in part.items():
            found[tier] = found.get(tier, 0.0) + size
    return found
