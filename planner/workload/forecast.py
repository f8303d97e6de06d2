"""Forecast the remaining tokens of the requests in flight, as distributions, as a histogram and as one estimate per
request. Has no side effects.

Section 4.1 of the paper uses step-level distributions instead of a guess per request. The first requests to finish are
short and do not represent the step. Running requests, and outputs that were cut by `max_tokens`, are therefore included
as censored observations, of which only a minimum length is known (the estimator of Kaplan and Meier). The forecast made
before the step has the weight of a number of further requests, which depends on how well the forecast fits the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import ceil
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.model import FinishedLength, Histogram, RequestView
from planner.workload.series import TAGS_REMEMBERED, LengthCounts, StepForecast, extended

MIN_LENGTHS = 16  # finished lengths required for an empirical distribution
GOLDEN_RATIO = (5**0.5 - 1) / 2
FUTURES = 16  # scenarios
TRACE = 1e-9  # share of the uniform curve in every curve, so that no length is impossible
# Candidates for the worth of a step's forecast, as shares of its worth by the earlier steps.
WORTH_SHARES = (1.0, 1 / 4, 1 / 16, 1 / 64, 1 / 256)
# Candidates for the worth of the common distribution for a tag, in requests of that tag. The first: tags are equal.
TAG_WORTHS = (1e9, 4096.0, 1024.0, 256.0, 64.0, 16.0, 4.0)
TAIL_WORTH = 4.0  # worth, in ended outputs, of the assumption that the tail has an exponent of 1
BAND_ENDS = 5.0  # expected ends in a band of bins over which expected and observed ends are compared

Survival = NDArray[np.float64]  # [k], probability that an output is longer than k bins; starts at 1, ends at 0
Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ConditionalLengths:
    """Distributions of an output's length given its generated tokens: a common distribution, and one for each tag.

    The arguments of the methods are numbers or arrays that broadcast: `generated_tokens`, `limit_tokens` (where an
    output is cut; 0 means `max_output_tokens`) and `rows`, which `rows_of` returns for tags. The upper edge of a bin is
    used as the length of all its outputs.
    """

    bin_tokens: int
    max_output_tokens: int
    survival: Survival  # [row, k]; the first row is the common one
    tags: dict[str, int]  # row of each tag that has one
    method: str

    def rows_of(self, tags: Sequence[str]) -> Tokens:
        return np.fromiter((self.tags.get(tag, 0) for tag in tags), np.int64, len(tags))

    def quantile(
        self, generated_tokens: ArrayLike, q: ArrayLike, rows: ArrayLike = 0, limit_tokens: ArrayLike = 0
    ) -> Tokens:
        """Return the number of remaining tokens, at least 1, that an output does not exceed with probability `q` (0 to
        1)."""
        alike = np.ndim(q) == 0
        generated, q, rows, limits = np.broadcast_arrays(generated_tokens, q, rows, limit_tokens)
        limits, done, last = self._reach(generated, limits)
        ends = np.empty(done.shape, dtype=np.int64)
        for row in np.unique(rows):
            here = rows == row
            falling, outlived = -self.survival[row], done[here]
            if alike:
                found = np.searchsorted(falling, falling * (1.0 - q.flat[0]))[outlived]
            else:
                found = np.searchsorted(falling, falling[outlived] * (1.0 - q[here]))
            # Skip bins in which no output ends: no quantile lies there.
            ends[here] = np.maximum(found, np.searchsorted(falling, falling, side="right")[outlived])
        remaining: Tokens = np.maximum(np.minimum(np.minimum(ends, last) * self.bin_tokens, limits) - generated, 1)
        return remaining

    def mean(
        self, generated_tokens: ArrayLike, rows: ArrayLike = 0, limit_tokens: ArrayLike = 0
    ) -> NDArray[np.float64]:
        """Return the expected number of remaining tokens, at least 1."""
        generated, rows, limits = np.broadcast_arrays(generated_tokens, rows, limit_tokens)
        limits, done, last = self._reach(generated, limits)
        before = np.zeros((len(self.survival), self.survival.shape[1] + 1))
        np.cumsum(self.survival, axis=1, out=before[:, 1:])  # [row, k]: survival summed over the bins before k
        start = self.survival[rows, done]
        bins = done + (before[rows, last] - before[rows, done]) / start
        at_limit = self.survival[rows, last - 1] / start
        expected = bins * self.bin_tokens - at_limit * np.maximum(last * self.bin_tokens - limits, 0)
        remaining: NDArray[np.float64] = np.maximum(expected - generated, 1.0)
        return remaining

    def of(self, requests: Sequence[RequestView]) -> list[list[int]]:
        """Return, for each request, its remaining tokens in each of several equally likely scenarios, at least 1.

        The scenarios of a request are evenly spaced quantiles of its conditional distribution. Their offset depends
        only on the request's id, so that a request has the same quantiles in every tick.
        """
        count = len(requests)
        if not count:
            return []
        generated = np.fromiter((request.generated_tokens for request in requests), np.int64, count)
        limits = np.fromiter((request.max_tokens or 0 for request in requests), np.int64, count)
        rows = self.rows_of([request.tag for request in requests])
        own = np.fromiter((crc32(request.id.encode()) / 2**32 for request in requests), np.float64, count)
        quantiles = (own[:, None] + np.arange(FUTURES) / FUTURES) % 1.0
        found: list[list[int]] = self.quantile(generated[:, None], quantiles, rows[:, None], limits[:, None]).tolist()
        return found

    def remaining(self, generated_tokens: Tokens, rows: Tokens, limit_tokens: Tokens) -> Histogram:
        """Return the expected histogram of the remaining tokens of requests. The arguments are arrays indexed by
        request."""
        limits, done, last = self._reach(generated_tokens, limit_tokens)
        counts = np.zeros(self.survival.shape[1])
        at_limit = self.survival[rows, last - 1] / self.survival[rows, done]
        cut = np.maximum(limits - generated_tokens, 1)
        counts += np.bincount((cut - 1) // self.bin_tokens, at_limit, minlength=len(counts))
        bins = self.survival.shape[1] - 1
        groups, members = np.unique(rows * bins + done, return_inverse=True)
        lasts = np.bincount(members * (bins + 2) + last, minlength=len(groups) * (bins + 2)).reshape(len(groups), -1)
        going_on = lasts[:, ::-1].cumsum(axis=1)[:, ::-1]  # [group, k]: members that are not cut before bin k
        for group, beyond in zip(groups.tolist(), going_on, strict=True):
            row, start = divmod(group, bins)
            shares = -np.diff(self.survival[row, start:]) / self.survival[row, start]
            # Outputs that are cut in a bin are already counted there, including those that would have continued.
            counts[: len(shares)] += shares * beyond[start + 2 :]
        used = int(np.max(np.nonzero(counts))) + 1
        return Histogram(self.bin_tokens, tuple(counts[:used].tolist()))

    def _reach(self, generated: Tokens, limits: Tokens) -> tuple[Tokens, Tokens, Tokens]:
        """Return each output's limit in tokens, the number of bins that it has outlived, and the last bin in which it
        can end (counted from 1)."""
        limits = np.where(limits > 0, np.minimum(limits, self.max_output_tokens), self.max_output_tokens)
        done = np.minimum(generated // self.bin_tokens, self.survival.shape[1] - 2)
        return limits, done, np.maximum(done + 1, -(-limits // self.bin_tokens))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The remaining tokens of the requests in flight.

    `remaining_tokens` has one estimate per request, in the order of the requests. Each is a draw from the request's own
    distribution; the draws are spread evenly, so that together they reproduce the histogram with its tail.
    """

    remaining: Histogram
    remaining_tokens: tuple[int, ...]
    # kaplan_meier | exponential | uniform | nothing_in_flight, or the method of the step's forecast with _updated
    method: str
    lengths: ConditionalLengths | None = field(default=None, compare=False)  # None: no request is in flight
    generated_tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int64), compare=False, repr=False)
    limit_tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int64), compare=False, repr=False)
    rows: Tokens = field(default_factory=lambda: np.zeros(0, np.int64), compare=False, repr=False)

    def remaining_at(self, quantiles: ArrayLike) -> Tokens:
        """Return the remaining tokens of each request at `quantiles` of its distribution. `quantiles` is broadcast over
        the requests."""
        if self.lengths is None:
            return np.zeros(0, dtype=np.int64)
        return self.lengths.quantile(self.generated_tokens, quantiles, self.rows, self.limit_tokens)


def forecast(
    requests: Sequence[RequestView],
    output_tokens: Sequence[int],
    bin_tokens: int,
    max_output_tokens: int,
    *,
    finished: Sequence[FinishedLength] = (),
    before: StepForecast | None = None,
) -> Forecast:
    """Forecast the remaining lengths of `requests` from finished lengths and from their own generated tokens.

    `output_tokens` are finished lengths without tags, and `finished` are finished lengths with tags and censoring.
    `before` is the forecast made before the step began. The upper edge of a bin is used as the length of all its
    outputs, and no request exceeds its `max_tokens` or `max_output_tokens`.
    """
    if not requests:
        return Forecast(Histogram(bin_tokens, ()), (), "nothing_in_flight")
    count = len(requests)
    generated = np.fromiter((request.generated_tokens for request in requests), np.int64, count)
    limits = np.fromiter((request.max_tokens or max_output_tokens for request in requests), np.int64, count)
    limits = np.minimum(limits, max_output_tokens)
    tags = [request.tag for request in requests]
    known = [*map(FinishedLength, output_tokens), *finished]
    lengths = conditional_lengths(known, generated, tags, bin_tokens, max_output_tokens, before)
    rows = lengths.rows_of(tags)
    # Multiples of the golden ratio modulo 1 are spread evenly over (0, 1) for any count.
    estimates = lengths.quantile(generated, (np.arange(count) + 1) * GOLDEN_RATIO % 1.0, rows, limits)
    return Forecast(
        lengths.remaining(generated, rows, limits),
        tuple(estimates.tolist()),
        lengths.method,
        lengths,
        generated,
        limits,
        rows,
    )


def conditional_lengths(
    finished: Sequence[FinishedLength],
    generated_tokens: ArrayLike,
    tags: Sequence[str],
    bin_tokens: int,
    max_output_tokens: int,
    before: StepForecast | None = None,
) -> ConditionalLengths:
    """Estimate the distributions of output lengths: a common distribution, and one for each tag.

    The inputs are finished outputs, running outputs (`generated_tokens` and `tags` of each) and the forecast made
    `before` the step. Raises ValueError if the bins of `before` do not match `bin_tokens` and `max_output_tokens`.
    """
    bins = ceil(max_output_tokens / bin_tokens)
    if before is not None and (before.bin_tokens, len(before.shares)) != (bin_tokens, bins):
        raise ValueError(
            f"before must have {bins} bins of {bin_tokens} tokens, got {len(before.shares)} bins of"
            f" {before.bin_tokens} tokens"
        )
    generated = np.asarray(generated_tokens, dtype=np.int64)
    seen = _Seen.of(LengthCounts.of(finished, bin_tokens, max_output_tokens), generated, bin_tokens)
    common, method = _common(seen, finished, generated, bin_tokens, bins, before)
    by_tag = _by_tag(finished, generated, tags, bin_tokens, max_output_tokens, before)
    pooled = _Prior(common, 1.0)
    worth = pooled.worth_of(TAG_WORTHS, list(by_tag.values()))
    rows = [common]
    if worth < TAG_WORTHS[0]:
        rows += [replace(pooled, worth=worth).updated(of_tag) for of_tag in by_tag.values()]
    tag_rows = {tag: row for row, tag in enumerate(by_tag, start=1)} if len(rows) > 1 else {}
    return ConditionalLengths(bin_tokens, max_output_tokens, np.array(rows), tag_rows, method)


def _common(
    seen: "_Seen",
    finished: Sequence[FinishedLength],
    generated: Tokens,
    bin_tokens: int,
    bins: int,
    before: StepForecast | None,
) -> tuple[Survival, str]:
    if before is not None:
        expected = _Prior(_survival(np.array(before.shares)), before.worth_requests)
        worth = expected.worth_of([before.worth_requests * share for share in WORTH_SHARES], [seen])
        return replace(expected, worth=worth).updated(seen), f"{before.method}_updated"
    edges = np.arange(bins + 1)
    if seen.ended.sum() >= MIN_LENGTHS:
        return _Prior(_with_trace(1 - edges / bins), 0.0).updated(seen), "kaplan_meier"
    tokens = sum(length.tokens for length in finished)
    ends = sum(not length.censored for length in finished)
    if ends and tokens:
        # Few outputs have finished: use the constant hazard that explains them and the tokens of the running ones.
        mean_tokens = (tokens + int(generated.sum())) / ends
        return _with_trace(np.exp(-edges * bin_tokens / mean_tokens)), "exponential"
    return _with_trace(1 - edges / bins), "uniform"


def _by_tag(
    finished: Sequence[FinishedLength],
    generated: Tokens,
    tags: Sequence[str],
    bin_tokens: int,
    max_output_tokens: int,
    before: StepForecast | None,
) -> dict[str, "_Seen"]:
    """Return the observations by tag, for the TAGS_REMEMBERED most frequent tags."""
    lengths: dict[str, list[FinishedLength]] = {tag: [] for tag in chain(tags, dict(before.tags if before else ()))}
    for length in finished:
        lengths.setdefault(length.tag, []).append(length)
    lengths.pop("", None)
    earlier = dict(before.tags) if before else {}
    if not lengths:
        return {}
    places = {tag: place for place, tag in enumerate(sorted(lengths))}
    of_request = np.fromiter((places.get(tag, -1) for tag in tags), np.int64, len(tags))
    found = {}
    for tag in sorted(lengths, key=lambda tag: (-len(lengths[tag]), tag))[:TAGS_REMEMBERED]:
        seen = _Seen.of(
            LengthCounts.of(lengths[tag], bin_tokens, max_output_tokens),
            generated[of_request == places[tag]],
            bin_tokens,
        )
        if tag in earlier:
            seen = seen.plus(earlier[tag])
        found[tag] = seen
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """The number of outputs that ended in each bin, and the number of outputs that were at risk of ending in it."""

    ended: NDArray[np.float64]  # [bin]
    at_risk: NDArray[np.float64]  # [bin]
    passed: NDArray[np.bool_]  # [bin], True if a running request is inside the bin

    @classmethod
    def of(cls, counts: LengthCounts, generated: Tokens, bin_tokens: int) -> "_Seen":
        """Count ends and running requests by bin.

        A running request is added to the number at risk in its current bin, weighted by the fraction of the bin that it
        has generated. Without these requests, it would seem that every output that reaches the bin also ends in it.
        """
        bins = len(counts.ended)
        done = np.minimum(generated // bin_tokens, bins)
        outlived = np.bincount(done, minlength=bins + 1)
        passing = np.bincount(done, weights=generated % bin_tokens / bin_tokens, minlength=bins + 1)[:bins]
        return cls(np.array(counts.ended), counts.at_risk() + outlived[:0:-1].cumsum()[::-1] + passing, passing > 0)

    def plus(self, counts: LengthCounts) -> "_Seen":
        return _Seen(self.ended + np.array(counts.ended), self.at_risk + counts.at_risk(), self.passed)


@dataclass(frozen=True, slots=True, eq=False)
class _Prior:
    """An expected distribution with the weight of `worth` requests.

    Each bin's hazard has a beta distribution, to which censored and uncensored observations are added (a beta-Stacy
    process).
    """

    survival: Survival
    worth: float

    def updated(self, seen: _Seen) -> Survival:
        expected = -np.diff(self.survival)
        ends = self.worth * expected + seen.ended
        at_risk = self.worth * self.survival[:-1] + seen.at_risk
        # While few outputs have passed a bin, a hazard from two ends in it would be far too high.
        typical = 1.0 / np.arange(1, len(ends) + 1)
        ends, at_risk = ends + TAIL_WORTH * seen.passed * typical, at_risk + TAIL_WORTH * seen.passed
        survival = np.append(1.0, np.cumprod(1.0 - ends / np.maximum(at_risk, ends + 1e-300)))
        # Bins with no more than the trace contain no information.
        informative = np.nonzero((ends > 2 * TRACE * max(self.worth, 1.0)) | (seen.at_risk > 0))[0]
        if not len(informative):
            return _with_trace(survival)
        longest = int(informative.max()) + 1
        return _with_trace(extended(survival, longest, _tail_exponent(ends, at_risk, longest)))

    def worth_of(self, worths: Sequence[float], seen: Sequence[_Seen]) -> float:
        """Return the most likely of `worths` given the observations, or the first of them if the observations are
        inconclusive.

        Bins are merged into bands with a few expected ends. The variance of the number of ends in a band is that of
        sampling, multiplied by 1 + n/m. Here, n is the number of observed requests at risk in the band, and m is the
        number of the prior's requests at risk in it.
        """
        gaps = [gap for one in seen for gap in self._gaps(one)]
        if not gaps:
            return worths[0]
        missed, variance, at_risk, beyond = np.array(gaps).T
        best, most = worths[0], -np.inf
        for worth in worths:
            scatter = variance * (1.0 + at_risk / (worth * beyond + 1.0))
            likelihood = float(-0.5 * (np.log(scatter) + missed**2 / scatter).sum())
            if likelihood > most + 1.0:  # one nat, so that chance alone does not replace the first
                best, most = worth, likelihood
        return best

    def _gaps(self, seen: _Seen) -> list[tuple[float, float, float, float]]:
        """Return (observed minus expected ends, variance, requests at risk, expected share at risk) for each band."""
        reach = self.survival[:-1]
        hazard = -np.diff(self.survival) / np.maximum(reach, 1e-300)
        expected = seen.at_risk * hazard
        band = (np.cumsum(expected) / BAND_ENDS).astype(np.int64)
        _, starts = np.unique(band, return_index=True)
        sums = [
            np.add.reduceat(values, starts) for values in (seen.ended - expected, expected * (1.0 - hazard), expected)
        ]
        informative = (sums[2] >= BAND_ENDS / 2) & (sums[1] > 0)
        rows = np.stack([sums[0], sums[1], seen.at_risk[starts], reach[starts]], axis=1)[informative]
        return [tuple(row) for row in rows.tolist()]


def _tail_exponent(ends: NDArray[np.float64], at_risk: NDArray[np.float64], longest: int) -> float:
    """Return the exponent of the power law by which outputs become rarer, in bins from half of `longest` on.

    The result is the most likely exponent, with a weak prior of 1. It is limited to at least 1, because early in a step
    only few outputs have ended, which is no evidence that long outputs are common.
    """
    late = np.arange(max(1, longest // 2), longest)
    doubled = float(at_risk[late] @ np.log1p(1.0 / late))
    return max(1.0, (TAIL_WORTH + float(ends[late].sum())) / (TAIL_WORTH + doubled))


def _survival(shares: NDArray[np.float64]) -> Survival:
    return _with_trace(np.append(1.0, 1.0 - np.cumsum(shares)))


def _with_trace(survival: Survival) -> Survival:
    """Return the curve, raised where necessary so that every length up to the last bin is possible. Longer outputs
    remain impossible."""
    floor = TRACE * np.arange(len(survival) - 1, -1, -1) / (len(survival) - 1)
    return np.append(np.maximum(survival, floor)[:-1], 0.0)
