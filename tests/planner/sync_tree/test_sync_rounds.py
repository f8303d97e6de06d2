"""Rounds: waves without waits for chunks, for shards that are small compared with a chunk."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sync_checker import check
from sync_sites import answer_of, irregular, problem_of, regular

from planner.sync_tree.bounds import lower_bound_s, naive_s
from planner.sync_tree.model import SyncPlan, SyncProblem, Unreachable
from planner.sync_tree.plan import make_plan
from planner.sync_tree.rounds import rounds

Document = dict[str, Any]


def in_rounds(document: Document, piece_bytes: int) -> tuple[SyncProblem, SyncPlan]:
    problem = problem_of(document)
    found = tuple(rounds(problem, piece_bytes))
    return problem, SyncPlan(found, sum(each.seconds for each in found), lower_bound_s(problem), naive_s(problem))


@given(st.integers(0, 2**32))
def test_rounds_satisfy_contract_without_waits(seed: int) -> None:
    rng = random.Random(seed)
    document = irregular(rng)
    largest = max((shard["bytes"] for shard in document["shards"]), default=1)
    # `make_plan` turns a ToR without circuits into a pod; rounds only handle pods.
    document["tor_circuits"] = {tor: max(1, each) for tor, each in document["tor_circuits"].items()}
    try:
        lower_bound_s(problem_of(document))
    except Unreachable:
        with pytest.raises(Unreachable):
            in_rounds(document, largest)
        return
    problem, plan = in_rounds(document, rng.choice([largest, -(-largest // 3)]))
    check(document, answer_of(problem, plan))
    assert not any(wave.edges.above.any() for wave in plan.waves)


@pytest.mark.parametrize(
    ("site", "most"),
    [
        ({"tp": 1, "shards": 100}, 1.1),
        ({"tp": 4, "shards": 100}, 1.35),
        ({"tp": 8, "shards": 100}, 1.35),
        ({"tp": 4, "shards": 200, "nic_gbps": 400.0}, 1.55),
        ({"tp": 4, "shards": 40, "gen": 3, "size": 24}, 1.35),
    ],
    ids=str,
)
def test_shards_below_a_chunk_are_near_bound(site: Document, most: float) -> None:
    document = regular(total=5e6 * site["shards"], **site)
    problem = problem_of(document)
    plan = make_plan(problem)
    check(document, answer_of(problem, plan))
    assert plan.estimate_s <= most * plan.lower_bound_s


@pytest.mark.parametrize("tp", [1, 4])
def test_many_small_shards_with_a_large_one_are_near_bound(tp: int) -> None:
    site = regular(tp=tp, shards=200, total=200 * 5e6)
    site["shards"].append({**site["shards"][0], "id": "embedding", "bytes": 2_000_000_000})
    problem = problem_of(site)
    plan = make_plan(problem)
    check(site, answer_of(problem, plan))
    assert plan.estimate_s <= 1.35 * plan.lower_bound_s


def test_copies_double_from_wave_to_wave() -> None:
    """One shard for eight endpoints of one pod: one copy enters, then 2, 4 and 8 endpoints have it."""
    site = regular(1, 1, 8, tp=1, shards=1, total=1e9)
    _, plan = in_rounds(site, 10**9)
    assert [len(wave.edges.src) for wave in plan.waves] == [1, 1, 2, 4]


def test_pod_without_circuits_is_reported() -> None:
    site = regular(1, 1, 8, tp=1, shards=1, circuits=0)
    with pytest.raises(Unreachable, match="no circuit leads to"):
        list(rounds(problem_of(site), 10**12))
