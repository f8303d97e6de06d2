"""What the fast loop's moves lead to in whole generation steps on simulated engines: preemptions where requests came
to, and prompts prefilled again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from orchestrrl.core.config.schema import FastSettings
from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.bench.policies import (
    ENGINES,
    INTERVAL_S,
    SETTINGS,
    Expect,
    Setting,
    decided_by,
    forecast_from,
    shape_of,
)
from orchestrrl.lab.sim.step import IntervalState, Policy, StepMove, StepResult, run_step
from orchestrrl.lab.sim.workload import SimRequest
from planner.model import RequestId

SEEDS = (1, 2, 3, 4)
TIGHT = SETTINGS[1]
LONG_PROMPTS = 16  # times as long as a setting's
LONG = Setting("prompts of 1 to 8 thousand tokens", 32, 1500.0, 1.2, 15_000, 582_885)


def moves() -> list[Figure]:
    return [*move_room(), *move_groups()]


def move_room(setting: Setting = TIGHT, seeds: Sequence[int] = SEEDS) -> list[Figure]:
    """Running requests that moved, and had somebody preempted where they came to before they ended or left again: with
    room judged by how long requests may go on, and by flat headroom."""
    arms = {}
    for name, expect in (("room", forecast_from), ("headroom", _without_futures)):
        watched = [_Watched(decided_by(FastSettings(), setting, expect(setting))) for _ in seeds]
        steps = zip(seeds, watched, strict=True)
        runs = [_run(setting, setting.requests(seed), one.policy) for seed, one in steps]
        moved, followed = sum(one.moved for one in watched), sum(one.followed for one in watched)
        arms[name] = (followed / moved if moved else 0.0, moved / len(seeds), mean(run.makespan_s for run in runs))
    (share, count, step_s), (other_share, other_count, other_s) = arms["room"], arms["headroom"]
    note = f"{setting.name}: {count:.0f} and {other_count:.0f} such moves a step, of {step_s:.1f} s and {other_s:.1f} s"
    return [Figure("move_then_preempted", share, "of moves", "room by headroom_tokens", other_share, note)]


def move_groups(setting: Setting = LONG, seeds: Sequence[int] = SEEDS) -> list[Figure]:
    """Tokens that engines with prefix caching prefill in a step, with groups kept together and without."""
    arms = {}
    for together in (True, False):
        runs = []
        for seed in seeds:
            requests = [replace(r, prompt_tokens=LONG_PROMPTS * r.prompt_tokens) for r in setting.requests(seed)]
            chosen = FastSettings(keep_groups_together=together)
            policy = decided_by(chosen, setting, forecast_from(setting))
            runs.append(_run(setting, requests, policy, caching=True))
        arms[together] = mean(run.tokens_prefilled for run in runs), mean(run.makespan_s for run in runs)
    (tokens, step_s), (other_tokens, other_s) = arms[True], arms[False]
    note = f"{setting.name}, a step takes {step_s:.1f} s and {other_s:.1f} s"
    return [Figure("move_groups_prefilled", tokens, "tokens", "groups not kept together", other_tokens, note)]


def _without_futures(setting: Setting) -> Expect:
    expect = forecast_from(setting)
    return lambda state, snapshot: (expect(state, snapshot)[0], None)


def _run(setting: Setting, requests: Sequence[SimRequest], policy: Policy, *, caching: bool = False) -> StepResult:
    ids = [request.id for request in requests]
    shape = replace(shape_of(setting.configuration), prefix_caching=caching)
    return run_step(shape, requests, [ids[k::ENGINES] for k in range(ENGINES)], policy, INTERVAL_S)


@dataclass(slots=True)
class _Stay:
    """Of a request that came running to an engine."""

    engine: int
    preemptions_before: int


class _Watched:
    """A policy, and what its moves of running requests led to."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._stays: dict[RequestId, _Stay] = {}
        self.moved = self.followed = 0

    def policy(self, state: IntervalState) -> Sequence[StepMove]:
        for request, stay in list(self._stays.items()):
            preempted = state.engines[stay.engine].preemptions_total > stay.preemptions_before
            if state.engine_of.get(request) != stay.engine or preempted:
                self.followed += preempted and state.engine_of.get(request) == stay.engine
                del self._stays[request]
        chosen = self._policy(state)
        for move in chosen:
            if any(sequence.id == move.request for sequence in state.engines[move.source].running):
                self.moved += 1
                before = state.engines[move.destination].preemptions_total
                self._stays[move.request] = _Stay(move.destination, before)
        return chosen
