"""How long an operator's word holds: `ttl_s` seconds from now, 0 until it is taken back. One rule for all of them."""

import math

MOST_S = 1e9  # about 30 years: later times may be none that a date can show


def lifetime_faults(ttl_s: float, field: str = "ttl_s", until: str = "released") -> list[str]:
    """What is wrong with it, told of `field`; `until`: what ends a word that has no end of its own."""
    if 0 <= ttl_s <= MOST_S:
        return []
    most = f" and <= {MOST_S:.0f}" if MOST_S < ttl_s < math.inf else ""
    return [f"{field}: must be >= 0{most} (0: until {until}), got {ttl_s:g}"]


def expiry_s(now_s: float, ttl_s: float) -> float | None:
    """None: it has no end of its own."""
    return now_s + ttl_s if ttl_s else None
