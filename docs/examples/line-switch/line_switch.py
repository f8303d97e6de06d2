"""The driver `line` for a fictitious switch, which answers each line of text that it receives over TCP with one line.

The switch has the following commands, shown here with examples of their answers:

- `FACTS` returns the model, the serial number, the software version, the numbers of ingress and egress ports, and the
  switching time in seconds: `OK S8 0042 1.0 8 8 0.025`
- `PORTS` returns the status of every port: `OK 1=enabled 2=failed ...`
- `LIST` returns the state of every cross-connect: `OK 1:9=tuned 2:10=tuning`
- `CONNECT 1:9 2:10` connects these pairs in order, and stops at the first pair that the switch refuses: `OK`
- `DISCONNECT 1:9 2:10` disconnects these pairs: `OK`

If the switch refuses a command, the answer is `ERR` with the reason.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from ocs_drivers.base import DeviceClock, SwitchWire
from ocs_drivers.errors import DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.model import (
    Action,
    CircuitState,
    Connectivity,
    CrossConnect,
    DeviceCircuit,
    PortState,
    PortStatus,
    SwitchCapabilities,
    SwitchFacts,
)
from ocs_drivers.options import Address, ConfiguredSwitch, DriverOptions, split_address

T = TypeVar("T")

DEFAULT_PORT = 5555
MAX_LINE_BYTES = 1024 * 1024


class LineOptions(DriverOptions):
    """The options in `ocs[].options`, in addition to the time limits of every driver."""

    address: Address


class LineWire(SwitchWire):
    """The verbs of the protocol. `SwitchDriver` decides when to call them."""

    capabilities = SwitchCapabilities(bulk=True, tuned_state=True)

    def __init__(self, options: LineOptions, clock: DeviceClock) -> None:
        self._host, self._port = split_address(options.address, DEFAULT_PORT)
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
        return await self._request("PORTS", lambda words: list(map(_port, words)))

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        return await self._request("LIST", lambda words: list(map(_circuit, words)))

    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        verb = "CONNECT" if action is Action.ADD else "DISCONNECT"
        await self._request(f"{verb} {' '.join(map(str, pairs))}", _nothing, is_setter=True)

    async def _request(self, line: str, parse: Callable[[list[str]], T], *, is_setter: bool = False) -> T:
        """Send a line and return the parsed words that follow OK. Raises DriverOutcomeUnknown if a setter is not
        answered, and DriverRetryable if any other line is not answered. Raises DriverPermanent if the answer is ERR,
        and ValueError if the answer is invalid."""
        assert self._streams is not None
        reader, writer = self._streams
        unclear = DriverOutcomeUnknown if is_setter else DriverRetryable
        try:
            writer.write(f"{line}\n".encode())
            answer = (await reader.readline()).decode("ascii", "replace")
        except (OSError, ValueError) as error:  # connection lost, or line too long
            raise unclear(f"no answer came ({error})", command=line) from None
        if not answer.endswith("\n"):
            raise unclear("the connection was closed", command=line, answer=answer)
        verdict, *words = answer.split() or [""]
        if verdict == "ERR":
            raise DriverPermanent("refused", command=line, answer=" ".join(words))
        if verdict != "OK":
            raise ValueError(f"neither OK nor ERR: {answer!r}")
        return parse(words)


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


def _port(word: str) -> PortState:
    port, _, status = word.partition("=")
    return PortState(int(port), PortStatus(status))


def _circuit(word: str) -> DeviceCircuit:
    pair, _, state = word.partition("=")
    return DeviceCircuit(CrossConnect.parse(pair), CircuitState(state))


def _nothing(words: list[str]) -> None:
    if words:
        raise ValueError("a setter answers OK and no more")


class LineSwitch(ConfiguredSwitch, options=LineOptions, wire=LineWire):
    """The driver `line` for the example switch."""
