"""The lifetime of an operator's order."""

import math

import pytest

from orchestrrl.core.ttl import expiry_s, lifetime_faults


@pytest.mark.parametrize("ttl_s", [-1.0, -1e-9, math.inf, -math.inf, math.nan])
def test_invalid_ttl_is_reported(ttl_s: float) -> None:
    assert lifetime_faults(ttl_s, "--ttl-s", until="resumed") == [
        f"--ttl-s: must be >= 0 (0: until resumed), got {ttl_s:g}"
    ]


def test_zero_ttl_does_not_expire() -> None:
    assert lifetime_faults(0.0) == lifetime_faults(3.5) == []
    assert expiry_s(100.0, 0.0) is None
    assert expiry_s(100.0, 3.5) == 103.5
