"""Implement the parts that the drivers of all TL1 switches share: options, sessions, login, reports, and bulk commands
that are split into lines.

For each vendor, a separate file contains a subclass of `Tl1Wire` with the vendor's commands, and documents the sources
and assumptions.
"""

import asyncio
import re
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, ClassVar

from ocs_drivers.base import DeviceClock, SwitchWire
from ocs_drivers.batches import fitting
from ocs_drivers.errors import DriverOutcomeUnknown, DriverRetryable
from ocs_drivers.model import (
    BootBehaviour,
    Connectivity,
    CrossConnect,
    EventKind,
    SwitchCapabilities,
    SwitchEvent,
    SwitchFacts,
)
from ocs_drivers.options import (
    Address,
    DriverOptions,
    FilledText,
    Flag,
    Password,
    SecondsOr0,
    Text,
    must_be,
    split_address,
    whole,
)
from ocs_drivers.tl1_framing import Tl1Message, quote
from ocs_drivers.tl1_session import Tl1Denied, Tl1Session, ctags

AGENT_PORT = 3083  # of Calient: telnet, with a prompt
AGENT_PROMPT = "agent>"
# A device that allows few sessions may still count a broken session.
LOGIN_ATTEMPTS = 6
LOGIN_PAUSE_S = 0.05

_ALREADY_IN = re.compile(r"already\s+(?:\w+\s+)?logged|already\s+active|already\s+exists", re.IGNORECASE)
_NO_PLACE = re.compile(r"sessions?\b|too many|maximum number", re.IGNORECASE)


class DialectName(StrEnum):
    POLATIS = "polatis"
    CALIENT = "calient"
    GLIMMERGLASS = "glimmerglass"


class Tl1Messages(StrEnum):
    """The handling of autonomous messages, which the device sends without a command. They do not interfere with
    replies, whatever the setting."""

    AS_IS = "as_is"  # keep the device's setting, and discard the messages
    SILENCE = "silence"  # request that the device sends none
    WATCH = "watch"  # request that the device sends them, and report them as events


def _is_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)


class Tl1Options(DriverOptions):
    address: Address
    user: FilledText = "root"
    password: Password = "root"
    dialect: DialectName = DialectName.POLATIS
    group: Text = ""
    port_names: Annotated[tuple[str, ...], must_be("a list of names", _is_names)] = ()
    port_power: Flag = False
    messages: Tl1Messages = Tl1Messages.AS_IS
    prompt: Text = ""
    line_limit: Annotated[int, whole(0)] = 0
    boot: BootBehaviour = BootBehaviour.UNKNOWN
    reconfiguration_s: SecondsOr0 | None = None

    def conflicts(self) -> list[str]:
        wrong = []
        if self.dialect != DialectName.CALIENT:
            of_calient = {"group": self.group, "port_names": list(self.port_names)}
            wrong += [
                f"{name}: must be empty unless dialect is calient, got {value!r}"
                for name, value in of_calient.items()
                if value
            ]
        elif len(set(self.port_names)) < len(self.port_names):
            wrong.append(f"port_names: must not name a port twice, got {list(self.port_names)}")
        if self.port_power is True and self.dialect != DialectName.POLATIS:
            wrong.append("port_power: must be false unless dialect is polatis, got True")
        return wrong


class Tl1Wire(SwitchWire):
    """Base class of the wires for the TL1 dialects. A wire has at most one session with its device at a time."""

    capabilities: SwitchCapabilities  # class attribute: of the dialect; instance attribute: of the device
    default_port: ClassVar[int]
    default_reconfiguration_s: ClassVar[float]

    def __init__(self, options: Tl1Options, clock: DeviceClock) -> None:
        self.capabilities = replace(self.capabilities, events=options.messages is Tl1Messages.WATCH)
        self._options = options
        self.host, self.port = split_address(options.address, self.default_port)
        is_agent = (options.dialect, self.port) == (DialectName.CALIENT, AGENT_PORT)
        self.prompt = options.prompt or (AGENT_PROMPT if is_agent else "")  # awaited before the login
        self._clock = clock
        self._ctags = ctags()
        self._open_session: Tl1Session | None = None
        self._listeners: list[asyncio.Queue[SwitchEvent]] = []
        self.boot = options.boot
        self.ingress = self.egress = range(0)  # known once attached

    @abstractmethod
    async def attach(self) -> None:
        """Read the data that the other operations need, including the ranges of ports."""

    async def let_report(self, is_wanted: bool) -> None:
        """Request that the device sends reports or, if `is_wanted` is False, that it stops sending them."""

    @abstractmethod
    def meaning(self, verb: str, line: str) -> tuple[EventKind, int | None, CrossConnect | None]:
        """Return the kind of event that one line of a report describes, with the port and the cross-connect that it
        concerns. Either is None if the line does not name it. `verb` is the report's verb, such as `REPT ALM CRS`."""

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
                        "the device allows no more sessions: close an unused session",
                        command=refusal.command,
                        answer=refusal.answer,
                    ) from refusal
        await self.attach()
        if self._options.messages is not Tl1Messages.AS_IS:
            await self.let_report(self._options.messages is Tl1Messages.WATCH)

    async def close(self) -> None:
        session, self._open_session = self._open_session, None
        if session is not None:
            if not session.lost:
                self._on_loss()
            await session.close(f"CANC-USER::{quote(self._options.user)}:<ctag>:;")

    async def events(self) -> AsyncGenerator[SwitchEvent, None]:
        queue: asyncio.Queue[SwitchEvent] = asyncio.Queue()
        self._listeners.append(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.remove(queue)

    async def ask(self, command: str) -> list[str]:
        """Send a query and return the lines of its answer."""
        return (await self._session.execute(command)).lines

    async def order(self, command: str) -> None:
        await self._session.execute(command, is_setter=True)

    async def order_in_lines(
        self, pairs: Sequence[CrossConnect], form: str, ingress_offset: int = 0, egress_offset: int = 0
    ) -> None:
        """Send a bulk command, split into as many lines as the option `line_limit` requires. In `form`, `{0}` is
        replaced by the ingress ports and `{1}` by the egress ports. The offsets are added to the port numbers."""

        def line(pairs: Sequence[CrossConnect]) -> str:
            ingress = port_list([pair.ingress_port + ingress_offset for pair in pairs])
            return form.format(ingress, port_list([pair.egress_port + egress_offset for pair in pairs]))

        lines = [text for _, text in fitting(pairs, line, self._options.line_limit or None)]
        for index, text in enumerate(lines):
            try:
                await self.order(text)
            except DriverRetryable as error:
                if not index:
                    raise
                raise partly_done(
                    f"{index} of {len(lines)} command lines were carried out before the error", error
                ) from error

    def facts(
        self, *, vendor: str, model: str, serial: str, software: str, connectivity: Connectivity | None = None
    ) -> SwitchFacts:
        reconfiguration_s = self._options.reconfiguration_s
        return SwitchFacts(
            vendor=vendor,
            model=model or f"{len(self.ingress)}x{len(self.egress)}",
            serial=serial,
            software=software,
            connectivity=connectivity or Connectivity.INGRESS_EGRESS,
            ingress_ports=self.ingress,
            egress_ports=self.egress,
            reconfiguration_s=self.default_reconfiguration_s if reconfiguration_s is None else reconfiguration_s,
            boot=self.boot,
        )

    async def _log_in(self) -> None:
        session = Tl1Session(self._ctags, self._on_report, self._on_loss)
        await session.open(self.host, self.port)
        self._open_session = session
        if self.prompt:
            await session.prompt(self.prompt)
        user, password = quote(self._options.user), quote(self._options.password)
        try:
            await session.execute(f"ACT-USER::{user}:<ctag>::{password};", shown=f"ACT-USER::{user}")
        except Tl1Denied as denial:
            if _ALREADY_IN.search(denial.reply.summary):
                return
            if _NO_PLACE.search(denial.reply.summary):
                raise _NoPlace(denial.reply, denial.command) from denial
            raise

    @property
    def _session(self) -> Tl1Session:
        if self._open_session is None:
            raise DriverRetryable("no session with the device is open", after_s=0.0)
        return self._open_session

    def _on_report(self, report: Tl1Message) -> None:
        for line in report.lines or [report.text]:
            kind, port, pair = self.meaning(report.head, line)
            if report.kind != "A" and kind is not EventKind.PORT:
                kind = EventKind.ALARM
            self._publish(kind, " ".join(filter(None, (report.head, line))), port, pair)

    def _on_loss(self) -> None:
        self._publish(EventKind.ALARM, "the session with the device ended: events are lost until its next use")

    def _publish(self, kind: EventKind, text: str, port: int | None = None, pair: CrossConnect | None = None) -> None:
        event = SwitchEvent(self._clock.now_s(), kind, text, port, pair)
        for queue in self._listeners:
            queue.put_nowait(event)


class _NoPlace(Tl1Denied):
    """Raised when a login is refused because the device allows no further session."""


def partly_done(what: str, error: DriverRetryable) -> DriverOutcomeUnknown:
    """Return the error to raise if part of a setter fails with `error` after earlier parts took effect. It is
    DriverOutcomeUnknown, because the setter was carried out in part. `what` describes the parts that took effect."""
    return DriverOutcomeUnknown(f"{what}: {error.message}", command=error.command, answer=error.answer)


def port_list(ports: Sequence[int]) -> str:
    """Format ports as a list such as `1&2&3`. Raises ValueError if there are none, because some devices interpret an
    empty list as all ports."""
    if not ports:
        raise ValueError("the list of circuits must not be empty: some devices interpret an empty list as all circuits")
    return "&".join(map(str, ports))
