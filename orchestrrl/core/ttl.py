"""The lifetime of an operator's order: `ttl_s` seconds from now, 0 until it is withdrawn. All orders use this rule."""

import math

MOST_S = 1e9  # about 30 years: a later time may not be a valid date


def lifetime_faults(ttl_s: float, field: str = "ttl_s", until: str = "released") -> list[str]:
    """Return the faults of `ttl_s`, reported for `field`. `until` describes what ends an order without an expiry."""
    if 0 <= ttl_s <= MOST_S:
        return []
    most = f" and <= {MOST_S:.0f}" if MOST_S < ttl_s < math.inf else ""
    return [f"{field}: must be >= 0{most} (0: until {until}), got {ttl_s:g}"]


def expiry_s(now_s: float, ttl_s: float) -> float | None:
    """Return the time of expiry; None if it does not expire."""
    return now_s + ttl_s if ttl_s else None
