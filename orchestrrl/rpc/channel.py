"""Connect clients to the daemon, and reconnect with backoff after restarts of the daemon."""

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
MESSAGE_BYTES = 64 * 1024 * 1024  # limit for one message

# A dead connection is detected after KEEPALIVE_S plus the same time again. Reconnection is paced only by Backoff, so
# gRPC's own pacing (20 s to connect, minutes between attempts, shared by the whole process) is disabled.
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

# Server settings that such clients need: by default a server disconnects clients that ping more than once in five
# minutes.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH_SIDES,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delays between attempts to connect. They double from `first_s` to `cap_s`. Jitter shortens each delay by up
    to half."""

    first_s: float = 0.1
    cap_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.cap_s:
            raise ValueError(f"first_s must be > 0 and <= cap_s, got first_s {self.first_s} and cap_s {self.cap_s}")

    def delay_s(self, failures: int, rng: random.Random = _RNG) -> float:
        """Return the delay in seconds after `failures` (>= 1) consecutive failed attempts."""
        doublings = min(failures - 1, 30)  # 2**30 times any sensible first_s exceeds any cap
        return min(self.cap_s, self.first_s * 2.0**doublings) * rng.uniform(0.5, 1.0)


Established = Callable[[], None]


async def stay_connected(
    target: str,
    converse: Callable[[grpc.aio.Channel, Established], Coroutine[Any, Any, None]],
    *,
    clock: Clock,
    name: str,
) -> None:
    """Run `converse` with the server at `target` repeatedly until cancelled, each time on a new channel.

    `converse` is started again even if it ends with an unexpected exception, because a node must continue when its
    daemon restarts. `converse` must call its second argument once it is connected. If the connection lasted longer than
    the longest delay between attempts, the backoff is reset, and a warning about the lost connection is logged.
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
            logger.error("%s: unexpected exception in the stream to %s", name, target, exc_info=ending)
        elif failures == 1:
            logger.warning("%s: not connected to %s (%s); retrying", name, target, ending)
        await clock.sleep(backoff.delay_s(failures))


async def _ending(conversation: Coroutine[Any, Any, None]) -> str | BaseException:
    """Wait until the conversation ends. Return the reason for the end as a text, or the exception if it is
    unexpected."""
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
    # A write to a call that has just ended.
    if isinstance(error, asyncio.InvalidStateError | grpc.aio.UsageError):
        return str(error)
    return error


async def first_of(*sides: Awaitable[None]) -> None:
    """Run `sides`, such as the receiver and the sender of one stream, until one of them ends. Then stop the others. If
    the side that ended first failed, its exception is raised."""
    tasks = [asyncio.ensure_future(side) for side in sides]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await stop(*tasks)
    for task in done:
        task.result()
