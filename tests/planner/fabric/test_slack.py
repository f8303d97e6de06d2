"""A rank's slack: its quiet times, their predictions, and reasons against a prediction."""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from planner.fabric.recent import shrunk
from planner.fabric.sequence import PLACE_UNKNOWN, UNLEARNT
from planner.fabric.slack import (
    FEW_SAMPLES,
    MOST_SIZES,
    OUTLASTED,
    TRAFFIC,
    RemainingQuiet,
    Signature,
    SlackHistogram,
    SlackLearner,
    edge_s,
)
from planner.fabric.slack_summary import SlackSummary, merged, summarize
from planner.model import Hold
from tests.planner.fabric.slack_iterations import ARMS, LAYERS, Q, events, feed
from tests.planner.fabric.slack_scores import commits, score

REDUCE = Signature("all_reduce", 0, 1024)
EXCHANGE = Signature("all_to_all", 1, 4096)


def code(predicted: RemainingQuiet | Hold) -> str:
    return predicted.code if isinstance(predicted, Hold) else "promised"


def trained(iterations: int, *, compute_s: float = 0.050, learner: SlackLearner | None = None) -> SlackLearner:
    """Return a learner after iterations of 0.3 s: an exchange after `compute_s`, a reduction 0.1 s later, 10 ms each.
    One more iteration has begun."""
    learner = learner or SlackLearner(0)
    for number in range(iterations):
        began_s = 0.3 * number
        learner.iteration(number, began_s)
        at_s = began_s + compute_s
        learner.ended(learner.started(EXCHANGE, at_s), at_s + 0.01)
        learner.ended(learner.started(REDUCE, at_s + 0.11), at_s + 0.12)
    learner.iteration(iterations, 0.3 * iterations)
    return learner


# Predictions against the following events.


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "found"])
def test_predictions_are_broken_no_more_often_than_requested(arm: str, marked: bool) -> None:
    """Requested when a quiet time opens. 9,000 windows, but those of an iteration share its drift, so a fifth more is
    allowed."""
    result = score(arm, 7, marked=marked)
    assert result.broken_share <= 1.2 * Q
    assert result.promised > 0.95 * result.queries
    assert result.use > 0.5


@pytest.mark.parametrize("arm", ["jitter", "heavy tail", "regimes"])
def test_predictions_in_the_middle_of_a_quiet_time_hold_too(arm: str) -> None:
    result = score(arm, 8, at_share=0.6)
    assert result.broken_share <= 1.2 * Q
    assert result.use > 0.3


@pytest.mark.parametrize("q", [0.01, 0.2])
def test_requested_probability_is_met(q: float) -> None:
    careful = score("heavy tail", 9, q=q)
    assert careful.broken_share <= 1.3 * q
    assert careful.use > (0.3 if q < 0.05 else 0.6)


def test_early_predictions_are_shrunk_and_report_their_risk() -> None:
    learner = trained(6)
    predicted = learner.remaining(1.8, Q)
    assert isinstance(predicted, RemainingQuiet)
    assert predicted.risk > Q
    # 0.120 s of quiet before the first collective have passed when the sixth iteration ends; 0.050 s remain.
    assert predicted.opened_s == pytest.approx(1.67)
    assert predicted.until_s == pytest.approx(1.8 + shrunk(predicted.risk, Q) * 0.05)
    assert 1.825 < predicted.until_s < 1.840


def test_enough_iterations_predict_the_whole_quiet_time() -> None:
    predicted = trained(30).remaining(9.0, Q)
    assert isinstance(predicted, RemainingQuiet)
    assert predicted.risk <= Q
    assert predicted.until_s == pytest.approx(9.05)
    assert predicted.position == 0


@pytest.mark.parametrize("arm", ["jitter", "regimes"])
def test_commits_of_many_ranks_lie_inside_their_windows(arm: str) -> None:
    """Eight ranks, of which none may break its prediction in more than one of a hundred windows."""
    result = commits(arm, 2, iterations=80)
    assert result.outside <= 0.01 * result.made
    assert result.made > 60


@given(st.integers(0, 2 * LAYERS), st.floats(0, 1))
def test_prepare_does_not_change_the_prediction(at: int, share: float) -> None:
    prepared, plain, index = SlackLearner(0), SlackLearner(0), 0
    for event in events("jitter", 1, 9):
        for learner in (prepared, plain):
            feed(learner, event)
        if event.kind == "started":
            prepared.prepare(Q)
        if event.kind == "ended":
            index += 1
            now_s = event.at_s + share * 0.02
            if index % (at + 1) == 0:
                assert prepared.remaining(now_s, Q) == plain.remaining(now_s, Q)


def test_overlapping_gradient_buckets_count_as_traffic() -> None:
    """Buckets of one ring follow each other, each begun while the previous one may still be in flight, so it is quiet
    between them only at times. The optimizer's window is predicted, the others rarely; no prediction is broken more
    often than requested."""
    rng, learner, at_s = random.Random(3), SlackLearner(0), 0.0
    promised = broken = optimizer = 0
    for number in range(200):
        learner.iteration(number, at_s)
        at_s += 0.100 * rng.lognormvariate(0, 0.05)
        moments, free_s = list[tuple[float, bool, Signature]](), at_s
        for bucket in range(6):
            at_s += 0.020 * rng.lognormvariate(0, 0.1)
            signature = Signature("all_reduce", 0, bucket)
            free_s = max(free_s, at_s) + 0.016 * rng.lognormvariate(0, 0.3)
            moments += [(at_s, True, signature), (free_s, False, signature)]
        moments.sort(key=lambda moment: moment[:2])
        handles = dict[Signature, int]()
        at_s = free_s + 0.050 * rng.lognormvariate(0, 0.05)
        moments += [(at_s, True, EXCHANGE), (at_s + 0.002, False, EXCHANGE)]
        until_s: float | None = None
        for now_s, begins, signature in moments:
            if not begins:
                learner.ended(handles[signature], now_s)
                predicted = learner.remaining(now_s, Q)
                if isinstance(predicted, RemainingQuiet):
                    promised += 1
                    until_s = predicted.until_s
                    optimizer += predicted.position == 6 and predicted.until_s - now_s > 0.040
                continue
            broken += until_s is not None and until_s > now_s
            until_s = None
            handles[signature] = learner.started(signature, now_s)
        at_s += 0.002
    assert promised > 400
    assert broken <= 1.2 * Q * promised
    assert optimizer > 150


# Quiet times, against interval arithmetic.

SPANS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 60), st.sampled_from([REDUCE, EXCHANGE])), min_size=1, max_size=25
)


@given(SPANS)
def test_quiet_means_no_collective_in_flight(spans: list[tuple[int, int, Signature]]) -> None:
    """Overlapping asynchronous collectives end in any order. Whole seconds; an end comes before a start."""
    learner, handles = SlackLearner(0), dict[int, int]()
    moments = sorted(
        [(at, 1, index) for index, (at, _, _) in enumerate(spans)]
        + [(at + length, 0 if length else 2, index) for index, (at, length, _) in enumerate(spans)]
    )
    expected: dict[str, list[int]] = {}
    for place, (now, kind, index) in enumerate(moments):
        if kind == 1:
            others = [span for other, span in enumerate(spans) if (span[0], other) < (now, index)]
            if others:
                quiet_since = max(at + length for at, length, _ in others)
                expected.setdefault(spans[index][2].op, []).append(max(0, now - quiet_since))
            handles[index] = learner.started(spans[index][2], now)
        else:
            learner.ended(handles[index], now)
        done = moments[: place + 1]
        flying = any(
            index in handles and (at + length, 0 if length else 2, index) not in done
            for index, (at, length, _) in enumerate(spans)
        )
        assert (code(learner.remaining(now, Q)) == TRAFFIC) == flying
    for op, lengths in expected.items():
        histogram = learner.histograms[op]
        assert histogram.total == len(lengths)
        assert histogram.none == lengths.count(0)
        wanted = SlackHistogram()
        for length in lengths:
            wanted.add(float(length))
        assert histogram == wanted


def test_overlapping_collectives_are_traffic_until_last_ends() -> None:
    learner = trained(10)
    first = learner.started(EXCHANGE, 3.05)
    other = learner.started(REDUCE, 3.06)
    learner.ended(first, 3.07)
    predicted = learner.remaining(3.08, Q)
    assert isinstance(predicted, Hold)
    assert (predicted.code, predicted.detail) == (
        TRAFFIC,
        "rank 0 has 1 collectives in flight, the oldest is all_reduce",
    )
    learner.ended(other, 3.09)
    assert code(learner.remaining(3.1, Q)) == "promised"


def test_two_equal_collectives_end_one_after_the_other() -> None:
    learner = trained(10)
    handles = [learner.started(EXCHANGE, at_s) for at_s in (3.05, 3.06)]
    learner.ended(handles[0], 3.07)
    assert code(learner.remaining(3.08, Q)) == TRAFFIC
    learner.ended(handles[0], 3.08)  # once more
    assert code(learner.remaining(3.08, Q)) == TRAFFIC
    learner.ended(handles[1], 3.09)
    assert code(learner.remaining(3.1, Q)) == PLACE_UNKNOWN


# Reasons against a prediction.


def test_every_reason_has_its_code() -> None:
    assert code(SlackLearner(3).remaining(0.0, Q)) == UNLEARNT
    assert code(trained(0).remaining(0.0, Q)) == UNLEARNT
    assert code(trained(2).remaining(0.6, Q)) == FEW_SAMPLES
    learner = trained(30)
    assert code(learner.remaining(9.0, Q)) == "promised"
    outlasted = learner.remaining(9.2, Q)
    assert isinstance(outlasted, Hold)
    assert outlasted.code == OUTLASTED
    assert "quiet for 330.0 ms" in outlasted.detail


def test_quiet_time_beyond_short_ones_is_predicted_from_long_ones() -> None:
    """Every other quiet time is long: after the length of the short ones, it is a long one."""
    learner = SlackLearner(0)
    for number in range(100):
        at_s = 10.0 * number
        learner.iteration(number, at_s)
        at_s += 5.0 if number % 2 else 1.0
        learner.ended(learner.started(EXCHANGE, at_s), at_s + 1.0)
        at_s = 10.0 * number + 9.0
        learner.ended(learner.started(REDUCE, at_s), at_s + 1.0)
    learner.iteration(100, 1000.0)
    early, late = learner.remaining(1000.0, Q), learner.remaining(1002.0, Q)
    assert isinstance(early, RemainingQuiet)
    assert early.until_s == pytest.approx(1001.0)
    assert isinstance(late, RemainingQuiet)
    assert late.until_s == pytest.approx(1005.0)
    assert code(learner.remaining(1006.0, Q)) == OUTLASTED


@given(st.integers(0, 2 * LAYERS), st.sampled_from(["skipped", "extra"]), st.integers(0, 5))
def test_deviating_iteration_has_no_predictions_from_there_on(at: int, how: str, seed: int) -> None:
    """Skipped or extra collectives: from the first that shows the difference to the next mark."""
    learner, iteration, index = SlackLearner(0), -1, 0
    codes: list[str] = []
    skipped = 0  # positions that this iteration does not have
    for event in events("jitter", seed, 12, layers=LAYERS):
        if event.kind == "iteration":
            iteration, index = event.number, 0
        if iteration == 10 and event.kind == "started":
            if index == at and how == "skipped":
                skipped = 1
            if index == at and how == "extra":
                learner.ended(learner.started(Signature("barrier", 0, 0), event.at_s - 1e-4), event.at_s - 5e-5)
                codes.append(code(learner.remaining(event.at_s - 4e-5, Q)))
            index += 1
        if skipped and event.kind in ("started", "ended"):
            skipped = 0 if event.kind == "ended" else 1
            continue
        feed(learner, event)
        if iteration == 10 and index > at and event.kind == "ended" and how == "extra":
            codes.append(code(learner.remaining(event.at_s, Q)))
    if how == "extra":
        assert set(codes[:-1]) == {PLACE_UNKNOWN}
    assert code(learner.remaining(0.0, Q)) == "promised"  # a whole iteration later


def test_lost_events_are_reported_and_end_predictions() -> None:
    learner = trained(30)
    learner.started(EXCHANGE, 9.05)
    learner.lost("ring overran by 12 events")
    assert code(learner.remaining(9.06, Q)) == UNLEARNT
    learner.ended(learner.started(REDUCE, 9.16), 9.17)
    predicted = learner.remaining(9.18, Q)
    assert isinstance(predicted, Hold)
    assert "overran" in predicted.detail
    learner.iteration(31, 9.3)
    assert code(learner.remaining(9.3, Q)) == "promised"


def test_varying_sizes_are_not_part_of_the_sequence() -> None:
    """An all-to-all of tokens has another size each time."""
    learner, rng = SlackLearner(0), random.Random(1)
    for number in range(MOST_SIZES + 10):
        at_s = 0.3 * number
        learner.iteration(number, at_s)
        learner.ended(learner.started(EXCHANGE._replace(size=rng.randrange(1 << 30)), at_s + 0.05), at_s + 0.06)
        learner.ended(learner.started(REDUCE, at_s + 0.16), at_s + 0.17)
    assert code(learner.remaining(0.3 * (MOST_SIZES + 10), Q)) == "promised"
    assert [position.size for position in summarize(learner, Q).positions] == [-1, REDUCE.size]


def test_many_sizes_use_no_more_memory() -> None:
    learner = SlackLearner(0)
    for size in range(10 * MOST_SIZES):
        learner.ended(learner.started(EXCHANGE._replace(size=size), float(size)), size + 0.5)
    assert len(learner.signatures) == 1


def test_shrinking_windows_make_predictions_cautious() -> None:
    """The target level falls with each broken prediction and recovers; it never exceeds the requested one."""
    learner = SlackLearner(0)
    broken = promised = 0
    for number in range(300):
        at_s, quiet_s = 1.0 * number, 0.5 * 0.995**number
        learner.iteration(number, at_s)
        predicted = learner.remaining(at_s, Q)
        if isinstance(predicted, RemainingQuiet):
            promised += 1
            broken += predicted.until_s > at_s + quiet_s
        learner.ended(learner.started(EXCHANGE, at_s + quiet_s), at_s + 0.9)
        learner.ended(learner.started(REDUCE, at_s + 0.91), at_s + 1.0)
    assert promised > 250
    assert broken <= 0.5 * promised  # every window is shorter than all before it: without adaptation, all are broken


# Summaries.


def everything() -> Iterator[SlackLearner]:
    for marked in (True, False):
        learner = SlackLearner(4)
        for event in events("jitter", 3, 30):
            feed(learner, event, marked=marked)
        yield learner


def test_summary_lists_windows_of_an_iteration() -> None:
    for learner in everything():
        summary = summarize(learner, Q)
        assert len(summary.positions) == 4 * LAYERS + 2
        assert summary.iterations == pytest.approx(30, abs=3)
        reduce = next(position for position in summary.positions if position.op == "all_reduce")
        assert reduce.mark == "optimizer"
        assert reduce.p5_s is not None
        assert reduce.p50_s == pytest.approx(0.060, rel=0.1)
        assert reduce.promised_s == pytest.approx(0.060 * 0.8, rel=0.15)
        assert reduce.covers(0.025)
        assert not reduce.covers(0.100)
        offsets = [position.offset_s or 0.0 for position in summary.positions[1:]]
        assert offsets == sorted(offsets)
        assert set(summary.histograms) == {"all_to_all", "all_reduce", "all_gather"}


def test_summary_round_trips_through_json() -> None:
    as_json = TypeAdapter(SlackSummary)
    for learner in everything():
        summary = summarize(learner, Q)
        assert as_json.validate_json(json.dumps(asdict(summary), allow_nan=False)) == summary


def test_summaries_of_ranks_add_up() -> None:
    one, other = (summarize(learner, Q) for learner in everything())
    both = merged([one, other])
    assert both.ranks == (4, 4)
    for op, histogram in both.histograms.items():
        assert histogram.total == one.histograms[op].total + other.histograms[op].total
    with pytest.raises(ValueError, match="at least one summary is required, got 0"):
        merged([])


@given(
    st.lists(st.just(0.0) | st.floats(2e-6, 9e3), max_size=80), st.integers(0, 80), st.sampled_from([0.05, 0.5, 0.95])
)
def test_histograms_add_up_with_quantiles_within_a_bin(slack_s: list[float], cut: int, q: float) -> None:
    parts = SlackHistogram(), SlackHistogram()
    for index, each in enumerate(slack_s):
        parts[index >= cut].add(each)
    whole = parts[0].merged(parts[1])
    assert whole.total == len(slack_s)
    assert TypeAdapter(SlackHistogram).validate_json(json.dumps(asdict(whole))) == whole
    quantile_s = whole.quantile_s(q)
    if not slack_s:
        assert quantile_s is None
        return
    assert quantile_s is not None
    bin_factor = edge_s(1) / edge_s(0)
    assert sum(each <= quantile_s * bin_factor for each in slack_s) >= q * len(slack_s) - 1e-9
    assert sum(each >= quantile_s / bin_factor for each in slack_s) >= (1 - q) * len(slack_s) - 1e-9
