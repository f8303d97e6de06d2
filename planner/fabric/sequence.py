"""Find a rank's position within its iteration from the order of its collectives alone. Has no side effects.

An iteration is a sequence of collectives. Each is identified by the number that `slack.py` assigns to its signature. A
position is the number of collectives in the iteration that have begun. For each position, the module stores how long
the links are quiet. Either the trainer marks iterations (`MarkedIterations`), or their repetition is detected
(`RepetitionFinder`). Without marks, the end of an outer loop cannot be predicted until it has occurred twice.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.fabric.recent import HALF_LIFE, MEMORY, RUN, RecentSamples
from planner.model import Hold

MOST_SAMPLES = 1 << 20  # of one rank, over all positions: 8 MiB
MOST_VARIANTS = 8  # iterations that differ, for example if every fourth one ends with sending weights
MOST_COLLECTIVES = 1 << 15  # in one iteration, and in the history searched for a repetition
LONGEST_LOOP = 128  # equal layers in an iteration: more repetitions than this are no layers
LEAST_COVERED = 8  # collectives that a repetition must cover
DUE = 8  # the search is repeated when the history has grown by one part in this many

UNLEARNT = "unlearnt"
PLACE_UNKNOWN = "place_unknown"


@dataclass(slots=True)
class IterationGap:
    """The statistics of the quiet time at one position: its start within the iteration, and its length."""

    lengths_s: RecentSamples
    offsets_s: RecentSamples
    passed: int = 0  # how often the next collective began, after quiet time or not
    mark: str = ""  # the trainer's last mark before it

    def add(self, offset_s: float, length_s: float) -> None:
        self.lengths_s.add(length_s)
        self.offsets_s.add(offset_s)


@dataclass(slots=True)
class KnownSequence:
    """A known iteration. `gaps[k]` precedes the collective `ids[k]`. If iterations are marked, one more gap follows the
    last collective. Variants of an iteration share the gaps of their common beginning."""

    ids: "array[int]"
    gaps: list[IterationGap]


@dataclass(frozen=True, slots=True)
class QuietSpan:
    """The quiet time before a collective: its start and its length."""

    opened_s: float
    offset_s: float  # of the opening within the iteration; < 0 before the first collective
    length_s: float


def _gaps(count: int, places: int) -> list[IterationGap]:
    memory = min(MEMORY, max(2 * RUN, MOST_SAMPLES // max(1, places)))
    half_life = min(HALF_LIFE, memory / 4)
    return [IterationGap(RecentSamples(memory, half_life), RecentSamples(2 * RUN, RUN)) for _ in range(count)]


@dataclass(slots=True)
class MarkedIterations:
    """Follows iterations that the trainer marks. The first iteration is learned at once. An iteration that differs from
    the known ones is learned when it occurs a second time. From the first difference until the next mark, the position
    is unknown."""

    known: list[KnownSequence] = field(default_factory=list)  # most recent first
    here: KnownSequence | None = None
    depth: int = 0  # collectives since the mark
    rounds: int = 0  # marks
    relearned: int = 0
    reason: str = ""
    _seen: "array[int]" = field(default_factory=lambda: array("l"))
    _quiets: list[tuple[int, QuietSpan]] = field(default_factory=list)  # of the current iteration, by position
    _trials: "list[array[int]]" = field(default_factory=list)  # seen once
    _before: "array[int] | None" = None
    _odd: Hold | None = None
    _complete: bool = False  # the current iteration was seen from its mark on

    def begin(self) -> None:
        """Handle a mark of the trainer, which ends the previous iteration and begins the next one."""
        self.rounds += 1
        if self._complete and self._seen:
            self._end(self._seen)
        self._seen, self._quiets, self.depth = array("l"), [], 0
        self.here, self._odd, self._complete = (self.known[0] if self.known else None), None, True

    def step(self, id: int, quiet: QuietSpan | None) -> IterationGap | None:
        """Handle the start of the collective with number `id`, after the quiet time `quiet` if there was one. Returns
        the gap before the collective; None if the position is unknown."""
        if len(self._seen) >= MOST_COLLECTIVES:
            self.lose(f"more than {MOST_COLLECTIVES} collectives since the last mark of an iteration")
            return None
        self._seen.append(id)
        if quiet is not None:
            self._quiets.append((len(self._seen) - 1, quiet))
        here, depth = self.here, self.depth
        self.depth += 1
        if here is None:
            return None
        if depth < len(here.ids) and here.ids[depth] == id:
            return here.gaps[depth]
        for other in self.known:
            if other.ids[: depth + 1] == self._seen:
                self.here = other
                return other.gaps[depth]
        self.here = None
        self._odd = Hold(PLACE_UNKNOWN, f"collective {depth} of the iteration has not occurred at this position before")
        return here.gaps[depth]

    def lose(self, detail: str) -> None:
        self.here, self._complete = None, False
        self._seen, self._quiets = array("l"), []
        self._odd = Hold(PLACE_UNKNOWN, detail)

    @property
    def sequence(self) -> KnownSequence | None:
        return self.known[0] if self.known else None

    @property
    def place(self) -> tuple[int, IterationGap] | Hold:
        if self.here is not None:
            return self.depth, self.here.gaps[self.depth]
        if self._odd is not None:
            return self._odd
        return Hold(UNLEARNT, "the first iteration has not ended yet")

    def _end(self, ids: "array[int]") -> None:
        before, self._before = self._before, ids
        for index, known in enumerate(self.known):
            if known.ids == ids:
                self.known.insert(0, self.known.pop(index))
                return
        if self.known and ids not in self._trials:
            self._trials = [*self._trials[1 - MOST_VARIANTS :], ids]
            return
        if self.known and before == ids:
            self.relearned += 1
            self.reason = f"two iterations of {len(ids)} collectives, unlike those before"
        self._trials = [trial for trial in self._trials if trial != ids]
        self.known = [self._learnt(ids), *self.known[: MOST_VARIANTS - 1]]

    def _learnt(self, ids: "array[int]") -> KnownSequence:
        shared: list[IterationGap] = []
        for known in self.known:
            common = _common(known.ids, ids) + 1
            if common > len(shared):
                shared = known.gaps[:common]
        gaps = shared + _gaps(len(ids) + 1 - len(shared), len(ids))
        for place, quiet in self._quiets:
            if place >= len(shared):
                gaps[place].add(quiet.offset_s, quiet.length_s)
        return KnownSequence(ids, gaps)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading collectives that two iterations share."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass(slots=True)
class RepetitionFinder:
    """Detects iterations by their repetition. If a repetition ends after r collectives and had no more rounds than an
    iteration can have layers, it may have been a loop inside an iteration. From then on, a repetition is trusted only
    after it has lasted for more than r collectives."""

    sequence: KnownSequence | None = None
    depth: int | None = None  # None: the position is uncertain
    rounds: int = 0  # full repetitions of the sequence
    relearned: int = 0
    reason: str = ""
    _ids: "array[int]" = field(default_factory=lambda: array("l"))  # history
    _quiets: list[QuietSpan | None] = field(default_factory=list)  # before each of them
    _since: int = 0  # collectives since the last mismatch
    _due: int = LEAST_COVERED  # value of `_since` for the next search
    _tolerant: bool = False  # the sequence continued after a mismatch, so that was not the end of a loop
    _run: int = 0  # consecutive collectives that match
    _needed: int = 0  # matches required before the position is trusted
    _maybe: list[int] = field(default_factory=list)  # positions that match the last `_run` collectives
    _why: str = ""

    def step(self, id: int, quiet: QuietSpan | None) -> IterationGap | None:
        """Handle the start of the collective with number `id`, after the quiet time `quiet` if there was one. Returns
        the gap before the collective; None if the position is unknown."""
        self._ids.append(id)
        self._quiets.append(quiet)
        if len(self._ids) > 2 * MOST_COLLECTIVES:
            del self._ids[:MOST_COLLECTIVES], self._quiets[:MOST_COLLECTIVES]
        self._since += 1
        gap = self._follow(id)
        if self.depth is None and self._since >= self._due:
            self._due = self._since + max(2, self._since // DUE)
            self._seek()
        return gap

    def lose(self, detail: str) -> None:
        """Handle a loss of events, for which `detail` is the reason. The learned sequence stays valid, but the position
        becomes unknown."""
        self.depth, self._why, self._maybe, self._run = None, detail, [], 0
        self._ids, self._quiets = array("l"), []
        self._since, self._due = 0, LEAST_COVERED
        self._needed = 0 if self.sequence is None else len(self.sequence.ids)

    @property
    def place(self) -> tuple[int, IterationGap] | Hold:
        if self.sequence is None:
            return Hold(UNLEARNT, f"no repetition in {len(self._ids)} collectives; mark iterations in the trainer")
        if self.depth is None:
            return Hold(
                PLACE_UNKNOWN,
                f"{self._why}; {self._run} of {self._needed} required collectives have matched since then",
            )
        return self.depth, self.sequence.gaps[self.depth]

    def _follow(self, id: int) -> IterationGap | None:
        sequence = self.sequence
        if sequence is None:
            return None
        length = len(sequence.ids)
        if self.depth is None:
            self._narrow(id, sequence.ids)
            return None
        gap = sequence.gaps[self.depth]
        if sequence.ids[self.depth] == id:
            self.depth = (self.depth + 1) % length
            self._run += 1
            self.rounds += self.depth == 0
            return gap
        proven = self._tolerant or self._run > LONGEST_LOOP * length
        self._needed = length if proven else max(length, self._needed, self._run + self._run // 4 + 1)
        self._why = f"after {self._run} collectives that repeated every {length}, one did not match at {self.depth}"
        self.depth, self._run, self._maybe = None, 0, []
        self._since, self._due = 0, LEAST_COVERED
        return gap

    def _narrow(self, id: int, ids: "array[int]") -> None:
        """Narrow down the possible positions to those that match the newest collectives, up to the collective `id`. A
        position is accepted if it is the only one left and has matched for long enough."""
        length = len(ids)
        if self._run:
            self._maybe = [(place + 1) % length for place in self._maybe if ids[place] == id]
            self._run += 1
        if not self._maybe:
            self._maybe = [(place + 1) % length for place, each in enumerate(ids) if each == id]
            self._run = 1 if self._maybe else 0
        if len(self._maybe) == 1 and self._run >= self._needed:
            self.depth, self._tolerant = self._maybe[0], True

    def _seek(self) -> None:
        length, covered = repetition(self._ids[-4 * self._since :])
        if not length or covered < max(LEAST_COVERED, self._needed):
            return
        ids = self._ids[-length:]
        if self.sequence is not None and _is_rotation(ids, self.sequence.ids):
            return  # only the position is unknown, which `_narrow` finds
        turn = self._longest_quiet(length)
        gaps = _gaps(length, length)
        start = len(self._ids) - covered
        began_s: float | None = None
        for index in range(start, len(self._ids)):
            quiet, place = self._quiets[index], (index - turn) % length
            if quiet is None:
                continue
            if place == 0:
                began_s = quiet.opened_s + quiet.length_s
            gaps[place].lengths_s.add(quiet.length_s)
            if began_s is not None:
                gaps[place].offsets_s.add(quiet.opened_s - began_s)
        if self.sequence is not None:
            self.relearned += 1
            self.reason = f"repeats every {length} collectives, no longer every {len(self.sequence.ids)}"
        self.sequence = KnownSequence(
            array("l", (self._ids[start + (turn - start + k) % length] for k in range(length))), gaps
        )
        self.depth, self._run = (len(self._ids) - turn) % length, covered
        self._needed, self._tolerant, self.rounds = 0, False, covered // length

    def _longest_quiet(self, length: int) -> int:
        """Return the index in the history at which an iteration is assumed to begin. Of the last `length` collectives,
        it is the one with the longest quiet time before it."""
        end = len(self._ids)
        return max(range(end - length, end), key=lambda index: getattr(self._quiets[index], "length_s", -1.0))


def repetition(ids: Sequence[int]) -> tuple[int, int]:
    """Return the period of the repetition with which `ids` ends, and the number of elements that the repetition covers.
    Of all repetitions with at least two periods, the one that covers the most elements is chosen. The result is (0, 0)
    if there is none. The search takes linear time, with the failure function of Knuth, Morris and Pratt on the reversed
    sequence."""
    backwards = ids[::-1]
    border = [0] * len(backwards)
    best, matched = (0, 0), 0
    for index in range(1, len(backwards)):
        while matched and backwards[index] != backwards[matched]:
            matched = border[matched - 1]
        if backwards[index] == backwards[matched]:
            matched += 1
        border[index] = matched
        period = index + 1 - matched
        if index + 1 >= 2 * period:
            best = period, index + 1
    return best


def _is_rotation(one: "array[int]", other: "array[int]") -> bool:
    """Return whether `one` is a rotation of `other`."""
    return len(one) == len(other) and "".join(map(chr, one)) in "".join(map(chr, other + other))
