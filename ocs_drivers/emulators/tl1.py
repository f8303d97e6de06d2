"""Implement the server of emulated TL1 switches, with the framing of its messages and its quirks.

tl1_devices.py and tl1_calient.py implement the vendors' commands. The emulators use no code of the driver, so that a
misunderstanding of the protocol in the driver is not repeated in the emulator.
"""

import asyncio
import itertools
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from ocs_drivers.base import DeviceClock
from ocs_drivers.emulators.base import ConnectionBroken, DevicePanel, EmulatedDevice, EmulatedTcpServer
from ocs_drivers.emulators.tl1_calient import CalientTl1Device
from ocs_drivers.emulators.tl1_devices import (
    GlimmerglassTl1Device,
    PolatisTl1Device,
    Tl1Command,
    Tl1Device,
    Tl1Refusal,
)
from ocs_drivers.model import SwitchEvent
from ocs_drivers.options import CheckedOptions, Flag, Text, must_be, whole

Count = Annotated[int, whole(0)]

_GARBAGE = (
    b'\xff\xfb\x01\xff\xfd\x03\x1b[62;1"p\x1b>\x1b[?4l\x1b[?5l\x1b[?7h\x1b[?8h\x1b[1;50r\x1b[50;1H\x1b[50;0H\x1b[4l'
)
_NOISE = (
    ("*^", "REPT ALM ENV", '"FAN-2:MN,FAN,NSA,11-22,02-30-00,,:\\"Fan speed low; tray 2\\""'),
    ("**", "REPT ALM EQPT", '"PSU-1:MJ,PWR,NSA,11-22,02-30-00,,:\\"Input lost\\""'),
    ("A", "REPT EVT SECU", '"NE:LOGIN,TC,02-30-00,,,,:\\"User oper; from 192.0.2.9\\""'),
)


class Tl1Quirks(CheckedOptions):
    """Configurable deviations of an emulated TL1 switch from the plain protocol."""

    user: Text = "root"
    password: Text = "root"
    reports_before: Count = 0  # irrelevant autonomous messages before every reply
    reports_between: Flag = False  # an autonomous message between any two parts of a reply
    lines_per_part: Count = 0  # maximum lines in a part of a reply; 0: unlimited
    part_mark: Annotated[str, must_be("> or <", lambda value: value in (">", "<"))] = ">"  # the mark that ends a part
    semicolons: Flag = False  # labels and comments hold `;` and quotes
    prompt: Text = ""  # shown on connect and after every reply, as on Calient's port 3083
    echo: Flag = False  # echoes its input
    garbage: Flag = False  # terminal sequences on connect
    acknowledge: Flag = False  # IP before every reply
    single_session: Flag = False  # refuses a second login
    logged_in_already: Flag = False  # refuses every login because the user is logged in
    newline: Text = "\r\n"
    line_limit: Count = 0  # refuses longer commands; 0: unlimited


class Tl1Emulator(EmulatedTcpServer):
    """A TL1 server that implements `base.Emulator`."""

    def __init__(self, device: EmulatedDevice, box: Tl1Device, quirks: Tl1Quirks) -> None:
        super().__init__()
        self.device = device
        self.box = box
        self.quirks = quirks
        self.commands: list[str] = []  # every command as received, queries included
        self.connections: set[_Connection] = set()
        self.tags = itertools.count(1)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, writer)
        self.connections.add(connection)
        try:
            await connection.run(reader)
        finally:
            self.connections.discard(connection)


class _Connection:
    """One client's connection."""

    def __init__(self, emulator: Tl1Emulator, writer: asyncio.StreamWriter) -> None:
        self._emulator = emulator
        self._quirks = emulator.quirks
        self._writer = writer
        self._commands: asyncio.Queue[str] = asyncio.Queue()
        self._session = emulator.device.session()
        self._input = ""
        self._wants_reports = emulator.box.reports_at_first
        self.is_logged_in = False

    def end(self) -> None:
        self._writer.transport.abort()

    async def run(self, reader: asyncio.StreamReader) -> None:
        events = self._emulator.device.listen()
        tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._report(events))]
        try:
            if self._quirks.garbage:
                self._writer.write(_GARBAGE)
            self._show_prompt()
            while data := await reader.read(1 << 16):
                self._receive(data.decode("latin-1"))
        finally:
            self.is_logged_in = False
            self._emulator.device.unlisten(events)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _receive(self, text: str) -> None:
        if self._quirks.echo:
            self._writer.write(text.encode("latin-1"))
        self._input += re.sub("\xff[\xfb-\xfe].", "", text, flags=re.DOTALL)  # answers to telnet options
        while match := re.match(r'\s*((?:[^";]|"(?:[^"\\]|\\.)*")*);', self._input):
            self._commands.put_nowait(match[1])
            self._input = self._input[match.end() :]

    async def _work(self) -> None:
        while True:
            text = await self._commands.get()
            if not self._emulator.device.is_alive(self._session):
                self.end()
                return
            try:
                await self._answer(text)
            except ConnectionBroken:
                self.end()
                return

    async def _answer(self, text: str) -> None:
        self._emulator.commands.append(text)
        command = Tl1Command.parse(text)
        if self._quirks.acknowledge:
            self._write(f"IP {command.ctag}", "<", header=False)
        for _ in range(self._quirks.reports_before):
            self._make_noise()
        try:
            lines, comment = await self._carry_out(command), ""
            if self._quirks.semicolons:
                comment = "done; nothing else\r\n;to say"
            await self._reply(command.ctag, "COMPLD", lines, comment)
        except Tl1Refusal as refusal:
            await self._reply(command.ctag, "DENY", [refusal.code], refusal.text)
        if command.verb == "CANC-USER":
            self.is_logged_in = False
        self._show_prompt()

    async def _carry_out(self, command: Tl1Command) -> Sequence[str]:
        limit = self._quirks.line_limit
        if limit and len(command.text) + 1 > limit:
            raise Tl1Refusal("IISP", f"Input, Invalid Syntax or Punctuation: line longer than {limit}")
        if command.verb == "ACT-USER":
            return self._log_in(command)
        if not self.is_logged_in and not self._quirks.logged_in_already:
            raise Tl1Refusal("PLNA", "Privilege, Login Not Active")
        if command.verb == "CANC-USER":
            return []
        box = self._emulator.box
        if command.verb and command.verb in (box.reports_on, box.reports_off):
            self._wants_reports = command.verb == box.reports_on
            return []
        return await box.answer(command)

    def _log_in(self, command: Tl1Command) -> Sequence[str]:
        quirks = self._quirks
        if (command.aid, command.block(0)) != (quirks.user, quirks.password):
            raise Tl1Refusal("PICC", "Privilege, Illegal Command Code: wrong user or password")
        others = [each for each in self._emulator.connections if each.is_logged_in and each is not self]
        if quirks.single_session and others:
            raise Tl1Refusal("PLNA", "Maximum number of sessions reached")
        if quirks.logged_in_already or self.is_logged_in:
            raise Tl1Refusal("SAIS", "Already logged in")
        self.is_logged_in = True
        return [f'"{quirks.user}:{quirks.user},2"']

    async def _reply(self, ctag: str, completion: str, lines: Sequence[str], comment: str = "") -> None:
        """Send a reply, split into as many parts as the quirks require."""
        size = self._quirks.lines_per_part or max(1, len(lines))
        parts = [lines[at : at + size] for at in range(0, len(lines), size)] or [[]]
        for index, part in enumerate(parts):
            is_last = index + 1 == len(parts)
            body = [f"M  {ctag} {completion}", *(f"   {line}" for line in part)]
            if is_last and comment:
                body.append(f"   /* {comment} */")
            self._write(self._quirks.newline.join(body), ";" if is_last else self._quirks.part_mark)
            if not is_last:
                if self._quirks.reports_between:
                    self._make_noise()
                await asyncio.sleep(0)

    async def _report(self, events: asyncio.Queue[SwitchEvent]) -> None:
        while True:
            event = await events.get()
            if not self._emulator.device.is_alive(self._session):
                self.end()
                return
            if self._wants_reports and self.is_logged_in:
                severity, verb, line = self._emulator.box.report(event)
                self._send_report(severity, verb, line)

    def _make_noise(self) -> None:
        self._send_report(*_NOISE[next(self._emulator.tags) % len(_NOISE)])

    def _send_report(self, severity: str, verb: str, line: str) -> None:
        body = f"{severity}  {next(self._emulator.tags)} {verb}{self._quirks.newline}   {line}"
        self._write(body, ";")

    def _write(self, body: str, mark: str, header: bool = True) -> None:
        newline = self._quirks.newline
        head = f"   {self._emulator.box.name} 26-11-22 02:30:00{newline}" if header else ""
        with suppress(OSError):  # the client may have disconnected
            self._writer.write(f"{newline}\n{head}{body}{newline}{mark}".encode("latin-1"))

    def _show_prompt(self) -> None:
        if self._quirks.prompt:
            self._writer.write(f"{self._quirks.newline}{self._quirks.prompt} ".encode("latin-1"))


def _make(kind: type[Tl1Device], panel: DevicePanel, clock: DeviceClock | None = None, **given: Any) -> Tl1Emulator:
    quirks = Tl1Quirks.read(given, prefix="")
    device = EmulatedDevice(kind.facts(panel), panel, clock)
    return Tl1Emulator(device, kind(device, quirks.semicolons), quirks)


polatis = partial(_make, PolatisTl1Device)
calient = partial(_make, CalientTl1Device)
glimmerglass = partial(_make, GlimmerglassTl1Device)
