"""Conformance tests of sampling parameters that RL clients use: seeds, stop strings, several prompts and choices, and
token ids in log-probabilities. Subclass `SamplingConformance` in a test module like `EngineConformance`, with an engine
of the same kind. The expectations were recorded from vLLM 0.32 with the option `--enable-scale-out`.
"""

import functools
import json
import operator
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from orchestrrl.engines.base import Engine
from orchestrrl.engines.conformance import PROMPT, TEXT, EngineUnderTest, at, post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATE, RESPONSES = "/inference/v1/generate", "/v1/responses"
MESSAGES = [{"role": "user", "content": TEXT}]
GREEDY = {"temperature": 0, "ignore_eos": True}


async def ask(engine: Engine, path: str, **body: Any) -> Any:
    status, answer = await post(engine, path, body)
    assert status == 200, answer
    return answer


async def send(engine: Engine, path: str, **body: Any) -> None:
    """Send a request whose answer may have no body."""
    async with aiohttp.ClientSession() as session, session.post(engine.url + path, json=body) as response:
        assert response.status == 200


async def get(engine: Engine, path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(engine.url + path) as response:
        assert response.status == 200
        return await response.json()


async def stream(engine: Engine, path: str, **body: Any) -> list[Any]:
    """Return the events of a streamed answer, without the final `[DONE]`."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(engine.url + path, json={**body, "stream": True}) as response,
    ):
        assert response.status == 200
        lines = (await response.text()).splitlines()
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert ("[DONE]" in found) == (path != RESPONSES)
    return [json.loads(each) for each in found if each != "[DONE]"]


async def generate(engine: Engine, token_ids: Any = PROMPT, **params: Any) -> Any:
    """Return the only choice of a generate request."""
    (choice,) = (await ask(engine, GENERATE, token_ids=list(token_ids), sampling_params=params))["choices"]
    return choice


def joined(events: list[Any], index: int, field: str) -> Any:
    """Return a field of one choice, concatenated over the events of a stream."""
    found = [choice[field] for event in events for choice in event["choices"] if choice["index"] == index]
    return functools.reduce(operator.add, found)


class SamplingConformance:
    """Conformance tests of sampling parameters. Each test finds the engine idle and leaves it idle."""

    @pytest.fixture
    async def bench(self, engine: Engine) -> AsyncIterator[EngineUnderTest]:
        async with at(engine) as bench:
            yield bench

    async def test_logprobs_with_tokens_as_ids(self, engine: Engine, bench: EngineUnderTest) -> None:
        body = {"prompt": list(PROMPT), "max_tokens": 12, "logprobs": 2, "return_token_ids": True, **GREEDY}
        (choice,) = (await ask(engine, COMPLETIONS, **body, return_tokens_as_token_ids=True))["choices"]
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        assert choice["logprobs"]["text_offset"] == [len("".join(names[:count])) for count in range(12)]
        for name, tops in zip(names, choice["logprobs"]["top_logprobs"], strict=True):
            assert name in tops
            assert len(tops) == 2
            assert all(top.startswith("token_id:") for top in tops)
        streamed = await stream(engine, COMPLETIONS, **body, return_tokens_as_token_ids=True)
        assert [name for event in streamed for name in event["choices"][0]["logprobs"]["tokens"]] == names

    async def test_logprobs_of_chats_with_tokens_as_ids(self, engine: Engine, bench: EngineUnderTest) -> None:
        body = {"messages": MESSAGES, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, **GREEDY}
        (plain,) = (await ask(engine, CHAT, **body))["choices"]
        body |= {"return_tokens_as_token_ids": True, "return_token_ids": True}
        (choice,) = (await ask(engine, CHAT, **body))["choices"]
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        # The bytes of a generated token are those of its text; the bytes of an alternative are those of its name.
        assert [entry["bytes"] for entry in content] == [entry["bytes"] for entry in plain["logprobs"]["content"]]
        for entry in content:
            assert entry["top_logprobs"][0]["token"] == entry["token"]
            assert all(top["bytes"] == list(top["token"].encode()) for top in entry["top_logprobs"])
        streamed = await stream(engine, CHAT, **body)
        found = [event["choices"][0]["logprobs"] for event in streamed]
        assert [entry for logprobs in found if logprobs for entry in logprobs["content"]] == content

    async def test_prompts_and_choices_are_numbered(self, engine: Engine, bench: EngineUnderTest) -> None:
        prompts = [list(PROMPT), [9, 8, 7]]
        body = {"max_tokens": 10, "ignore_eos": True, "return_token_ids": True, "seed": 4, "temperature": 1}
        answer = await ask(engine, COMPLETIONS, prompt=prompts, n=2, **body)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [
            prompts[index // 2] for index in range(4)
        ]
        assert answer["usage"]["prompt_tokens"] == 8
        assert answer["usage"]["completion_tokens"] == 40
        for index, choice in enumerate(answer["choices"]):
            alone = await ask(engine, COMPLETIONS, prompt=prompts[index // 2], **{**body, "seed": 4 + index % 2})
            assert alone["choices"][0]["token_ids"] == choice["token_ids"]
        events = await stream(engine, COMPLETIONS, prompt=prompts, n=2, **body)
        assert [joined(events, index, "token_ids") for index in range(4)] == [
            choice["token_ids"] for choice in answer["choices"]
        ]
        chat = await ask(engine, CHAT, messages=MESSAGES, n=2, **body)
        events = [each for each in await stream(engine, CHAT, messages=MESSAGES, n=2, **body) if each["choices"]]
        assert [event["choices"][0]["delta"].get("role") for event in events[:2]] == ["assistant"] * 2
        assert [joined(events[2:], index, "token_ids") for index in range(2)] == [
            choice["token_ids"] for choice in chat["choices"]
        ]

    @pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
    async def test_seed_repeats_the_draws_of_its_request(
        self, engine: Engine, bench: EngineUnderTest, path: str
    ) -> None:
        async def tokens(prompt: list[int], seed: int) -> list[int]:
            params = {"max_tokens": 40, "ignore_eos": True, "temperature": 1, "seed": seed}
            body = {"prompt": prompt, "return_token_ids": True, **params}
            if path == GENERATE:
                body = {"token_ids": prompt, "sampling_params": params}
            (choice,) = (await ask(engine, path, **body))["choices"]
            found: list[int] = choice["token_ids"]
            return found

        whole = await tokens(list(PROMPT), 7)
        assert await tokens(list(PROMPT), 7) == whole
        assert await tokens(list(PROMPT), 8) != whole
        # The continuation draws from its own start, not from the position of the token in the response.
        rest = await tokens([*PROMPT, *whole[:20]], 7)
        assert rest[:20] != whole[20:]

    async def test_stop_string_ends_the_text_before_it(self, engine: Engine, bench: EngineUnderTest) -> None:
        body = {"prompt": list(PROMPT), "max_tokens": 60, "return_token_ids": True, **GREEDY}
        whole = (await ask(engine, COMPLETIONS, **body))["choices"][0]
        stop = _ascii_part(whole["text"])
        before = whole["text"][: whole["text"].index(stop)]
        for included in (False, True):
            asked = {**body, "stop": ["never found", stop], "include_stop_str_in_output": included}
            (choice,) = (await ask(engine, COMPLETIONS, **asked))["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
            assert choice["text"] == before + stop * included
            assert choice["token_ids"] == whole["token_ids"][: len(choice["token_ids"])]
            events = await stream(engine, COMPLETIONS, **asked)
            assert joined(events, 0, "text") == choice["text"]
            assert joined(events, 0, "token_ids") == choice["token_ids"]
        late, unstopped = [  # with min_tokens, vLLM generates no EOS, even if the request ignores it
            (await ask(engine, COMPLETIONS, **body, min_tokens=60, **asked))["choices"][0]
            for asked in ({"stop": stop}, {})
        ]
        assert (late["finish_reason"], late["text"]) == ("length", unstopped["text"])

    async def test_generate_reports_the_stop_string(self, engine: Engine, bench: EngineUnderTest) -> None:
        stop = _ascii_part((await bench.run(max_tokens=60)).text)
        assert (await generate(engine, **GREEDY, max_tokens=60, stop=[stop]))["stop_reason"] == stop

    async def test_stream_withholds_what_could_be_a_stop_string(self, engine: Engine, bench: EngineUnderTest) -> None:
        body = {"prompt": list(PROMPT), "max_tokens": 200, **GREEDY}
        whole = (await ask(engine, COMPLETIONS, **body))["choices"][0]["text"]
        *events, last = await stream(engine, COMPLETIONS, **body, stop=["~" * 41])
        assert len(last["choices"][0]["text"]) >= 40
        assert joined([*events, last], 0, "text") == whole
        *events, last = await stream(engine, COMPLETIONS, **body, stop=["~" * 9999])
        assert joined(events, 0, "text") == ""
        assert last["choices"][0]["text"] == whole

    async def test_invalid_stop_strings_are_refused(self, engine: Engine, bench: EngineUnderTest) -> None:
        for stop in ("", [""], ["a"] * 5, [3]):
            status, answer = await post(engine, COMPLETIONS, {"prompt": TEXT, "stop": stop})
            assert (status, answer["error"]["code"]) == (400, 400)

    async def test_text_can_include_the_stop_token(self, engine: Engine, bench: EngineUnderTest) -> None:
        whole = await bench.run(max_tokens=8)
        stop, end = whole.token_ids[7], whole.token_ids.index(whole.token_ids[7]) + 1
        body = {"prompt": list(PROMPT), "max_tokens": 8, "stop_token_ids": [stop], **GREEDY}
        texts = [
            (await ask(engine, COMPLETIONS, **body, include_stop_str_in_output=included))["choices"][0]["text"]
            for included in (True, False)
        ]
        assert texts == [(await bench.run(max_tokens=count)).text for count in (end, end - 1)]


def _ascii_part(text: str) -> str:
    """Return four ASCII characters from the middle of a text."""
    found = (text[at : at + 4] for at in range(len(text) // 2, len(text) - 4))
    return next(part for part in found if part.isascii())
