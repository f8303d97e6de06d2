"""Weight sync: plans for any site satisfy the contract; on regular sites they are near the bound."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from sync_checker import check
from sync_sites import answer_of, irregular, linked, oversubscribed, problem_of, regular

from planner.sync_tree.bounds import lower_bound_s, naive_s
from planner.sync_tree.model import SyncPlan, Unreachable
from planner.sync_tree.plan import make_plan

Document = dict[str, Any]
seeds = st.integers(0, 2**32)


def planned(document: Document) -> SyncPlan:
    problem = problem_of(document)
    plan = make_plan(problem)
    check(document, answer_of(problem, plan))
    return plan


@given(seeds)
def test_plan_satisfies_contract_and_exists_if_possible(seed: int) -> None:
    document = irregular(random.Random(seed))
    if has_way(document):
        planned(document)
    else:
        with pytest.raises(Unreachable):
            make_plan(problem_of(document))


@given(seeds)
def test_plan_uses_only_given_links(seed: int) -> None:
    document = linked(random.Random(seed))
    if has_way(document):
        planned(document)
    else:
        with pytest.raises(Unreachable):
            make_plan(problem_of(document))


@given(seeds)
@settings(max_examples=15)
def test_plans_of_oversubscribed_sites_fulfil_the_contract(seed: int) -> None:
    planned(oversubscribed(random.Random(seed)))


@pytest.mark.parametrize("seed", [49, 66, 90, 97, 102, 122])
def test_oversubscribed_sites_are_near_the_bound(seed: int) -> None:
    """One ToR alone can begin some trees: other trees must leave its uplinks to them."""
    plan = planned(oversubscribed(random.Random(seed)))
    assert plan.estimate_s <= 1.02 * plan.lower_bound_s


def has_way(document: Document) -> bool:
    """Return whether copies can spread step by step: each receiver is reached by an endpoint that has the shard and may
    send to it."""
    circuits = {pod["id"]: pod["boundary_circuits"] for pod in document["pods"]}
    ends = {end["id"]: end for end in document["endpoints"]}

    def may_send(src: str, dst: str) -> bool:
        one, other = ends[src], ends[dst]
        if one["pod"] != other["pod"] and not (circuits[one["pod"]] and circuits[other["pod"]]):
            return False
        links = document.get("links")
        pods = {one["pod"], other["pod"]}
        if links is not None and len(pods) == 2 and not any({link["a"], link["b"]} == pods for link in links):
            return False
        tors = document["tor_circuits"]
        return bool(one["tor"] == other["tor"] or (tors[one["tor"]] and tors[other["tor"]]))

    for shard in document["shards"]:
        have, missing = set(shard["holders"]), set(shard["receivers"]) - set(shard["holders"])
        while missing:
            reached = {dst for dst in missing if any(may_send(src, dst) for src in have)}
            if not reached:
                return False
            have |= reached
            missing -= reached
    return True


@pytest.mark.exact
@given(seeds)
def test_naive_time_matches_independent_linear_program(seed: int) -> None:
    document = irregular(random.Random(seed))
    expected_s = directly_s(document)
    if expected_s is None:
        return
    assert naive_s(problem_of(document)) == pytest.approx(expected_s, rel=1e-5, abs=1e-15)
    assert lower_bound_s(problem_of(document)) <= expected_s * (1 + 1e-6)


@pytest.mark.exact
@given(seeds)
def test_naive_time_over_links_matches_linear_program(seed: int) -> None:
    document = linked(random.Random(seed))
    expected_s = directly_s(document)
    if expected_s is not None:
        assert naive_s(problem_of(document)) == pytest.approx(expected_s, rel=1e-5, abs=1e-15)


def directly_s(document: Document) -> float | None:
    """Solve with one variable per holder, shard and receiver, plus the time. None: some receiver is unreachable."""
    ends = {end["id"]: end for end in document["endpoints"]}
    capacity: dict[tuple[str, str], float] = {}
    for end in document["endpoints"]:
        capacity["out", end["id"]] = capacity["in", end["id"]] = end["nic_gbps"]
    for tor, count in document["tor_circuits"].items():
        capacity["tor out", tor] = capacity["tor in", tor] = count * document["link_gbps"]
    for pod in document["pods"]:
        rates = [link["gbps"] for link in document.get("links", ()) if pod["id"] in (link["a"], link["b"])]
        fastest = max(rates, default=0) if "links" in document else document["link_gbps"]
        capacity["pod", pod["id"]] = pod["boundary_circuits"] * fastest
    for link in document.get("links", ()):
        for one, other in ((link["a"], link["b"]), (link["b"], link["a"])):
            capacity["link", f"{one} {other}"] = link["circuits"] * link["gbps"]
    row = {limit: number for number, limit in enumerate(capacity)}
    columns: list[np.ndarray[Any, Any]] = []
    sums: list[int] = []  # [column], its delivery
    deliveries = 0
    for shard in document["shards"]:
        for receiver in sorted(set(shard["receivers"]) - set(shard["holders"])):
            for holder in shard["holders"]:
                src, dst = ends[holder], ends[receiver]
                used = [("out", holder), ("in", receiver)]
                if src["tor"] != dst["tor"]:
                    used += [("tor out", src["tor"]), ("tor in", dst["tor"])]
                if src["pod"] != dst["pod"]:
                    used += [("pod", src["pod"]), ("pod", dst["pod"])]
                    used += [("link", f"{src['pod']} {dst['pod']}")] if "links" in document else []
                if any(not capacity.get(limit) for limit in used):
                    return None
                column = np.zeros(len(row))
                column[[row[limit] for limit in used]] = shard["bytes"] * 8
                columns.append(column)
                sums.append(deliveries)
            deliveries += 1
    if not columns:
        return 0.0
    scale = max(float(column.max()) for column in columns)
    uses = np.array(columns).T / scale
    whole = np.zeros((deliveries, len(columns) + 1))
    whole[sums, np.arange(len(columns))] = 1.0
    limits = np.hstack([uses, -np.array(list(capacity.values()))[:, None]])
    costs = np.zeros(len(columns) + 1)
    costs[-1] = 1.0
    found = linprog(costs, A_ub=limits, b_ub=np.zeros(len(row)), A_eq=whole, b_eq=np.ones(deliveries))
    assert found.x is not None
    return float(found.x[-1]) * scale / 1e9


@pytest.mark.parametrize(
    ("site", "most"),
    [
        ({"tp": 1}, 1.1),
        ({"tp": 4, "shards": 64}, 1.35),
        ({"tp": 8, "shards": 64}, 1.35),
        ({"tp": 8}, 1.3),
        ({"tp": 32, "circuits": 2}, 1.3),
        ({"tp": 1, "nic_gbps": 400.0}, 1.1),
        ({"tp": 4, "shards": 32, "chunk_bytes": 1 << 20}, 1.2),
        ({"train": 1, "gen": 2, "size": 8, "tp": 1, "shards": 1, "total": 4e9, "circuits": 4}, 1.1),
        ({"train": 4, "gen": 4, "size": 16, "tp": 2, "shards": 48, "total": 30e9, "circuits": 16}, 1.1),
    ],
    ids=lambda value: "-".join(f"{name}={each}" for name, each in value.items()) if isinstance(value, dict) else None,
)
def test_regular_sites_are_near_bound(site: Document, most: float) -> None:
    plan = planned(regular(**site))
    assert plan.estimate_s <= most * plan.lower_bound_s


@pytest.mark.parametrize(("gbps", "circuits", "most"), [(200, 1, 1.2), (100, 2, 1.25)])
def test_fully_connected_pods_are_near_bound(gbps: int, circuits: int, most: float) -> None:
    site = regular(2, 6, 16, tp=4, circuits=1000)
    pods = [pod["id"] for pod in site["pods"]]
    site["links"] = [{"a": a, "b": b, "circuits": circuits, "gbps": gbps} for a, b in itertools.combinations(pods, 2)]
    plan = planned(site)
    assert plan.estimate_s <= most * plan.lower_bound_s


def test_shard_crosses_slow_link_between_sites_once() -> None:
    site = regular(1, 4, 8, tp=1, circuits=1000, shards=8, holders=1)
    links = [("train0", "gen0", 200), ("train0", "gen1", 200), ("gen1", "gen2", 10), ("gen2", "gen3", 200)]
    site["links"] = [{"a": a, "b": b, "circuits": 2, "gbps": gbps} for a, b, gbps in links]
    plan = planned(site)
    assert plan.lower_bound_s == pytest.approx(64e9 * 8 / 20e9)
    assert plan.estimate_s <= 1.2 * plan.lower_bound_s


def test_fewer_waves_are_used_if_waves_cost() -> None:
    site = regular(1, 2, 4, tp=1, shards=1, total=200e6, circuits=2, holders=1, chunk_bytes=4 << 20)
    problem = problem_of(site)
    plain, costly = make_plan(problem), make_plan(problem, wave_s=0.01)
    check(site, answer_of(problem, costly))
    assert len(costly.waves) <= len(plain.waves)
    assert plain.estimate_s <= costly.estimate_s <= plain.estimate_s + 0.01 * len(plain.waves)


@pytest.mark.slow
@pytest.mark.parametrize(
    "site", [{"tp": 8, "shards": 64}, {"tp": 4, "shards": 64, "circuits": 16}, {"tp": 1, "shards": 32, "circuits": 16}]
)
def test_large_sites_are_near_bound(site: Document) -> None:
    plan = make_plan(problem_of(regular(8, 24, 64, holders=8, **site)))
    assert plan.estimate_s <= 1.35 * plan.lower_bound_s


def test_empty_problem_has_no_wave() -> None:
    for shards in ([], [{"id": "s", "bytes": 9, "holders": ["gen0-00"], "receivers": ["gen0-00"]}]):
        plan = planned(regular(shards=1) | {"shards": shards})
        assert (plan.waves, plan.estimate_s, plan.lower_bound_s, plan.naive_s) == ((), 0.0, 0.0, 0.0)


def test_shard_held_in_pod_needs_no_circuit() -> None:
    site = regular(1, 1, 8, shards=1, circuits=0)
    names = [end["id"] for end in site["endpoints"] if end["pod"] == "gen0"]
    site["shards"] = [{"id": "s", "bytes": 10**9, "holders": names[:1], "receivers": names}]
    assert not any(wave.edges.circuits.any() for wave in planned(site).waves)


def test_many_small_shards_with_a_large_one() -> None:
    site = regular(1, 2, 8, tp=2, shards=40, total=2e8)
    site["shards"].append({**site["shards"][0], "id": "embedding", "bytes": 2_000_000_000})
    planned(site)
