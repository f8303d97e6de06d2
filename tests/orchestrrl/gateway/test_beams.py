"""Beam search: one engine returns all beams of a prompt, and the gateway relays them."""

import json
from typing import Any

import pytest
from aiohttp import web

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.http.completion_requests import MAX_ANSWERS, read_completion_request
from orchestrrl.gateway.http.field_types import HttpRefusal
from tests.orchestrrl.gateway.passing_fleet import PATHS, PassedEngine, passing_fleet

CHAT = "/v1/chat/completions"


async def beams(engine: PassedEngine, request: web.Request) -> web.StreamResponse:
    """Answer with `n` choices. In a stream, each choice is an event."""
    body = await request.json()
    engine.asked.append(json.dumps(body))
    choices: list[dict[str, Any]] = [
        {"index": index, "text": f"{body['prompt']}{index}", "finish_reason": "length"} for index in range(body["n"])
    ]
    usage = {"prompt_tokens": 5, "completion_tokens": 7 * body["n"], "total_tokens": 5 + 7 * body["n"]}
    if not body.get("stream"):
        return web.json_response({"id": "theirs", "model": "m", "choices": choices, "usage": usage})
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for event in [*({"choices": [choice]} for choice in choices), {"choices": [], "usage": usage}, None]:
        await answer.write(b"data: " + (b"[DONE]" if event is None else json.dumps(event).encode()) + b"\n\n")
    return answer


@pytest.mark.parametrize("temperature", [0, 1.0])
async def test_each_prompt_is_sent_once_and_all_its_beams_are_returned(temperature: float) -> None:
    body = {"prompt": ["a", "b"], "n": 3, "use_beam_search": True, "temperature": temperature}
    async with passing_fleet(PassedEngine("e0", answer=beams)) as fleet:
        status, answer = await fleet.ask("POST", "/v1/completions", json=body)
        sent = [json.loads(asked) for asked in fleet.engines[0].asked if asked.startswith("{")]
    assert status == 200
    assert sorted(each["prompt"] for each in sent) == ["a", "b"]
    assert {each["n"] for each in sent} == {3}
    texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert texts == list(enumerate(["a0", "a1", "a2", "b0", "b1", "b2"]))
    assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 42, "total_tokens": 52}


async def test_streamed_beams_keep_their_indices() -> None:
    body = {"messages": [], "prompt": "", "n": 3, "use_beam_search": True, "stream": True}
    async with passing_fleet(PassedEngine("e0", answer=beams, paths=(*PATHS, CHAT))) as fleet:
        async with fleet.http.post(fleet.url + CHAT, json=body) as answer:
            events = [line.removeprefix("data: ") for line in (await answer.text()).split("\n\n") if line]
    assert events.pop() == "[DONE]"
    assert [choice["index"] for event in events for choice in json.loads(event)["choices"]] == [0, 1, 2]


def test_number_of_beams_is_limited() -> None:
    body = {"prompt": ["a", "b"], "n": MAX_ANSWERS, "use_beam_search": True}
    with pytest.raises(HttpRefusal, match=f"n: must be at most {MAX_ANSWERS // 2}") as refusal:
        read_completion_request(
            CompletionEndpoint.COMPLETIONS, body, request_id="r", group="", tag="", default_model="m", now_s=0.0
        )
    assert refusal.value.param == "n"
