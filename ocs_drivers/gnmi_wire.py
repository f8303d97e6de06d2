"""What all gNMI switches have in common: the session, setters, notifications as events.

What a device keeps where is a subclass of `GnmiWire`, one for each data model.
"""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from ocs_drivers.base import DeviceClock, SwitchWire
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.gnmi_session import GnmiNews, GnmiOptions, GnmiSession
from ocs_drivers.model import Action, CrossConnect, SwitchCapabilities, SwitchEvent


class GnmiWire(SwitchWire):
    """The `base.SwitchWire` of one switch."""

    capabilities = SwitchCapabilities(bulk=True, tuned_state=True, events=True)

    def __init__(self, options: GnmiOptions, clock: DeviceClock) -> None:
        self._options = options
        self._origin = options.origin
        self._clock = clock
        self._session = GnmiSession(options)

    @abstractmethod
    def begin(self, models: Mapping[str, str]) -> None:
        """Begin a session with a device that supports these models, given with their versions."""

    @abstractmethod
    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None: ...

    @abstractmethod
    def news(self) -> AsyncGenerator[GnmiNews, None]:
        """What changes from now on."""

    async def open(self) -> None:
        self._session = GnmiSession(self._options)
        try:
            self.begin(await self._session.open())
        except DriverPermanent:
            await self._session.close()
            raise

    async def close(self) -> None:
        await self._session.close()

    async def add(self, pairs: Sequence[CrossConnect]) -> None:
        await self.set(Action.ADD, pairs)

    async def remove(self, pairs: Sequence[CrossConnect]) -> None:
        await self.set(Action.REMOVE, pairs)

    async def events(self) -> AsyncGenerator[SwitchEvent, None]:
        # A connection of its own: that of commands may be dropped at any time.
        watcher = type(self)(self._options, self._clock)
        try:
            await watcher.open()
            async with aclosing(watcher.news()) as watched:
                async for news in watched:
                    yield SwitchEvent(self._clock.now_s(), news.kind, news.text, news.port, news.cross_connect)
        except ValueError as error:
            raise DriverPermanent(f"a notification makes no sense: {error}") from None
        finally:
            await watcher.close()
