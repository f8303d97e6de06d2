"""Run long computations: in a thread in the daemon, and inline in simulations."""

from collections.abc import Awaitable, Callable
from typing import Any

Offload = Callable[[Callable[[], Any]], Awaitable[Any]]


async def inline(work: Callable[[], Any]) -> Any:
    return work()
