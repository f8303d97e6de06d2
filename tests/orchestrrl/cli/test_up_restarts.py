"""When `orchestrrl up` restarts a process that has ended."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.cli.up.restarts import (
    LONGEST_PAUSE_S,
    MOST_FAILURES,
    STEADY_S,
    count_failures,
    restart_pause_s,
)


@given(st.lists(st.floats(STEADY_S, 1e6), min_size=1))
def test_process_that_runs_for_long_is_always_restarted_soon(runs_s: list[float]) -> None:
    failures = 0
    for ran_s in runs_s:
        failures = count_failures(failures, ran_s)
        assert restart_pause_s(failures) == restart_pause_s(1)


@given(st.lists(st.floats(0, STEADY_S, exclude_max=True), min_size=MOST_FAILURES, max_size=2 * MOST_FAILURES))
def test_process_that_fails_at_once_is_restarted_ever_later_and_not_forever(runs_s: list[float]) -> None:
    failures, pauses_s = 0, []
    for ran_s in runs_s:
        failures = count_failures(failures, ran_s)
        if (pause_s := restart_pause_s(failures)) is None:
            break
        pauses_s.append(pause_s)
    assert len(pauses_s) == MOST_FAILURES - 1
    assert pauses_s == sorted(pauses_s)
    assert 0 < pauses_s[0] <= pauses_s[-1] <= LONGEST_PAUSE_S


@given(st.lists(st.floats(0, 2 * STEADY_S)))
def test_failures_count_from_the_last_long_run(runs_s: list[float]) -> None:
    failures = 0
    for ran_s in runs_s:
        failures = count_failures(failures, ran_s)
    long_runs = [index for index, ran_s in enumerate(runs_s) if ran_s >= STEADY_S]
    assert failures == len(runs_s) - (long_runs[-1] if long_runs else 0)
