"""How commands run coroutines: a service or a view lasts until SIGTERM or Ctrl-C, and ends without a traceback."""

import logging
import signal
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import typer

Result = TypeVar("Result")
VerboseFlag = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, not only what goes wrong.")]


def serve(service: Coroutine[Any, Any, None], *, verbose: bool = False) -> None:
    """Run a service until it is told to stop; its log goes to standard error."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    until_stopped(service)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LEAVE_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)  # of commands that leave something behind unless they clean up
# Signals that follow the first within so long are the same wish: a terminal that closes sends SIGHUP twice.
SAME_STOP_S = 1.0


def until_stopped(
    coroutine: Coroutine[Any, Any, Result],
    signals: Iterable[signal.Signals] = STOP_SIGNALS,
    on_signal: Callable[[], None] = lambda: None,
) -> Result | signal.Signals | None:
    """Return the result of the coroutine, or cancel it on one of `signals`, wait for its clean-up and return the last.
    Another signal cancels the clean-up, too, unless it is SIGHUP or follows the first within `SAME_STOP_S`. A signal
    that the process was started to ignore, such as SIGHUP under nohup, stays ignored."""
    import asyncio  # here, as a third of what help imports otherwise

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
        with suppress(OSError):  # the terminal may be gone
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
