"""Piece sizes and pauses of paced edges, checked against the definition of a rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.weights.wire import LEAST_PIECE_BYTES, PIECE_S, Pacer, piece_bytes


@given(
    rate_gbps=st.floats(0.001, 400.0),
    sizes=st.lists(st.integers(1, 4_000_000), min_size=1, max_size=50),
    late_s=st.lists(st.floats(0.0, 0.1), min_size=50, max_size=50),
)
def test_pacer_never_exceeds_the_rate_plus_one_burst(rate_gbps: float, sizes: list[int], late_s: list[float]) -> None:
    """The bytes sent never exceed what the rate allows since the start, and a sender is never delayed longer than that
    requires."""
    burst_bytes, bytes_per_s = max(sizes), rate_gbps * 1e9 / 8
    pacer, now_s, sent_bytes = Pacer(rate_gbps, burst_bytes), 100.0, 0
    for size, own_s in zip(sizes, late_s, strict=False):
        pause_s = pacer.take(size, now_s)
        # Earlier waits have been served. The resolution of the clock is 1.4e-14 s at 100 s.
        assert pause_s <= size / bytes_per_s * (1 + 1e-6) + 1e-12
        now_s += pause_s
        sent_bytes += size
        assert sent_bytes <= (burst_bytes + bytes_per_s * (now_s - 100.0)) * (1 + 1e-6) + 1
        now_s += own_s


def test_busy_sender_reaches_the_rate() -> None:
    pacer, now_s, size = Pacer(1.0, 1_000_000), 5.0, 500_000
    for _ in range(1000):
        now_s += pacer.take(size, now_s)
    assert (now_s - 5.0) * 1e9 / 8 == pytest.approx(1000 * size - 1_000_000)


def test_pacer_without_a_rate_does_not_wait() -> None:
    pacer = Pacer(0.0, 1)
    assert [pacer.take(10**9, 0.0) for _ in range(3)] == [0.0] * 3
    with pytest.raises(ValueError, match=r"rate_gbps must be >= 0, got -1"):
        Pacer(-1, 1)


def test_backward_clock_adds_no_tokens() -> None:
    pacer = Pacer(8.0, 1000)
    assert pacer.take(1000, 50.0) == 0.0
    assert pacer.take(1000, 40.0) == pytest.approx(1e-6)


@given(rate_gbps=st.floats(0.0, 400.0), chunk_bytes=st.integers(1, 64 << 20))
def test_piece_is_a_chunk_or_shorter(rate_gbps: float, chunk_bytes: int) -> None:
    piece = piece_bytes(rate_gbps, chunk_bytes)
    assert 1 <= piece <= chunk_bytes
    if rate_gbps and piece < chunk_bytes:
        assert piece == LEAST_PIECE_BYTES or piece * 8 / (rate_gbps * 1e9) <= PIECE_S
