"""Estimate the remaining tokens of each request for the fast loop. Estimates are smooth in the request's age and stable
over ticks. Has no side effects.

The distribution of lengths is conditioned on the generated tokens. Its mean jumps from bin to bin. If similar requests
on two engines are on opposite sides of a jump, a move would seem beneficial although it is not. Means are therefore
calculated at a few ages only and interpolated linearly, so that requests of similar age have similar errors.
"""

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from planner.model import RequestId, RequestView, Snapshot
from planner.workload.forecast import ConditionalLengths, conditional_lengths
from planner.workload.series import StepForecast

# Ratio of successive ages at which means are calculated. Chosen in simulated steps (tests/balancer/whole_steps.py):
# with 2, requests move more than twice as often and steps are longer.
AGE_RATIO = 4
YOUNGEST_TOKENS = 256
# The distribution is rebuilt when the number of finished requests has grown by this share.
WORTH_NEWS = 1 / 16
NOTHING_KNOWN = "uniform"  # the method of a distribution that is based on limits alone


class KnownLengths:
    """A single scenario with exactly known output lengths."""

    def __init__(self, output_tokens: Mapping[RequestId, int]) -> None:
        self._output_tokens = output_tokens

    def of(self, requests: Sequence[RequestView]) -> list[list[int]]:
        """Return the remaining tokens of each request in a single scenario. Raises KeyError if a length is unknown."""
        return [[max(1, self._output_tokens[request.id] - request.generated_tokens)] for request in requests]


class RemainingTokensEstimator:
    """Estimates remaining tokens. The distributions are rebuilt when a step begins, when the forecast or the bins
    change, and when enough further outputs have finished."""

    def __init__(self) -> None:
        self._lengths: ConditionalLengths | None = None
        self._known: tuple[float | None, int, int] = (None, 0, 0)  # the step's start, its bins
        self._finished = 0
        self._before: StepForecast | None = None

    def remaining_tokens(
        self, snapshot: Snapshot, bin_tokens: int, max_output_tokens: int, before: StepForecast | None = None
    ) -> dict[RequestId, float]:
        """Return the expected remaining tokens of each request, at least 1.

        `before` is the forecast made before the step began.
        """
        if not snapshot.requests:
            return {}
        if before is not None and (before.bin_tokens, len(before.shares)) != (
            bin_tokens,
            ceil(max_output_tokens / bin_tokens),
        ):
            before = None  # its bins are from an earlier configuration
        known = snapshot.step_started_s, bin_tokens, max_output_tokens
        finished = len(snapshot.finished)
        news = finished > self._finished * (1 + WORTH_NEWS) or before is not self._before
        if self._lengths is None or known != self._known or news:
            self._lengths = conditional_lengths(
                snapshot.finished,
                [request.generated_tokens for request in snapshot.requests],
                [request.tag for request in snapshot.requests],
                bin_tokens,
                max_output_tokens,
                before,
            )
            self._known, self._finished, self._before = known, finished, before
        return smooth_means(self._lengths, snapshot.requests)

    @property
    def distributions(self) -> ConditionalLengths | None:
        """The latest distributions of output lengths; None if they are not based on any finished output."""
        lengths = self._lengths
        return None if lengths is None or lengths.method == NOTHING_KNOWN else lengths


def smooth_means(lengths: ConditionalLengths, requests: Sequence[RequestView]) -> dict[RequestId, float]:
    """Return the expected remaining tokens of each request, at least 1, interpolated linearly between a few ages."""
    count, longest = len(requests), lengths.max_output_tokens
    ages = np.fromiter((request.generated_tokens for request in requests), np.int64, count)
    limits = np.fromiter((min(request.max_tokens or longest, longest) for request in requests), np.int64, count)
    rows = lengths.rows_of([request.tag for request in requests])
    remaining = np.empty(count)
    kinds, kind_of = np.unique(np.stack([rows, limits]), axis=1, return_inverse=True)
    for kind, (row, limit_tokens) in enumerate(kinds.T.tolist()):
        here, knots = kind_of.reshape(-1) == kind, _ages(limit_tokens)
        remaining[here] = np.interp(ages[here], knots, lengths.mean(knots, row, limit_tokens))
    ids = (request.id for request in requests)
    return dict(zip(ids, np.maximum(remaining, 1.0).tolist(), strict=True))


def _ages(limit_tokens: int) -> NDArray[np.int64]:
    ages, age = [0], YOUNGEST_TOKENS
    while age < limit_tokens:
        ages.append(age)
        age *= AGE_RATIO
    return np.array([*ages, limit_tokens], dtype=np.int64)
