"""Chats that are not streamed to the client: what the gateway takes from the engine's stream, and what it relays."""

import json
from typing import Any

import pytest
from aiohttp import web

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.moves.movable import relayed_because
from tests.orchestrrl.gateway.passing_fleet import PATHS, PassedEngine, passing_fleet

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED = {"type": "function", "function": {"name": "f"}}
USAGE = {"prompt_tokens": 20, "completion_tokens": 12, "total_tokens": 32}


async def hides_token_ids(engine: PassedEngine, request: web.Request) -> web.StreamResponse:
    """Answer as vLLM does with a parser and `include_reasoning` false."""
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    last = {"index": 0, "delta": {"content": "xt"}, "finish_reason": "length"}
    events = [{"choices": [{"index": 0, "delta": {"content": "te"}}]}, {"choices": [last]}]
    for event in [*events, {"choices": [], "usage": USAGE}]:
        await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await answer.write(b"data: [DONE]\n\n")
    return answer


async def test_usage_of_an_answer_without_token_ids_is_the_engines() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "include_reasoning": False}
    async with passing_fleet(PassedEngine("e0", answer=hides_token_ids, paths=(*PATHS, CHAT))) as fleet:
        _, answer = await fleet.ask("POST", CHAT, json=body)
        assert fleet.gateway.ledger.generated_total == 12
    assert (answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]) == ("text", 12)


@pytest.mark.parametrize(
    ("body", "relayed"),
    [
        ({"tools": TOOLS, "tool_choice": NAMED}, True),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": "required", "stream": True}, False),
        ({"tools": TOOLS, "tool_choice": "auto"}, False),
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
        ({"tool_choice": "required"}, False),
    ],
)
def test_whole_chat_with_a_required_tool_is_relayed(body: dict[str, Any], relayed: bool) -> None:
    assert relayed_because(CompletionEndpoint.CHAT, body).startswith("tool_choice: ") is relayed
    assert not relayed_because(CompletionEndpoint.COMPLETIONS, body)
