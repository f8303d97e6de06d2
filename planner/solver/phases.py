"""Approximate step times by lines over the batch sizes expected in the rest of a step, and select the configurations to
evaluate. Has no side effects.

This is the third heuristic of the paper (section 4.1): a bias that follows the phase of the step. A nonlinear curve is
approximated by a line that is accurate on average over the batch sizes expected in the rest of the step. These are
large while there are many requests, and small in the tail. The cost of spilling KV to CPU memory is included for
batches that exceed the GPUs' KV capacity.

Fleets chosen by these lines are almost as good as fleets chosen by the curves, even for mixture-of-experts models,
whose curves bend. tests/planner/solver/test_lines_decide.py compares both.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.profile import Curve, EngineProfile, straight_line
from planner.model import Configuration, ConfigurationId, Snapshot
from planner.solver.layouts import biased, phase_of

# Up to this many configurations are all evaluated in every plan; of more, those unsuited to the phase are left out.
FEW = 6
# Share of a fit's weight spread over all batch sizes, because batches of a single size do not determine a line.
SPREAD = 0.05


def iterations_ahead(remaining_tokens: ArrayLike, instances: int, most: int) -> NDArray[np.float64]:
    """Return the number of decode iterations at each batch size, for the busiest of `instances` engines that share the
    requests evenly.

    The index of the array is the batch size minus 1. At most `most` requests are decoded at once; further requests wait
    and are decoded in batches of `most`.
    """
    longest_first = np.sort(np.asarray(remaining_tokens, dtype=float))[::-1]
    ends = longest_first[::instances]  # ends[k - 1]: when the k-th longest request of the busiest engine ends
    iterations = ends - np.append(ends[1:], 0.0)
    if len(iterations) > most:
        sizes = np.arange(most, len(iterations)) + 1
        iterations[most - 1] += float(iterations[most:] @ sizes) / most
    return np.asarray(iterations[:most])


def line_over(curve: Curve, iterations: NDArray[np.float64]) -> tuple[float, float]:
    """Return the intercept and the slope, both >= 0, of the line that fits the curve best.

    Batch sizes are weighted by `iterations` (see `iterations_ahead`), so that the total duration is accurate. A share
    SPREAD of the weight is distributed over all batch sizes, in inverse proportion to their size.
    """
    straight = straight_line(curve)
    if straight is not None:
        return straight
    sizes = np.arange(max(2, len(iterations)), dtype=np.float64) + 1.0
    weights = np.zeros_like(sizes)
    weights[: len(iterations)] = iterations / iterations.sum()
    weights = (1 - SPREAD) * weights + SPREAD / sizes / (1 / sizes).sum()
    seconds = curve.over(sizes)
    mean_size, mean_s = float(weights @ sizes), float(weights @ seconds)
    slope = float(weights @ ((sizes - mean_size) * (seconds - mean_s))) / float(weights @ (sizes - mean_size) ** 2)
    slope = min(max(0.0, slope), mean_s / mean_size)
    return max(0.0, mean_s - slope * mean_size), slope  # rounding may give a value slightly below 0


def line_ahead(profile: EngineProfile, remaining_tokens: ArrayLike, context: float, gpus_count: int) -> Configuration:
    """Return the profile as a configuration whose step time is a line, fitted to the batch sizes in the rest of the
    step.

    Requests with these `remaining_tokens` and a mean of `context` tokens are spread evenly over as many engines as fit
    on the GPUs. If there are no requests, the line is that of `EngineProfile.configuration`.
    """
    remaining = np.asarray(remaining_tokens, dtype=float)
    if not len(remaining) or not remaining.sum() > 0:
        return profile.configuration()
    room_tokens = profile.kv_capacity_tokens + profile.spill_capacity_tokens
    held_tokens = max(1.0, context + float(remaining.mean()) / 2)
    most = max(1, min(profile.max_sequences, int(room_tokens / held_tokens)))
    iterations = iterations_ahead(remaining, max(1, gpus_count // profile.parallelism.gpus), most)
    alpha_s, beta_s = line_over(with_spill(profile, held_tokens), iterations)
    line = replace(profile.configuration(), alpha_s=alpha_s, beta_s=beta_s)
    # Without expected spilling, the capacity excludes it: the line lacks its cost, and packing would use it.
    spills = len(iterations) * held_tokens > profile.kv_capacity_tokens
    return replace(line, kv_capacity_tokens=room_tokens) if spills else line


def with_spill(profile: EngineProfile, held_tokens: float) -> Curve:
    """Return the profile's base step time by batch size, plus the cost of the KV that exceeds its capacity and is
    spilled.

    Each sequence is assumed to hold `held_tokens`.
    """
    base_s, price_s = profile.step.base_s, profile.step.spill_s_per_token
    full = profile.kv_capacity_tokens / held_tokens  # sequences
    if not profile.spill_capacity_tokens or not price_s or full >= profile.max_sequences:
        return base_s
    knots = sorted({*base_s.xs, full, float(profile.max_sequences)})
    spilled = (max(0.0, size * held_tokens - profile.kv_capacity_tokens) for size in knots)
    return Curve(tuple(knots), tuple(base_s.at(x) + price_s * more for x, more in zip(knots, spilled, strict=True)))


def worth_evaluating(
    profiles: Sequence[EngineProfile], snapshot: Snapshot, gpus_count: int, always: Collection[ConfigurationId] = ()
) -> tuple[ConfigurationId, ...]:
    """Return the configurations that a plan should evaluate, in the order of `profiles`.

    If there are at most FEW profiles, all are returned. Otherwise, a profile is returned if its cost in the phase of
    the step is close to the lowest, if an engine runs it, or if it is in `always`.
    """
    if len(profiles) <= FEW:
        return tuple(profile.id for profile in profiles)
    close = {profile.id for profile in biased(profiles, phase_of(len(snapshot.requests), gpus_count))}
    kept = close.union(always, (engine.configuration for engine in snapshot.engines if engine.configuration))
    return tuple(profile.id for profile in profiles if profile.id in kept)
