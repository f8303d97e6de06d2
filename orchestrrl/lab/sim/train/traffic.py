"""What each group of a layout sends, all groups of a kind at once, and how often in an iteration. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from orchestrrl.lab.sim.net import collectives
from orchestrrl.lab.sim.net.model import Ints, Servers
from orchestrrl.lab.sim.net.transfer import MessageTransfer
from orchestrrl.lab.sim.train.compute import ACTIVATION_BYTES, stage_parameters
from orchestrrl.lab.sim.train.constants import TrainConstants
from orchestrrl.lab.sim.train.model import TrainJob
from orchestrrl.lab.sim.train.ranks import crosses, groups

FORWARD_BACKWARD = ("tp", "cp", "ep", "pp")
GRADIENTS = ("dp_reduce", "dp_gather", "expert_reduce", "expert_gather")


@dataclass(frozen=True, slots=True)
class GroupCollective:
    """One collective of one kind, in all its groups at once."""

    transfer: MessageTransfer
    bytes: float  # that a rank gives
    times: float  # in an iteration, each rank
    crosses: bool  # between servers


def traffic(job: TrainJob, servers: Servers, constants: TrainConstants) -> Mapping[str, GroupCollective]:
    """By kind; kinds with one member only are left out. A ring of context parallelism counts its forward pass: the
    backward one carries the gradients of keys and values as well, twice as much."""
    if job.first_gpu + job.layout.gpus > servers.gpus:
        raise ValueError(
            f"the layout takes GPUs {job.first_gpu}..{job.first_gpu + job.layout.gpus - 1}, there are {servers.gpus}"
        )
    found = {**_of_passes(job, servers), **_of_gradients(job, servers, constants)}
    return {name: found[name] for name in (*FORWARD_BACKWARD, *GRADIENTS) if name in found}


def _of_passes(job: TrainJob, servers: Servers) -> dict[str, GroupCollective]:
    layout = job.layout
    degrees = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "pp": layout.pp}
    of = {"tp": _tensor, "cp": _context, "ep": _experts, "pp": _pipeline}
    found = {}
    for kind, degree in degrees.items():
        if degree > 1:
            members = groups(job, kind)
            transfer, given, times = of[kind](job, members, servers)
            found[kind] = GroupCollective(transfer, given, times, crosses(members, servers))
    return found


Counted = tuple[MessageTransfer, float, float]  # bytes that a rank gives, times in an iteration


def _layer_passes(job: TrainJob) -> tuple[float, float]:
    """Layers of a rank over all micro-batches, and how often each is passed."""
    return job.micro_batches * job.model.layers / job.layout.pp, 3.0 if job.recompute else 2.0


def forward_times(job: TrainJob, kind: str, exchange: GroupCollective) -> float:
    """How often in the forward passes alone, each rank; of a kind of forward and backward."""
    passes = _layer_passes(job)[1]
    return exchange.times / {"tp": passes, "cp": passes + 1, "ep": passes, "pp": 2.0}[kind]


def _tokens_bytes(job: TrainJob) -> float:
    return job.micro_tokens * job.model.hidden * ACTIVATION_BYTES


def _tensor(job: TrainJob, members: Ints, servers: Servers) -> Counted:
    layers, passes = _layer_passes(job)
    shard = _tokens_bytes(job) / job.layout.tp
    return collectives.all_gather(members, shard, servers), shard * (job.layout.tp - 1), layers * passes * tp_count(job)


def _context(job: TrainJob, members: Ints, servers: Servers) -> Counted:
    model, layout = job.model, job.layout
    layers, passes = _layer_passes(job)
    block = job.micro_tokens * 2 * max(1.0, model.kv_heads / layout.tp) * model.head_dim * ACTIVATION_BYTES
    given = (layout.cp - 1) * block
    return _ring(members, given, servers), given, layers * (passes + 1)


def _experts(job: TrainJob, members: Ints, servers: Servers) -> Counted:
    layers, passes = _layer_passes(job)
    whole = _tokens_bytes(job) / job.layout.tp * job.model.experts_per_token
    given = whole / job.layout.ep * (job.layout.ep - 1)
    return collectives.all_to_all(members, whole, servers), given, layers * passes * 2


def _pipeline(job: TrainJob, members: Ints, servers: Servers) -> Counted:
    layout, given = job.layout, _tokens_bytes(job) / job.layout.tp
    times = 2 * job.micro_batches * (layout.stages - 1) / layout.pp
    return _down(members, given, servers, around=layout.vpp > 1), given, times


def tp_count(job: TrainJob) -> int:
    """Collectives of tensor parallelism in a layer's pass: into and out of attention, and of what every token passes.
    Experts are not split by it."""
    return 4 if job.model.ffn else 2


def _of_gradients(job: TrainJob, servers: Servers, constants: TrainConstants) -> dict[str, GroupCollective]:
    found = {}
    dense, experts = stage_parameters(job)
    for kind, axis, parameters in (("dp", "dp_cp", dense), ("expert", "expert_dp", experts)):
        members = groups(job, axis)
        size = members.shape[1]
        if size < 2 or not parameters:
            continue
        far = crosses(members, servers)
        shard = parameters * constants.gradient_bytes / size
        transfer = collectives.reduce_scatter(members, shard, servers)
        found[f"{kind}_reduce"] = GroupCollective(transfer, shard * (size - 1), 1.0, far)
        shard = parameters * constants.parameter_bytes / size
        transfer = collectives.all_gather(members, shard, servers)
        found[f"{kind}_gather"] = GroupCollective(transfer, shard * (size - 1), 1.0, far)
    return found


def _ring(members: Ints, given: float, servers: Servers) -> MessageTransfer:
    """Everyone's block goes once around, sent on as soon as it is there."""
    steps = members.shape[1] - 1
    pairs = np.stack([members.ravel(), np.roll(members, -1, axis=1).ravel()], axis=1)
    once = collectives.p2p(pairs, given, servers)
    return replace(once, rounds=once.rounds * steps, overhead_s=once.overhead_s * steps, label="cp")


def _down(members: Ints, given: float, servers: Servers, *, around: bool) -> MessageTransfer:
    """From each rank of the pipeline to the next; around: from the last to the first as well."""
    pairs = np.stack([members, np.roll(members, -1, axis=1)], axis=2)
    pairs = pairs if around else pairs[:, :-1]
    return collectives.p2p(pairs.reshape(-1, 2), given, servers)
