"""A steady step of a case, and the loop made of it."""

from orchestrrl.sim.scoreboard.cases import Case, measured, stages_of
from orchestrrl.sim.scoreboard.constants import TESTBED_LAYOUTS


def test_a_step_may_end_more_than_it_begins() -> None:
    """Partial rollout's second step also ends what the first had cut. Shown by `orchestrrl sim paper --figures 9`."""
    case = Case("qwen2.5-14b", 16, 16, 8, 25_000, TESTBED_LAYOUTS.value, steps=2)
    stages = stages_of(case.scenario(["rail_optimized"]), "rail_optimized")
    partial = measured(stages, "partial_rollout", seed=4)
    assert partial.gen.samples > stages.scenario.samples
    assert partial.samples_per_s <= partial.gen.samples / max(partial.gen.seconds, partial.train.seconds)
