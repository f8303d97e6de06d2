"""What all emulators share: the glass behind the protocol, and what goes wrong between the two.

An emulator is a server of one protocol in front of an `EmulatedDevice`. It speaks as the protocol's manual says, and
hands setters to `set`, which plays the faults that a schedule or a test has injected: refusals, bulk commands taken in
part, answers held back, connections broken before or after a command.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from ocs_drivers.base import DeviceClock, SystemClock
from ocs_drivers.cross_connect_model import ConnectionBroken, CrossConnectModel
from ocs_drivers.faults import DeviceFault, DeviceFaultKind, FaultSchedule
from ocs_drivers.model import Action, BootBehaviour, Connectivity, CrossConnect, PortStatus, SwitchFacts

LONGEST_INPUT_BYTES = 1 << 20  # of a line


@dataclass(frozen=True, slots=True)
class DevicePanel:
    """The device to emulate. Each family numbers its ports as it does, see `Emulator.facts`."""

    ingress_ports: int = 32
    egress_ports: int = 32
    reconfiguration_s: float = 0.025
    jitter_s: float = 0.0
    boot: BootBehaviour = BootBehaviour.DARK
    seed: int = 0
    schedule: FaultSchedule = field(default_factory=FaultSchedule)

    def facts(
        self, vendor: str, model: str, serial: str, software: str, *, any_to_any: bool = False, first: int = 1
    ) -> SwitchFacts:
        """A device with these ports, its egress side numbered after its ingress side; or any to any, with as many ports
        as it has on the ingress side."""
        ingress = range(first, first + self.ingress_ports)
        return SwitchFacts(
            vendor=vendor,
            model=model,
            serial=serial,
            software=software,
            connectivity=Connectivity.ANY_TO_ANY if any_to_any else Connectivity.INGRESS_EGRESS,
            ingress_ports=ingress,
            egress_ports=ingress if any_to_any else range(ingress.stop, ingress.stop + self.egress_ports),
            reconfiguration_s=self.reconfiguration_s,
            boot=self.boot,
        )

    def mirrored_facts(self, vendor: str, model: str, serial: str, software: str) -> SwitchFacts:
        """As `facts`, of a device that uses the same numbers on both sides: as many as the longer side has."""
        side = range(1, max(self.ingress_ports, self.egress_ports) + 1)
        return replace(self.facts(vendor, model, serial, software), ingress_ports=side, egress_ports=side)


def calient_port(port: int) -> str:
    """The name of a port of a Calient, eight to a row, eight rows to a shelf: 1 is `1.1.1`, 9 `1.2.1`, 65 `2.1.1`."""
    return f"{(port - 1) // 64 + 1}.{(port - 1) // 8 % 8 + 1}.{(port - 1) % 8 + 1}"


class EmulatedDevice:
    """The glass, and a record of the setters that reached it."""

    def __init__(self, facts: SwitchFacts, panel: DevicePanel, clock: DeviceClock | None = None) -> None:
        self.facts = facts
        self.clock = clock or SystemClock()
        self.switched_on_s = self.clock.now_s()
        rng = random.Random(panel.seed)
        self.model = CrossConnectModel(facts, self.clock, rng, jitter_s=panel.jitter_s, schedule=panel.schedule)
        self.setters: list[str] = []  # as received: what a driver sends is counted here
        self.on_setter: Callable[[str], None] | None = None  # is told of each, as it is received
        self.holding_back = asyncio.Event()  # set once an answer is being held back

    def session(self) -> int:
        """The number of a session that begins now. It is dead, and its connection to be closed, once `is_alive` says
        so: the device has restarted."""
        self.model.advance()
        return self.model.session

    def is_alive(self, session: int) -> bool:
        self.model.advance()
        return session == self.model.session

    async def set(self, action: Action, pairs: Sequence[CrossConnect], command: str) -> None:
        """Carry out one setter that came as `command`. Raises Permanent, with the device's words as `answer`, where the
        glass refuses (what came before it in the list is taken), and ConnectionBroken as the faults say."""
        await self._carry_out(command, partial(self.model.set, action, pairs))

    async def replace(self, pairs: Sequence[CrossConnect], command: str) -> None:
        """As `set`, for a setter that leaves these cross-connects and no others."""
        present = self.model.present
        gone = sorted(present.difference(pairs))
        new = [pair for pair in pairs if pair not in present]
        await self._carry_out(command, partial(self.model.remove, gone), partial(self.model.add, new))

    async def enable(self, ports: Sequence[int], is_enabled: bool, command: str) -> None:
        """As `set`, for a setter that enables or disables ports. A port that has failed stays so."""
        await self._carry_out(command, partial(self._enable, ports, is_enabled))

    async def _carry_out(self, command: str, *steps: Callable[[], None]) -> None:
        self.setters.append(command)
        if self.on_setter is not None:
            self.on_setter(command)
        await self.model.carry_out(*steps, on_hold=self.holding_back.set)

    def _enable(self, ports: Sequence[int], is_enabled: bool) -> None:
        states = {state.port: state.status for state in self.model.ports()}
        before = PortStatus.DISABLED if is_enabled else PortStatus.ENABLED
        for port in ports:
            if states[port] is before:
                self.inject(
                    DeviceFault(DeviceFaultKind.MEND_PORT if is_enabled else DeviceFaultKind.DISABLE_PORT, port)
                )

    def inject(self, fault: DeviceFault) -> None:
        self.model.inject(fault)


def address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(server: asyncio.Server) -> str:
    """Return where a server listens, as `HOST:PORT`."""
    return address_text(*server.sockets[0].getsockname()[:2])


class EmulatedTcpServer(ABC):
    """Serves every connection in a task of its own, until its client has gone, the faults break it or it is stopped."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @abstractmethod
    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. Raises ConnectionBroken where it is to break without another byte."""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        self._server = await asyncio.start_server(self._accept, host, port, limit=LONGEST_INPUT_BYTES)
        return address_of(self._server)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self.serve(reader, writer)
        except (asyncio.CancelledError, asyncio.LimitOverrunError, ConnectionBroken, OSError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()


class Emulator(Protocol):
    """One server. Made as `SomeEmulator(panel, clock=None, **quirks)`; construction opens nothing."""

    device: EmulatedDevice

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; the address to give to a driver, `HOST:PORT`. Port 0: one that is free."""
        ...

    async def stop(self) -> None:
        """Close every connection and stop listening."""
        ...
