"""How a cluster is best divided: the search finds the peak, and the split is that of the scenario's loop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.lab.sim.rl.run import FINEST, GpuSplit, best, run_cluster, search, splits, train_counts, with_split
from orchestrrl.lab.sim.rl.scenario import scenario_of
from tests.orchestrrl.lab.sim.rl.cluster_builders import document

SCENARIO = scenario_of(document(cluster={"train_gpus": 16, "gen_gpus": 24}, fabrics=["fat_tree", "oversubscribed"]))


@given(st.integers(1, 60), st.data())
def test_the_search_finds_the_peak(count: int, data: st.DataObject) -> None:
    """Of what goes up and then down, wherever its peak is."""
    peak = data.draw(st.integers(0, count - 1))
    asked: list[int] = []

    def tried(place: int) -> int:
        asked.append(place)
        return place

    found = search(count, tried, lambda place: 1 / (1 + abs(place - peak)))
    assert peak in found
    assert found == sorted(set(asked))
    assert len(asked) == len(set(asked))  # each once


@given(st.integers(1, 60), st.data())
def test_places_that_cannot_be_had_are_passed_over(count: int, data: st.DataObject) -> None:
    there = data.draw(st.sets(st.integers(0, count - 1)))
    found = search(count, lambda place: place if place in there else None, lambda place: 1.0 + place)
    assert set(found) <= there
    assert bool(found) == bool(there)


def test_whole_servers_and_whole_replicas_train() -> None:
    assert train_counts(SCENARIO) == [8, 16, 24, 32]
    wide = scenario_of(document(cluster={"train_gpus": 24, "gen_gpus": 56}, training={"tp": 4, "pp": 6}))
    assert train_counts(wide) == [24, 48, 72]
    assert len(train_counts(with_split(SCENARIO.model_copy(update={"cluster": _large()}), 512))) <= FINEST


def _large() -> object:
    return SCENARIO.cluster.model_copy(update={"train_gpus": 512, "gen_gpus": 1536})


def test_a_split_is_what_a_run_of_it_gives() -> None:
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


def test_splits_that_do_not_fit_in_memory_are_passed_over() -> None:
    """72B at TP=8: one replica, or two, share the optimizer's state among too few."""
    wide = document(
        model="qwen2.5-72b",
        cluster={"train_gpus": 32, "gen_gpus": 16},
        training={"tp": 8},
        generation__layouts=["tp8"],
    )
    found = splits(scenario_of(wide))
    assert min(each.train_gpus for each in found) == 24


def test_of_those_that_are_alike_the_best_has_fewest_that_train() -> None:
    one, other = GpuSplit(8, 32, 2.0, 1.0, 0.1, 4.95), GpuSplit(16, 24, 2.0, 0.5, 0.1, 5.0)
    assert best([other, one]) is one
    assert best([other, one, GpuSplit(24, 16, 2.0, 0.4, 0.1, 5.5)]).train_gpus == 24
    assert other.gen_over_train == 4.0


def test_what_cannot_be_split_is_told() -> None:
    shared = document(cluster={"train_gpus": 16, "shared": True}, loop={"mode": "synchronous", "steps": 2})
    with pytest.raises(ProblemFaults) as caught:
        splits(scenario_of(shared), "torus", "magic")
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["cluster.shared", "--fabric", "--arm"]
    sides, layout = {"train_gpus": 16, "gen_gpus": 16}, {"tp": 8, "pp": 2}
    narrow = scenario_of(document(cluster=sides, training=layout, generation__layouts=["tp1"]))
    huge = narrow.model_copy(update={"model": "qwen2.5-72b"})
    with pytest.raises(ProblemFaults, match=r"no configuration of qwen2\.5-72b fits"):
        splits(huge)
