"""Define the common parts of all emulators: the emulated device, a base class for TCP servers, and the injection of
faults.

An emulator is a server of one protocol for an `EmulatedDevice`, which models the optics. Mirrors need time to move, and
may stick or fail. Restarts clear circuits. The emulator implements the protocol as its manual describes it, and passes
setters (commands that change the device) to `EmulatedDevice.set`. That method applies the faults that a schedule or a
test has injected, such as refusals, bulk commands applied in part, delayed answers, and connections broken before or
after a command. Time is read from a given clock, and random numbers depend only on a given seed.
"""

import asyncio
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from ocs_drivers.base import DeviceClock, SystemClock
from ocs_drivers.diff import occupants
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.faults import DeviceFault, DeviceFaultKind, FaultSchedule
from ocs_drivers.model import (
    Action,
    BootBehaviour,
    CircuitState,
    Connectivity,
    CrossConnect,
    DeviceCircuit,
    EventKind,
    PortState,
    PortStatus,
    SwitchEvent,
    SwitchFacts,
)

LONGEST_INPUT_BYTES = 1 << 20  # per line
LIT_DBM = -2.0
DARK_DBM = -40.0


class ConnectionBroken(Exception):
    """Raised when the connection that sent a command must be closed at once, without an answer."""


@dataclass(frozen=True, slots=True)
class DevicePanel:
    """The parameters of the device to emulate. Each device family numbers its ports differently; see `facts` and
    `mirrored_facts`."""

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
        """Return the facts of a device with this panel's ports. The lowest port number is `first`. The egress ports are
        numbered after the ingress ports. An any-to-any device has `ingress_ports` ports."""
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
        """Return the facts of a device that uses the same port numbers on both sides. Each side has as many ports as
        the larger side of the panel."""
        side = range(1, max(self.ingress_ports, self.egress_ports) + 1)
        return replace(self.facts(vendor, model, serial, software), ingress_ports=side, egress_ports=side)


def calient_port(port: int) -> str:
    """Return the name `SHELF.MODULE.PORT` of a Calient port. A module has eight ports, and a shelf has eight modules:
    port 1 is `1.1.1`, port 9 is `1.2.1`, and port 65 is `2.1.1`."""
    return f"{(port - 1) // 64 + 1}.{(port - 1) // 8 % 8 + 1}.{(port - 1) % 8 + 1}"


class EmulatedDevice:
    """The emulated ports, mirrors and fibres, with a record of the received setters. Like many real devices, it
    connects a port in use to its new partner without reporting an error."""

    def __init__(self, facts: SwitchFacts, panel: DevicePanel, clock: DeviceClock | None = None) -> None:
        self.facts = facts
        self.clock = clock or SystemClock()
        self.switched_on_s = self.clock.now_s()
        self.setters: list[str] = []  # as received, so that tests can count them
        self.on_setter: Callable[[str], None] | None = None  # called with each setter on receipt
        self.holding_back = asyncio.Event()  # set once an answer is being delayed
        self._rng = random.Random(panel.seed)
        self._jitter_s = panel.jitter_s
        self._due = list(panel.schedule.due)
        self._commanded_at_s: dict[CrossConnect, float] = {}
        self._tuned_at_s: dict[CrossConnect, float] = {}
        self._status = dict.fromkeys(sorted({*facts.ingress_ports, *facts.egress_ports}), PortStatus.ENABLED)
        self._stuck: set[int] = set()
        self._unplugged: set[int] = set()
        self._next_setter: list[DeviceFault] = []
        self._listeners: list[asyncio.Queue[SwitchEvent]] = []
        self._session = 0  # increases; a session with an older number is closed

    @property
    def present(self) -> set[CrossConnect]:
        """The circuits that are connected now, including those whose mirrors are still moving."""
        return set(self._tuned_at_s)

    def session(self) -> int:
        """Return the number of a new session. If `is_alive` returns False for this number, the device has restarted and
        the session's connection must be closed."""
        self.advance()
        return self._session

    def is_alive(self, session: int | None) -> bool:
        self.advance()
        return session == self._session

    async def set(self, action: Action, pairs: Sequence[CrossConnect], command: str) -> None:
        """Carry out one setter, received as `command`. Raises DriverPermanent, with the device's message as `answer`,
        if the device refuses a pair. The pairs that precede the refused pair in the list stay applied. Raises
        ConnectionBroken if a fault that breaks the connection was injected."""
        await self._carry_out(command, partial(self.add if action is Action.ADD else self.remove, pairs))

    async def replace(self, pairs: Sequence[CrossConnect], command: str) -> None:
        """Carry out a setter after which exactly these cross-connects exist. Raises the same errors as `set`."""
        gone = sorted(self.present.difference(pairs))
        new = [pair for pair in pairs if pair not in self.present]
        await self._carry_out(command, partial(self.remove, gone), partial(self.add, new))

    async def enable(self, ports: Sequence[int], is_enabled: bool, command: str) -> None:
        """Carry out a setter that enables or disables ports. A failed port stays failed. Raises the same errors as
        `set`."""
        await self._carry_out(command, partial(self._enable, ports, is_enabled))

    def where_does(self, port: int) -> int | None:
        """Return the port that light from `port` reaches now, or None if it reaches no port, for example because the
        mirrors are still moving."""
        for pair, at_s in self._tuned_at_s.items():
            if at_s <= self.clock.now_s() and port in pair.ports:
                return pair.egress_port if port == pair.ingress_port else pair.ingress_port
        return None

    def circuits(self) -> list[DeviceCircuit]:
        return [DeviceCircuit(pair, self._state(pair), self._lit(pair)) for pair in sorted(self._tuned_at_s)]

    def listed(self, *, late: bool = False) -> list[DeviceCircuit]:
        """Return the circuits that a switch lists if it does not report whether mirrors are moving. A circuit is listed
        as soon as it is commanded. If its mirrors are not in place after the stated time plus jitter, it is omitted
        until they are in place. If `late` is True, a circuit is listed only when its mirrors are in place."""
        self.advance()
        since_s = self.clock.now_s() - self.facts.reconfiguration_s - self._jitter_s
        return [
            circuit
            for circuit in self.circuits()
            if circuit.state is not CircuitState.TUNING
            or (not late and self._commanded_at_s[circuit.cross_connect] > since_s)
        ]

    def ports(self) -> list[PortState]:
        lit = {port for pair in self._tuned_at_s if self._lit(pair) for port in (pair.ingress_port, pair.egress_port)}
        return [PortState(port, status, LIT_DBM if port in lit else DARK_DBM) for port, status in self._status.items()]

    def add(self, pairs: Sequence[CrossConnect]) -> None:
        """Connect the pairs in list order, and stop at the first pair that the device refuses. Raises DriverPermanent
        with the device's message for that pair."""
        for pair in self._taken_part(pairs):
            for port in (pair.ingress_port, pair.egress_port):
                if self._status.get(port) is not PortStatus.ENABLED:
                    raise DriverPermanent("refused", answer=f"PORT {port} {self._status.get(port, 'UNKNOWN')}".upper())
            if pair not in self._tuned_at_s:
                self._point(pair)
        self._complain_about_rest(pairs)

    def remove(self, pairs: Sequence[CrossConnect]) -> None:
        for pair in self._taken_part(pairs):
            is_stuck = self._stuck & pair.ports
            if pair in self._tuned_at_s and not (is_stuck and math.isfinite(self._tuned_at_s[pair])):
                self._forget(pair)
        self._complain_about_rest(pairs)

    def inject(self, fault: DeviceFault) -> None:
        """Inject a fault. It takes effect at once or, for faults of commands and answers, with the next setter. Raises
        ValueError if the device does not have the fault's port."""
        port = fault.port
        if port is not None and port not in self._status:
            raise ValueError(f"port must be one of the device's, got {port}")
        if port is None:
            if fault.kind is DeviceFaultKind.RESTART:
                self._restart()
            else:
                self._next_setter.append(fault)
        elif fault.kind is DeviceFaultKind.STICK_MIRROR:
            self._stuck.add(port)
        elif fault.kind is DeviceFaultKind.UNPLUG:
            self._unplugged.add(port)
        else:
            self._set_status(port, fault.kind)

    def advance(self) -> float:
        """Apply all scheduled faults whose time has come. Return the time, in seconds, until the next scheduled fault,
        or inf if there is none."""
        age_s = self.clock.now_s() - self.switched_on_s
        while self._due and self._due[0][0] <= age_s:
            self.inject(self._due.pop(0)[1])
        return self._due[0][0] - age_s if self._due else math.inf

    def moving_s(self) -> float:
        """Return the time, in seconds, until the next moving mirror is in place, or inf if no mirror is moving. Stuck
        mirrors are ignored."""
        now_s = self.clock.now_s()
        return min((at_s - now_s for at_s in self._tuned_at_s.values() if at_s > now_s), default=math.inf)

    def taken(self, *kinds: DeviceFaultKind) -> DeviceFault | None:
        """Remove and return the first pending fault of these kinds. Return None if there is no such fault."""
        for fault in self._next_setter:
            if fault.kind in kinds:
                self._next_setter.remove(fault)
                return fault
        return None

    def listen(self) -> asyncio.Queue[SwitchEvent]:
        queue: asyncio.Queue[SwitchEvent] = asyncio.Queue()
        self._listeners.append(queue)
        return queue

    def unlisten(self, queue: asyncio.Queue[SwitchEvent]) -> None:
        self._listeners.remove(queue)

    async def _carry_out(self, command: str, *steps: Callable[[], None]) -> None:
        """Carry out the steps of one setter, and apply the faults that were injected for the next setter."""
        self.setters.append(command)
        if self.on_setter is not None:
            self.on_setter(command)
        self.advance()
        if self.taken(DeviceFaultKind.DROP_COMMAND):
            raise ConnectionBroken
        is_dropped = self.taken(DeviceFaultKind.DROP_CONNECTION)
        slow = self.taken(DeviceFaultKind.SLOW_ANSWER)
        refusal: DriverPermanent | None = None
        try:
            for step in steps:
                step()
        except DriverPermanent as error:
            refusal = error
        if slow:
            self.holding_back.set()
            await self.clock.sleep(slow.delay_s)
        if is_dropped:
            raise ConnectionBroken
        if refusal is not None:
            raise refusal

    def _enable(self, ports: Sequence[int], is_enabled: bool) -> None:
        before = PortStatus.DISABLED if is_enabled else PortStatus.ENABLED
        kind = DeviceFaultKind.MEND_PORT if is_enabled else DeviceFaultKind.DISABLE_PORT
        for port in ports:
            if self._status[port] is before:
                self._set_status(port, kind)

    def _point(self, pair: CrossConnect) -> None:
        holders = occupants(self.facts, self._tuned_at_s)
        for end in self.facts.ends(pair):
            if end in holders and holders[end] in self._tuned_at_s:
                self._forget(holders[end])
        moving_s = self.facts.reconfiguration_s + self._rng.uniform(0.0, self._jitter_s)
        is_stuck = self._stuck & pair.ports
        self._commanded_at_s[pair] = self.clock.now_s()
        self._tuned_at_s[pair] = math.inf if is_stuck else self.clock.now_s() + moving_s
        self._publish(EventKind.CIRCUIT, f"{pair} commanded", cross_connect=pair)

    def _forget(self, pair: CrossConnect) -> None:
        del self._tuned_at_s[pair], self._commanded_at_s[pair]
        self._publish(EventKind.CIRCUIT, f"{pair} disconnected", cross_connect=pair)

    def _taken_part(self, pairs: Sequence[CrossConnect]) -> Sequence[CrossConnect]:
        partial = next((fault for fault in self._next_setter if fault.kind is DeviceFaultKind.PARTIAL_COMMIT), None)
        return pairs if partial is None else pairs[: partial.items]

    def _complain_about_rest(self, pairs: Sequence[CrossConnect]) -> None:
        partial = self.taken(DeviceFaultKind.PARTIAL_COMMIT)
        if partial is not None and not partial.silent and partial.items < len(pairs):
            raise DriverPermanent("refused", answer=f"MIRROR DRIVER ERROR AFTER {partial.items} OF {len(pairs)}")

    def _state(self, pair: CrossConnect) -> CircuitState:
        if PortStatus.FAILED in (self._status[pair.ingress_port], self._status[pair.egress_port]):
            return CircuitState.FAILED
        return CircuitState.TUNED if self._tuned_at_s[pair] <= self.clock.now_s() else CircuitState.TUNING

    def _lit(self, pair: CrossConnect) -> bool:
        ports = pair.ports
        is_passing = all(self._status[port] is PortStatus.ENABLED for port in ports) and not self._unplugged & ports
        return is_passing and self._state(pair) is CircuitState.TUNED

    def _set_status(self, port: int, kind: DeviceFaultKind) -> None:
        status = {DeviceFaultKind.FAIL_PORT: PortStatus.FAILED, DeviceFaultKind.DISABLE_PORT: PortStatus.DISABLED}
        self._status[port] = status.get(kind, PortStatus.ENABLED)
        if kind is DeviceFaultKind.MEND_PORT:
            self._stuck.discard(port)
            self._unplugged.discard(port)
        self._publish(EventKind.PORT, f"port {port} {self._status[port]}", port=port)

    def _restart(self) -> None:
        self._session += 1
        if self.facts.boot is not BootBehaviour.RESTORE:
            for pair in list(self._tuned_at_s):
                self._forget(pair)
        self._publish(EventKind.ALARM, "the device restarted")

    def _publish(
        self, kind: EventKind, text: str, port: int | None = None, cross_connect: CrossConnect | None = None
    ) -> None:
        for queue in self._listeners:
            queue.put_nowait(SwitchEvent(self.clock.now_s(), kind, text, port, cross_connect))


def address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(server: asyncio.Server) -> str:
    """Return the address where a server listens, as `HOST:PORT`."""
    return address_text(*server.sockets[0].getsockname()[:2])


class EmulatedTcpServer(ABC):
    """A TCP server with one task per connection. A task runs until the client disconnects, a fault breaks the
    connection, or the server is stopped."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @abstractmethod
    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. Raises ConnectionBroken if the connection must be closed without sending another
        byte."""

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
    """One emulated server, constructed as `SomeEmulator(panel, clock=None, **quirks)`. Construction opens no socket."""

    device: EmulatedDevice

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Start listening, and return the server's address as `HOST:PORT`, for use by a driver. If `port` is 0, the
        system selects a free port."""
        ...

    async def stop(self) -> None:
        """Close every connection and stop listening."""
        ...
