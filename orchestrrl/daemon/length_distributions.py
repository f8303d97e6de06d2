"""How long the requests of an engine may go on: equally likely futures, for the fast loop's judgement of room. Pure.

In each future a request has a draw of its own from the distribution that it has by how far it has come. Its draws are
spread evenly over the futures, and are the same quantiles in every tick.
"""

from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np

from planner.model import RequestId, RequestView
from planner.workload.forecast import ConditionalLengths

FUTURES = 16


class ForecastLengths:
    """By the distribution of lengths."""

    def __init__(self, lengths: ConditionalLengths) -> None:
        self._lengths = lengths

    def of(self, requests: Sequence[RequestView]) -> list[list[int]]:
        """[request, future]: remaining tokens, at least 1."""
        lengths, count = self._lengths, len(requests)
        if not count:
            return []
        generated = np.fromiter((request.generated_tokens for request in requests), np.int64, count)
        limits = np.fromiter((request.max_tokens or 0 for request in requests), np.int64, count)
        rows = lengths.rows_of([request.tag for request in requests])
        own = np.fromiter((crc32(request.id.encode()) / 2**32 for request in requests), np.float64, count)
        quantiles = (own[:, None] + np.arange(FUTURES) / FUTURES) % 1.0
        found: list[list[int]] = lengths.quantile(
            generated[:, None], quantiles, rows[:, None], limits[:, None]
        ).tolist()
        return found


class KnownLengths:
    """Lengths that are known: one future."""

    def __init__(self, output_tokens: Mapping[RequestId, int]) -> None:
        self._output_tokens = output_tokens

    def of(self, requests: Sequence[RequestView]) -> list[list[int]]:
        """As ForecastFutures. Raises KeyError for a request whose length is not known."""
        return [[max(1, self._output_tokens[request.id] - request.generated_tokens)] for request in requests]
