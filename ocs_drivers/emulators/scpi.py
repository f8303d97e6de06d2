"""Emulate SCPI switches over TCP, with the quirks of Polatis and of DiCon's GP750 and MXS.

The emulators implement the switches' commands and the syntax of SCPI independently of the driver. Headers may be in
short or long form and in upper or lower case. In a compound line, they may be relative to the previous header. Setters
have no answer, and errors are put into a bounded queue.

The following behaviour is assumed, because no source states it. A setter with a wrong port has no effect. Sessions
share the error queue. If an error occurs while the queue is full, the last entry is replaced by `-350`. After an
unknown header, the remainder of the line is ignored.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import Annotated, Any

from ocs_drivers.base import DeviceClock
from ocs_drivers.emulators.base import ConnectionBroken, DevicePanel, EmulatedDevice, EmulatedTcpServer
from ocs_drivers.emulators.polatis import polatis_facts
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.model import Action, CircuitState, CrossConnect, PortStatus, SwitchFacts
from ocs_drivers.options import CheckedOptions, Flag, must_be, whole

NO_ERROR = '0,"No error"'
QUEUE_OVERFLOW = '-350,"Queue overflow"'

LETTERS = {PortStatus.ENABLED: "E", PortStatus.DISABLED: "D", PortStatus.FAILED: "F"}

# Headers in long form; the capitals are the short form.
HEADERS = (
    *("*IDN?", "*CLS", "*OPC?", "*STB?", "SYSTem:ERRor?", "SYSTem:ERRor:NEXT?", "SYSTem:ERRor:ALL?"),
    *(f"OXC:SWITch:{name}" for name in ("SIZE?", "DISConnect:ALL", "PORT:DISable", "PORT:ENABle", "PORT:STATe?")),
    *(f"OXC:SWITch:CONNect:{name}" for name in ("ADD", "ONLY", "SUB", "STATe?", "PORT?")),
)


class ScpiError(Exception):
    """Raised when a command fails. The error is put into the error queue, and the command has no answer."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f'{code},"{text}"')


class UnknownScpiHeader(ScpiError):
    """Raised for an unknown header. The remainder of the line is ignored."""

    def __init__(self, header: str) -> None:
        super().__init__(-113, f"Undefined header;{header[:40]}")


def _are_headers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(header in HEADERS for header in value)


class ScpiQuirks(CheckedOptions):
    """Configurable behaviour. If `one_session` is True, further clients are disconnected. If `crlf` is True, lines end
    in `\\r\\n`. If `lists_at_once` is True, connections are listed as soon as they are commanded. If `answers_apart` is
    True, each answer to a compound line is on its own line. `longest_line_chars` is the size of the input buffer, and
    `error_queue` is the capacity of the error queue. `unknown` lists the headers that are not supported, in this
    module's form (`OXC:SWITch:PORT:STATe?`)."""

    one_session: Flag = False
    crlf: Flag = False
    lists_at_once: Flag = False
    answers_apart: Flag = False
    longest_line_chars: Annotated[int, whole(1)] | None = None
    error_queue: Annotated[int, whole(2)] = 32
    unknown: Annotated[tuple[str, ...], must_be(f"a list out of {', '.join(HEADERS)}", _are_headers)] = ()


class DiconQuirks(ScpiQuirks):
    crlf: Flag = True
    error_queue: Annotated[int, whole(2)] = 8


class ScpiEmulator(EmulatedTcpServer):
    """An emulated SCPI switch, constructed by `polatis` or `dicon`."""

    def __init__(self, facts: SwitchFacts, panel: DevicePanel, clock: DeviceClock | None, quirks: ScpiQuirks) -> None:
        super().__init__()
        self.device = EmulatedDevice(facts, panel, clock)
        self.quirks = quirks
        self.errors: list[str] = []
        self._clients: list[asyncio.StreamReader] = []  # in order of connection
        self._headers = {header: _pattern(header) for header in HEADERS if header not in quirks.unknown}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. Lines are received while an earlier line is processed, so that a disconnect is
        noticed."""
        self._clients.append(reader)
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        work = asyncio.create_task(self._work_off(lines, reader, writer))
        try:
            while line := await reader.readuntil(b"\n"):
                lines.put_nowait(line)
        except asyncio.IncompleteReadError:
            lines.put_nowait(b"")  # earlier lines are still processed and answered
        except BaseException:
            work.cancel()
            raise
        finally:
            self._clients.remove(reader)
        await work

    async def _work_off(
        self, lines: asyncio.Queue[bytes], client: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        is_free = not self.quirks.one_session or await self._is_seat_free(client)
        session = self.device.session()
        line_end = "\r\n" if self.quirks.crlf else "\n"
        try:
            while is_free and (line := await lines.get()):
                if not self.device.is_alive(session):
                    raise ConnectionBroken
                answers = await self.line(line.decode("ascii", "replace").rstrip("\r\n"))
                writer.write("".join(answer + line_end for answer in answers).encode())
        except ConnectionBroken:
            writer.transport.abort()
        else:
            writer.close()

    async def _is_seat_free(self, client: asyncio.StreamReader) -> bool:
        """Return whether this client has the oldest open connection, and may therefore use the only session. If an
        earlier connection is open, the function first awaits a few turns of the event loop, so that a disconnect is
        noticed."""
        for _ in range(5):
            if self._clients[0] is client:
                return True
            await asyncio.sleep(0)
        return False

    async def line(self, line: str) -> list[str]:
        """Execute one line of commands and return the lines of the answer."""
        if self.quirks.longest_line_chars is not None and len(line) > self.quirks.longest_line_chars:
            self._complain(ScpiError(-363, "Input buffer overrun"))
            return []
        answers: list[str] = []
        path = ""
        for unit in filter(None, (unit.strip() for unit in line.split(";"))):
            header, parameters = (*unit.split(None, 1), "")[:2]
            if not header.startswith("*"):
                header = header[1:] if header.startswith(":") else path + header
                path = header[: header.rfind(":") + 1]
            try:
                answer = await self._answer(self._known(header), parameters, unit)
            except UnknownScpiHeader as error:
                self._complain(error)
                break
            except ScpiError as error:
                self._complain(error)
            except DriverPermanent as error:
                self._complain(ScpiError(-200, f"Execution error;{error.answer}"))
            else:
                answers += [] if answer is None else [answer]
        return answers if self.quirks.answers_apart or not answers else [";".join(answers)]

    def _known(self, header: str) -> str:
        for known, form in self._headers.items():
            if form.fullmatch(header):
                return known
        raise UnknownScpiHeader(header)

    def _complain(self, complaint: ScpiError) -> None:
        if len(self.errors) < self.quirks.error_queue:
            self.errors.append(str(complaint))
        else:
            self.errors[-1] = QUEUE_OVERFLOW

    async def _answer(self, header: str, parameters: str, command: str) -> str | None:
        """Execute a command, given its header, its parameters and its full text. Return its answer, or None for a
        command without an answer."""
        device, facts = self.device, self.device.facts
        match header.removeprefix("OXC:SWITch:"):
            case "*IDN?":
                return f"{facts.vendor},{facts.model},{facts.serial},{facts.software}"
            case "*CLS":
                self.errors.clear()
            case "*OPC?":
                return "1"
            case "*STB?":
                return "4" if self.errors else "0"
            case "SYSTem:ERRor?" | "SYSTem:ERRor:NEXT?":
                return self.errors.pop(0) if self.errors else NO_ERROR
            case "SYSTem:ERRor:ALL?":
                errors, self.errors = self.errors, []
                return ",".join(errors) or NO_ERROR
            case "SIZE?":
                return f"{len(facts.ingress_ports)},{len(facts.egress_ports)}"
            case "CONNect:ADD":
                await device.set(Action.ADD, _paired(*self._sides(parameters)), command)
            case "CONNect:ONLY":
                await device.replace(_paired(*self._sides(parameters)), command)
            case "CONNect:SUB":  # also `(@1,2,3),(@)`: disconnects these ports from any partner
                ingress, egress = self._sides(parameters)
                held = [pair for pair in self._present() if pair.ingress_port in ingress]
                await device.set(Action.REMOVE, held if ingress and not egress else _paired(ingress, egress), command)
            case "DISConnect:ALL":
                await device.replace((), command)
            case "CONNect:STATe?":
                pairs = self._present()
                return f"{_listed([p.ingress_port for p in pairs])},{_listed([p.egress_port for p in pairs])}"
            case "CONNect:PORT?":
                (port,) = self._check_ports([_number(parameters)])
                partners = {pair.ingress_port: pair.egress_port for pair in self._present()}
                partners |= {egress: ingress for ingress, egress in partners.items()}
                return f'"{partners.get(port, "")}"'
            case "PORT:DISable" | "PORT:ENABle" as verb:
                await device.enable(self._check_ports(_ports(parameters)), verb == "PORT:ENABle", command)
            case "PORT:STATe?":
                states = {state.port: LETTERS[state.status] for state in device.ports()}
                return f"({','.join(states[port] for port in self._check_ports(_ports(parameters)))})"
            case _:
                raise AssertionError(f"no handler for {header}")
        return None

    def _present(self) -> list[CrossConnect]:
        circuits = self.device.circuits()
        is_moving = CircuitState.TUNING
        return [c.cross_connect for c in circuits if self.quirks.lists_at_once or c.state is not is_moving]

    def _sides(self, parameters: str) -> tuple[list[int], list[int]]:
        lists = re.fullmatch(r"(\(@[^()]*\))\s*,\s*(\(@[^()]*\))", parameters)
        if not lists:
            raise ScpiError(-109, "Missing parameter")
        ingress, egress = _ports(lists[1]), _ports(lists[2])
        facts = self.device.facts
        for ports, valid in ((ingress, facts.ingress_ports), (egress, facts.egress_ports)):
            if wrong := [port for port in ports if port not in valid]:
                raise ScpiError(-222, f"Data out of range;{wrong[0]}")
        return ingress, egress

    def _check_ports(self, ports: Sequence[int]) -> Sequence[int]:
        facts = self.device.facts
        if wrong := [port for port in ports if port not in facts.ingress_ports and port not in facts.egress_ports]:
            raise ScpiError(-222, f"Data out of range;{wrong[0]}")
        return ports


def polatis(panel: DevicePanel, clock: DeviceClock | None = None, **quirks: Any) -> ScpiEmulator:
    """Return an emulated Polatis switch with these quirks (`ScpiQuirks`)."""
    return ScpiEmulator(polatis_facts(panel, any_to_any=False), panel, clock, ScpiQuirks.read(quirks, prefix=""))


def dicon(panel: DevicePanel, clock: DeviceClock | None = None, **quirks: Any) -> ScpiEmulator:
    """Return an emulated DiCon GP750. It has the same commands as a Polatis switch, but its error queue has 8 entries.
    Its identity is fictitious."""
    facts = panel.facts("DiCon", "GP750", "000001", "1.0")
    return ScpiEmulator(facts, panel, clock, DiconQuirks.read(quirks, prefix=""))


def _pattern(form: str) -> re.Pattern[str]:
    """Return a pattern that matches the short and the long form of a header such as `SWITch:SIZE?`, in upper or lower
    case. The header's capitals are the short form."""
    words = []
    for word in form.removesuffix("?").split(":"):
        short = "".join(sign for sign in word if not sign.islower())
        words.append(re.escape(short) if short == word else f"(?:{re.escape(short)}|{re.escape(word)})")
    return re.compile(":".join(words) + (r"\?" if form.endswith("?") else ""), re.IGNORECASE)


def _ports(text: str) -> list[int]:
    """Parse a port list such as `(@1, 2, 3)`, `(@1:3)` or `(@)`. Raises ScpiError if the list is malformed."""
    listed = re.fullmatch(r"\(@([^()]*)\)", text)
    if not listed:
        raise ScpiError(-102, "Syntax error;a list of ports is (@1,2,3)")
    ports: list[int] = []
    for item in listed[1].split(",") if listed[1].strip() else ():
        first, colon, last = item.partition(":")
        ports += range(_number(first), _number(last) + 1) if colon else [_number(first)]
    return ports


def _number(text: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,5}\s*", text):
        raise ScpiError(-104, "Data type error")
    return int(text)


def _listed(ports: Sequence[int]) -> str:
    return f"(@{','.join(map(str, ports))})"


def _paired(ingress: Sequence[int], egress: Sequence[int]) -> list[CrossConnect]:
    if len(ingress) != len(egress) or len(set(ingress)) < len(ingress) or len(set(egress)) < len(egress):
        raise ScpiError(-220, "Parameter error;lists of different ports, equally long")
    return [CrossConnect(a, b) for a, b in zip(ingress, egress, strict=True)]
