"""The rules of a loop, and what follows from them and from counts of samples before any time is known. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from orchestrrl.lab.sim.rl.model import Holds, LoopMode


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
