"""The driver contract: what the control plane asks of any optical circuit switch.

A plug point: one module per device family, registered in the entry-point group `orchestrrl.ocs_drivers`, looked up by
`registry.py`. Every driver passes `conformance.py`. A family need not implement all of `OcsDriver`: it writes a
`SwitchWire`, the few verbs that its protocol has, and `driver.py` makes the contract of it. Errors are those of
`errors.py`.
"""

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol, runtime_checkable

from ocs_drivers.errors import DriverPermanent
from ocs_drivers.model import (
    Action,
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    CommitResult,
    CrossConnect,
    CrossConnectReading,
    DeviceCircuit,
    PortState,
    SwitchCapabilities,
    SwitchEvent,
    SwitchFacts,
    Verification,
)


class DeviceClock(Protocol):
    """Seconds since the Unix epoch, and sleeping in the same seconds."""

    def now_s(self) -> float: ...

    async def sleep(self, duration_s: float) -> None: ...


class SystemClock:
    """Real time: follows the system's clock once, then the monotonic one, so it never jumps back."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        return self._offset_s + time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(max(0.0, duration_s))


class OcsDriver(Protocol):
    """One device. Construction opens nothing; the first call connects. Calls may come concurrently: the driver lets
    one writer through at a time, and bounds every command and every wait in time."""

    device: str  # the name it goes by in errors and journals

    async def facts(self) -> SwitchFacts: ...

    async def capabilities(self) -> SwitchCapabilities: ...

    async def ports(self) -> tuple[PortState, ...]:
        """Every port, by number."""
        ...

    async def cross_connects(self) -> CrossConnectReading:
        """Every cross-connect, and whether it is ours: made by this driver, or taken over, until it was taken down or
        others used its ports. What somebody else made never becomes ours by being named in a change."""
        ...

    async def plan(self, change: CircuitChange, mode: ChangeMode = ChangeMode.SAFE) -> CircuitDiff:
        """What the change would do, evictions included. Reads the device and sends nothing.

        Raises InvalidChange for what can never work on this device, Conflict for what cannot work on it now: a port in
        use or failed, a circuit in the way that is not ours.
        """
        ...

    async def commit(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> CommitResult:
        """Carry out what of the diff is not yet so, then read back what took.

        Refuses with Conflict, before anything is sent, when the device is not at `expect_revision`, or a circuit that
        is to go is not ours. Sends no command twice: a part that did not take is reported, not repeated. Raises
        OutcomeUnknown only if the device could not be read afterwards either.

        With `revert_in_s` the change is on trial: what this commit sent reverts itself that long after the commit is
        over, however it ended, unless it is confirmed. Until then every other commit is refused with Conflict; the same
        diff may be committed again, with `revert_in_s`, to complete it, and its time begins anew. It reverts in the
        process that owns the device, whoever asked for it. A revert that fails is repeated, told as an alarm, and shown
        by `cross_connects` and `verify`.
        """
        ...

    async def confirm(self, revision: int) -> None:
        """Keep what is on trial. `revision` is that of the commit's result, or of the device as it is now, where the
        result was lost or the revert fails. To confirm twice is harmless. Raises Conflict where nothing is on trial,
        it has been reverted, or the revision is another."""
        ...

    async def take_over(self, pairs: Sequence[CrossConnect]) -> CrossConnectReading:
        """From now on these are ours, whoever made them; the device is only read. All must be on it, else Conflict,
        with all that are not, and none is taken over."""
        ...

    async def verify(self, diff: CircuitDiff) -> Verification:
        """Compare the device with what the diff wants of it; other circuits are not looked at."""
        ...

    async def rollback(self, diff: CircuitDiff) -> CommitResult:
        """From any point of the diff, bring back what it removed and take down what it added. Raises Conflict where
        somebody else has meanwhile taken the ports, or another change is on trial. Ends the trial of this diff."""
        ...

    def watch(self) -> AsyncGenerator[SwitchEvent, None]:
        """Events from now on, until closed; raises Permanent when iterated if the capability is not declared."""
        ...

    async def close(self) -> None:
        """Drop the session. Who owns the device reverts what is on trial first: nobody would later."""
        ...


class Armed(Protocol):
    """One commit that waits for its word. It is begun at most once."""

    async def begin(self) -> CommitResult:
        """As `OcsDriver.commit` from here on: the device is asked whether it still is at the expected revision."""
        ...

    def disarm(self) -> None:
        """It is not wanted any more; harmless where it is over. What has begun is carried on with."""
        ...


@runtime_checkable
class Arming(Protocol):
    """What a driver may offer beyond the contract: a commit made ready ahead, and begun at a word.

    Between a word and a command at a device nothing is to be built, connected or read that could have been before.
    Where a driver has nothing to gain from it, its `commit` is called at the word instead.
    """

    async def arm(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> Armed:
        """All of `OcsDriver.commit` that does not touch the device. Raises DriverError as that does."""
        ...


class SwitchWire(Protocol):
    """The verbs of one device protocol, without policy. `driver.SwitchDriver` calls one at a time, inside a time limit,
    and opens again after an error. A verb raises

    - Retryable: the device cannot be reached, or is busy; a setter did certainly not take
    - Permanent: the device refused, with its own words
    - OutcomeUnknown: the connection broke after a setter was sent
    - ValueError: the answer makes no sense.
    """

    # What this protocol can do with any of its kind, before the device is known; what only the device can tell is added
    # by `open`, and its driver's `capabilities` asks for it first.
    capabilities: SwitchCapabilities

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Drop the session; also called on a session that is broken already."""
        ...

    async def read_facts(self) -> SwitchFacts: ...

    async def read_ports(self) -> Sequence[PortState]: ...

    async def read_circuits(self) -> Sequence[DeviceCircuit]: ...

    @abstractmethod
    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        """Command these up, or down, and nothing else. Never called with an empty list, nor with more than one where
        `bulk` is not declared or, to remove them, the device `removes_one_by_one`."""
        ...

    def events(self) -> AsyncGenerator[SwitchEvent, None]:
        """Asked for only where `events` is declared."""
        raise DriverPermanent("this device reports no events", command="watch")
