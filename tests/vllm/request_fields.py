"""Request fields of vLLM's generation endpoints, each with a value whose effect the tests show on a bare server.

tests/vllm/test_gateway_parity_vllm.py compares a bare server with the gateway for each field and for pairs of fields.
tests/docs/reference_pages.py writes docs/reference/request-fields.md.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from orchestrrl.engines.base import CompletionEndpoint

SCHEMAS = {
    CompletionEndpoint.COMPLETIONS: "CompletionRequest",
    CompletionEndpoint.CHAT: "ChatCompletionRequest",
    CompletionEndpoint.GENERATE: "GenerateRequest",
}
_GREEDY = {"temperature": 0, "max_tokens": 12}
MESSAGES = [{"role": "user", "content": "Hello"}]
BASES: Mapping[CompletionEndpoint, Mapping[str, Any]] = {
    CompletionEndpoint.COMPLETIONS: {"model": "tiny", "prompt": "Hello world", **_GREEDY},
    CompletionEndpoint.CHAT: {"model": "tiny", "messages": MESSAGES, **_GREEDY},
    CompletionEndpoint.GENERATE: {"model": "tiny", "token_ids": [40, 41, 42], "sampling_params": _GREEDY},
}


class RequestField(NamedTuple):
    """One field with a value to try. `base` holds the other fields that the value needs for an effect."""

    name: str
    value: Any
    base: Mapping[str, Any] = {}
    no_effect: str = ""  # why the value does not change the bare server's answer; empty: it does


# --- values that several endpoints accept

_SAMPLED = {"temperature": 1.0, "seed": 3}
_BEAMS = {"use_beam_search": True, "n": 2}
_ENDS_AT_ONCE = {"logit_bias": {"1": 100.0}}  # token 1 ends an answer of the tiny model
_REPEATS = {"allowed_token_ids": [70], "max_tokens": 30}
_SPECIAL = {**_SAMPLED, "allowed_token_ids": [0, 70]}  # token 0 is a special token
_STOP = {"stop": ["a", "e", "u"], "max_tokens": 40}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_NO_CONNECTOR = "the server has no connector that reads it"
_RENDERING = "only the endpoints that render a prompt use it"
_CACHE = "it affects caches and scheduling only"
_OWN_ID = "it only names the request"
_TEMPLATE = "{{ messages[0].content }}"


def _templated(template: str) -> dict[str, Any]:
    return {"chat_template": template + _TEMPLATE, "return_token_ids": True}


_SAMPLING = (
    RequestField("allowed_token_ids", [70, 71, 72]),
    RequestField("bad_words", [" lumu", " tegigi", "?", "%", "`", "n"], {"max_tokens": 40}),
    RequestField("frequency_penalty", 1.5, {"max_tokens": 40}),
    RequestField("ignore_eos", True, _ENDS_AT_ONCE),
    RequestField("include_stop_str_in_output", True, _STOP),
    RequestField("logit_bias", {"70": 100.0}),
    RequestField("max_tokens", 3),
    RequestField("min_p", 0.9, _SAMPLED),
    RequestField("min_tokens", 4, _ENDS_AT_ONCE),
    RequestField("n", 2, _SAMPLED),
    RequestField("presence_penalty", 1.5, {"max_tokens": 40}),
    RequestField("prompt_logprobs", 1),
    RequestField("repetition_detection", {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}, _REPEATS),
    RequestField("repetition_penalty", 1.8),
    RequestField("routed_experts_prompt_start", 1, no_effect="the model has no experts"),
    RequestField("seed", 7, _SAMPLED),
    RequestField("skip_special_tokens", False, _SPECIAL),
    RequestField(
        "spaces_between_special_tokens",
        False,
        {**_SPECIAL, "skip_special_tokens": False},
        no_effect="fast tokenizers do not read it",
    ),
    RequestField("stop", ["a", "e", "u"], {"max_tokens": 40}),
    RequestField("stop_token_ids", list(range(100, 512)), {"max_tokens": 40}),
    RequestField("stream_interval", 4, no_effect="it only changes how a stream is divided into events"),
    RequestField("structured_outputs", {"choice": ["ab", "cd"]}),
    RequestField("temperature", 1.0, {"seed": 3}),
    RequestField("thinking_token_budget", 3),
    RequestField("top_k", 1, _SAMPLED),
    RequestField("top_p", 0.01, _SAMPLED),
    RequestField("watermarking", True, no_effect="the server was started without a watermark"),
)
_REQUEST = (
    RequestField("cache_salt", "c", no_effect=_CACHE),
    RequestField("ec_transfer_params", {"a": 1}, no_effect=_NO_CONNECTOR),
    RequestField("kv_transfer_params", {"a": 1}, no_effect=_NO_CONNECTOR),
    RequestField("model", "no-such-model"),
    RequestField("priority", 5, no_effect=_CACHE),
    RequestField("request_id", "abc", no_effect=_OWN_ID),
    RequestField("return_token_ids", True),
    RequestField("stream", True),
    RequestField("stream_options", {"include_usage": True}, {"stream": True}),
)
_OPENAI = (
    *_SAMPLING,
    *_REQUEST,
    RequestField("add_special_tokens", False, no_effect="the tokenizer adds none"),
    RequestField("echo", True),
    RequestField("length_penalty", 0.1, _BEAMS, no_effect="all beams have the same length"),
    RequestField("mm_payload", "none", no_effect=_RENDERING),
    RequestField("response_format", {"type": "json_object"}),
    RequestField("return_mm_kwargs", True, no_effect=_RENDERING),
    RequestField("return_token_offsets", True, no_effect=_RENDERING),
    RequestField("session_id", "s", no_effect=_CACHE),
    RequestField("truncate_prompt_tokens", 1, {"return_token_ids": True}),
    RequestField("truncation_side", "right", {"truncate_prompt_tokens": 1, "return_token_ids": True}),
    RequestField("use_beam_search", True, {**_SAMPLED, "n": 2}),
    RequestField("user", "u", no_effect=_OWN_ID),
    RequestField("vllm_xargs", {"a": 1}, no_effect="no extension of the server reads it"),
)

FIELDS: Mapping[CompletionEndpoint, tuple[RequestField, ...]] = {
    CompletionEndpoint.COMPLETIONS: (
        *_OPENAI,
        RequestField("logprob_token_ids", [3, 4], {"logprobs": 1}),
        RequestField("logprobs", 2),
        RequestField("prompt", "Other"),
        RequestField("prompt", [40, 41, 42]),
        RequestField("prompt", ["a", "b"]),
        RequestField("prompt", [[40, 41], [42]]),
        RequestField("prompt_embeds", "AAAA"),
        RequestField("return_tokens_as_token_ids", True, {"logprobs": 2}),
        RequestField("suffix", "abc"),
    ),
    CompletionEndpoint.CHAT: (
        *_OPENAI,
        RequestField("add_generation_prompt", False, {"return_token_ids": True}),
        RequestField("chat_template", _TEMPLATE, {"return_token_ids": True}),
        RequestField("chat_template_kwargs", {"x": "abc"}, _templated("{{ x }}")),
        RequestField(
            "continue_final_message",
            True,
            {
                "add_generation_prompt": False,
                "messages": [*MESSAGES, {"role": "assistant", "content": "Yes"}],
                "return_token_ids": True,
            },
        ),
        RequestField("documents", [{"title": "t", "text": "x"}], _templated("{{ documents }}")),
        RequestField("include_reasoning", False, no_effect="the server has no reasoning parser"),
        RequestField("logprob_token_ids", [3, 4], {"logprobs": True}),
        RequestField("logprobs", True),
        RequestField("max_completion_tokens", 3),
        RequestField("media_io_kwargs", {"image": {}}),
        RequestField("messages", [{"role": "user", "content": "Other"}]),
        RequestField("mm_processor_kwargs", {"a": 1}),
        RequestField("parallel_tool_calls", False, no_effect="the answer has no tool calls"),
        RequestField("reasoning_effort", "low", _templated("{{ reasoning_effort }}")),
        RequestField("return_prompt_text", True),
        RequestField("return_tokens_as_token_ids", True, {"logprobs": True, "top_logprobs": 1}),
        RequestField(
            "tool_choice", {"type": "function", "function": {"name": "f"}}, {"tools": [_TOOL], "tool_choice": "none"}
        ),
        RequestField("tools", [_TOOL], {"tool_choice": "none", **_templated("{{ tools }}")}),
        RequestField("top_logprobs", 2, {"logprobs": True}),
    ),
    CompletionEndpoint.GENERATE: (
        *_REQUEST,
        RequestField("content_parts", [{"type": "image_url", "url": "data:,"}]),
        RequestField(
            "features",
            {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}},
        ),
        RequestField("output_mode", "text"),
        RequestField("reasoning_ended", True, no_effect="the server has no reasoning parser"),
        RequestField(
            "reasoning_parser_kwargs", {"chat_template_kwargs": {}}, no_effect="the server has no reasoning parser"
        ),
        RequestField("token_ids", [1, 2]),
        RequestField("token_offsets", [[0, 1], [1, 2], [2, 3]], no_effect="the endpoint does not read it"),
        *(
            field._replace(
                name=f"sampling_params.{field.name}",
                base={"output_mode": "text", "sampling_params": field.base},
                no_effect="the endpoint does not read it"
                if field.name == "routed_experts_prompt_start"
                else field.no_effect,
            )
            for field in (
                *_SAMPLING,
                RequestField("detokenize", False),
                RequestField("extra_args", {"a": 1}, no_effect="no extension of the server reads it"),
                RequestField("flat_logprobs", True, {"logprobs": 1}, no_effect="it changes the engine's memory only"),
                RequestField("logprob_token_ids", [3, 4], {"logprobs": 2}),
                RequestField("logprobs", 2),
                RequestField("output_kind", 1, no_effect="the endpoint sets it"),
                RequestField("output_text_buffer_length", 3, no_effect="the engine sets it"),
                RequestField(
                    "prompt_logprob_start",
                    1,
                    {"prompt_logprob_token_ids": [[3]]},
                    no_effect="the server's model runner refuses prompt_logprob_token_ids",
                ),
                RequestField("prompt_logprob_token_ids", [[3]]),
                RequestField("skip_clone", True, no_effect="it changes the engine's memory only"),
                RequestField("skip_reading_prefix_cache", True, no_effect=_CACHE),
                RequestField("trace_decode_token_ids", [3, 4]),
            )
        ),
    ),
}
CASES = tuple((endpoint, field) for endpoint, fields in FIELDS.items() for field in fields)


def body_of(endpoint: CompletionEndpoint, *fields: RequestField, tried: bool = True) -> dict[str, Any]:
    """Return the request with the bases of `fields` and, if `tried` is True, with their values."""
    body: dict[str, Any] = dict(BASES[endpoint])
    parts = [field.base for field in fields] + [_at(field.name, field.value) for field in fields if tried]
    for part in parts:
        sampling = {**body.get("sampling_params", {}), **part.get("sampling_params", {})}
        body |= part
        if sampling:
            body["sampling_params"] = sampling
    return body


def _at(name: str, value: Any) -> dict[str, Any]:
    outer, _, inner = name.rpartition(".")
    return {outer: {inner: value}} if outer else {name: value}


def pairs() -> Iterator[tuple[CompletionEndpoint, RequestField, RequestField]]:
    """Yield all pairs of different fields of one endpoint."""
    for endpoint, fields in FIELDS.items():
        for one, other in itertools.combinations(fields, 2):
            if one.name != other.name:
                yield endpoint, one, other
