"""Render prompts to token ids, as vLLM's render endpoints do. The functions have no side effects."""

from typing import Any

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.requests import SimulatedCompletion, read_completion
from orchestrrl.lab.simulated_engine.sampling import SimulatedRequest
from orchestrrl.lab.simulated_engine.tokens import TokenModel

FINAL_ONLY, DELTA = 2, 1  # vLLM's RequestOutputKind
# vLLM omits sampling parameters with these values.
OMITTED = {
    "n": 1,
    "seed": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "include_stop_str_in_output": False,
}


def render(
    endpoint: CompletionEndpoint, body: Any, request_id: str, options: SimulatedOptions, model: TokenModel
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the body of `/inference/v1/generate` for a chat, or one body for each prompt of a completion. Raises
    RequestRefused if the body of the completion or chat is invalid."""
    completion = read_completion(endpoint, body, options, model)
    first_choices = completion.requests[:: completion.choices]
    if endpoint is CompletionEndpoint.CHAT:
        return _generate_request(completion, first_choices[0], request_id)
    ids = [f"{request_id}-{index}" for index in range(len(first_choices))] if len(first_choices) > 1 else [request_id]
    return [_generate_request(completion, request, each) for request, each in zip(first_choices, ids, strict=True)]


def _generate_request(completion: SimulatedCompletion, request: SimulatedRequest, request_id: str) -> dict[str, Any]:
    body = completion.body
    stream_options = None if not body.stream or body.stream_options is None else body.stream_options.model_dump()
    return {
        "request_id": request_id,
        "token_ids": list(request.prompt_ids),
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": _sampling_params(completion, request),
        "model": body.model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": body.stream,
        "stream_options": stream_options,
        "cache_salt": None,
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _sampling_params(completion: SimulatedCompletion, request: SimulatedRequest) -> dict[str, Any]:
    body = completion.body
    varying = {
        "n": completion.choices,
        "seed": body.used_seed,
        "ignore_eos": request.ignore_eos,
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "logprobs": request.top_logprobs,
        "prompt_logprobs": body.prompt_logprobs,
        "include_stop_str_in_output": request.include_stop,
    }
    return {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": body.used_temperature,
        **({"top_p": 1.0 if body.top_p is None else body.top_p, "min_p": 0.0} if body.used_temperature else {}),
        "stop": list(request.stop),
        "stop_token_ids": sorted(request.stop_token_ids),
        "output_kind": DELTA if body.stream else FINAL_ONLY,
        "skip_clone": True,
        "bad_words": [],
        "skip_reading_prefix_cache": body.prompt_logprobs is not None,
        **{name: value for name, value in varying.items() if value != OMITTED[name]},
    }
