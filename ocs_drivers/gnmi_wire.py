"""What all gNMI switches have in common: options, the session, setters, notifications as events.

What a device keeps where is a subclass of `GnmiWire`, one for each data model.
"""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from enum import StrEnum

from ocs_drivers.base import DeviceClock, SwitchWire
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.gnmi_session import GnmiEndpoint, GnmiNews, GnmiSession, Tls
from ocs_drivers.model import Action, CrossConnect, SwitchCapabilities, SwitchEvent
from ocs_drivers.options import Address, DriverOptions, FilledText, Flag, Password, SecondsOr0, Text, split_address

DEFAULT_PORT = 9339


class GnmiModel(StrEnum):
    SONIC = "sonic"
    OPENCONFIG = "openconfig"


class GnmiOptions(DriverOptions):
    address: Address
    model: GnmiModel = GnmiModel.SONIC
    tls: Flag = True
    tls_ca_file: Text = ""
    tls_cert_file: Text = ""
    tls_key_file: Text = ""
    tls_server_name: Text = ""
    user: Text = ""
    password: Password = ""
    origin: Text = ""
    slot: FilledText = "1"
    reconfiguration_s: SecondsOr0 = 0.025

    def conflicts(self) -> list[str]:
        wrong = []
        if not self.tls:
            named = [(name, text) for name, text in dict(self).items() if name.startswith("tls_") and text]
            wrong += [f"{name}: has no meaning without tls, got {text!r}" for name, text in named]
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            wrong.append(f"tls_cert_file: must be set together with tls_key_file, got {self.tls_cert_file!r}")
        if self.password and not self.user:
            wrong.append("user: is missing, and a password is given")
        return wrong

    @property
    def endpoint(self) -> GnmiEndpoint:
        tls = Tls(self.tls_ca_file, self.tls_cert_file, self.tls_key_file, self.tls_server_name)
        host, port = split_address(self.address, DEFAULT_PORT)
        return GnmiEndpoint(host, port, self.user, self.password, tls if self.tls else None)


class GnmiWire(SwitchWire):
    """The `base.SwitchWire` of one switch."""

    capabilities = SwitchCapabilities(bulk=True, tuned_state=True, events=True)

    def __init__(self, options: GnmiOptions, clock: DeviceClock) -> None:
        self._options = options
        self._origin = options.origin
        self._clock = clock
        self._session = GnmiSession(options.endpoint)

    @abstractmethod
    def begin(self, models: Mapping[str, str]) -> None:
        """Begin a session with a device that supports these models, given with their versions."""

    @abstractmethod
    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None: ...

    @abstractmethod
    def news(self) -> AsyncGenerator[GnmiNews, None]:
        """What changes from now on."""

    async def open(self) -> None:
        self._session = GnmiSession(self._options.endpoint)
        try:
            self.begin(await self._session.open())
        except DriverPermanent:
            await self._session.close()
            raise

    async def close(self) -> None:
        await self._session.close()

    async def add(self, pairs: Sequence[CrossConnect]) -> None:
        await self._set(Action.ADD, pairs)

    async def remove(self, pairs: Sequence[CrossConnect]) -> None:
        await self._set(Action.REMOVE, pairs)

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

    async def _set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        if not pairs:
            raise ValueError("a setter with an empty list: on some devices that means every circuit")
        await self.set(action, pairs)
