"""Run long computations. The daemon runs them in a thread, and simulations run them inline."""

from collections.abc import Awaitable, Callable
from typing import Any

Offload = Callable[[Callable[[], Any]], Awaitable[Any]]


async def inline(work: Callable[[], Any]) -> Any:
    return work()
