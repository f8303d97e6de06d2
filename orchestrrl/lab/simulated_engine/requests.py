"""Parse requests to the simulated engine: OpenAI bodies, validated as vLLM does. The functions have no side effects.

Features of vLLM that this engine does not implement, such as echo, are rejected.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.refusals import refusal, validated
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
from orchestrrl.lab.simulated_engine.tokens import TURN_END, TURN_START, TokenModel

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for completions; chats have no default limit


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(SamplingBody):
    """The fields that completion and chat requests share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: Literal[False] = False
    kv_transfer_params: dict[str, Any] | None = None


class _CompletionBody(GenerationBody):
    # Token ids come first, because the validation of a long list against each type would take long.
    prompt: Annotated[TokenIds | str | list[str] | list[TokenIds] | None, Field(union_mode="left_to_right")] = None
    logprobs: Alternatives | None = None


class _Part(BaseModel):
    type: str
    text: str = ""


class ChatMessage(BaseModel):
    role: str
    content: str | list[_Part] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class _ChatBody(GenerationBody):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Alternatives | None = None
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class SimulatedCompletion:
    """A validated completion or chat. `requests` has `choices` requests for each prompt, in the order of the answer."""

    endpoint: CompletionEndpoint
    body: GenerationBody
    requests: tuple[SimulatedRequest, ...]

    @property
    def choices(self) -> int:
        return self.body.n or 1


def read_completion(
    endpoint: CompletionEndpoint, body: Any, options: SimulatedOptions, model: TokenModel
) -> SimulatedCompletion:
    """Parse the OpenAI body of a completion or chat, and return its requests. Raises RequestRefused, with vLLM's status
    and an OpenAI error object, if the body is invalid or unsupported."""
    is_chat = endpoint is CompletionEndpoint.CHAT
    read: _CompletionBody | _ChatBody = validated(_ChatBody, body) if is_chat else validated(_CompletionBody, body)
    check_model(read.model, options)
    if read.prompt_logprobs and read.stream:
        raise refusal("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    if isinstance(read, _ChatBody):
        prompts, top_logprobs = [tokenize_chat(read.messages, read.add_generation_prompt, model)], None
        if read.top_logprobs is not None and not read.logprobs:
            raise refusal("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        if read.logprobs:
            top_logprobs = read.top_logprobs or 0
        asked_tokens = read.max_tokens if read.max_completion_tokens is None else read.max_completion_tokens
    else:
        prompts, top_logprobs = _completion_prompts(read, model), read.logprobs
        asked_tokens = read.max_tokens if "max_tokens" in read.model_fields_set else DEFAULT_COMPLETION_TOKENS
    longest = options.max_model_len_tokens
    limits = [limit_tokens(asked_tokens, len(prompt), longest) for prompt in prompts]
    requests = [
        request
        for prompt, limit in zip(prompts, limits, strict=True)
        for request in requests_for(read, prompt, limit, top_logprobs, read.kv_transfer_params)
    ]
    return SimulatedCompletion(endpoint, read, tuple(requests))


def tokenize_chat(messages: list[ChatMessage], add_generation_prompt: bool, model: TokenModel) -> list[int]:
    """Return the token ids of a chat: each message between its start and end tokens. With `add_generation_prompt`, the
    start of the assistant's turn follows. Raises RequestRefused if there are no messages."""
    if not messages:
        raise refusal("Cannot apply chat template to an empty conversation. Provide at least one message.")
    ids: list[int] = []
    for message in messages:
        ids += [TURN_START, *model.tokenize(f"{message.role}\n{message.text}"), TURN_END]
    return [*ids, TURN_START, *model.tokenize("assistant\n")] if add_generation_prompt else ids


def read_tokenize(body: Any, model: TokenModel) -> list[int]:
    """Return the token ids for a `/tokenize` body, which has a `prompt` or `messages`. Raises RequestRefused if the
    body is invalid."""
    if isinstance(body, Mapping) and "messages" in body:
        chat = validated(_ChatBody, body)
        return tokenize_chat(chat.messages, chat.add_generation_prompt, model)
    return model.tokenize(validated(_TokenizeBody, body).prompt)


def read_detokenize(body: Any) -> list[int]:
    """Return the token ids of a `/detokenize` body. Raises RequestRefused if the body is invalid."""
    return validated(_DetokenizeBody, body).tokens


class _TokenizeBody(BaseModel):
    prompt: str


class _DetokenizeBody(BaseModel):
    tokens: list[Annotated[int, Field(ge=0)]]


def _completion_prompts(body: _CompletionBody, model: TokenModel) -> list[list[int]]:
    """Return the token ids of each prompt of a completion."""
    if body.prompt is None or body.prompt == "":
        raise refusal("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if not body.prompt:
        raise refusal("You must pass at least one prompt")
    listed = [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else body.prompt
    prompts = [model.tokenize(prompt) if isinstance(prompt, str) else prompt for prompt in listed]
    for prompt in prompts:
        check_token_ids(prompt, model)
    return prompts
