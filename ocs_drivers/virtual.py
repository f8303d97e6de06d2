"""The driver `virtual`, which controls an emulated switch in the driver's own process. emulators/base.py implements the
switch.

`VirtualSwitchWire` opens sessions with an `EmulatedDevice`. The device continues to exist when sessions and drivers are
closed.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

from ocs_drivers.base import DeviceClock, SwitchWire
from ocs_drivers.driver import within
from ocs_drivers.emulators.base import ConnectionBroken, DevicePanel, EmulatedDevice
from ocs_drivers.errors import DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.faults import parse_schedule
from ocs_drivers.model import (
    Action,
    BootBehaviour,
    Connectivity,
    CrossConnect,
    DeviceCircuit,
    PortState,
    SwitchCapabilities,
    SwitchEvent,
    SwitchFacts,
)
from ocs_drivers.options import ConfiguredSwitch, DriverOptions, Flag, SecondsOr0, is_whole, must_be


class VirtualSwitchWire(SwitchWire):
    """Implements `base.SwitchWire` over a session with an `EmulatedDevice`."""

    def __init__(self, model: EmulatedDevice, *, bulk: bool = True) -> None:
        self.capabilities = SwitchCapabilities(
            bulk=bulk, tuned_state=True, link_state=True, port_power=True, events=True
        )
        self._model = model
        self._session: int | None = None

    async def open(self) -> None:
        self._session = self._model.session()

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

    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        self._check_session()
        if not pairs:
            raise ValueError(
                "the list of circuits must not be empty: some devices interpret an empty list as all circuits"
            )
        command = f"{'connect' if action is Action.ADD else 'disconnect'} {' '.join(map(str, pairs))}"
        try:
            await self._model.set(action, pairs, command)
        except ConnectionBroken:
            raise DriverOutcomeUnknown("the connection failed during the command", command=command) from None
        except DriverPermanent as error:
            error.command = command
            raise

    async def events(self) -> AsyncGenerator[SwitchEvent, None]:
        queue = self._model.listen()
        try:
            while True:
                try:
                    # Scheduled faults take effect on time even without other calls.
                    yield await within(self._model.clock, min(self._model.advance(), 3600.0), queue.get())
                except TimeoutError:
                    continue
        finally:
            self._model.unlisten(queue)

    def _check_session(self) -> None:
        if not self._model.is_alive(self._session):
            raise DriverRetryable("the session is closed", after_s=0.0)


def _is_even(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 2 and value % 2 == 0


class VirtualOptions(DriverOptions):
    ports: Annotated[int, must_be("an even number >= 2", _is_even)] = 32
    connectivity: Connectivity = Connectivity.INGRESS_EGRESS
    boot: BootBehaviour = BootBehaviour.DARK
    reconfiguration_s: SecondsOr0 = 0.025
    jitter_s: SecondsOr0 = 0.0
    bulk: Flag = True
    seed: Annotated[int, must_be("a whole number", is_whole)] = 0
    faults: Any = ()

    def conflicts(self) -> list[str]:
        schedule, wrong = parse_schedule(self.faults)
        beyond = [fault.port for _, fault in schedule.due if fault.port and not 1 <= fault.port <= self.ports]
        return wrong + [f"faults: port must be within 1..{self.ports}, got {port}" for port in beyond]


class VirtualSwitch(ConfiguredSwitch, options=VirtualOptions):
    """The driver `virtual`, whose device runs in the driver's own process. `ports` is the number of ports, which are
    numbered from 1. On an ingress_egress device, the first half of the ports is on the ingress side and the second half
    on the egress side."""

    def _make_wire(self, options: VirtualOptions, clock: DeviceClock) -> VirtualSwitchWire:
        any_to_any = options.connectivity is Connectivity.ANY_TO_ANY
        side = options.ports if any_to_any else options.ports // 2
        times, schedule = (options.reconfiguration_s, options.jitter_s), parse_schedule(options.faults)[0]
        panel = DevicePanel(side, side, *times, options.boot, options.seed, schedule)
        name = f"virtual-{options.ports}"
        facts = panel.facts("OrchestrRL", name, f"virtual-{self.device}", "1", any_to_any=any_to_any)
        self.model = EmulatedDevice(facts, panel, clock)
        self.wire = VirtualSwitchWire(self.model, bulk=options.bulk)
        return self.wire
