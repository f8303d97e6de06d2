"""Convert a change to a diff, and a diff to the steps that are still to be sent or that revert it. The functions have
no side effects. driver.py sends the steps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ocs_drivers.errors import CircuitConflict, InvalidChange
from ocs_drivers.model import (
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    CircuitState,
    CrossConnect,
    CrossConnectReading,
    PortState,
    PortStatus,
    SwitchFacts,
    Unconfirmed,
    Verification,
)


@dataclass(frozen=True, slots=True)
class CommandSteps:
    """Commands to send: first all of `remove`, then all of `add`."""

    remove: tuple[CrossConnect, ...] = ()
    add: tuple[CrossConnect, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.remove and not self.add


def plan(
    facts: SwitchFacts,
    ports: Iterable[PortState],
    reading: CrossConnectReading,
    change: CircuitChange,
    mode: ChangeMode = ChangeMode.SAFE,
    device: str = "SWITCH",
) -> CircuitDiff:
    """Return the diff that applies `change` to a device in the state `reading`.

    If a port is in use by a circuit that the change does not remove, mode `safe` refuses the change, and mode `update`
    evicts that circuit. Mode `overwrite` evicts every owned circuit that the change does not name. No mode removes a
    foreign circuit. Raises InvalidChange if the change is malformed for this device, and CircuitConflict if the
    device's present state prevents it. The error lists every fault. `device` is the device's name in suggested
    commands.
    """
    connect = tuple(facts.normal(pair) for pair in change.connect)
    disconnect = tuple(facts.normal(pair) for pair in change.disconnect)
    if faults := _malformed(facts, connect, disconnect, mode):
        raise InvalidChange(faults)
    present = reading.cross_connects
    add = frozenset(connect) - present
    holders = occupants(facts, present)
    in_the_way = {holders[end] for pair in add for end in facts.ends(pair) if end in holders}
    # Circuits of other owners on the same device stay, so `overwrite` clears owned circuits only.
    unnamed = present - frozenset(connect) - reading.foreign if mode is ChangeMode.OVERWRITE else frozenset()
    evicted = (in_the_way | unnamed) - frozenset(disconnect)
    faults = _unusable_ports(ports, connect, add)
    # Disconnecting an absent circuit is no fault, even if this change connects its ports. Naming a port's partner
    # wrongly is a mistake that must be reported.
    faults += [
        f"disconnect{where}: port carries {holder}, got {pair}"
        for where, holder, pair in _held_otherwise(facts, holders, disconnect)
        if holder not in connect
    ]
    if mode is ChangeMode.SAFE:
        faults += [
            f"connect{where}: port is in use by {holder} (mode safe), got {pair}"
            for where, holder, pair in _held_otherwise(facts, holders, connect)
            if holder in evicted
        ]
    remove = (frozenset(disconnect) & present) | evicted
    faults += not_ours(remove & reading.foreign, device)
    if faults:
        raise CircuitConflict(faults)
    return CircuitDiff(
        mode, reading.revision, present, tuple(sorted(remove)), tuple(sorted(add)), tuple(sorted(evicted))
    )


def not_ours(foreign: Iterable[CrossConnect], device: str) -> list[str]:
    """Return a fault for each of these foreign circuits, which a change would remove. The fault names the command that
    takes over the circuit on `device`."""
    return [
        f"{pair}: is not owned by this driver; take it over first: orchestrrl ocs take-over {device} {pair}"
        for pair in sorted(foreign)
    ]


def occupants(facts: SwitchFacts, present: Iterable[CrossConnect]) -> dict[tuple[str, int], CrossConnect]:
    """Return the cross-connect that occupies each (kind, port) slot. Free slots are absent."""
    return {end: pair for pair in present for end in facts.ends(pair)}


def absent_ports(facts: SwitchFacts, diff: CircuitDiff) -> list[str]:
    """Return a fault for each port in the diff that this device does not have. Such faults occur if the diff was
    planned for another device."""
    return [
        fault
        for name, pairs in (("remove", diff.remove), ("add", diff.add))
        for index, pair in enumerate(pairs)
        for fault in _bad_ports(facts, f"{name}[{index}]", pair)
    ]


def remaining(facts: SwitchFacts, diff: CircuitDiff, present: frozenset[CrossConnect]) -> CommandSteps:
    """Return the part of the diff that is not yet in effect on a device with the circuits `present`. Raises
    CircuitConflict if a circuit outside the diff occupies a port that an addition needs."""
    steps = CommandSteps(
        remove=tuple(pair for pair in diff.remove if pair in present),
        add=tuple(pair for pair in diff.add if pair not in present),
    )
    _refuse_collisions(facts, present, steps)
    return steps


def revert_steps(
    facts: SwitchFacts, trial: Unconfirmed, reading: CrossConnectReading
) -> tuple[CommandSteps, tuple[str, ...]]:
    """Return the steps that revert a trial change without touching foreign circuits. Also return a text for each
    removed circuit that cannot be restored because other circuits occupy its ports."""
    mine = reading.cross_connects - reading.foreign
    remove = tuple(pair for pair in trial.added if pair in mine)
    holders = occupants(facts, reading.cross_connects - frozenset(remove))
    add: list[CrossConnect] = []
    lost: list[str] = []
    for pair in trial.removed:
        if pair in reading.cross_connects:
            continue
        others = {holders[end] for end in facts.ends(pair) if end in holders}
        if others:
            lost.append(f"{pair} was not restored: its ports carry {' '.join(str(other) for other in sorted(others))}")
        else:
            add.append(pair)
    return CommandSteps(remove, tuple(add)), tuple(lost)


def compare(diff: CircuitDiff, reading: CrossConnectReading) -> Verification:
    """Return the differences between a device's reading and the state that the diff requires."""
    seen = {circuit.cross_connect: circuit for circuit in reading.circuits}
    wanted = [pair for pair in diff.add if pair in seen]
    return Verification(
        revision=reading.revision,
        missing=tuple(pair for pair in diff.add if pair not in seen),
        lingering=tuple(pair for pair in diff.remove if pair in seen),
        untuned=tuple(pair for pair in wanted if seen[pair].state is not CircuitState.TUNED),
        dark=tuple(pair for pair in wanted if seen[pair].link_up is False),
        unconfirmed=reading.unconfirmed,
    )


def _malformed(
    facts: SwitchFacts, connect: Sequence[CrossConnect], disconnect: Sequence[CrossConnect], mode: ChangeMode
) -> list[str]:
    faults = []
    if mode is ChangeMode.OVERWRITE and not connect:
        faults.append("connect: must not be empty with mode overwrite, which clears every other circuit, got []")
    if mode is ChangeMode.OVERWRITE and disconnect:
        faults.append(f"disconnect: must be empty with mode overwrite, got [{', '.join(map(str, disconnect))}]")
    for name, pairs in (("connect", connect), ("disconnect", disconnect)):
        used: dict[tuple[str, int], int] = {}
        for index, pair in enumerate(pairs):
            faults += _bad_ports(facts, f"{name}[{index}]", pair)
            for end in facts.ends(pair):
                if end in used and used[end] != index:
                    faults.append(f"{name}[{index}].{end[0]}: is used by {name}[{used[end]}] already, got {end[1]}")
                used.setdefault(end, index)
    both = frozenset(connect) & frozenset(disconnect)
    faults += [
        f"disconnect[{i}]: must not be in connect as well, got {pair}"
        for i, pair in enumerate(disconnect)
        if pair in both
    ]
    return faults


def _bad_ports(facts: SwitchFacts, path: str, pair: CrossConnect) -> list[str]:
    faults = []
    for name, port, valid in (
        ("ingress_port", pair.ingress_port, facts.ingress_ports),
        ("egress_port", pair.egress_port, facts.egress_ports),
    ):
        if port not in valid:
            faults.append(f"{path}.{name}: must be within {valid[0]}..{valid[-1]}, got {port}")
    first, second = facts.ends(pair)
    if first == second:
        faults.append(f"{path}: a port cannot be connected to itself, got {pair}")
    return faults


def _unusable_ports(
    ports: Iterable[PortState], connect: Sequence[CrossConnect], add: frozenset[CrossConnect]
) -> list[str]:
    status = {port.port: port.status for port in ports}
    return [
        f"connect[{index}].{name}: port is {status[port]}, got {port}"
        for index, pair in enumerate(connect)
        if pair in add
        for name, port in (("ingress_port", pair.ingress_port), ("egress_port", pair.egress_port))
        if status.get(port, PortStatus.ENABLED) is not PortStatus.ENABLED
    ]


def _held_otherwise(
    facts: SwitchFacts, holders: Mapping[tuple[str, int], CrossConnect], pairs: Sequence[CrossConnect]
) -> Iterator[tuple[str, CrossConnect, CrossConnect]]:
    """Yield an entry for each port of the pairs that another circuit occupies: the port's position in the list, the
    occupying circuit, and the listed pair."""
    for index, pair in enumerate(pairs):
        for end in facts.ends(pair):
            if end in holders and holders[end] != pair:
                yield f"[{index}].{end[0]}", holders[end], pair


def _refuse_collisions(facts: SwitchFacts, present: frozenset[CrossConnect], steps: CommandSteps) -> None:
    holders = occupants(facts, present - frozenset(steps.remove))
    faults = [
        f"{pair}: {end[0].replace('_', ' ')} {end[1]} is now held by {holders[end]}, which is not part of this change"
        for pair in steps.add
        for end in facts.ends(pair)
        if end in holders
    ]
    if faults:
        raise CircuitConflict(faults)
