"""Format numbers for people: durations, times of day, token counts, load indices, bars and charts."""

import math
import time
from collections.abc import Sequence

from orchestrrl.core.errors import number_runs

UNKNOWN = "-"


def duration(value_s: float | None) -> str:
    """Format a duration in seconds as `1.2 ms`, `340 ms`, `12.3 s`, `4 min 05 s`, `3 h 20 min` or `2 d 4 h`. Return `-`
    if the duration is None or not finite."""
    if value_s is None or not math.isfinite(value_s):
        return UNKNOWN
    if value_s < 0:
        return f"-{duration(-value_s)}"
    if value_s < 0.9995:
        return f"{value_s * 1000:.0f} ms" if value_s >= 0.0095 else f"{value_s * 1000:.2g} ms"
    if value_s < 99.95:
        return f"{value_s:.3g} s"
    whole_s = round(value_s)
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60:02d} s"
    if whole_s < 86400:
        return f"{whole_s // 3600} h {whole_s % 3600 // 60:02d} min"
    return f"{whole_s // 86400} d {whole_s % 86400 // 3600} h"


def seconds(value_s: float | None) -> str:
    """Format a time in seconds with two decimals, such as `431.20 s`, so that values in a column can be compared.
    Return `-` if the time is None."""
    return UNKNOWN if value_s is None else f"{value_s:,.2f} s"


def time_of_day(unix_s: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):  # outside the calendar's range
        return f"{unix_s:.3g} s"


def count(value: float | None) -> str:
    """Format a whole number with thousands separators, such as `12,345`. Return `-` if the number is None."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f} tok/s"


def load_index(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value * 100:.0f} %"


def size(value: float) -> str:
    """Format a number of bytes in decimal units: `2.5 GB`, `500 MB`, `12 kB` or `7 B`."""
    for unit, least in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= least * 0.9995:
            return f"{value / least:.3g} {unit}"
    return f"{value:.0f} B"


def bar(fraction: float, width: int) -> str:
    """Return a bar that fills `fraction` of `width` characters. A fraction above 0 fills at least one eighth of a
    character."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    if fraction > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return ("█" * full + " ▏▎▍▌▋▊▉"[rest].strip()).ljust(width)


LEAST_SHOWN = 0.01


def chart(bin_tokens: int, counts: Sequence[float], rows: int = 16, width: int = 40) -> list[str]:
    """Return a histogram as lines of text. `counts` contains the number of requests in each bin of `bin_tokens` tokens.
    Adjacent bins are merged until at most `rows` lines remain.

    The histogram ends with the last bin of at least `LEAST_SHOWN` requests, because the tail of a forecast beyond that
    bin is negligible.
    """
    last = max((index for index, number in enumerate(counts) if number >= LEAST_SHOWN), default=-1)
    used = counts[: last + 1]
    if not used:
        return []
    together = math.ceil(len(used) / rows)
    sums = [sum(used[start : start + together]) for start in range(0, len(used), together)]
    span = bin_tokens * together
    edges = [f"{index * span:,}-{(index + 1) * span:,}" for index in range(len(sums))]
    label = max(map(len, edges))
    return [
        f"{edge:>{label}} {bar(number / max(sums), width)} {number:,.2f}".rstrip("0").rstrip(".")
        for edge, number in zip(edges, sums, strict=True)
    ]


def ranges(gpus: Sequence[int]) -> str:
    """Format GPU ids as ranges, such as `0-7, 16`."""
    return ", ".join(number_runs(gpus))
