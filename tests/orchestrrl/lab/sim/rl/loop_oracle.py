"""A reference simulation of the RL loop, second by second, independent of the time line's arithmetic."""

from collections import Counter
from dataclasses import dataclass, field

from orchestrrl.lab.sim.rl.loop import LoopRules, SampleBatch, Times
from orchestrrl.lab.sim.rl.model import Holds, LoopMode

Begun = tuple[str, int, float, float]  # lane, step or version, begin, end


@dataclass
class Oracle:
    """The reference simulation. All times must be whole seconds."""

    rules: LoopRules
    batches: list[SampleBatch]
    times: Times
    now: int = -1
    begun: list[Begun] = field(default_factory=list)
    samples: list[tuple[float, int]] = field(default_factory=list)  # (ready, version), in the order of their begin
    pending: list[int] = field(default_factory=list)  # versions of unfinished samples
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("gen", "train", "sync"), 0.0))
    trained: list[float] = field(default_factory=list)  # time at which each version is trained
    carried: list[float] = field(default_factory=list)  # time at which it reaches the engines, with Holds.NOBODY
    installed: int = 0
    brought: int = -1  # the last step for which engines received weights
    taken: int = 0
    behind: Counter[int] = field(default_factory=Counter)

    def run(self) -> None:
        step = 0
        to_carry = self._steps_of(self._finished(len(self.batches) - 1)) if self.rules.holds is Holds.NOBODY else 0
        while step < len(self.batches) or len(self.trained) < len(self._sizes()) or len(self.carried) < to_carry:
            self.now += 1
            assert self.now < 2000, "the loop makes no progress"
            while True:
                did = self._carry() or (step < len(self.batches) and self._engines(step)) or self._trainer()
                if did == "gen":
                    step += 1
                if not did:
                    break

    def _free(self, *lanes: str) -> bool:
        return all(self.busy[lane] <= self.now for lane in lanes)

    def _start(self, lane: str, step: int, seconds: float, *lanes: str) -> None:
        self.begun.append((lane, step, float(self.now), self.now + seconds))
        for each in (lane, *lanes):
            self.busy[each] = self.now + seconds

    def _finished(self, before_step: int) -> int:
        return sum(batch.finished for batch in self.batches[:before_step])

    def _sizes(self) -> list[int]:
        size = self.rules.batch_samples
        if size is None:
            return [batch.finished for batch in self.batches]
        return [size] * (self._finished(len(self.batches)) // size)

    def _steps_of(self, samples: int) -> int:
        """Return the number of training steps for which the samples suffice."""
        steps = 0
        for size in self._sizes():
            samples -= size
            if samples < 0:
                break
            steps += 1
        return steps

    def _needed(self, step: int) -> int:
        if self.rules.mode is LoopMode.SYNCHRONOUS:
            return self._steps_of(self._finished(step))
        if self.rules.mode is LoopMode.ONE_STEP_ASYNC:
            return self._steps_of(self._finished(step - 1)) if step else 0
        last_sample = self._finished(step + 1) - 1
        size = self.rules.batch_samples
        consumer = step if size is None else last_sample // size
        assert self.rules.staleness is not None
        return max(0, consumer - self.rules.staleness)

    def _there(self) -> int:
        versions = self.carried if self.rules.holds is Holds.NOBODY else self.trained
        return sum(at <= self.now for at in versions)

    def _carry(self) -> str | None:
        version = len(self.carried) + 1
        if self.rules.holds is not Holds.NOBODY or not self._free("sync"):
            return None
        if sum(at <= self.now for at in self.trained) < version:
            return None
        if sum(self._sizes()[:version]) > self._finished(len(self.batches) - 1):
            return None
        seconds = self.times.sync(version, self.now, ()).seconds
        self._start("sync", version, seconds)
        self.carried.append(self.now + seconds)
        return "sync"

    def _engines(self, step: int) -> str | None:
        needed = self._needed(step)
        if not self._free("gen") or self._there() < needed:
            return None
        room = self.rules.buffer_samples
        if room is not None and self._finished(step + 1) - self.taken > room:
            return None
        newest = self.rules.mode is LoopMode.BOUNDED_STALENESS
        version = self._there() if newest else needed
        if version > self.installed and self.rules.holds is not Holds.NOBODY and self.brought < step:
            if self.rules.holds is Holds.BOTH and not self._free("train"):
                return None
            lanes = ("gen", "train") if self.rules.holds is Holds.BOTH else ("gen",)
            self._start("sync", version, self.times.sync(version, self.now, ()).seconds, *lanes)
            self.installed, self.brought = version, step
            return "sync"
        if self.brought == step:  # versions trained during the sync are for the next step
            version = self.installed
        self.installed = max(self.installed, version)
        made = self.times.gen(step, self.now)
        self._start("gen", step, made.seconds)
        self.pending += [self.installed] * self.batches[step].begun
        ends = made.finish_s or (made.seconds,) * self.batches[step].finished
        for at in ends:
            self.samples.append((self.now + at, self.pending.pop(0)))
        return "gen"

    def _trainer(self) -> str | None:
        index = len(self.trained)
        sizes = self._sizes()
        if not self._free("train") or index >= len(sizes):
            return None
        batch = self.samples[self.taken : self.taken + sizes[index]]
        if len(batch) < sizes[index] or any(ready > self.now for ready, _ in batch):
            return None
        if self.rules.shared and not self._free("gen"):
            return None
        seconds = self.times.train(index, sizes[index], self.now)
        self._start("train", index, seconds, *(("gen",) if self.rules.shared else ()))
        self.trained.append(self.now + seconds)
        self.taken += sizes[index]
        self.behind.update(index - version for _, version in batch)
        return "train"
