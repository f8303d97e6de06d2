"""Tests of the order of a redeployment's steps, and of the GPUs of its engines, for any fleet, by invariants."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.operation import Stage, steps_in
from orchestrrl.engines.base import AnswerExcerpt, ReportedLayout
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.redeployment.checks import (
    CANARY_IDS,
    AnswerTolerance,
    answers_fault,
    capacity_fault,
    layout_fault,
)
from orchestrrl.fleet.redeployment.steps import (
    BRING_UP,
    Redeployment,
    RedeploymentId,
    RedeployRequest,
    StepKind,
    goes_on,
    stages_back,
    stages_of,
)
from orchestrrl.fleet.redeployment.targets import StandingEngine, wanted_by_targets
from planner.model import Configuration, ConfigurationId, EngineId, GpuId, Parallelism, PlanId

GPUS = 8
SIZES = {"tp1": 1, "tp2": 2, "tp4": 4}
ELASTIC = {"ep2": 2, "ep4": 4, "ep8": 8}
KNOWN = {
    ConfigurationId(name): Configuration(ConfigurationId(name), size, 0.02, 1e-4, 1e-8, 1000, 16, 400.0, 1.5)
    for name, size in SIZES.items()
}


def make_spec(engine: str, configuration: str, gpus: Sequence[int]) -> EngineSpec:
    on = tuple(map(GpuId, gpus))
    return EngineSpec(EngineId(engine), ConfigurationId(configuration), Parallelism(tp=SIZES[configuration]), on)


def elastic(engine: str, configuration: str) -> EngineSpec:
    """Return an elastic engine on GPUs from 0."""
    size = ELASTIC[configuration]
    layout = Parallelism(dp=size, ep=size)
    return EngineSpec(EngineId(engine), ConfigurationId(configuration), layout, tuple(map(GpuId, range(size))))


@st.composite
def fleets(draw: st.DrawFn, name: str = "e") -> tuple[EngineSpec, ...]:
    """Generate engines on aligned GPUs; some GPUs may be free."""
    specs: list[EngineSpec] = []
    at = 0
    while at < GPUS:
        fitting = [c for c, size in SIZES.items() if at % size == 0]
        choice = draw(st.sampled_from(["free", *fitting]))
        size = SIZES.get(choice, 1)
        if choice != "free":
            specs.append(make_spec(f"{name}{at}", choice, range(at, at + size)))
        at += size
    return tuple(specs)


@st.composite
def redeployments(draw: st.DrawFn) -> Redeployment:
    """Generate redeployments: some old engines stay; the others make room for new ones, some of which sleep there
    already."""
    old = draw(fleets("old"))
    stays = tuple(spec for spec in old if draw(st.booleans()))
    taken = {gpu for spec in stays for gpu in spec.gpus}
    if draw(st.booleans()) and not taken.intersection(range(4)):  # one that is scaled, up or down
        sizes = draw(st.permutations(sorted(ELASTIC)))[:2]
        was, becomes = (elastic("ela", name) for name in sizes)
        if not taken.intersection([*was.gpus, *becomes.gpus]):
            old = (*(spec for spec in old if not set(was.gpus).intersection(spec.gpus)), was)
            stays = (*stays, becomes)
            taken |= set(becomes.gpus)
    coming = [spec for spec in draw(fleets("new")) if not taken.intersection(spec.gpus)]
    asleep = tuple(spec for spec in coming if draw(st.booleans()))
    can_sleep = frozenset(spec.engine for spec in old if draw(st.booleans()))
    return Redeployment(
        RedeploymentId("s1"),
        PlanId(""),
        "",
        0.0,
        old,
        (*stays, *coming),
        asleep=asleep,
        can_sleep=can_sleep,
        keep_asleep=draw(st.booleans()),
    )


class Fleet:
    """An independent model of the fleet after steps: the owner of each GPU, and the serving engines."""

    def __init__(self, redeployment: Redeployment) -> None:
        self.redeployment = redeployment
        self.awake = {spec.engine for spec in redeployment.old}
        self.asleep = {spec.engine for spec in redeployment.asleep}
        self.serving = set(self.awake)
        self.gpus = {spec.engine: spec.gpus for spec in (*redeployment.asleep, *redeployment.new, *redeployment.old)}
        self.ready: set[EngineId] = set()
        self.evacuated: set[EngineId] = set()
        self.brought_up: dict[EngineId, list[StepKind]] = {}

    def do(self, kind: StepKind, engine: EngineId | None, *, back: bool = False) -> None:
        if not back:
            self.check_order(kind, engine)
        match kind, engine:
            case StepKind.FENCE, None:
                self.serving -= {spec.engine for spec in self.redeployment.leaving}
                self.serving -= {spec.engine for _, spec in self.redeployment.scaled}
            case ((StepKind.STOP | StepKind.RETIRE), engine) if engine is not None:
                assert engine not in self.serving
                self.awake.discard(engine)
                self.asleep.discard(engine)
            case StepKind.SLEEP, engine if engine is not None:
                assert engine not in self.serving
                self.awake.remove(engine)
                self.asleep.add(engine)
            case StepKind.START, engine if engine is not None:
                assert engine not in self.asleep
                self.awake.add(engine)
            case StepKind.WAKE, engine if engine is not None:
                self.asleep.remove(engine)
                self.awake.add(engine)
            case StepKind.SCALE, engine if engine is not None:
                assert engine not in self.serving
                pair = next(pair for pair in self.redeployment.scaled if pair[0].engine == engine)
                self.gpus[engine] = pair[not back].gpus
            case StepKind.VERIFY, engine if engine is not None:
                assert engine in self.awake
                self.ready.add(engine)
            case _:
                pass
        gpus = [gpu for engine in self.awake for gpu in self.gpus[engine]]
        assert len(gpus) == len(set(gpus)), f"{kind} of {engine} has two engines on one GPU"
        staying = {s.engine for s in self.redeployment.new} - {s.engine for s in self.redeployment.preparing}
        assert staying <= self.serving, "engines that stay never stop serving"

    def check_order(self, kind: StepKind, engine: EngineId | None) -> None:
        """Check that forward, requests leave an engine before it stops, and that each new engine is verified before it
        is admitted."""
        match kind, engine:
            case StepKind.EVACUATE, engine if engine is not None:
                assert engine not in self.serving, "fenced first"
                self.evacuated.add(engine)
            case ((StepKind.STOP | StepKind.SLEEP | StepKind.SCALE), engine) if engine is not None:
                assert engine in self.evacuated
            case StepKind.RETIRE, engine if engine is not None:
                assert engine in self.asleep
            case StepKind.ADMIT, None:
                assert self.ready == {spec.engine for spec in self.redeployment.preparing}
            case _, engine if kind in BRING_UP and engine is not None:
                done = self.brought_up.setdefault(engine, [])
                assert tuple(done) == BRING_UP[: BRING_UP.index(kind)]
                done.append(kind)

    def run(self, stages: Sequence[Stage]) -> None:
        for step in steps_in(stages):
            self.do(step.kind, step.engine)


@given(redeployments())
def test_forward_steps_end_with_the_target_and_no_gpu_is_shared(redeployment: Redeployment) -> None:
    stages = stages_of(redeployment)
    fleet = Fleet(redeployment)
    fleet.run(stages)
    assert fleet.awake == {spec.engine for spec in redeployment.new}
    assert fleet.ready == {spec.engine for spec in (*redeployment.coming, *(new for _, new in redeployment.scaled))}
    assert all(fleet.gpus[spec.engine] == spec.gpus for spec in redeployment.new)
    slept = {spec.engine for spec in redeployment.leaving if spec.engine in redeployment.can_sleep}
    assert fleet.asleep == (slept if redeployment.keep_asleep else set())
    kinds = [step.kind for step in steps_in(stages)]
    assert kinds.index(StepKind.ADMIT) < kinds.index(StepKind.COMMIT)
    assert [step.number for step in steps_in(stages)] == list(range(1, len(kinds) + 1))


@given(redeployments(), st.data())
def test_undo_restores_the_old_fleet_from_any_interruption(redeployment: Redeployment, data: st.DataObject) -> None:
    """Tries any prefix of the steps, and within a stage any part of each chain."""
    stages = stages_of(redeployment)
    commit = next(place for place, stage in enumerate(stages) if stage[0][0].kind is StepKind.COMMIT)
    broke = data.draw(st.integers(0, commit))
    fleet = Fleet(redeployment)
    fleet.run(stages[:broke])
    for chain in stages[broke]:
        for step in chain[: data.draw(st.integers(0, len(chain)))]:
            fleet.do(step.kind, step.engine)
    scaled = {old.engine for old, new in redeployment.scaled if fleet.gpus[old.engine] == new.gpus}
    idle = sorted((fleet.awake - fleet.serving) & {spec.engine for spec in redeployment.leaving})
    failing = set(data.draw(st.lists(st.sampled_from(idle)))) if idle else set()
    back = stages_back(redeployment, fleet.awake | fleet.asleep, fleet.asleep, scaled, failing)
    for step in steps_in(back):
        fleet.do(step.kind, step.engine, back=True)
    assert failing <= {step.engine for step in steps_in(back) if step.kind is StepKind.STOP}
    assert failing <= {step.engine for step in steps_in(back) if step.kind is StepKind.START}
    assert fleet.awake == {spec.engine for spec in redeployment.old}
    assert all(fleet.gpus[spec.engine] == spec.gpus for spec in redeployment.old)
    assert fleet.asleep <= {spec.engine for spec in redeployment.asleep}


@given(redeployments())
def test_interrupted_redeployment_is_finished_only_if_all_new_engines_are_verified(redeployment: Redeployment) -> None:
    done: set[tuple[StepKind, EngineId | None]] = set()
    present = {spec.engine for spec in (*redeployment.old, *redeployment.new)}
    for step in steps_in(stages_of(redeployment)):
        changed = (*redeployment.coming, *(new for _, new in redeployment.scaled))
        all_verified = {(StepKind.VERIFY, spec.engine) for spec in changed} <= done
        if goes_on(redeployment, done, present):
            assert all_verified
        elif changed:
            assert not all_verified
        done.add((step.kind, step.engine))
    for spec in redeployment.coming:
        assert not goes_on(redeployment, done, present - {spec.engine})


def test_redeployment_with_two_engines_on_one_gpu_is_rejected() -> None:
    one, two = make_spec("a", "tp1", (0,)), make_spec("b", "tp2", (0, 1))
    with pytest.raises(ValueError, match="GPU 0 must have one engine, got a and b"):
        Redeployment(RedeploymentId("s"), PlanId(""), "", 0.0, (), (one, two))
    with pytest.raises(ValueError, match="must keep their GPUs"):
        Redeployment(RedeploymentId("s"), PlanId(""), "", 0.0, (one,), (make_spec("a", "tp1", (1,)),))


# --- targets


def standing(serving: tuple[EngineSpec, ...], drained: frozenset[EngineId] = frozenset()) -> StandingEngine:
    alive = frozenset(spec.engine for spec in serving)
    places: Any = (GPUS, 4, KNOWN, make_spec)
    return StandingEngine(serving, (), frozenset(), alive, drained, frozenset(), {}, *places)


targets = st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.integers(0, 4)), min_size=1, unique_by=lambda t: t[0])


@given(fleets(), targets, st.data())
def test_targets_are_met_or_rejected_as_not_fitting(
    serving: tuple[EngineSpec, ...], wish: list[tuple[str, int]], data: st.DataObject
) -> None:
    drained = frozenset(spec.engine for spec in serving if data.draw(st.booleans()))
    now = standing(serving, drained)
    fixed = {gpu for spec in serving if spec.engine in drained for gpu in spec.gpus}
    try:
        wanted = wanted_by_targets(RedeployRequest(tuple(wish)), "s1", now)
    except ProblemFaults:
        # Not even without kept engines: largest-first is optimal for sizes that divide each other.
        need = sum(SIZES[name] * max(count, 1) for name, count in wish)
        assert need > GPUS - len(fixed) or fixed or any(SIZES[name] * count > 4 for name, count in wish)
        return
    new = [spec for spec in wanted.new if spec.engine not in drained]
    gpus = [gpu for spec in wanted.new for gpu in spec.gpus]
    assert len(gpus) == len(set(gpus))
    assert set(gpus) <= set(range(GPUS))
    assert {spec.engine for spec in wanted.new} >= drained
    for name, count in wish:
        have = sum(spec.configuration == name for spec in new)
        assert have == count if count else have >= 1
    for spec in new:
        assert len({gpu // 4 for gpu in spec.gpus}) == 1
        assert len(spec.gpus) == SIZES[spec.configuration]


def test_existing_engines_are_kept() -> None:
    serving = (make_spec("a", "tp2", (0, 1)), make_spec("b", "tp2", (2, 3)), make_spec("c", "tp4", (4, 5, 6, 7)))
    now = standing(serving)
    assert wanted_by_targets(RedeployRequest((("tp2", 2), ("tp4", 1))), "s", now).new == serving
    fewer = wanted_by_targets(RedeployRequest((("tp1", 2), ("tp2", 0))), "s", now).new
    assert {spec.engine for spec in fewer} >= {"a", "b"}
    assert sorted(spec.configuration for spec in fewer) == ["tp1", "tp1", "tp2", "tp2", "tp2"]


@pytest.mark.parametrize(
    ("wish", "faults"),
    [
        (RedeployRequest(), ["targets: must name a configuration, got none"]),
        (RedeployRequest((("tp1", 1),), plan="p1"), ["plan_id: must not be given with targets, got 'p1'"]),
        (
            RedeployRequest((("tp9", 1), ("tp1", -1), ("tp1", 2))),
            [
                "targets[0].configuration: must be one of fleet.configurations (tp1, tp2, tp4), got 'tp9'",
                "targets[1].engines: must be >= 0 (0: as many as fit), got -1",
                "targets[2].configuration: must not be repeated, got 'tp1'",
            ],
        ),
        (RedeployRequest((("tp4", 3),)), ["targets: must fit on the 8 GPUs in nodes of 4, got 3 x tp4 of 4 GPUs"]),
    ],
)
def test_all_request_faults_are_reported(wish: RedeployRequest, faults: list[str]) -> None:
    with pytest.raises(ProblemFaults) as reported:
        wanted_by_targets(wish, "s", standing(()))
    assert reported.value.faults == faults


# --- checks


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=32), st.floats(-1, 1))
def test_answers_may_differ_by_the_tolerance(logprobs: list[float], shift: float) -> None:
    assume(abs(abs(shift) - 0.05) > 1e-9)
    reference = AnswerExcerpt(CANARY_IDS, (1,) * len(logprobs), tuple(logprobs))
    message = answers_fault(reference, tuple(one + shift for one in logprobs), AnswerTolerance(mean_nats=0.05))
    assert bool(message) == (abs(shift) > 0.05)


def test_non_finite_scores_are_reported() -> None:
    reference = AnswerExcerpt((1,), (1, 2), (-1.0, -1.0))
    assert answers_fault(reference, (-1.0,), AnswerTolerance())
    assert answers_fault(reference, (-1.0, float("nan")), AnswerTolerance())
    assert answers_fault(reference, (-1.0, float("-inf")), AnswerTolerance())


def test_unreported_layout_fields_are_not_checked() -> None:
    assert layout_fault(ReportedLayout(), Parallelism(tp=2)) == []
    assert layout_fault(ReportedLayout(tp=2, pp=1, dp=1, ep=False), Parallelism(tp=2)) == []
    assert layout_fault(ReportedLayout(tp=1, ep=True), Parallelism(tp=2)) == [
        "has another layout: TP 1 instead of 2, EP True instead of False"
    ]
    assert capacity_fault(900, 1000) == []
    assert capacity_fault(899, 1000) != []
