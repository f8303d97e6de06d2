"""The driver `scpi` for HUBER+SUHNER Polatis switches, and for DiCon's GP750 and MXS with the profile `dicon`, on TCP
port 5025.

The driver assumes the following, based on working client code. Lines have the form described in scpi_text.py. Ingress
ports are 1..N and egress ports N+1..N+M, with N and M from `size?`. Setters return no answer and put their errors into
a queue. `conn:add` with lists leaves other connections unchanged.

The following is not verified. The driver handles it as described:

- `conn:add` on a port in use probably re-routes the port silently. The driver therefore frees the ports with `conn:sub`
  first, and verifies that they are free.
- A list may take effect only in part. The driver reads the connections after every commit.
- The device does not report when the mirrors are in place. A circuit is considered tuned when it is listed and the
  stated reconfiguration time has passed since the command. It is considered failed if one of its ports has failed.
- The form of answers to compound queries is not known. The driver sends one query at a time, each on its own line.
- The device may list a connection when it receives the command or when it has completed it. If a setter was refused or
  its outcome is unknown, the driver waits up to ten times the stated reconfiguration time before it reads the
  connections.
- The longest accepted line is not known. With the option `longest_line_chars`, long lists are split into several lines.
- The length of a Polatis error queue, and whether sessions share it, are not known. The driver clears the queue before
  each setter, and reads all of its entries afterwards.
- No query is known that returns whether cross-connects survive a restart. The user states it with the option `boot`.
- The port numbers and the speed of a DiCon switch are set by the options `ingress_ports`, `egress_ports` and
  `reconfiguration_s`.

The driver never sends `only` or `disc:all`, which clear a switch.
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
SHOWN_CHARS = 200  # limit for a line quoted in an error


class ScpiProfile(StrEnum):
    POLATIS = "polatis"
    DICON = "dicon"


class LineEnd(StrEnum):
    LF = "lf"
    CRLF = "crlf"


@dataclass(frozen=True, slots=True)
class ScpiDialect:
    """The parts of the protocol that are specific to one vendor's switches."""

    error_query: str
    error_queue: int  # most entries to read, without the end mark


DIALECTS = {
    # Polatis does not document the length of its queue; this is large enough to reach its end.
    ScpiProfile.POLATIS: ScpiDialect(":syst:err?", 1024),
    ScpiProfile.DICON: ScpiDialect(":SYSTem:ERRor?", 8),
}


class ScpiOptions(DriverOptions):
    """Options of the driver `scpi`. If `ingress_ports` and `egress_ports` are not set, the driver queries the device
    for its size.
    """

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
    """Implements `base.SwitchWire` over one SCPI session."""

    capabilities = SwitchCapabilities(bulk=True)

    def __init__(self, options: ScpiOptions, clock: DeviceClock) -> None:
        self._options = options
        self._clock = clock
        self._dialect = DIALECTS[options.profile]
        self._line_end = b"\n" if options.line_end is LineEnd.LF else b"\r\n"
        # Time for mirrors to come to rest before the effect of a setter is read.
        self._unclear_s = min(10 * options.reconfiguration_s, options.command_timeout_s / 4)
        # Time to wait for an answer before the error queue is queried for the reason.
        self._answer_s = options.command_timeout_s / 2
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._settling = Settling(clock, options.reconfiguration_s)
        self._unclear_since_s: float | None = None  # since when the effect of a setter may be partial

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
        writer.transport.abort()  # does not wait, even if the device reads no more bytes
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
        """Send a line with a setter, then read the error queue, because a setter has no answer. Raises DriverPermanent
        if the queue contains an error, and DriverOutcomeUnknown if the connection fails."""
        try:
            # Earlier errors or alarms in the queue would be attributed to this setter.
            await self._send(text.CLEAR_ERRORS, line, self._dialect.error_query)
            complaints = await self._complaints()
        except DriverRetryable as error:
            raise DriverOutcomeUnknown(error.message, command=_short(line), answer=error.answer) from error
        if complaints:
            raise DriverPermanent("refused", command=_short(line), answer=_complaints_text(complaints))

    async def _query(self, query: str, understand: Callable[[str], T]) -> T:
        """Send a query and return its answer, parsed by `understand`. A device does not answer an unknown query but
        puts an error into its queue, so the error queue is read if no answer arrives in time. Raises DriverPermanent if
        the queue contains an error or the answer is invalid. If there is neither an answer nor an error, raises
        DriverRetryable."""
        await self._send(query)
        try:
            line = await within(self._clock, self._answer_s, self._line())
        except TimeoutError as error:
            await self._send(self._dialect.error_query)
            if complaints := await self._complaints():
                await self.close()  # a late answer must not be taken for the next query's
                answer = _complaints_text(complaints)
                raise DriverPermanent("the query was refused", command=_short(query), answer=answer) from None
            raise DriverRetryable(str(error), command=_short(query)) from None
        try:
            return understand(line)
        except ValueError as error:
            await self.close()  # it may be the answer to another query
            wrong = f"invalid response: {error}"
            raise DriverPermanent(wrong, command=_short(query), answer=_short(line)) from error

    async def _complaints(self) -> list[str]:
        """Return all entries of the error queue. The caller must already have sent the first query for an entry."""
        complaints: list[str] = []
        for _ in range(self._dialect.error_queue + 1):
            line = await self._line()
            try:
                complaint = text.read_complaint(line)
            except ValueError as error:
                raise DriverRetryable(f"invalid response: {error}", answer=_short(line)) from error
            if not complaint:
                return complaints
            complaints.append(complaint)
            await self._send(self._dialect.error_query)
        raise DriverRetryable(
            f"the error queue contains more than {self._dialect.error_queue} entries",
            answer=_complaints_text(complaints[-1:]),
        )

    def _session(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None or self._streams[0].at_eof():
            raise DriverRetryable("the device closed the session", after_s=0.0)
        return self._streams

    async def _send(self, *lines: str) -> None:
        _, writer = self._session()
        try:
            writer.write(b"".join(line.encode("ascii") + self._line_end for line in lines))
            await writer.drain()
        except OSError as error:
            raise DriverRetryable(f"the connection failed: {reason_of(error)}") from error

    async def _line(self) -> str:
        """Return the next received line, without its line end. Raises DriverRetryable if the connection breaks or the
        data are invalid. Invalid data are not skipped, because answers could then be attributed to the wrong queries.
        """
        reader, _ = self._session()
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            raise DriverRetryable("the device closed the connection", answer=_shown(error.partial)) from None
        except asyncio.LimitOverrunError as error:
            begin = await reader.read(SHOWN_CHARS)
            wrong = f"the response is longer than {LONGEST_ANSWER_BYTES} bytes"
            raise DriverRetryable(wrong, answer=_shown(begin)) from error
        except OSError as error:
            raise DriverRetryable(f"the connection failed: {reason_of(error)}") from error
        try:
            return line.decode("ascii").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DriverRetryable("the response is not ASCII text", answer=_shown(line)) from error


class ScpiSwitch(ConfiguredSwitch, options=ScpiOptions, wire=ScpiWire):
    """The driver `scpi`. `ingress_ports` and `egress_ports`, each of the form `FIRST..LAST`, are required for devices
    that do not answer `size?`. Set `port_states` to false for devices that do not answer `port:stat?`. All ports are
    then assumed to be enabled."""


def _port_range(value: object) -> range:
    """Return the ports of a text `FIRST..LAST`, or an empty range for any other value."""
    bounds = re.fullmatch(r"(\d{1,5})\.\.(\d{1,5})", value, re.ASCII) if isinstance(value, str) else None
    return range(int(bounds[1]), int(bounds[2]) + 1) if bounds else range(0)


def _complaints_text(complaints: Sequence[str]) -> str:
    return _short("; ".join(complaints))


def _short(line: str) -> str:
    """Shorten a line for display and escape control characters."""
    shown = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line[:SHOWN_CHARS])
    return shown if len(line) <= SHOWN_CHARS else f"{shown}... ({len(line)} characters)"


def _shown(data: bytes) -> str:
    return _short(data.decode("ascii", "backslashreplace").rstrip("\r\n"))
