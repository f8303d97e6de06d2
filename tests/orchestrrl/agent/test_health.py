"""Tests of health and decode rate from scrapes, against brute force."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.agent.watch import EngineTrack, HealthLimits, capability_faults, fold, judge, metric_faults
from orchestrrl.core.config.schema import LimitSettings
from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable
from orchestrrl.engines.base import EngineCapabilities, EngineSample
from orchestrrl.engines.vllm_info import GENERATED, KV_USAGE, PREEMPTIONS, PROMPT, RUNNING, WAITING, parse_metrics
from orchestrrl.engines.vllm_managed import NOT_OF_VLLM
from orchestrrl.fleet.reports import EngineReport
from orchestrrl.rpc.codecs.telemetry import ENGINE_REPORT, SAMPLE
from orchestrrl.rpc.ranges import checking
from planner.model import EngineHealth, EngineId, NodeId

LIMITS = HealthLimits(slow_after_s=1.0, gone_after_s=5.0, rate_window_s=1.0)
METRICS = EngineSample(
    running=3,
    waiting=1,
    kv_usage_fraction=0.5,
    kv_capacity_tokens=1000,
    generation_tokens_total=100,
    prompt_tokens_total=50,
    preemptions_total=0,
)


@pytest.mark.parametrize(
    ("answer", "waited_s", "health", "detail"),
    [
        (METRICS, 0.1, EngineHealth.OK, ""),
        (METRICS, 1.5, EngineHealth.SLOW, "answered after 1.5 s, limit 1 s"),
        (None, 1.5, EngineHealth.SLOW, "no answer for 1.5 s, limit 1 s"),
        (None, 5.0, EngineHealth.GONE, "no answer for 5 s, limit 5 s"),
        (Retryable("connection refused", 1.0), 0.0, EngineHealth.GONE, "connection refused"),
        (OutcomeUnknown("connection reset"), 0.0, EngineHealth.GONE, "connection reset"),
        (Permanent("not metrics: '<html>'"), 0.0, EngineHealth.NONSENSE, "not metrics: '<html>'"),
        (KeyError("x"), 0.0, EngineHealth.NONSENSE, "unreadable answer: KeyError('x')"),
        (replace(METRICS, running=-3), 0.1, EngineHealth.NONSENSE, "running cannot be -3"),
        (
            replace(METRICS, waiting=2**40, kv_usage_fraction=math.nan),
            9.0,
            EngineHealth.NONSENSE,
            f"waiting cannot be {2**40}; kv_usage_fraction cannot be nan",
        ),
    ],
)
def test_each_answer_has_its_health_and_detail(
    answer: EngineSample | BaseException | None, waited_s: float, health: EngineHealth, detail: str
) -> None:
    assert judge(answer, waited_s, LIMITS) == (health, detail)


def test_invalid_limits_are_rejected() -> None:
    with pytest.raises(ValueError, match="slow_after_s must be > 0 and <= gone_after_s, got 2 and 1"):
        HealthLimits(slow_after_s=2, gone_after_s=1)
    with pytest.raises(ValueError, match="rate_window_s"):
        HealthLimits(rate_window_s=0)


# One scrape: seconds since the last one, tokens since then (negative: a restart), running, and whether it answered.
_SCRAPE = st.tuples(
    st.sampled_from([0.0, 0.25, 0.25, 0.3, 1.0, 4.0]),
    st.integers(-50, 400),
    st.sampled_from([0, 1, 5, 5, 5]),
    st.sampled_from([True, True, True, True, False]),
)


def expected_rate(history: list[tuple[float, int, int, bool]], window_s: float) -> float | None:
    """Compute the rate by looking back over the whole history: (at_s, total, running, readable), newest last."""
    unbroken: list[tuple[float, int]] = []
    last_total: int | None = None
    for at_s, total, running, readable in history:
        if not readable:
            unbroken, last_total = [], None
            continue
        if last_total is not None and total < last_total:
            unbroken = []
        last_total = total
        if running == 0:
            unbroken = []
        else:
            unbroken.append((at_s, total))
    if len(unbroken) < 2:
        return None
    now_s, tokens = unbroken[-1]
    start_s, start_tokens = next((p for p in reversed(unbroken) if now_s - p[0] >= window_s), unbroken[0])
    span_s = now_s - start_s
    if span_s == 0 or (tokens == start_tokens and span_s < window_s):
        return None
    return (tokens - start_tokens) / span_s


@given(st.lists(_SCRAPE, max_size=30), st.sampled_from([0.25, 1.0, 3.0]))
def test_decode_rate_is_the_mean_over_an_unbroken_window(
    scrapes: list[tuple[float, int, int, bool]], window_s: float
) -> None:
    limits = HealthLimits(rate_window_s=window_s)
    track, at_s, total = EngineTrack(), 100.0, 1000
    history: list[tuple[float, int, int, bool]] = []
    for gap_s, tokens, running, readable in scrapes:
        at_s += gap_s
        total = total + tokens if tokens >= 0 else 0
        history.append((at_s, total, running, readable))
        scraped = replace(METRICS, running=running, generation_tokens_total=total, sampled_s=at_s) if readable else None
        track, sample = fold(track, scraped, limits)
        if sample is None:
            assert not readable
            assert track == EngineTrack()
            continue
        assert sample.decode_tokens_per_s == expected_rate(history, window_s)
        assert sample.decode_tokens_per_s is None or sample.decode_tokens_per_s >= 0
        assert (sample.sampled_s, sample.running, sample.generation_tokens_total) == (at_s, running, total)
        assert len(track.points) <= 2 + sum(1 for h in history if at_s - h[0] < window_s)


@given(
    st.integers(-(2**70), 2**70),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(2**70), 2**70),
)
def test_accepted_metrics_fit_on_the_wire(running: int, tokens: int, usage: float, capacity: int) -> None:
    metrics = EngineSample(running, 0, usage, capacity, tokens, tokens, 0)
    health, _ = judge(metrics, 0.1, LIMITS)
    assert (health is EngineHealth.OK) == (not metric_faults(metrics))
    if health is EngineHealth.OK:
        _, sample = fold(EngineTrack(), metrics, LIMITS)
        assert sample is not None
        assert 0 <= sample.kv_usage_fraction <= 1
        assert SAMPLE.from_pb(SAMPLE.to_pb(sample)) == sample


@pytest.mark.parametrize(
    ("value", "what"),
    [("NaN", "nan"), ("+Inf", "inf"), ("-Inf", "-inf"), ("-1", "-1")],
)
@pytest.mark.parametrize("name", [RUNNING, WAITING, KV_USAGE, GENERATED, PROMPT, PREEMPTIONS])
async def test_page_with_an_impossible_number_is_nonsense_with_its_name(name: str, value: str, what: str) -> None:
    values = dict.fromkeys((RUNNING, WAITING, KV_USAGE, GENERATED, PROMPT, PREEMPTIONS), "1") | {name: value}
    page = "".join(f'{each}{{engine="0"}} {number}\n' for each, number in values.items())
    with pytest.raises(NOT_OF_VLLM) as caught:
        parse_metrics(page)
    health, detail = judge(caught.value, 0.1, LIMITS)
    assert health is EngineHealth.NONSENSE
    assert f"{name}: must be a finite number >= 0, got {what}" in detail


@given(
    st.builds(
        EngineSample,
        running=st.integers(-1, 2**33),
        waiting=st.integers(0, 2**33),
        kv_usage_fraction=st.sampled_from([0.0, 0.5, 1.0, 1.0005, 1.002, math.nan, math.inf, -0.0]),
        kv_capacity_tokens=st.integers(0, 2**65),
        generation_tokens_total=st.integers(0, 2**65),
        prompt_tokens_total=st.integers(0, 2**65),
        preemptions_total=st.integers(0, 2**65),
    ),
    st.floats(0, 20),
    st.integers(0, 2**64),
)
def test_daemon_accepts_every_report_that_the_agent_makes(metrics: EngineSample, waited_s: float, earlier: int) -> None:
    health, detail = judge(metrics, waited_s, LIMITS)
    readable = health is not EngineHealth.NONSENSE
    reading = replace(metrics, sampled_s=1000.0 + waited_s, scrape_s=waited_s) if readable else None
    track = EngineTrack(((999.0, min(earlier, metrics.generation_tokens_total)),))
    _, sample = fold(track, reading, LIMITS)
    report = EngineReport(NodeId("a"), 1, EngineId("e0"), "http://e0", health, detail or "\ud800" * 9999, sample)
    for _ in checking(ENGINE_REPORT.to_pb(report), LimitSettings()):
        pass


@pytest.mark.parametrize("value", [-1, 2**32, 1.5, "8192", True, [1]])
def test_capability_that_is_no_count_is_a_fault(value: Any) -> None:
    offered = EngineCapabilities("vllm", "1", ("m",), max_model_len_tokens=value)
    assert capability_faults(offered) == [f"max_model_len_tokens cannot be {value!r}"]
    assert not capability_faults(EngineCapabilities("vllm", "1", ("m",), max_model_len_tokens=8192))
