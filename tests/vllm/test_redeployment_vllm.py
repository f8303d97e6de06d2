"""Redeploying parallelism of real vLLM servers in the middle of a step: whatever becomes of it, every request ends
once, with the tokens of a run that nobody disturbed. Daemon, gateway and deployer are the real ones, as processes."""

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
# Configurations of one GPU that cannot serve: which words of theirs are to blame, and what a redeployment says of it.
REFUSED = {"arguments": ["--max-model-len", "1000000"]}  # more than the model has: vLLM ends by itself
UNTRAINED = {"arguments": ["--load-format", "dummy"]}  # weights of its own
BENT = {"arguments": ["--logits-processors", SLOW_STEPS, "bad_plugins:Bent"]}
HANGING = {"arguments": ["--logits-processors", SLOW_STEPS, "bad_plugins:Hanging"]}
OWN = {"refused": REFUSED, "untrained": UNTRAINED, "bent": BENT, "hanging": HANGING}
HANGS_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def harness(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """No engine runs at first; all that run in the end are stopped."""
    folder = tmp_path_factory.mktemp("redeploying")
    configurations = [configuration("tp1"), configuration("tp2", 2), *map(configuration, OWN)]
    harness = Harness(folder, tiny_model, configurations, GPUS, OWN)
    try:
        asyncio.run(harness.start())
        yield harness
    finally:
        asyncio.run(harness.close())


async def test_who_comes_has_the_weights_that_the_others_were_given(harness: Harness, other_weights: Path) -> None:
    await harness.at("tp1=2")
    old, step = await harness.engines(), Step(requests=4, tokens=50)
    before = await step.undisturbed(next(iter(old.values())))
    await asyncio.to_thread(reload_weights, list(old.values()), other_weights)
    named = [word for engine in old for word in ("--engine", engine)]
    await harness.orchestrrl("engines", "set-version", "3", *named, "--weights", str(other_weights))

    report = await harness.redeployment("tp1=3")
    assert report["closed_s"] is None  # its GPU was free: nobody had to wait
    engines = await harness.engines()
    (new,) = engines.keys() - old.keys()
    answers = [await step.undisturbed(url) for url in (engines[new], *old.values())]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] != before
    barrier = json.loads(await harness.orchestrrl("barrier", "--json"))
    assert (barrier["policy_version"], barrier["weights_source"]) == (3, str(other_weights))
    assert {engine["engine_id"]: engine["policy_version"] for engine in barrier["engines"]} == dict.fromkeys(engines, 3)


async def redeployed(harness: Harness, step: Step, before: str, after: str) -> dict[str, Any]:
    """The report of a redeployment in the middle of a step, whose requests all waited in their gateway and lost no
    token."""
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


async def test_two_servers_become_one_of_two_ranks_in_the_middle_of_a_step(harness: Harness) -> None:
    report = await redeployed(harness, Step(), "tp1=2", "tp2=1")
    assert [engine["configuration"] for engine in report["new_engines"]] == ["tp2"]


@pytest.mark.slow
async def test_one_server_of_two_ranks_becomes_two_in_the_middle_of_a_step(harness: Harness) -> None:
    report = await redeployed(harness, Step(), "tp2=1", "tp1=2")
    assert len(report["engine_ids"]) == 2


async def rolled_back(harness: Harness, *targets: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A redeployment in the middle of a step that goes back, all requests answered: the report, and the step that
    failed."""
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
async def test_a_new_engine_that_does_not_start_is_taken_back(harness: Harness) -> None:
    """It was to have the GPU of an engine, whose requests wait for it, and in the end for that engine."""
    report, failed = await rolled_back(harness, "tp1=1", "refused=1")
    assert failed["kind"] == "ready"
    assert "User-specified max_model_len (1000000) is greater than" in failed["detail"]
    assert report["requests_parked"] > 0
    assert report["closed_s"] > 0


@pytest.mark.slow
async def test_a_new_engine_that_answers_wrongly_is_taken_back(harness: Harness) -> None:
    """Its GPU was free: the others serve on."""
    report, failed = await rolled_back(harness, "tp1=2", "untrained=1")
    assert failed["kind"] == "verify"
    assert "differs from the previous engines' answers" in failed["detail"]
    assert (report["requests_parked"], report["requests_moved"], report["closed_s"]) == (0, 0, None)


@pytest.mark.slow
async def test_a_new_engine_that_writes_wrongly_is_taken_back(harness: Harness) -> None:
    """Alone in what it chooses: how it reads is as it was."""
    report, failed = await rolled_back(harness, "tp1=1", "bent=1")
    assert failed["kind"] == "verify"
    assert "differs from the previous engines' answers: token 1 is another" in failed["detail"]
    assert report["requests_parked"] > 0


@pytest.mark.slow
async def test_a_new_engine_that_hangs_in_its_start_up_is_taken_back(harness: Harness) -> None:
    """Its GPU was free: the others serve on. The daemon, which is another one by then, finds them running."""
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
    assert f"took longer than {HANGS_WITHIN_S:g} s" in failed["detail"]
    assert (report["requests_parked"], report["requests_moved"], report["closed_s"]) == (0, 0, None)
    assert set(report["engine_ids"]) == (await harness.engines()).keys() == engines.keys()
