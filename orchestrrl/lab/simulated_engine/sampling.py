"""Requests to the simulated engine, independent of the endpoint: the sampling parameters, validated as vLLM does, and
the requests that they describe. The functions have no side effects."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from orchestrrl.integrations.instrument.kv_scheduler import TransferParams, read_transfer_params
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.refusals import refusal
from orchestrrl.lab.simulated_engine.tokens import Sampling, TokenModel

logger = logging.getLogger(__name__)

LOWEST_TEMPERATURE = 0.01  # vLLM raises lower temperatures, except 0, to this one
NO_SEED = -1  # the same as null
MOST_STOP_STRINGS = 4
MOST_CHOICES = 16_384  # as VLLM_MAX_N_SEQUENCES
Alternatives = Annotated[int, Field(ge=0, le=20)]
TokenIds = list[Annotated[int, Field(ge=0, strict=True)]]


class SamplingBody(BaseModel):
    """The sampling parameters of all endpoints. As in vLLM, unknown fields are ignored. Values that ask for unsupported
    features are rejected."""

    model_config = ConfigDict(extra="ignore")

    max_tokens: int | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    prompt_logprobs: Alternatives | None = None  # alternatives per prompt token; None: no log-probabilities

    @property
    def used_temperature(self) -> float:
        """The temperature that is used; 0 means greedy decoding."""
        if self.temperature is None:
            return 1.0
        return max(self.temperature, LOWEST_TEMPERATURE) if self.temperature else 0.0

    @property
    def used_seed(self) -> int | None:
        return None if self.seed == NO_SEED else self.seed

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, choice: int) -> Sampling | None:
        """Return how the tokens of a choice are drawn, or None for greedy decoding. As in vLLM, the choices have
        consecutive seeds. Without a seed, the first choice is greedy, so that it is reproducible."""
        seed, temperature = self.used_seed, self.used_temperature
        if not temperature or (seed is None and choice == 0):
            return None
        return Sampling((seed or 0) + choice, temperature)


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A validated request for one response, with its prompt as token ids and its limits resolved."""

    prompt_ids: tuple[int, ...]
    max_tokens: int  # >= 1; prompt and response fit the maximum context length
    min_tokens: int
    ignore_eos: bool
    sampling: Sampling | None  # None: greedy decoding
    stop_token_ids: frozenset[int]
    stop: tuple[str, ...]
    include_stop: bool  # the text contains the stop string or the text of the stop token
    top_logprobs: int | None  # alternatives per token; None: no log-probabilities
    handover: TransferParams | None = None  # KV transfer to and from other engines


def check_model(name: str | None, options: SimulatedOptions) -> None:
    """Raise RequestRefused if `name` is not the served model."""
    if name not in (None, options.model_name):
        message = f"The model `{name}` does not exist. Valid aliases: {options.model_name}."
        raise refusal(message, "model", status=404, kind="NotFoundError")


def requests_for(
    body: SamplingBody,
    prompt_ids: Sequence[int],
    max_tokens: int,
    top_logprobs: int | None,
    kv_transfer_params: dict[str, Any] | None,
) -> list[SimulatedRequest]:
    """Return the requests for all choices of one prompt. Raises RequestRefused if the sampling parameters contradict
    each other. Only the first request transfers KV."""
    choices = body.n or 1
    if choices > 1 and not body.used_temperature:
        raise refusal(f"n must be 1 when using greedy sampling, got {choices}.")
    if body.min_tokens > max_tokens:
        raise refusal(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}.")
    if len(body.stop_strings) > MOST_STOP_STRINGS:
        raise refusal(f"stop: must have at most {MOST_STOP_STRINGS} strings, got {len(body.stop_strings)}", "stop")
    first = SimulatedRequest(
        prompt_ids=tuple(prompt_ids),
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        sampling=body.sampling(0),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        stop=body.stop_strings,
        include_stop=body.include_stop_str_in_output,
        top_logprobs=top_logprobs,
        handover=_handover(kv_transfer_params),
    )
    others = [replace(first, sampling=body.sampling(choice), handover=None) for choice in range(1, choices)]
    return [first, *others]


def _handover(params: dict[str, Any] | None) -> TransferParams | None:
    """Return the KV transfer parameters of a request, or None if they are absent or invalid. As with vLLM's connector,
    invalid parameters are logged, and the request is served without a transfer."""
    try:
        return read_transfer_params(params)
    except ValueError as error:
        logger.warning("request served without KV handover: %s", error)
        return None


def check_token_ids(prompt_ids: Sequence[int], model: TokenModel) -> None:
    """Raise RequestRefused if a prompt is empty or contains an id that is not in the vocabulary."""
    if not prompt_ids:
        raise refusal("The decoder prompt cannot be empty")
    if (highest := max(prompt_ids)) >= model.vocab_size:
        raise refusal(f"Token id {highest} is out of vocabulary")


def limit_tokens(asked_tokens: int | None, prompt_tokens: int, max_model_len_tokens: int) -> int:
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
