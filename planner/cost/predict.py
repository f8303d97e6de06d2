"""Predict the profiles of engines, without measurements, from the constants of the model, the GPU and the engine. Has
no side effects.

Under data-parallel attention, each replica decodes its share of the sequences, and all replicas together hold the
experts. Under AFD (attention and FFN on separate GPUs), micro-batches alternate between the two sides. For one
micro-batch, a layer needs some time on the attention GPUs, on the FFN GPUs and on the links. The duration of a layer is
the longest of these three times, multiplied by the number of micro-batches. If the round trip of one micro-batch is
longer than that, it is the duration of the layer instead. With few sequences the round trip dominates, which makes AFD
slow in the tail.
"""

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from planner.cost.engine_constants import EngineConstants
from planner.cost.engines import EngineModel
from planner.cost.hardware import GpuModel
from planner.cost.models import Model
from planner.cost.profile import (
    USUAL_PROMPT_TOKENS,
    Curve,
    EngineProfile,
    MoveCosts,
    Parallelism,
    Profile,
    ProfileSource,
    Provenance,
    StepTime,
)
from planner.cost.roofline import (
    ACTIVATION_BYTES,
    ACTIVATION_RESERVE_BYTES,
    MEMORY_SHARE,
    Precision,
    decode_s,
    distinct_experts,
    full_attention_share,
    hop_s,
    kv_bytes_per_gpu,
    kv_capacity_tokens,
    kv_s_per_token,
    link_bytes_per_s,
    prefill_s,
    weight_bytes_per_gpu,
    work_of,
)
from planner.model import ConfigurationId

Floats = NDArray[np.float64]

TRANSFER_LATENCY_S = 2e-3
RECOMPUTE_KNOTS = (256, 1024, 4096, 16384, 32768, 65536, 131072)


class DoesNotFit(ValueError):
    """Raised if the weights leave no room for a KV cache."""


def published_precision(model: Model) -> Precision:
    """Return the precision of the model's published checkpoint, with a 16-bit KV cache."""
    return Precision(model.weight_bits, model.expert_bits)


def predict(
    model: Model,
    gpu: GpuModel,
    parallelism: Parallelism,
    engine: EngineModel,
    precision: Precision | None = None,
    cpu_kv_bytes_per_gpu: float = 0.0,
) -> EngineProfile:
    """Predict the profile of one layout. Raises ValueError if the layout has several pipeline stages, and DoesNotFit if
    the weights leave no room for a KV cache.

    `cpu_kv_bytes_per_gpu` is the CPU memory per GPU for KV cache that does not fit on the GPUs. It is used only if the
    engine can spill KV cache to CPU memory.
    """
    if parallelism.pp > 1:
        raise ValueError(f"pp must be 1, because step times of pipeline stages are not modelled, got {parallelism.pp}")
    bits = precision or published_precision(model)
    capacity = _capacity_tokens(model, gpu, parallelism, bits)
    if capacity < 1:
        raise DoesNotFit(
            f"model {model.name} does not fit on GPU {gpu.name} with parallelism {identifier(parallelism)}"
        )
    held_bytes = kv_bytes_per_gpu(model, parallelism.tp, bits)
    spills = engine.spills and cpu_kv_bytes_per_gpu > 0
    replicas = attention_replicas(parallelism)
    work = work_of(model, gpu, _attention_layout(parallelism), bits, 1.0)
    return EngineProfile(
        id=identifier(parallelism),
        parallelism=parallelism,
        step=StepTime(
            base_s=_base_s(model, gpu, parallelism, engine, bits),
            kv_s_per_token=float(kv_s_per_token(work, engine.constants)) * full_attention_share(model) / replicas,
            spill_s_per_token=held_bytes / gpu.pcie_bytes_per_s / replicas if spills else 0.0,
        ),
        prefill_tokens_per_s=_prefill_tokens_per_s(model, gpu, parallelism, engine.constants, bits),
        kv_capacity_tokens=int(capacity),
        max_sequences=engine.max_sequences * replicas,
        switch_s=switch_s(model, gpu, parallelism, engine, bits),
        provenance=engine.provenance,
        spill_capacity_tokens=int(cpu_kv_bytes_per_gpu * replicas / held_bytes) if spills else 0,
        others=(("switch_s", Provenance(ProfileSource.GIVEN, engine.provenance.date, engine.start_detail)),),
    )


def predict_profile(
    model: Model,
    gpu: GpuModel,
    layouts: Sequence[Parallelism],
    engine: EngineModel,
    precision: Precision | None = None,
    cpu_kv_bytes_per_gpu: float = 0.0,
) -> Profile:
    """Predict the profiles of all `layouts` in which the model fits on the GPUs, and the costs of moving a request."""
    configurations = []
    for parallelism in layouts:
        try:
            configurations.append(predict(model, gpu, parallelism, engine, precision, cpu_kv_bytes_per_gpu))
        except DoesNotFit:
            continue
    moves = move_costs(model, gpu, engine, precision)
    return Profile(model.name, gpu.name, engine.name, tuple(configurations), moves)


def identifier(parallelism: Parallelism) -> ConfigurationId:
    """Return an id such as `tp4`, `tp1dp8ep8` or `afd24+16x3` (attention GPUs, FFN GPUs, micro-batches)."""
    p = parallelism
    if p.afd:
        tp = f"tp{p.tp}" if p.tp > 1 else ""
        return ConfigurationId(f"afd{p.attention_gpus}+{p.ffn_gpus}x{p.micro_batches}{tp}")
    tp = f"tp{p.tp}" + (f"pp{p.pp}" if p.pp > 1 else "")
    return ConfigurationId(tp + (f"dp{p.dp}" if p.dp > 1 else "") + (f"ep{p.ep}" if p.ep > 1 else ""))


def attention_replicas(parallelism: Parallelism) -> int:
    return parallelism.attention_gpus // parallelism.tp if parallelism.afd else parallelism.dp


def switch_s(model: Model, gpu: GpuModel, parallelism: Parallelism, engine: EngineModel, precision: Precision) -> float:
    """Return the time, in seconds, to start the engine of an instance, form its process group and load its weights.

    All GPUs of the instance load their weights from CPU memory in parallel.
    """
    loaded_bytes = max(_weight_bytes(model, parallelism, precision))
    return engine.start_s + engine.start_s_per_gpu * parallelism.gpus + loaded_bytes / gpu.pcie_bytes_per_s


def move_costs(
    model: Model,
    gpu: GpuModel,
    engine: EngineModel,
    precision: Precision | None = None,
    nics: int = 1,
    recompute_tp: int = 8,
) -> MoveCosts:
    """Return the costs of moving a request (appendix A of the paper), either by sending its KV cache over `nics` NICs
    or by repeating its prefill on `recompute_tp` GPUs."""
    bits = precision or published_precision(model)
    work = work_of(model, gpu, Parallelism(tp=recompute_tp), bits, 1.0)
    recompute_s = [float(prefill_s(work, engine.constants, tokens)) for tokens in RECOMPUTE_KNOTS]
    return MoveCosts(
        kv_bytes_per_token=model.kv_bytes_per_token(bits.kv_bits),
        transfer_s=Curve.line(TRANSFER_LATENCY_S, 1 / (gpu.nic_bytes_per_s * nics)),
        recompute_s=Curve(tuple(map(float, RECOMPUTE_KNOTS)), tuple(recompute_s)),
        provenance=engine.provenance,
    )


def _attention_layout(parallelism: Parallelism) -> Parallelism:
    """Return the layout of the attention GPUs alone, without the FFN GPUs of AFD."""
    if not parallelism.afd:
        return parallelism
    return Parallelism(tp=parallelism.tp, dp=attention_replicas(parallelism))


def _weight_bytes(model: Model, parallelism: Parallelism, precision: Precision) -> tuple[float, float]:
    """Return the weight bytes on each attention GPU and on each FFN GPU. The latter is 0 without AFD."""
    if not parallelism.afd:
        return weight_bytes_per_gpu(model, parallelism, precision), 0.0
    attention = model.layers * model.attention_params * precision.weight_bits / 8
    heads = model.head_params * ACTIVATION_BYTES * (1 if model.tied_embeddings else 2)
    dense = model.layers * model.dense_ffn_params * precision.weight_bits / 8
    experts = model.layers * model.experts * model.expert_params * precision.expert_bits / 8
    return (attention + heads) / parallelism.tp, (dense + experts) / parallelism.ffn_gpus


def _capacity_tokens(model: Model, gpu: GpuModel, parallelism: Parallelism, precision: Precision) -> float:
    if not parallelism.afd:
        return kv_capacity_tokens(model, gpu, parallelism, precision)
    usable_bytes = gpu.hbm_bytes * MEMORY_SHARE - ACTIVATION_RESERVE_BYTES
    attention_bytes, ffn_bytes = _weight_bytes(model, parallelism, precision)
    if ffn_bytes > usable_bytes:
        return 0.0
    held = kv_bytes_per_gpu(model, parallelism.tp, precision)
    return attention_replicas(parallelism) * (usable_bytes - attention_bytes) / held


def _prefill_tokens_per_s(
    model: Model, gpu: GpuModel, parallelism: Parallelism, constants: EngineConstants, precision: Precision
) -> float:
    """Return the prefill rate of the whole engine. Under AFD, the GPUs of both sides prefill together, like those of an
    engine without AFD."""
    layout = parallelism
    if parallelism.afd:
        layout = Parallelism(tp=parallelism.tp, dp=max(1, parallelism.gpus // parallelism.tp), ep=parallelism.ffn_gpus)
    work = work_of(model, gpu, layout, precision, 1.0)
    return layout.dp * USUAL_PROMPT_TOKENS / float(prefill_s(work, constants, float(USUAL_PROMPT_TOKENS)))


def _base_s(model: Model, gpu: GpuModel, parallelism: Parallelism, engine: EngineModel, precision: Precision) -> Curve:
    """Return the duration of one iteration in seconds, without KV cache reads, as a curve over the number of sequences.
    The curve has a knot at each doubling."""
    most = engine.max_sequences * attention_replicas(parallelism)
    doublings = ceil(np.log2(most))
    sequences = np.unique(np.minimum(2.0 ** np.arange(doublings + 1), float(most)))
    if parallelism.afd:
        step_s = _afd_s(model, gpu, parallelism, engine.constants, precision, sequences)
    else:
        works = [work_of(model, gpu, parallelism, precision, float(count)) for count in sequences]
        step_s = np.array([float(decode_s(work, engine.constants)) for work in works])
    return Curve(tuple(sequences.tolist()), tuple(np.maximum.accumulate(step_s).tolist()))


def _afd_s(
    model: Model, gpu: GpuModel, parallelism: Parallelism, c: EngineConstants, precision: Precision, sequences: Floats
) -> Floats:
    """Return the duration in seconds of one iteration under AFD, without KV cache reads, for each number of
    sequences."""
    replicas, ffn_gpus = attention_replicas(parallelism), parallelism.ffn_gpus
    micro = np.minimum(float(parallelism.micro_batches), sequences)
    batch = sequences / micro
    mine = np.maximum(batch / replicas, np.minimum(1.0, batch))
    weight_flops_per_s = gpu.flops_per_s(precision.weight_bits)
    launches_s = c.layer_s + c.quantised_layer_s * gpu.multiplies(precision.weight_bits)
    work = work_of(model, gpu, _attention_layout(parallelism), precision, 1.0)
    reduce_s = c.all_reduce_s + c.all_reduce_doubling_s * np.log2(parallelism.tp) if parallelism.tp > 1 else 0.0

    params = model.attention_params / parallelism.tp
    attention_s = (
        np.hypot(
            params * precision.weight_bits / 8 / gpu.hbm_bytes_per_s / c.hbm_efficiency,
            2 * params * mine / weight_flops_per_s / c.gemm_efficiency,
        )
        + launches_s / 2
        + reduce_s
        + mine * (c.element_s * model.hidden + work.link_s / 2 / model.layers / c.link_efficiency)
    )
    ffn_s = launches_s / 2 + _ffn_s(model, gpu, ffn_gpus, c, precision, batch)
    wire_s, hidden_bytes = link_bytes_per_s(gpu, parallelism.gpus) * c.link_efficiency, model.hidden * ACTIVATION_BYTES
    copies = min(model.experts_per_token, ffn_gpus) if model.moe else 1
    sent_s = batch * copies * hidden_bytes / min(parallelism.attention_gpus, ffn_gpus) / wire_s
    hop = c.all_reduce_s + c.all_reduce_doubling_s * np.log2(parallelism.gpus) + hop_s(gpu, parallelism.gpus)
    there_and_back_s = attention_s + ffn_s + 2 * (sent_s + hop)
    busiest_s = np.maximum(np.maximum(attention_s, ffn_s), sent_s)
    layer_s = np.maximum(micro * busiest_s, there_and_back_s)
    head_s = model.head_params * ACTIVATION_BYTES / parallelism.tp / gpu.hbm_bytes_per_s / c.hbm_efficiency
    host_s = c.step_s + c.sequence_s * sequences / replicas
    return np.asarray(model.layers * layer_s + head_s + host_s)


def _ffn_s(model: Model, gpu: GpuModel, gpus: int, c: EngineConstants, precision: Precision, batch: Floats) -> Floats:
    """Return the time, in seconds, that the FFN GPUs take for one layer, for each batch size.

    Experts are distributed over these GPUs. A dense FFN is split over all of them.
    """
    weight_flops_per_s = gpu.flops_per_s(precision.weight_bits)
    params = model.dense_ffn_params / gpus
    dense_s = np.hypot(
        params * precision.weight_bits / 8 / gpu.hbm_bytes_per_s / c.hbm_efficiency,
        2 * params * batch / weight_flops_per_s / c.gemm_efficiency,
    )
    if not model.moe:
        reduce_s = c.all_reduce_s + c.all_reduce_doubling_s * np.log2(gpus) if gpus > 1 else 0.0
        return np.asarray(dense_s + reduce_s)
    work = work_of(model, gpu, Parallelism(tp=1, dp=gpus, ep=gpus), precision, 1.0)
    distinct = distinct_experts(model.experts, model.experts_per_token, batch, c.routing_exponent)
    imbalance = gpus**c.ep_imbalance_exponent
    efficiency = c.hbm_efficiency * (c.four_bit_efficiency if precision.expert_bits < 8 else 1.0)
    read_s = np.minimum(distinct * imbalance, model.experts) * work.expert_read_s / model.layers / efficiency
    flops_s = batch * work.expert_flops_s / model.layers * imbalance / c.gemm_efficiency
    routing_s = c.moe_layer_s + c.expert_token_s * batch / gpus * model.experts_per_token
    return np.asarray(dense_s + np.hypot(read_s, flops_s) + routing_s)
