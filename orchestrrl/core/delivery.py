"""Deliver orders to nodes. Each order takes effect at most once and has one result, even if messages are lost,
repeated, delayed or reordered.

The sender keeps an order until its first result arrives, and sends it again when its destination attaches again. The
receiver carries out an order only once, and responds to later deliveries of the same order id with the stored result.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from orchestrrl.core.clock import Clock, stop
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, ProblemFaults, few

logger = logging.getLogger(__name__)

REATTACH_S = 1.0  # expected time until a detached destination attaches again
FAULTS_TOLD = 20  # maximum number of faults reported for a malformed order


class DatedOrder(Protocol):
    """The fields of an order that this module reads. An order whose `valid_until_s` is None does not expire."""

    @property
    def id(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def valid_until_s(self) -> float | None: ...


Destination = TypeVar("Destination")
Item = TypeVar("Item")
Given = TypeVar("Given", bound=DatedOrder)
Result = TypeVar("Result")


class OrderStream(Generic[Item]):
    """The stream of orders to an attached destination. It ends when the destination detaches or attaches again."""

    def __init__(self, waiting: Iterable[Item] = ()) -> None:
        self._waiting = deque(waiting)
        self._changed = asyncio.Event()
        self._changed.set()
        self.ended = False

    def put(self, order: Item) -> None:
        self._waiting.append(order)
        self._changed.set()

    def end(self) -> None:
        """End the stream. Orders that are still queued are not sent."""
        self.ended = True
        self._changed.set()

    async def orders(self) -> AsyncIterator[Item]:
        """Yield each order as it arrives, until the stream ends."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting and not self.ended:
                yield self._waiting.popleft()
            if self.ended:
                return


class Outbox(Generic[Item]):
    """A queue of items to be written to a stream. Items that could not be written are kept for the next stream. If
    there are more than `most` items, the oldest are dropped."""

    def __init__(self, most: int | None = None) -> None:
        self.items: deque[Item] = deque(maxlen=most)
        self._filled = asyncio.Event()

    def put(self, item: Item) -> None:
        self.items.append(item)
        self._filled.set()

    async def write_all(self, write: Callable[[Item], Awaitable[None]]) -> None:
        """Pass each item to `write` as it arrives, until cancelled. An item is removed only after it was written."""
        while True:
            while self.items:
                item = self.items[0]
                await write(item)
                if self.items and self.items[0] is item:  # it may have been dropped or replaced meanwhile
                    self.items.popleft()
            self._filled.clear()
            await self._filled.wait()


@dataclass(slots=True, eq=False)
class OpenOrder(Generic[Destination, Given, Result]):
    """An order whose result is not known yet. The order has no further effect after the time `over_s`."""

    destination: Destination
    order: Given
    over_s: float
    result: "asyncio.Future[Result] | None"  # None: sent by an earlier daemon, and not awaited here
    sends: int = 0  # 0: it certainly had no effect

    @property
    def is_awaited(self) -> bool:
        return self.result is not None and not self.result.done()


class OpenOrders(Generic[Destination, Given, Result]):
    """The orders that have no result yet, indexed by destination and order id."""

    def __init__(self) -> None:
        self._to: dict[Destination, dict[str, OpenOrder[Destination, Given, Result]]] = {}

    def __iter__(self) -> Iterator[OpenOrder[Destination, Given, Result]]:
        return (opened for there in tuple(self._to.values()) for opened in tuple(there.values()))

    def to(self, destination: Destination) -> tuple[OpenOrder[Destination, Given, Result], ...]:
        """Return the open orders to a destination, in order of creation. The caller sends them again when the
        destination attaches again."""
        return tuple(self._to.get(destination, {}).values())

    def find(self, destination: Destination, id: str) -> OpenOrder[Destination, Given, Result] | None:
        return self._to.get(destination, {}).get(id)

    def add(self, opened: OpenOrder[Destination, Given, Result]) -> None:
        self._to.setdefault(opened.destination, {})[opened.order.id] = opened

    def close(self, opened: OpenOrder[Destination, Given, Result], result: Result | None = None) -> None:
        """Close an order with its first result. Later results are ignored. If the order is withdrawn, `result` is None
        and the order's future is cancelled."""
        there = self._to.get(opened.destination, {})
        if there.pop(opened.order.id, None) is None:
            return
        if not there:
            del self._to[opened.destination]
        if opened.result is None or opened.result.done():
            return
        if result is None:
            opened.result.cancel()
        else:
            opened.result.set_result(result)


class NotDone(StrEnum):
    """The reason why an order was not completed."""

    REFUSED = "refused"  # nothing was started
    FAILED = "failed"
    UNKNOWN = "unknown"  # it may have had an effect


class ReceivedOrders(Generic[Given, Result]):
    """Carries out each order only once, and returns the same result on every delivery of the same order id.

    A result is kept at least until its order has expired. A late repetition is therefore answered with the stored
    result or refused as expired. While `capacity` unexpired orders are stored, new orders that have an expiry are
    refused. Orders of a generation older than the newest received generation are refused, so that a replaced daemon has
    no control. `not_done` constructs the result of an order that was refused or raised an error, from the order, the
    reason, a message and the order's time of arrival.
    """

    def __init__(
        self,
        perform: Callable[[Given], Awaitable[Result]],
        not_done: Callable[[Given, NotDone, str, float], Result],
        clock: Clock,
        capacity: int,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self._perform = perform
        self._not_done = not_done
        self._clock = clock
        self._capacity = capacity
        self._newest = 0  # generation
        self._received: dict[
            str, tuple[asyncio.Task[Result], float | None]
        ] = {}  # with its expiry, in order of arrival

    def __len__(self) -> int:
        return len(self._received)

    async def result(self, order: Given) -> Result:
        """Return the result of an order. If the order was received before, return its stored result, or wait for the
        result if the order is still being carried out. Otherwise, refuse the order or call `perform`."""
        now_s = self._clock.now_s()
        if order.id not in self._received:
            if refusal := self._refusal(order, now_s):
                return self._not_done(order, NotDone.REFUSED, refusal, now_s)
            self._received[order.id] = asyncio.create_task(self._carry_out(order)), order.valid_until_s
        task, _ = self._received[order.id]
        await asyncio.wait({task})
        if task.cancelled():
            return self._not_done(order, NotDone.UNKNOWN, "the process was shutting down", now_s)
        return task.result()

    async def close(self) -> None:
        """Cancel all orders that are being carried out."""
        await stop(*(task for task, _ in self._received.values()))

    def _refusal(self, order: Given, now_s: float) -> str:
        """Return the reason why the order must be refused, or an empty string if it may be carried out."""
        newest = self._newest = max(self._newest, order.generation)
        if order.generation < newest:
            return f"generation {order.generation} is superseded by generation {newest}"
        if order.valid_until_s is not None and now_s > order.valid_until_s:
            return f"expired {now_s - order.valid_until_s:.3g} s ago" if order.valid_until_s else "has no expiry"
        self._make_room(now_s)
        if order.valid_until_s is not None and len(self) >= self._capacity:
            return f"{len(self)} unexpired orders are stored, the limit is {self._capacity}"
        return ""

    def _make_room(self, now_s: float) -> None:
        """Drop orders that are finished and expired, oldest first, until there is room for one more order."""
        if len(self) < self._capacity:
            return
        for id, (task, valid_until_s) in list(self._received.items()):
            if task.done() and (valid_until_s is None or valid_until_s < now_s):
                del self._received[id]
                if len(self) < self._capacity:
                    return

    async def _carry_out(self, order: Given) -> Result:
        began_s = self._clock.now_s()
        try:
            return await self._perform(order)
        except ProblemFaults as error:
            return self._not_done(order, NotDone.FAILED, few(error.faults, FAULTS_TOLD), began_s)
        except OutcomeUnknown as error:
            return self._not_done(order, NotDone.UNKNOWN, str(error), began_s)
        except OrchestrRLError as error:
            return self._not_done(order, NotDone.FAILED, str(error), began_s)
        except Exception as error:
            logger.error("order %s failed with an unexpected exception", order.id, exc_info=error)
            return self._not_done(order, NotDone.UNKNOWN, f"unexpected exception: {error!r}", began_s)
