"""The driver `gnmi`: switches that are configured over gNMI, by the tables of SONiC-OCS or by OpenConfig's proposal.

What either model means, and which facts that relies on, is in gnmi_sonic.py and gnmi_openconfig.py; the connection is
gnmi_session.py. All removals of a commit are one SetRequest, and all additions another. A device that refuses one may
have carried out a part, so it is read back either way.
"""

from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from enum import StrEnum
from typing import Protocol, TypeVar

from ocs_drivers.base import DeviceClock, SystemClock
from ocs_drivers.driver import SwitchDriver
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.gnmi_openconfig import OpenConfig
from ocs_drivers.gnmi_session import GnmiEndpoint, GnmiNews, GnmiSession, Tls
from ocs_drivers.gnmi_sonic import Sonic
from ocs_drivers.model import (
    Action,
    CrossConnect,
    DeviceCircuit,
    PortState,
    SwitchCapabilities,
    SwitchEvent,
    SwitchFacts,
)
from ocs_drivers.options import DriverOptions

T = TypeVar("T")

DEFAULT_PORT = 9339


class GnmiModel(StrEnum):
    SONIC = "sonic"
    OPENCONFIG = "openconfig"


class DataModel(Protocol):
    """What a device keeps where. ValueError: what it answered makes no sense."""

    capabilities: SwitchCapabilities

    async def open(self, session: GnmiSession, models: Mapping[str, str]) -> None: ...

    async def read_facts(self, session: GnmiSession) -> SwitchFacts: ...

    async def read_ports(self, session: GnmiSession) -> Sequence[PortState]: ...

    async def read_circuits(self, session: GnmiSession) -> Sequence[DeviceCircuit]: ...

    async def set(self, session: GnmiSession, action: Action, pairs: Sequence[CrossConnect]) -> None: ...

    def watch(self, session: GnmiSession) -> AsyncGenerator[GnmiNews, None]: ...


class GnmiWire:
    """The `base.Wire` of one switch."""

    def __init__(self, endpoint: GnmiEndpoint, model: DataModel, clock: DeviceClock) -> None:
        self.capabilities = model.capabilities
        self._endpoint = endpoint
        self._model = model
        self._clock = clock
        self._session = GnmiSession(endpoint)

    async def open(self) -> None:
        self._session = GnmiSession(self._endpoint)
        try:
            await self._model.open(self._session, await self._session.open())
        except DriverPermanent:
            await self._session.close()
            raise

    async def close(self) -> None:
        await self._session.close()

    async def read_facts(self) -> SwitchFacts:
        return await _sense(self._model.read_facts(self._session))

    async def read_ports(self) -> Sequence[PortState]:
        return await _sense(self._model.read_ports(self._session))

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        return await _sense(self._model.read_circuits(self._session))

    async def add(self, pairs: Sequence[CrossConnect]) -> None:
        await self._set(Action.ADD, pairs)

    async def remove(self, pairs: Sequence[CrossConnect]) -> None:
        await self._set(Action.REMOVE, pairs)

    async def events(self) -> AsyncGenerator[SwitchEvent, None]:
        # A connection of its own: that of commands may be dropped at any time.
        session = GnmiSession(self._endpoint)
        try:
            await session.open()
            async with aclosing(self._model.watch(session)) as watched:
                async for news in watched:
                    yield SwitchEvent(self._clock.now_s(), news.kind, news.text, news.port, news.cross_connect)
        except ValueError as error:
            raise DriverPermanent(f"a notification makes no sense: {error}") from None
        finally:
            await session.close()

    async def _set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        if not pairs:
            raise ValueError("a setter with an empty list: on some devices that means every circuit")
        await _sense(self._model.set(self._session, action, pairs))


async def _sense(work: Awaitable[T]) -> T:
    try:
        return await work
    except ValueError as error:
        raise DriverPermanent(f"the answer makes no sense: {error}") from None


class GnmiSwitch(SwitchDriver):
    """The driver `gnmi`. `address` is `HOST` or `HOST:PORT`; `model` is sonic or openconfig.

    With `tls`, the device's certificate must be signed by `tls_ca_file` (by default, one of the system's authorities)
    and name the host, or `tls_server_name`; `tls_cert_file` and `tls_key_file` are ours. `user` and `password` go along
    as metadata. `origin` of paths: by default what the device announces (sonic), or none (openconfig); `slot` is the
    optical module that this switch is (openconfig).
    """

    def __init__(
        self,
        device: str,
        *,
        address: str,
        clock: DeviceClock | None = None,
        model: str = GnmiModel.SONIC,
        tls: bool = True,
        tls_ca_file: str = "",
        tls_cert_file: str = "",
        tls_key_file: str = "",
        tls_server_name: str = "",
        user: str = "",
        password: str = "",
        origin: str = "",
        slot: str = "1",
        reconfiguration_s: float = 0.025,
        command_timeout_s: float = 5.0,
        lock_timeout_s: float = 10.0,
        tune_timeout_s: float | None = None,
        link_timeout_s: float = 2.0,
    ) -> None:
        options = DriverOptions(device)
        host, port = options.address(address, DEFAULT_PORT)
        options.choice("model", model, GnmiModel)
        options.text("slot", slot)
        for name, text in (("user", user), ("password", password), ("origin", origin)):
            options.text(name, text, may_be_empty=True)
        files = {"ca_file": tls_ca_file, "cert_file": tls_cert_file, "key_file": tls_key_file}
        files["server_name"] = tls_server_name
        is_tls = options.flag("tls", tls)
        for name, text in files.items():
            if options.text(f"tls_{name}", text, may_be_empty=True) and text and not is_tls and tls is False:
                options.add(f"tls_{name}", "has no meaning without tls", text)
        if bool(tls_cert_file) != bool(tls_key_file):
            options.add("tls_cert_file", "must be set together with tls_key_file", tls_cert_file)
        if password and not user:
            options.faults.append("user: is missing, and a password is given")
        options.seconds("reconfiguration_s", reconfiguration_s, may_be_0=True)
        limits = options.limits(command_timeout_s, lock_timeout_s, tune_timeout_s, link_timeout_s)
        options.check()
        clock = clock or SystemClock()
        data_model: DataModel = (
            Sonic(origin, reconfiguration_s)
            if model == GnmiModel.SONIC
            else OpenConfig(origin, slot, reconfiguration_s)
        )
        endpoint = GnmiEndpoint(host, port, user, password, Tls(**files) if is_tls else None)
        super().__init__(device, GnmiWire(endpoint, data_model, clock), clock=clock, limits=limits)
