"""The driver contract: the operations that the control plane requires of any optical circuit switch.

The contract is a plug point. Each device family has one module, which is registered in the entry-point group
`orchestrrl.ocs_drivers` and looked up by `registry.py`. Every driver must pass the suite in `conformance.py`. A family
does not implement all of `OcsDriver`. It implements a `SwitchWire`, which has only the few basic operations of its
protocol, and `driver.py` builds the contract on top of it. Drivers raise the errors of `errors.py`.
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
    """A clock that returns seconds since the Unix epoch and sleeps for a duration in seconds."""

    def now_s(self) -> float: ...

    async def sleep(self, duration_s: float) -> None: ...


class SystemClock:
    """A clock that reads the wall clock once and then follows the monotonic clock, so it never jumps back."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        return self._offset_s + time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(max(0.0, duration_s))


class OcsDriver(Protocol):
    """The driver of one device. Construction opens no connection; the first call connects. Calls may be concurrent. The
    driver admits one writer at a time, and limits the duration of every command and every wait."""

    device: str  # name of the device in errors and journals

    async def facts(self) -> SwitchFacts: ...

    async def capabilities(self) -> SwitchCapabilities: ...

    async def ports(self) -> tuple[PortState, ...]:
        """Return the state of every port, ordered by port number."""
        ...

    async def cross_connects(self) -> CrossConnectReading:
        """Return every cross-connect of the device, and whether this driver owns it. The driver owns a cross-connect
        that it made or took over, until the cross-connect is removed or its ports carry another cross-connect. Naming a
        foreign cross-connect in a change does not transfer its ownership."""
        ...

    async def plan(self, change: CircuitChange, mode: ChangeMode = ChangeMode.SAFE) -> CircuitDiff:
        """Return the steps of a change, including the removal of circuits that occupy its ports. Reads the device and
        changes nothing on it.

        Raises InvalidChange if the change can never work on this device. Raises CircuitConflict if it cannot work now,
        because a port is in use or failed, or a circuit of another owner occupies a port.
        """
        ...

    async def commit(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> CommitResult:
        """Carry out the part of the diff that is not yet in effect, then read the device to find out what took effect.

        Raises CircuitConflict, before any command is sent, if the device is not at `expect_revision`, or if a circuit
        to be removed is not owned by this driver. No command is sent twice. Commands that did not take effect are
        reported and not repeated. Raises DriverOutcomeUnknown only if the device could not be read after the commands.

        If `revert_in_s` is given, the change is a trial. Unless the change is confirmed, its commands are reverted
        `revert_in_s` seconds after the commit has ended, whether or not the commit succeeded. Until then, every other
        commit raises CircuitConflict. The same diff may be committed again with `revert_in_s`, to complete it. The time
        until the revert then starts again. The process that owns the device performs the revert, for local and remote
        callers. A failed revert is retried, reported as an alarm, and included in the results of `cross_connects` and
        `verify`.
        """
        ...

    async def confirm(self, revision: int) -> None:
        """Confirm the trial change, so that it is kept. `revision` is the revision in the commit's result, or the
        device's present revision if that result was lost or the revert failed. A second confirmation has no effect.
        Raises CircuitConflict if there is no trial change, if the change was reverted, or if the revision differs."""
        ...

    async def take_over(self, pairs: Sequence[CrossConnect]) -> CrossConnectReading:
        """Mark these cross-connects as owned by this driver, regardless of their present owner. Reads the device and
        changes nothing on it. Raises CircuitConflict and changes no ownership if any of the cross-connects is not on
        the device. The error lists all missing cross-connects."""
        ...

    async def verify(self, diff: CircuitDiff) -> Verification:
        """Return the differences between the device and the state that the diff requires. Circuits that the diff does
        not name are ignored."""
        ...

    async def rollback(self, diff: CircuitDiff) -> CommitResult:
        """Restore the circuits that the diff removed and remove the circuits that it added, even if the diff was
        applied only in part. If the diff is a trial, the trial ends. Raises CircuitConflict if another owner has since
        taken the ports, or if another change is a trial."""
        ...

    def watch(self) -> AsyncGenerator[SwitchEvent, None]:
        """Yield the device's events from the first iteration until the generator is closed. The first iteration raises
        DriverPermanent if the `events` capability is not declared."""
        ...

    async def close(self) -> None:
        """Close the session. In the process that owns the device, first revert a trial change if there is one, because
        no process could revert it later."""
        ...


class Armed(Protocol):
    """A prepared commit that starts on a signal, at most once."""

    async def begin(self) -> CommitResult:
        """Start the commit and return its result. As in `OcsDriver.commit`, the device is read first and must still be
        at the expected revision."""
        ...

    def disarm(self) -> None:
        """Discard the prepared commit. Has no effect on a commit that has begun or ended."""
        ...


@runtime_checkable
class Arming(Protocol):
    """An optional interface of a driver that prepares a commit in advance and starts it on a signal.

    The driver performs as much of the work as possible before the signal, so that the command reaches the device
    without delay. If a driver does not implement this interface, the caller calls `commit` at the signal.
    """

    async def arm(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> Armed:
        """Prepare a commit: perform every part of `OcsDriver.commit` that does not access the device. Raises
        DriverError if the commit cannot be prepared. `Armed.begin` raises the errors that depend on the device's state.
        """
        ...


class SwitchWire(Protocol):
    """The basic operations (verbs) of one device protocol, without retries or policy. `driver.SwitchDriver` calls one
    verb at a time, within a time limit, and opens a new session after any error except DriverPermanent. A verb raises
    one of these errors:

    - DriverRetryable: the device cannot be reached or is busy; a setter certainly did not take effect
    - DriverPermanent: the device refused the command; the error contains the device's answer
    - DriverOutcomeUnknown: the connection broke after a setter was sent
    - ValueError: the answer is invalid.
    """

    # The capabilities of this protocol on any device of the family. `open` adds those that only a connected device can
    # report; the driver's `capabilities` connects first for that reason.
    capabilities: SwitchCapabilities

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Close the session. The method is also called if the session is already broken."""
        ...

    async def read_facts(self) -> SwitchFacts: ...

    async def read_ports(self) -> Sequence[PortState]: ...

    async def read_circuits(self) -> Sequence[DeviceCircuit]: ...

    @abstractmethod
    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        """Connect or disconnect exactly these pairs. The list is never empty. It has exactly one pair if the capability
        `bulk` is not declared. For removals, it also has exactly one pair if `removes_one_by_one` is declared."""
        ...

    def events(self) -> AsyncGenerator[SwitchEvent, None]:
        """Yield the device's events. Called only if the `events` capability is declared."""
        raise DriverPermanent("this device does not support events", command="watch")
