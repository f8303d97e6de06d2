"""Tests of the RL loop: closed forms, a reference simulation, and invariants for any times."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.rl.loop import FixedTimes, GenTime, LoopRules, Needs, SampleBatch, Slowed, SyncTime, run_loop
from orchestrrl.lab.sim.rl.model import Holds, LoopMode, RlRun
from orchestrrl.lab.sim.rl.scenario import LoopSection
from tests.orchestrrl.lab.sim.rl.loop_oracle import Oracle

SYNCHRONOUS, ONE_STEP, BOUNDED = LoopMode.SYNCHRONOUS, LoopMode.ONE_STEP_ASYNC, LoopMode.BOUNDED_STALENESS


def even(steps: int, gen_s: float, train_s: float, sync_s: float) -> FixedTimes:
    return FixedTimes([gen_s] * steps, [train_s] * steps, [sync_s] * steps)


def ran(rules: LoopRules, steps: int, gen_s: float, train_s: float, sync_s: float, *, warmup_steps: int = 0) -> RlRun:
    return run_loop(
        rules, [SampleBatch(10, 10)] * steps, even(steps, gen_s, train_s, sync_s), warmup_steps=warmup_steps
    )


def lanes(run: RlRun) -> list[tuple[str, int, float, float]]:
    return [(span.lane, span.step, span.begin_s, span.end_s) for span in run.spans]


def test_synchronous_loop_is_the_sum_of_its_stages() -> None:
    run = ran(LoopRules(SYNCHRONOUS), 3, 6.0, 3.0, 1.0, warmup_steps=1)
    assert run.seconds == 3 * 6 + 3 * 3 + 2 * 1
    assert run.staleness == {0: 30}
    assert run.samples_per_s == pytest.approx(1.0)
    assert run.idle_share == {FabricStage.TRAIN: pytest.approx(0.7), FabricStage.GEN: pytest.approx(0.4)}
    assert run.steps[1]["gen_waits_weights_s"] == 3.0  # training only; the sync is counted separately
    assert run.steps[1]["train_waits_samples_s"] == 7.0


def test_one_step_async_hides_the_shorter_stage() -> None:
    run = ran(LoopRules(ONE_STEP), 4, 6.0, 3.0, 1.0, warmup_steps=2)
    # Generation, and the sync that engines wait for, one after the other.
    assert run.samples_per_s == pytest.approx(10 / 7)
    assert run.staleness == {0: 10, 1: 30}
    assert lanes(run)[:6] == [
        ("gen", 0, 0.0, 6.0),
        ("gen", 1, 6.0, 12.0),
        ("train", 0, 6.0, 9.0),
        ("sync", 1, 12.0, 13.0),
        ("train", 1, 12.0, 15.0),
        ("gen", 2, 13.0, 19.0),
    ]
    assert ran(
        LoopRules(ONE_STEP, holds=Holds.NOBODY), 4, 6.0, 3.0, 1.0, warmup_steps=2
    ).samples_per_s == pytest.approx(10 / 6)


def test_trainer_waits_during_a_blocking_sync() -> None:
    run = ran(LoopRules(ONE_STEP, holds=Holds.BOTH), 5, 3.0, 6.0, 1.0)
    begins_s = [span.begin_s for span in run.spans if span.lane == "train"]
    assert [later - sooner for sooner, later in pairwise(begins_s)][1:3] == [7.0, 7.0]
    assert run.steps[2]["train_waits_sync_s"] == 1.0
    assert ran(LoopRules(ONE_STEP), 8, 3.0, 6.0, 1.0, warmup_steps=4).samples_per_s == pytest.approx(10 / 6)


def test_more_staleness_evens_out_uneven_steps() -> None:
    batches, times = [SampleBatch(10, 10)] * 8, FixedTimes([2.0, 10.0] * 4, [6.0] * 8, [0.0] * 8)
    seconds = [
        run_loop(LoopRules(BOUNDED, staleness=bound, holds=Holds.NOBODY), batches, times).seconds for bound in range(4)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == 96.0
    assert seconds[3] == 54.0  # all of generation, and the last training step


def test_shared_gpus_run_one_stage_at_a_time() -> None:
    run = ran(LoopRules(SYNCHRONOUS, shared=True), 3, 6.0, 3.0, 1.0, warmup_steps=1)
    assert run.seconds == 29.0
    assert run.idle_share == {FabricStage.TRAIN: pytest.approx(0.1), FabricStage.GEN: pytest.approx(0.1)}
    with pytest.raises(ValueError, match="synchronous"):
        LoopRules(ONE_STEP, shared=True)


def test_interrupted_samples_keep_their_version() -> None:
    batches = [SampleBatch(10, 8), SampleBatch(10, 10), SampleBatch(10, 12)]
    run = run_loop(LoopRules(ONE_STEP), batches, even(3, 5.0, 2.0, 1.0))
    # Two of the second step's ten samples were begun in the first step; two of the last step's in the second.
    assert run.staleness == {0: 8, 1: 20, 2: 2}
    assert run.samples == 30


def test_small_batches_train_during_the_step() -> None:
    class Streamed(FixedTimes):
        def gen(self, step: int, begin_s: float) -> GenTime:
            return GenTime(8.0, (2.0, 4.0, 6.0, 8.0))

    run = run_loop(
        LoopRules(BOUNDED, staleness=3, batch_samples=2), [SampleBatch(4, 4)] * 2, Streamed([], [1.0] * 4, [0.0] * 4)
    )
    assert [each for each in lanes(run) if each[0] == "train"][:2] == [("train", 0, 4.0, 5.0), ("train", 1, 8.0, 9.0)]


def test_full_buffer_delays_generation() -> None:
    run = ran(LoopRules(BOUNDED, staleness=5, buffer_samples=20, holds=Holds.NOBODY), 6, 1.0, 10.0, 0.0)
    assert run.steps[2]["gen_waits_room_s"] == 0.0
    assert run.steps[3]["gen_waits_room_s"] == 8.0
    for span in run.spans:
        begun = sum(other.lane == "gen" and other.begin_s <= span.begin_s for other in run.spans)
        taken = sum(other.lane == "train" and other.begin_s <= span.begin_s for other in run.spans)
        assert begun - taken <= 2


@pytest.mark.parametrize(
    ("rules", "wish"),
    [
        (lambda: LoopRules(BOUNDED), "staleness is only for bounded_staleness"),
        (lambda: LoopRules(ONE_STEP, staleness=1), "staleness is only for bounded_staleness"),
        (lambda: LoopSection(mode=BOUNDED, staleness=-1), "staleness\\n.*greater than or equal to 0"),
        (lambda: LoopSection(mode=ONE_STEP, batch_samples=0), "batch_samples\\n.*greater than or equal to 1"),
    ],
)
def test_invalid_rules_are_rejected(rules: Callable[[], LoopRules | LoopSection], wish: str) -> None:
    with pytest.raises(ValueError, match=wish):
        rules()


def test_infeasible_loops_are_reported() -> None:
    with pytest.raises(ValueError, match=r"step 0 needs version 1.*allow more staleness"):
        Needs.of(LoopRules(BOUNDED, staleness=0, batch_samples=5), [SampleBatch(10, 10)])
    with pytest.raises(ValueError, match=r"step 0 has no room in a buffer of 9 samples: it needs 10"):
        Needs.of(LoopRules(ONE_STEP, buffer_samples=9), [SampleBatch(10, 10)])
    with pytest.raises(ValueError, match="finished samples must be <= begun samples"):
        Needs.of(LoopRules(ONE_STEP), [SampleBatch(5, 6)])


@dataclass(frozen=True, slots=True)
class Holding:
    """Times in which a sync delays concurrent stages by a fraction of its own time."""

    given: FixedTimes
    of_train: float = 0.0
    of_gen: float = 0.0
    syncs: list[tuple[float, tuple[FabricStage, ...]]] = field(
        default_factory=list
    )  # begin of each sync, and the concurrent stages

    def gen(self, step: int, begin_s: float) -> GenTime:
        return self.given.gen(step, begin_s)

    def train(self, step: int, samples: int, begin_s: float) -> float:
        return self.given.train(step, samples, begin_s)

    def sync(self, version: int, begin_s: float, beside: tuple[FabricStage, ...]) -> SyncTime:
        self.syncs.append((begin_s, beside))
        elapsed_s, shares = (
            self.given.sync_s[version - 1],
            {FabricStage.TRAIN: self.of_train, FabricStage.GEN: self.of_gen},
        )
        return SyncTime(elapsed_s, {stage: shares[stage] * elapsed_s for stage in beside})


def held(rules: LoopRules, gen_s: float, train_s: float, sync_s: float, steps: int = 4) -> RlRun:
    return run_loop(rules, [SampleBatch(10, 10)] * steps, Holding(even(steps, gen_s, train_s, sync_s), 0.5, 0.25))


def test_blocking_sync_delays_training() -> None:
    run = held(LoopRules(ONE_STEP), 6.0, 3.0, 1.0)
    assert lanes(run)[3:6] == [("sync", 1, 12.0, 13.0), ("train", 1, 12.0, 15.5), ("gen", 2, 13.0, 19.0)]
    assert run.sync_beside == (FabricStage.TRAIN,)
    assert [(row["train_held_s"], row["gen_held_s"]) for row in run.steps] == [(0, 0), (0.5, 0), (0.5, 0), (0, 0)]


def test_running_training_step_is_delayed_by_a_sync() -> None:
    """The sync of version 1 begins when engines become free, 2 s before the second training step would end, and takes
    6 s. In the first 4 s, training has half of its speed."""
    times = Holding(FixedTimes([2.0, 3.0, 5.0, 5.0], [2.0, 3.0, 1.0, 1.0], [6.0] * 4), of_train=0.5)
    run = run_loop(LoopRules(BOUNDED, staleness=1, buffer_samples=20), [SampleBatch(10, 10)] * 4, times)
    assert lanes(run)[:4] == [
        ("gen", 0, 0.0, 2.0),
        ("gen", 1, 2.0, 5.0),
        ("train", 0, 2.0, 4.0),
        ("sync", 1, 5.0, 11.0),
    ]
    assert lanes(run)[4] == ("train", 1, 5.0, 11.0)


def test_background_sync_delays_generation() -> None:
    run = held(LoopRules(ONE_STEP, holds=Holds.NOBODY), 6.0, 3.0, 1.0)
    assert lanes(run)[:5] == [
        ("gen", 0, 0.0, 6.0),
        ("gen", 1, 6.0, 12.25),
        ("train", 0, 6.0, 9.0),
        ("sync", 1, 9.0, 10.0),
        ("gen", 2, 12.25, 18.5),
    ]
    assert run.sync_beside == (FabricStage.GEN,)
    slow = held(LoopRules(ONE_STEP, holds=Holds.NOBODY), 3.0, 6.0, 1.0)
    assert [row["gen_held_s"] for row in slow.steps] == [0.0] * 4  # engines are idle during these syncs
    assert slow.steps[1]["train_held_s"] == 0.5


@pytest.mark.parametrize("rules", [LoopRules(SYNCHRONOUS), LoopRules(ONE_STEP, holds=Holds.BOTH)])
def test_sync_that_pauses_both_sides_delays_neither(rules: LoopRules) -> None:
    run = held(rules, 6.0, 3.0, 1.0)
    assert run.sync_beside == ()
    assert run == ran(rules, 4, 6.0, 3.0, 1.0)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from([0.25, 0.5, 1.0])), max_size=4),
    st.integers(0, 20),
    st.integers(1, 20),
)
def test_delay_matches_stepwise_simulation(stretches: list[tuple[int, int, float]], begin_s: int, work_s: int) -> None:
    lane, lost, free_s = Slowed(), dict[int, float](), 0
    for wait_s, long_s, share in stretches:
        lane.add(free_s + wait_s, free_s + wait_s + long_s, share * long_s)
        lost |= dict.fromkeys(range(free_s + wait_s, free_s + wait_s + long_s), share)
        free_s += wait_s + long_s
    now_s, left_s = float(begin_s), float(work_s)
    while left_s > 1e-9:  # second by second
        speed = 1 - lost.get(int(now_s), 0.0)
        elapsed_s = min(1.0, left_s / speed) if speed else 1.0
        left_s, now_s = left_s - elapsed_s * speed, now_s + elapsed_s
    assert begin_s + work_s + lane.held_s(begin_s, work_s) == pytest.approx(now_s)


@dataclass
class Drawn:
    """A drawn case in whole seconds, so that simultaneous events coincide exactly in both simulations."""

    rules: LoopRules
    batches: list[SampleBatch]
    times: FixedTimes


class WithEnds(FixedTimes):
    """Times in which samples end one after another, in whole seconds."""

    def gen(self, step: int, begin_s: float) -> GenTime:
        made = self.gen_s[step]
        return GenTime(made, tuple(float(-(-made * (i + 1) // 4)) for i in range(4)))


@st.composite
def drawn(draw: st.DrawFn, *, simple: bool = False) -> Drawn:
    steps = draw(st.integers(1, 6))
    seconds = st.integers(1, 9).map(float)
    mode = draw(st.sampled_from(list(LoopMode)))
    partial = not simple and draw(st.booleans())
    batches = [SampleBatch(4, 3)] + [SampleBatch(4, 4)] * (steps - 1) if partial else [SampleBatch(4, 4)] * steps
    rules = LoopRules(
        mode,
        staleness=draw(st.integers(0, 4)) if mode is BOUNDED else None,
        batch_samples=None if simple else draw(st.sampled_from([None, 2, 3, 4, 6])),
        buffer_samples=None if simple else draw(st.sampled_from([None, 4, 8, 13])),
        holds=draw(st.sampled_from(list(Holds))),
        shared=mode is SYNCHRONOUS and draw(st.booleans()),
    )
    kind = WithEnds if not partial and not simple and draw(st.booleans()) else FixedTimes
    several = st.lists(seconds, min_size=2 * steps, max_size=2 * steps)
    return Drawn(rules, batches, kind(draw(several), draw(several), draw(several)))


def feasible(case: Drawn) -> bool:
    try:
        Needs.of(case.rules, case.batches)
    except ValueError:
        return False
    return True


@given(drawn())
def test_time_line_matches_event_simulation(case: Drawn) -> None:
    assume(feasible(case))
    run = run_loop(case.rules, case.batches, case.times)
    oracle = Oracle(case.rules, case.batches, case.times)
    oracle.run()
    assert sorted(lanes(run)) == sorted(oracle.begun)
    assert run.staleness == dict(oracle.behind)


@given(drawn())
def test_no_sample_is_lost_or_trained_on_twice(case: Drawn) -> None:
    assume(feasible(case))
    run = run_loop(case.rules, case.batches, case.times)
    begun = sum(batch.begun for batch in case.batches)
    assert sum(run.staleness.values()) == run.samples <= begun
    assert begun - run.samples < 4 + (case.rules.batch_samples or 1)  # interrupted, or too few for a batch


@given(drawn())
def test_staleness_is_never_over_the_bound(case: Drawn) -> None:
    assume(feasible(case))
    run = run_loop(case.rules, case.batches, case.times)
    cut = any(batch.begun != batch.finished for batch in case.batches)
    if case.rules.staleness is not None and not cut:
        assert max(run.staleness, default=0) <= case.rules.staleness
    if case.rules.batch_samples is None:
        bound = {SYNCHRONOUS: 0, ONE_STEP: 1, BOUNDED: case.rules.staleness}[case.rules.mode]
        assert bound is not None
        assert max(run.staleness, default=0) <= bound + cut


@given(drawn(simple=True))
def test_loop_time_is_between_longest_stage_and_sum(case: Drawn) -> None:
    steps, times = len(case.batches), case.times
    run = run_loop(case.rules, case.batches, times)
    stages = [sum(times.gen_s[:steps]), sum(times.train_s[:steps]), sum(times.sync_s[: steps - 1])]
    assert max(stages[0] + times.train_s[steps - 1], times.gen_s[0] + stages[1]) <= run.seconds <= sum(stages)
    if case.rules.mode is SYNCHRONOUS:
        assert run.seconds == sum(stages)


@given(drawn(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.25]))
def test_delays_are_bounded_by_sync_time(case: Drawn, train: float, gen: float) -> None:
    assume(feasible(case))
    times = case.times
    run = run_loop(case.rules, case.batches, Holding(times, train, gen))
    synced_s = sum(row["sync_s"] for row in run.steps)
    assert 0 <= sum(row["train_held_s"] for row in run.steps) <= train * synced_s + 1e-9
    assert 0 <= sum(row["gen_held_s"] for row in run.steps) <= gen * synced_s + 1e-9
    for lane, free in (("train", "train_held_s"), ("gen", "gen_held_s")):
        spans = [span for span in run.spans if span.lane == lane]
        alone_s = times.train_s if lane == "train" else times.gen_s
        worked_s = sum(alone_s[span.step] for span in spans) + sum(row[free] for row in run.steps)
        assert sum(span.end_s - span.begin_s for span in spans) == pytest.approx(worked_s)
        assert all(sooner.end_s <= later.begin_s + 1e-9 for sooner, later in pairwise(spans))
    if not train and not gen:
        assert lanes(run) == lanes(run_loop(case.rules, case.batches, times))


@given(drawn(simple=True), st.sampled_from([0.0, 0.5, 1.0]))
def test_sync_reports_the_stages_that_run_when_it_begins(case: Drawn, train: float) -> None:
    """The reported stages are those on the complete time line."""
    times = Holding(case.times, train)
    run = run_loop(case.rules, case.batches, times)
    for begin_s, beside in times.syncs:
        at_work = {span.stage for span in run.spans if span.begin_s <= begin_s < span.end_s}
        assert set(beside) == (at_work - {FabricStage.WEIGHT_SYNC} if case.rules.holds is not Holds.BOTH else set())


@given(drawn(simple=True), st.integers(0, 2), st.integers(0, 5), st.floats(0, 9))
def test_longer_stage_never_shortens_the_loop(case: Drawn, which: int, step: int, more_s: float) -> None:
    # The greedy choice of versions is an exception, see the module's docstring.
    assume(case.rules.mode is not BOUNDED or case.rules.holds is Holds.NOBODY)
    before = run_loop(case.rules, case.batches, case.times)
    stages = [list(case.times.gen_s), list(case.times.train_s), list(case.times.sync_s)]
    stages[which][step % len(case.batches)] += more_s
    after = run_loop(case.rules, case.batches, FixedTimes(*stages))
    assert after.seconds >= before.seconds - 1e-9


@given(drawn(simple=True))
def test_lane_times_add_up(case: Drawn) -> None:
    run = run_loop(case.rules, case.batches, case.times)
    last = max(span.end_s for span in run.spans if span.lane == "gen")
    held = 0.0 if case.rules.holds is Holds.NOBODY else sum(row["sync_s"] for row in run.steps)
    spent = sum(row["gen_s"] + row["gen_waits_weights_s"] + row["gen_waits_room_s"] for row in run.steps)
    assert spent + held == pytest.approx(last)
    trained = sum(row["train_s"] + row["train_waits_samples_s"] + row["train_waits_sync_s"] for row in run.steps)
    assert trained == pytest.approx(run.seconds)
