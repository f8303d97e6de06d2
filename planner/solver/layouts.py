"""Select the layouts that a planner chooses from, biased by the phase of the step. Has no side effects.

The module implements the second and third heuristics of the paper (section 4.1). TP stays inside a node or takes whole
nodes. AFD uses only ratios of attention to FFN GPUs that keep both sides busy. Engines have few GPUs while batches are
large, and many GPUs in the tail.
"""

from collections.abc import Sequence
from enum import StrEnum

from planner.cost.engines import EngineModel
from planner.cost.hardware import GpuModel
from planner.cost.models import Model
from planner.cost.predict import DoesNotFit, predict
from planner.cost.profile import EngineProfile, Parallelism
from planner.cost.roofline import Precision

# Ratios of attention to FFN nodes that are tried for AFD, and how many of the layouts are kept.
AFD_RATIOS = ((1, 1), (2, 1), (3, 1), (3, 2), (4, 1))
AFD_MICRO_BATCHES = 3
AFD_KEPT = 2
# The load at which layouts are compared: sequences per GPU, and KV tokens per sequence.
JUDGED_SEQUENCES_PER_GPU = 32
JUDGED_CONTEXT_TOKENS = 4096
# Sequences per engine in the tail.
TAIL_SEQUENCES = 4
# Sequences per GPU below which a step is in its tail.
TAIL_SEQUENCES_PER_GPU = 2
# A layout is left out of a phase if its cost there is more than this many times the best one's.
BIAS = 1.5


class StepPhase(StrEnum):
    """The phase of a generation step."""

    BULK = "bulk"  # large batches of moderate length: throughput matters
    TAIL = "tail"  # few long sequences: latency matters


def phase_of(sequences: float, gpus_count: int) -> StepPhase:
    return StepPhase.TAIL if sequences < TAIL_SEQUENCES_PER_GPU * gpus_count else StepPhase.BULK


def layouts(model: Model, gpus_count: int, per_node: int) -> list[Parallelism]:
    """Return the layouts to consider in any phase: TP and, for models with experts, TP with EP, DP with EP, and AFD."""
    sizes = _sizes(per_node, gpus_count)
    split_heads = [size for size in sizes if model.q_heads % size == 0]  # sizes that divide the attention heads
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
    """Return the profiles of the layouts that fit on the GPUs. If a `phase` is given, return only the profiles whose
    cost in that phase is close to the lowest.

    Only the best AFD ratios are kept. The layout with the fewest GPUs is kept in every phase, because a fleet may need
    it for its remaining GPUs.
    """
    profiles = []
    for layout in layouts(model, gpus_count, per_node):
        try:
            profiles.append(predict(model, gpu, layout, engine, precision))
        except DoesNotFit:
            continue
    # Weights may fit and leave almost no room for KV.
    profiles = [profile for profile in profiles if profile.kv_capacity_tokens >= JUDGED_CONTEXT_TOKENS]
    afd = sorted((profile for profile in profiles if profile.parallelism.afd), key=bulk_cost)[:AFD_KEPT]
    kept = [profile for profile in profiles if not profile.parallelism.afd or profile in afd]
    return kept if phase is None else biased(kept, phase)


def biased(profiles: Sequence[EngineProfile], phase: StepPhase) -> list[EngineProfile]:
    """Return the profiles whose cost in the phase is at most BIAS times the lowest, in the order of `profiles`.

    The profile with the fewest GPUs is always included.
    """
    if not profiles:
        return []
    cost = bulk_cost if phase is StepPhase.BULK else tail_cost
    best = min(map(cost, profiles))
    narrowest = min(profiles, key=lambda profile: profile.parallelism.gpus)
    return [profile for profile in profiles if profile is narrowest or cost(profile) <= BIAS * best]


def bulk_cost(profile: EngineProfile) -> float:
    """Return the GPU time per token with large batches, in GPU-seconds. The KV cache and `max_sequences` limit the
    batches."""
    gpus = profile.parallelism.gpus
    room = max(1.0, profile.kv_capacity_tokens / JUDGED_CONTEXT_TOKENS)
    sequences = min(JUDGED_SEQUENCES_PER_GPU * gpus, room, profile.max_sequences)
    return profile.step.at(sequences, sequences * JUDGED_CONTEXT_TOKENS) * gpus / sequences


def tail_cost(profile: EngineProfile) -> float:
    """Return the time per token of a sequence, in seconds, in the tail of a step, when few long sequences run."""
    return profile.step.at(TAIL_SEQUENCES, TAIL_SEQUENCES * JUDGED_CONTEXT_TOKENS)


def _sizes(per_node: int, gpus_count: int) -> list[int]:
    """Return the numbers of GPUs to consider for an engine: powers of two inside a node, then two and four whole
    nodes."""
    inside = [1 << power for power in range(min(per_node, gpus_count).bit_length())]
    return inside + [nodes * per_node for nodes in (2, 4) if nodes * per_node <= gpus_count]
