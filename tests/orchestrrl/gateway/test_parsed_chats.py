"""Chats with tools move if an engine parses the whole answer. Otherwise, they stay on their engine."""

from typing import Any

import pytest

from orchestrrl.core.errors import Permanent
from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.gateway.http.completion_requests import CompletionRequest
from orchestrrl.gateway.http.responses import response
from orchestrrl.gateway.ledger.pieces import RecordCutter, give_back, put_together
from orchestrrl.gateway.moves.movable import parsed_after_moves
from tests.orchestrrl.gateway.fakes import RunningGroup, World, chat_prompt, decode, parsed, undisturbed, world
from tests.orchestrrl.gateway.test_relay import finish, move

CHAT = CompletionEndpoint.CHAT
MESSAGES = [{"role": "user", "content": "what?"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
MAX_TOKENS = 120
TOKENS, TEXT, _ = undisturbed(chat_prompt(MESSAGES), MAX_TOKENS)


def asked(w: World, **body: Any) -> CompletionRequest:
    return w.ask(CHAT, messages=MESSAGES, max_tokens=MAX_TOKENS, tools=TOOLS, return_token_ids=True, **body)


def tool_world(**fields: Any) -> World:
    w = world()
    for engine in w.engines.values():
        engine.parses_chats = True
        for name, value in fields.items():
            setattr(engine, name, value)
    return w


async def begun(w: World, job: RunningGroup, tokens: int = 5) -> Any:
    await w.settle()
    (record,) = job.records
    while len(record.generated_ids) < tokens:
        await w.step()
    return record


async def moved(w: World, record: Any) -> str:
    """Move the record, and return why it did not move, or an empty string."""
    moving = move(w, "e1" if record.engine == "e0" else "e0")
    await w.settle()
    await w.step()
    return (await moving).detail


def choice_of(request: CompletionRequest) -> Any:
    return response(request.form, request.records, 1)["choices"][0]


@pytest.mark.parametrize(
    ("body", "movable"),
    [
        ({}, True),
        ({"tool_choice": "auto", "temperature": 0.5}, True),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, False),
        ({"stream": True}, False),
        ({"stop": ["x"]}, False),
        ({"include_reasoning": False}, False),
        ({"presence_penalty": 1.0}, False),
        ({"seed": 3}, False),
        ({"tools": []}, False),
    ],
)
def test_only_plainly_sampled_whole_chats_are_parsed_after_moves(body: dict[str, Any], movable: bool) -> None:
    assert parsed_after_moves(CHAT, {"messages": MESSAGES, "tools": TOOLS, **body}) is movable
    assert not parsed_after_moves(CompletionEndpoint.COMPLETIONS, {"tools": TOOLS, **body})


@pytest.mark.parametrize("moves", [1, 3])
async def test_moved_chat_has_the_message_of_its_whole_answer(moves: int) -> None:
    w = tool_world()
    request = asked(w, logprobs=True)
    async with w.gateway.request_group(request) as job:
        for number in range(1, moves + 1):
            record = await begun(w, job, 5 * number)
            assert await moved(w, record) == ""
        await finish(w, job)
    choice, expected = choice_of(request), parsed(TEXT)
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == [call["id"] for call in expected["tool_calls"]]
    assert len(calls) > 1
    assert choice["message"]["content"] == expected["content"]
    assert (choice["finish_reason"], choice["token_ids"]) == ("tool_calls", TOKENS)
    assert len(choice["logprobs"]["content"]) == len(TOKENS)


async def test_message_lacks_the_text_of_the_stop_token(monkeypatch: pytest.MonkeyPatch) -> None:
    w = tool_world(parses_chats=True)
    seen: list[list[int]] = []

    async def parse(_: Any, prompt_ids: Any, token_ids: Any) -> dict[str, Any]:
        assert list(prompt_ids) == chat_prompt(MESSAGES)
        seen.append(list(token_ids))
        return {"content": decode(token_ids), "tool_calls": []}

    for engine in w.engines.values():
        monkeypatch.setattr(engine, "parse_chat", parse)
    request = w.ask(CHAT, messages=MESSAGES, max_tokens=MAX_TOKENS, tools=TOOLS)
    async with w.gateway.request_group(request) as job:
        assert await moved(w, await begun(w, job)) == ""
        await finish(w, job)
    tokens, text, reason = undisturbed(chat_prompt(MESSAGES), MAX_TOKENS)
    assert reason == "stop"
    assert seen == [tokens[:-1]]
    choice = choice_of(request)
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": text}, "stop")


@pytest.mark.parametrize("fields", [{"parses_chats": False}, {"constrains": True}])
async def test_chat_stays_on_engine_that_cannot_parse_it_later(fields: dict[str, Any]) -> None:
    w = tool_world(**fields)
    async with w.gateway.request_group(asked(w)) as job:
        record = await begun(w, job)
        assert "tools: the engine parses tool calls" in await moved(w, record)
        await finish(w, job)
        assert list(record.generated_ids) == TOKENS


async def test_engine_that_restarts_with_a_grammar_makes_the_chat_immovable() -> None:
    w = tool_world()
    w.engines["e1"].constrains = True
    async with w.gateway.request_group(asked(w)) as job:
        record = await begun(w, job)
        assert record.engine == "e0"
        w.gateway.relays[record.id].restart()
        w.engines["e0"].die()
        await w.settle()
        record = await begun(w, job)
        assert (record.engine, record.immovable_because[:6]) == ("e1", "tools:")
        await finish(w, job)


async def test_stored_chat_has_its_message() -> None:
    w = tool_world()
    request, again = asked(w), asked(w)
    async with w.gateway.request_group(request) as job:
        record = await begun(w, job)
        cutter = RecordCutter(0, record, prompt_wanted=True)
        pieces = [cutter.cut()]
        assert await moved(w, record) == ""
        await finish(w, job)
        pieces.append(cutter.cut())
    assert give_back(again.records[0], put_together(piece for piece in pieces if piece is not None)[0], 0.0)
    assert choice_of(again) == choice_of(request)


async def test_answer_that_no_engine_parses_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    w = tool_world()

    async def broken(*_: Any) -> Any:
        raise Permanent("/derender: 500")

    for engine in w.engines.values():
        monkeypatch.setattr(engine, "parse_chat", broken)
    request = asked(w)
    async with w.gateway.request_group(request) as job:
        record = await begun(w, job)
        assert await moved(w, record) == ""
        await finish(w, job)
        assert record.immovable_because.startswith("tools: no engine parses the whole answer: /derender: 500")
    assert (choice_of(request)["message"]["content"], choice_of(request)["token_ids"]) == (TEXT, TOKENS)


async def test_cancelled_chat_has_the_text_of_all_its_tokens() -> None:
    w = tool_world()
    request = asked(w)
    async with w.gateway.request_group(request) as job:
        for tokens in (5, 10):
            record = await begun(w, job, tokens)
            assert await moved(w, record) == ""
        record = await begun(w, job, 15)
        tokens = len(record.generated_ids)
        assert w.gateway.cancel([record.id], (), "enough") == (record.id,)
        await w.settle()
    choice = choice_of(request)
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", TOKENS[:tokens])
    assert choice["message"] == {"role": "assistant", "content": decode(TOKENS[:tokens])}


@pytest.mark.parametrize(
    "message", [{"content": ["text"]}, {"content": "", "tool_calls": {"f": 1}}, {"content": "", "tool_calls": [1]}]
)
async def test_malformed_message_of_an_engine_is_an_error_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]
) -> None:
    engine = VllmEngine("http://engine")

    async def ask(*_: Any) -> Any:
        return {"choices": [{"message": message}]}

    monkeypatch.setattr(engine, "ask", ask)
    with pytest.raises(Permanent, match="/v1/chat/completions/derender"):
        await engine.parse_chat({}, [1], [2])
