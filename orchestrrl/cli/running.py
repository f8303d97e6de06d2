"""How commands run coroutines: a service or a view lasts until SIGTERM or Ctrl-C, and ends without a traceback."""

import asyncio
import gc
import logging
import signal
from collections.abc import Coroutine
from typing import Annotated, Any

import typer

VerboseFlag = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, not only what goes wrong.")]


def serve(service: Coroutine[Any, Any, None], *, verbose: bool = False) -> None:
    """Run a service until it is told to stop; its log goes to standard error."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    until_stopped(service)


def keep_loaded() -> None:
    """What there is now stays as long as the process, so the collector of garbage need not look through it again: that
    stops everything for up to a tenth of a second, as long as a window lasts."""
    gc.collect()
    gc.freeze()


def until_stopped(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run until the coroutine ends, or cancel it on SIGTERM or SIGINT and wait for its clean-up."""
    asyncio.run(_until_stopped(coroutine))


async def _until_stopped(coroutine: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(coroutine)
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, task.cancel)
    try:
        await asyncio.wait({task})
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
    if not task.cancelled():
        task.result()
