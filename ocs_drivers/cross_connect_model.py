"""A device that behaves like glass: mirrors take time, stick and fail, bulk commands take in part, restarts forget.

Without a protocol: the driver `virtual` (virtual.py) and every emulator (emulators/) stand in front of one. Time comes
from the clock, randomness from the seed.
"""

import asyncio
import math
import random
from collections.abc import Callable, Sequence

from ocs_drivers.base import DeviceClock
from ocs_drivers.diff import occupants
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.faults import DeviceFault, DeviceFaultKind, FaultSchedule
from ocs_drivers.model import (
    Action,
    BootBehaviour,
    CircuitState,
    CrossConnect,
    DeviceCircuit,
    EventKind,
    PortState,
    PortStatus,
    SwitchEvent,
    SwitchFacts,
)

LIT_DBM = -2.0
DARK_DBM = -40.0


class ConnectionBroken(Exception):
    """The connection that a command came by must break now, without an answer."""


class CrossConnectModel:
    """Ports, mirrors and fibres. Like many real devices it re-routes a port in use without a word."""

    def __init__(
        self,
        facts: SwitchFacts,
        clock: DeviceClock,
        rng: random.Random,
        *,
        jitter_s: float = 0.0,
        schedule: FaultSchedule | None = None,
    ) -> None:
        self.facts = facts
        self._clock = clock
        self._rng = rng
        self._jitter_s = jitter_s
        self._switched_on_s = clock.now_s()
        self._due = list((schedule or FaultSchedule()).due)
        self._commanded_at_s: dict[CrossConnect, float] = {}
        self._tuned_at_s: dict[CrossConnect, float] = {}
        self._status = dict.fromkeys(sorted({*facts.ingress_ports, *facts.egress_ports}), PortStatus.ENABLED)
        self._stuck: set[int] = set()
        self._unplugged: set[int] = set()
        self._next_setter: list[DeviceFault] = []
        self._listeners: list[asyncio.Queue[SwitchEvent]] = []
        self.session = 0  # counts up; a session with an older number is dead

    def where_does(self, port: int) -> int | None:
        """The port that light from `port` goes to, once the mirrors are in place; None: nowhere."""
        for pair, at_s in self._tuned_at_s.items():
            if at_s <= self._clock.now_s() and port in pair.ports:
                return pair.egress_port if port == pair.ingress_port else pair.ingress_port
        return None

    @property
    def present(self) -> set[CrossConnect]:
        """The circuits that are there, in place or moving."""
        return set(self._tuned_at_s)

    def circuits(self) -> list[DeviceCircuit]:
        return [DeviceCircuit(pair, self._state(pair), self._lit(pair)) for pair in sorted(self._tuned_at_s)]

    def listed(self, *, late: bool = False) -> list[DeviceCircuit]:
        """The circuits as a switch lists them that has no word for moving mirrors: at once when commanded, and no more
        when they are not in place after the stated time, jitter included, until they are. With `late`, only once they
        are in place."""
        self.advance()
        since_s = self._clock.now_s() - self.facts.reconfiguration_s - self._jitter_s
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
        """Take the pairs in order, up to the first that is refused; raises Permanent with the device's words for it."""
        for pair in self._taken_part(pairs):
            for port in (pair.ingress_port, pair.egress_port):
                if self._status.get(port) is not PortStatus.ENABLED:
                    raise DriverPermanent("refused", answer=f"PORT {port} {self._status.get(port, 'UNKNOWN')}".upper())
            if pair not in self._tuned_at_s:
                self._point(pair)
        self._complain_about_rest(pairs)

    def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        (self.add if action is Action.ADD else self.remove)(pairs)

    async def carry_out(self, *steps: Callable[[], None], on_hold: Callable[[], None] = lambda: None) -> None:
        """Take the steps of one setter, with the faults that wait for a setter. Raises what a step raises, and
        ConnectionBroken as the faults say; `on_hold` is called once the answer is being held back."""
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
            on_hold()
            await self._clock.sleep(slow.delay_s)
        if is_dropped:
            raise ConnectionBroken
        if refusal is not None:
            raise refusal

    def remove(self, pairs: Sequence[CrossConnect]) -> None:
        for pair in self._taken_part(pairs):
            is_stuck = self._stuck & pair.ports
            if pair in self._tuned_at_s and not (is_stuck and math.isfinite(self._tuned_at_s[pair])):
                self._forget(pair)
        self._complain_about_rest(pairs)

    def inject(self, fault: DeviceFault) -> None:
        """Let this go wrong now, or with the next setter."""
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
        """Let everything happen that the schedule has due by now; seconds until the next, inf if there is none."""
        age_s = self._clock.now_s() - self._switched_on_s
        while self._due and self._due[0][0] <= age_s:
            self.inject(self._due.pop(0)[1])
        return self._due[0][0] - age_s if self._due else math.inf

    def moving_s(self) -> float:
        """Seconds until the next mirror that moves is in place; inf if none will be."""
        now_s = self._clock.now_s()
        return min((at_s - now_s for at_s in self._tuned_at_s.values() if at_s > now_s), default=math.inf)

    def taken(self, *kinds: DeviceFaultKind) -> DeviceFault | None:
        """The first pending fault of these kinds, which is then spent."""
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

    def _point(self, pair: CrossConnect) -> None:
        holders = occupants(self.facts, self._tuned_at_s)
        for end in self.facts.ends(pair):
            if end in holders and holders[end] in self._tuned_at_s:
                self._forget(holders[end])
        moving_s = self.facts.reconfiguration_s + self._rng.uniform(0.0, self._jitter_s)
        is_stuck = self._stuck & pair.ports
        self._commanded_at_s[pair] = self._clock.now_s()
        self._tuned_at_s[pair] = math.inf if is_stuck else self._clock.now_s() + moving_s
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
        return CircuitState.TUNED if self._tuned_at_s[pair] <= self._clock.now_s() else CircuitState.TUNING

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
        self.session += 1
        if self.facts.boot is not BootBehaviour.RESTORE:
            for pair in list(self._tuned_at_s):
                self._forget(pair)
        self._publish(EventKind.ALARM, "the device restarted")

    def _publish(
        self, kind: EventKind, text: str, port: int | None = None, cross_connect: CrossConnect | None = None
    ) -> None:
        for queue in self._listeners:
            queue.put_nowait(SwitchEvent(self._clock.now_s(), kind, text, port, cross_connect))
