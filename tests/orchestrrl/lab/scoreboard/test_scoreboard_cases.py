"""Tests of the steady step of a case, and of the loop that repeats it."""

from dataclasses import replace

import pytest

from orchestrrl.lab.scoreboard.cases import Case, measured, retrained, stages_of, training_of
from orchestrrl.lab.scoreboard.constants import BATCH, MAX_TOKENS, SAMPLES, TESTBED_LAYOUTS
from orchestrrl.lab.scoreboard.generation import section_2, worker_skew


def test_partial_rollout_step_may_end_more_than_it_begins() -> None:
    """Partial rollout's second step also ends samples of the first; see `orchestrrl sim paper --figures 9`."""
    case = Case("qwen2.5-14b", 16, 16, 8, 25_000, TESTBED_LAYOUTS.value, steps=2)
    stages = stages_of(case.scenario(["rail_optimized"]), "rail_optimized")
    partial = measured(stages, "partial_rollout", seed=4)
    assert partial.gen.samples > stages.scenario.samples
    assert partial.samples_per_s <= partial.gen.samples / max(partial.gen.seconds, partial.train.seconds)


def test_retrained_changes_only_training() -> None:
    case = Case("qwen2.5-14b", 32, 16, 64, 2_000, ("tp8",))
    both, half = (stages_of(each.scenario(["fat_tree"]), "fat_tree") for each in (case, replace(case, train_gpus=16)))
    found = measured(both)
    assert retrained(found, both) == found
    slower = retrained(found, half)
    assert (slower.gen, slower.sync) == (found.gen, found.sync)
    assert slower.train.seconds == pytest.approx(2 * found.train.seconds, rel=0.05)
    longest_s = max(slower.gen.seconds, slower.train.seconds)
    assert slower.samples_per_s == pytest.approx(slower.gen.samples / longest_s, rel=0.05)


def test_worker_skew_is_small_with_short_answers() -> None:
    """This is the reason that section 2's row gives."""
    early, late = (worker_skew(section_2(BATCH.value // SAMPLES.value, cut)) for cut in MAX_TOKENS.value)
    assert early < 1.2
    assert late > 1.4


def test_training_layouts_are_parsed() -> None:
    assert training_of("tp8 cp3 pp2") == {"tp": 8, "cp": 3, "pp": 2}
    assert training_of("tp4 ep16 recompute") == {"tp": 4, "ep": 16, "recompute": True}
    case = Case("qwen3-235b-a22b", 64, 64, 64, 2_000, ("tp8",))
    layout = case.scenario(["fat_tree"]).train_layout
    assert (layout.tp, layout.pp, layout.ep, layout.dp) == (4, 2, 16, 8)


def test_gradients_are_exchanged_in_each_optimiser_step() -> None:
    case = Case("qwen2.5-14b", 32, 16, 64, 2_000, ("tp8",))
    once, often = (stages_of(replace(case, updates=each).scenario(["fat_tree"]), "fat_tree") for each in (1, 4))
    found = measured(once)
    assert [retrained(found, each).train.updates for each in (once, often)] == [1, 4]
    assert retrained(found, often).train.parts_s["dp"] == pytest.approx(4 * found.train.parts_s["dp"], rel=0.05)
