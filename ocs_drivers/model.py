"""Define the data model of optical circuit switches: ports, cross-connects, changes and their results. Its objects are
immutable.

Ports have the device's numbers. An `ingress_egress` device may use the same numbers on both sides (Calient) or number
the egress ports after the ingress ports (Polatis). `SwitchFacts` contains the range of each side.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from math import inf
from typing import Self


class Connectivity(StrEnum):
    """The pairs of ports that a device can connect: an ingress port with an egress port, or any two ports."""

    INGRESS_EGRESS = "ingress_egress"
    ANY_TO_ANY = "any_to_any"


class BootBehaviour(StrEnum):
    """The state of the cross-connects after a restart of the device: all removed (`dark`), all restored (`restore`), or
    not known (`unknown`)."""

    DARK = "dark"
    RESTORE = "restore"
    UNKNOWN = "unknown"


class ChangeMode(StrEnum):
    """The treatment of circuits that occupy ports needed by a change. `safe` refuses the change, `update` evicts these
    circuits, and `overwrite` evicts all circuits that the change does not name. Only circuits owned by this driver are
    evicted."""

    SAFE = "safe"
    UPDATE = "update"
    OVERWRITE = "overwrite"


class PortStatus(StrEnum):
    ENABLED = "enabled"
    DISABLED = "disabled"
    FAILED = "failed"


class CircuitState(StrEnum):
    """The state of the mirrors of one cross-connect, as the device reports it."""

    TUNING = "tuning"
    TUNED = "tuned"
    FAILED = "failed"


class Action(StrEnum):
    ADD = "add"
    REMOVE = "remove"


class EventKind(StrEnum):
    PORT = "port"  # a port changed its status
    CIRCUIT = "circuit"  # a cross-connect appeared, disappeared or changed its state
    ALARM = "alarm"  # the device raised an alarm


@dataclass(frozen=True, slots=True, order=True)
class CrossConnect:
    """A light path from one port to another. By convention, the smaller port number is the ingress on an any-to-any
    device."""

    ingress_port: int
    egress_port: int

    def __str__(self) -> str:
        return f"{self.ingress_port}:{self.egress_port}"

    @property
    def ports(self) -> frozenset[int]:
        return frozenset((self.ingress_port, self.egress_port))

    @property
    def turned(self) -> "CrossConnect":
        """The cross-connect with ingress and egress ports exchanged."""
        return CrossConnect(self.egress_port, self.ingress_port)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse text of the form `INGRESS:EGRESS`, such as `1:17`. Raises ValueError with the reason if the text is
        malformed."""
        ingress, colon, egress = text.partition(":")
        if not (colon and ingress.isdecimal() and egress.isdecimal()):
            raise ValueError("must be INGRESS:EGRESS with two port numbers")
        return cls(int(ingress), int(egress))


MOST_PORTS = 99_999  # per side; a device that reports more is not a switch


@dataclass(frozen=True, slots=True)
class SwitchFacts:
    """The identity and fixed properties of a device. `reconfiguration_s` is the time, in seconds, that the device needs
    to move one circuit, as stated by the vendor."""

    vendor: str
    model: str
    serial: str
    software: str
    connectivity: Connectivity
    ingress_ports: range
    egress_ports: range
    reconfiguration_s: float
    boot: BootBehaviour = BootBehaviour.UNKNOWN

    def __post_init__(self) -> None:
        if not self.ingress_ports or not self.egress_ports:
            raise ValueError(
                f"ports: must not be empty on either side, got {self.ingress_ports} and {self.egress_ports}"
            )
        for ports in (self.ingress_ports, self.egress_ports):
            if ports.stop - ports.start > MOST_PORTS:
                raise ValueError(f"ports: must be at most {MOST_PORTS} per side, got {ports.stop - ports.start}")
        if self.connectivity is Connectivity.ANY_TO_ANY and self.ingress_ports != self.egress_ports:
            raise ValueError(
                "an any-to-any device must have the same ingress and egress ports, "
                f"got {self.ingress_ports} and {self.egress_ports}"
            )
        if not 0 <= self.reconfiguration_s < inf:
            raise ValueError(f"reconfiguration_s must be a number >= 0, got {self.reconfiguration_s}")

    @property
    def ports(self) -> int:
        """The number of distinct port numbers on both sides together."""
        return len({*self.ingress_ports, *self.egress_ports})

    def normal(self, pair: CrossConnect) -> CrossConnect:
        """Return the cross-connect in canonical form. On an any-to-any device, the smaller port is first. On other
        devices, the cross-connect is unchanged."""
        if self.connectivity is Connectivity.ANY_TO_ANY and pair.ingress_port > pair.egress_port:
            return pair.turned
        return pair

    def ends(self, pair: CrossConnect) -> tuple[tuple[str, int], tuple[str, int]]:
        """Return the two (kind, port) slots that a cross-connect occupies. A slot can belong to at most one
        cross-connect."""
        if self.connectivity is Connectivity.ANY_TO_ANY:
            return ("port", pair.ingress_port), ("port", pair.egress_port)
        return ("ingress_port", pair.ingress_port), ("egress_port", pair.egress_port)


@dataclass(frozen=True, slots=True)
class SwitchCapabilities:
    """The capabilities that a driver declares for its device. The conformance suite tests every declared capability.
    Callers must not rely on undeclared capabilities."""

    bulk: bool = False  # one command carries many cross-connects
    tuned_state: bool = False  # distinguishes tuning from tuned; otherwise every listed circuit is tuned
    link_state: bool = False  # detects light at the far end
    port_power: bool = False  # measures optical power
    events: bool = False  # `watch` reports ports and alarms
    removes_one_by_one: bool = False  # `bulk` covers additions only


@dataclass(frozen=True, slots=True)
class PortState:
    port: int
    status: PortStatus
    power_dbm: float | None = None  # None: not measured


@dataclass(frozen=True, slots=True)
class DeviceCircuit:
    """A cross-connect, with the state that the device reports."""

    cross_connect: CrossConnect
    state: CircuitState = CircuitState.TUNED
    link_up: bool | None = None  # None: not measured
    ours: bool = False  # made or taken over by this driver; set by the driver, not by a wire


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """A trial change. It is reverted at the time `until_s` unless it is confirmed before then."""

    # the revision a confirmation must name; None: the device's state after the commit is not known
    revision: int | None
    until_s: float | None  # by the driver's clock, seconds since the Unix epoch; None: the commit is still running
    removed: tuple[CrossConnect, ...] = ()  # restored by the revert
    added: tuple[CrossConnect, ...] = ()  # removed by the revert
    failure: str = ""  # why the revert failed after the time was over; the revert is retried

    def __str__(self) -> str:
        if self.failure:
            return f"a change was not confirmed and cannot be reverted ({self.change}): {self.failure}"
        until = "its commit and its trial time are over" if self.until_s is None else utc(self.until_s)
        return f"a change is on trial until {until} ({self.change})"

    @property
    def change(self) -> str:
        return " ".join((*(f"-{pair}" for pair in self.removed), *(f"+{pair}" for pair in self.added)))


def utc(at_s: float) -> str:
    """Format a time in seconds since the Unix epoch as UTC, for display."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00") + " UTC"


@dataclass(frozen=True, slots=True)
class CrossConnectReading:
    """All cross-connects of a device at one instant, sorted. The revision changes whenever any client changes the set
    of cross-connects. If the device has no revisions, the revision is the fingerprint of the set."""

    circuits: tuple[DeviceCircuit, ...]
    revision: int
    unconfirmed: Unconfirmed | None = None

    @property
    def cross_connects(self) -> frozenset[CrossConnect]:
        return frozenset(circuit.cross_connect for circuit in self.circuits)

    @property
    def foreign(self) -> frozenset[CrossConnect]:
        """The cross-connects that this driver does not own. The driver does not change them unless they are taken over
        by name."""
        return frozenset(circuit.cross_connect for circuit in self.circuits if not circuit.ours)


def fingerprint(cross_connects: Iterable[CrossConnect]) -> int:
    """Return a hash of a set of cross-connects. Equal sets have the same hash, on any machine and after any restart.
    The hash has 52 bits, which JSON's doubles represent exactly."""
    text = ",".join(str(pair) for pair in sorted(set(cross_connects)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 12


@dataclass(frozen=True, slots=True)
class CircuitChange:
    """A request to connect and disconnect the named circuits. Other circuits of the device are removed only if the
    `ChangeMode` with which the change is planned permits it."""

    connect: tuple[CrossConnect, ...] = ()
    disconnect: tuple[CrossConnect, ...] = ()


@dataclass(frozen=True, slots=True)
class CircuitDiff:
    """The steps of a change on a device in the state `before`. Removals are carried out before additions."""

    mode: ChangeMode
    revision: int  # of the device at the time of planning
    before: frozenset[CrossConnect]
    remove: tuple[CrossConnect, ...]  # sorted; includes `evicted`
    add: tuple[CrossConnect, ...]  # sorted
    evicted: tuple[CrossConnect, ...] = ()  # removed without being named, because they occupied a needed port

    @property
    def after(self) -> frozenset[CrossConnect]:
        return (self.before - frozenset(self.remove)) | frozenset(self.add)

    @property
    def empty(self) -> bool:
        return not self.remove and not self.add

    @property
    def way_back(self) -> "CircuitDiff":
        """The diff that undoes this diff. It does not affect circuits that existed before this diff and that this diff
        did not remove."""
        return replace(self, remove=self.add, add=self.remove)


@dataclass(frozen=True, slots=True)
class CrossConnectResult:
    """The outcome of one addition or removal. Times are in seconds since the commit began. A time is None if the state
    was not reached or the time is unknown.

    Three times are distinguished, because an accepted command does not imply that light passes: commanded (the device
    accepted the command), tuned (the device shows the circuit in place), and link up (light arrives at the far end).
    """

    cross_connect: CrossConnect
    action: Action
    done: bool
    detail: str = ""
    commanded_s: float | None = None
    tuned_s: float | None = None
    link_up_s: float | None = None


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The result of a commit, as read from the device afterwards. It is never based on an acknowledgement alone."""

    items: tuple[CrossConnectResult, ...]
    revision: int  # of the device after the commit
    commands_sent: int
    revert_at_s: float | None = None  # by the driver's clock, unless confirmed before; None: not a trial

    @property
    def done(self) -> bool:
        return all(item.done for item in self.items)


@dataclass(frozen=True, slots=True)
class Verification:
    """The differences between a device and the state that a diff requires."""

    revision: int
    missing: tuple[CrossConnect, ...] = ()  # required, but not on the device
    lingering: tuple[CrossConnect, ...] = ()  # to be removed, but still on the device
    untuned: tuple[CrossConnect, ...] = ()  # on the device, but the mirrors are not in place
    dark: tuple[CrossConnect, ...] = ()  # in place, but no light arrives; empty if light is not measured
    unconfirmed: Unconfirmed | None = None  # a trial change, or a change whose revert failed

    @property
    def ok(self) -> bool:
        """True if all circuits that the diff adds are in place and all circuits that it removes are gone. `dark`
        circuits do not make the value False, because light also depends on both hosts."""
        return not (self.missing or self.lingering or self.untuned)


@dataclass(frozen=True, slots=True)
class SwitchEvent:
    at_s: float  # by the driver's clock, seconds since the Unix epoch
    kind: EventKind
    text: str
    port: int | None = None
    cross_connect: CrossConnect | None = None
