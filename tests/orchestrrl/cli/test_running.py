"""How a command ends that signals stop: the first stops it, and its clean-up goes on unless another is meant."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence

import pytest

from orchestrrl.cli import running
from orchestrrl.cli.running import STOP_SIGNALS, until_stopped

SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)


@pytest.fixture(autouse=True)
def heeded_sighup() -> Iterator[None]:
    """As in a terminal: the tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def stopped_by(*sent: signal.Signals) -> tuple[signal.Signals | None, bool]:
    """Send the first to a command that runs, the others while it cleans up; the last one heeded, and whether the
    clean-up came to its end."""
    is_clean = False

    async def take(number: signal.Signals) -> None:
        os.kill(os.getpid(), number)
        for _ in range(5):  # the loop has called its handler by then
            await asyncio.sleep(0)

    async def work(rest: Sequence[signal.Signals]) -> None:
        nonlocal is_clean
        try:
            os.kill(os.getpid(), sent[0])
            await asyncio.Event().wait()
        finally:
            for number in rest:
                await take(number)
            is_clean = True

    return until_stopped(work(sent[1:]), SIGNALS), is_clean


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_what_follows_the_first_signal_at_once_leaves_the_clean_up_alone(
    first: signal.Signals, second: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SAME_STOP_S", 3600.0)
    assert stopped_by(first, second, second) == (first, True)


@pytest.mark.parametrize("first", SIGNALS)
def test_a_terminal_that_closes_leaves_the_clean_up_alone(
    first: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SAME_STOP_S", 0.0)
    assert stopped_by(first, signal.SIGHUP, signal.SIGHUP) == (first, True)


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", STOP_SIGNALS)
def test_a_later_signal_stops_the_clean_up(
    first: signal.Signals, second: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SAME_STOP_S", 0.0)
    assert stopped_by(first, second) == (second, False)
