"""Redeployment of real vLLM servers during a step: in every outcome, each request ends once, with the tokens of an
undisturbed run. Daemon, gateway and deployer are real processes."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrrl.integrations.vllm_weights import reload_weights
from tests.vllm.redeploying_fleet_vllm import READY_WITHIN_S, Harness, Step, configuration, step_seconds

pytestmark = pytest.mark.timeout(1200)

GPUS = 3
SLOW_STEPS = "slow_steps:SlowSteps"
# One-GPU configurations that cannot serve: the faulty arguments, and the detail that a redeployment reports.
REFUSED = {"arguments": ["--max-model-len", "1000000"]}  # more than the model has: vLLM exits
UNTRAINED = {"arguments": ["--load-format", "dummy"]}  # with other weights
BENT = {"arguments": ["--logits-processors", SLOW_STEPS, "bad_plugins:Bent"]}
HANGING = {"arguments": ["--logits-processors", SLOW_STEPS, "bad_plugins:Hanging"]}
OWN = {"refused": REFUSED, "untrained": UNTRAINED, "bent": BENT, "hanging": HANGING}
HANGS_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def harness(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """Yield a harness without engines, and stop all engines at the end."""
    folder = tmp_path_factory.mktemp("redeploying")
    configurations = [configuration("tp1"), configuration("tp2", 2), *map(configuration, OWN)]
    harness = Harness(folder, tiny_model, configurations, GPUS, OWN)
    try:
        asyncio.run(harness.start())
        yield harness
    finally:
        asyncio.run(harness.close())


async def test_new_engine_gets_the_fleets_weights(harness: Harness, other_weights: Path) -> None:
    await harness.at("tp1=2")
    old, step = await harness.engines(), Step(requests=4, tokens=50)
    before = await step.undisturbed(next(iter(old.values())))
    await asyncio.to_thread(reload_weights, list(old.values()), other_weights)
    await harness.orchestrrl("engines", "set-version", "3", *old, "--weights", str(other_weights))

    report = await harness.redeployment("tp1=3")
    assert report["closed_s"] is None  # its GPU was free, so no request had to wait
    engines = await harness.engines()
    (new,) = engines.keys() - old.keys()
    answers = [await step.undisturbed(url) for url in (engines[new], *old.values())]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] != before
    barrier = json.loads(await harness.orchestrrl("barrier", "--json"))
    assert (barrier["policy_version"], barrier["weights_source"]) == (3, str(other_weights))
    assert {engine["engine_id"]: engine["policy_version"] for engine in barrier["engines"]} == dict.fromkeys(engines, 3)


async def redeployed(harness: Harness, step: Step, before: str, after: str) -> dict[str, Any]:
    """Redeploy during a step whose requests all wait in the gateway and lose no token; return the report."""
    await harness.at(before)
    undisturbed = await step.undisturbed(next(iter((await harness.engines()).values())))
    with harness.slowly():
        asking = step.begin(harness.url)
        await asking.each_has(20)
        report = await harness.redeployment(after)
        await asking.each_has(20, than=asking.counts)
    answers = await asking.end()

    print(await harness.shown(report))
    assert (report["requests_parked"], report["requests_moved"]) == (step.requests, 0)
    assert all(told["state"] == "done" for told in report["steps"])
    assert step_seconds(report)["ready"] > 1.0
    assert report["closed_s"] > sum(step_seconds(report)[kind] for kind in ("start", "ready", "verify"))
    assert answers == undisturbed
    told = await harness.ledger()
    assert told["in_flight"] == []
    ended = sorted(told["finished"][-step.requests :], key=lambda request: int(request["generated_tokens"]))
    assert [request["generated_tokens"] for request in ended] == [body["max_tokens"] for body in step.bodies()]
    assert {request["moves"] for request in ended} == {1}
    return report


async def test_two_servers_become_one_of_two_ranks_during_a_step(harness: Harness) -> None:
    report = await redeployed(harness, Step(), "tp1=2", "tp2=1")
    assert [engine["configuration"] for engine in report["new_engines"]] == ["tp2"]


@pytest.mark.slow
async def test_one_server_of_two_ranks_becomes_two_during_a_step(harness: Harness) -> None:
    report = await redeployed(harness, Step(), "tp2=1", "tp1=2")
    assert len(report["engine_ids"]) == 2


async def rolled_back(harness: Harness, *targets: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a redeployment during a step that is rolled back with all requests answered; return the report and the failed
    step."""
    step = Step(tokens=400)
    await harness.at("tp1=2")
    engines = await harness.engines()
    undisturbed = await step.undisturbed(next(iter(engines.values())))
    with harness.slowly():
        asking = step.begin(harness.url)
        await asking.each_has(20)
        report = await harness.redeployment(*targets, state="rolled_back")
    assert await asking.end() == undisturbed
    print(await harness.shown(report))
    assert set(report["engine_ids"]) == (await harness.engines()).keys() == engines.keys()
    (failed,) = (told for told in report["steps"] if told["state"] == "failed")
    assert failed["direction"] == "forward"
    assert failed["detail"] in report["detail"]
    return report, failed


@pytest.mark.slow
async def test_new_engine_that_does_not_start_is_rolled_back(harness: Harness) -> None:
    """It needed the GPU of an engine, whose requests wait for it and then for the restored engine."""
    report, failed = await rolled_back(harness, "tp1=1", "refused=1")
    assert failed["kind"] == "ready"
    assert "User-specified max_model_len (1000000) is greater than" in failed["detail"]
    assert report["requests_parked"] > 0
    assert report["closed_s"] > 0


@pytest.mark.slow
async def test_new_engine_with_wrong_answers_is_rolled_back(harness: Harness) -> None:
    """Its GPU was free, so the other engines continue to serve."""
    report, failed = await rolled_back(harness, "tp1=2", "untrained=1")
    assert failed["kind"] == "verify"
    assert "differs from the previous engines' answers" in failed["detail"]
    assert (report["requests_parked"], report["requests_moved"], report["closed_s"]) == (0, 0, None)


@pytest.mark.slow
async def test_new_engine_with_wrong_sampling_is_rolled_back(harness: Harness) -> None:
    """Its choice of tokens is wrong, but its prompt log-probabilities are correct."""
    report, failed = await rolled_back(harness, "tp1=1", "bent=1")
    assert failed["kind"] == "verify"
    assert "differs from the previous engines' answers: token 1 is another" in failed["detail"]
    assert report["requests_parked"] > 0


@pytest.mark.slow
async def test_new_engine_that_hangs_at_startup_is_rolled_back(harness: Harness) -> None:
    """Its GPU was free, so the other engines continue to serve. The daemon is restarted and finds them running."""
    step = Step(tokens=400)
    await harness.at("tp1=2")
    engines = await harness.engines()
    undisturbed = await step.undisturbed(next(iter(engines.values())))
    try:
        with harness.slowly():
            asking = step.begin(harness.url)
            await asking.each_has(20)
            await harness.restart_daemon(ready_within_s=HANGS_WITHIN_S)
            report = await harness.redeployment("tp1=2", "hanging=1", state="rolled_back")
        assert await asking.end() == undisturbed
    finally:
        await harness.restart_daemon(ready_within_s=READY_WITHIN_S)
    print(await harness.shown(report))
    (failed,) = (told for told in report["steps"] if told["state"] == "failed")
    assert failed["kind"] == "ready"
    assert f"timed out after {HANGS_WITHIN_S:g} s" in failed["detail"]
    assert (report["requests_parked"], report["requests_moved"], report["closed_s"]) == (0, 0, None)
    assert set(report["engine_ids"]) == (await harness.engines()).keys() == engines.keys()
