"""How every client of the daemon connects: channel options, backoff, and staying connected across its restarts."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from orchestrrl.core.clock import Clock, stop

logger = logging.getLogger(__name__)

_RNG = random.Random()
KEEPALIVE_S = 3
MESSAGE_BYTES = 64 * 1024 * 1024  # at most

# A connection that has silently died is noticed after KEEPALIVE_S and as long again. Reconnecting is paced by Backoff
# alone, so gRPC's own pacing (20 s to connect, minutes between attempts, shared by the whole process) is switched off.
_BOTH_SIDES: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_S * 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH_SIDES,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

# What a server needs to bear such clients: by default it hangs up on one that pings more than once in five minutes.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH_SIDES,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays between attempts: doubling from `first_s` to `cap_s`, each jittered into its upper half."""

    first_s: float = 0.1
    cap_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.cap_s:
            raise ValueError(f"first_s must be > 0 and <= cap_s, got {self.first_s} and {self.cap_s}")

    def delay_s(self, failures: int, rng: random.Random = _RNG) -> float:
        """Seconds to wait after `failures` attempts in a row that came to nothing (at least 1)."""
        doublings = min(failures - 1, 30)  # 2**30 times any sensible first_s is past any cap
        return min(self.cap_s, self.first_s * 2.0**doublings) * rng.uniform(0.5, 1.0)


Established = Callable[[], None]


async def stay_connected(
    target: str,
    converse: Callable[[grpc.aio.Channel, Established], Coroutine[Any, Any, None]],
    *,
    clock: Clock,
    name: str,
) -> None:
    """Hold one conversation after the other with the server at `target`, for ever; each on a channel of its own.

    Whatever ends a conversation, a defect in it included, leads to the next one: a node outlives its daemon. `converse`
    calls its second argument once it is connected; if that lasted longer than the longest delay, the backoff starts
    anew, and its loss is worth a line in the log.
    """
    failures, backoff = 0, Backoff()
    connected_s: list[float] = []
    while True:
        connected_s.clear()
        async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
            ending = await _ending(converse(channel, lambda: connected_s.append(clock.now_s())))
        if connected_s and clock.now_s() - connected_s[0] > backoff.cap_s:
            failures = 0
        failures += 1
        if isinstance(ending, BaseException):
            logger.error("%s: a defect ended the stream to %s", name, target, exc_info=ending)
        elif failures == 1:
            logger.warning("%s: not connected to %s (%s); will keep trying", name, target, ending)
        await clock.sleep(backoff.delay_s(failures))


async def _ending(conversation: Coroutine[Any, Any, None]) -> str | BaseException:
    """Why it ended: in words, or the defect of ours that ended it."""
    task = asyncio.create_task(conversation)
    try:
        await asyncio.wait({task})
    finally:
        await stop(task)
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    if error is None:
        return "the server ended the stream"
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    # A write on a call that has just ended.
    if isinstance(error, asyncio.InvalidStateError | grpc.aio.UsageError):
        return str(error)
    return error


async def first_of(*sides: Awaitable[None]) -> None:
    """Run the sides of a stream until one of them ends, stop the others, and raise what it raised."""
    tasks = [asyncio.ensure_future(side) for side in sides]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await stop(*tasks)
    for task in done:
        task.result()
