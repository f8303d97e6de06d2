"""Decide when a process that has ended is restarted, and when it is not restarted any more. Pure."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
MOST_FAILURES = 8  # consecutive; the pauses before the last restart add up to 46 s
STEADY_S = 60.0  # a process that has run for this long was restarted successfully


def count_failures(failures: int, ran_s: float) -> int:
    """Return the number of consecutive failures after a process has ended, `ran_s` seconds after its start. `failures`
    is the number before."""
    return 1 if ran_s >= STEADY_S else failures + 1


def restart_pause_s(failures: int) -> float | None:
    """Return the seconds to wait before a restart after this number of consecutive failures, at least 1. Return None if
    the process is not restarted any more."""
    if failures >= MOST_FAILURES:
        return None
    return min(FIRST_PAUSE_S * 2.0 ** (failures - 1), LONGEST_PAUSE_S)
