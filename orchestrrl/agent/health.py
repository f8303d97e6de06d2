"""What a scrape means: the engine's health in words, and its decode rate. Pure; scraping is watch.py."""

import math
from dataclasses import dataclass, replace

from orchestrrl.core.errors import OrchestrRLError, Permanent, cut, shorten
from orchestrrl.engines.base import EngineCapabilities, EngineSample
from planner.model import EngineHealth

# The widest that the daemon takes.
_MAX_COUNT = 2**32 - 1
_MAX_TOTAL = 2**63 - 1
_MAX_TOKENS_PER_S = 1e9  # that the daemon takes; a counter that has jumped looks faster


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """An answer later than `slow_after_s` is slow; none within `gone_after_s`, and the engine counts as gone.

    The decode rate is taken over the scrapes of the last `rate_window_s`.
    """

    slow_after_s: float = 1.0
    gone_after_s: float = 5.0
    rate_window_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.slow_after_s <= self.gone_after_s:
            raise ValueError(
                f"slow_after_s must be > 0 and <= gone_after_s, got {self.slow_after_s} and {self.gone_after_s}"
            )
        if not self.rate_window_s > 0:
            raise ValueError(f"rate_window_s must be > 0, got {self.rate_window_s}")


def judge(
    answer: EngineSample | BaseException | None, waited_s: float, limits: HealthLimits
) -> tuple[EngineHealth, str]:
    """Return the engine's health after `waited_s`, and the reason for it.

    `answer` None: nothing yet; an exception: what the scrape raised.
    """
    if answer is None:
        gone = waited_s >= limits.gone_after_s
        limit_s = limits.gone_after_s if gone else limits.slow_after_s
        detail = f"no answer for {waited_s:.3g} s, limit {limit_s:.3g} s"
        return EngineHealth.GONE if gone else EngineHealth.SLOW, detail
    if isinstance(answer, BaseException):
        gone = isinstance(answer, OrchestrRLError) and not isinstance(answer, Permanent)
        words = str(answer) if isinstance(answer, OrchestrRLError) else f"unreadable answer: {answer!r}"
        return EngineHealth.GONE if gone else EngineHealth.NONSENSE, cut(words)
    faults = metric_faults(answer)
    if faults:
        return EngineHealth.NONSENSE, "; ".join(faults)
    if waited_s > limits.slow_after_s:
        return EngineHealth.SLOW, f"answered after {waited_s:.3g} s, limit {limits.slow_after_s:.3g} s"
    return EngineHealth.OK, ""


def metric_faults(metrics: EngineSample) -> list[str]:
    """What cannot be true of any engine, one sentence each."""
    faults = []
    for name in ("running", "waiting"):
        if not 0 <= getattr(metrics, name) <= _MAX_COUNT:
            faults.append(f"{name} cannot be {getattr(metrics, name)}")
    for name in ("kv_capacity_tokens", "generation_tokens_total", "prompt_tokens_total", "preemptions_total"):
        if not 0 <= getattr(metrics, name) <= _MAX_TOTAL:
            faults.append(f"{name} cannot be {getattr(metrics, name)}")
    # Engines round: a full cache may read a little over 1.
    if not (math.isfinite(metrics.kv_usage_fraction) and 0 <= metrics.kv_usage_fraction <= 1.001):
        faults.append(f"kv_usage_fraction cannot be {metrics.kv_usage_fraction}")
    return faults


def capability_faults(capabilities: EngineCapabilities) -> list[str]:
    """What cannot be true of any engine, one sentence each: it is the engine's own JSON."""
    faults = []
    for name in ("max_model_len_tokens", "max_sequences"):
        value = getattr(capabilities, name)
        if value is not None and not (type(value) is int and 0 <= value <= _MAX_COUNT):
            faults.append(f"{name} cannot be {shorten(value)}")
    if not isinstance(capabilities.version, str):
        faults.append(f"version cannot be {shorten(capabilities.version)}")
    return faults


@dataclass(frozen=True, slots=True)
class EngineTrack:
    """What earlier scrapes left behind for the decode rate: (sampled_s, generation_tokens_total), oldest first.

    It reaches back without a break in which the engine could not be read, had nothing to decode, or started anew.
    """

    points: tuple[tuple[float, int], ...] = ()
    last_total: int = 0  # generation_tokens_total of the last reading; 0 after a break

    def restarted(self, metrics: EngineSample) -> bool:
        """A counter that went back: another process answers now."""
        return metrics.generation_tokens_total < self.last_total


def fold(
    track: EngineTrack, sample: EngineSample | None, limits: HealthLimits
) -> tuple[EngineTrack, EngineSample | None]:
    """Add the decode rate to a sample, and return it with the track for the next one. None: it could not be read.

    The decode rate is the mean over the last `rate_window_s` of scrapes in which the engine was decoding (over the
    last two where scrapes are rarer). It is unknown at the first scrape, after a counter reset, while nothing runs, and
    while no token has come in less than a window: the first ones may still be in prefill. 0 is a stalled engine.
    """
    if sample is None:
        return EngineTrack(), None
    points = () if track.restarted(sample) else track.points
    if sample.running == 0:
        points = ()
    else:
        points = _within_window((*points, (sample.sampled_s, sample.generation_tokens_total)), limits.rate_window_s)
    sample = replace(
        sample,
        kv_usage_fraction=min(1.0, sample.kv_usage_fraction),
        decode_tokens_per_s=_rate(points, limits.rate_window_s),
    )
    return EngineTrack(points, sample.generation_tokens_total), sample


def _within_window(points: tuple[tuple[float, int], ...], window_s: float) -> tuple[tuple[float, int], ...]:
    """From the newest point that is a whole window old; from the oldest if none is."""
    newest_s = points[-1][0]
    whole = [index for index, (at_s, _) in enumerate(points) if newest_s - at_s >= window_s]
    return points[whole[-1] :] if whole else points


def _rate(points: tuple[tuple[float, int], ...], window_s: float) -> float | None:
    if len(points) < 2:
        return None
    (from_s, from_tokens), (to_s, to_tokens) = points[0], points[-1]
    if to_s <= from_s or (to_tokens == from_tokens and to_s - from_s < window_s):
        return None
    rate = (to_tokens - from_tokens) / (to_s - from_s)
    return rate if rate <= _MAX_TOKENS_PER_S else None
