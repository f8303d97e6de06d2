"""Track the progress of one commit: the commands sent, the circuits in place, and the result. driver.py sends the
commands."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ocs_drivers.diff import CommandSteps
from ocs_drivers.model import Action, CircuitState, CrossConnect, CrossConnectReading, CrossConnectResult, DeviceCircuit


@dataclass
class CommitProgress:
    """Tracks the circuits of one commit. Recorded times are in seconds since the commit began."""

    steps: CommandSteps  # the commands to be sent
    started_s: float
    watched: list[CrossConnect] = field(default_factory=list)  # sent, or already being tuned
    commands_sent: int = 0
    _commanded_s: dict[CrossConnect, float] = field(default_factory=dict)
    _tuned_s: dict[CrossConnect, float] = field(default_factory=dict)
    _link_up_s: dict[CrossConnect, float] = field(default_factory=dict)
    _errors: dict[CrossConnect, str] = field(default_factory=dict)  # the error of a pair, as the device reported it
    _sent: set[CrossConnect] = field(default_factory=set)
    _remove: frozenset[CrossConnect] = frozenset()  # the steps as sets: each reading looks up about a thousand pairs
    _all: frozenset[CrossConnect] = frozenset()

    def __post_init__(self) -> None:
        self._remove = frozenset(self.steps.remove)
        self._all = self._remove | frozenset(self.steps.add)

    def also_watch(self, pairs: Iterable[CrossConnect]) -> None:
        """Also watch those of `pairs` that the commit neither adds nor removes, because an earlier command may still be
        tuning them."""
        self.watched.extend(pair for pair in pairs if pair not in self._all)

    def sent(self, pairs: Iterable[CrossConnect]) -> None:
        self.commands_sent += 1
        batch = tuple(pairs)
        self.watched.extend(batch)
        self._sent.update(batch)

    def commanded(self, pairs: Iterable[CrossConnect], now_s: float) -> None:
        """Record that the device accepted the command for these pairs, as its answer or a later reading shows."""
        self._commanded_s.update(dict.fromkeys(pairs, now_s - self.started_s))

    def went_wrong(self, pairs: Iterable[CrossConnect], text: str) -> None:
        self._errors.update(dict.fromkeys(pairs, text))

    def note(self, reading: CrossConnectReading, now_s: float) -> tuple[bool, bool]:
        """Record the circuits that are now in place. Return two values: whether the commit must wait longer for a
        circuit, and whether a circuit is in place but receives no light."""
        seen = {circuit.cross_connect: circuit for circuit in reading.circuits}
        at_s = now_s - self.started_s
        waiting = dark = False
        for pair in self.watched:
            circuit = seen.get(pair)
            if pair in self._remove:
                waiting |= circuit is not None and pair in self._commanded_s
                if circuit is None:
                    self._tuned_s.setdefault(pair, at_s)
            elif circuit is None:
                # The device accepted it but does not list it yet. A command that was not accepted was refused.
                waiting |= pair in self._commanded_s
            else:
                waiting |= circuit.state is CircuitState.TUNING
                dark |= self._note_circuit(circuit, at_s)
        return waiting, dark

    def gone(self, seen: Iterable[CrossConnect]) -> frozenset[CrossConnect]:
        """Return the pairs of the commit that the device does not show and that will not appear later: removed pairs,
        and pairs to be added whose command the device did not accept. `seen` contains the pairs that the device shows.
        """
        refused = (pair for pair in self.steps.add if pair not in self._commanded_s)
        return frozenset((*self.steps.remove, *refused)).difference(seen)

    def result(self, action: Action, pair: CrossConnect, circuit: DeviceCircuit | None) -> CrossConnectResult:
        """Return the outcome of the addition or removal of a pair. `circuit` is the pair's circuit as the device now
        shows it, or None if the device does not show it."""
        if action is Action.REMOVE:
            done, shown = circuit is None, "the device still shows it"
        else:
            done = circuit is not None and circuit.state is CircuitState.TUNED
            shown = "the device does not show it" if circuit is None else f"the device shows it as {circuit.state}"
        if pair not in self._all:
            return CrossConnectResult(pair, action, done, "already in effect" if done else shown)
        if pair not in self._sent:
            shown = "not sent, because an earlier command failed"
        return CrossConnectResult(
            pair,
            action,
            done,
            self._detail(pair, circuit) if done else self._errors.get(pair, shown),
            self._commanded_s.get(pair),
            self._tuned_s.get(pair),
            self._link_up_s.get(pair),
        )

    def _note_circuit(self, circuit: DeviceCircuit, at_s: float) -> bool:
        """Record the times at which the circuit was tuned and received light. Return whether it is in place but
        receives no light."""
        if circuit.state is not CircuitState.TUNED:
            return False
        self._tuned_s.setdefault(circuit.cross_connect, at_s)
        if circuit.link_up:
            self._link_up_s.setdefault(circuit.cross_connect, at_s)
        return circuit.link_up is False

    def _detail(self, pair: CrossConnect, circuit: DeviceCircuit | None) -> str:
        is_dark = circuit is not None and circuit.link_up is False
        parts = (self._errors.get(pair), "in place, but no light arrives" if is_dark else None)
        return "; ".join(part for part in parts if part)
