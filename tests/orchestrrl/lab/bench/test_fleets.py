"""The generated fleets of the benchmarks match their descriptions."""

from orchestrrl.lab.bench.ticks import KV_CAPACITY_TOKENS, congested, deployments
from planner.model import Mode, PlanId, RequestState
from planner.plan import make_plan


def test_fleet_is_a_function_of_its_seed() -> None:
    assert congested(8, 100, 1) == congested(8, 100, 1)
    assert congested(8, 100, 1) != congested(8, 100, 2)


def test_engine_counts_match_their_requests() -> None:
    fleet = congested(16, 400, 3)
    for engine in fleet.engines:
        held = [request for request in fleet.requests if request.engine == engine.id]
        running = [request for request in held if request.state is RequestState.RUNNING]
        assert (len(running), len(held)) == (engine.running, engine.running + engine.waiting)
        assert sum(request.context_tokens for request in running) == KV_CAPACITY_TOKENS - engine.kv_free_tokens
    counts = sorted(engine.running + engine.waiting for engine in fleet.engines)
    assert counts[-1] > 2 * counts[len(counts) // 2]


def test_every_deployment_can_be_planned() -> None:
    plan = make_plan(PlanId("p"), congested(16, 400, 1), deployments(16), mode=Mode.ACT)
    assert {part.configuration for option in plan.alternatives for part in option.parts} == {"tp1", "tp2", "tp4", "tp8"}
    assert not any(alternative.infeasible_because for alternative in plan.alternatives)
