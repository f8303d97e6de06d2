"""A redeployment inside a Ray cluster, with real vLLM servers as actors, during a step. The resource `slot` stands for
Ray's GPUs."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.ray_cluster import ray_nodes
from tests.vllm.redeploying_fleet_vllm import Harness, Step, configuration, step_seconds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

GPUS = 2


@pytest.fixture
def harness(tiny_model: Path, tmp_path: Path) -> Iterator[Harness]:
    with ray_nodes() as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        cluster.start_head(f'{{"slot": {GPUS}}}')
        options = {"address": cluster.address, "per_gpu": {"slot": 1.0}, "log_folder": str(tmp_path / "logs")}
        deployer = {"product": "ray", "options": options}
        harness = Harness(
            tmp_path, tiny_model, [configuration("tp1"), configuration("tp2", 2)], GPUS, deployer=deployer
        )
        try:
            asyncio.run(harness.start())
            yield harness
        finally:
            asyncio.run(harness.close())


async def test_two_actors_become_one_of_two_ranks_during_a_step(harness: Harness) -> None:
    step = Step()
    await harness.at("tp1=2")
    undisturbed = await step.undisturbed(next(iter((await harness.engines()).values())))
    with harness.slowly():
        asking = step.begin(harness.url)
        await asking.each_has(20)
        report = await harness.redeployment("tp2=1")
        await asking.each_has(1, than=asking.counts)
    assert await asking.end() == undisturbed
    print(await harness.shown(report))
    assert (report["requests_parked"], report["requests_moved"]) == (step.requests, 0)
    assert all(told["state"] == "done" for told in report["steps"])
    assert step_seconds(report)["ready"] > 1.0
    assert report["engine_ids"] == [engine["engine_id"] for engine in report["new_engines"]]
    assert (await harness.ledger())["in_flight"] == []
