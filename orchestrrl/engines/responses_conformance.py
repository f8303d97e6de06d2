"""Conformance tests of `/v1/responses`, and of endpoints that describe the server. Subclass `ResponsesConformance` in a
test module like `EngineConformance`, with an engine of the same kind. A vLLM server needs the options
`--enable-scale-out` and `--enable-tokenizer-info-endpoint`.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from orchestrrl.engines.base import Engine
from orchestrrl.engines.conformance import TEXT, EngineUnderTest, at, post
from orchestrrl.engines.sampling_conformance import CHAT, COMPLETIONS, GENERATE, GREEDY, RESPONSES, ask, get, stream
from orchestrrl.engines.token_endpoint_shapes import (
    RESPONSE,
    RESPONSE_EVENT_SHAPES,
    RESPONSE_EVENTS,
    TEXT_LOGPROBS,
    logprobs_shape,
    shape_of,
)


class ResponsesConformance:
    """Conformance tests of the responses endpoint. Each test finds the engine idle and leaves it idle."""

    @pytest.fixture
    async def bench(self, engine: Engine) -> AsyncIterator[EngineUnderTest]:
        async with at(engine) as bench:
            yield bench

    async def test_responses_equal_chats(self, engine: Engine, bench: EngineUnderTest) -> None:
        chat = await bench.run(TEXT, chat=True, max_tokens=20)
        body = {"input": TEXT, "max_output_tokens": 20, **GREEDY}
        answer = await ask(engine, RESPONSES, **body)
        assert shape_of(answer) == RESPONSE
        assert answer["output"][0]["content"][0]["text"] == chat.text
        assert (answer["status"], answer["max_output_tokens"]) == ("incomplete", 20)
        assert answer["usage"]["input_tokens"] == len(chat.prompt_token_ids or ())
        assert answer["usage"]["output_tokens"] == 20
        parts = [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]
        again = await ask(engine, RESPONSES, **{**body, "input": parts})
        assert again["output"][0]["content"][0]["text"] == chat.text
        instructed = await ask(engine, RESPONSES, **body, instructions="be", metadata={"a": "b"}, user="u")
        assert (instructed["instructions"], instructed["metadata"], instructed["user"]) == ("be", {"a": "b"}, "u")
        assert instructed["usage"]["input_tokens"] > answer["usage"]["input_tokens"]
        with_logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        logprobs = (await ask(engine, RESPONSES, **body, **with_logprobs))["output"][0]["content"][0]["logprobs"]
        assert logprobs_shape(logprobs) == TEXT_LOGPROBS
        assert len(logprobs) == 20

    async def test_responses_stream(self, engine: Engine, bench: EngineUnderTest) -> None:
        body = {"input": TEXT, "max_output_tokens": 60, **GREEDY}
        whole = await ask(engine, RESPONSES, **body)
        events = await stream(engine, RESPONSES, **body)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert tuple(dict.fromkeys(event["type"] for event in events)) == RESPONSE_EVENTS
        by_type = {event["type"]: event for event in events}
        for kind, shape in RESPONSE_EVENT_SHAPES.items():
            assert shape_of(by_type[kind]) == shape
        created = by_type["response.created"]["response"]
        assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
        finished = by_type["response.completed"]["response"]
        assert created["id"] == finished["id"]
        assert finished["output"][0]["content"] == whole["output"][0]["content"]
        assert finished["usage"] == whole["usage"]
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == finished["output"][0]["content"][0]["text"]

    async def test_invalid_responses_are_refused(self, engine: Engine, bench: EngineUnderTest) -> None:
        longest = bench.capabilities.max_model_len_tokens or 0
        too_long = {"input": TEXT, "max_output_tokens": longest + 1}
        invalid: list[dict[str, Any]] = [{}, {"input": []}, {"input": TEXT, "temperature": -1}, too_long]
        for wrong in [*invalid, {"input": TEXT, "max_output_tokens": 0}]:
            assert (await post(engine, RESPONSES, wrong))[0] == 400, wrong
        for name in ("model", "previous_response_id"):
            assert (await post(engine, RESPONSES, {"input": TEXT, name: "none"}))[0] == 404

    async def test_embeddings_are_not_found_on_a_model_that_generates(self, engine: Engine) -> None:
        assert await post(engine, "/v1/embeddings", {"input": TEXT}) == (404, {"detail": "Not Found"})

    async def test_information_about_the_server(self, engine: Engine) -> None:
        parallel = (await get(engine, "/server_info?config_format=json"))["vllm_config"]["parallel_config"]
        world_size = (await get(engine, "/get_world_size?include_dp=false"))["world_size"]
        assert world_size == parallel["tensor_parallel_size"] * parallel["pipeline_parallel_size"]
        assert await get(engine, "/get_world_size") == {"world_size": world_size * parallel["data_parallel_size"]}
        info = await get(engine, "/tokenizer_info")
        assert {
            "tokenizer_class",
            "eos_token",
            "model_max_length",
            "chat_template",
            "added_tokens_decoder",
        } <= info.keys()

    async def test_openapi_page_lists_the_endpoints(self, engine: Engine) -> None:
        paths = (await get(engine, "/openapi.json"))["paths"]
        rendering = [f"{path}/{verb}" for path in (COMPLETIONS, CHAT) for verb in ("render", "derender")]
        others = ("/inference/v1/abort_requests", "/get_world_size", "/tokenizer_info", "/server_info")
        assert {COMPLETIONS, CHAT, GENERATE, RESPONSES, *rendering, *others} <= paths.keys()
