"""The vocabulary of optical circuit switches: ports, cross-connects, changes and their results. Frozen values.

Ports are numbered as the device numbers them. An `ingress_egress` device may use one number on both sides (Calient) or
number the egress side after the ingress side (Polatis); both are the two ranges of `SwitchFacts`.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from math import inf
from typing import Self


class Connectivity(StrEnum):
    """Which ports may meet: one of each side, or any two."""

    INGRESS_EGRESS = "ingress_egress"
    ANY_TO_ANY = "any_to_any"


class BootBehaviour(StrEnum):
    """What becomes of cross-connects when the device restarts."""

    DARK = "dark"
    RESTORE = "restore"
    UNKNOWN = "unknown"


class ChangeMode(StrEnum):
    """What "connect" means for a port that is in use: refuse, evict who holds it, or clear the whole device first. Only
    circuits of ours are ever evicted."""

    SAFE = "safe"
    UPDATE = "update"
    OVERWRITE = "overwrite"


class PortStatus(StrEnum):
    ENABLED = "enabled"
    DISABLED = "disabled"
    FAILED = "failed"


class CircuitState(StrEnum):
    """Where the mirrors of one cross-connect stand, by the device's own word."""

    TUNING = "tuning"
    TUNED = "tuned"
    FAILED = "failed"


class Action(StrEnum):
    ADD = "add"
    REMOVE = "remove"


class EventKind(StrEnum):
    PORT = "port"  # a port changed its status
    CIRCUIT = "circuit"  # a cross-connect came, went or changed its state
    ALARM = "alarm"  # the device complains


@dataclass(frozen=True, slots=True, order=True)
class CrossConnect:
    """Light from one port to another. On an any-to-any device the smaller number is the ingress, by convention."""

    ingress_port: int
    egress_port: int

    def __str__(self) -> str:
        return f"{self.ingress_port}:{self.egress_port}"

    @property
    def ports(self) -> frozenset[int]:
        return frozenset((self.ingress_port, self.egress_port))

    @property
    def turned(self) -> "CrossConnect":
        """The other direction."""
        return CrossConnect(self.egress_port, self.ingress_port)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The reverse of `str`; ValueError with what is wrong."""
        ingress, colon, egress = text.partition(":")
        if not (colon and ingress.isdecimal() and egress.isdecimal()):
            raise ValueError("must be INGRESS:EGRESS, two port numbers")
        return cls(int(ingress), int(egress))


MOST_PORTS = 99_999  # of one side: what states more is no switch


@dataclass(frozen=True, slots=True)
class SwitchFacts:
    """What a device is. `reconfiguration_s` is what the vendor states for moving one circuit."""

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
            raise ValueError(f"ports: must not be empty, got {self.ingress_ports} and {self.egress_ports}")
        for ports in (self.ingress_ports, self.egress_ports):
            if ports.stop - ports.start > MOST_PORTS:
                raise ValueError(f"ports: must be at most {MOST_PORTS} on a side, got {ports}")
        if self.connectivity is Connectivity.ANY_TO_ANY and self.ingress_ports != self.egress_ports:
            raise ValueError("an any-to-any device has one range of ports, given as both")
        if not 0 <= self.reconfiguration_s < inf:
            raise ValueError(f"reconfiguration_s must be a number >= 0, got {self.reconfiguration_s}")

    @property
    def ports(self) -> int:
        """Number of distinct port numbers."""
        return len({*self.ingress_ports, *self.egress_ports})

    def normal(self, pair: CrossConnect) -> CrossConnect:
        """The one way to write this cross-connect on this device."""
        if self.connectivity is Connectivity.ANY_TO_ANY and pair.ingress_port > pair.egress_port:
            return pair.turned
        return pair

    def ends(self, pair: CrossConnect) -> tuple[tuple[str, int], tuple[str, int]]:
        """The two things that a cross-connect occupies; no two cross-connects may share one."""
        if self.connectivity is Connectivity.ANY_TO_ANY:
            return ("port", pair.ingress_port), ("port", pair.egress_port)
        return ("ingress_port", pair.ingress_port), ("egress_port", pair.egress_port)


@dataclass(frozen=True, slots=True)
class SwitchCapabilities:
    """What a driver and its device can do. What is not declared is not promised; what is declared is tested."""

    bulk: bool = False  # one command carries many cross-connects
    tuned_state: bool = False  # tells tuning from tuned; otherwise a listed circuit counts as tuned
    link_state: bool = False  # knows when light arrives at the far end
    port_power: bool = False  # measures optical power
    events: bool = False  # `watch` reports ports and alarms
    removes_one_by_one: bool = False  # `bulk` is for additions only


@dataclass(frozen=True, slots=True)
class PortState:
    port: int
    status: PortStatus
    power_dbm: float | None = None  # None: not measured


@dataclass(frozen=True, slots=True)
class DeviceCircuit:
    """A cross-connect as the device reports it."""

    cross_connect: CrossConnect
    state: CircuitState = CircuitState.TUNED
    link_up: bool | None = None  # None: nobody measures it
    ours: bool = False  # made by this driver, or taken over; filled in by the driver, a wire leaves it alone


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """A change that is up on trial: it reverts itself unless it is confirmed in time."""

    revision: int | None  # that a confirmation has to name; None: nobody knows how the device came out of it
    until_s: float | None  # by the driver's clock, seconds since the Unix epoch; None: still being carried out
    removed: tuple[CrossConnect, ...] = ()  # come back when it reverts
    added: tuple[CrossConnect, ...] = ()  # go when it reverts
    failure: str = ""  # its time is over and it could not be reverted, why; that is tried again and again

    def __str__(self) -> str:
        if self.failure:
            return f"a change was not confirmed and cannot be reverted ({self.change}): {self.failure}"
        until = "it is carried out and its time is over" if self.until_s is None else utc(self.until_s)
        return f"a change waits to be confirmed until {until} ({self.change})"

    @property
    def change(self) -> str:
        return " ".join((*(f"-{pair}" for pair in self.removed), *(f"+{pair}" for pair in self.added)))


def utc(at_s: float) -> str:
    """A time of the driver's clock, for people."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00") + " UTC"


@dataclass(frozen=True, slots=True)
class CrossConnectReading:
    """All cross-connects of a device at one instant, sorted. The revision moves whenever the set of them does, whoever
    moved it; a device without revisions of its own is given the fingerprint of the set."""

    circuits: tuple[DeviceCircuit, ...]
    revision: int
    unconfirmed: Unconfirmed | None = None

    @property
    def cross_connects(self) -> frozenset[CrossConnect]:
        return frozenset(circuit.cross_connect for circuit in self.circuits)

    @property
    def foreign(self) -> frozenset[CrossConnect]:
        """Those that are not ours: never touched unless somebody takes them over by name."""
        return frozenset(circuit.cross_connect for circuit in self.circuits if not circuit.ours)


def fingerprint(cross_connects: Iterable[CrossConnect]) -> int:
    """The same for equal sets, on any machine and after any restart. 52 bits, which JSON's doubles hold exactly."""
    text = ",".join(str(pair) for pair in sorted(set(cross_connects)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 12


@dataclass(frozen=True, slots=True)
class CircuitChange:
    """What somebody wants: these circuits up, those down. The rest of the device is none of its business."""

    connect: tuple[CrossConnect, ...] = ()
    disconnect: tuple[CrossConnect, ...] = ()


@dataclass(frozen=True, slots=True)
class CircuitDiff:
    """What a change comes to on a device in the state `before`. Removals come down before additions go up."""

    mode: ChangeMode
    revision: int  # of the device when this was planned
    before: frozenset[CrossConnect]
    remove: tuple[CrossConnect, ...]  # sorted; the evicted ones among them
    add: tuple[CrossConnect, ...]  # sorted
    evicted: tuple[CrossConnect, ...] = ()  # removed without having been named: they were in the way

    @property
    def after(self) -> frozenset[CrossConnect]:
        return (self.before - frozenset(self.remove)) | frozenset(self.add)

    @property
    def empty(self) -> bool:
        return not self.remove and not self.add

    @property
    def way_back(self) -> "CircuitDiff":
        """The diff that undoes this one; what was there before and was not removed is not touched."""
        return replace(self, remove=self.add, add=self.remove)


@dataclass(frozen=True, slots=True)
class CrossConnectResult:
    """What became of one addition or removal. Times are seconds since the commit began; None: not reached, or unknown.

    "Accepted" is not "light passes": commanded (the device took the command), tuned (the device shows it in place),
    link up (light at the far end).
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
    """Read back from the device, never inferred from an acknowledgement."""

    items: tuple[CrossConnectResult, ...]
    revision: int  # of the device afterwards
    commands_sent: int
    revert_at_s: float | None = None  # by the driver's clock, unless confirmed before; None: nothing to be confirmed

    @property
    def done(self) -> bool:
        return all(item.done for item in self.items)


@dataclass(frozen=True, slots=True)
class Verification:
    """How a device compares with what a diff wants of it."""

    revision: int
    missing: tuple[CrossConnect, ...] = ()  # should be there and is not
    lingering: tuple[CrossConnect, ...] = ()  # should be gone and is not
    untuned: tuple[CrossConnect, ...] = ()  # there, but the mirrors are not in place
    dark: tuple[CrossConnect, ...] = ()  # in place, but no light arrives; empty where nobody measures it
    unconfirmed: Unconfirmed | None = None  # what will revert itself, or could not be reverted

    @property
    def ok(self) -> bool:
        """Glass in place. Light depends on both hosts too, so `dark` is reported and does not fail it."""
        return not (self.missing or self.lingering or self.untuned)


@dataclass(frozen=True, slots=True)
class SwitchEvent:
    at_s: float  # by the driver's clock, seconds since the Unix epoch
    kind: EventKind
    text: str
    port: int | None = None
    cross_connect: CrossConnect | None = None
