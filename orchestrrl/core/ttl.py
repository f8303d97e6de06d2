"""Check and apply the lifetime of operators' orders. An order ends after `ttl_s` seconds or, if `ttl_s` is 0, when it
is withdrawn."""

import math

MOST_S = 1e9  # about 30 years: a later time may not be a valid date


def lifetime_faults(ttl_s: float, field: str = "ttl_s", until: str = "released") -> list[str]:
    """Return a list with one message if `ttl_s` is invalid, and an empty list otherwise. `field` is the name that the
    message gives to the value. `until` is part of the message: the event that ends an order without an expiry, for
    example "released"."""
    if 0 <= ttl_s <= MOST_S:
        return []
    most = f" and <= {MOST_S:.0f}" if MOST_S < ttl_s < math.inf else ""
    return [f"{field}: must be >= 0{most} (0: until {until}), got {ttl_s:g}"]


def expiry_s(now_s: float, ttl_s: float) -> float | None:
    """Return the time at which an order expires, or None if the order does not expire because `ttl_s` is 0."""
    return now_s + ttl_s if ttl_s else None
