"""What training holds in a GPU's memory: weights, gradients, optimizer state, activations. Pure.

A lower bound of what Megatron keeps, so that what is said not to fit does not fit: logits, buffers of collectives and
of the allocator are left out, sequences have their mean length, and what costs next to nothing is computed again.
"""

from dataclasses import dataclass, replace

from orchestrrl.lab.sim.train.compute import ACTIVATION_BYTES, rank_parameters
from orchestrrl.lab.sim.train.model import TrainJob

# Bytes of a parameter with the distributed optimizer (Megatron Core's user guide, "Distributed Optimizer", of bf16
# parameters and fp32 gradients): 6 on every rank; master copy and two moments are divided over data parallel ones.
HELD_BYTES = 6.0
DIVIDED_BYTES = 12.0
# By so much has a layout to be over a GPU's memory to be refused: gradients of 16 bits, optimizer state that is kept
# by the CPU in part, or products that are computed again save some of it.
MARGIN = 1.25
GB = 1e9


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one GPU."""

    state_bytes: float  # weights, gradients and the optimizer's
    activation_bytes: float

    @property
    def bytes(self) -> float:
        return self.state_bytes + self.activation_bytes


def memory_of(job: TrainJob) -> Memory:
    """On the rank of the pipeline that holds most."""
    found = (
        Memory(_state_bytes(job, dense, experts), _activation_bytes(job, rank))
        for rank, (dense, experts) in enumerate(rank_parameters(job))
    )
    return max(found, key=lambda each: each.bytes)


def fault_of(job: TrainJob) -> str | None:
    """What is to be said of a job that cannot fit by far; None: it may fit."""
    need, has_bytes = memory_of(job), job.gpu.hbm_bytes
    if need.bytes <= MARGIN * has_bytes:
        return None
    ways = ["tp", "pp"] + ["ep"] * job.model.moe + ["cp"] * (need.activation_bytes > need.state_bytes)
    change = f"raise {' or '.join(ways)}"
    if not job.recompute and memory_of(replace(job, recompute=True)).bytes < need.bytes - 0.1 * has_bytes:
        change += ", or recompute"
    return (
        f"needs at least {need.bytes / GB:.0f} GB on a GPU ({need.state_bytes / GB:.0f} for weights, gradients and"
        f" optimizer, {need.activation_bytes / GB:.0f} for activations), and {job.gpu.name} has {has_bytes / GB:.0f}:"
        f" {change}"
    )


def _state_bytes(job: TrainJob, dense: float, experts: float) -> float:
    layout = job.layout
    ranks = layout.cp * layout.dp
    of_experts = layout.tp * ranks / layout.ep
    return dense * (HELD_BYTES + DIVIDED_BYTES / ranks) + experts * (HELD_BYTES + DIVIDED_BYTES / of_experts)


def _activation_bytes(job: TrainJob, rank: int) -> float:
    """Of all micro-batches that are under way on a rank of the pipeline (Korthikanti et al., arXiv 2205.05198, sections
    4.2 and 4.4): as many as ranks from there on, more where stages are interleaved."""
    layout = job.layout
    own = sum(job.stage_layers[rank :: layout.pp])
    under_way = float(layout.pp - rank)
    if layout.vpp > 1:  # on the first rank 1 + (pp - 1) / (pp * vpp) times as many
        under_way = layout.pp + (layout.pp - 1 - 2 * rank) / layout.vpp
    layers = own * min(under_way, float(job.micro_batches))
    if not job.recompute:
        return layers * layer_bytes(job)
    return layers * job.micro_tokens / layout.tp * job.model.hidden * ACTIVATION_BYTES + layer_bytes(job)


def layer_bytes(job: TrainJob) -> float:
    """Of a layer and micro-batch, kept for its backward pass, counted as Korthikanti et al. do and divided by tensor
    parallelism with sequence parallelism: inputs of both norms, queries, keys, values and what attention makes of them,
    gate and up; of experts their inputs, too. Scores of attention are never kept (FlashAttention), there is no dropout;
    outputs of norms and of the activation are computed again (Megatron Core, --recompute-modules layernorm moe_act)."""
    model = job.model
    attention = 2 * model.hidden + 2 * (model.q_heads + model.kv_heads) * model.head_dim
    experts = model.experts_per_token * (model.hidden + 2 * model.expert_ffn)
    return job.micro_tokens / job.layout.tp * ACTIVATION_BYTES * (attention + 2 * model.ffn + experts)
