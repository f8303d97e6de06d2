"""Decide whether a request may continue on another engine without changing its answer, and build the body with which
the request continues. The functions have no side effects.

A continued request is a completion whose prompt is the original prompt plus every token generated so far. The answer
stays the same if the next token depends only on the whole context, and not on the position where the answer began.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from orchestrrl.core.errors import cut, path_of
from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.http.field_types import TYPED_FIELDS, name_set
from orchestrrl.gateway.moves.generate_fields import apply_rule, bound_because, continued_generate, sampling_params
from orchestrrl.gateway.moves.reseed import drawing_seed, seed_at

# OpenAI's default for completions, which vLLM follows. A chat answer may fill the engine's context.
DEFAULT_COMPLETION_TOKENS = 16
# The largest number that reports to the daemon can contain. Every context is shorter.
MOST_TOKENS = 2**32 - 1

# Fields that, when enabled, make an answer depend on the position where it began.
_TIED: Mapping[str, str] = {
    # vLLM counts these over generated tokens only; after a move the earlier ones would count as prompt. (A repetition
    # penalty counts prompt and answer alike, so it does not change.)
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty"), "the next engine would not count the tokens generated before"
    ),
    # The automaton of a grammar starts at the first generated token.
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "the next engine would start the grammar over",
    ),
    # Parsers of tool calls and of reasoning read the answer from its beginning, and only for chat.
    "tools": "the engine parses tool calls from the answer's beginning",
    "thinking_token_budget": "the budget counts from where the answer began",
    # Bad words of several tokens are matched against generated tokens only.
    "bad_words": "a bad word may span the cut",
    "repetition_detection": "counts generated tokens only",
    # The user's own code may keep state that the gateway cannot read.
    **dict.fromkeys(("logits_processors", "vllm_xargs", "extra_args"), "custom code may keep state"),
    "output_text_buffer_length": "the withheld text is lost",
    "trace_decode_token_ids": "the given tokens are counted from where the answer began",
    "watermarking": "the watermark depends on where the answer began",
    # The prompt is not a list of token ids.
    "prompt_embeds": "the prompt does not consist of tokens",
}
_CONDITIONAL = frozenset({"seed", "best_of", "response_format"})
_LOOKED_AT = frozenset(_TIED) | _CONDITIONAL

# Fields that need the engine's own answer: the body is sent unchanged, and the answer is relayed.
_RELAYED: Mapping[str, str] = {
    "echo": "the answer begins with the prompt",
    **dict.fromkeys(
        ("prompt_logprobs", "prompt_logprob_token_ids"),
        "only the engine's own whole answer contains the prompt's logprobs",
    ),
    "routed_experts_prompt_start": "only the engine's own whole answer contains routed experts",
    "logprob_token_ids": "only the engine's own answer contains logprobs of these tokens",
    # Several hypotheses are alive at once, and one is chosen at the end.
    "use_beam_search": "a beam has no single sequence of tokens to continue",
    # Another program transfers this request's KV between engines, and reads the transfer's parameters in the answer.
    "kv_transfer_params": "the engine's own answer describes its KV",
    "ec_transfer_params": "the engine's own answer describes its encoder cache",
}
_ASKED_BY_ZERO = frozenset({"prompt_logprobs", "routed_experts_prompt_start"})
_ASKS_FOR_MORE = "return_"  # the prefix of fields that request data in the answer

# Fields that engines are known to read: those whose type is checked, and those of any type. Any other field may make
# an answer depend on the position where it began.
_OF_ANY_TYPE = name_set(
    """
    metadata mm_payload on_stale prompt reasoning_effort return_mm_kwargs safety_identifier service_tier store
    truncation_side
    """
)
KNOWN_FIELDS = _LOOKED_AT | frozenset(_RELAYED) | TYPED_FIELDS | _OF_ANY_TYPE

# Answer fields that do not bind the answer to its engine. The last value of these is valid for the whole answer ...
PORTABLE_FIELDS = frozenset({"system_fingerprint", "service_tier", "matched_stop"})
# ... and the others describe one attempt, so they are omitted from an answer of several attempts.
UNTIED_FIELDS = PORTABLE_FIELDS | {"metrics", "prompt_text"}

# Choice fields of the generate endpoint with entries for tokens or spans of tokens, which are joined over the attempts.
JOINED_FIELDS = frozenset({"sampling_mask", "weight_versions"})

# Fields of the chat endpoint only. The prompt's tokens already contain their effect, and logprobs have another form.
_CHAT_ONLY = name_set(
    """
    messages max_completion_tokens logprobs top_logprobs tools tool_choice parallel_tool_calls reasoning_effort
    include_reasoning add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs return_prompt_text
    """
)
# The first engine has already truncated and completed the prompt; a second time would change it.
_PROMPT_SHAPING = name_set("prompt suffix truncate_prompt_tokens truncation_side add_special_tokens")


def sampling_fields(endpoint: CompletionEndpoint, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields that control sampling. Completions and chats have them in the body itself, and the generate
    endpoint in the object `sampling_params`."""
    return sampling_params(body) if endpoint is CompletionEndpoint.GENERATE else body


def immovable_because(endpoint: CompletionEndpoint, body: Mapping[str, Any], *, reseed: bool = False) -> str:
    """Return the reason why a running request may not continue on another engine, or "" if it may continue. `reseed` is
    True if seeded sampling may continue with another seed (reseed.py)."""
    if endpoint is CompletionEndpoint.GENERATE:
        return apply_rule(partial(immovable_because, reseed=reseed), body) or bound_because(body)
    if relayed := relayed_because(endpoint, body):
        return relayed
    for name in sorted(body.keys() & _LOOKED_AT):
        value = body[name]
        if name in _TIED:
            if value and not (name == "tools" and body.get("tool_choice") == "none"):
                return f"{name}: {_TIED[name]}"
        elif name == "best_of" and isinstance(value, int) and value > 1:
            return "best_of: several answers are generated and one is chosen at the end"
        elif name == "response_format" and isinstance(value, Mapping) and value.get("type") != "text":
            return "response_format: the next engine would start the grammar over"
        elif name == "seed" and not reseed and drawing_seed(body) is not None:
            return "seed: the seeded draws would start over; start the gateway with --reseed or send X-Reseed: true"
    if endpoint is CompletionEndpoint.CHAT and _has_media(body.get("messages")):
        return "messages: images, audio and video do not consist of tokens"
    unknown = min((name for name in body if name not in KNOWN_FIELDS and body[name] is not None), default=None)
    return "" if unknown is None else f"{cut(path_of((unknown,)))}: is unknown and may depend on where the answer began"


def parsed_after_moves(endpoint: CompletionEndpoint, body: Mapping[str, Any], *, reseed: bool = False) -> bool:
    """Return whether a request with `tools` may continue on another engine if an engine parses its whole answer."""
    if endpoint is not CompletionEndpoint.CHAT or not body.get("tools") or body.get("stream"):
        return False
    # With a required tool, a grammar constrains the answer. An answer without its reasoning lacks token ids.
    if body.get("tool_choice") not in (None, "auto") or body.get("include_reasoning") is False or body.get("stop"):
        return False
    return not immovable_because(endpoint, {**body, "tools": None}, reseed=reseed)


def relayed_because(endpoint: CompletionEndpoint, body: Mapping[str, Any]) -> str:
    """Return the reason why the body must be sent unchanged and the engine's answer relayed, or "" if that is not
    necessary. A relayed request stays on its engine."""
    if endpoint is CompletionEndpoint.GENERATE:
        return apply_rule(relayed_because, body)
    for name, value in body.items():
        if name in _RELAYED:
            if value is not None if name in _ASKED_BY_ZERO else value:
                return f"{name}: {_RELAYED[name]}"
        elif name.startswith(_ASKS_FOR_MORE) and name not in KNOWN_FIELDS and value:
            return f"{cut(path_of((name,)))}: is unknown and may request data of the engine's own answer"
    if endpoint is not CompletionEndpoint.CHAT:
        return ""
    if body.get("return_tokens_as_token_ids") and body.get("logprobs"):
        return "return_tokens_as_token_ids: only the engine's own answer contains the bytes of these tokens"
    if body.get("tools") and not body.get("stream") and body.get("tool_choice") not in (None, "auto", "none"):
        return "tool_choice: the engine parses an answer that is not streamed differently"
    return ""


def _has_media(messages: object) -> bool:
    if not isinstance(messages, list):
        return False
    return any(
        isinstance(part, Mapping) and part.get("type") not in ("text", None)
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def max_answer_tokens(endpoint: CompletionEndpoint, body: Mapping[str, Any]) -> int | None:
    """Return the maximum number of tokens of the answer. Return None if only the engine's context length limits the
    answer, or if the requested limit is invalid. The engine reports an invalid limit."""
    asked = sampling_fields(endpoint, body).get("max_tokens")
    if endpoint is CompletionEndpoint.CHAT and body.get("max_completion_tokens") is not None:
        asked = body["max_completion_tokens"]
    if asked is None and endpoint is CompletionEndpoint.COMPLETIONS:
        return DEFAULT_COMPLETION_TOKENS
    return asked if isinstance(asked, int) and 0 <= asked <= MOST_TOKENS else None


def continued(
    endpoint: CompletionEndpoint,
    body: Mapping[str, Any],
    prompt_ids: Sequence[int],
    generated_ids: Sequence[int],
    max_tokens: int,
) -> dict[str, Any]:
    """Return the body that continues after `generated_ids`: of a request to the generate endpoint if `endpoint` is that
    endpoint, else of a completion. `max_tokens` is the limit for the whole answer and must exceed the number of
    generated tokens."""
    dropped = _PROMPT_SHAPING | _CHAT_ONLY if endpoint is CompletionEndpoint.CHAT else _PROMPT_SHAPING
    sampling = continued_sampling(sampling_fields(endpoint, body), len(generated_ids), max_tokens)
    if endpoint is CompletionEndpoint.GENERATE:
        return continued_generate(body, [*prompt_ids, *generated_ids], sampling)
    new = {name: value for name, value in sampling.items() if name not in dropped}
    new["prompt"] = [*prompt_ids, *generated_ids]
    # The ids already contain the special tokens at the start of the prompt.
    new["add_special_tokens"] = False
    if endpoint is CompletionEndpoint.CHAT and body.get("logprobs"):
        new["logprobs"] = body.get("top_logprobs") or 0
    return new


def continued_sampling(sampling: Mapping[str, Any], position: int, max_tokens: int) -> dict[str, Any]:
    """Return the sampling fields of a request that continues after `position` generated tokens. `max_tokens` is the
    limit for the whole answer. The gateway matches the stop strings itself."""
    new = {**sampling, "max_tokens": max_tokens - position}
    new.pop("stop", None)
    if isinstance(sampling.get("min_tokens"), int):
        new["min_tokens"] = max(0, sampling["min_tokens"] - position)
    if (seed := drawing_seed(sampling)) is not None:
        new["seed"] = seed_at(seed, position)
    return new
