"""Circuits are tuned by the clock: not before the stated time, and not by an answer that may be older."""

from ocs_drivers.model import Action, CircuitState, CrossConnect
from ocs_drivers.settling import Settling
from orchestrrl.core.clock import VirtualClock

ONE, TWO = CrossConnect(1, 9), CrossConnect(2, 10)


async def test_circuit_is_tuned_when_read_after_stated_time() -> None:
    clock = VirtualClock(1000.0)
    settling = Settling(clock, 0.025)
    with settling.commanding(Action.ADD, [ONE]):
        pass
    before = settling.moving()
    await clock.advance(0.025)
    # The answer arrived after that time, but may have been written before it.
    assert [circuit.state for circuit in settling.circuits([ONE, TWO], before)] == [
        CircuitState.TUNING,
        CircuitState.TUNED,
    ]
    assert [circuit.state for circuit in settling.circuits([ONE, TWO], settling.moving())] == [CircuitState.TUNED] * 2


async def test_reversed_pair_is_the_same_circuit() -> None:
    settling = Settling(VirtualClock(1000.0), 0.025)
    with settling.commanding(Action.ADD, [ONE]):
        pass
    (circuit,) = settling.circuits([CrossConnect(9, 1)], settling.moving())
    assert circuit.state is CircuitState.TUNING
