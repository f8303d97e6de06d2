"""The test world of circuit changes: a virtual switch with two circuits, which a change replaces by two others."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from operation_world import OperationWorld

from ocs_drivers.errors import CircuitConflict, DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import ChangeMode, CircuitChange, CircuitDiff, CommitResult, CrossConnect, Verification
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.journal.kinds import CIRCUIT_CHANGES
from orchestrrl.core.journal.store import Journal
from orchestrrl.fabric.circuit_executor import CircuitExecutor

OLD = (CrossConnect(1, 17), CrossConnect(2, 18))
NEW = (CrossConnect(1, 18), CrossConnect(2, 17))
BYSTANDER = CrossConnect(9, 30)
CHANGE = CircuitChange(NEW, OLD)


class FaultySwitch(VirtualSwitch):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__("ocs1", clock=clock, command_timeout_s=0.2, lock_timeout_s=0.5, link_timeout_s=0.2)
        self.lost: set[str] = set()  # results
        self.failing: set[str] = set()
        self.refuses = False  # a failed rollback may not be repeated

    async def commit(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> CommitResult:
        result = await super().commit(diff, expect_revision, revert_in_s)
        self._lose("commit")
        return result

    async def verify(self, diff: CircuitDiff) -> Verification:
        self._lose("verify")
        if "verify" in self.failing:
            self.failing.discard("verify")
            raise DriverRetryable("the switch is busy", device=self.device)
        return await super().verify(diff)

    async def rollback(self, diff: CircuitDiff) -> CommitResult:
        if "roll back" in self.failing and self.refuses:
            raise DriverPermanent("write protected", device=self.device)
        if "roll back" in self.failing:
            raise DriverRetryable("the switch is busy", device=self.device)
        result = await super().rollback(diff)
        self._lose("roll back")
        return result

    def _lose(self, step: str) -> None:
        if step in self.lost:
            self.lost.discard(step)
            raise DriverOutcomeUnknown("the connection broke", device=self.device)


class CircuitWorld(OperationWorld):
    entries = CIRCUIT_CHANGES
    written = 3  # the intent, the ownership, the result
    steps = ("commit", "verify")
    moments_s = (0.0, 0.005, 0.015, 0.024, 0.03, 0.045, 0.055)

    def __init__(self) -> None:
        super().__init__()
        self.switch = FaultySwitch(self.clock)
        self.switch.model.add([*OLD, BYSTANDER])

    async def start(self, journal: Journal) -> None:
        self.executor = CircuitExecutor({"ocs1": self.switch}, journal, self.clock, {"ocs1"})

    async def begin(self, journal: Journal) -> None:
        with suppress(DriverOutcomeUnknown, DriverRetryable):
            await self.executor.change("ocs1", CHANGE, ChangeMode.SAFE)

    async def repeat(self) -> None:
        outcome = await self.executor.change("ocs1", CHANGE, ChangeMode.SAFE)
        assert (outcome.done, outcome.detail) == (True, "already in effect")

    async def begin_late(self, journal: Journal) -> None:
        operation = await self.executor.prepare("ocs1", CHANGE, valid_s=1.0)
        await self.clock.sleep(2.0)
        with suppress(CircuitConflict):
            await self.executor.commit(operation)

    async def settle(self) -> None:
        await self.executor.settle()

    async def crash(self) -> None:
        """Do nothing: the switch continues with the commands it received."""

    async def restart(self, journal: Journal) -> None:
        self.executor.recover()
        for _ in range(3):
            await self.executor.settle()
            await self.clock.sleep(1.0)

    def state(self) -> str:
        present = frozenset(circuit.cross_connect for circuit in self.switch.model.circuits())
        return {frozenset({*OLD, BYSTANDER}): "old", frozenset({*NEW, BYSTANDER}): "new"}.get(present, "between")

    def reported(self, result: Mapping[str, Any]) -> str:
        if result["done"]:
            return "new"
        is_old = result["rolled_back"] or result["detail"].startswith("was not begun")
        return "old" if is_old else "between"

    def fail(self, step: str) -> None:
        if step == "commit":
            self.switch.model.inject(DeviceFault(DeviceFaultKind.STICK_MIRROR, NEW[0].ingress_port))
        else:
            self.switch.failing.add(step)

    def lose(self, step: str) -> None:
        self.switch.lost.add(step)

    def fail_to_undo(self) -> None:
        self.switch.failing.add("roll back")

    def mend(self) -> None:
        self.switch.failing.clear()
        self.switch.model.inject(DeviceFault(DeviceFaultKind.MEND_PORT, NEW[0].ingress_port))


class PreparedCircuitWorld(CircuitWorld):
    """A world in which the change is journalled ahead and committed at its time. Its switch refuses a rollback that
    fails."""

    def __init__(self) -> None:
        super().__init__()
        self.switch.refuses = True

    async def begin(self, journal: Journal) -> None:
        self.operation = await self.executor.prepare("ocs1", CHANGE, valid_s=60.0)
        with suppress(DriverOutcomeUnknown, DriverRetryable):
            await self.executor.commit(self.operation)

    async def repeat(self) -> None:
        with pytest.raises(CircuitConflict, match="already begun or been abandoned"):
            await self.executor.commit(self.operation)


class TrialCircuitWorld(CircuitWorld):
    """A world in which the change is on trial, and confirmed a second later."""

    moments_s = (*CircuitWorld.moments_s, 0.5)

    async def begin(self, journal: Journal) -> None:
        await self._begin(journal, confirmed_after_s=1.0)

    async def repeat(self) -> None:
        assert (await self.executor.confirm("ocs1")).detail == "was confirmed before"

    async def begin_late(self, journal: Journal) -> None:
        await self._begin(journal, confirmed_after_s=20.0)

    async def _begin(self, journal: Journal, confirmed_after_s: float) -> None:
        with suppress(DriverOutcomeUnknown, DriverRetryable):
            await self.executor.change("ocs1", CHANGE, ChangeMode.SAFE, revert_in_s=10.0)
        await self.clock.sleep(confirmed_after_s)
        with suppress(CircuitConflict):
            await self.executor.confirm("ocs1")
