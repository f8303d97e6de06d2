"""The driver `scpi`: switches of HUBER+SUHNER Polatis, and DiCon's GP750 and MXS with the profile `dicon`, on TCP 5025.

What it relies on, as working client code sends it: the lines of scpi_text.py; ingress ports 1..N and egress ports
N+1..N+M, from `size?`; setters that answer nothing and leave their errors in a queue; `conn:add` with lists, which
leaves other connections; a listed connection is one that is made.

What is not verified, and how it is met:

- what `conn:add` does with a port in use (probably it re-routes the port without a word): the ports are made free by
  `conn:sub`, and seen to be free, before
- whether a list takes effect as a whole: every commit is read back
- when the mirrors are in place: the device does not tell, so a circuit counts as tuned once it is listed and the stated
  reconfiguration time has passed since it was commanded, and as failed where one of its ports is
- how compound queries are answered: there is one query to a line, and none is sent before the last was answered
- when a connection is listed, as it is commanded or as it is made: after a setter that was refused, or whose outcome is
  not known, ten times the stated reconfiguration time passes before the connections are read
- how long a line may be: the option `longest_line_chars` cuts lists into several lines
- how long the error queue is on a Polatis, and whether sessions share it: it is cleared before each setter, and read to
  its end afterwards
- whether cross-connects survive a restart: no query for it is known, the option `boot` says it
- how a DiCon numbers its ports, and how fast it is: the options `ingress_ports`, `egress_ports`, `reconfiguration_s`.

`only` and `disc:all`, which wipe a switch, are never sent.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, TypeVar

from ocs_drivers import scpi_text as text
from ocs_drivers.base import DeviceClock, SwitchWire
from ocs_drivers.batches import fitting
from ocs_drivers.driver import within
from ocs_drivers.errors import DriverOutcomeUnknown, DriverPermanent, DriverRetryable, reason_of
from ocs_drivers.model import (
    Action,
    BootBehaviour,
    CircuitState,
    Connectivity,
    CrossConnect,
    DeviceCircuit,
    PortState,
    PortStatus,
    SwitchCapabilities,
    SwitchFacts,
)
from ocs_drivers.options import Address, ConfiguredSwitch, DriverOptions, Flag, SecondsOr0, split_address, whole
from ocs_drivers.settling import Settling

T = TypeVar("T")

DEFAULT_PORT = 5025
POLATIS_RECONFIGURATION_S = 0.025  # the paper's table 2, piezo; it has no figure for DiCon
LONGEST_ANSWER_BYTES = 1 << 20
SHOWN_CHARS = 200  # of a line, in an error


class ScpiProfile(StrEnum):
    POLATIS = "polatis"
    DICON = "dicon"


class LineEnd(StrEnum):
    LF = "lf"
    CRLF = "crlf"


@dataclass(frozen=True, slots=True)
class ScpiDialect:
    """What the makers do differently."""

    error_query: str
    error_queue: int  # entries to read at most, its end not counted


DIALECTS = {
    # Nobody states how many errors a Polatis keeps: so many that an end is certain.
    ScpiProfile.POLATIS: ScpiDialect(":syst:err?", 1024),
    ScpiProfile.DICON: ScpiDialect(":SYSTem:ERRor?", 8),
}


class ScpiOptions(DriverOptions):
    """Without `ingress_ports` and `egress_ports` the device is asked for them."""

    address: Address
    profile: ScpiProfile = ScpiProfile.POLATIS
    reconfiguration_s: SecondsOr0 = POLATIS_RECONFIGURATION_S
    boot: BootBehaviour = BootBehaviour.UNKNOWN
    ingress_ports: Any = None
    egress_ports: Any = None
    port_states: Flag = True
    line_end: LineEnd = LineEnd.LF
    longest_line_chars: Annotated[int, whole(64)] | None = None

    def conflicts(self) -> list[str]:
        sides = {"ingress_ports": self.ingress_ports, "egress_ports": self.egress_ports}
        return [
            f"{name}: must be FIRST..LAST, and be given for both sides, got {value!r}"
            for name, value in sides.items()
            if any(side is not None for side in sides.values()) and not _port_range(value)
        ]

    @property
    def ports(self) -> tuple[range, range] | None:
        return (_port_range(self.ingress_ports), _port_range(self.egress_ports)) if self.ingress_ports else None


class ScpiWire(SwitchWire):
    """One session: the `base.SwitchWire` of SCPI."""

    capabilities = SwitchCapabilities(bulk=True)

    def __init__(self, options: ScpiOptions, clock: DeviceClock) -> None:
        self._options = options
        self._clock = clock
        self._dialect = DIALECTS[options.profile]
        self._line_end = b"\n" if options.line_end is LineEnd.LF else b"\r\n"
        # To let mirrors come to rest before looking what became of a setter.
        self._unclear_s = min(10 * options.reconfiguration_s, options.command_timeout_s / 4)
        # To wait for an answer before the error queue is asked why there is none.
        self._answer_s = options.command_timeout_s / 2
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._settling = Settling(clock, options.reconfiguration_s)
        self._unclear_since_s: float | None = None  # since when a setter may have taken in part

    async def open(self) -> None:
        host, port = split_address(self._options.address, DEFAULT_PORT)
        try:
            self._streams = await asyncio.open_connection(host, port, limit=LONGEST_ANSWER_BYTES)
        except OSError as error:
            raise DriverRetryable(f"cannot connect to {host}:{port}: {reason_of(error)}") from error

    async def close(self) -> None:
        if self._streams is None:
            return
        (_, writer), self._streams = self._streams, None
        writer.transport.abort()  # waits for nothing, also where the device takes no more bytes
        with suppress(OSError):
            await writer.wait_closed()

    async def read_facts(self) -> SwitchFacts:
        vendor, model, serial, software = await self._query(text.IDENTITY, text.read_identity)
        ingress, egress = await self._sides()
        connectivity, reconfiguration_s = Connectivity.INGRESS_EGRESS, self._options.reconfiguration_s
        boot = self._options.boot
        return SwitchFacts(vendor, model, serial, software, connectivity, ingress, egress, reconfiguration_s, boot)

    async def read_ports(self) -> Sequence[PortState]:
        return await self._states(sorted({port for side in await self._sides() for port in side}))

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        if self._unclear_since_s is not None:
            pause_s = self._unclear_since_s + self._unclear_s - self._clock.now_s()
            await self._clock.sleep(max(0.0, pause_s))
            self._unclear_since_s = None
        moving = self._settling.moving()
        pairs = await self._query(text.CONNECTIONS, text.read_connections)
        used = sorted({port for pair in pairs for port in pair.ports})
        failed = {state.port for state in await self._states(used) if state.status is PortStatus.FAILED}
        return [
            replace(circuit, state=CircuitState.FAILED) if failed & circuit.cross_connect.ports else circuit
            for circuit in self._settling.circuits(pairs, moving)
        ]

    async def _sides(self) -> tuple[range, range]:
        return self._options.ports if self._options.ports else await self._query(text.SIZE, text.read_size)

    async def _states(self, ports: Sequence[int]) -> list[PortState]:
        if not self._options.port_states or not ports:
            return [PortState(port, PortStatus.ENABLED) for port in ports]
        states: list[PortState] = []
        for asked, query in fitting(ports, text.port_states, self._options.longest_line_chars):
            letters = await self._query(query, partial(text.read_port_states, count=len(asked)))
            states += [PortState(port, status) for port, status in zip(asked, letters, strict=True)]
        return states

    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        self._session()
        for batch, line in fitting(pairs, partial(text.setter, action), self._options.longest_line_chars):
            with self._settling.commanding(action, batch):
                is_clear = False
                try:
                    await self._set_line(line)
                    is_clear = True
                finally:
                    self._unclear_since_s = None if is_clear else self._clock.now_s()

    async def _set_line(self, line: str) -> None:
        """Send the setter, then ask for its errors: it answers nothing itself."""
        try:
            # What is in the queue already is another's, or an alarm's: it would be taken for this setter's.
            await self._send(text.CLEAR_ERRORS, line, self._dialect.error_query)
            complaints = await self._complaints()
        except DriverRetryable as error:
            raise DriverOutcomeUnknown(error.message, command=_short(line), answer=error.answer) from error
        if complaints:
            raise DriverPermanent("refused", command=_short(line), answer=_complaints_text(complaints))

    async def _query(self, query: str, understand: Callable[[str], T]) -> T:
        """What the device says to a query. SCPI leaves a query that it does not know without an answer, and the reason
        in the error queue: that is asked for before anybody gives up."""
        await self._send(query)
        try:
            line = await within(self._clock, self._answer_s, self._line())
        except TimeoutError as error:
            await self._send(self._dialect.error_query)
            if complaints := await self._complaints():
                await self.close()  # an answer that comes yet must not be taken for that to the next question
                answer = _complaints_text(complaints)
                raise DriverPermanent("the query was refused", command=_short(query), answer=answer) from None
            raise DriverRetryable(str(error), command=_short(query)) from None
        try:
            return understand(line)
        except ValueError as error:
            await self.close()  # it may be the answer to another question
            wrong = f"an answer that makes no sense: {error}"
            raise DriverPermanent(wrong, command=_short(query), answer=_short(line)) from error

    async def _complaints(self) -> list[str]:
        """The error queue, its query having been sent, read to its end."""
        complaints: list[str] = []
        for _ in range(self._dialect.error_queue + 1):
            line = await self._line()
            try:
                complaint = text.read_complaint(line)
            except ValueError as error:
                raise DriverRetryable(f"an answer that makes no sense: {error}", answer=_short(line)) from error
            if not complaint:
                return complaints
            complaints.append(complaint)
            await self._send(self._dialect.error_query)
        raise DriverRetryable("the error queue has no end", answer=_complaints_text(complaints[-1:]))

    def _session(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None or self._streams[0].at_eof():
            raise DriverRetryable("the device has closed the session", after_s=0.0)
        return self._streams

    async def _send(self, *lines: str) -> None:
        _, writer = self._session()
        try:
            writer.write(b"".join(line.encode("ascii") + self._line_end for line in lines))
            await writer.drain()
        except OSError as error:
            raise DriverRetryable(f"the connection broke: {reason_of(error)}") from error

    async def _line(self) -> str:
        """The next line, without its end. What is no line is not skipped: the session is out of step then."""
        reader, _ = self._session()
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            raise DriverRetryable("the device closed the connection", answer=_shown(error.partial)) from None
        except asyncio.LimitOverrunError as error:
            begin = await reader.read(SHOWN_CHARS)
            wrong = f"an answer longer than {LONGEST_ANSWER_BYTES} bytes"
            raise DriverRetryable(wrong, answer=_shown(begin)) from error
        except OSError as error:
            raise DriverRetryable(f"the connection broke: {reason_of(error)}") from error
        try:
            return line.decode("ascii").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DriverRetryable("an answer that is not text", answer=_shown(line)) from error


class ScpiSwitch(ConfiguredSwitch, options=ScpiOptions, wire=ScpiWire):
    """The driver `scpi`. `ingress_ports` and `egress_ports`, `FIRST..LAST`, are for devices that do not answer `size?`;
    `port_states` false for those that do not answer `port:stat?`: their ports are then taken to be enabled."""


def _port_range(value: object) -> range:
    """The ports of `FIRST..LAST`; empty for anything else."""
    bounds = re.fullmatch(r"(\d{1,5})\.\.(\d{1,5})", value, re.ASCII) if isinstance(value, str) else None
    return range(int(bounds[1]), int(bounds[2]) + 1) if bounds else range(0)


def _complaints_text(complaints: Sequence[str]) -> str:
    return _short("; ".join(complaints))


def _short(line: str) -> str:
    """For people: signs that a terminal would obey are escaped."""
    shown = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line[:SHOWN_CHARS])
    return shown if len(line) <= SHOWN_CHARS else f"{shown}... ({len(line)} characters)"


def _shown(data: bytes) -> str:
    return _short(data.decode("ascii", "backslashreplace").rstrip("\r\n"))
