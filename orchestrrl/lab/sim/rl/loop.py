"""Schedule generation, training and weight sync of the RL loop, and build a time line from the durations of stages. The
functions have no side effects.

Version v of the weights is the result of v training steps. A step is generated with a single version. Samples are
trained on in the order in which they were begun. If a step ends early (partial rollout), its unfinished samples are
finished first in the next step and keep the version that they were begun with. Such a sample may exceed the staleness
bound by one step for each time that it was interrupted.

In a synchronous loop, step k uses the version trained on all samples of the steps up to k - 1. In a one-step
asynchronous loop, step k uses the version trained on the samples of the steps up to k - 2. With bounded staleness, a
step begins as soon as none of its samples will exceed the bound, and uses the newest available version. In the last
mode, if engines wait for weights, a longer training step may avoid a sync, so that the run ends earlier than with a
shorter training step. Any greedy schedule can have such anomalies.

The time of a weight sync depends on the stages that run when it begins. The sync delays these stages in proportion to
the time for which they run at the same time as the sync.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import inf
from typing import Annotated, Protocol

from pydantic import Field
from pydantic.dataclasses import dataclass as checked

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.rl.model import Holds, LoopMode, RlRun, TimelineSpan
from orchestrrl.lab.sim.scenario import Count

Number = Annotated[int, Field(ge=0)]


@checked(frozen=True, slots=True)
class SampleBatch:
    """The number of samples begun and finished in a generation step. Samples of earlier steps are finished first."""

    begun: Number
    finished: Count


@dataclass(frozen=True, slots=True)
class LoopRules:
    """The rules for the order of stages. If `shared` is true, the same GPUs train and generate, so that stages do not
    overlap."""

    mode: LoopMode = LoopMode.ONE_STEP_ASYNC
    staleness: int | None = None  # bound in versions, for BOUNDED_STALENESS
    batch_samples: int | None = None  # per training step; None: the samples that a generation step finishes
    buffer_samples: int | None = None  # limit of samples not in training yet, including those of the running step
    holds: Holds = Holds.ENGINES
    shared: bool = False

    def __post_init__(self) -> None:
        if (self.mode is LoopMode.BOUNDED_STALENESS) != (self.staleness is not None):
            raise ValueError(f"staleness is only for bounded_staleness, got {self.staleness} with {self.mode}")
        if self.shared and self.mode is not LoopMode.SYNCHRONOUS:
            raise ValueError(f"mode must be synchronous if the same GPUs train and generate, got {self.mode}")


@dataclass(frozen=True, slots=True)
class Needs:
    """The dependencies between generation steps and training steps that follow from sample counts."""

    done: tuple[int, ...]  # [generation step + 1] samples finished before it
    taken: tuple[int, ...]  # [training step + 1] samples taken before it
    version: tuple[int, ...]  # [generation step] oldest version that it may use
    trained: tuple[int, ...]  # [generation step] training steps that must have begun, for room in the buffer

    @property
    def carried(self) -> int:
        """The number of versions that are trained only on samples of the generation steps before the last. The last
        generation step uses the newest of these versions."""
        return bisect_right(self.taken, self.done[-2]) - 1

    @classmethod
    def of(cls, rules: LoopRules, batches: Sequence[SampleBatch]) -> "Needs":
        """Compute the dependencies. Raises ValueError if the sample counts prevent a step from ever beginning."""
        done = (0, *accumulate(batch.finished for batch in batches))
        begun = accumulate(batch.begun for batch in batches)
        if any(finished > there for finished, there in zip(done[1:], begun, strict=True)):
            raise ValueError(f"finished samples must be <= begun samples, got {list(batches)}")
        size = rules.batch_samples
        taken = done if size is None else tuple(range(0, done[-1] + 1, size))
        versions, trained = [], []
        for step in range(len(batches)):
            ready = bisect_right(taken, done[step]) - 1  # training steps that earlier samples suffice for
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
                wish = f"needs version {version}, but earlier samples suffice for {ready}: allow more staleness"
                raise ValueError(f"generation step {step} {wish}, or increase batch_samples")
            if begun_steps > ready:
                wish = f"has no room in a buffer of {rules.buffer_samples} samples"
                raise ValueError(f"generation step {step} {wish}: it needs {done[step + 1] - taken[ready]}")
            versions.append(version)
            trained.append(begun_steps)
        return cls(done, taken, tuple(versions), tuple(trained))


def staleness(batches: Sequence[SampleBatch], begun_with: Sequence[int], taken: Sequence[int]) -> Mapping[int, int]:
    """Return the number of samples trained on, by lag in versions. A sample's lag is the number of training steps
    between the weights that it was begun with and the weights that it trains. `begun_with` contains the version used by
    each generation step, and `taken` the number of samples trained on before each training step."""
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
    """Return the idle fraction of each stage's GPUs between `from_s` and `until_s`. If `shared` is true, the same GPUs
    train and generate."""
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
    """The duration of a weight sync. `held_s` is the delay, in seconds, of each stage that runs from the beginning to
    the end of the sync."""

    seconds: float
    held_s: Mapping[FabricStage, float] = field(default_factory=dict)


@dataclass(slots=True)
class Slowed:
    """The intervals in which a lane of the time line is slowed down."""

    _stretches: list[tuple[float, float, float]] = field(default_factory=list)  # begin, end, fraction of work lost

    def add(self, begin_s: float, end_s: float, held_s: float) -> None:
        """Add an interval that delays work by `held_s` in total. An interval that overlaps the previous interval is
        shifted to begin at the previous interval's end."""
        if held_s > 0 and end_s > begin_s:
            late_s = max(0.0, self._stretches[-1][1] - begin_s) if self._stretches else 0.0
            self._stretches.append((begin_s + late_s, end_s + late_s, min(1.0, held_s / (end_s - begin_s))))

    def held_s(self, begin_s: float, work_s: float) -> float:
        """Return the delay of work that begins at `begin_s` and takes `work_s` without delays."""
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


@dataclass(frozen=True, slots=True)
class GenTime:
    """The duration of a generation step. `finish_s` contains the completion times of the step's samples in ascending
    order, relative to the step's beginning. If it is empty, all samples complete at the step's end."""

    seconds: float
    finish_s: tuple[float, ...] = ()


class Times(Protocol):
    """The durations of stages. The loop calls a method once per stage, in the order in which stages begin on their
    GPUs."""

    def gen(self, step: int, begin_s: float) -> GenTime: ...

    def train(self, step: int, samples: int, begin_s: float) -> float: ...

    def sync(self, version: int, begin_s: float, beside: tuple[FabricStage, ...]) -> SyncTime:
        """Return the duration of a sync and the delays that it causes. `beside` contains the stages that run when the
        sync begins and continue during the sync."""
        ...


@dataclass(frozen=True, slots=True)
class FixedTimes:
    """Stage durations that do not depend on the time at which a stage begins. `gen_s` and `train_s` are indexed by
    step. `sync_s` contains the sync durations of the versions 1, 2, and so on."""

    gen_s: Sequence[float]
    train_s: Sequence[float]
    sync_s: Sequence[float]

    def gen(self, step: int, begin_s: float) -> GenTime:
        return GenTime(self.gen_s[step])

    def train(self, step: int, samples: int, begin_s: float) -> float:
        return self.train_s[step]

    def sync(self, version: int, begin_s: float, beside: tuple[FabricStage, ...]) -> SyncTime:
        return SyncTime(self.sync_s[version - 1])


@dataclass(slots=True)
class _Line:
    """The state of the schedule while the time line is built."""

    rules: LoopRules
    batches: Sequence[SampleBatch]
    times: Times
    needs: Needs
    engines_free_s: float = 0.0
    trainer_free_s: float = 0.0
    installed: int = 0
    laid_s: float = 0.0  # the engines' schedule is final until this time
    ready_s: list[float] = field(default_factory=list)  # [sample]
    expected_s: list[float] = field(default_factory=list)  # [sample] of the next step, without delays
    train_begin_s: list[float] = field(default_factory=list)  # [training step]
    train_end_s: list[float] = field(default_factory=list)
    sync_end_s: list[float] = field(default_factory=lambda: [0.0])  # [version], with Holds.NOBODY
    begun_with: list[int] = field(default_factory=list)  # [generation step] version
    training: Slowed = field(default_factory=Slowed)
    engines: Slowed = field(default_factory=Slowed)
    sync_beside: tuple[FabricStage, ...] = ()  # stages that ran during the last sync
    spans: list[TimelineSpan] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)

    def run(self) -> None:
        for step in range(len(self.batches)):
            self.steps.append(dict.fromkeys(ROW, 0.0))
            self._wait(step)
            self._bring_weights(step)
            self._generate(step)
        self._schedule(len(self.needs.taken) - 1, self.needs.carried if self._carries else 0, 0.0)

    @property
    def _carries(self) -> bool:
        """Return whether a weight sync begins as soon as its version is trained."""
        return self.rules.holds is Holds.NOBODY

    def _wait(self, step: int) -> None:
        """Wait until the buffer has room for the step's samples and the weights that the step needs are trained."""
        needed, begun = self.needs.version[step], self.needs.trained[step]
        free_s, row = self.engines_free_s, self.steps[step]
        self._schedule(max(needed, begun), needed if self._carries else 0, free_s)
        versions_s = self.sync_end_s if self._carries else [0.0, *self.train_end_s]
        made_s = max(free_s, versions_s[needed])
        self.engines_free_s = max(made_s, self.train_begin_s[begun - 1] if begun else 0.0)
        row["gen_waits_weights_s"], row["gen_waits_room_s"] = made_s - free_s, self.engines_free_s - made_s
        self._schedule(0, 0, self.engines_free_s)

    def _schedule(self, trained: int, carried: int, until_s: float) -> None:
        """Schedule, in the order of time, training steps and the syncs that no stage waits for. Afterwards, at least
        `trained` training steps and `carried` syncs are scheduled in total, and also all training steps and syncs that
        begin before `until_s`. A training step is not scheduled before the generation of its samples is."""
        while True:
            train_s, carry_s = self._next_training_s(len(self.ready_s)), self._next_carry_s()
            enough = len(self.train_end_s) >= trained and len(self.sync_end_s) > carried
            if min(train_s, carry_s) == inf or (enough and train_s >= until_s and carry_s > until_s):
                return
            if carry_s <= train_s:
                self._carry(carry_s)
            else:
                self._train(train_s)

    def _next_training_s(self, samples: int) -> float:
        """Return the earliest time at which the next training step can begin if only the first `samples` samples are
        used. Return inf if these samples do not suffice, or no training step remains."""
        index = len(self.train_end_s)
        if index + 1 == len(self.needs.taken) or self.needs.taken[index + 1] > samples:
            return inf
        last, known = self.needs.taken[index + 1] - 1, len(self.ready_s)
        ready_s = self.ready_s[last] if last < known else self.expected_s[last - known]
        return max(self.trainer_free_s, ready_s, self.engines_free_s if self.rules.shared else 0.0)

    def _next_carry_s(self) -> float:
        """Return the begin time of the next sync that no stage waits for. Return inf if the sync's version is not
        trained yet or is not used."""
        version = len(self.sync_end_s)
        if not self._carries or version > min(len(self.train_end_s), self.needs.carried):
            return inf
        return max(self.train_end_s[version - 1], self.sync_end_s[-1])

    def _train(self, begin_s: float) -> None:
        index = len(self.train_end_s)
        work_s = self.times.train(index, self.needs.taken[index + 1] - self.needs.taken[index], begin_s)
        held_s = self.training.held_s(begin_s, work_s)
        end_s, row = begin_s + (work_s + held_s), self._row_of(index)
        row["train_s"] += end_s - begin_s
        row["train_held_s"] += held_s
        row["train_waits_samples_s"] += begin_s - self.trainer_free_s
        self._span("train", FabricStage.TRAIN, index, begin_s, end_s, f"to version {index + 1}")
        self.trainer_free_s = end_s
        self.train_begin_s.append(begin_s)
        self.train_end_s.append(end_s)

    def _row_of(self, index: int) -> dict[str, float]:
        """Return the table row of the generation step that finished the last sample of training step `index`."""
        return self.steps[bisect_left(self.needs.done, self.needs.taken[index + 1]) - 1]

    def _carry(self, begin_s: float) -> None:
        """Schedule a sync during which engines continue. If the sync delays a generation step that is already
        scheduled, the delay is charged to the next step."""
        version = len(self.sync_end_s)
        beside = self._training_at(begin_s) + self._generation_at(begin_s, version)
        took = self._sync(version, begin_s, beside, self._row_of(version - 1))
        self.sync_end_s.append(begin_s + took.seconds)
        laid_s = max(begin_s, self.laid_s)
        self.engines.add(laid_s, laid_s + took.seconds, took.held_s.get(FabricStage.GEN, 0.0))
        self._hold_up_training(begin_s, took)

    def _training_at(self, now_s: float) -> tuple[FabricStage, ...]:
        """Return the training stage if the trainer is busy at `now_s`. Otherwise, return an empty tuple."""
        next_s = self._next_training_s(len(self.ready_s) + len(self.expected_s))
        return (FabricStage.TRAIN,) if self.trainer_free_s > now_s or next_s <= now_s else ()

    def _generation_at(self, now_s: float, version: int) -> tuple[FabricStage, ...]:
        """Return the generation stage if engines are busy at `now_s`, in a scheduled step or in the next step. Return
        an empty tuple if the next step waits for `version`, or no step remains."""
        if now_s >= self.engines_free_s:
            step = len(self.begun_with) + bool(self.expected_s)
            if step == len(self.batches) or max(self.needs.version[step] + 1, self.needs.trained[step]) > version:
                return ()
        return (FabricStage.GEN,)

    def _bring_weights(self, step: int) -> None:
        """Install the version that the step needs or, with bounded staleness, the newest available version."""
        needed, now_s = self.needs.version[step], self.engines_free_s
        if self._carries:
            self.installed = max(self.installed, self._choice(needed, bisect_right(self.sync_end_s, now_s) - 1))
            return
        version = self._choice(needed, bisect_right(self.train_end_s, now_s))
        if version > self.installed:
            self._held_sync(step, version, now_s)

    def _held_sync(self, step: int, version: int, now_s: float) -> None:
        """Schedule a sync during which engines are paused."""
        row, both = self.steps[step], self.rules.holds is Holds.BOTH
        begin_s = now_s
        if both:  # between two training steps, with the version of the last one
            row["train_waits_samples_s"] += max(0.0, now_s - self.trainer_free_s)
            begin_s = max(now_s, self.trainer_free_s)
            row["gen_waits_weights_s"] += begin_s - now_s
            version = self._choice(version, len(self.train_end_s))
        took = self._sync(version, begin_s, () if both else self._training_at(begin_s), row)
        self.engines_free_s = begin_s + took.seconds
        self.installed = version
        self._hold_up_training(begin_s, took)
        if both:
            self.trainer_free_s = self.engines_free_s
            row["train_waits_sync_s"] += self.engines_free_s - begin_s

    def _hold_up_training(self, now_s: float, time: SyncTime) -> None:
        """Delay training for the duration of a sync, including the training step that is running."""
        self.training.add(now_s, now_s + time.seconds, time.held_s.get(FabricStage.TRAIN, 0.0))
        held_s = self.training.held_s(now_s, max(0.0, self.trainer_free_s - now_s))
        if held_s <= 0:
            return
        self.trainer_free_s += held_s
        self.train_end_s[-1] = self.trainer_free_s
        row = self._row_of(len(self.train_end_s) - 1)
        row["train_s"] += held_s
        row["train_held_s"] += held_s
        place = max(place for place, span in enumerate(self.spans) if span.stage is FabricStage.TRAIN)
        self.spans[place] = replace(self.spans[place], end_s=self.trainer_free_s)

    def _choice(self, needed: int, newest: int) -> int:
        return newest if self.rules.mode is LoopMode.BOUNDED_STALENESS else needed

    def _sync(self, version: int, begin_s: float, beside: tuple[FabricStage, ...], row: dict[str, float]) -> SyncTime:
        took, self.sync_beside = self.times.sync(version, begin_s, beside), beside
        end_s = begin_s + took.seconds
        row["sync_s"] += end_s - begin_s
        self._span("sync", FabricStage.WEIGHT_SYNC, version, begin_s, end_s, f"version {version}")
        return took

    def _generate(self, step: int) -> None:
        begin_s = self.engines_free_s
        taken, finished = self.times.gen(step, begin_s), self.batches[step].finished
        if taken.finish_s and len(taken.finish_s) != finished:
            raise ValueError(f"generation step {step} finishes {finished} samples, got {len(taken.finish_s)} times")
        ends_s = taken.finish_s or (taken.seconds,) * finished
        if self._carries:  # syncs that begin during the step may delay it
            self.laid_s, self.engines_free_s = begin_s, begin_s + taken.seconds
            self.expected_s = [begin_s + at_s for at_s in ends_s]
            self._schedule(0, 0, self.engines_free_s)
            self.expected_s = []
        held_s = self.engines.held_s(begin_s, taken.seconds)
        end_s = begin_s + (taken.seconds + held_s)
        self.steps[step]["gen_s"], self.steps[step]["gen_held_s"] = taken.seconds + held_s, held_s
        self.ready_s += [begin_s + (at_s + self.engines.held_s(begin_s, at_s)) for at_s in ends_s]
        self.begun_with.append(self.installed)
        self._span("gen", FabricStage.GEN, step, begin_s, end_s, f"with version {self.installed}")
        self.engines_free_s = self.laid_s = end_s

    def _span(self, lane: str, stage: FabricStage, step: int, begin_s: float, end_s: float, label: str) -> None:
        self.spans.append(TimelineSpan(lane, stage, step, begin_s, end_s, label))


# Columns of each generation step: times of its stages, the delays by syncs that these times include, and waiting times.
ROW = (
    "gen_s",
    "train_s",
    "sync_s",
    "gen_held_s",
    "train_held_s",
    "gen_waits_weights_s",
    "gen_waits_room_s",
    "train_waits_samples_s",
    "train_waits_sync_s",
)


def run_loop(rules: LoopRules, batches: Sequence[SampleBatch], times: Times, *, warmup_steps: int = 0) -> RlRun:
    """Run the loop and return its results, in which the caller sets the fabric, arm and seed. The throughput and the
    idle fractions cover the time from the end of training on the warm-up steps' samples to the end of the last training
    step. Raises ValueError if sample counts prevent a step from beginning."""
    line = _Line(rules, batches, times, Needs.of(rules, batches))
    line.run()
    trained = line.needs.taken[len(line.train_end_s)]
    left_out = bisect_right(line.needs.taken, line.needs.done[warmup_steps]) - 1
    from_s = line.train_end_s[left_out - 1] if left_out else 0.0
    until_s = line.train_end_s[-1] if line.train_end_s else 0.0
    measured_s = until_s - from_s
    spans = tuple(sorted(line.spans, key=lambda span: (span.begin_s, span.lane, span.step)))
    return RlRun(
        fabric="",
        arm="",
        seed=0,
        seconds=max(until_s, line.engines_free_s),
        samples=trained,
        samples_per_s=(trained - line.needs.taken[left_out]) / measured_s if measured_s > 0 else 0.0,
        spans=spans,
        steps=tuple(line.steps),
        staleness=staleness(batches, line.begun_with, line.needs.taken),
        idle_share=idle_shares(spans, from_s, until_s, rules.shared),
        sync_beside=line.sync_beside,
    )
