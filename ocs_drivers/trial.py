"""A change on trial: what takes it back, when, and what to say of it. Pure; taking it back is driver.py."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ocs_drivers.diff import CommandSteps, occupants
from ocs_drivers.model import CircuitDiff, CrossConnect, CrossConnectReading, SwitchFacts, Unconfirmed, utc

# Pauses between attempts to revert, longer each time.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class CircuitTrial:
    """The trial of one diff."""

    diff: CircuitDiff
    sent: CommandSteps  # what its commits had to do: only that is taken back
    until_s: float | None = None  # None: its commit goes on
    revision: int | None = None  # of the commit's result; None: there was none
    failure: str = ""

    def more(self, steps: CommandSteps) -> "CircuitTrial":
        """The same, once the diff is committed again to complete it."""
        sent = CommandSteps(_union(self.sent.remove, steps.remove), _union(self.sent.add, steps.add))
        return replace(self, sent=sent, until_s=None, revision=None, failure="")

    def shown(self) -> Unconfirmed:
        return Unconfirmed(self.revision, self.until_s, self.sent.remove, self.sent.add, self.failure)

    def ended(self, how: str, at_s: float) -> str:
        """What to say to who confirms it afterwards."""
        change = " ".join((*(f"-{pair}" for pair in self.sent.remove), *(f"+{pair}" for pair in self.sent.add)))
        return f"the change was {how} at {utc(at_s)} ({change})"


def revert_steps(
    facts: SwitchFacts, sent: CommandSteps, reading: CrossConnectReading
) -> tuple[CommandSteps, tuple[str, ...]]:
    """What takes it back as far as others let us, and what cannot come back, each with who is in the way."""
    mine = reading.cross_connects - reading.foreign
    remove = tuple(pair for pair in sent.add if pair in mine)
    holders = occupants(facts, reading.cross_connects - frozenset(remove))
    add: list[CrossConnect] = []
    lost: list[str] = []
    for pair in sent.remove:
        if pair in reading.cross_connects:
            continue
        others = {holders[end] for end in facts.ends(pair) if end in holders}
        if others:
            lost.append(f"{pair} is not back: its ports carry {' '.join(str(other) for other in sorted(others))}")
        else:
            add.append(pair)
    return CommandSteps(remove, tuple(add)), tuple(lost)


def _union(one: Iterable[CrossConnect], other: Iterable[CrossConnect]) -> tuple[CrossConnect, ...]:
    return tuple(sorted({*one, *other}))
