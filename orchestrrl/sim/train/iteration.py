"""What an optimiser step takes on a fabric, where the time goes, and the windows that it leaves. Pure."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from orchestrrl.sim.net.fabrics.base import Fabric
from orchestrrl.sim.net.model import Network
from orchestrrl.sim.net.timing import seconds
from orchestrrl.sim.train.circuits import Gradients, Taken, shortest
from orchestrrl.sim.train.compute import compute_of, optimizer_s
from orchestrrl.sim.train.constants import MEGATRON, TrainConstants
from orchestrrl.sim.train.flops import step_flops
from orchestrrl.sim.train.kernels import Kernels
from orchestrrl.sim.train.model import Iteration, TrainJob
from orchestrrl.sim.train.passes import WAITS
from orchestrrl.sim.train.periods import periods_of
from orchestrrl.sim.train.pipeline import Stages, run
from orchestrrl.sim.train.stages import Loaded, loaded, without_network
from orchestrrl.sim.train.timeline import boundaries, windows
from orchestrrl.sim.train.traffic import FORWARD_BACKWARD, Exchange, traffic


def iteration(job: TrainJob, fabric: Fabric, *, constants: TrainConstants = MEGATRON) -> Iteration:
    """On the networks that the fabric is in the job's periods. Raises ValueError where GPUs of a group have no way to
    each other in forward and backward."""
    kernels = Kernels(job.gpu, constants)
    exchanges = traffic(job, fabric.servers, constants)
    passes_period, gradients_period = periods_of(job, exchanges)
    network = fabric.network(passes_period)
    crossing = frozenset(_group(kind) for kind, each in exchanges.items() if each.crosses)
    once_s = _once_s(network, exchanges, FORWARD_BACKWARD)
    given = loaded(job, compute_of(job, kernels), once_s, crossing, constants)
    kept, changed = _gradients(network, exchanges), None
    if "dp" in crossing and fabric.changes(passes_period, gradients_period):
        changed = _gradients(fabric.network(gradients_period), exchanges)
    step_s = optimizer_s(job, kernels)
    taken = shortest(given, kept, changed, step_s, fabric.reconfigures_s)
    if not math.isfinite(taken.seconds):
        raise ValueError(
            f"{fabric.name}: there is no way for gradients of {job.model.name}, on either period's circuits"
        )
    free = shortest(given, kept, changed, step_s, 0.0)
    return _told(given, taken, free, step_s, exchanges)


def _group(kind: str) -> str:
    return "dp" if kind.endswith(("_reduce", "_gather")) else kind


def _once_s(network: Network, exchanges: Mapping[str, Exchange], kinds: Iterable[str]) -> dict[str, float]:
    """Of each kind alone: a rank has one collective under way at a time."""
    return {kind: float(seconds(network, [exchanges[kind].transfer])[0]) for kind in kinds if kind in exchanges}


def _gradients(network: Network, exchanges: Mapping[str, Exchange]) -> Gradients:
    """Dense parameters and experts one behind the other: both leave by the same NICs."""
    try:
        once_s = _once_s(network, exchanges, [kind for kind in exchanges if _group(kind) == "dp"])
    except ValueError:  # circuits of another period may leave data-parallel ranks apart
        return Gradients(math.inf, math.inf)
    return Gradients(
        sum(each for kind, each in once_s.items() if kind.endswith("_reduce")),
        sum(each for kind, each in once_s.items() if kind.endswith("_gather")),
    )


def _told(given: Loaded, taken: Taken, free: Taken, step_s: float, exchanges: Mapping[str, Exchange]) -> Iteration:
    job = given.job
    busy_s = without_network(given)
    rank = int(np.argmax(busy_s))
    parts = _parts(given, taken, free, step_s, rank, float(busy_s[rank]))
    total_s = math.fsum(parts.values())
    flops_per_s = step_flops(job.model, job.sequences, job.tokens) / (job.layout.gpus * total_s)
    found = boundaries(given, taken, rank, _given_bytes(exchanges))
    return Iteration(
        seconds=total_s,
        mfu=flops_per_s / job.gpu.bf16_flops,
        parts_s=parts,
        boundaries=found,
        windows=windows(found),
        waits_s=parts["circuits"],
    )


def _given_bytes(exchanges: Mapping[str, Exchange]) -> dict[str, float]:
    found = {kind: exchanges[kind].bytes for kind in FORWARD_BACKWARD if kind in exchanges}
    for way in ("reduce", "gather"):
        found[f"dp_{way}"] = sum(exchanges[kind].bytes for kind in exchanges if kind.endswith(f"_{way}"))
    return found


def _parts(given: Loaded, taken: Taken, free: Taken, step_s: float, rank: int, busy_s: float) -> dict[str, float]:
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
