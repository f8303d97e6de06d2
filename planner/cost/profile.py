"""Cost profiles of engines: the times of decode steps, prefills and engine starts, the KV capacity, and the costs of
moving requests, with their provenance.

Curves are stored as measured. The makespan solver requires step times that are affine in sequences and KV tokens.
`EngineProfile.configuration` fits such a step time over a range of batch sizes.
"""

from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from planner.model import Configuration, ConfigurationId
from planner.model import Parallelism as Parallelism


class ProfileSource(StrEnum):
    """The source of a profile's numbers, from the most to the least trusted."""

    MEASURED = "measured"  # on the user's own engines
    IMPORTED = "imported"  # from a vendor's measured kernel data
    ROOFLINE = "roofline"  # from constants of GPU and model
    GIVEN = "given"  # set by an operator, or a default that `detail` names


@dataclass(frozen=True, slots=True)
class Provenance:
    """The source and the date of a profile's numbers, and the errors of its curves relative to the measurements."""

    source: ProfileSource
    date: str  # ISO 8601
    detail: str = ""  # e.g. the URL that was measured, or the package and version that was imported
    samples: int = 0  # observations behind the fit; 0 if nothing was fitted
    fit_error_mean: float | None = None  # relative, over the samples; None if nothing was fitted
    fit_error_max: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """A piecewise linear function through its knots, extrapolated linearly beyond both ends but never below 0."""

    xs: tuple[float, ...]  # strictly increasing
    ys: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.xs or len(self.xs) != len(self.ys):
            raise ValueError(f"xs and ys must have equal lengths >= 1, got {len(self.xs)} and {len(self.ys)}")
        if any(later <= sooner for sooner, later in zip(self.xs, self.xs[1:], strict=False)):
            raise ValueError(f"xs must be strictly increasing, got {self.xs}")
        if any(not y >= 0 for y in self.ys):
            raise ValueError(f"ys must be >= 0, got {self.ys}")

    @classmethod
    def line(cls, intercept: float, slope: float) -> "Curve":
        return cls((0.0, 1.0), (intercept, intercept + slope))

    def at(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return ys[0]
        right = min(max(bisect_right(xs, x), 1), len(xs) - 1)
        slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
        return max(0.0, ys[right - 1] + slope * (x - xs[right - 1]))

    def over(self, xs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the value of the curve at each of `xs`."""
        if len(self.xs) == 1:
            return np.full(len(xs), self.ys[0])
        knots, ys = np.array(self.xs), np.array(self.ys)
        right = np.clip(np.searchsorted(knots, xs, side="right"), 1, len(knots) - 1)
        slopes = (ys[right] - ys[right - 1]) / (knots[right] - knots[right - 1])
        return np.asarray(np.maximum(0.0, ys[right - 1] + slopes * (xs - knots[right - 1])), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The duration in seconds of one decode iteration: a curve over the number of sequences, plus the time per token to
    read the KV cache.

    If the engine spills KV cache to CPU memory, each token beyond the capacity of the GPUs adds `spill_s_per_token`.
    """

    base_s: Curve  # over running sequences; host time per sequence and communication included
    kv_s_per_token: float
    spill_s_per_token: float = 0.0

    def at(self, sequences: float, kv_tokens: float, kv_capacity_tokens: float = float("inf")) -> float:
        spilled_tokens = max(0.0, kv_tokens - kv_capacity_tokens)
        return self.base_s.at(sequences) + self.kv_s_per_token * kv_tokens + self.spill_s_per_token * spilled_tokens


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The measured or predicted performance of one engine configuration."""

    id: ConfigurationId
    parallelism: Parallelism
    step: StepTime
    prefill_tokens_per_s: float
    kv_capacity_tokens: int
    max_sequences: int
    switch_s: float
    provenance: Provenance
    spill_capacity_tokens: int = 0  # KV tokens that CPU memory can take beyond the capacity; 0: the engine cannot spill
    others: tuple[tuple[str, Provenance], ...] = ()  # by name, figures with another source than `provenance`

    def configuration(self, sequences: tuple[float, float] | None = None) -> Configuration:
        """Return a configuration whose affine step time is closest to the profile's step time over the range
        `sequences`.

        By default, the range extends from one sequence to the last knot of the step time's curve.
        """
        low, high = sequences or (min(1.0, self.step.base_s.xs[-1]), self.step.base_s.xs[-1])
        alpha_s, beta_s = affine_fit(self.step.base_s, low, max(low + 1.0, high))
        return Configuration(
            id=self.id,
            gpus=self.parallelism.gpus,
            alpha_s=alpha_s,
            beta_s=beta_s,
            gamma_s=self.step.kv_s_per_token,
            kv_capacity_tokens=self.kv_capacity_tokens,
            max_sequences=self.max_sequences,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            switch_s=self.switch_s,
        )


def straight_line(curve: Curve) -> tuple[float, float] | None:
    """Return the intercept and slope of the curve. Return None if the curve has more than two knots, or if the
    intercept or slope is < 0."""
    if len(curve.xs) == 1:
        return curve.ys[0], 0.0
    if len(curve.xs) > 2:
        return None
    slope = (curve.ys[1] - curve.ys[0]) / (curve.xs[1] - curve.xs[0])
    intercept = curve.ys[0] - slope * curve.xs[0]
    return (intercept, slope) if slope >= 0 and intercept >= 0 else None


def affine_fit(curve: Curve, low: float, high: float, points: int = 33) -> tuple[float, float]:
    """Return the intercept and the slope, both >= 0, of the line with the least squared relative error, summed over
    `points` sizes between `low` and `high`.

    If the curve is itself a line with intercept and slope >= 0, these are returned unchanged.
    """
    straight = straight_line(curve)
    if straight is not None:
        return straight
    xs = np.geomspace(max(low, 1.0), max(high, 1.0 + 1e-9), points)
    ys = np.array([curve.at(x) for x in xs])
    weights = 1.0 / np.maximum(ys, 1e-12)
    design = np.stack([np.ones_like(xs), xs], axis=1) * weights[:, None]
    (alpha, beta), *_ = np.linalg.lstsq(design, ys * weights, rcond=None)
    if beta < 0:
        return float(np.average(ys, weights=weights**2)), 0.0
    if alpha < 0:
        return 0.0, float(np.sum(xs * ys * weights**2) / np.sum(xs**2 * weights**2))
    return float(alpha), float(beta)


# Length of the prompts to which prefill rates refer.
USUAL_PROMPT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """The times, in seconds, to move a request's context to another engine by transfer or by recomputation (appendix A
    of the paper)."""

    kv_bytes_per_token: float
    transfer_s: Curve  # over bytes, between two GPUs of two nodes
    recompute_s: Curve  # over tokens
    provenance: Provenance | None = None  # None: the caller's own figures

    @property
    def transfer_gbps(self) -> float:
        """The rate of large transfers in Gbps; 0 if the transfer time does not depend on the size."""
        xs, ys = self.transfer_s.xs, self.transfer_s.ys
        rises = len(xs) > 1 and ys[-1] > ys[-2]
        return (xs[-1] - xs[-2]) * 8 / (ys[-1] - ys[-2]) / 1e9 if rises else 0.0

    def rebuilt_tokens(self) -> Curve | None:
        """Return the prefill length that is equivalent to recomputing a context, as a curve over the context's tokens.
        Return None if the recompute time does not depend on the number of tokens.

        The equivalent length is the number of tokens that an engine prefills in the same time if each prompt has
        `USUAL_PROMPT_TOKENS` tokens. It is needed because attention makes a long context more expensive to prefill than
        the engine's prefill rate suggests. The fixed time of a move is excluded, because requests that move together
        wait for it at the same time.
        """
        first_s = self.recompute_s.at(0.0)
        usual_s = (self.recompute_s.at(USUAL_PROMPT_TOKENS) - first_s) / USUAL_PROMPT_TOKENS
        if not usual_s > 0:
            return None
        knots = sorted({0.0, float(USUAL_PROMPT_TOKENS), *(x for x in self.recompute_s.xs if x > 0)})
        return Curve(tuple(knots), tuple(max(0.0, self.recompute_s.at(x) - first_s) / usual_s for x in knots))


@dataclass(frozen=True, slots=True)
class Profile:
    """All configurations of one model on one kind of GPU and engine, with the costs of moves."""

    model: str
    gpu: str
    engine: str
    configurations: tuple[EngineProfile, ...]
    moves: MoveCosts | None = None

    def __post_init__(self) -> None:
        ids = [configuration.id for configuration in self.configurations]
        if len(set(ids)) < len(ids):
            raise ValueError(f"configurations must have unique ids, got {ids}")
