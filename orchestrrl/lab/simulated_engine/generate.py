"""Parse and format `/inference/v1/generate`, vLLM's endpoint with tokens in and out. The module has no side effects.

The shapes are those of vLLM's entrypoints/scale_out/token_in_token_out/protocol.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from orchestrrl.lab.simulated_engine.endings import AnswerPart, ResponseText
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.refusals import refusal, validated
from orchestrrl.lab.simulated_engine.requests import StreamOptions
from orchestrrl.lab.simulated_engine.responses import DONE, TokenFormatter, event, usage_of
from orchestrrl.lab.simulated_engine.sampling import (
    Alternatives,
    SamplingBody,
    SimulatedRequest,
    TokenIds,
    check_model,
    check_token_ids,
    limit_tokens,
    requests_for,
)
from orchestrrl.lab.simulated_engine.tokens import TokenModel, likeliest


class _SamplingParams(SamplingBody):
    logprobs: Alternatives | None = None
    detokenize: bool = True


class _GenerateBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    token_ids: Annotated[TokenIds, Field(min_length=1)]
    sampling_params: _SamplingParams
    request_id: str | None = None
    model: str | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    features: None = None  # of multi-modal inputs
    content_parts: Annotated[list[Any], Field(max_length=0)] | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SimulatedGenerate:
    """A validated call of `/inference/v1/generate`, with one request for each choice."""

    body: _GenerateBody
    requests: list[SimulatedRequest]


def read_generate(body: Any, options: SimulatedOptions, model: TokenModel) -> SimulatedGenerate:
    """Parse a `/inference/v1/generate` body. Raises RequestRefused if it is invalid or unsupported."""
    read = validated(_GenerateBody, body)
    params = read.sampling_params
    check_model(read.model, options)
    if (params.stop_strings or read.output_mode == "text") and not params.detokenize:
        raise refusal("stop strings and output_mode='text' require sampling_params.detokenize to be true.")
    if (params.n or 1) > options.max_num_seqs:
        limit = f"the server's max_num_seqs ({options.max_num_seqs})"
        raise refusal(f"sampling_params.n must be at most {limit}, got {params.n}.")
    check_token_ids(read.token_ids, model)
    max_tokens = limit_tokens(params.max_tokens, len(read.token_ids), options.max_model_len_tokens)
    requests = requests_for(params, read.token_ids, max_tokens, params.logprobs, read.kv_transfer_params)
    return SimulatedGenerate(read, requests)


class GenerateFormatter:
    """Formats the answer to a `/inference/v1/generate` call."""

    def __init__(
        self, call: SimulatedGenerate, request_id: str, created: int, model_name: str, model: TokenModel
    ) -> None:
        self._body = call.body
        self._vocab_size = model.vocab_size
        self._tokens = TokenFormatter(model)
        self._texts = [ResponseText(request, model) for request in call.requests]
        self._made = [0] * len(call.requests)
        self._head = {"request_id": request_id, "model": model_name, "created": created}
        self._stream_head = {"request_id": request_id}
        self._is_first = True

    def opening(self) -> list[bytes]:
        return []

    def part(self, choice: int, part: AnswerPart) -> bytes:
        formatted = self._choice(choice, part)
        options, usage, prompt = self._body.stream_options, None, {}
        if options is not None and options.continuous_usage_stats:
            usage = usage_with_details(self._usage(self._made[choice]))
        if self._is_first and self._body.return_token_ids:
            prompt = {"prompt_token_ids": self._body.token_ids}
        self._is_first = False
        return self._event([formatted], usage=usage, **prompt)

    def closing(self) -> list[bytes]:
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return [DONE]
        return [self._event([], usage=self._usage(sum(self._made))), DONE]

    def whole(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        choices = [self._choice(choice, part) for choice, part in enumerate(parts)]
        alternatives = self._body.sampling_params.prompt_logprobs
        return {
            **self._head,
            "usage": usage_with_details(self._usage(sum(self._made))),
            "prompt_logprobs": (
                None if alternatives is None else self._tokens.prompt_logprobs(self._body.token_ids, alternatives)
            ),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": self._body.token_ids if self._body.return_token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": self._body.output_mode,
            "choices": choices,
        }

    def _event(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        return event({**self._stream_head, **fields, "output_mode": self._body.output_mode, "choices": choices})

    def _choice(self, choice: int, part: AnswerPart) -> dict[str, Any]:
        self._made[choice] += len(part.token_ids)
        text = {"text": self._texts[choice].add(part)} if self._body.output_mode == "text" else {}
        return {
            "index": choice,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            "token_ids": part.token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": self._versions(choice, part),
            **text,
            "logprobs": self._logprobs(part),
        }

    def _versions(self, choice: int, part: AnswerPart) -> list[dict[str, Any]] | None:
        if part.finish_reason is None:
            return None
        ends = [*(start for _, start in part.weight_versions[1:]), self._made[choice]]
        spans = zip(part.weight_versions, ends, strict=False)  # without tokens, there is no version
        return [{"version": version, "start": start, "end": end} for (version, start), end in spans]

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        return usage_of(len(self._body.token_ids), completion_tokens)

    def _logprobs(self, part: AnswerPart) -> dict[str, Any] | None:
        count = self._body.sampling_params.logprobs
        if count is None:
            return None
        shown = max(count, 1)  # as in vLLM, the generated token is listed even without alternatives
        if self._body.output_mode == "text":
            return self._tokens.chat_logprobs(part, shown)
        content = []
        for token, logprob in zip(part.token_ids, part.logprobs, strict=True):
            rows = [_ranked(*row) for row in likeliest(token, logprob, count, self._vocab_size)]
            content.append({**rows[0], "top_logprobs": rows[:shown]})
        return {"content": content}


def _ranked(token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"token_id": token, "logprob": logprob, "rank": rank}


def usage_with_details(usage: dict[str, int]) -> dict[str, Any]:
    return {**usage, "prompt_tokens_details": None, "completion_tokens_details": None}
