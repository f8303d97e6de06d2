"""Step times as lines over the batches that the rest of a step will see, and which configurations to look at. Pure.

The paper's third heuristic (section 4.1): a bias that follows the phase of the step. A curve that bends has no one
line: its line is right in the mean over the batches to come, so it is a large batch's while there are many requests,
and a tail's at the end. What spilling KV to CPU memory takes is in it, by the batches that hold more than the GPUs do.

Choosing among fleets by such lines loses next to nothing against choosing along the curves, also where those bend as a
mixture of experts' do: tests/planner/solver/test_lines_decide.py walks along both.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.profile import Curve, EngineProfile, straight_line
from planner.model import Configuration, ConfigurationId, Snapshot
from planner.solver.layouts import biased, phase_of

# So many configurations can all be looked at in every plan; of more, those are left out that fit the phase badly.
FEW = 6
# Of a fit's weight, what small and large batches have alike: where all batches are of one size, no line is determined.
SPREAD = 0.05


def iterations_ahead(remaining_tokens: ArrayLike, instances: int, most: int) -> NDArray[np.float64]:
    """[batch size - 1]: decode iterations that an engine with an even share of the requests spends at each size.

    It never decodes more than `most` at once: the others wait, and are decoded in batches of `most`.
    """
    longest_first = np.sort(np.asarray(remaining_tokens, dtype=float))[::-1]
    ends = longest_first[::instances]  # of the engine with the longest: its k longest go on until the k-th's
    iterations = ends - np.append(ends[1:], 0.0)
    if len(iterations) > most:
        sizes = np.arange(most, len(iterations)) + 1
        iterations[most - 1] += float(iterations[most:] @ sizes) / most
    return np.asarray(iterations[:most])


def line_over(curve: Curve, iterations: NDArray[np.float64]) -> tuple[float, float]:
    """Intercept and slope, both >= 0, of the line that is as right as can be over that many iterations at each batch
    size, as in `iterations_ahead`: their sum comes out right but for SPREAD's share."""
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
    return max(0.0, mean_s - slope * mean_size), slope  # rounding may leave a trace below 0


def line_ahead(profile: EngineProfile, remaining_tokens: ArrayLike, context: float, gpus_count: int) -> Configuration:
    """The profile with its step time as a line over the batches to come, where requests with so many `remaining_tokens`
    and in the mean `context` tokens are spread evenly over all the engines of it that there could be. Without requests:
    over whatever an engine can hold."""
    remaining = np.asarray(remaining_tokens, dtype=float)
    if not len(remaining) or not remaining.sum() > 0:
        return profile.configuration()
    room_tokens = profile.kv_capacity_tokens + profile.spill_capacity_tokens
    held_tokens = max(1.0, context + float(remaining.mean()) / 2)
    most = max(1, min(profile.max_sequences, int(room_tokens / held_tokens)))
    iterations = iterations_ahead(remaining, max(1, gpus_count // profile.parallelism.gpus), most)
    alpha_s, beta_s = line_over(with_spill(profile, held_tokens), iterations)
    line = replace(profile.configuration(), alpha_s=alpha_s, beta_s=beta_s)
    # Where engines need not spill, nor should those that requests are packed on: the line knows nothing of its price.
    spills = len(iterations) * held_tokens > profile.kv_capacity_tokens
    return replace(line, kv_capacity_tokens=room_tokens) if spills else line


def with_spill(profile: EngineProfile, held_tokens: float) -> Curve:
    """The profile's base, and what the KV beyond its capacity takes, where each sequence holds so many tokens."""
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
    """What a plan should choose from, in the order of `profiles`: all of a few; of many, those that come close to the
    best of the step's phase, those that engines run, and `always`."""
    if len(profiles) <= FEW:
        return tuple(profile.id for profile in profiles)
    close = {profile.id for profile in biased(profiles, phase_of(len(snapshot.requests), gpus_count))}
    kept = close.union(always, (engine.configuration for engine in snapshot.engines if engine.configuration))
    return tuple(profile.id for profile in profiles if profile.id in kept)
