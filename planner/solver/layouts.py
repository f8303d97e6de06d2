"""Which layouts a planner chooses from: few, and leaning to the phase of the step. Pure.

The paper's second and third heuristics (section 4.1): TP inside a node, whole nodes beyond; for AFD only the ratios of
attention to FFN GPUs that keep both sides busy; many narrow engines while batches are large, wide ones in the tail.
"""

from collections.abc import Sequence
from enum import StrEnum

from planner.cost.engines import EngineModel
from planner.cost.hardware import GpuModel
from planner.cost.models import Model
from planner.cost.predict import DoesNotFit, predict
from planner.cost.profile import EngineProfile, Parallelism
from planner.cost.roofline import Precision

# AFD layouts that are tried, in nodes of attention and of FFN, and how many of them are kept.
AFD_RATIOS = ((1, 1), (2, 1), (3, 1), (3, 2), (4, 1))
AFD_MICRO_BATCHES = 3
AFD_KEPT = 2
# What a layout is judged by: sequences on each GPU, and the tokens that each of them holds.
JUDGED_SEQUENCES_PER_GPU = 32
JUDGED_CONTEXT_TOKENS = 4096
# In the tail an engine decodes a handful.
TAIL_SEQUENCES = 4
# Fewer than this on each GPU, and latency decides.
TAIL_SEQUENCES_PER_GPU = 2
# A layout is left out of a phase where another one is that much better there.
BIAS = 1.5


class StepPhase(StrEnum):
    """Where a generation step stands."""

    BULK = "bulk"  # large batches of moderate length: throughput counts
    TAIL = "tail"  # few long sequences: latency counts


def phase_of(sequences: float, gpus_count: int) -> StepPhase:
    return StepPhase.TAIL if sequences < TAIL_SEQUENCES_PER_GPU * gpus_count else StepPhase.BULK


def layouts(model: Model, gpus_count: int, per_node: int) -> list[Parallelism]:
    """All that are worth a look, whatever the phase: TP, and for models with experts EP, data-parallel too, and AFD."""
    sizes = _sizes(per_node, gpus_count)
    split_heads = [size for size in sizes if model.q_heads % size == 0]  # attention can be split over so many
    found = [Parallelism(tp=size) for size in split_heads]
    if not model.moe:
        return found
    expert_sizes = [size for size in sizes if size > 1 and model.experts % size == 0]
    found += [Parallelism(tp=size, ep=size) for size in expert_sizes if size <= per_node and size in split_heads]
    found += [Parallelism(tp=1, dp=size, ep=size) for size in expert_sizes]
    found += [
        Parallelism(attention_gpus=a * per_node, ffn_gpus=f * per_node, micro_batches=AFD_MICRO_BATCHES)
        for a, f in AFD_RATIOS
        if (a + f) * per_node <= gpus_count
    ]
    return found


def candidates(
    model: Model,
    gpu: GpuModel,
    gpus_count: int,
    per_node: int,
    engine: EngineModel,
    phase: StepPhase | None = None,
    precision: Precision | None = None,
) -> list[EngineProfile]:
    """Profiles of the layouts that fit; with a `phase`, only those that come close to the best of it.

    AFD keeps its best ratios. A fleet may always need a narrow engine for what is left over of its GPUs, so the
    narrowest that fits stays in every phase.
    """
    profiles = []
    for layout in layouts(model, gpus_count, per_node):
        try:
            profiles.append(predict(model, gpu, layout, engine, precision))
        except DoesNotFit:
            continue
    # Weights may fit with next to no room beside them.
    profiles = [profile for profile in profiles if profile.kv_capacity_tokens >= JUDGED_CONTEXT_TOKENS]
    afd = sorted((profile for profile in profiles if profile.parallelism.afd), key=bulk_cost)[:AFD_KEPT]
    kept = [profile for profile in profiles if not profile.parallelism.afd or profile in afd]
    return kept if phase is None else biased(kept, phase)


def biased(profiles: Sequence[EngineProfile], phase: StepPhase) -> list[EngineProfile]:
    """Those that are not far behind the best of the phase, in their order."""
    if not profiles:
        return []
    cost = bulk_cost if phase is StepPhase.BULK else tail_cost
    best = min(map(cost, profiles))
    narrowest = min(profiles, key=lambda profile: profile.parallelism.gpus)
    return [profile for profile in profiles if profile is narrowest or cost(profile) <= BIAS * best]


def bulk_cost(profile: EngineProfile) -> float:
    """GPU seconds of a token while batches are large, as far as the KV cache lets them."""
    gpus = profile.parallelism.gpus
    room = max(1.0, profile.kv_capacity_tokens / JUDGED_CONTEXT_TOKENS)
    sequences = min(JUDGED_SEQUENCES_PER_GPU * gpus, room, profile.max_sequences)
    return profile.step.at(sequences, sequences * JUDGED_CONTEXT_TOKENS) * gpus / sequences


def tail_cost(profile: EngineProfile) -> float:
    """Seconds of a token in the tail."""
    return profile.step.at(TAIL_SEQUENCES, TAIL_SEQUENCES * JUDGED_CONTEXT_TOKENS)


def _sizes(per_node: int, gpus_count: int) -> list[int]:
    """Powers of two inside a node, then doubling whole nodes."""
    inside = [1 << power for power in range(min(per_node, gpus_count).bit_length())]
    return inside + [nodes * per_node for nodes in (2, 4) if nodes * per_node <= gpus_count]
