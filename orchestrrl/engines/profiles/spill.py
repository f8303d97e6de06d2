"""What decoding takes with more KV than the GPU holds, where an engine goes on all the same. Pure; measure.py asks it.

Such an engine keeps the rest in CPU memory and reads it in each step. One that cannot lets requests wait or preempts
them, and then there is nothing to tell.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from planner.cost.fit import FitError, StepSample
from planner.cost.profile import StepTime

# KV of a batch over the capacity, tried in turn for as long as all of it runs at once.
OVERFILLS = (1.15, 1.3, 1.6, 2.0, 3.0)


class GridPoint(NamedTuple):
    """One batch: how many sequences, and the prompt tokens of each."""

    sequences: int
    context_tokens: int


class Spill(NamedTuple):
    """Seconds for each token beyond the capacity and step, and how many such tokens were seen at least."""

    s_per_token: float
    capacity_tokens: int
    error: FitError  # of step times


def overfills(
    capacity_tokens: int, max_sequences: int, longest_context_tokens: int, growth_tokens: int
) -> list[GridPoint]:
    """Batches that hold more than the capacity when decoding begins; the fewest sequences that do. Each is to be free
    to grow by `growth_tokens`."""
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
    """From batches beyond the capacity, and the step time within it. None without any, or where they take no longer:
    the capacity is larger than it was said to be."""
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
