"""The benchmark of routing: every request of a step ends under every arm."""

import pytest

from orchestrrl.gateway.routing.strategies import STRATEGIES
from orchestrrl.lab.bench.routing import STEP, ArrivalLoad, outcome, routing

SMALL = ArrivalLoad("small", step=STEP.model_copy(update={"prompts": 8, "max_tokens": 200}), seats=2)


@pytest.mark.parametrize("policy", STRATEGIES)
@pytest.mark.parametrize("depth", [0, 1])
async def test_step_ends_and_is_deterministic(policy: str, depth: int) -> None:
    first, second = [await outcome(SMALL, 1, policy, depth) for _ in range(2)]
    assert first == second
    assert 0 < first.latency_s < first.makespan_s


def test_figures_compare_with_and_without_queue() -> None:
    figures = routing([SMALL], seeds=[1])
    assert all(figure.baseline == "no queue" and figure.ratio is not None for figure in figures)
