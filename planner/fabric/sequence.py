"""Where in its iteration a rank is, from the order of its collectives alone. Pure.

An iteration is a sequence of collectives, by number (`slack.py` numbers signatures). A place is how many of them have
begun; at each place is remembered how long it is quiet there. Either the trainer marks iterations (`MarkedIterations`),
or their repetition is found (`RepetitionFinder`): then the end of an outer loop is a surprise until it has come round
twice.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.fabric.recent import HALF_LIFE, MEMORY, RUN, RecentSamples
from planner.model import Hold

MOST_SAMPLES = 1 << 20  # of one rank, over all places: 8 MiB
MOST_VARIANTS = 8  # iterations that differ, e.g. every fourth ends with the weights being sent
MOST_COLLECTIVES = 1 << 15  # of one iteration; and of the history in which a repetition is sought
LONGEST_LOOP = 128  # equal layers in an iteration: what has come round so often is no layer
LEAST_COVERED = 8  # collectives that a repetition must cover
DUE = 8  # a repetition is sought again when the history since has grown by one part in so many

UNLEARNT = "unlearnt"
PLACE_UNKNOWN = "place_unknown"


@dataclass(slots=True)
class IterationGap:
    """What is known of the quiet at one place: when it begins in its iteration, and how long it lasts."""

    lengths_s: RecentSamples
    offsets_s: RecentSamples
    passed: int = 0  # how often the next collective began, be it that it was quiet before or not
    mark: str = ""  # the trainer's last mark before it

    def add(self, offset_s: float, length_s: float) -> None:
        self.lengths_s.add(length_s)
        self.offsets_s.add(offset_s)


@dataclass(slots=True)
class KnownSequence:
    """`gaps[k]` is before `ids[k]`, and the last one after all of them. Variants share those of a common beginning."""

    ids: "array[int]"
    gaps: list[IterationGap]


@dataclass(frozen=True, slots=True)
class QuietSpan:
    """It was quiet before a collective: since when, and for how long."""

    opened_s: float
    offset_s: float  # of its opening in the iteration; before the first collective < 0
    length_s: float


def _gaps(count: int, places: int) -> list[IterationGap]:
    memory = min(MEMORY, max(2 * RUN, MOST_SAMPLES // max(1, places)))
    half_life = min(HALF_LIFE, memory / 4)
    return [IterationGap(RecentSamples(memory, half_life), RecentSamples(2 * RUN, RUN)) for _ in range(count)]


@dataclass(slots=True)
class MarkedIterations:
    """Iterations as the trainer marks them. One that is like none before is learned when it comes again, but the very
    first at once; until the next mark its place is unknown from where it differs."""

    known: list[KnownSequence] = field(default_factory=list)  # the last one seen first
    here: KnownSequence | None = None
    depth: int = 0  # collectives since the mark
    rounds: int = 0  # marks
    relearned: int = 0
    reason: str = ""
    _seen: "array[int]" = field(default_factory=lambda: array("l"))
    _quiets: list[tuple[int, QuietSpan]] = field(default_factory=list)  # of the present iteration, by place
    _trials: "list[array[int]]" = field(default_factory=list)  # seen once
    _before: "array[int] | None" = None
    _odd: Hold | None = None
    _complete: bool = False  # the present iteration was seen from its mark on

    def begin(self) -> None:
        """A mark: the iteration before it is over."""
        self.rounds += 1
        if self._complete and self._seen:
            self._end(self._seen)
        self._seen, self._quiets, self.depth = array("l"), [], 0
        self.here, self._odd, self._complete = (self.known[0] if self.known else None), None, True

    def step(self, id: int, quiet: QuietSpan | None) -> IterationGap | None:
        """A collective begins. The gap before it, where that is known."""
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
        self._odd = Hold(PLACE_UNKNOWN, f"collective {depth} of the iteration is not one seen there before")
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
    """How many collectives two iterations begin with alike."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass(slots=True)
class RepetitionFinder:
    """Iterations by their repetition. What breaks after r collectives, before it has come round more often than
    layers do, may have been a loop inside an iteration: nothing is believed until it has held for longer than r."""

    sequence: KnownSequence | None = None
    depth: int | None = None  # None: the place is not certain
    rounds: int = 0  # in which the sequence has come
    relearned: int = 0
    reason: str = ""
    _ids: "array[int]" = field(default_factory=lambda: array("l"))  # history
    _quiets: list[QuietSpan | None] = field(default_factory=list)  # before each of them
    _since: int = 0  # collectives since the last one that did not fit
    _due: int = LEAST_COVERED  # of those, when a repetition is sought again
    _tolerant: bool = False  # it has gone on after something that did not fit: that was no end of a loop
    _run: int = 0  # collectives that fit, one after the other
    _needed: int = 0  # of them before anything is believed
    _maybe: list[int] = field(default_factory=list)  # places that fit the last `_run` collectives
    _why: str = ""

    def step(self, id: int, quiet: QuietSpan | None) -> IterationGap | None:
        """A collective begins. The gap before it, where that is known."""
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
        """Events were lost: what is still known of the sequence holds, but not the place."""
        self.depth, self._why, self._maybe, self._run = None, detail, [], 0
        self._ids, self._quiets = array("l"), []
        self._since, self._due = 0, LEAST_COVERED
        self._needed = 0 if self.sequence is None else len(self.sequence.ids)

    @property
    def place(self) -> tuple[int, IterationGap] | Hold:
        if self.sequence is None:
            return Hold(UNLEARNT, f"no repetition found in {len(self._ids)} collectives; mark iterations to say it")
        if self.depth is None:
            return Hold(PLACE_UNKNOWN, f"{self._why}; {self._run} of {self._needed} collectives have fitted since")
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
        self._why = f"after {self._run} collectives that repeated every {length}, one did not fit at {self.depth}"
        self.depth, self._run, self._maybe = None, 0, []
        self._since, self._due = 0, LEAST_COVERED
        return gap

    def _narrow(self, id: int, ids: "array[int]") -> None:
        """Which places of the sequence the last collectives may have led to. One that is sure for long enough is it."""
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
            return  # it is the place that is sought: `_narrow` does
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
        """Where in the history an iteration begins: after the longest quiet of the last one."""
        end = len(self._ids)
        return max(range(end - length, end), key=lambda index: getattr(self._quiets[index], "length_s", -1.0))


def repetition(ids: Sequence[int]) -> tuple[int, int]:
    """With which period `ids` ends, and how many of its last elements have it: as many as can be, at least two periods.
    (0, 0) where there is none. Linear: the failure function of Knuth, Morris and Pratt, read from the end."""
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
    """Whether one is the other, begun elsewhere."""
    return len(one) == len(other) and "".join(map(chr, one)) in "".join(map(chr, other + other))
