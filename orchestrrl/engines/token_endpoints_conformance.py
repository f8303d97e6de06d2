"""Conformance tests of the endpoints with token ids: `/inference/v1/generate`, render and derender. Subclass
`TokenEndpointsConformance` in a test module like `EngineConformance`, with an engine of the same kind. A vLLM server
needs the option `--enable-scale-out`.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from orchestrrl.engines.base import Engine
from orchestrrl.engines.conformance import ATTEMPTS, LONG_TOKENS, PROMPT, TEXT, EngineUnderTest, at, post
from orchestrrl.engines.sampling_conformance import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    GREEDY,
    MESSAGES,
    ask,
    generate,
    joined,
    send,
    stream,
)
from orchestrrl.engines.token_endpoint_shapes import (
    DERENDERED_CHAT,
    DERENDERED_COMPLETION,
    GENERATE_EVENT,
    GENERATE_RUNNING_CHOICE,
    GENERATE_USAGE_EVENT,
    GENERATED,
    RENDERED,
    SAMPLED_PARAMS,
    SAMPLING_PARAMS,
    TEXT_LOGPROBS,
    TOKEN_LOGPROBS,
    logprobs_shape,
    shape_of,
)

# Field values that make a generate request invalid (status 400).
WRONG_GENERATE: tuple[dict[str, Any], ...] = (
    {"token_ids": []},
    {"token_ids": [-1]},
    {"token_ids": [10_000_000]},
    {"token_ids": "x"},
    {"output_mode": "both"},
    {"sampling_params": None},
    *(
        {"sampling_params": wrong}
        for wrong in (
            {"max_tokens": 0},
            {"temperature": -1},
            {"temperature": 2.5},
            {"logprobs": 100},
            {"min_tokens": 9, "max_tokens": 5},
            {"n": 0},
            {"n": 2, "temperature": 0},
            {"n": 5},  # more than the engine can run at once
            {"stop": ["x"], "detokenize": False},
        )
    ),
)


class TokenEndpointsConformance:
    """Conformance tests of the endpoints with token ids. Each test finds the engine idle and leaves it idle."""

    @pytest.fixture
    async def bench(self, engine: Engine) -> AsyncIterator[EngineUnderTest]:
        async with at(engine) as bench:
            yield bench

    async def test_generate_answers_with_tokens(self, engine: Engine, bench: EngineUnderTest) -> None:
        whole = await bench.run(max_tokens=20)
        body = {"token_ids": list(PROMPT), "sampling_params": {"max_tokens": 20, **GREEDY}}
        answer = await ask(engine, GENERATE, **body, request_id="mine")
        assert shape_of(answer) == GENERATED
        assert answer["request_id"] == "generate-tokens-mine"
        assert (answer["output_mode"], answer["model"]) == ("tokens", bench.capabilities.models[0])
        assert answer["usage"] == answer["usage"] | {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}
        (choice,) = answer["choices"]
        assert (choice["index"], choice["finish_reason"], choice["token_ids"]) == (0, "length", whole.token_ids)
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 20}]
        shown = await ask(engine, GENERATE, **body, return_token_ids=True)
        assert shown["prompt_token_ids"] == list(PROMPT)

    async def test_generate_streams(self, engine: Engine, bench: EngineUnderTest) -> None:
        params = {"max_tokens": 60, **GREEDY}
        choice = await generate(engine, **params)
        body = {"token_ids": list(PROMPT), "sampling_params": params}
        *events, last = await stream(engine, GENERATE, **body)
        assert shape_of(last) == GENERATE_EVENT
        assert all(shape_of(event) == {**GENERATE_EVENT, "choices": [GENERATE_RUNNING_CHOICE]} for event in events)
        assert joined([*events, last], 0, "token_ids") == choice["token_ids"]
        assert last["choices"][0]["weight_versions"] == choice["weight_versions"]
        asked = {"include_usage": True, "continuous_usage_stats": True}
        first, *events, last = await stream(engine, GENERATE, **body, stream_options=asked, return_token_ids=True)
        assert first["prompt_token_ids"] == list(PROMPT)
        assert not any("prompt_token_ids" in event for event in (*events, last))
        made = len(first["choices"][0]["token_ids"])
        assert first["usage"]["completion_tokens"] == made
        assert first["usage"]["total_tokens"] == 5 + made
        assert shape_of(last) == GENERATE_USAGE_EVENT
        assert last["usage"] == {"prompt_tokens": 5, "total_tokens": 65, "completion_tokens": 60}

    async def test_generate_answers_with_text(self, engine: Engine, bench: EngineUnderTest) -> None:
        whole = await bench.run(max_tokens=20)
        body = {"token_ids": list(PROMPT), "sampling_params": {"max_tokens": 20, **GREEDY}, "output_mode": "text"}
        answer = await ask(engine, GENERATE, **body)
        assert (answer["output_mode"], answer["choices"][0]["text"]) == ("text", whole.text)
        events = await stream(engine, GENERATE, **body)
        assert joined(events, 0, "text") == whole.text
        assert all(event["output_mode"] == "text" for event in events)

    async def test_generate_returns_logprobs(self, engine: Engine, bench: EngineUnderTest) -> None:
        params = {"max_tokens": 9, "logprobs": 2, **GREEDY}
        choice = await generate(engine, **params)
        assert shape_of(choice["logprobs"]) == TOKEN_LOGPROBS
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        for entry in content:
            first, second = entry["top_logprobs"]
            assert first == {name: entry[name] for name in ("token_id", "logprob", "rank")}
            assert (first["rank"], second["rank"]) == (1, 2)
            assert second["logprob"] <= first["logprob"] <= 0
        # Without alternatives, the generated token is listed.
        bare = (await generate(engine, **{**params, "logprobs": 0}))["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in bare] == [entry["top_logprobs"][:1] for entry in content]
        body = {"token_ids": list(PROMPT), "sampling_params": {**params, "prompt_logprobs": 1}}
        answer = await ask(engine, GENERATE, **body, output_mode="text")
        assert logprobs_shape(answer["choices"][0]["logprobs"]["content"]) == TEXT_LOGPROBS
        assert len(answer["prompt_logprobs"]) == len(PROMPT)
        assert answer["prompt_logprobs"][0] is None

    async def test_rank_of_a_sampled_token(self, engine: Engine, bench: EngineUnderTest) -> None:
        params = {"max_tokens": 40, "logprobs": 1, "temperature": 2, "seed": 3, "ignore_eos": True}
        content = (await generate(engine, **params))["logprobs"]["content"]
        assert all(entry["top_logprobs"][0]["token_id"] == entry["token_id"] for entry in content)
        assert any(entry["rank"] > 1 for entry in content)
        (completion,) = (
            await ask(engine, COMPLETIONS, prompt=list(PROMPT), **params, return_tokens_as_token_ids=True)
        )["choices"]
        for entry, tops in zip(content, completion["logprobs"]["top_logprobs"], strict=True):
            assert len(tops) == (2 if entry["rank"] > 1 else 1)

    async def test_generate_ends_at_the_context_length_by_default(self, engine: Engine, bench: EngineUnderTest) -> None:
        longest = bench.capabilities.max_model_len_tokens or 0
        assert len((await generate(engine, [5] * (longest - 3), **GREEDY))["token_ids"]) == 3

    async def test_generate_has_choices_with_consecutive_seeds(self, engine: Engine, bench: EngineUnderTest) -> None:
        params = {"max_tokens": 15, "temperature": 1, "ignore_eos": True}
        body = {"token_ids": list(PROMPT), "sampling_params": {**params, "n": 3, "seed": 10}}
        answer = await ask(engine, GENERATE, **body)
        found = [choice["token_ids"] for choice in answer["choices"]]
        assert found == [(await generate(engine, **params, seed=seed))["token_ids"] for seed in (10, 11, 12)]
        assert answer["usage"]["completion_tokens"] == 45
        events = await stream(engine, GENERATE, **body)
        assert [joined(events, index, "token_ids") for index in range(3)] == found

    async def test_stop_token_ends_a_generate_request(self, engine: Engine, bench: EngineUnderTest) -> None:
        whole = (await generate(engine, max_tokens=30, **GREEDY))["token_ids"]
        stopped = await generate(engine, max_tokens=30, stop_token_ids=[whole[12]], **GREEDY)
        assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", whole[12])
        assert stopped["token_ids"] == whole[: whole.index(whole[12]) + 1]

    async def test_invalid_generate_requests_are_refused(self, engine: Engine, bench: EngineUnderTest) -> None:
        too_long = {"token_ids": [5] * (bench.capabilities.max_model_len_tokens or 0)}
        for wrong in (*WRONG_GENERATE, too_long):
            body = {"token_ids": list(PROMPT), "sampling_params": {"max_tokens": 2}, **wrong}
            status, answer = await post(engine, GENERATE, body)
            assert (status, answer["error"]["code"]) == (400, 400), wrong
        status, answer = await post(engine, GENERATE, {**body, "token_ids": list(PROMPT), "model": "none"})
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")

    async def test_abort_of_generate_requests(self, engine: Engine, bench: EngineUnderTest) -> None:
        params = {"max_tokens": LONG_TOKENS, "ignore_eos": True}
        for number, path in enumerate(("/abort_requests", "/inference/v1/abort_requests")):
            sampling = {**params, "temperature": 1, "n": 2} if number else params
            body = {"token_ids": list(PROMPT), "sampling_params": sampling, "request_id": f"aborted-{number}"}
            running = asyncio.create_task(ask(engine, GENERATE, **body))
            await bench.until(lambda m: m.running >= 1)
            await send(engine, path, request_ids=[f"generate-tokens-aborted-{number}"])
            choices = (await running)["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["abort"] * (number + 1)
            for choice in choices:
                ends = [span["end"] for span in choice["weight_versions"]]
                assert ends == ([len(choice["token_ids"])] if choice["token_ids"] else [])
        # vLLM 0.32 keeps the parent of aborted choices until all requests are aborted.
        await send(engine, "/abort_requests")

    async def test_weight_versions_follow_the_name_of_the_weights(self, engine: Engine, bench: EngineUnderTest) -> None:
        for _ in range(ATTEMPTS):  # on a busy host, the request may end before the change
            running = asyncio.create_task(generate(engine, max_tokens=900, **GREEDY))
            await bench.until(lambda m: m.running == 1)
            try:
                await ask(engine, "/update_weight_version", new_version="v7")
                versions = (await running)["weight_versions"]
            finally:
                await ask(engine, "/update_weight_version", new_version="default")
            if len(versions) > 1:
                break
        first, second = versions
        assert (first["version"], second["version"]) == ("default", "v7")
        assert 0 == first["start"] < first["end"] == second["start"] < second["end"] == 900

    async def test_render_and_generate_equal_the_completion(self, engine: Engine, bench: EngineUnderTest) -> None:
        body = {"prompt": TEXT, "max_tokens": 25, **GREEDY}
        (rendered,) = await ask(engine, f"{COMPLETIONS}/render", **body)
        varying = {"max_tokens": "int", "ignore_eos": "bool"}
        assert shape_of(rendered) == {**RENDERED, "sampling_params": {**SAMPLING_PARAMS, **varying}}
        whole = await bench.run(TEXT, max_tokens=25)
        assert rendered["token_ids"] == list(whole.prompt_token_ids or ())
        assert (await ask(engine, GENERATE, **rendered))["choices"][0]["token_ids"] == whole.token_ids

    async def test_render_of_chats(self, engine: Engine, bench: EngineUnderTest) -> None:
        rendered = await ask(engine, f"{CHAT}/render", messages=MESSAGES)
        longest = bench.capabilities.max_model_len_tokens or 0
        assert shape_of(rendered) == {**RENDERED, "sampling_params": {**SAMPLED_PARAMS, "max_tokens": "int"}}
        assert rendered["token_ids"] == (await ask(engine, "/tokenize", messages=MESSAGES))["tokens"]
        assert rendered["sampling_params"]["max_tokens"] == longest - len(rendered["token_ids"])
        assert rendered["request_id"].startswith("chatcmpl-")
        asked = {"n": 2, "seed": 3, "stop": ["x"], "stop_token_ids": [9], "min_tokens": 2, "max_tokens": 7}
        asked |= {"temperature": 0.5, "ignore_eos": True, "include_stop_str_in_output": True}
        more = {"stream": True, "stream_options": {"include_usage": True}, "model": bench.capabilities.models[0]}
        full = await ask(engine, f"{CHAT}/render", messages=MESSAGES, logprobs=True, top_logprobs=2, **asked, **more)
        params = full["sampling_params"]
        assert params == params | asked | {"logprobs": 2, "output_kind": 1}
        params = (await ask(engine, f"{CHAT}/render", messages=MESSAGES, temperature=0.001, seed=-1))["sampling_params"]
        assert params["temperature"] == 0.01
        assert "seed" not in params
        assert (full["stream"], full["model"]) == (True, more["model"])
        assert full["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}

    async def test_render_of_several_prompts(self, engine: Engine, bench: EngineUnderTest) -> None:
        first, second = await ask(engine, f"{COMPLETIONS}/render", prompt=[[9, 8], list(PROMPT)])
        assert [first["token_ids"], second["token_ids"]] == [[9, 8], list(PROMPT)]
        assert first["request_id"].endswith("-0")
        assert second["request_id"].endswith("-1")
        assert "max_tokens" not in first["sampling_params"]  # 16, vLLM's default, is omitted
        for path, body in ((COMPLETIONS, {"prompt": ""}), (CHAT, {"messages": []})):
            assert (await post(engine, f"{path}/render", body))[0] == 400
            assert (await post(engine, f"{path}/render", {"prompt": TEXT, "messages": MESSAGES, "model": "x"}))[
                0
            ] == 404

    async def test_derender_equals_the_completion(self, engine: Engine, bench: EngineUnderTest) -> None:
        whole = await bench.run(TEXT, chat=True, max_tokens=20)
        prompt = list(whole.prompt_token_ids or ())
        params = {"max_tokens": 20, **GREEDY}
        generated = await ask(engine, GENERATE, token_ids=prompt, sampling_params=params, request_id="mine")
        # A server with a tool parser needs the request.
        asked = {"chat_request": {"messages": MESSAGES}, "prompt_token_ids": prompt}
        chat = await ask(engine, f"{CHAT}/derender", generate_response=generated, prompt_tokens=len(prompt), **asked)
        assert shape_of(chat) == DERENDERED_CHAT
        assert chat["id"] == "generate-tokens-mine"
        assert chat["choices"][0]["message"]["content"] == whole.text
        assert chat["usage"] == generated["usage"]
        completion = await ask(engine, f"{COMPLETIONS}/derender", generate_responses=[generated, generated])
        assert shape_of(completion) == DERENDERED_COMPLETION
        assert [choice["text"] for choice in completion["choices"]] == [whole.text] * 2
        assert completion["usage"]["completion_tokens"] == 40
        params["logprobs"] = 1
        generated = await ask(engine, GENERATE, token_ids=prompt, sampling_params=params)
        chat = await ask(engine, f"{CHAT}/derender", generate_response=generated, **asked)
        assert logprobs_shape(chat["choices"][0]["logprobs"]["content"]) == TEXT_LOGPROBS
        completion = await ask(engine, f"{COMPLETIONS}/derender", generate_responses=[generated])
        body = {"prompt": prompt, "max_tokens": 20, "logprobs": 1, **GREEDY}
        (choice,) = (await ask(engine, COMPLETIONS, **body))["choices"]
        assert completion["choices"][0]["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
        assert (await post(engine, f"{COMPLETIONS}/derender", {"generate_responses": []}))[0] == 400
        assert (await post(engine, f"{CHAT}/derender", {"generate_response": {"choices": 3}}))[0] == 400
