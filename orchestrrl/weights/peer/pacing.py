"""How fast an edge may send: pieces and pauses for a rate. Pure; the time comes in."""

LEAST_PIECE_BYTES = 64 * 1024
PIECE_S = 0.05  # a paced edge sends in pieces that take so long, so that it is seldom quiet and never bursts


def piece_bytes(rate_gbps: float, chunk_bytes: int) -> int:
    """What an edge sends at a time: a chunk, or less of it where the rate is low. Both ends cut alike."""
    if not rate_gbps:
        return chunk_bytes
    return min(chunk_bytes, max(LEAST_PIECE_BYTES, int(rate_gbps * 1e9 / 8 * PIECE_S)))


class Pacer:
    """A bucket of tokens, of which `burst_bytes` fit in. What is taken beyond them has to be waited for, beforehand."""

    def __init__(self, rate_gbps: float, burst_bytes: int) -> None:
        if rate_gbps < 0:
            raise ValueError(f"rate_gbps must be >= 0, got {rate_gbps}")
        self._bytes_per_s = rate_gbps * 1e9 / 8
        self._burst_bytes = burst_bytes
        self._tokens = float(burst_bytes)
        self._at_s: float | None = None

    def take(self, size: int, now_s: float) -> float:
        """Seconds to wait before these bytes are sent; 0 without a rate."""
        if not self._bytes_per_s:
            return 0.0
        passed_s = max(0.0, now_s - self._at_s) if self._at_s is not None else 0.0
        self._at_s = now_s
        self._tokens = min(self._burst_bytes, self._tokens + passed_s * self._bytes_per_s) - size
        return max(0.0, -self._tokens / self._bytes_per_s)
