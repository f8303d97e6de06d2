"""Engines' profiles on a fabric: the roofline with what the network really gives to each configuration. Pure.

Of each configuration the whole fleet generates at once, so its NICs' rate is what is left when all instances send. The
mean over instances is taken: some lie closer together than others, and the control plane evens out what that makes.
Under several configurations at once each is taken to get what it would get in a fleet of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.rl.generation_fleet import GenGpus, TokenExchange, deployed, exchange, leaves_servers
from planner.cost.engines import EngineModel
from planner.cost.hardware import GpuModel
from planner.cost.models import Model
from planner.cost.predict import DoesNotFit, identifier, move_costs, predict
from planner.cost.profile import Parallelism, Profile
from planner.model import ConfigurationId


@dataclass(frozen=True, slots=True)
class Hardware:
    """Model, GPU and engine of generation, in the checkpoint's own precision."""

    model: Model
    gpu: GpuModel
    engine: EngineModel


@dataclass(frozen=True, slots=True)
class ProfilesOnFabric:
    """Profiles, and what each configuration that leaves its servers gets of the network."""

    profile: Profile
    exchanges: Mapping[ConfigurationId, TokenExchange]


def on_fabric(
    hardware: Hardware, layouts: Sequence[Parallelism], where: GenGpus, fabric: SimulatedFabric
) -> ProfilesOnFabric:
    """Of all `layouts` that fit the GPUs' memory and of which there is room for one. Raises ValueError where none."""
    configurations, exchanges = [], {}
    nominal = replace(hardware.gpu, nic_bytes_per_s=fabric.servers.nic_bytes_per_s)
    for parallelism in layouts:
        fleet = deployed(parallelism, where, fabric.servers, fabric.pods)
        if not len(fleet):
            continue
        gpu = nominal
        if leaves_servers(fleet, fabric.servers):
            name = identifier(parallelism)
            exchanges[name] = got = exchange(fleet, fabric, name)
            gpu = with_exchange(nominal, got)
        try:
            configurations.append(predict(hardware.model, gpu, parallelism, hardware.engine))
        except DoesNotFit:
            continue
    if not configurations:
        raise ValueError(f"no configuration of {hardware.model.name} fits {where.count} GPUs of {hardware.gpu.name}")
    moves = move_costs(hardware.model, nominal, hardware.engine)
    profile = Profile(hardware.model.name, hardware.gpu.name, hardware.engine.name, tuple(configurations), moves)
    return ProfilesOnFabric(profile, exchanges)


def with_exchange(gpu: GpuModel, got: TokenExchange) -> GpuModel:
    return replace(
        gpu, nic_bytes_per_s=got.bytes_per_s, inter_node_latency_s=gpu.inter_node_latency_s + got.extra_hop_s
    )
