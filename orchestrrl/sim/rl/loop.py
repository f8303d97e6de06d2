"""How generation, training and weight sync follow each other: from stages' times to a time line. Pure.

Version v of the weights is what v training steps have made. A step is generated with one version from beginning to end.
Samples are trained on in the order in which they were begun; of what a step cuts (partial rollout) the rest is finished
first in the next, and keeps the version that it was begun with: it may be one step staler than the bound for each time
that it was cut.

With synchronous and one-step asynchronous loops, step k has the version of all samples of the steps up to k - 1, and
up to k - 2. With bounded staleness it begins as soon as none of its samples will be further behind than allowed, and
takes the newest version that is there. Engines that wait for weights then make a longer training step save a sync now
and then: more time for a stage may end sooner, as it may in any greedy schedule.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from orchestrrl.sim.net.fabrics.base import Stage
from orchestrrl.sim.rl.loop_rules import Batch, Needs, Rules
from orchestrrl.sim.rl.model import Holds, LoopMode, RlRun, Span


@dataclass(frozen=True, slots=True)
class GenTime:
    """`finish_s`: of each sample that is done, from the step's beginning, ascending; empty: at its end."""

    seconds: float
    finish_s: tuple[float, ...] = ()


class Times(Protocol):
    """What stages take that begin then. Asked once for each, in the order in which they begin on their GPUs."""

    def gen(self, step: int, begin_s: float) -> GenTime: ...

    def train(self, step: int, samples: int, begin_s: float) -> float: ...

    def sync(self, version: int, begin_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Given:
    """Times that do not depend on when: [step], and of versions 1, 2, ..."""

    gen_s: Sequence[float]
    train_s: Sequence[float]
    sync_s: Sequence[float]

    def gen(self, step: int, begin_s: float) -> GenTime:
        return GenTime(self.gen_s[step])

    def train(self, step: int, samples: int, begin_s: float) -> float:
        return self.train_s[step]

    def sync(self, version: int, begin_s: float) -> float:
        return self.sync_s[version - 1]


@dataclass(slots=True)
class _Line:
    """The time line as it grows."""

    rules: Rules
    batches: Sequence[Batch]
    times: Times
    needs: Needs
    engines_free_s: float = 0.0
    trainer_free_s: float = 0.0
    installed: int = 0
    ready_s: list[float] = field(default_factory=list)  # [sample]
    train_begin_s: list[float] = field(default_factory=list)  # [training step]
    train_end_s: list[float] = field(default_factory=list)
    sync_end_s: list[float] = field(default_factory=lambda: [0.0])  # [version], where nobody waits for it
    begun_with: list[int] = field(default_factory=list)  # [generation step] version
    spans: list[Span] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)

    def run(self) -> None:
        for step in range(len(self.batches)):
            self.steps.append(dict.fromkeys(ROW, 0.0))
            self._wait(step)
            self._bring_weights(step)
            self._generate(step)
        self._train_on(len(self.batches), len(self.needs.taken) - 1, 0.0)

    def _wait(self, step: int) -> None:
        """Until there is room for the step, and the weights that it needs are made."""
        needed, begun, free_s, row = (
            self.needs.version[step],
            self.needs.trained[step],
            self.engines_free_s,
            self.steps[step],
        )
        self._train_on(step, max(needed, begun), free_s)
        versions_s = self.sync_end_s if self.rules.holds is Holds.NOBODY else [0.0, *self.train_end_s]
        made_s = max(free_s, versions_s[needed])
        self.engines_free_s = max(made_s, self.train_begin_s[begun - 1] if begun else 0.0)
        row["gen_waits_weights_s"], row["gen_waits_room_s"] = made_s - free_s, self.engines_free_s - made_s
        self._train_on(step, 0, self.engines_free_s)

    def _train_on(self, before_step: int, needed: int, until_s: float) -> None:
        """On samples of the steps before: so many training steps at least. Where the trainer sends weights itself,
        those that begin before `until_s`, too; otherwise all, for nothing of the step has an effect on them."""
        while len(self.train_end_s) + 1 < len(self.needs.taken):
            index = len(self.train_end_s)
            last = self.needs.taken[index + 1]
            if last > self.needs.done[before_step]:
                return
            ready_s = max(self.ready_s[last - 1], self.engines_free_s if self.rules.shared else 0.0)
            begin_s = max(self.trainer_free_s, ready_s)
            if self.rules.holds is Holds.BOTH and index >= needed and begin_s >= until_s:
                return
            self._train(index, last - self.needs.taken[index], begin_s)

    def _train(self, index: int, samples: int, begin_s: float) -> None:
        end_s = begin_s + self.times.train(index, samples, begin_s)
        row = self.steps[bisect_left(self.needs.done, self.needs.taken[index + 1]) - 1]
        row["train_s"] += end_s - begin_s
        row["train_waits_samples_s"] += begin_s - self.trainer_free_s
        self._span("train", Stage.TRAIN, index, begin_s, end_s, f"to version {index + 1}")
        self.trainer_free_s = end_s
        self.train_begin_s.append(begin_s)
        self.train_end_s.append(end_s)
        if self.rules.holds is Holds.NOBODY and self.needs.taken[index + 1] <= self.needs.done[-2]:
            self.sync_end_s.append(self._sync(index + 1, max(end_s, self.sync_end_s[-1]), row))

    def _bring_weights(self, step: int) -> None:
        """What the step needs, or the newest that is there."""
        needed, now_s = self.needs.version[step], self.engines_free_s
        if self.rules.holds is Holds.NOBODY:
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
        self.engines_free_s = self._sync(version, begin_s, row)
        self.installed = version
        if both:
            self.trainer_free_s = self.engines_free_s
            row["train_waits_sync_s"] += self.engines_free_s - begin_s

    def _choice(self, needed: int, newest: int) -> int:
        return newest if self.rules.mode is LoopMode.BOUNDED_STALENESS else needed

    def _sync(self, version: int, begin_s: float, row: dict[str, float]) -> float:
        end_s = begin_s + self.times.sync(version, begin_s)
        row["sync_s"] += end_s - begin_s
        self._span("sync", Stage.WEIGHT_SYNC, version, begin_s, end_s, f"version {version}")
        return end_s

    def _generate(self, step: int) -> None:
        begin_s = self.engines_free_s
        taken = self.times.gen(step, begin_s)
        end_s = begin_s + taken.seconds
        self.steps[step]["gen_s"] = taken.seconds
        finished = self.batches[step].finished
        if taken.finish_s and len(taken.finish_s) != finished:
            raise ValueError(f"generation step {step} finishes {finished} samples, got {len(taken.finish_s)} times")
        self.ready_s += [begin_s + at_s for at_s in taken.finish_s] or [end_s] * finished
        self.begun_with.append(self.installed)
        self._span("gen", Stage.GEN, step, begin_s, end_s, f"with version {self.installed}")
        self.engines_free_s = end_s

    def _span(self, lane: str, stage: Stage, step: int, begin_s: float, end_s: float, label: str) -> None:
        self.spans.append(Span(lane, stage, step, begin_s, end_s, label))


# Of each generation step: what its stages took, and what they stood still for.
ROW = (
    "gen_s",
    "train_s",
    "sync_s",
    "gen_waits_weights_s",
    "gen_waits_room_s",
    "train_waits_samples_s",
    "train_waits_sync_s",
)


def run_loop(
    rules: Rules,
    batches: Sequence[Batch],
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
        idle_share=_idle_shares(spans, from_s, until_s, rules.shared),
    )


def staleness(batches: Sequence[Batch], begun_with: Sequence[int], taken: Sequence[int]) -> Mapping[int, int]:
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


def _idle_shares(spans: Sequence[Span], from_s: float, until_s: float, shared: bool) -> Mapping[Stage, float]:
    if until_s <= from_s:
        return {}
    busy_s = dict.fromkeys((Stage.TRAIN, Stage.GEN), 0.0)
    for span in spans:
        if span.stage in busy_s:
            busy_s[span.stage] += max(0.0, min(span.end_s, until_s) - max(span.begin_s, from_s))
    if shared:
        busy_s = dict.fromkeys(busy_s, sum(busy_s.values()))
    return {stage: max(0.0, 1 - seconds / (until_s - from_s)) for stage, seconds in busy_s.items()}
