"""The driver `virtual`: a switch in this very process that behaves like one, see cross_connect_model.py.

`VirtualSwitchWire` is a session with a `CrossConnectModel`, which outlives every session and every driver.
"""

import random
from collections.abc import AsyncGenerator, Sequence

from ocs_drivers.base import DeviceClock, SystemClock
from ocs_drivers.cross_connect_model import CrossConnectModel
from ocs_drivers.driver import SwitchDriver, within
from ocs_drivers.errors import DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.faults import DeviceFaultKind, parse_schedule
from ocs_drivers.model import (
    BootBehaviour,
    Connectivity,
    CrossConnect,
    DeviceCircuit,
    PortState,
    SwitchCapabilities,
    SwitchEvent,
    SwitchFacts,
)
from ocs_drivers.options import DriverOptions


class VirtualSwitchWire:
    """A session with a `CrossConnectModel`: the `base.Wire` of it."""

    def __init__(self, model: CrossConnectModel, clock: DeviceClock, *, bulk: bool = True) -> None:
        self.capabilities = SwitchCapabilities(
            bulk=bulk, tuned_state=True, link_state=True, port_power=True, events=True
        )
        self._model = model
        self._clock = clock
        self._session: int | None = None
        self.setters: list[str] = []  # as they came to the device

    async def open(self) -> None:
        self._model.advance()
        self._session = self._model.session

    async def close(self) -> None:
        self._session = None

    async def read_facts(self) -> SwitchFacts:
        self._check_session()
        return self._model.facts

    async def read_ports(self) -> Sequence[PortState]:
        self._check_session()
        return self._model.ports()

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        self._check_session()
        return self._model.circuits()

    async def add(self, pairs: Sequence[CrossConnect]) -> None:
        await self._set(pairs, is_add=True)

    async def remove(self, pairs: Sequence[CrossConnect]) -> None:
        await self._set(pairs, is_add=False)

    async def events(self) -> AsyncGenerator[SwitchEvent, None]:
        queue = self._model.listen()
        try:
            while True:
                try:
                    # What the schedule has due comes about even if nobody else is asking.
                    yield await within(self._clock, min(self._model.advance(), 3600.0), queue.get())
                except TimeoutError:
                    continue
        finally:
            self._model.unlisten(queue)

    async def _set(self, pairs: Sequence[CrossConnect], is_add: bool) -> None:
        self._check_session()
        if not pairs:
            raise ValueError("a setter with an empty list: on some devices that means every circuit")
        command = f"{'connect' if is_add else 'disconnect'} {' '.join(str(pair) for pair in pairs)}"
        self.setters.append(command)
        if self._model.taken(DeviceFaultKind.DROP_COMMAND):
            raise DriverOutcomeUnknown("the connection broke", command=command)
        is_dropped = self._model.taken(DeviceFaultKind.DROP_CONNECTION)
        slow = self._model.taken(DeviceFaultKind.SLOW_ANSWER)
        try:
            (self._model.add if is_add else self._model.remove)(pairs)
        except DriverPermanent as error:
            error.command = command
            raise
        if slow:
            await self._clock.sleep(slow.delay_s)
        if is_dropped:
            raise DriverOutcomeUnknown("the connection broke", command=command)

    def _check_session(self) -> None:
        self._model.advance()
        if self._session != self._model.session:
            raise DriverRetryable("the session is dead", after_s=0.0)


class VirtualSwitch(SwitchDriver):
    """The driver `virtual`: a device in this very process. `ports` are numbered from 1; an ingress_egress device has
    the first half on the ingress side and the second half on the egress side."""

    def __init__(
        self,
        device: str,
        *,
        clock: DeviceClock | None = None,
        ports: int = 32,
        connectivity: str = Connectivity.INGRESS_EGRESS,
        boot: str = BootBehaviour.DARK,
        reconfiguration_s: float = 0.025,
        jitter_s: float = 0.0,
        bulk: bool = True,
        seed: int = 0,
        faults: Sequence[object] = (),
        command_timeout_s: float = 5.0,
        lock_timeout_s: float = 10.0,
        tune_timeout_s: float | None = None,
        link_timeout_s: float = 2.0,
    ) -> None:
        options = DriverOptions(device)
        schedule, wrong = parse_schedule(faults)
        options.faults += wrong
        if isinstance(ports, bool) or not isinstance(ports, int) or ports < 2 or ports % 2:
            options.add("ports", "must be an even number >= 2", ports)
        options.choice("connectivity", connectivity, Connectivity)
        options.choice("boot", boot, BootBehaviour)
        options.flag("bulk", bulk)
        options.whole("seed", seed)
        options.seconds("reconfiguration_s", reconfiguration_s, may_be_0=True)
        options.seconds("jitter_s", jitter_s, may_be_0=True)
        limits = options.limits(command_timeout_s, lock_timeout_s, tune_timeout_s, link_timeout_s)
        for _, fault in schedule.due if not options.faults else ():
            if fault.port is not None and not 1 <= fault.port <= ports:
                options.add("faults", f"port must be within 1..{ports}", fault.port)
        options.check()
        half = range(1, ports + 1) if connectivity == Connectivity.ANY_TO_ANY else range(1, ports // 2 + 1)
        facts = SwitchFacts(
            vendor="OrchestrRL",
            model=f"virtual-{ports}",
            serial=f"virtual-{device}",
            software="1",
            connectivity=Connectivity(connectivity),
            ingress_ports=half,
            egress_ports=half if connectivity == Connectivity.ANY_TO_ANY else range(ports // 2 + 1, ports + 1),
            reconfiguration_s=reconfiguration_s,
            boot=BootBehaviour(boot),
        )
        clock = clock or SystemClock()
        self.model = CrossConnectModel(facts, clock, random.Random(seed), jitter_s=jitter_s, schedule=schedule)
        self.wire = VirtualSwitchWire(self.model, clock, bulk=bulk)
        super().__init__(device, self.wire, clock=clock, limits=limits)
