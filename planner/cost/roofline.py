"""Calculate step times from the constants of the GPU, the model and the engine: the times to read, multiply and send
data. Has no side effects.

`work_of` returns the work of a decode iteration and of a prefill on the busiest GPU, in seconds at the data sheet's
rates. `decode_s` and `prefill_s` apply an engine's constants to this work. They also accept arrays, because the fit
evaluates hundreds of rows at once. The memory-bound and compute-bound parts of a matrix product overlap imperfectly, so
they are combined as the square root of the sum of squares.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.cost.engine_constants import EngineConstants, Numbers
from planner.cost.hardware import GpuModel
from planner.cost.models import BF16_BITS, Model
from planner.cost.profile import Parallelism

ACTIVATION_BYTES = 2.0
MEMORY_SHARE = 0.9  # share of HBM that an engine uses for weights and KV cache
ACTIVATION_RESERVE_BYTES = 1e9  # per GPU: activations, graphs, communication buffers


@dataclass(frozen=True, slots=True)
class Precision:
    """The number of bits per element of weights, of experts and of the KV cache."""

    weight_bits: float = BF16_BITS
    expert_bits: float = BF16_BITS
    kv_bits: float = BF16_BITS


@dataclass(frozen=True, slots=True)
class IterationWork:
    """The work of one decode iteration of an attention replica that runs `sequences` sequences, and of the prefill of a
    prompt. Times are in seconds at peak rates.

    Each field is a single value, or an array with one value per row of the fit.
    """

    sequences: Numbers  # decoded by one attention replica
    layers: Numbers
    hidden: Numbers
    tp: Numbers
    ep: Numbers
    quantised: Numbers  # 1 or 0: activations are quantised
    experts: Numbers  # 0: dense
    experts_per_token: Numbers
    four_bit_experts: Numbers  # 1 or 0
    all_tokens: Numbers  # processed by the experts, from all attention replicas
    dense_read_s: Numbers  # reading the weights that every token passes
    dense_flops_s: Numbers  # multiplying with these weights, per sequence or prompt token
    expert_read_s: Numbers  # reading one distinct expert in every layer
    expert_flops_s: Numbers  # multiplying with all experts of one token
    kv_read_s_per_token: Numbers
    link_s: Numbers  # all-reduces of one token, at the link's peak rate
    exchange_s: Numbers  # all-to-all of one token to and from its experts
    reduce_hop_s: Numbers  # additional latency of an all-reduce that leaves the node
    exchange_hop_s: Numbers  # additional latency of an all-to-all that leaves the node
    prefill_expert_s: Numbers  # per prompt token
    prefill_attention_s: Numbers  # per prompt token and token before it


Row = TypeVar("Row", IterationWork, EngineConstants)


def stacked(rows: Sequence[Row]) -> Row:
    """Return one object of the same type as `rows`. Each of its fields is an array of the values of that field in
    `rows`."""
    columns = {
        field.name: np.array([getattr(row, field.name) for row in rows], dtype=np.float64) for field in fields(rows[0])
    }
    return type(rows[0])(**columns)


def work_of(
    model: Model, gpu: GpuModel, parallelism: Parallelism, precision: Precision, sequences: Numbers
) -> IterationWork:
    """Return the work of an engine that runs `sequences` sequences, spread evenly over its attention replicas."""
    tp, gpus = parallelism.tp, parallelism.tp * parallelism.dp
    dense_params = model.layers * (model.attention_params + model.dense_ffn_params)
    dense_flops_per_s = gpu.flops_per_s(precision.weight_bits)
    expert_flops_per_s = gpu.flops_per_s(precision.expert_bits)
    dense_read_bytes = dense_params * precision.weight_bits / 8 + model.head_params * ACTIVATION_BYTES
    expert_bytes = model.layers * model.expert_params * precision.expert_bits / 8
    expert_flops = 2.0 * model.layers * model.experts_per_token * model.expert_params
    exchange_bytes = 2.0 * model.layers * model.experts_per_token * model.hidden * ACTIVATION_BYTES
    remote = 0.0 if parallelism.dp == 1 or not model.moe else (gpus - tp) / gpus
    return IterationWork(
        # The busiest replica has at least one sequence.
        sequences=np.maximum(sequences / parallelism.dp, np.minimum(sequences, 1.0)),
        layers=float(model.layers),
        hidden=float(model.hidden),
        tp=float(tp),
        ep=float(parallelism.ep),
        quantised=float(gpu.multiplies(precision.weight_bits)),
        experts=float(model.experts),
        experts_per_token=float(model.experts_per_token),
        four_bit_experts=float(model.moe and precision.expert_bits < 8),
        all_tokens=sequences,
        dense_read_s=dense_read_bytes / tp / gpu.hbm_bytes_per_s,
        dense_flops_s=2.0 * dense_params / tp / dense_flops_per_s,
        expert_read_s=expert_bytes / gpus / gpu.hbm_bytes_per_s,
        expert_flops_s=expert_flops / gpus / expert_flops_per_s,
        kv_read_s_per_token=kv_bytes_per_gpu(model, tp, precision) / gpu.hbm_bytes_per_s,
        link_s=2.0 * model.layers * model.hidden * ACTIVATION_BYTES * all_reduce_s_per_byte(gpu, tp),
        exchange_s=remote * exchange_bytes / tp / link_bytes_per_s(gpu, gpus),
        reduce_hop_s=hop_s(gpu, tp),
        exchange_hop_s=hop_s(gpu, gpus),
        prefill_expert_s=expert_flops / tp / expert_flops_per_s,
        prefill_attention_s=2.0
        * model.layers
        * model.q_heads
        * model.head_dim
        * full_attention_share(model)
        / tp
        / gpu.bf16_flops,
    )


def link_bytes_per_s(gpu: GpuModel, gpus: int) -> float:
    """Return the rate per GPU and direction of a collective among `gpus` GPUs. This is the rate of NVLink if all GPUs
    fit in one node, and otherwise the rate of the network."""
    return gpu.nvlink_bytes_per_s if gpus <= gpu.per_node else gpu.nic_bytes_per_s


def all_reduce_s_per_byte(gpu: GpuModel, gpus: int) -> float:
    """Return the time per byte of an all-reduce at peak rates, in seconds.

    An all-reduce across nodes has two levels. Between nodes, every NIC carries its share of the node's sum.
    """
    inside, nodes = min(gpus, gpu.per_node), max(1.0, gpus / gpu.per_node)
    across = 2.0 * (nodes - 1) / nodes / gpu.per_node / gpu.nic_bytes_per_s
    return 2.0 * (inside - 1) / inside / gpu.nvlink_bytes_per_s + across


def hop_s(gpu: GpuModel, gpus: int) -> float:
    """Return the latency in seconds that the network adds to a collective of `gpus` GPUs; 0 inside one node."""
    return 0.0 if gpus <= gpu.per_node else gpu.inter_node_latency_s


def full_attention_share(model: Model) -> float:
    """Return the share of layers with full attention. Layers with a sliding window read almost no KV cache."""
    return 0.5 if model.window_tokens else 1.0


def kv_bytes_per_gpu(model: Model, tp: int, precision: Precision) -> float:
    """Return the size, in bytes, of one token's KV cache on each GPU of an attention replica.

    If there are fewer KV heads than GPUs, several GPUs store the same head.
    """
    heads = max(1.0, model.kv_heads / tp)
    return 2 * model.layers * heads * model.head_dim * precision.kv_bits / 8


def weight_bytes_per_gpu(model: Model, parallelism: Parallelism, precision: Precision) -> float:
    """Return the weight bytes on each GPU.

    Experts are split over all GPUs of the engine. All other weights are split over `tp` GPUs. Both embeddings are
    16-bit.
    """
    dense = model.layers * (model.attention_params + model.dense_ffn_params) * precision.weight_bits / 8
    heads = model.head_params * ACTIVATION_BYTES * (1 if model.tied_embeddings else 2)
    experts = model.layers * model.experts * model.expert_params * precision.expert_bits / 8
    return (dense + heads) / parallelism.tp + experts / (parallelism.tp * parallelism.dp)


def kv_capacity_tokens(model: Model, gpu: GpuModel, parallelism: Parallelism, precision: Precision) -> float:
    """Return the KV capacity of all attention replicas together, in tokens; 0 or less if the weights do not fit."""
    room = gpu.hbm_bytes * MEMORY_SHARE - weight_bytes_per_gpu(model, parallelism, precision) - ACTIVATION_RESERVE_BYTES
    return parallelism.dp * room / kv_bytes_per_gpu(model, parallelism.tp, precision)


def decode_s(work: IterationWork, constants: EngineConstants) -> NDArray[np.float64]:
    """Return the duration of one decode iteration in seconds, without KV cache reads."""
    c, sequences = constants, work.sequences
    dense = np.hypot(work.dense_read_s / c.hbm_efficiency, sequences * work.dense_flops_s / c.gemm_efficiency)
    experts = np.hypot(_expert_read_s(work, c), _expert_flops_s(work, c))
    launches = work.layers * (
        c.layer_s + c.quantised_layer_s * work.quantised + c.moe_layer_s * np.greater(work.experts, 0)
    )
    host = c.step_s + c.sequence_s * sequences
    elements = c.element_s * sequences * work.layers * work.hidden
    routing = c.expert_token_s * sequences * work.layers * work.experts_per_token
    links = sequences * (work.link_s + work.exchange_s) / c.link_efficiency
    return np.asarray(dense + experts + launches + host + elements + routing + links + _latencies_s(work, c))


def kv_s_per_token(work: IterationWork, constants: EngineConstants) -> NDArray[np.float64]:
    """Return the time, in seconds, that each KV token of the attention replica adds to a decode iteration."""
    return np.asarray(work.kv_read_s_per_token / constants.kv_efficiency)


def prefill_s(work: IterationWork, constants: EngineConstants, prompt_tokens: Numbers) -> NDArray[np.float64]:
    """Return the time, in seconds, that an attention replica takes to prefill one prompt."""
    c = constants
    efficiency = np.where(np.greater(work.quantised, 0), c.prefill_fp8_efficiency, c.prefill_efficiency)
    experts = work.prefill_expert_s * _imbalance(work, c) / c.moe_prefill_efficiency
    attention = work.prefill_attention_s * prompt_tokens
    multiply = (work.dense_flops_s + experts + attention) / efficiency
    sent = (work.link_s + work.exchange_s) / c.link_efficiency
    return np.asarray(prompt_tokens * (multiply + sent) + c.prompt_s)


def _imbalance(work: IterationWork, c: EngineConstants) -> NDArray[np.float64]:
    """Return the ratio of the load of the busiest expert-parallel rank to the mean load."""
    return np.asarray(np.power(work.ep, c.ep_imbalance_exponent))


def distinct_experts(experts: Numbers, per_token: Numbers, tokens: Numbers, exponent: Numbers) -> NDArray[np.float64]:
    """Return the number of distinct experts that a batch visits in one layer.

    The number is lower than for independent tokens, because tokens of one batch are similar and routers prefer some
    experts (see `EngineConstants.routing_exponent`).
    """
    independent = np.power(np.maximum(tokens, 0.0), exponent)
    return np.asarray(experts * (1.0 - np.power(1.0 - per_token / np.maximum(experts, 1.0), independent)))


def _expert_read_s(work: IterationWork, c: EngineConstants) -> NDArray[np.float64]:
    """Return the time, in seconds, that the busiest rank takes to read the experts that the batch visits."""
    distinct = distinct_experts(work.experts, work.experts_per_token, work.all_tokens, c.routing_exponent)
    busiest = np.minimum(distinct * _imbalance(work, c), work.experts)
    efficiency = c.hbm_efficiency * np.where(np.greater(work.four_bit_experts, 0), c.four_bit_efficiency, 1.0)
    return np.asarray(busiest * work.expert_read_s / efficiency)


def _expert_flops_s(work: IterationWork, c: EngineConstants) -> NDArray[np.float64]:
    return np.asarray(work.all_tokens * work.expert_flops_s / c.gemm_efficiency * _imbalance(work, c))


def _latencies_s(work: IterationWork, c: EngineConstants) -> NDArray[np.float64]:
    """Return the total latency, in seconds, of all collectives of an iteration. It does not depend on the batch.

    Each layer has two all-reduces among the GPUs of a replica and two all-to-alls among replicas.
    """
    rounds = 2.0 * work.layers
    reduce_s = c.all_reduce_s + c.all_reduce_doubling_s * np.log2(work.tp) + work.reduce_hop_s
    exchange_s = c.all_reduce_s + c.all_reduce_doubling_s * np.log2(work.ep) + work.exchange_hop_s
    reduce_s = np.where(np.greater(work.tp, 1), reduce_s, 0.0)
    exchange_s = np.where(np.greater(work.exchange_s, 0), exchange_s, 0.0)
    return np.asarray(rounds * (reduce_s + exchange_s))


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A closed loop of `concurrency` clients, each of which sends its next prompt when its previous answer is
    complete."""

    concurrency: float
    prompt_tokens: float
    output_tokens: float


def running_sequences(load: ClosedLoop, capacity_tokens: float) -> float:
    """Return the number of sequences that decode at once: one per client, but at most as many as the KV cache holds
    when each sequence has generated half of its output."""
    return min(load.concurrency, max(1.0, capacity_tokens / (load.prompt_tokens + load.output_tokens / 2)))


def tpot_s(
    work: IterationWork,
    constants: EngineConstants,
    context_tokens: Numbers,
    prompt_tokens: Numbers,
    output_tokens: Numbers,
) -> NDArray[np.float64]:
    """Return the mean time, in seconds, per output token of a closed loop, including the prefills of other requests.

    While a request decodes, it is delayed by one prefill of every other request, except those that are prefilled
    together with it. `context_tokens` is the number of context tokens that each sequence reads in an iteration, taken
    at the time when the sequence has generated half of its output.
    """
    own = decode_s(work, constants) + kv_s_per_token(work, constants) * context_tokens * work.sequences
    met = constants.prefill_share * np.maximum(0.0, work.sequences - constants.lockstep_sequences)
    return np.asarray(own + met * prefill_s(work, constants, prompt_tokens) / output_tokens)


def attended_tokens(model: Model, load: ClosedLoop) -> float:
    """Return the number of tokens to which a sequence attends when it has generated half of its output, averaged over
    the layers."""
    context = load.prompt_tokens + load.output_tokens / 2
    if not model.window_tokens:
        return context
    return (context + min(context, model.window_tokens)) / 2
