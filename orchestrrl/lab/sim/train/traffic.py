"""Compute the process groups of a Megatron layout, their collectives, and the periods of an iteration. The functions
have no side effects.

Rank numbers advance first along the tensor axis, then along the context, data and pipeline axes. If tp divides the
number of GPUs of a server, each tensor-parallel group is on one server. Experts are spread over consecutive ranks of a
pipeline stage. The periods are those of section 5.2 of the OrchestrRL paper.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from orchestrrl.lab.sim.net import collectives
from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Period
from orchestrrl.lab.sim.net.model import GpuFlows, Ints, MessageTransfer, Servers
from orchestrrl.lab.sim.train.compute import ACTIVATION_BYTES, stage_parameters
from orchestrrl.lab.sim.train.model import TrainJob


def groups(job: TrainJob, axis: str) -> Ints:
    """Return the GPUs of all groups along an axis, as an array indexed by [group, member]. `axis` is `tp`, `cp`, `pp`,
    `ep`, `dp_cp` or `expert_dp`. A `dp_cp` group consists of the ranks with the same dense parameters, over which their
    optimizer state is sharded. An `expert_dp` group consists of the ranks with the same experts. The members of a `pp`
    group are in the order of pipeline stages."""
    layout = job.layout
    ranks = job.first_gpu + np.arange(layout.gpus, dtype=np.int64)
    grid = ranks.reshape(layout.pp, layout.dp, layout.cp, layout.tp)
    experts = ranks.reshape(layout.pp, -1, layout.ep)
    array, size = {
        "tp": (grid, layout.tp),
        "cp": (grid.transpose(0, 1, 3, 2), layout.cp),
        "dp_cp": (grid.transpose(0, 3, 1, 2), layout.dp * layout.cp),
        "pp": (grid.transpose(1, 2, 3, 0), layout.pp),
        "ep": (experts, layout.ep),
        "expert_dp": (experts.transpose(0, 2, 1), experts.shape[1]),
    }[axis]
    return np.ascontiguousarray(array).reshape(-1, size)


def crosses(of: Ints, servers: Servers) -> bool:
    """Return whether any group has members on more than one server. `of` contains GPUs, indexed by [group, member]."""
    home = of // servers.gpus_per_server
    return bool(np.any(home != home[:, :1]))


FORWARD_BACKWARD = ("tp", "cp", "ep", "pp")
GRADIENTS = ("dp_reduce", "dp_gather", "expert_reduce", "expert_gather")


@dataclass(frozen=True, slots=True)
class GroupCollective:
    """One kind of collective, in all of its process groups at once. `transfer` is one execution of the collective.
    `times` is the number of executions per iteration and rank. `crosses` is set if a group has members on more than one
    server."""

    transfer: MessageTransfer
    times: float  # per iteration and rank
    crosses: bool  # between servers


def traffic(job: TrainJob, servers: Servers) -> Mapping[str, GroupCollective]:
    """Return the collectives of a training iteration, keyed by kind. Kinds whose groups have one member are omitted.
    For the context-parallel ring, `transfer` is that of a forward pass. A backward pass also transfers the gradients of
    keys and values, so it counts as two transfers. Raises ValueError if the layout needs GPUs that do not exist."""
    if job.first_gpu + job.layout.gpus > servers.gpus:
        raise ValueError(
            f"the layout needs GPUs {job.first_gpu}..{job.first_gpu + job.layout.gpus - 1}, there are {servers.gpus}"
        )
    found = {**_of_passes(job, servers), **_of_gradients(job, servers)}
    return {name: found[name] for name in (*FORWARD_BACKWARD, *GRADIENTS) if name in found}


def _of_passes(job: TrainJob, servers: Servers) -> dict[str, GroupCollective]:
    model, layout = job.model, job.layout
    layers, passes = _layer_passes(job)
    members = {kind: groups(job, kind) for kind in FORWARD_BACKWARD}
    vectors = job.micro_tokens * model.hidden * ACTIVATION_BYTES / layout.tp  # a rank's share of a micro-batch
    block = job.micro_tokens * 2 * max(1.0, model.kv_heads / layout.tp) * model.head_dim * ACTIVATION_BYTES
    around = layout.vpp > 1
    # Collectives of tensor parallelism in a layer's pass: before and after attention, and before and after the dense
    # feed-forward part. Tensor parallelism does not split experts.
    splits = 4 if model.ffn else 2
    found = {  # the transfer, and its number per iteration
        "tp": (collectives.all_gather(members["tp"], vectors, servers), layers * passes * splits),
        "cp": (_ring(members["cp"], (layout.cp - 1) * block, servers), layers * (passes + 1)),
        "ep": (
            collectives.all_to_all(members["ep"], vectors * model.experts_per_token, servers),
            layers * passes * 2,
        ),
        "pp": (
            _down(members["pp"], vectors, servers, around=around),
            2 * job.micro_batches * (layout.stages - 1) / layout.pp,
        ),
    }
    return {
        kind: GroupCollective(transfer, times, crosses(members[kind], servers))
        for kind, (transfer, times) in found.items()
        if members[kind].shape[1] > 1
    }


def _layer_passes(job: TrainJob) -> tuple[float, float]:
    """Return two numbers for one rank and iteration: the number of layers times the number of micro-batches, and the
    number of passes through each layer."""
    return job.micro_batches * job.model.layers / job.layout.pp, 3.0 if job.recompute else 2.0


def forward_times(job: TrainJob, kind: str, exchange: GroupCollective) -> float:
    """Return the number of times that each rank runs the collective `exchange` in the forward passes of an iteration.
    `kind` is the kind of the collective, one of FORWARD_BACKWARD."""
    passes = _layer_passes(job)[1]
    return exchange.times / {"tp": passes, "cp": passes + 1, "ep": passes, "pp": 2.0}[kind]


def _of_gradients(job: TrainJob, servers: Servers) -> dict[str, GroupCollective]:
    found = {}
    dense, experts = stage_parameters(job)
    for kind, axis, parameters in (("dp", "dp_cp", dense), ("expert", "expert_dp", experts)):
        members = groups(job, axis)
        size = members.shape[1]
        if size < 2 or not parameters:
            continue
        far = crosses(members, servers)
        transfer = collectives.reduce_scatter(members, parameters * job.constants.gradient_bytes / size, servers)
        found[f"{kind}_reduce"] = GroupCollective(transfer, 1.0, far)
        transfer = collectives.all_gather(members, parameters * job.constants.parameter_bytes / size, servers)
        found[f"{kind}_gather"] = GroupCollective(transfer, 1.0, far)
    return found


def _ring(members: Ints, given: float, servers: Servers) -> MessageTransfer:
    """Return a ring exchange in which each rank's block circulates once and is forwarded as soon as it arrives. Each
    rank sends `given` bytes in total."""
    steps = members.shape[1] - 1
    pairs = np.stack([members.ravel(), np.roll(members, -1, axis=1).ravel()], axis=1)
    once = collectives.p2p(pairs, given, servers)
    return replace(once, rounds=once.rounds * steps, overhead_s=once.overhead_s * steps)


def _down(members: Ints, given: float, servers: Servers, *, around: bool) -> MessageTransfer:
    """Return the messages of `given` bytes from each pipeline rank to the next rank. If `around` is true, the last rank
    also sends to the first rank."""
    pairs = np.stack([members, np.roll(members, -1, axis=1)], axis=2)
    pairs = pairs if around else pairs[:, :-1]
    return collectives.p2p(pairs.reshape(-1, 2), given, servers)


def periods(job: TrainJob, servers: Servers) -> tuple[Period, ...]:
    """Return the two periods of a training iteration, each with its demand. The first period contains the forward and
    backward passes. The second period contains the exchange of gradients and parameters."""
    return periods_of(job, traffic(job, servers))


def periods_of(job: TrainJob, exchanges: Mapping[str, GroupCollective]) -> tuple[Period, Period]:
    return (
        _period(job, "forward_backward", exchanges, FORWARD_BACKWARD),
        _period(job, "gradients", exchanges, GRADIENTS),
    )


def _period(job: TrainJob, name: str, exchanges: Mapping[str, GroupCollective], kinds: tuple[str, ...]) -> Period:
    """Return the period called `name`, with the demand of the given kinds of collectives. Collectives whose groups are
    each on a single server are not part of the demand."""
    found = [exchanges[kind] for kind in kinds if kind in exchanges and exchanges[kind].crosses]
    demand = GpuFlows.joined([each.transfer.flows.times(each.times) for each in found])
    return Period.of(f"train:{job.model.name}:{name}", FabricStage.TRAIN, demand)
