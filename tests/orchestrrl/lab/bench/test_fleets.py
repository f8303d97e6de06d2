"""The benchmarks' fleets are what their docstrings say, and the plain balancer decides as the real one."""

from dataclasses import replace

import pytest

from balancer.balance import balance_problem
from balancer.load_index import BalanceProblem
from balancer.load_index_moves import decide
from orchestrrl.core.config.schema import FastSettings
from orchestrrl.lab.bench.fleets import KV_CAPACITY_TOKENS, congested, deployments
from orchestrrl.lab.bench.plain_balancer import PlainBalancer
from planner.model import EngineId, Mode, PlanId, RequestState
from planner.plan import make_plan

SETTINGS = FastSettings(theta=1e-5, headroom_tokens=0)


def test_a_fleet_is_a_function_of_its_seed() -> None:
    assert congested(8, 100, 1) == congested(8, 100, 1)
    assert congested(8, 100, 1) != congested(8, 100, 2)


def test_engines_count_the_requests_that_are_on_them() -> None:
    fleet = congested(16, 400, 3)
    for engine in fleet.engines:
        held = [request for request in fleet.requests if request.engine == engine.id]
        running = [request for request in held if request.state is RequestState.RUNNING]
        assert (len(running), len(held)) == (engine.running, engine.running + engine.waiting)
        assert sum(request.context_tokens for request in running) == KV_CAPACITY_TOKENS - engine.kv_free_tokens
    counts = sorted(engine.running + engine.waiting for engine in fleet.engines)
    assert counts[-1] > 2 * counts[len(counts) // 2]


def test_every_deployment_can_be_weighed() -> None:
    plan = make_plan(PlanId("p"), congested(16, 400, 1), deployments(16), mode=Mode.ACT)
    assert {part.configuration for option in plan.alternatives for part in option.parts} == {"tp1", "tp2", "tp4", "tp8"}
    assert not any(alternative.infeasible_because for alternative in plan.alternatives)


@pytest.mark.parametrize("seed", range(12))
def test_the_plain_balancer_makes_the_same_moves(seed: int) -> None:
    engines = 2 + seed
    problem = balance_problem(congested(engines, (8 + 4 * (seed % 3)) * engines, seed), SETTINGS)
    moves = PlainBalancer(problem).moves()
    assert moves
    assert moves == list(decide(problem).moves)


def test_the_plain_balancer_refuses_stalls() -> None:
    worker = replace(
        balance_problem(congested(1, 4, 0), SETTINGS).workers[0], decode_tokens_per_s=0.0, id=EngineId("w")
    )
    with pytest.raises(ValueError, match="stalled"):
        PlainBalancer(BalanceProblem(0.1, (worker,)))
