"""The pause barrier and cancellation over HTTP, for a gateway without a daemon, with simulated engines."""

import asyncio
from typing import Any

import pytest

from tests.orchestrrl.gateway.test_server import DEADLINE_S, PROMPT, Harness, engine_load, harness

__all__ = ["harness"]  # a fixture

BODY = {"model": "simulated", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "return_token_ids": True}


async def made(harness: Harness) -> int:
    """Return the number of tokens that the engines have generated."""
    total = 0
    for url in harness.engine_urls:
        async with harness.http.get(url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        total += sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:generation_tokens_total"))
    return total


async def test_weights_folder_is_reported_with_its_version(harness: Harness) -> None:
    _, barrier = await harness.post("/orchestrrl/pause", {"holder": "trainer"})
    asked = {"lease_id": barrier["lease_id"], "policy_version": 7, "weights_source": "/shared/7"}
    _, barrier = await harness.post("/orchestrrl/resume", asked)
    assert barrier["weights_source"] == "/shared/7"
    one = {"engines": ["e0"], "policy_version": 8, "weights_source": "/shared/8"}
    assert (await harness.post("/orchestrrl/set-version", one))[1]["weights_source"] == "/shared/7"
    _, barrier = await harness.post("/orchestrrl/pause", {"holder": "trainer"})
    _, barrier = await harness.post("/orchestrrl/resume", {"lease_id": barrier["lease_id"], "policy_version": 9})
    assert barrier["weights_source"] == ""


async def test_weights_change_between_tokens_of_an_answer(harness: Harness) -> None:
    _, undisturbed = await harness.post("/v1/completions", BODY)
    _, first = await harness.post("/orchestrrl/pause", {"holder": "trainer"})
    status, barrier = await harness.post("/orchestrrl/resume", {"lease_id": first["lease_id"], "policy_version": 7})
    assert (status, barrier["phase"], barrier["policy_version"]) == (200, "open", 7)
    harness.pause_registry.append(9)
    asking = asyncio.create_task(
        harness.post("/v1/completions", {**BODY, "return_policy_versions": True}, **{"X-Request-Id": "r"})
    )
    await harness.until_running("r")
    status, barrier = await harness.post("/orchestrrl/pause", {"mode": "keep", "holder": "trainer", "lease_s": 120})
    assert (status, barrier["phase"], barrier["holder"], barrier["mode"]) == (200, "quiet", "trainer", "keep")
    assert barrier["requests"] == {"running": 0, "frozen": 1, "held": 0}
    assert [(engine["engine_id"], engine["paused"]) for engine in barrier["engines"]] == [("e0", True), ("e1", True)]
    harness.released.set()
    before = await made(harness)
    newcomer = asyncio.create_task(harness.post("/v1/completions", BODY))
    for _ in range(5):
        await asyncio.sleep(0.01)
        assert await made(harness) == before
    status, renewed = await harness.post("/orchestrrl/renew", {"lease_id": barrier["lease_id"], "lease_s": 600})
    assert status == 200
    assert renewed["lease_until_unix_s"] > barrier["lease_until_unix_s"]
    assert (await harness.get("/orchestrrl/barrier"))[1]["phase"] == "quiet"
    await harness.post("/orchestrrl/resume", {"lease_id": barrier["lease_id"], "policy_version": 8})
    status, answer = await asking
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["token_ids"] == undisturbed["choices"][0]["token_ids"]
    versions = choice["policy_versions"]
    assert [span["version"] for span in versions] == [7, 8]
    assert versions[0]["start"] == 0 < versions[0]["end"] == versions[1]["start"] < versions[1]["end"] == 300
    assert (await newcomer)[1]["choices"][0]["token_ids"] == choice["token_ids"]
    async with harness.http.get(harness.url + "/metrics") as page:
        text = await page.text()
    assert 'orchestrrl_gateway_policy_version{engine="e1"} 8.0' in text
    assert 'orchestrrl_gateway_answer_version_lag_bucket{le="0"} 1.0' in text
    assert 'orchestrrl_gateway_answer_version_lag_bucket{le="1"} 2.0' in text
    assert "orchestrrl_gateway_barrier_closed 0.0" in text


async def test_stream_chunks_have_policy_versions(harness: Harness) -> None:
    _, barrier = await harness.post("/orchestrrl/pause", {})
    await harness.post("/orchestrrl/resume", {"lease_id": barrier["lease_id"], "policy_version": 3})
    body = {**BODY, "max_tokens": 5, "return_policy_versions": True}
    events = await harness.stream("/v1/completions", body)
    reply = [(choice["policy_version"], len(choice["token_ids"])) for event in events for choice in event["choices"]]
    assert {version for version, tokens in reply if tokens} == {3}


async def test_refused_barrier_calls_explain_why(harness: Harness) -> None:
    _, barrier = await harness.post("/orchestrrl/pause", {"holder": "one"})
    status, reply = await harness.post("/orchestrrl/pause", {"holder": "two"})
    assert status == 409
    assert "one holds the pause barrier for" in reply["error"]["message"]
    for path in ("renew", "resume"):
        status, reply = await harness.post(f"/orchestrrl/{path}", {"lease_id": "another"})
        assert status == 409, path
        assert "not closed under lease" in reply["error"]["message"]
    status, reply = await harness.post(
        "/orchestrrl/resume", {"lease_id": barrier["lease_id"], "without_engines": ["e9"]}
    )
    assert status == 409
    assert "must be engines of this gateway (e0, e1), got 'e9'" in reply["error"]["message"]
    assert (await harness.post("/orchestrrl/resume", {"lease_id": barrier["lease_id"]}))[0] == 200
    status, reply = await harness.post("/orchestrrl/resume", {"lease_id": barrier["lease_id"]})
    assert status == 409
    assert " has already ended" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("pause", {"mode": "stop", "lease_s": -1, "x": 1}, ("mode: ", "lease_s: ", "x: ")),
        ("pause", {"lease_s": 1e9, "deadline_s": 0}, ("lease_s: ", "deadline_s: ")),
        ("renew", {}, ("lease_id: is missing",)),
        ("resume", {"policy_version": -1}, ("policy_version: ",)),
        ("resume", {"policy_version": 1.5}, ("policy_version: ",)),
        ("set-version", {"engines": []}, ("engines: ", "policy_version: is missing")),
        ("cancel", {"groups": "g"}, ("groups: ",)),
        ("cancel", [], ("(document): ",)),
    ],
)
async def test_all_body_faults_are_reported_at_once(
    harness: Harness, path: str, body: Any, words: tuple[str, ...]
) -> None:
    status, reply = await harness.post(f"/orchestrrl/{path}", body)
    assert status == 400
    for word in words:
        assert word in reply["error"]["message"]
    assert (await harness.get("/orchestrrl/barrier"))[1]["phase"] == "open"


async def test_answer_beyond_max_version_lag_is_aborted(harness: Harness) -> None:
    _, barrier = await harness.post("/orchestrrl/pause", {})
    await harness.post("/orchestrrl/resume", {"lease_id": barrier["lease_id"], "policy_version": 1})
    harness.pause_registry.append(9)
    body = {**BODY, "max_version_lag": 0}
    asking = asyncio.create_task(harness.post("/v1/completions", body, **{"X-Request-Id": "r"}))
    await harness.until_running("r")
    _, barrier = await harness.post("/orchestrrl/pause", {})
    await harness.post("/orchestrrl/resume", {"lease_id": barrier["lease_id"], "policy_version": 2})
    status, answer = await asking
    assert status == 200
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "max_version_lag")
    assert len(choice["token_ids"]) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_version_lag", -1), ("max_version_lag", "1"), ("on_stale", "burn"), ("group_enough", 0)],
)
async def test_invalid_fields_are_named_in_the_error(harness: Harness, field: str, value: Any) -> None:
    status, reply = await harness.post("/v1/completions", {**BODY, field: value})
    assert (status, reply["error"]["param"]) == (400, field)


@pytest.mark.parametrize("stream", [False, True])
async def test_cancel_ends_answers_by_group(harness: Harness, stream: bool) -> None:
    harness.pause_registry.extend([9, 9])
    asking = [
        asyncio.create_task(
            harness.stream("/v1/completions", BODY, **{"X-Request-Id": f"r{k}", "X-Group-Id": "g"})
            if stream
            else harness.post("/v1/completions", BODY, **{"X-Request-Id": f"r{k}", "X-Group-Id": "g"})
        )
        for k in range(2)
    ]
    for k in range(2):
        await harness.until_running(f"r{k}")
    status, reply = await harness.post("/orchestrrl/cancel", {"groups": ["g"], "reason": "no longer wanted"})
    assert (status, sorted(reply["cancelled_ids"])) == (200, ["r0", "r1"])
    for answer in await asyncio.gather(*asking):
        choice = answer[-1]["choices"][0] if stream else answer[1]["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "no longer wanted")
    async with asyncio.timeout(DEADLINE_S):
        while await engine_load(harness):
            await asyncio.sleep(0.01)
