"""The decision whether a request may continue on another engine, and the body that continues it."""

from typing import Any

import pytest

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.moves.movable import continued, immovable_because, max_answer_tokens, relayed_because

COMPLETIONS, CHAT = CompletionEndpoint.COMPLETIONS, CompletionEndpoint.CHAT


@pytest.mark.parametrize(
    "body",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"structured_outputs": {"json": {}}},
        {"guided_json": {"type": "object"}},
        {"guided_regex": "a+"},
        {"guided_choice": ["a"]},
        {"guided_grammar": "root"},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function"}], "tool_choice": "auto"},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 3},
        {"use_beam_search": True},
        {"best_of": 2},
        {"bad_words": ["x y"]},
        {"logits_processors": ["f"]},
        {"vllm_xargs": {"a": 1}},
        {"thinking_token_budget": 10},
        {"repetition_detection": {"n": 1}},
        {"prompt_embeds": "..."},
        {"kv_transfer_params": {"a": 1}},
        {"ec_transfer_params": {"a": 1}},
        {"logprob_token_ids": [3]},
        {"routed_experts_prompt_start": 0},
        {"return_nothing_known": True},
        {"not_known": 0},
        {"seed": 7},
        {"seed": 7, "temperature": 0.6},
    ],
)
def test_requests_bound_to_the_answer_start_are_immovable_with_a_reason(body: dict[str, Any]) -> None:
    because = immovable_because(COMPLETIONS, body)
    assert because.split(":")[0] in body


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 4, "min_p": 0.1},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "stop": [], "stop_token_ids": [3], "min_tokens": 4},
        {"repetition_penalty": 1.2, "logit_bias": {"3": 1.0}, "allowed_token_ids": [1, 2], "ignore_eos": True},
        {"seed": 7, "temperature": 0},
        {"seed": None, "response_format": {"type": "text"}, "best_of": 1, "echo": False, "use_beam_search": False},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"logprobs": 3, "skip_special_tokens": False},
        {"prompt_logprobs": None, "kv_transfer_params": {}, "routed_experts_prompt_start": None, "not_known": None},
        {"return_token_ids": True, "return_tokens_as_token_ids": True, "return_prompt_text": True, "user": "u"},
    ],
)
def test_requests_that_depend_only_on_context_are_movable(body: dict[str, Any]) -> None:
    assert immovable_because(COMPLETIONS, body) == ""


@pytest.mark.parametrize(
    ("endpoint", "body", "name"),
    [
        (COMPLETIONS, {"echo": True, "logprobs": 1, "max_tokens": 0}, "echo"),
        (COMPLETIONS, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS, {"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        (COMPLETIONS, {"routed_experts_prompt_start": 0}, "routed_experts_prompt_start"),
        (COMPLETIONS, {"return_nothing_known": 1}, "return_nothing_known"),
        (CHAT, {"logprobs": True, "return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        (COMPLETIONS, {"logprobs": 1, "return_tokens_as_token_ids": True}, ""),
        (COMPLETIONS, {"echo": False, "stop": "x", "not_known": 1, "return_token_ids": True}, ""),
        (COMPLETIONS, {"return_nothing_known": False}, ""),
    ],
)
def test_requests_for_engine_only_data_are_relayed(
    endpoint: CompletionEndpoint, body: dict[str, Any], name: str
) -> None:
    assert relayed_because(endpoint, body).split(":")[0] == name


def test_requests_with_media_are_immovable() -> None:
    text = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert immovable_because(CHAT, {"messages": [text, {"role": "assistant", "content": None}]}) == ""
    assert "messages" in immovable_because(CHAT, {"messages": [text, image]})


@pytest.mark.parametrize(
    ("endpoint", "body", "tokens"),
    [
        (COMPLETIONS, {}, 16),
        (COMPLETIONS, {"max_tokens": None}, 16),
        (COMPLETIONS, {"max_tokens": 7}, 7),
        (CHAT, {}, None),
        (CHAT, {"max_tokens": 7}, 7),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 9}, 9),
        (CHAT, {"max_tokens": "many"}, None),
        (COMPLETIONS, {"max_tokens": -1}, None),
        (COMPLETIONS, {"max_tokens": 2**32 - 1}, 2**32 - 1),
        (COMPLETIONS, {"max_tokens": 2**32}, None),
    ],
)
def test_max_answer_tokens(endpoint: CompletionEndpoint, body: dict[str, Any], tokens: int | None) -> None:
    assert max_answer_tokens(endpoint, body) == tokens


def test_completion_continues_with_the_same_parameters() -> None:
    body = {"model": "m", "prompt": "hi", "temperature": 0.5, "max_tokens": 10, "min_tokens": 2, "logprobs": 1}
    new = continued(COMPLETIONS, {**body, "truncate_prompt_tokens": 5, "suffix": "x"}, [1, 2], [3, 4, 5], 10)
    assert new == {
        "model": "m",
        "prompt": [1, 2, 3, 4, 5],
        "temperature": 0.5,
        "max_tokens": 7,
        "min_tokens": 0,
        "logprobs": 1,
        "add_special_tokens": False,
    }


def test_chat_continues_as_a_completion() -> None:
    body = {"messages": [], "max_completion_tokens": 10, "logprobs": True, "chat_template_kwargs": {}, "top_p": 0.5}
    assert continued(CHAT, body, [1], [2], 10) == {
        "prompt": [1, 2],
        "max_tokens": 9,
        "logprobs": 0,
        "top_p": 0.5,
        "add_special_tokens": False,
    }
    assert continued(CHAT, {**body, "top_logprobs": 4}, [1], [2], 10)["logprobs"] == 4
    assert "logprobs" not in continued(CHAT, {**body, "logprobs": False}, [1], [2], 10)
