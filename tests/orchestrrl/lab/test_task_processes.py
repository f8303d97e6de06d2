"""Tasks in separate processes."""

import os
import signal

import pytest

from orchestrrl.lab.processes import run_tasks


def _halve(number: int) -> int:
    if number < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if number % 2:
        raise ValueError(f"must be even, got {number}")
    return number // 2


@pytest.mark.parametrize("at_once", [1, 3, None])
def test_process_crash_affects_only_its_task(at_once: int | None) -> None:
    found = dict(run_tasks(_halve, [2, -1, 3, 8], at_once))
    assert (found[2], found[8]) == (1, 4)
    assert str(found[-1]) == "the process of the task ended with status -9"
    assert isinstance(found[3], ValueError)
    assert str(found[3]) == "must be even, got 3"


def test_no_tasks_start_no_processes() -> None:
    assert list(run_tasks(_halve, [])) == []
