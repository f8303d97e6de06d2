"""Build route drivers on top of a product's `base.RouterWire`, and construct drivers by name. The drivers serialise
writers, limit the duration of calls, and verify changes by reading the routes.

An entry point of the group `orchestrrl.route_drivers`, built-in or third-party, names a factory `(router, *, clock,
**options) -> RouterDriver`, usually the driver's class. The factory's other keyword-only parameters are the options
that users may set.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Annotated, Any, TypeVar

from ocs_drivers.driver import take_turn, within
from ocs_drivers.errors import InvalidOptions
from ocs_drivers.options import CheckedOptions, FromOptions, is_number, must_be
from ocs_drivers.registry import make_from_group
from orchestrrl.core.clock import Clock, WallClock
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, ProblemFaults, Retryable
from orchestrrl.fabric.route_drivers.base import (
    AppliedRoutes,
    RouterCapabilities,
    RouteReading,
    RouterWire,
)
from planner.fabric.route_plan import NextHop, RouteChange, RouteTable

ENTRY_POINT_GROUP = "orchestrrl.route_drivers"
T = TypeVar("T")

RETRY_S = 1.0
LOCK_S = 10.0  # limit on waiting for another writer
INSTALL_S = 1.0  # until a router forwards by an accepted change
POLL_S = 0.02
# The first probe may be lost while a link comes up, and a kernel repeats it only after a second.
PROBE_S = 0.1
# If the router reports changes, polling only covers lost reports.
POLL_WITH_EVENTS_S = 0.2


def are_words(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) and word for word in value)


def _is_limit(value: Any) -> bool:
    return is_number(value) and 0 < value < 3600


class RouterOptions(CheckedOptions):
    """The options that every route driver accepts."""

    command_timeout_s: Annotated[float, must_be("a number within 0..3600", _is_limit)] = 5.0


class CommandOptions(RouterOptions):
    """The options of every driver that runs commands. `prefix` contains the arguments to put before each command."""

    prefix: Annotated[tuple[str, ...], must_be("a list of words such as [ssh, tor3]", are_words)] = ()


class RouterDriver(FromOptions):
    """The driver of one router. Construction opens no connection. It raises ProblemFaults with every fault if options
    are invalid. Calls may be concurrent: writers are serialised, and every command and wait is bounded in time. Methods
    that read raise Retryable if the router is unreachable."""

    def __init__(self, router: str, *, clock: Clock | None = None, **given: Any) -> None:
        try:
            options = self._options_type.read(given)
        except InvalidOptions as error:
            raise ProblemFaults(error.faults) from None
        self.router = router  # its name in errors and journals
        self._clock = clock or WallClock()
        self._wire: RouterWire = self._make_wire(options, self._clock)
        self._command_s: float = options.command_timeout_s  # limit per command
        self._writer = asyncio.Lock()

    async def capabilities(self) -> RouterCapabilities:
        return self._wire.capabilities

    async def read(self) -> RouteTable:
        """Return the current routes that the driver owns."""
        return (await self._read_routes()).table

    async def apply(self, changes: Sequence[RouteChange]) -> AppliedRoutes:
        """Send the changes that are not in effect yet, then read the routes, and return which changes are in effect.
        While a route is replaced, its prefix always has a route.

        Raises Permanent, before anything is sent, if a route exceeds the router's limits, a prefix is changed twice, or
        a prefix to change has a foreign route. Raises Retryable if the router is unreachable, and OutcomeUnknown if the
        router cannot be read after the changes were sent.
        """
        self._check(changes)
        async with self._writing():
            before = await self._read_routes()
            todo = [change for change in changes if before.table.get(change.prefix) != change.route]
            taken = [change for change in todo if change.prefix in before.foreign]
            if taken:
                raise Permanent(
                    f"router {self.router}: cannot change routes, because foreign routes exist for"
                    f" {', '.join(sorted(c.prefix for c in taken))}"
                )
            if not todo and before.idle.isdisjoint(change.prefix for change in changes):
                return AppliedRoutes(tuple(changes), (), 0)
            why = "the router does not forward by it"
            if todo:
                try:
                    await self._command("changing routes", self._wire.send(todo, before.table), OutcomeUnknown)
                except (Permanent, OutcomeUnknown) as error:  # the router's state decides
                    why = str(error)
            missing = await self._missing(changes, why)
            lacking = {change.prefix for change in missing}  # `_check` rejects two changes of one prefix
            done = tuple(change for change in changes if change.prefix not in lacking)
            return AppliedRoutes(done, missing, len(todo), why if missing else "")

    async def links(self) -> Mapping[str, bool]:
        """Return a mapping from each interface of the router to whether the interface is up and has a signal."""
        return await self._command("reading links", self._wire.read_links())

    async def wait_up(self, interfaces: Collection[str], limit_s: float) -> frozenset[str]:
        """Wait until all of these interfaces are up, for at most `limit_s` seconds. Return the interfaces that are down
        or that the router does not have. The result is empty if all are up."""
        until_s = self._clock.now_s() + limit_s
        pause_s = POLL_WITH_EVENTS_S if self._wire.capabilities.link_events else POLL_S
        async with self._link_changes() as changed:
            while True:
                changed.clear()
                links = await self.links()
                down = frozenset(interface for interface in interfaces if not links.get(interface))
                left_s = until_s - self._clock.now_s()
                if not down or left_s <= 0:
                    return down
                with suppress(TimeoutError):
                    await within(self._clock, min(pause_s, left_s), changed.wait())

    async def find(self, hops: Collection[NextHop], limit_s: float) -> frozenset[NextHop]:
        """Clear the neighbour entries on the interfaces of these next hops, and resolve their gateways again. Return
        the next hops whose gateway answers within `limit_s` seconds. Later packets to these next hops need no address
        resolution."""
        wanted = frozenset(hops)
        if not wanted:
            return wanted
        until_s = self._clock.now_s() + limit_s
        probe_s = self._clock.now_s()
        found: frozenset[NextHop] = frozenset()
        while True:
            if self._clock.now_s() >= probe_s:
                silent = {hop.interface for hop in wanted - found}
                again = frozenset(hop for hop in wanted if hop.interface in silent)
                await self._command("probing neighbours", self._wire.probe_neighbours(again))
                probe_s = self._clock.now_s() + PROBE_S
            found = await self._command("reading neighbours", self._wire.found(wanted))
            left_s = until_s - self._clock.now_s()
            if found == wanted or left_s <= 0:
                return found
            await self._clock.sleep(min(POLL_S, left_s))

    async def close(self) -> None:
        await self._wire.close()

    def _check(self, changes: Sequence[RouteChange]) -> None:
        """Raise Permanent with every fault if changes exceed the router's limits or a prefix is changed twice."""
        can = self._wire.capabilities
        prefixes = [change.prefix for change in changes]
        wrong = [f"{prefix} is changed twice" for prefix in sorted(set(prefixes)) if prefixes.count(prefix) > 1]
        for route in (change.route for change in changes if change.route):
            if (hops := len(route.next_hops)) > can.max_next_hops:
                wrong.append(f"{route.prefix}: next hops must be <= {can.max_next_hops}, got {hops}")
            if (largest := max(hop.weight for hop in route.next_hops)) > can.max_weight:
                wrong.append(f"{route.prefix}: weights must be <= {can.max_weight}, got {largest}")
        if wrong:
            raise Permanent(f"router {self.router}: cannot change routes: {'; '.join(wrong)}")

    async def _read_routes(self) -> RouteReading:
        return await self._command("reading routes", self._wire.read_routes())

    async def _missing(self, changes: Sequence[RouteChange], why: str) -> tuple[RouteChange, ...]:
        """Wait until the changes are in effect, but no longer than the router may need to install them. Return the
        changes that are not in effect by then. Raises OutcomeUnknown, with `why` in its message, if the router cannot
        be read."""
        until_s = self._clock.now_s() + (INSTALL_S if self._wire.capabilities.installs_later else 0.0)
        while True:
            try:
                now = await self._read_routes()
            except OrchestrRLError as error:
                raise OutcomeUnknown(
                    f"routes were sent ({why}), but the router could not be read afterwards: {error}"
                ) from error
            missing = tuple(
                change
                for change in changes
                if now.table.get(change.prefix) != change.route or change.prefix in now.idle
            )
            if not missing or self._clock.now_s() >= until_s:
                return missing
            await self._clock.sleep(POLL_S)

    async def _command(self, name: str, verb: Awaitable[T], late: type[OutcomeUnknown] | None = None) -> T:
        """Await `verb`, a call to the wire, and return its result. If the call takes longer than the limit, raise the
        error `late` or, if `late` is None, Retryable. The messages of errors begin with the router's name and the
        command's `name`."""
        try:
            return await within(self._clock, self._command_s, verb)
        except TimeoutError as error:
            text = f"router {self.router}: {name} failed: {error}"
            raise (late(text) if late else Retryable(text, RETRY_S)) from None
        except Retryable as error:
            raise Retryable(f"router {self.router}: {name} failed: {error}", error.after_s) from error
        except (Permanent, OutcomeUnknown) as error:
            raise type(error)(f"router {self.router}: {name} failed: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise Permanent(f"router {self.router}: {name} failed, as the response is malformed: {error!r}") from error

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[None]:
        try:
            await take_turn(self._clock, self._writer, LOCK_S)
        except TimeoutError:
            wrong = f"{self.router}: another change is under way, waited {LOCK_S:g} s"
            raise Retryable(wrong, RETRY_S) from None
        try:
            yield
        finally:
            self._writer.release()

    @asynccontextmanager
    async def _link_changes(self) -> AsyncIterator[asyncio.Event]:
        """Provide an event that is set when the router reports a change of an interface. It is never set if the router
        does not report changes."""
        changed = asyncio.Event()
        if not self._wire.capabilities.link_events:
            yield changed
            return

        async def listen() -> None:
            async with aclosing(self._wire.link_events()) as events:
                async for _ in events:
                    changed.set()

        listening = asyncio.ensure_future(listen())
        try:
            yield changed
        finally:
            listening.cancel()
            # A failed listener only delays the result, since the links are polled as well.
            await asyncio.gather(listening, return_exceptions=True)


def make_driver(
    name: str, router: str, options: Mapping[str, Any] | None = None, clock: Clock | None = None
) -> RouterDriver:
    """Return a driver of type `name` for the router named `router`. No connection is opened.

    Raises ProblemFaults with every fault if the driver is unknown (the error lists the known drivers), options are
    unknown or missing, or values are invalid.
    """
    try:
        driver: RouterDriver = make_from_group(ENTRY_POINT_GROUP, name, router, options or {}, clock or WallClock())
    except InvalidOptions as error:
        raise ProblemFaults(error.faults) from error
    return driver
