"""How generation, training and weight sync follow each other: from stages' times to a time line. Pure.

Version v of the weights is what v training steps have made. A step is generated with one version from beginning to end.
Samples are trained on in the order in which they were begun; of what a step cuts (partial rollout) the rest is finished
first in the next, and keeps the version that it was begun with: it may be one step staler than the bound for each time
that it was cut.

With synchronous and one-step asynchronous loops, step k has the version of all samples of the steps up to k - 1, and
up to k - 2. With bounded staleness it begins as soon as none of its samples will be further behind than allowed, and
takes the newest version that is there. Engines that wait for weights then make a longer training step save a sync now
and then: more time for a stage may end sooner, as it may in any greedy schedule.

Weights on their way take as long as they do beside those who are at work when they set out, and hold these up by their
share of the time that both go on.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.rl.loop_rules import LoopRules, Needs, SampleBatch, Slowed, SyncTime, idle_shares, staleness
from orchestrrl.lab.sim.rl.model import Holds, LoopMode, RlRun, TimelineSpan


@dataclass(frozen=True, slots=True)
class GenTime:
    """`finish_s`: of each sample that is done, from the step's beginning, ascending; empty: at its end."""

    seconds: float
    finish_s: tuple[float, ...] = ()


class Times(Protocol):
    """What stages take that begin then. Asked once for each, in the order in which they begin on their GPUs."""

    def gen(self, step: int, begin_s: float) -> GenTime: ...

    def train(self, step: int, samples: int, begin_s: float) -> float: ...

    def sync(self, version: int, begin_s: float, beside: tuple[FabricStage, ...]) -> SyncTime:
        """`beside`: who is at work then, and goes on."""
        ...


@dataclass(frozen=True, slots=True)
class FixedTimes:
    """Times that do not depend on when: [step], and of versions 1, 2, ..."""

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
    """The time line as it grows."""

    rules: LoopRules
    batches: Sequence[SampleBatch]
    times: Times
    needs: Needs
    engines_free_s: float = 0.0
    trainer_free_s: float = 0.0
    installed: int = 0
    laid_s: float = 0.0  # until then, what engines do is settled
    ready_s: list[float] = field(default_factory=list)  # [sample]
    expected_s: list[float] = field(default_factory=list)  # [sample] of the next step, if nothing holds it up
    train_begin_s: list[float] = field(default_factory=list)  # [training step]
    train_end_s: list[float] = field(default_factory=list)
    sync_end_s: list[float] = field(default_factory=lambda: [0.0])  # [version], where nobody waits for it
    begun_with: list[int] = field(default_factory=list)  # [generation step] version
    training: Slowed = field(default_factory=Slowed)
    engines: Slowed = field(default_factory=Slowed)
    sync_beside: tuple[FabricStage, ...] = ()  # of the last one
    spans: list[TimelineSpan] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)

    def run(self) -> None:
        for step in range(len(self.batches)):
            self.steps.append(dict.fromkeys(ROW, 0.0))
            self._wait(step)
            self._bring_weights(step)
            self._generate(step)
        self._go_on(len(self.needs.taken) - 1, self.needs.carried if self._carries else 0, 0.0)

    @property
    def _carries(self) -> bool:
        """Whether weights set out as soon as they are made."""
        return self.rules.holds is Holds.NOBODY

    def _wait(self, step: int) -> None:
        """Until there is room for the step, and the weights that it needs are made."""
        needed, begun = self.needs.version[step], self.needs.trained[step]
        free_s, row = self.engines_free_s, self.steps[step]
        self._go_on(max(needed, begun), needed if self._carries else 0, free_s)
        versions_s = self.sync_end_s if self._carries else [0.0, *self.train_end_s]
        made_s = max(free_s, versions_s[needed])
        self.engines_free_s = max(made_s, self.train_begin_s[begun - 1] if begun else 0.0)
        row["gen_waits_weights_s"], row["gen_waits_room_s"] = made_s - free_s, self.engines_free_s - made_s
        self._go_on(0, 0, self.engines_free_s)

    def _go_on(self, trained: int, carried: int, until_s: float) -> None:
        """Training, and weights that nobody waits for, in the order of time: so many of each at least, and what begins
        before `until_s`. Of samples that are there, and nothing later, for what engines do may have an effect on it."""
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
        """When a training step on the first `samples` could begin; inf: there are not enough."""
        index = len(self.train_end_s)
        if index + 1 == len(self.needs.taken) or self.needs.taken[index + 1] > samples:
            return inf
        last, known = self.needs.taken[index + 1] - 1, len(self.ready_s)
        ready_s = self.ready_s[last] if last < known else self.expected_s[last - known]
        return max(self.trainer_free_s, ready_s, self.engines_free_s if self.rules.shared else 0.0)

    def _next_carry_s(self) -> float:
        """When the next weights that nobody waits for set out; inf: they are not made, or no step takes them."""
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
        """Of the generation step that has the last of a training step's samples."""
        return self.steps[bisect_left(self.needs.done, self.needs.taken[index + 1]) - 1]

    def _carry(self, begin_s: float) -> None:
        """Weights to engines that go on. What that costs a step which is laid out already, the next one pays."""
        version = len(self.sync_end_s)
        beside = self._training_at(begin_s) + self._generation_at(begin_s, version)
        took = self._sync(version, begin_s, beside, self._row_of(version - 1))
        self.sync_end_s.append(begin_s + took.seconds)
        laid_s = max(begin_s, self.laid_s)
        self.engines.add(laid_s, laid_s + took.seconds, took.held_s.get(FabricStage.GEN, 0.0))
        self._hold_up_training(begin_s, took)

    def _training_at(self, now_s: float) -> tuple[FabricStage, ...]:
        """The trainer, if it is at work then."""
        next_s = self._next_training_s(len(self.ready_s) + len(self.expected_s))
        return (FabricStage.TRAIN,) if self.trainer_free_s > now_s or next_s <= now_s else ()

    def _generation_at(self, now_s: float, version: int) -> tuple[FabricStage, ...]:
        """Engines, if they are at work then: in a step that is known, or the next, unless it waits for that version."""
        if now_s >= self.engines_free_s:
            step = len(self.begun_with) + bool(self.expected_s)
            if step == len(self.batches) or max(self.needs.version[step] + 1, self.needs.trained[step]) > version:
                return ()
        return (FabricStage.GEN,)

    def _bring_weights(self, step: int) -> None:
        """What the step needs, or the newest that is there."""
        needed, now_s = self.needs.version[step], self.engines_free_s
        if self._carries:
            self.installed = max(self.installed, self._choice(needed, bisect_right(self.sync_end_s, now_s) - 1))
            return
        version = self._choice(needed, bisect_right(self.train_end_s, now_s))
        if version > self.installed:
            self._held_sync(step, version, now_s)

    def _held_sync(self, step: int, version: int, now_s: float) -> None:
        """Engines stand still for it."""
        row, both = self.steps[step], self.rules.holds is Holds.BOTH
        begin_s = now_s
        if both:  # between two of the trainer's iterations, with what the last one made
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
        """From now on, also the training step that is under way."""
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
        if self._carries:  # what sets out meanwhile may hold it up
            self.laid_s, self.engines_free_s = begin_s, begin_s + taken.seconds
            self.expected_s = [begin_s + at_s for at_s in ends_s]
            self._go_on(0, 0, self.engines_free_s)
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


# Of each generation step: what its stages took, of that what weights on their way held up, what was stood still for.
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


def run_loop(
    rules: LoopRules,
    batches: Sequence[SampleBatch],
    times: Times,
    *,
    warmup_steps: int = 0,
    fabric: str = "",
    arm: str = "",
    seed: int = 0,
) -> RlRun:
    """The run up to the end of the last training step; the rate and idle shares are of what comes after the training on
    the warm-up's samples. Raises ValueError where counts do not allow some step to begin."""
    line = _Line(rules, batches, times, Needs.of(rules, batches))
    line.run()
    trained = line.needs.taken[len(line.train_end_s)]
    left_out = bisect_right(line.needs.taken, line.needs.done[warmup_steps]) - 1
    from_s = line.train_end_s[left_out - 1] if left_out else 0.0
    until_s = line.train_end_s[-1] if line.train_end_s else 0.0
    measured_s = until_s - from_s
    spans = tuple(sorted(line.spans, key=lambda span: (span.begin_s, span.lane, span.step)))
    return RlRun(
        fabric=fabric,
        arm=arm,
        seed=seed,
        seconds=max(until_s, line.engines_free_s),
        samples=trained,
        samples_per_s=(trained - line.needs.taken[left_out]) / measured_s if measured_s > 0 else 0.0,
        spans=spans,
        steps=tuple(line.steps),
        staleness=staleness(batches, line.begun_with, line.needs.taken),
        idle_share=idle_shares(spans, from_s, until_s, rules.shared),
        sync_beside=line.sync_beside,
    )
