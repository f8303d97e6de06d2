"""An emulated switch that accepts some commands without effect, or never removes some circuits."""

from collections.abc import Sequence

from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.registry import make_emulator
from ocs_drivers.model import CrossConnect, DeviceCircuit


class StubbornSwitch:
    """A switch whose circuits from ingress port `ignores` never come up, and whose circuits from port `keeps` never go
    down."""

    def __init__(self, protocol: str = "scpi", *, ignores: int = 0, keeps: int = 0) -> None:
        self.emulator = make_emulator(protocol, DevicePanel(reconfiguration_s=0.005))
        glass = self.emulator.device
        self.model = glass
        self.readings = 0
        self._circuits, add, remove = glass.circuits, glass.add, glass.remove

        def circuits() -> list[DeviceCircuit]:
            self.readings += 1
            return self._circuits()

        def add_most(pairs: Sequence[CrossConnect]) -> None:
            add([pair for pair in pairs if pair.ingress_port != ignores])

        def remove_most(pairs: Sequence[CrossConnect]) -> None:
            remove([pair for pair in pairs if pair.ingress_port != keeps])

        glass.circuits, glass.add, glass.remove = circuits, add_most, remove_most  # type: ignore[method-assign]

    def up(self) -> list[str]:
        return [str(circuit.cross_connect) for circuit in self._circuits()]
