"""How long it is quiet before each operation: counts on a logarithmic scale, which add up over ranks. Pure.

Section 2.2 of the paper: the slack of a collective is the time from the end of the one before to its own start.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor, log10

PER_DECADE = 10
LEAST_S = 1e-6  # whatever is shorter, or begins while others are in flight, is no slack
MOST_BINS = 10 * PER_DECADE  # up to 10,000 s


@dataclass(slots=True)
class SlackHistogram:
    """`bins[i]` counts slack from `edge_s(i)` to `edge_s(i + 1)`; `none` what had no slack."""

    bins: dict[int, int] = field(default_factory=dict)
    none: int = 0

    def add(self, slack_s: float) -> None:
        if slack_s < LEAST_S:
            self.none += 1
            return
        index = min(MOST_BINS - 1, floor(log10(slack_s / LEAST_S) * PER_DECADE))
        self.bins[index] = self.bins.get(index, 0) + 1

    @property
    def total(self) -> int:
        return self.none + sum(self.bins.values())

    def merged(self, other: "SlackHistogram") -> "SlackHistogram":
        keys = self.bins.keys() | other.bins.keys()
        return SlackHistogram(
            {key: self.bins.get(key, 0) + other.bins.get(key, 0) for key in sorted(keys)}, self.none + other.none
        )

    def quantile_s(self, q: float) -> float | None:
        """Within a bin by its logarithm: exact to a quarter of itself. None while empty."""
        wanted, passed = q * self.total, float(self.none)
        if not self.total:
            return None
        if wanted <= passed:
            return 0.0
        for index in sorted(self.bins):
            inside = self.bins[index]
            if passed + inside >= wanted:
                return edge_s(index + (wanted - passed) / inside)
            passed += inside
        return edge_s(max(self.bins) + 1)

    def to_json(self) -> dict[str, object]:
        return {"none": self.none, "bins": {str(index): self.bins[index] for index in sorted(self.bins)}}

    @classmethod
    def from_json(cls, body: Mapping[str, object]) -> "SlackHistogram":
        """Of what `to_json` wrote."""
        bins, none = body["bins"], body["none"]
        assert isinstance(bins, Mapping)
        assert isinstance(none, int)
        return cls({int(index): int(count) for index, count in bins.items()}, none)


def edge_s(index: float) -> float:
    """Where a bin begins."""
    return float(LEAST_S * 10 ** (index / PER_DECADE))
