"""The driver `tl1`: optical circuit switches that speak TL1, in the dialects of three vendors.

What all have in common is here: sessions, login, reports. The verbs are those of a dialect, each in its own file:
tl1_polatis.py, tl1_calient.py, tl1_glimmerglass.py, which also say what of them is known and what is assumed.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from ocs_drivers.base import DeviceClock, SystemClock
from ocs_drivers.driver import SwitchDriver
from ocs_drivers.errors import DriverRetryable
from ocs_drivers.model import (
    BootBehaviour,
    CrossConnect,
    DeviceCircuit,
    EventKind,
    PortState,
    SwitchCapabilities,
    SwitchEvent,
    SwitchFacts,
)
from ocs_drivers.options import DriverOptions
from ocs_drivers.tl1_calient import Calient
from ocs_drivers.tl1_framing import Tl1Report, quote
from ocs_drivers.tl1_glimmerglass import Glimmerglass
from ocs_drivers.tl1_polatis import Polatis
from ocs_drivers.tl1_session import Tl1Denied, Tl1Session, ctags

AGENT_PORT = 3083  # of Calient: telnet, with a prompt
AGENT_PROMPT = "agent>"
# A session of ours that broke may count for a while on a device that allows few.
LOGIN_ATTEMPTS = 6
LOGIN_PAUSE_S = 0.05

_ALREADY_IN = re.compile(r"already\s+(?:\w+\s+)?logged|already\s+active|already\s+exists", re.IGNORECASE)
_NO_PLACE = re.compile(r"sessions?\b|too many|maximum number", re.IGNORECASE)


class DialectName(StrEnum):
    POLATIS = "polatis"
    CALIENT = "calient"
    GLIMMERGLASS = "glimmerglass"


class Tl1Messages(StrEnum):
    """What to do about autonomous messages. They never disturb a reply."""

    AS_IS = "as_is"  # leave the device's setting as it is, and drop them
    SILENCE = "silence"  # ask the device to send none
    WATCH = "watch"  # ask the device to send them, and report them as events


class Tl1Dialect(Protocol):
    """The verbs of one vendor. `session` is open and logged in."""

    capabilities: SwitchCapabilities

    async def attach(self, session: Tl1Session) -> None:
        """Read what must be known before any other verb."""
        ...

    async def let_report(self, session: Tl1Session, is_wanted: bool) -> None: ...

    async def read_facts(self, session: Tl1Session) -> SwitchFacts: ...

    async def read_ports(self, session: Tl1Session) -> Sequence[PortState]: ...

    async def read_circuits(self, session: Tl1Session) -> Sequence[DeviceCircuit]: ...

    async def add(self, session: Tl1Session, pairs: Sequence[CrossConnect]) -> None: ...

    async def remove(self, session: Tl1Session, pairs: Sequence[CrossConnect]) -> None: ...

    def meaning(self, verb: str, line: str) -> tuple[EventKind, int | None, CrossConnect | None]:
        """What one line of a report is about."""
        ...


@dataclass(frozen=True, slots=True)
class Tl1Access:
    """Where a device is and who asks."""

    host: str
    port: int
    user: str
    password: str
    prompt: str = ""  # to wait for before the login


class Tl1Wire:
    """The `base.Wire` of one device: a session at a time, and a dialect that lasts."""

    def __init__(self, access: Tl1Access, dialect: Tl1Dialect, messages: Tl1Messages, clock: DeviceClock) -> None:
        self.capabilities = replace(dialect.capabilities, events=messages is Tl1Messages.WATCH)
        self._access = access
        self._dialect = dialect
        self._messages = messages
        self._clock = clock
        self._ctags = ctags()
        self._session: Tl1Session | None = None
        self._listeners: list[asyncio.Queue[SwitchEvent]] = []

    async def open(self) -> None:
        for attempt in range(LOGIN_ATTEMPTS):
            if attempt:
                await self._clock.sleep(LOGIN_PAUSE_S * 2 ** (attempt - 1))
            try:
                await self._log_in()
                break
            except _NoPlace as refusal:
                await self.close()
                if attempt + 1 == LOGIN_ATTEMPTS:
                    raise DriverRetryable(
                        "the device has no session left", command=refusal.command, answer=refusal.answer
                    ) from refusal
        session = self._live()
        await self._dialect.attach(session)
        if self._messages is not Tl1Messages.AS_IS:
            await self._dialect.let_report(session, self._messages is Tl1Messages.WATCH)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            if not session.is_lost:
                self._on_loss()
            await session.close(f"CANC-USER::{quote(self._access.user)}:<ctag>:;")

    async def read_facts(self) -> SwitchFacts:
        return await self._dialect.read_facts(self._live())

    async def read_ports(self) -> Sequence[PortState]:
        return await self._dialect.read_ports(self._live())

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        return await self._dialect.read_circuits(self._live())

    async def add(self, pairs: Sequence[CrossConnect]) -> None:
        await self._dialect.add(self._live(), pairs)

    async def remove(self, pairs: Sequence[CrossConnect]) -> None:
        await self._dialect.remove(self._live(), pairs)

    async def events(self) -> AsyncGenerator[SwitchEvent, None]:
        queue: asyncio.Queue[SwitchEvent] = asyncio.Queue()
        self._listeners.append(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.remove(queue)

    async def _log_in(self) -> None:
        access = self._access
        session = await Tl1Session.connect(access.host, access.port, self._ctags, self._on_report, self._on_loss)
        self._session = session
        if access.prompt:
            await session.prompt(access.prompt)
        user, password = quote(access.user), quote(access.password)
        try:
            await session.execute(f"ACT-USER::{user}:<ctag>::{password};", shown=f"ACT-USER::{user}")
        except Tl1Denied as denial:
            if _ALREADY_IN.search(denial.reply.summary):
                return
            if _NO_PLACE.search(denial.reply.summary):
                raise _NoPlace(denial.reply, denial.command) from denial
            raise

    def _live(self) -> Tl1Session:
        if self._session is None:
            raise DriverRetryable("no session is open", after_s=0.0)
        return self._session

    def _on_report(self, report: Tl1Report) -> None:
        for line in report.lines or (report.text,):
            kind, port, pair = self._dialect.meaning(report.verb, line)
            if report.severity != "A" and kind is not EventKind.PORT:
                kind = EventKind.ALARM
            self._publish(kind, " ".join(filter(None, (report.verb, line))), port, pair)

    def _on_loss(self) -> None:
        self._publish(EventKind.ALARM, "the session with the device ended: events are lost until it is used again")

    def _publish(self, kind: EventKind, text: str, port: int | None = None, pair: CrossConnect | None = None) -> None:
        event = SwitchEvent(self._clock.now_s(), kind, text, port, pair)
        for queue in self._listeners:
            queue.put_nowait(event)


class _NoPlace(Tl1Denied):
    """Login refused because of other sessions."""


class Tl1Switch(SwitchDriver):
    """The driver `tl1`. `dialect` is `polatis`, `calient` or `glimmerglass`; where the address has no port, it is 3082,
    3082 and 10034. Calient's 3083 shows the prompt `agent>`, which is then awaited before the login.

    `group` (Calient) is what our connections are filed under. `port_names` (Calient) pins which port is 1, 2, ...; left
    out, the device's own list in its natural order. `boot` and `reconfiguration_s` state what the device does not tell.
    `port_power` (Polatis) says that it has power meters. `line_limit` cuts bulk commands into lines of at most so many
    characters, for devices that take no longer ones. `messages`: see `Tl1Messages`.
    """

    def __init__(
        self,
        device: str,
        *,
        address: str,
        user: str = "root",
        password: str = "root",
        dialect: str = DialectName.POLATIS,
        group: str = "",
        port_names: Sequence[str] = (),
        port_power: bool = False,
        messages: str = Tl1Messages.AS_IS,
        prompt: str = "",
        line_limit: int = 0,
        boot: str = BootBehaviour.UNKNOWN,
        reconfiguration_s: float | None = None,
        clock: DeviceClock | None = None,
        command_timeout_s: float = 5.0,
        lock_timeout_s: float = 10.0,
        tune_timeout_s: float | None = None,
        link_timeout_s: float = 2.0,
    ) -> None:
        options = DriverOptions(device)
        is_known = options.choice("dialect", dialect, DialectName)
        family = DIALECTS[DialectName(dialect) if is_known else DialectName.POLATIS]
        host, port = options.address(address, family.port)
        options.text("user", user)
        options.text("password", password, may_be_empty=True)
        options.text("prompt", prompt, may_be_empty=True)
        options.choice("messages", messages, Tl1Messages)
        options.choice("boot", boot, BootBehaviour)
        options.whole("line_limit", line_limit, at_least=0)
        options.flag("port_power", port_power)
        if reconfiguration_s is not None:
            options.seconds("reconfiguration_s", reconfiguration_s, may_be_0=True)
        _check_calient(options, dialect, group, port_names)
        if port_power is True and dialect != DialectName.POLATIS:
            options.add("port_power", "is an option of dialect polatis, the others tell", port_power)
        limits = options.limits(command_timeout_s, lock_timeout_s, tune_timeout_s, link_timeout_s)
        options.check()
        clock = clock or SystemClock()
        if not prompt and dialect == DialectName.CALIENT and port == AGENT_PORT:
            prompt = AGENT_PROMPT
        stated = StatedPorts(
            BootBehaviour(boot),
            family.reconfiguration_s if reconfiguration_s is None else reconfiguration_s,
            group,
            tuple(port_names),
            port_power,
            line_limit,
        )
        access = Tl1Access(host, port, user, password, prompt)
        super().__init__(
            device, Tl1Wire(access, family.make(stated), Tl1Messages(messages), clock), clock=clock, limits=limits
        )


@dataclass(frozen=True, slots=True)
class StatedPorts:
    """What the user says of a device."""

    boot: BootBehaviour
    reconfiguration_s: float
    group: str
    port_names: tuple[str, ...]
    port_power: bool
    line_limit: int


@dataclass(frozen=True, slots=True)
class Tl1Family:
    port: int
    reconfiguration_s: float
    make: Callable[[StatedPorts], Tl1Dialect]


# Delays: of Calient and Polatis, the paper's table 2; of Glimmerglass unverified.
DIALECTS = {
    DialectName.POLATIS: Tl1Family(
        3082, 0.025, lambda said: Polatis(said.boot, said.reconfiguration_s, said.port_power, said.line_limit)
    ),
    DialectName.CALIENT: Tl1Family(
        3082, 0.010, lambda said: Calient(said.boot, said.reconfiguration_s, said.group, said.port_names)
    ),
    DialectName.GLIMMERGLASS: Tl1Family(
        10034, 0.020, lambda said: Glimmerglass(said.boot, said.reconfiguration_s, said.line_limit)
    ),
}


def _check_calient(options: DriverOptions, dialect: object, group: object, port_names: object) -> None:
    if dialect != DialectName.CALIENT:
        for name, value in (("group", group), ("port_names", port_names)):
            if value:
                options.add(name, "is an option of dialect calient", value)
        return
    options.text("group", group, may_be_empty=True)
    if not isinstance(port_names, list | tuple) or any(not isinstance(name, str) or not name for name in port_names):
        options.add("port_names", "must be a list of names", port_names)
    elif len(set(port_names)) < len(port_names):
        options.add("port_names", "must not name a port twice", list(port_names))
