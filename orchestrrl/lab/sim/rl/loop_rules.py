"""The rules of a loop, what follows from them and from counts of samples, and figures of a finished time line. Pure."""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.rl.model import Holds, LoopMode, TimelineSpan


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples of a generation step: new ones, and how many (older ones first) are done in it."""

    begun: int
    finished: int

    def __post_init__(self) -> None:
        if self.begun < 0 or self.finished < 1:
            raise ValueError(f"begun must be >= 0 and finished >= 1, got {self.begun} and {self.finished}")


@dataclass(frozen=True, slots=True)
class LoopRules:
    """How stages follow each other. `shared`: the same GPUs train and generate, so that nothing overlaps."""

    mode: LoopMode = LoopMode.ONE_STEP_ASYNC
    staleness: int | None = None  # versions, of BOUNDED_STALENESS
    batch_samples: int | None = None  # of a training step; None: what a generation step finishes
    buffer_samples: int | None = None  # finished and not in training yet, those of the running step among them
    holds: Holds = Holds.ENGINES
    shared: bool = False

    def __post_init__(self) -> None:
        if (self.mode is LoopMode.BOUNDED_STALENESS) != (self.staleness is not None):
            raise ValueError(f"staleness goes with bounded_staleness alone, got {self.staleness} with {self.mode}")
        for name in ("batch_samples", "buffer_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness must be >= 0, got {self.staleness}")
        if self.shared and self.mode is not LoopMode.SYNCHRONOUS:
            raise ValueError(f"GPUs that train and generate in turn go with the synchronous mode, got {self.mode}")


@dataclass(frozen=True, slots=True)
class Needs:
    """What follows from counts alone. Raises ValueError where some step could never begin."""

    done: tuple[int, ...]  # [generation step + 1] samples finished before it
    taken: tuple[int, ...]  # [training step + 1] samples taken before it
    version: tuple[int, ...]  # [generation step] that it needs at least
    trained: tuple[int, ...]  # [generation step] training steps that must have begun, for room in the buffer

    @property
    def carried(self) -> int:
        """Versions that are made of samples before the last step, which takes the last of them."""
        return bisect_right(self.taken, self.done[-2]) - 1

    @classmethod
    def of(cls, rules: LoopRules, batches: Sequence[SampleBatch]) -> "Needs":
        done = (0, *accumulate(batch.finished for batch in batches))
        begun = accumulate(batch.begun for batch in batches)
        if any(finished > there for finished, there in zip(done[1:], begun, strict=True)):
            raise ValueError(f"no more samples can be finished than were begun, got {list(batches)}")
        size = rules.batch_samples
        taken = done if size is None else tuple(range(0, done[-1] + 1, size))
        versions, trained = [], []
        for step in range(len(batches)):
            ready = bisect_right(taken, done[step]) - 1  # training steps that earlier samples are enough for
            match rules.mode:
                case LoopMode.SYNCHRONOUS:
                    version = ready
                case LoopMode.ONE_STEP_ASYNC:
                    version = bisect_right(taken, done[max(step - 1, 0)]) - 1
                case LoopMode.BOUNDED_STALENESS:
                    assert rules.staleness is not None
                    last = step if size is None else -(-done[step + 1] // size) - 1
                    version = max(0, last - rules.staleness)
            over = 0 if rules.buffer_samples is None else done[step + 1] - rules.buffer_samples
            begun_steps = bisect_left(taken, over) if over > 0 else 0
            if version > ready:
                wish = f"needs version {version}, and earlier samples make {ready}: allow more staleness"
                raise ValueError(f"generation step {step} {wish}, or larger batches")
            if begun_steps > ready:
                wish = f"has no room in a buffer of {rules.buffer_samples} samples"
                raise ValueError(f"generation step {step} {wish}: {done[step + 1] - taken[ready]} are needed")
            versions.append(version)
            trained.append(begun_steps)
        return cls(done, taken, tuple(versions), tuple(trained))


def staleness(batches: Sequence[SampleBatch], begun_with: Sequence[int], taken: Sequence[int]) -> Mapping[int, int]:
    """Samples that were trained on, by the versions that they were behind."""
    order: deque[tuple[int, int]] = deque(
        (version, batch.begun) for batch, version in zip(batches, begun_with, strict=True)
    )
    behind: Counter[int] = Counter()
    for step, wanted in enumerate(later - sooner for sooner, later in pairwise(taken)):
        while wanted:
            version, count = order.popleft()
            some = min(count, wanted)
            behind[step - version] += some
            wanted -= some
            if count > some:
                order.appendleft((version, count - some))
    return {versions: behind[versions] for versions in sorted(behind)}


def idle_shares(
    spans: Sequence[TimelineSpan], from_s: float, until_s: float, shared: bool
) -> Mapping[FabricStage, float]:
    """Of each stage's GPUs, between the two times."""
    if until_s <= from_s:
        return {}
    busy_s = dict.fromkeys((FabricStage.TRAIN, FabricStage.GEN), 0.0)
    for span in spans:
        if span.stage in busy_s:
            busy_s[span.stage] += max(0.0, min(span.end_s, until_s) - max(span.begin_s, from_s))
    if shared:
        busy_s = dict.fromkeys(busy_s, sum(busy_s.values()))
    return {stage: max(0.0, 1 - seconds / (until_s - from_s)) for stage, seconds in busy_s.items()}


@dataclass(frozen=True, slots=True)
class SyncTime:
    """`held_s`: what those beside it are late by, if they are at work all the while."""

    seconds: float
    held_s: Mapping[FabricStage, float] = field(default_factory=dict)


@dataclass(slots=True)
class Slowed:
    """A lane of the time line, and the stretches in which part of its work does not get done."""

    _stretches: list[tuple[float, float, float]] = field(default_factory=list)  # begin, end, share that is lost

    def add(self, begin_s: float, end_s: float, held_s: float) -> None:
        """One that begins within the one before is moved behind it."""
        if held_s > 0 and end_s > begin_s:
            late_s = max(0.0, self._stretches[-1][1] - begin_s) if self._stretches else 0.0
            self._stretches.append((begin_s + late_s, end_s + late_s, min(1.0, held_s / (end_s - begin_s))))

    def held_s(self, begin_s: float, work_s: float) -> float:
        """By which work that begins then ends later than it would."""
        now_s, left_s, held_s = begin_s, work_s, 0.0
        for from_s, until_s, lost in self._stretches:
            if until_s <= now_s:
                continue
            left_s -= max(0.0, from_s - now_s)
            now_s = max(now_s, from_s)
            done_s = (until_s - now_s) * (1 - lost)
            if left_s <= 0:
                return held_s
            if left_s < done_s:
                return held_s + left_s * lost / (1 - lost)
            held_s += (until_s - now_s) * lost
            left_s -= done_s
            now_s = until_s
        return held_s
