"""Tests of requests queued in a gateway: the planner counts them as new work and does not move them."""

from planner_builders import configuration, engine, request, snapshot

from planner.admission import FREE
from planner.model import Mode, Plan, PlanId, RequestView
from planner.plan import NO_HISTORY, PlannerConfig, make_plan

FLEET = tuple(engine(f"e{i}") for i in range(4))
CONFIG = PlannerConfig((configuration("tp2", 2, alpha_s=0.001, beta_s=0.001),), gpus_count=8)


def plan_of(requests: list[RequestView]) -> Plan:
    view = snapshot(FLEET, requests, [3000] * 20)
    return make_plan(PlanId("p1"), view, CONFIG, mode=Mode.ACT, control=FREE, history=NO_HISTORY)


def queued(count: int) -> list[RequestView]:
    return [request(f"q{i:03}", where=None) for i in range(count)]


def test_queued_requests_count_as_work_and_do_not_move() -> None:
    placed = [request(f"r{i:02}", 500, where=f"e{i % 2}") for i in range(80)]
    plain, more = plan_of(placed), plan_of([*placed, *queued(200)])
    assert all(move.request.startswith("r") for move in more.moves)
    assert more.requests_waiting == plain.requests_waiting + 200
    assert more.proposed_makespan_s is not None
    assert plain.proposed_makespan_s is not None
    assert more.proposed_makespan_s > plain.proposed_makespan_s


def test_fleet_with_only_queued_requests_is_not_idle() -> None:
    plan = plan_of(queued(100))
    assert not plan.moves
    assert plan.proposed_makespan_s
