"""Run the coroutines of commands. Services and live views exit on SIGTERM or Ctrl-C without a traceback."""

import logging
import signal
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import typer

from orchestrrl.cli.output import choice_faults

Result = TypeVar("Result")
LOG_LEVELS = ("debug", "info", "warning", "error")
LogLevelOption = Annotated[str, typer.Option("--log-level", metavar="LEVEL", help=" | ".join(LOG_LEVELS))]


def log_level_faults(level: str) -> list[str]:
    """Return a list with an error message if the value of --log-level is unknown. Otherwise, return an empty list."""
    return choice_faults("--log-level", level, LOG_LEVELS)


def serve(service: Coroutine[Any, Any, None], log_level: str) -> None:
    """Run a service until it receives a stop signal. Its log is written to standard error."""
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    until_stopped(service)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LEAVE_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)  # for commands that must clean up before they exit
# Signals within this time after the first belong to the same stop: a closing terminal sends SIGHUP twice.
SAME_STOP_S = 1.0


def until_stopped(
    coroutine: Coroutine[Any, Any, Result],
    signals: Iterable[signal.Signals] = STOP_SIGNALS,
    on_signal: Callable[[], None] = lambda: None,
) -> Result | signal.Signals | None:
    """Run the coroutine and return its result. On one of `signals`, call `on_signal`, cancel the coroutine, wait for
    its clean-up and return the last signal received. A further signal also cancels the clean-up, unless the signal is
    SIGHUP or follows the first signal within `SAME_STOP_S` seconds. Return None if the coroutine was cancelled without
    a signal. If the process inherited SIGHUP as ignored, for example under nohup, SIGHUP stays ignored."""
    import asyncio  # imported here: it would be a third of the imports of --help

    return asyncio.run(_until_stopped(coroutine, signals, on_signal))


async def _until_stopped(
    coroutine: Coroutine[Any, Any, Result], signals: Iterable[signal.Signals], on_signal: Callable[[], None]
) -> Result | signal.Signals | None:
    import asyncio

    task = asyncio.ensure_future(coroutine)
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []

    ignored_until_s = 0.0

    def stop(number: signal.Signals) -> None:
        nonlocal ignored_until_s
        if received and (number is signal.SIGHUP or loop.time() < ignored_until_s):
            return
        if not received:
            ignored_until_s = loop.time() + SAME_STOP_S
        received.append(number)
        task.cancel()
        with suppress(OSError):  # the terminal may be closed
            on_signal()

    heeded = [number for number in signals if number in STOP_SIGNALS or signal.getsignal(number) != signal.SIG_IGN]
    for number in heeded:
        loop.add_signal_handler(number, stop, number)
    try:
        await asyncio.wait({task})
    finally:
        for number in heeded:
            loop.remove_signal_handler(number)
    if task.cancelled():
        return received[-1] if received else None
    return task.result()
