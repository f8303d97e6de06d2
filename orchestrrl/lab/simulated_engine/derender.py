"""Convert whole responses with token ids to completions and chats, as vLLM's derender endpoints do. The functions have
no side effects. Stream events are not supported."""

from itertools import accumulate
from typing import Any, Literal

from pydantic import BaseModel

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.lab.simulated_engine.generate import usage_with_details
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.refusals import refusal, validated
from orchestrrl.lab.simulated_engine.responses import logprob_entry, usage_of
from orchestrrl.lab.simulated_engine.sampling import TokenIds, check_model
from orchestrrl.lab.simulated_engine.tokens import TokenModel


class _TokenLogprob(BaseModel):
    token_id: int
    logprob: float


class _GeneratedLogprob(_TokenLogprob):
    top_logprobs: list[_TokenLogprob] = []


class _GeneratedLogprobs(BaseModel):
    content: list[_GeneratedLogprob] | None = None


class _GeneratedChoice(BaseModel):
    index: int
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: TokenIds | None = None
    logprobs: _GeneratedLogprobs | None = None


class _Generated(BaseModel):
    request_id: str = ""
    output_mode: Literal["tokens"] = "tokens"
    choices: list[_GeneratedChoice]


class _DerenderBody(BaseModel):
    stream: Literal[False] = False
    model: str | None = None


class _DerenderChat(_DerenderBody):
    generate_response: _Generated
    prompt_tokens: int | None = None


class _DerenderCompletion(_DerenderBody):
    generate_responses: list[_Generated]
    prompt_tokens: list[int] | None = None


def derender(
    endpoint: CompletionEndpoint, body: Any, created: int, options: SimulatedOptions, model: TokenModel
) -> dict[str, Any]:
    """Return the chat or completion for answers of `/inference/v1/generate`. Raises RequestRefused if the body is
    invalid."""
    if endpoint is CompletionEndpoint.CHAT:
        chat = validated(_DerenderChat, body)
        check_model(chat.model, options)
        generated, prompt_tokens, kind = [chat.generate_response], chat.prompt_tokens or 0, "chat.completion"
        of_chat = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
    else:
        completion = validated(_DerenderCompletion, body)
        check_model(completion.model, options)
        generated, counts = completion.generate_responses, completion.prompt_tokens
        if not generated:
            raise refusal("generate_responses must not be empty")
        if counts is not None and len(counts) != len(generated):
            raise refusal(
                f"prompt_tokens length ({len(counts)}) must equal generate_responses length ({len(generated)})", "body"
            )
        prompt_tokens, kind, of_chat = sum(counts or ()), "text_completion", {}
    choices = [choice for each in generated for choice in each.choices]
    formatted = [(_chat_choice if of_chat else _completion_choice)(choice, model) for choice in choices]
    usage = usage_of(prompt_tokens, sum(len(choice.token_ids or ()) for choice in choices))
    return {
        "id": generated[0].request_id,
        "object": kind,
        "created": created,
        "model": options.model_name,
        "choices": formatted,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage_with_details(usage),
        **of_chat,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _chat_choice(choice: _GeneratedChoice, model: TokenModel) -> dict[str, Any]:
    absent = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    logprobs = None
    if choice.logprobs is not None:
        content = [
            {**_entry(item, model), "top_logprobs": [_entry(top, model) for top in item.top_logprobs]}
            for item in choice.logprobs.content or ()
        ]
        logprobs = {"content": content}
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": model.detokenize(choice.token_ids or ()), **absent},
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": None,
        "routed_experts": None,
    }


def _completion_choice(choice: _GeneratedChoice, model: TokenModel) -> dict[str, Any]:
    logprobs: dict[str, Any] | None = None
    if choice.logprobs is not None:
        content = choice.logprobs.content or ()
        tokens = [model.detokenize([item.token_id]) for item in content]
        tops = [{model.detokenize([top.token_id]): top.logprob for top in item.top_logprobs} for item in content]
        logprobs = {
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)],
            "token_logprobs": [item.logprob for item in content],
            "tokens": tokens,
            "top_logprobs": [top or None for top in tops],
        }
    return {
        "index": choice.index,
        "text": model.detokenize(choice.token_ids or ()),
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "routed_experts": None,
    }


def _entry(item: _TokenLogprob, model: TokenModel) -> dict[str, Any]:
    return logprob_entry(model.detokenize([item.token_id]), item.logprob)
