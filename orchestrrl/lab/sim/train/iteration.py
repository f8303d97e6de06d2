"""What an optimiser step takes on a fabric, where the time goes, and the windows that it leaves. Pure."""

import math
from collections.abc import Mapping

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.train.circuits import Taken, shortest
from orchestrrl.lab.sim.train.compute import optimizer_s
from orchestrrl.lab.sim.train.constants import MEGATRON, TrainConstants
from orchestrrl.lab.sim.train.flops import step_flops
from orchestrrl.lab.sim.train.kernels import Kernels
from orchestrrl.lab.sim.train.model import TrainingIteration, TrainJob
from orchestrrl.lab.sim.train.networks import TrainingOnFabric, on_fabric
from orchestrrl.lab.sim.train.passes import WAITS
from orchestrrl.lab.sim.train.pipeline import Stages, forward_only, run
from orchestrrl.lab.sim.train.stages import StageLoad, without_network
from orchestrrl.lab.sim.train.timeline import boundaries, windows
from orchestrrl.lab.sim.train.traffic import FORWARD_BACKWARD, GroupCollective, traffic


def iteration(job: TrainJob, fabric: SimulatedFabric, *, constants: TrainConstants = MEGATRON) -> TrainingIteration:
    """On the networks that the fabric is in the job's periods. Raises ValueError where GPUs of a group have no way to
    each other."""
    exchanges = traffic(job, fabric.servers, constants)
    found = on_fabric(job, fabric, exchanges, constants)
    step_s = optimizer_s(job, Kernels(job.gpu, constants))
    taken, free = (
        shortest(found.given, found.kept, found.changed, step_s, each) for each in (fabric.reconfigures_s, 0.0)
    )
    if not math.isfinite(taken.seconds):
        raise ValueError(
            f"{fabric.name}: there is no way for gradients of {job.model.name}, on either period's circuits"
        )
    return _iteration_of(found, taken, free, step_s, exchanges)


def forward_s(job: TrainJob, fabric: SimulatedFabric, *, constants: TrainConstants = MEGATRON) -> float:
    """The batch's forward passes alone, as for probabilities under the policy or a reference."""
    given = on_fabric(job, fabric, traffic(job, fabric.servers, constants), constants).given
    return run(forward_only(given.ops), given.stages, job.micro_batches).seconds


def _iteration_of(
    found: TrainingOnFabric, taken: Taken, free: Taken, step_s: float, exchanges: Mapping[str, GroupCollective]
) -> TrainingIteration:
    given, job = found.given, found.given.job
    busy_s = without_network(given)
    rank = int(np.argmax(busy_s))
    parts = _parts(given, taken, free, step_s, rank, float(busy_s[rank]))
    total_s = math.fsum(parts.values())
    flops = step_flops(job.model, job.sequences, job.tokens, job.square_tokens)
    flops_per_s = flops / (job.layout.gpus * total_s)
    sent = boundaries(given, taken, rank, _given_bytes(exchanges))
    return TrainingIteration(
        seconds=total_s,
        mfu=flops_per_s / job.gpu.bf16_flops,
        parts_s=parts,
        boundaries=sent,
        windows=windows(sent),
        waits_s=parts["circuits"],
        circuits=str(taken.course),
        within_layers=found.within_layers,
    )


def _given_bytes(exchanges: Mapping[str, GroupCollective]) -> dict[str, float]:
    found = {kind: exchanges[kind].bytes for kind in FORWARD_BACKWARD if kind in exchanges}
    for way in ("reduce", "gather"):
        found[f"dp_{way}"] = sum(exchanges[kind].bytes for kind in exchanges if kind.endswith(f"_{way}"))
    return found


def _parts(given: StageLoad, taken: Taken, free: Taken, step_s: float, rank: int, busy_s: float) -> dict[str, float]:
    """Of the busiest rank. What pipeline and gradients add is told by leaving them out; waiting for circuits is against
    circuits that change at once."""
    job = given.job
    micro, layers = job.micro_batches, sum(job.stage_layers[rank :: job.layout.pp])
    both = (given.passes.forward, given.passes.backward)
    waits_s = {group: micro * layers * sum(each.waits_s(group) for each in both) for group in WAITS}
    together_s = run(
        given.ops, Stages(given.stages.forward_s, given.stages.backward_s, blocks=given.stages.blocks), micro
    ).seconds
    sent_s = given.schedule().seconds if given.stages.send_s else together_s
    parts = {
        "compute": busy_s - sum(waits_s.values()),
        "bubble": together_s - busy_s,
        **waits_s,
        "pp": sent_s - together_s,
        "dp": free.seconds - step_s - sent_s,
        "optimizer": step_s,
        "circuits": taken.seconds - free.seconds,
    }
    return {name: max(0.0, each_s) for name, each_s in parts.items()}  # differences of equal sums, to the last bit
