"""Commands and stop signals: the first signal stops the command, and only a later one cancels its clean-up."""

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
    """Install the default handler of SIGHUP, as in a terminal, because the tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def stopped_by(*sent: signal.Signals) -> tuple[signal.Signals | None, bool]:
    """Send the first signal to a running command and the others during its clean-up. Return the last signal that took
    effect, and whether the clean-up finished."""
    is_clean = False

    async def take(number: signal.Signals) -> None:
        os.kill(os.getpid(), number)
        for _ in range(5):  # by then the loop has called its handler
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
def test_signals_directly_after_the_first_do_not_cancel_clean_up(
    first: signal.Signals, second: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SAME_STOP_S", 3600.0)
    assert stopped_by(first, second, second) == (first, True)


@pytest.mark.parametrize("first", SIGNALS)
def test_closing_terminal_does_not_cancel_clean_up(first: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SAME_STOP_S", 0.0)
    assert stopped_by(first, signal.SIGHUP, signal.SIGHUP) == (first, True)


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", STOP_SIGNALS)
def test_later_signal_cancels_clean_up(
    first: signal.Signals, second: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SAME_STOP_S", 0.0)
    assert stopped_by(first, second) == (second, False)
