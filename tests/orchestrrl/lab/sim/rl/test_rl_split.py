"""Tests of the split of GPUs: the search finds the peak, and a split matches a run of the scenario."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.lab.sim.rl.run import FINEST, GpuSplit, best, run_cluster, search, splits, train_counts, with_split
from orchestrrl.lab.sim.rl.scenario import scenario_of
from tests.orchestrrl.lab.sim.rl.cluster_builders import document

SCENARIO = scenario_of(document(cluster={"train_gpus": 16, "gen_gpus": 24}, fabrics=["fat_tree", "oversubscribed"]))


@given(st.integers(1, 60), st.data())
def test_search_finds_the_peak(count: int, data: st.DataObject) -> None:
    """The function rises and then falls, with its peak at any position."""
    peak = data.draw(st.integers(0, count - 1))
    asked: list[int] = []

    def tried(place: int) -> int:
        asked.append(place)
        return place

    found = search(count, tried, lambda place: 1 / (1 + abs(place - peak)))
    assert peak in found
    assert found == sorted(set(asked))
    assert len(asked) == len(set(asked))  # each position is tried once


@given(st.integers(1, 60), st.data())
def test_search_skips_positions_that_do_not_work(count: int, data: st.DataObject) -> None:
    there = data.draw(st.sets(st.integers(0, count - 1)))
    found = search(count, lambda place: place if place in there else None, lambda place: 1.0 + place)
    assert set(found) <= there
    assert bool(found) == bool(there)


def test_train_counts_are_whole_servers_and_replicas() -> None:
    assert train_counts(SCENARIO) == [8, 16, 24, 32]
    wide = scenario_of(document(cluster={"train_gpus": 24, "gen_gpus": 56}, training={"tp": 4, "pp": 6}))
    assert train_counts(wide) == [24, 48, 72]
    assert len(train_counts(with_split(SCENARIO.model_copy(update={"cluster": _large()}), 512))) <= FINEST


def _large() -> object:
    return SCENARIO.cluster.model_copy(update={"train_gpus": 512, "gen_gpus": 1536})


def test_split_matches_a_run_with_it() -> None:
    found = splits(SCENARIO, "oversubscribed")
    assert [each.train_gpus + each.gen_gpus for each in found] == [40] * len(found)
    top = best(found)
    assert top.samples_per_s >= 0.98 * max(each.samples_per_s for each in found)
    (alone,) = run_cluster(
        scenario_of(
            document(
                cluster={"train_gpus": top.train_gpus, "gen_gpus": top.gen_gpus},
                fabrics=["oversubscribed"],
            )
        )
    )
    assert alone.samples_per_s == pytest.approx(top.samples_per_s)


def test_splits_that_exceed_memory_are_skipped() -> None:
    """72B at TP=8: with one or two replicas, the optimizer state per GPU is too large."""
    wide = document(
        model="qwen2.5-72b",
        cluster={"train_gpus": 32, "gen_gpus": 16},
        training={"tp": 8},
        generation__layouts=["tp8"],
    )
    found = splits(scenario_of(wide))
    assert min(each.train_gpus for each in found) == 24


def test_best_split_has_the_fewest_training_gpus_among_equals() -> None:
    one, other = GpuSplit(8, 32, 2.0, 1.0, 0.1, 4.95), GpuSplit(16, 24, 2.0, 0.5, 0.1, 5.0)
    assert best([other, one]) is one
    assert best([other, one, GpuSplit(24, 16, 2.0, 0.4, 0.1, 5.5)]).train_gpus == 24
    assert other.gen_over_train == 4.0


def test_invalid_splits_are_reported() -> None:
    shared = document(cluster={"train_gpus": 16, "shared": True}, loop={"mode": "synchronous", "steps": 2})
    with pytest.raises(ProblemFaults) as caught:
        splits(scenario_of(shared), "torus", "magic")
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["cluster.shared", "--fabric", "--arm"]
    sides, layout = {"train_gpus": 16, "gen_gpus": 16}, {"tp": 8, "pp": 2}
    narrow = scenario_of(document(cluster=sides, training=layout, generation__layouts=["tp1"]))
    huge = narrow.model_copy(update={"model": "qwen2.5-72b"})
    with pytest.raises(ProblemFaults, match=r"no configuration of qwen2\.5-72b fits"):
        splits(huge)
