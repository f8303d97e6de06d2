"""The driver `line`: a switch, made up for this example, that takes one line of text over TCP and answers one.

FACTS                    OK S8 0042 1.0 8 8 0.025      model, serial, software, ports in and out, seconds
PORTS                    OK 1=enabled 2=failed ...
LIST                     OK 1:9=tuned 2:10=tuning
CONNECT 1:9 2:10         OK, or ERR and why            taken in order, up to what is refused
DISCONNECT 1:9 2:10      OK, or ERR and why
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from ocs_drivers.base import DeviceClock
from ocs_drivers.driver import SwitchDriver
from ocs_drivers.errors import DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.model import (
    CircuitState,
    Connectivity,
    CrossConnect,
    DeviceCircuit,
    PortState,
    PortStatus,
    SwitchCapabilities,
    SwitchEvent,
    SwitchFacts,
)
from ocs_drivers.options import DriverOptions

T = TypeVar("T")

DEFAULT_PORT = 5555
MAX_LINE_BYTES = 1024 * 1024


class LineWire:
    """The verbs of the protocol; what to send when is `SwitchDriver`'s business."""

    capabilities = SwitchCapabilities(bulk=True, tuned_state=True)

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> None:
        try:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=MAX_LINE_BYTES)
        except OSError as error:
            raise DriverRetryable(f"cannot connect to {self._host}:{self._port} ({error})") from None

    async def close(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()

    async def read_facts(self) -> SwitchFacts:
        return await self._request("FACTS", _facts)

    async def read_ports(self) -> Sequence[PortState]:
        return await self._request("PORTS", lambda words: [_port(*word.split("=")) for word in words])

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        return await self._request("LIST", lambda words: [_circuit(*word.split("=")) for word in words])

    async def add(self, pairs: Sequence[CrossConnect]) -> None:
        await self._request(f"CONNECT {' '.join(map(str, pairs))}", _nothing, is_setter=True)

    async def remove(self, pairs: Sequence[CrossConnect]) -> None:
        await self._request(f"DISCONNECT {' '.join(map(str, pairs))}", _nothing, is_setter=True)

    def events(self) -> AsyncGenerator[SwitchEvent, None]:
        raise DriverPermanent("this switch reports no events")

    async def _request(self, line: str, parse: Callable[[list[str]], T], *, is_setter: bool = False) -> T:
        """What `parse` makes of the words after OK. Every failure says whether anything can have happened."""
        assert self._streams is not None
        reader, writer = self._streams
        unclear = DriverOutcomeUnknown if is_setter else DriverRetryable
        try:
            writer.write(f"{line}\n".encode())
            answer = (await reader.readline()).decode("ascii", "replace")
        except (OSError, ValueError) as error:  # the connection broke; the line was longer than the limit
            raise unclear(f"no answer came ({error})", command=line) from None
        if not answer.endswith("\n"):
            raise unclear("the connection was closed", command=line, answer=answer)
        verdict, *words = answer.split() or [""]
        if verdict == "ERR":
            raise DriverPermanent("refused", command=line, answer=" ".join(words))
        try:
            if verdict != "OK":
                raise ValueError("neither OK nor ERR")
            return parse(words)
        except (TypeError, ValueError) as error:
            raise (DriverOutcomeUnknown if is_setter else DriverPermanent)(
                f"nonsense: {error}", command=line, answer=answer
            ) from None


def _facts(words: list[str]) -> SwitchFacts:
    model, serial, software, ingress, egress, seconds = words
    first_egress = int(ingress) + 1
    return SwitchFacts(
        vendor="Example",
        model=model,
        serial=serial,
        software=software,
        connectivity=Connectivity.INGRESS_EGRESS,
        ingress_ports=range(1, first_egress),
        egress_ports=range(first_egress, first_egress + int(egress)),
        reconfiguration_s=float(seconds),
    )


def _port(port: str, status: str) -> PortState:
    return PortState(int(port), PortStatus(status))


def _circuit(pair: str, state: str) -> DeviceCircuit:
    return DeviceCircuit(CrossConnect.parse(pair), CircuitState(state))


def _nothing(words: list[str]) -> None:
    if words:
        raise ValueError("a setter answers OK and no more")


class LineSwitch(SwitchDriver):
    """Keyword arguments are the options that users may set in `ocs.SWITCH`."""

    def __init__(
        self, device: str, *, clock: DeviceClock | None = None, address: str, command_timeout_s: float = 5.0
    ) -> None:
        options = DriverOptions(device)
        host, port = options.address(address, DEFAULT_PORT)
        limits = options.limits(command_timeout_s, 10.0, None, 2.0)
        options.check()  # raises with every fault at once
        super().__init__(device, LineWire(host, port), clock=clock, limits=limits)
