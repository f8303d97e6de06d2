"""Derive the step times of batches whose KV exceeds GPU memory, for engines that run such batches.

Such an engine keeps the excess KV in CPU memory and reads it in each step. Other engines queue or preempt requests
instead, so this step time does not exist for them. The functions have no side effects; measure.py uses them.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from planner.cost.fit import FitError, StepSample
from planner.cost.profile import StepTime

# Ratios of a batch's KV to the capacity. They are tried in order while the whole batch runs at once.
OVERFILLS = (1.15, 1.3, 1.6, 2.0, 3.0)


class GridPoint(NamedTuple):
    """One batch to be measured: the number of sequences, and the number of prompt tokens of each sequence."""

    sequences: int
    context_tokens: int


class Spill(NamedTuple):
    """The cost of KV beyond an engine's capacity. `s_per_token` is the time in seconds that each excess token adds to a
    step. `capacity_tokens` is the largest number of excess tokens that was measured."""

    s_per_token: float
    capacity_tokens: int
    error: FitError  # of step times


def overfills(
    capacity_tokens: int, max_sequences: int, longest_context_tokens: int, growth_tokens: int
) -> list[GridPoint]:
    """Return batches whose KV exceeds the capacity when decoding begins, each with as few sequences as possible. Every
    sequence can still grow by `growth_tokens`."""
    most_context = longest_context_tokens - growth_tokens
    if most_context < 1:
        return []
    most_tokens = max_sequences * most_context
    least_tokens, *_ = sizes = [int(share * capacity_tokens) for share in OVERFILLS]
    found = []
    for wanted_tokens in sorted({min(size, most_tokens) for size in sizes}):
        if wanted_tokens >= least_tokens:
            sequences = -(-wanted_tokens // most_context)
            found.append(GridPoint(sequences, -(-wanted_tokens // sequences)))
    return found


def spill_of(samples: Sequence[StepSample], step: StepTime, capacity_tokens: int) -> Spill | None:
    """Return the cost of KV beyond the capacity. It is computed from the samples beyond the capacity and from `step`,
    the step time within the capacity. Return None if no sample exceeds the capacity. Also return None if the samples
    beyond the capacity take no longer than `step` predicts, because the real capacity is then larger."""
    beyond = [sample for sample in samples if sample.kv_tokens > capacity_tokens]
    if not beyond:
        return None
    each_s = [
        (sample.step_s - step.at(sample.sequences, sample.kv_tokens)) / (sample.kv_tokens - capacity_tokens)
        for sample in beyond
    ]
    s_per_token = median(each_s)
    if s_per_token <= 0:
        return None
    spilling = StepTime(step.base_s, step.kv_s_per_token, s_per_token)
    misses = [
        abs(spilling.at(sample.sequences, sample.kv_tokens, capacity_tokens) / sample.step_s - 1) for sample in beyond
    ]
    most_tokens = int(max(sample.kv_tokens for sample in beyond)) - capacity_tokens
    return Spill(s_per_token, most_tokens, FitError(len(beyond), sum(misses) / len(misses), max(misses)))
