"""How many tokens the requests in flight will still generate: a histogram, and one estimate per request. Pure.

Section 4.1 of the paper: step-level distributions instead of a guess per request. What is still running has only been
seen up to where it is, so it counts as censored there (Kaplan and Meier's estimator): the first to finish are the
short ones, and must not pass for the whole step.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from planner.model import Histogram, RequestView

MIN_LENGTHS = 16  # finished lengths below which a distribution is not read off them
GOLDEN_RATIO = (5**0.5 - 1) / 2

Survival = NDArray[np.float64]  # [k], probability that an output is longer than k bins; 1 at first, 0 at last


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is left to decode. `remaining_tokens` holds one estimate per request, in their order: each a draw from the
    request's own distribution, spread evenly so that together they show the histogram, its tail included."""

    remaining: Histogram
    remaining_tokens: tuple[int, ...]
    method: str  # kaplan_meier | exponential | uniform | nothing_in_flight


def forecast(
    requests: Sequence[RequestView], output_tokens: Sequence[int], bin_tokens: int, max_output_tokens: int
) -> Forecast:
    """Remaining lengths of `requests`, from the `output_tokens` of finished ones and from how far each has come.

    A bin counts as its upper edge, and no request goes beyond its `max_tokens` or `max_output_tokens`.
    """
    if not requests:
        return Forecast(Histogram(bin_tokens, ()), (), "nothing_in_flight")
    survival, method = survival_curve(
        output_tokens, [request.generated_tokens for request in requests], bin_tokens, max_output_tokens
    )
    counts = np.zeros(len(survival))
    estimates = []
    tails: dict[tuple[int, int], _Tail] = {}
    for place, request in enumerate(requests):
        limit_tokens = min(request.max_tokens or max_output_tokens, max_output_tokens)
        done = min(request.generated_tokens // bin_tokens, len(survival) - 2)
        last = max(done + 1, ceil(limit_tokens / bin_tokens))
        if (done, last) not in tails:
            tails[done, last] = _Tail.of(survival, done, last)
        tail = tails[done, last]
        tail.members += 1
        # Multiples of the golden ratio fall evenly into (0, 1), however many there are.
        ends = done + 1 + bisect_left(tail.cumulative, (place + 1) * GOLDEN_RATIO % 1.0)
        estimates.append(max(min(ends * bin_tokens, limit_tokens) - request.generated_tokens, 1))
        at_limit_tokens = max(limit_tokens - request.generated_tokens, 1)
        counts[(at_limit_tokens - 1) // bin_tokens] += tail.shares[-1]
    for tail in tails.values():
        counts[: len(tail.shares) - 1] += tail.members * tail.shares[:-1]
    used = int(np.max(np.nonzero(counts))) + 1
    return Forecast(Histogram(bin_tokens, tuple(counts[:used].tolist())), tuple(estimates), method)


@dataclass(slots=True)
class _Tail:
    """Where requests end that have outlived `done` bins and are cut in bin `last`: the share of each bin from
    `done + 1` to `last`. Whatever would go on past the limit ends there."""

    shares: Survival
    cumulative: list[float]  # all but the last, which takes what rounding leaves
    members: int = 0

    @classmethod
    def of(cls, survival: Survival, done: int, last: int) -> "_Tail":
        beyond = survival[done : last + 1].copy()
        beyond[-1] = 0.0
        shares = -np.diff(beyond) / beyond[0]
        return cls(shares, np.cumsum(shares[:-1]).tolist())


def survival_curve(
    output_tokens: Sequence[int], generated_tokens: Sequence[int], bin_tokens: int, max_output_tokens: int
) -> tuple[Survival, str]:
    """The distribution of output lengths over bins, and how it was found."""
    bins = ceil(max_output_tokens / bin_tokens)
    edges = np.arange(bins + 1)
    if len(output_tokens) >= MIN_LENGTHS:
        survival, method = _kaplan_meier(output_tokens, generated_tokens, bin_tokens, bins), "kaplan_meier"
    elif any(output_tokens):
        # Few have finished: the constant hazard that explains them and the tokens of those that have not.
        mean_tokens = (sum(output_tokens) + sum(generated_tokens)) / len(output_tokens)
        survival, method = np.exp(-edges * bin_tokens / mean_tokens), "exponential"
    else:
        survival, method = 1 - edges / bins, "uniform"
    # A trace of the uniform curve keeps every length possible: none has to be excluded to have gone unseen.
    survival = np.maximum(survival, 1e-9 * (1 - edges / bins))
    survival[-1] = 0.0
    return survival, method


def _kaplan_meier(
    output_tokens: Sequence[int], generated_tokens: Sequence[int], bin_tokens: int, bins: int
) -> Survival:
    """Share that outlives each bin. Past the longest finished length, where only censored ones are left, the curve goes
    on like 1/length: having come so far, a request is as likely as not to come twice as far."""
    ended = np.minimum(-(-np.asarray(output_tokens, dtype=np.int64) // bin_tokens), bins)
    ended = np.bincount(np.maximum(ended, 1), minlength=bins + 1)
    outlived = np.minimum(np.asarray(generated_tokens, dtype=np.int64) // bin_tokens, bins)
    censored = np.bincount(outlived, minlength=bins + 1)
    at_risk = np.cumsum((ended + censored)[::-1])[::-1]  # [k]: reached bin k
    survival = np.cumprod(1 - ended / np.maximum(at_risk, 1))
    longest = int(np.max(np.nonzero(ended)))
    survival[longest:] = survival[longest] * longest / np.arange(longest, bins + 1)
    return survival.astype(np.float64)
