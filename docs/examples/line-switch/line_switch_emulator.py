"""Emulate the example switch for tests: the protocol of line_switch.py on top of `EmulatedDevice`.

`python line_switch_emulator.py 127.0.0.1 5555` serves a switch with 8 ports on each side until it is stopped.
"""

import asyncio
import contextlib
import sys

from ocs_drivers.base import DeviceClock
from ocs_drivers.emulators.base import ConnectionBroken, DevicePanel, EmulatedDevice, address_of
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.model import Action, CrossConnect

ACTIONS = {"CONNECT": Action.ADD, "DISCONNECT": Action.REMOVE}


class LineEmulator:
    def __init__(self, panel: DevicePanel, clock: DeviceClock | None = None) -> None:
        self.device = EmulatedDevice(panel.facts("Example", f"S{panel.ingress_ports}", "0042", "1.0"), panel, clock)
        self._server: asyncio.Server | None = None
        self._sessions: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        self._server = await asyncio.start_server(self._accept, host, port, limit=1024 * 1024)
        return address_of(self._server)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for session in self._sessions:
            session.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = asyncio.create_task(self._serve(reader, writer))
        self._sessions.add(session)
        session.add_done_callback(self._sessions.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.device.session()
        with contextlib.suppress(OSError, ConnectionBroken), contextlib.closing(writer):
            while line := (await reader.readline()).decode():
                if not self.device.is_alive(number):  # the device has restarted, which ended the session
                    return
                writer.write(f"{await self._answer(line.strip())}\n".encode())
                await writer.drain()

    async def _answer(self, line: str) -> str:
        """Execute a line and return the answer. Raises ConnectionBroken if an injected fault breaks the connection."""
        verb, *words = line.split() or [""]
        facts = self.device.facts
        if verb in ACTIONS:
            try:
                await self.device.set(ACTIONS[verb], [CrossConnect.parse(word) for word in words], line)
            except DriverPermanent as refusal:
                return f"ERR {refusal.answer}"
            except ValueError as error:
                return f"ERR {error}"
            return "OK"
        sizes = len(facts.ingress_ports), len(facts.egress_ports)
        told: dict[str, list[object]] = {
            "FACTS": [facts.model, facts.serial, facts.software, *sizes, facts.reconfiguration_s],
            "PORTS": [f"{port.port}={port.status}" for port in self.device.ports()],
            "LIST": [f"{circuit.cross_connect}={circuit.state}" for circuit in self.device.circuits()],
        }
        return " ".join(map(str, ["OK", *told[verb]])) if verb in told else "ERR no such verb"


async def main() -> None:
    emulator = LineEmulator(DevicePanel(8, 8))
    sys.stderr.write(f"a switch of 8 ports a side at {await emulator.start(sys.argv[1], int(sys.argv[2]))}\n")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
