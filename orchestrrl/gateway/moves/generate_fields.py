"""The fields of requests to vLLM's endpoint /inference/v1/generate, and the decision whether such a request may move.
The functions have no side effects."""

from collections.abc import Callable, Mapping
from typing import Any

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.http.field_types import name_set

SAMPLING_PARAMS = "sampling_params"
TEXT_MODE = "text"
OUTPUT_MODES = ("tokens", TEXT_MODE)
# With one of these, the prompt does not consist of the given tokens alone.
MULTIMODAL_FIELDS = ("features", "content_parts")

# Fields of the body on which the answer's tokens do not depend, or only by their effect on the whole context. The last
# two concern structured output and thinking budgets, which make a request immovable.
_PORTABLE = name_set(
    """
    cache_salt model output_mode priority return_token_ids sampling_params token_ids token_offsets
    reasoning_ended reasoning_parser_kwargs
    """
)
# The same for `sampling_params`, without the fields that completions have too. vLLM overwrites `output_kind`. Only
# engines that return routed experts read `routed_experts_prompt_start`, and their answers make the request immovable.
_PORTABLE_SAMPLING = name_set(
    """
    detokenize flat_logprobs output_kind prompt_logprob_start routed_experts_prompt_start skip_clone
    skip_reading_prefix_cache
    """
)

Rule = Callable[[CompletionEndpoint, Mapping[str, Any]], str]


def sampling_params(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object `sampling_params` of the body, or an empty mapping if it is missing or invalid."""
    params = body.get(SAMPLING_PARAMS)
    return params if isinstance(params, Mapping) else {}


def apply_rule(rule: Rule, body: Mapping[str, Any]) -> str:
    """Apply a rule for completions to the sampling parameters and to the other fields. Return the first reason that the
    rule gives, or "" if it gives none."""
    sampling = {name: value for name, value in sampling_params(body).items() if name not in _PORTABLE_SAMPLING}
    if because := rule(CompletionEndpoint.COMPLETIONS, sampling):
        return f"{SAMPLING_PARAMS}.{because}"
    others = {name: value for name, value in body.items() if name not in _PORTABLE and name not in MULTIMODAL_FIELDS}
    return rule(CompletionEndpoint.COMPLETIONS, others)


def is_multimodal(body: Mapping[str, Any]) -> bool:
    """Return whether the prompt has images, audio or video."""
    return any(body.get(name) for name in MULTIMODAL_FIELDS)


def bound_because(body: Mapping[str, Any]) -> str:
    """Return the reason why a request that the rules for completions allow to move may not move, or ""."""
    if (name := next((name for name in MULTIMODAL_FIELDS if body.get(name)), None)) is not None:
        return f"{name}: images, audio and video do not consist of tokens"
    if sampling_params(body).get("stop") and body.get("output_mode") != TEXT_MODE:
        return (
            f"{SAMPLING_PARAMS}.stop: stop strings are matched in text, which the answer has only with output_mode text"
        )
    return ""


def continued_generate(body: Mapping[str, Any], token_ids: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body that continues after the last of `token_ids`. `sampling` has the sampling parameters for the
    rest of the answer. The character offsets of the prompt's tokens are omitted, because vLLM ignores them and they do
    not cover the answer."""
    kept = {name: value for name, value in body.items() if name != "token_offsets"}
    return {**kept, "token_ids": token_ids, SAMPLING_PARAMS: dict(sampling)}
