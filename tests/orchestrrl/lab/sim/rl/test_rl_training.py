"""Tests of RL training steps: passes and optimiser steps add up in time and in bytes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.sim.net.fabrics.base import FabricStage, SimulatedFailures
from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.rl.model import TrainStage
from orchestrrl.lab.sim.rl.run import run_cluster
from orchestrrl.lab.sim.rl.scenario import TrainingSection, scenario_of
from orchestrrl.lab.sim.rl.stages import ArmTimes, FabricStages
from orchestrrl.lab.sim.rl.training import LOG_PROBS, model_flops, training_bytes, training_stage
from orchestrrl.lab.sim.train.compute import step_flops
from orchestrrl.lab.sim.train.iteration import forward_s, iteration
from orchestrrl.lab.sim.train.model import MEGATRON, TrainJob, TrainLayout
from planner.cost.hardware import gpu_named
from planner.cost.models import model_named
from tests.orchestrrl.lab.sim.rl.cluster_builders import document

FABRIC = build("fat_tree", Servers(4))
JOB = TrainJob(model_named("qwen2.5-14b"), gpu_named("h800"), TrainLayout(tp=4, dp=4, pp=2), 128, 2000.0)
MOE = TrainJob(model_named("qwen2-57b-a14b"), gpu_named("h800"), TrainLayout(tp=4, dp=8, ep=16), 128, 2000.0)


def stage(recipe: TrainingSection, job: TrainJob = JOB) -> TrainStage:
    return training_stage(job, recipe, lambda share: iteration(share, FABRIC), forward_s(job, FABRIC))


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 3))
def test_every_sample_is_in_one_update_per_epoch(samples: int, updates: int, epochs: int) -> None:
    shares = TrainingSection(log_prob_passes=1, updates=updates, epochs=epochs).shares(samples)
    assert sum(size * times for size, times in shares) == samples * epochs
    assert sum(times for _, times in shares) == min(samples, updates) * epochs
    assert max(size for size, _ in shares) - min(size for size, _ in shares) <= 1


def test_single_update_is_an_iteration() -> None:
    found, alone = stage(TrainingSection(log_prob_passes=0)), iteration(JOB, FABRIC)
    assert (found.seconds, found.updates) == (pytest.approx(alone.seconds), 1)
    assert found.mfu == pytest.approx(alone.mfu)
    assert {name: each_s for name, each_s in found.parts_s.items() if name != LOG_PROBS} == dict(alone.parts_s)


def test_each_log_prob_pass_adds_its_time_and_flops() -> None:
    none, one, two = (stage(TrainingSection(log_prob_passes=passes)) for passes in range(3))
    pass_s = forward_s(JOB, FABRIC)
    assert one.seconds == pytest.approx(none.seconds + pass_s)
    assert two.seconds == pytest.approx(none.seconds + 2 * pass_s)
    assert two.parts_s[LOG_PROBS] == pytest.approx(2 * pass_s)
    step = step_flops(JOB.model, JOB.sequences, JOB.tokens)
    assert model_flops(JOB, TrainingSection(log_prob_passes=2)) == pytest.approx(step * 5 / 3)
    assert two.mfu == pytest.approx(step * 5 / 3 / (32 * two.seconds * JOB.gpu.bf16_flops))


@pytest.mark.parametrize(("passes", "updates", "epochs"), [(1, 4, 1), (1, 3, 2), (0, 1, 2)])
def test_parts_add_up_to_all_steps(passes: int, updates: int, epochs: int) -> None:
    recipe = TrainingSection(log_prob_passes=passes, updates=updates, epochs=epochs)
    found = stage(recipe)
    steps_s = sum(times * iteration(replace(JOB, sequences=size), FABRIC).seconds for size, times in recipe.shares(128))
    assert found.seconds == pytest.approx(sum(found.parts_s.values()))
    assert found.seconds == pytest.approx(steps_s + recipe.log_prob_passes * forward_s(JOB, FABRIC))


def test_each_update_exchanges_gradients_and_fills_the_pipeline() -> None:
    once, often = stage(TrainingSection(updates=1)), stage(TrainingSection(updates=4))
    assert often.updates == 4
    assert often.parts_s["optimizer"] == pytest.approx(4 * once.parts_s["optimizer"])
    assert often.parts_s["bubble"] == pytest.approx(4 * once.parts_s["bubble"], rel=0.01)
    assert often.parts_s["compute"] == pytest.approx(once.parts_s["compute"])
    assert often.mfu < once.mfu


def test_uneven_lengths_lengthen_attention() -> None:
    """Attention lengthens with the mean of the squared lengths; other parts are unchanged."""
    even, spread = (stage(TrainingSection(), replace(JOB, length_cv=cv)) for cv in (0.0, 1.0))
    assert spread.parts_s["compute"] > even.parts_s["compute"]
    assert spread.parts_s["dp"] == pytest.approx(even.parts_s["dp"], rel=0.05)
    # Half of the sequences with 1000 tokens and half with 3000 equal a mean of 2000 with length_cv 0.5.
    one, other = (replace(JOB, sequences=64, tokens=tokens) for tokens in (1000.0, 3000.0))
    both = replace(JOB, tokens=2000.0, length_cv=0.5)
    assert model_flops(both, TrainingSection()) == pytest.approx(
        model_flops(one, TrainingSection()) + model_flops(other, TrainingSection())
    )


@pytest.mark.parametrize("job", [JOB, MOE])
def test_training_bytes_add_up(job: TrainJob) -> None:
    """The bytes of gradients do not depend on the samples of an update; those of passes do."""
    one, four = (training_bytes(job, TrainingSection(log_prob_passes=0, updates=updates), FABRIC) for updates in (1, 4))
    passes = training_bytes(job, TrainingSection(log_prob_passes=1, updates=1), FABRIC)
    gradients = {tier: (four[tier] - one[tier]) / 3 for tier in one}
    assert all(0 <= gradients[tier] <= one[tier] for tier in one)
    for tier, size in passes.items():  # a forward pass sends half as many bytes as forward and backward together
        assert size - one[tier] == pytest.approx((one[tier] - gradients[tier]) / 2, rel=1e-6, abs=1.0)
    recomputed = training_bytes(replace(job, recompute=True), TrainingSection(log_prob_passes=1), FABRIC)
    forward = training_bytes(replace(job, recompute=True), TrainingSection(log_prob_passes=0), FABRIC)
    for tier in passes:
        assert recomputed[tier] - forward[tier] == pytest.approx(passes[tier] - one[tier], rel=1e-6, abs=1.0)


def test_invalid_recipes_are_rejected() -> None:
    for wrong in ({"log_prob_passes": -1}, {"updates": 0}, {"epochs": 0}):
        with pytest.raises(ValueError, match="greater than or equal to"):
            TrainingSection(**wrong)


def test_scenario_recipe_determines_training() -> None:
    plain = scenario_of(document(training={"tp": 4, "log_prob_passes": 0}))
    full = scenario_of(document(training={"tp": 4, "log_prob_passes": 2, "updates": 2, "epochs": 2}))
    (before,), (after,) = run_cluster(plain), run_cluster(full)
    for step, plain_step in zip(after.run.steps, before.run.steps, strict=True):
        assert 0 < step["train_log_probs_s"] < step["train_s"]
        assert step["train_s"] > 2 * plain_step["train_s"]
        assert plain_step["train_log_probs_s"] == 0
    assert sum(after.train_parts_s.values()) == pytest.approx(after.run.steps[0]["train_s"])
    assert after.run.steps[0]["train_log_probs_s"] == pytest.approx(after.train_parts_s[LOG_PROBS])
    assert any(note.startswith("a training step has 4 optimiser steps of") for note in after.run.notes)
    assert after.run.tier_bytes[FabricStage.TRAIN]["nic"] > 2 * before.run.tier_bytes[FabricStage.TRAIN]["nic"]


def test_training_uses_the_constants_of_the_job() -> None:
    scenario = scenario_of(document())
    usual, hidden = (
        FabricStages(scenario, scenario.fabrics[0]).training(
            SimulatedFailures(), scenario.train_job(16, 200.0, constants=constants)
        )
        for constants in (MEGATRON, replace(MEGATRON, tp_hidden_share=0.5))
    )
    assert hidden.parts_s["tp"] < usual.parts_s["tp"]
    assert hidden.parts_s[LOG_PROBS] == usual.parts_s[LOG_PROBS]  # a forward pass hides nothing


def test_token_statistics_match_the_samples() -> None:
    scenario = scenario_of(document())
    times = ArmTimes(FabricStages(scenario, scenario.fabrics[0]), "verl_to", 1)
    assert 64 + 1 < times.tokens < 128 + 400
    assert times.length_cv > 0.2  # a truncated lognormal with sigma 0.6, plus a prompt
    even = scenario_of(document(generation__workload__lengths={"kind": "empirical", "tokens": [100]}))
    assert ArmTimes(FabricStages(even, even.fabrics[0]), "verl_to", 1).length_cv < 0.15  # only prompts differ
