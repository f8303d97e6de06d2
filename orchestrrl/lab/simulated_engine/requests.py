"""Parse requests to the simulated engine: OpenAI bodies, validated as vLLM does. The functions have no side effects.

Features of vLLM that this engine does not implement, such as stop strings, several choices and echo, are rejected.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrrl.core.errors import faults_of
from orchestrrl.engines.base import CompletionEndpoint, RequestRefused
from orchestrrl.integrations.instrument.kv_scheduler import TransferParams, read_transfer_params
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.tokens import TURN_END, TURN_START, TokenModel

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for completions; chats have no default limit
Body = TypeVar("Body", bound=BaseModel)
_Alternatives = Annotated[int, Field(ge=0, le=20)]


class _StreamOptions(BaseModel):
    include_usage: bool = False


class GenerationBody(BaseModel):
    """The fields that completion and chat requests share. As in vLLM, unknown fields are ignored. Values that ask for
    unsupported features are rejected."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    n: Literal[1] | None = None
    stop: Annotated[str | list[str], Field(max_length=0)] | None = None
    stop_token_ids: list[int] | None = None
    echo: Literal[False] = False
    prompt_logprobs: _Alternatives | None = None  # alternatives per prompt token; None: no log-probabilities
    kv_transfer_params: dict[str, Any] | None = None


class _CompletionBody(GenerationBody):
    prompt: str | list[Annotated[int, Field(ge=0)]] | None = None
    logprobs: _Alternatives | None = None


class _Part(BaseModel):
    type: str
    text: str = ""


class _Message(BaseModel):
    role: str
    content: str | list[_Part] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class _ChatBody(GenerationBody):
    messages: list[_Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: _Alternatives | None = None
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A validated request, with its prompt as token ids and its limits resolved."""

    endpoint: CompletionEndpoint
    body: GenerationBody
    prompt_ids: tuple[int, ...]
    max_tokens: int  # >= 1; prompt and response fit the maximum context length
    seed: int
    stop_token_ids: frozenset[int]
    top_logprobs: int | None  # alternatives per token; None: no log-probabilities
    handover: TransferParams | None = None  # KV transfer to and from other engines


def read_completion_request(
    endpoint: CompletionEndpoint, body: Any, options: SimulatedOptions, model: TokenModel
) -> SimulatedRequest:
    """Parse the OpenAI body of a completion or chat, and return the request. Raises RequestRefused, with vLLM's status
    and an OpenAI error object, if the body is invalid or unsupported."""
    is_chat = endpoint is CompletionEndpoint.CHAT
    read: _CompletionBody | _ChatBody = _validated(_ChatBody, body) if is_chat else _validated(_CompletionBody, body)
    if read.model not in (None, options.model_name):
        raise refusal(f"The model `{read.model}` does not exist.", "model", status=404, kind="NotFoundError")
    if read.prompt_logprobs and read.stream:
        raise refusal("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    if isinstance(read, _ChatBody):
        prompt_ids, top_logprobs = tokenize_chat(read.messages, read.add_generation_prompt, model), None
        if read.top_logprobs is not None and not read.logprobs:
            raise refusal("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        if read.logprobs:
            top_logprobs = read.top_logprobs or 0
        asked_tokens = read.max_tokens if read.max_completion_tokens is None else read.max_completion_tokens
    else:
        prompt_ids, top_logprobs = _completion_prompt(read, model), read.logprobs
        asked_tokens = read.max_tokens if "max_tokens" in read.model_fields_set else DEFAULT_COMPLETION_TOKENS
    max_tokens = _room(asked_tokens, len(prompt_ids), options.max_model_len_tokens)
    if read.min_tokens > max_tokens:
        raise refusal(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {read.min_tokens}.")
    return SimulatedRequest(
        endpoint=endpoint,
        body=read,
        prompt_ids=tuple(prompt_ids),
        max_tokens=max_tokens,
        seed=0 if read.temperature == 0 else read.seed or 0,  # greedy decoding uses no random numbers
        stop_token_ids=frozenset(read.stop_token_ids or ()),
        top_logprobs=top_logprobs,
        handover=_handover(read),
    )


def _handover(body: GenerationBody) -> TransferParams | None:
    """Return the KV transfer parameters of a request, or None if they are absent or invalid. As with vLLM's connector,
    invalid parameters are logged, and the request is served without a transfer."""
    try:
        return read_transfer_params(body.kv_transfer_params)
    except ValueError as error:
        logger.warning("request served without KV handover: %s", error)
        return None


def tokenize_chat(messages: list[_Message], add_generation_prompt: bool, model: TokenModel) -> list[int]:
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
        chat = _validated(_ChatBody, body)
        return tokenize_chat(chat.messages, chat.add_generation_prompt, model)
    return model.tokenize(_validated(_TokenizeBody, body).prompt)


def read_detokenize(body: Any) -> list[int]:
    """Return the token ids of a `/detokenize` body. Raises RequestRefused if the body is invalid."""
    return _validated(_DetokenizeBody, body).tokens


def _validated(shape: type[Body], body: Any) -> Body:
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        faults = faults_of(error)
        raise refusal("; ".join(faults), param=faults[0].split(":")[0], kind="Bad Request") from error


class _TokenizeBody(BaseModel):
    prompt: str


class _DetokenizeBody(BaseModel):
    tokens: list[Annotated[int, Field(ge=0)]]


def refusal(message: str, param: str | None = None, status: int = 400, kind: str = "BadRequestError") -> RequestRefused:
    """Return a RequestRefused with an OpenAI error object. `param` names the faulty parameter, and `kind` is the type
    of the error."""
    return RequestRefused(
        message, status, {"error": {"message": message, "type": kind, "param": param, "code": status}}
    )


def _completion_prompt(body: _CompletionBody, model: TokenModel) -> list[int]:
    if body.prompt is None or body.prompt == "":
        raise refusal("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(body.prompt, str):
        return model.tokenize(body.prompt)
    if not body.prompt:
        raise refusal("You must pass at least one prompt")
    for token in body.prompt:
        if token >= model.vocab_size:
            raise refusal(f"Token id {token} is out of vocabulary")
    return body.prompt


def _room(asked_tokens: int | None, prompt_tokens: int, max_model_len_tokens: int) -> int:
    """Return the maximum number of tokens to generate: `asked_tokens`, limited to the context length minus the prompt
    length. Raises RequestRefused if the prompt fills the context, or if `asked_tokens` is less than 1."""
    room = max_model_len_tokens - prompt_tokens
    if room < 1:
        raise refusal(
            f"This model's maximum context length is {max_model_len_tokens} tokens. However, your prompt contains "
            f"{prompt_tokens} input tokens. Please reduce the length of the input prompt.",
            "input_tokens",
        )
    if asked_tokens is not None and asked_tokens < 1:
        raise refusal(f"max_tokens must be at least 1, got {asked_tokens}.", "max_tokens")
    return room if asked_tokens is None else min(asked_tokens, room)
