"""Tests of `planner.solver.makespan.solve` and `orchestrrl plan solve` against the contract.

Every figure of an answer is recomputed from the problem. Bound and makespan are compared with the optimum of small
fleets and with static fleets."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from solve_oracle import Facts, Json, check, decode_iteration_by_iteration_s, decode_s, parse, same
from solve_problems import (
    KINDS,
    crowded,
    engines,
    few,
    fleet,
    medium,
    one_kind,
    problem,
    request,
    short,
    step,
    tiny,
)
from solve_search import best_s, best_static_s, literal_best_s
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from planner.model import Configuration, ConfigurationId, EngineId, GpuId, RequestId
from planner.solver.makespan import solve
from planner.solver.problem import (
    NOWHERE,
    CurrentInstance,
    Infeasible,
    KvBalance,
    KvTransferCost,
    MakespanProblem,
    ProblemRequests,
    Solution,
)

CONTRACT_EXAMPLE = Path(__file__).parents[4] / "shared" / "contracts" / "plan_problem.json"
STATES = ("running", "waiting", "new")
# Tiny problems shrink. The others are determined by a seed, so searching for a smaller one only costs time.
RANDOM = st.randoms(use_true_random=False)
SEEDS = st.integers(0, 2**32 - 1)
SLOWLY = [HealthCheck.too_slow]
FEW_EXAMPLES = settings(max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])
MANY_EXAMPLES = settings(suppress_health_check=SLOWLY)


def typed(document: Json) -> MakespanProblem:
    """Return the problem as the planner's types."""
    place = {each["id"]: n for n, each in enumerate(document["current"])}
    requests = document["requests"]
    return MakespanProblem(
        gpus_count=document["gpus"]["count"],
        per_node=document["gpus"]["per_node"],
        configurations=tuple(
            Configuration(**{**each, "id": ConfigurationId(each["id"])}) for each in document["configurations"]
        ),
        transfer=KvTransferCost(**document["transfer"], kv_bytes_per_token=document["kv_bytes_per_token"]),
        current=tuple(
            CurrentInstance(
                EngineId(each["id"]), ConfigurationId(each["configuration"]), tuple(map(GpuId, sorted(each["gpus"])))
            )
            for each in document["current"]
        ),
        requests=ProblemRequests(
            ids=tuple(RequestId(each["id"]) for each in requests),
            context_tokens=np.array([each["context_tokens"] for each in requests], dtype=np.int64),
            remaining_tokens=np.array([each["remaining_tokens"] for each in requests], dtype=np.int64),
            instance=np.array([place.get(each["instance"], NOWHERE) for each in requests], dtype=np.int64),
            state=np.array([STATES.index(each["state"]) for each in requests], dtype=np.int8),
        ),
        epsilon_s=document["epsilon_s"],
        kv_balance=KvBalance(**document["kv_balance"]) if document["kv_balance"] else None,
        work_budget=document.get("work_budget"),
    )


def untyped(document: Json, solution: Solution) -> Json:
    """Return the solution as JSON of the contract."""
    ids = [each["id"] for each in document["requests"]]
    return {
        "decision": solution.decision,
        "reason": solution.reason,
        "makespan_s": solution.makespan_s,
        "current_makespan_s": solution.current_makespan_s,
        "lower_bound_s": solution.lower_bound_s,
        "gap": solution.gap,
        "solve_s": 0.0,
        "kv_balance_violation": solution.kv_balance_violation,
        "instances": [
            {
                "id": each.id,
                "configuration": each.configuration,
                "gpus": list(each.gpus),
                "requests": [ids[place] for place in each.requests],
                "kept": each.kept,
                "decode_s": each.decode_s,
                "migration_s": each.migration_s,
                "switch_s": each.switch_s,
                "finish_s": each.finish_s,
            }
            for each in solution.instances
        ],
        "migrations": [
            {
                "request": ids[move.request],
                "from": move.source,
                "to": move.destination,
                "method": move.method,
                "cost_s": move.cost_s,
            }
            for move in solution.migrations
        ],
    }


def answer(document: Json) -> Json | None:
    """Return the planner's answer; None if it reports the problem as infeasible."""
    try:
        return untyped(document, solve(typed(document)))
    except Infeasible:
        return None


def checked(document: Json) -> Json:
    found = answer(document)
    assert found is not None
    assert check(document, found) == []
    return found


def command(document: Json) -> Json:
    result = CliRunner().invoke(application(), ["plan", "solve", "-", "--json"], input=json.dumps(document))
    assert (result.exit_code, result.stderr) == (0, "")
    return parse(result.stdout)


def good_enough(document: Json, found: Json, reachable_s: float, factor: float) -> bool:
    """Return whether the answer is within the factor of the optimum, or keeps a fleet that cannot gain over epsilon."""
    if found["makespan_s"] <= factor * reachable_s + 1e-9:
        return True
    if found["decision"] != "keep" or found["current_makespan_s"] is None:
        return False
    return bool(found["current_makespan_s"] - document["epsilon_s"] <= factor * reachable_s)


# --- the oracle itself


@MANY_EXAMPLES
@given(RANDOM)
def test_completions_and_iterations_give_equal_seconds(rng: Random) -> None:
    document = tiny(rng)
    held = [(each["context_tokens"], each["remaining_tokens"]) for each in document["requests"]]
    for configuration in document["configurations"]:
        slow, quick = decode_iteration_by_iteration_s(configuration, held), decode_s(configuration, held)
        assert slow == quick or same(slow or 0.0, quick or 0.0)


@pytest.mark.exact
@MANY_EXAMPLES
@given(RANDOM)
def test_exact_search_matches_full_enumeration(rng: Random) -> None:
    document = tiny(rng, max_gpus=3, max_requests=3)
    best, literal = best_s(document), literal_best_s(document)
    assert best == literal or same(best, literal)


FALSEHOODS: dict[str, Callable[[Json], object]] = {
    "a request is lost": lambda told: told["instances"][0]["requests"].pop(),
    "a request is there twice": lambda told: told["instances"][0]["requests"].append(
        told["instances"][1]["requests"][0]
    ),
    "an unknown request": lambda told: told["instances"][0]["requests"].append("r-1"),
    "another order": lambda told: max((each["requests"] for each in told["instances"]), key=len).reverse(),
    "a GPU twice": lambda told: told["instances"][1].update(gpus=told["instances"][0]["gpus"]),
    "a GPU too many": lambda told: told["instances"][0]["gpus"].append(15),
    "a GPU that is not there": lambda told: told["instances"][0].update(gpus=[16]),
    "kept or not": lambda told: told["instances"][0].update(kept=not told["instances"][0]["kept"]),
    "an id twice": lambda told: told["instances"][0].update(id=told["instances"][1]["id"]),
    "a quicker decode": lambda told: told["instances"][0].update(decode_s=told["instances"][0]["decode_s"] * 0.999),
    "a free switch": lambda told: told["instances"][0].update(switch_s=told["instances"][0]["switch_s"] + 1),
    "a free move": lambda told: told["instances"][0].update(migration_s=told["instances"][0]["migration_s"] + 1),
    "an early finish": lambda told: told["instances"][0].update(finish_s=0.0),
    "an early end": lambda told: told.update(makespan_s=told["makespan_s"] * 0.999),
    "a bound above": lambda told: told.update(lower_bound_s=told["makespan_s"] * 1.001),
    "a smaller gap": lambda told: told.update(gap=told["gap"] / 2 - 1e-3),
    "another present": lambda told: told.update(current_makespan_s=told["makespan_s"]),
    "no present": lambda told: told.update(current_makespan_s=None),
    "a balance unasked for": lambda told: told.update(kv_balance_violation=0.1),
    "a move untold": lambda told: told["migrations"].pop(),
    "a move twice": lambda told: told["migrations"].append(told["migrations"][0]),
    "a move to elsewhere": lambda told: told["migrations"][0].update(to="elsewhere"),
    "a dearer move": lambda told: told["migrations"][0].update(cost_s=told["migrations"][0]["cost_s"] + 1),
    "another method": lambda told: told["migrations"][0].update(method="magic"),
    "another decision": lambda told: told.update(decision="keep"),
    "no reason": lambda told: told.update(reason=""),
    "another key": lambda told: told.update(colour="red"),
    "no number": lambda told: told.update(makespan_s=float("nan")),
}


@pytest.mark.parametrize("falsehood", FALSEHOODS.values(), ids=FALSEHOODS.keys())
def test_check_detects_false_answers(falsehood: Callable[[Json], object]) -> None:
    document = fleet_of(Random(2), slots=2)  # few slots, so that the order of admission matters
    told = checked(document)
    falsehood(told)
    assert check(document, told) != []


# --- the contract on random problems


def holds(document: Json) -> None:
    """Check every figure, and compare with the best static fleet and, if known, with the optimum."""
    found = answer(document)
    assert (found is None) == (Facts(document).missing_tokens() > 0)
    if found is not None:
        assert check(document, found) == []
        static = best_static_s(document)
        assert found["lower_bound_s"] <= static * (1 + 1e-9) + 1e-9
        assert document["kv_balance"] or good_enough(document, found, static, 1 + 1e-9)


def holds_beside_the_best(document: Json) -> None:
    found, best = answer(document), best_s(document)
    assert (found is None) == (best == float("inf"))
    if found is not None:
        assert found["lower_bound_s"] <= best * (1 + 1e-9) + 1e-9
        assert good_enough(document, found, best, 1.02)


@MANY_EXAMPLES
@given(RANDOM)
def test_every_figure_of_a_tiny_answer_holds(rng: Random) -> None:
    holds(tiny(rng))


@pytest.mark.exact
@MANY_EXAMPLES
@given(RANDOM)
def test_bound_and_makespan_enclose_the_optimum_of_tiny_problems(rng: Random) -> None:
    holds_beside_the_best(tiny(rng))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tiny"])
@FEW_EXAMPLES
@given(seed=SEEDS)
def test_every_figure_of_an_answer_holds(kind: str, seed: int) -> None:
    holds(KINDS[kind](Random(seed)))


@pytest.mark.parametrize(("kind", "seed"), [("odd", 5138), ("odd", 5166), ("medium", 16), ("kv_tight", 2)])
def test_solver_beats_static_fleets_on_earlier_failures(kind: str, seed: int) -> None:
    holds(KINDS[kind](Random(seed)))


@pytest.mark.parametrize(("kind", "seed"), [("few", 20655), ("tiny", 80325), ("cannot_fit", 20190)])
def test_solver_is_close_to_the_optimum_on_earlier_failures(kind: str, seed: int) -> None:
    holds_beside_the_best(KINDS[kind](Random(seed)))


@pytest.mark.exact
@FEW_EXAMPLES
@given(SEEDS)
def test_bound_and_makespan_enclose_the_optimum(seed: int) -> None:
    holds_beside_the_best(few(Random(seed)))


@pytest.mark.exact
@settings(phases=FEW_EXAMPLES.phases)
@given(SEEDS)
def test_bound_and_makespan_enclose_the_optimum_if_room_is_short(seed: int) -> None:
    holds_beside_the_best(short(Random(seed)))


@pytest.mark.parametrize("seed", range(8))
def test_a_crowded_fleet_ends_near_its_bound(seed: int) -> None:
    """Requests much smaller than the room run in several waves; whole instances and blocking cost a little."""
    assert checked(crowded(Random(seed)))["gap"] <= 0.1


@settings(FEW_EXAMPLES, max_examples=8)
@given(SEEDS)
def test_any_budget_gives_a_valid_answer(seed: int) -> None:
    for budget in (1, 1000, 100_000):
        checked(medium(Random(seed)) | {"work_budget": budget})


# --- corners, one each


def test_problem_without_requests_and_fleet_is_empty() -> None:
    found = checked(problem(8, 8, engines()))
    assert (found["decision"], found["makespan_s"], found["current_makespan_s"]) == ("reconfigure", 0.0, None)


def test_an_idle_fleet_is_kept() -> None:
    found = checked(problem(8, 8, engines(), current=one_kind(8, 8, engines()[3])))
    assert (found["decision"], found["makespan_s"], len(found["instances"])) == ("keep", 0.0, 1)


def test_first_deployment_pays_for_its_starts() -> None:
    found = checked(problem(8, 8, engines(switch_s=7.0), requests=[request("a", 10, 100)]))
    assert found["decision"] == "reconfigure"
    assert all(each["switch_s"] == 7.0 and not each["kept"] for each in found["instances"])


@pytest.mark.parametrize("epsilon_s", [0.0, 1e9])
def test_rebalance_needs_a_gain_above_epsilon(epsilon_s: float) -> None:
    """All requests are on one of eight engines: moves pay, unless epsilon is larger than the gain."""
    document = problem(8, 8, engines(), current=one_kind(8, 8, engines()[0]), epsilon_s=epsilon_s)
    document["requests"] = [request(f"r{n}", 5000, 3000, "i0", "waiting") for n in range(64)]
    found = checked(document)
    assert (found["decision"] == "keep") == (epsilon_s > 0)


def test_expensive_starts_leave_only_moves() -> None:
    document = problem(8, 8, engines(switch_s=1e6), current=one_kind(8, 8, engines()[0]), epsilon_s=0.0)
    document["requests"] = [request(f"r{n}", 5000, 3000, "i0", "running") for n in range(64)]
    found = checked(document)
    assert found["decision"] == "rebalance"
    assert found["migrations"]


def test_request_that_does_not_fit_its_instance_moves() -> None:
    configurations = engines(capacity_share=0.1)
    document = problem(8, 8, configurations, current=one_kind(8, 8, configurations[0]))
    document["requests"] = [request("big", 20_000, 5_000, "i3", "waiting"), request("small", 100, 100, "i0", "running")]
    found = checked(document)
    assert (found["decision"], found["current_makespan_s"]) == ("reconfigure", None)


def test_the_band_of_equation_2_is_met_where_it_costs_nothing() -> None:
    """Any distribution of ten equal requests over two engines has the same end; five each are in the band."""
    engine = {**engines()[0], "beta_s": 0.0, "gamma_s": 0.0, "kv_capacity_tokens": 1000}
    document = problem(2, 8, [engine], requests=[request(f"r{n}", 50, 50) for n in range(10)])
    found = checked(document | {"kv_balance": {"mu": 0.5, "delta": 0.01}})
    assert found["kv_balance_violation"] == 0


@FEW_EXAMPLES
@given(SEEDS)
def test_a_band_without_limits_changes_nothing(seed: int) -> None:
    document = few(Random(seed))
    with_band, without = checked(document | {"kv_balance": {"mu": 0.5, "delta": 1e9}}), checked(document)
    assert with_band["decision"] == without["decision"]
    assert same(with_band["makespan_s"], without["makespan_s"])


def test_large_instance_takes_whole_nodes_only() -> None:
    """An instance of 16 GPUs on nodes of 8 does not use the four GPUs of the last node."""
    wide = {**engines()[3], "id": "tp16", "gpus": 16}
    found = checked(problem(20, 8, [wide], requests=[request(f"r{n}", 100, 1000) for n in range(9)]))
    assert [each["gpus"] for each in found["instances"]] == [list(range(16))]


# --- scale


@pytest.mark.parametrize("progress", [0.0, 0.3])
def test_solve_handles_a_thousand_gpus(progress: float) -> None:
    document = step(Random(1), 1024, 16, progress=progress, skew=1.0)
    found = checked(document)
    assert good_enough(document, found, best_static_s(document), 1.0)
    assert found["gap"] <= 0.04


# --- the command


@pytest.mark.parametrize("seed", range(3))
def test_command_matches_the_function(seed: int) -> None:
    document = fleet_of(Random(seed))
    told = command(document)
    assert check(document, told) == []
    assert told | {"solve_s": 0.0} == answer(document)


def fleet_of(rng: Random, slots: int = 1024) -> Json:
    """Return a step on a mixed fleet that leaves GPUs unused."""
    document = step(rng, 16, 8, progress=0.5, slots=slots)
    current = fleet(rng, 16, 8, document["configurations"], 0.6)
    for each in document["requests"]:
        place = rng.choice(current)["id"] if rng.random() < 0.8 else None
        each.update(instance=place, state=rng.choice(STATES[:2]) if place else "new")
    return document | {"current": current}


def test_command_without_json_prints_a_table() -> None:
    result = CliRunner().invoke(application(), ["plan", "solve", "-"], input=json.dumps(few(Random(3))))
    assert result.exit_code == 0
    assert "makespan" in result.stdout.lower()


@pytest.mark.shared
def test_contract_example() -> None:
    if not CONTRACT_EXAMPLE.exists():
        pytest.skip(f"{CONTRACT_EXAMPLE} does not exist: the contract's examples are outside of the repository")
    document = json.loads(CONTRACT_EXAMPLE.read_text())
    told = command(document)
    assert check(document, told) == []
    assert good_enough(document, told, best_static_s(document), 1 + 1e-9)
