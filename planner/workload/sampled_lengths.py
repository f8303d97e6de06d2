"""Sample the remaining tokens of each request. Has no side effects, and is deterministic for a given seed.

A plan must be good for any likely lengths. All candidates are therefore evaluated on the same set of several samples.
In each sample, every request has a separate draw from its conditional distribution. The greatest length among a few
requests differs greatly between samples, and the best fleet may differ as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.model import RequestId, RequestView
from planner.workload.forecast import Forecast

MEAN_POINTS = 32  # quantiles whose average is a request's mean
LONG_QUANTILE = 0.8


@dataclass(frozen=True, slots=True)
class SampledLengths:
    """The remaining tokens of each request, at least 1. The `samples` are equally likely.

    `expected` is the mean of each request's distribution, and `long` is a high quantile of it.
    """

    samples: NDArray[np.int64]  # [sample, request]
    expected: NDArray[np.int64]  # [request]
    long: NDArray[np.int64]  # [request]

    def at(self, requests: NDArray[np.int64]) -> "SampledLengths":
        """Return the lengths of the requests with the indices `requests`."""
        return SampledLengths(self.samples[:, requests], self.expected[requests], self.long[requests])


def sampled(expected: Forecast, requests: int, count: int, seed: int) -> SampledLengths:
    """Return `count` samples of the remaining tokens of the forecast's requests, with the mean and a high quantile of
    each request's distribution. `requests` is the number of these requests."""
    rng = np.random.default_rng(seed)
    samples = np.empty((count, requests), dtype=np.int64)
    for row in samples:
        row[:] = expected.remaining_at(rng.random(requests))
    middles = (np.arange(MEAN_POINTS) + 0.5) / MEAN_POINTS
    means = np.mean([expected.remaining_at(u) for u in middles], axis=0)
    return SampledLengths(samples, _whole(means), expected.remaining_at(LONG_QUANTILE))


def averaged(requests: Sequence[RequestView], output_tokens: Sequence[int], max_output_tokens: int) -> SampledLengths:
    """Return remaining tokens as if every output had the mean length of `output_tokens`, or half of `max_output_tokens`
    if there are none. An output that is already longer is assumed to be about to end."""
    mean_tokens = float(np.mean(output_tokens)) if len(output_tokens) else max_output_tokens / 2
    limits = np.array([min(each.max_tokens or max_output_tokens, max_output_tokens) for each in requests], np.int64)
    generated = np.array([request.generated_tokens for request in requests], dtype=np.int64)
    return _certain(np.minimum(_whole(np.full(len(requests), mean_tokens)), limits) - generated)


def with_known_lengths(
    requests: Sequence[RequestView], output_tokens: Mapping[RequestId, int], otherwise: SampledLengths
) -> SampledLengths:
    """Return exact remaining tokens for the requests whose output lengths are in `output_tokens`, and the expected
    remaining tokens of `otherwise` for all other requests."""
    remaining = [
        output_tokens[request.id] - request.generated_tokens if request.id in output_tokens else int(estimate)
        for request, estimate in zip(requests, otherwise.expected, strict=True)
    ]
    return _certain(np.array(remaining, dtype=np.int64))


def _certain(remaining: NDArray[np.int64]) -> SampledLengths:
    remaining = np.maximum(remaining, 1)
    return SampledLengths(remaining[None, :], remaining, remaining)


def _whole(tokens: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.maximum(np.rint(tokens), 1).astype(np.int64)
