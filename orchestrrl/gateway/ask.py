"""Read what a client asks: one body becomes one record per answer, since `n` and lists of prompts are split. Pure.

Only what the gateway itself relies on is checked here; the rest is the engine's to judge, in its own words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrrl.engines.base import Endpoint
from orchestrrl.gateway.ledger import Record
from orchestrrl.gateway.movable import asked_tokens, immovable_because
from orchestrrl.gateway.openai import Form
from orchestrrl.gateway.versions import OnStale
from planner.model import RequestId

MAX_ANSWERS = 4096  # of one body
MAX_ID_LENGTH = 256
MAX_LABEL_LENGTH = 256
# Text is about this many characters per token: only for routing, until the engine has told the prompt's tokens.
CHARACTERS_PER_TOKEN = 4

# The gateway answers these itself, or sets them for each attempt.
_OWN_FIELDS = frozenset(
    {
        "stream",
        "stream_options",
        "n",
        "return_token_ids",
        "request_id",
        "return_policy_versions",
        "max_version_lag",
        "on_stale",
        "group_enough",
    }
)


class BadAsk(ValueError):
    """The body cannot be served; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Ask:
    """One body, understood. Records come in order of their index: the answers to the first prompt, then the next's."""

    form: Form
    records: tuple[Record, ...]
    answers_per_prompt: int
    streaming: bool


def read_ask(
    endpoint: Endpoint,
    body: object,
    *,
    request_id: str,
    group: str,
    tag: str,
    default_model: str,
    now_s: float,
    max_version_lag: int | None = None,
    on_stale: OnStale = OnStale.ABORT,
) -> Ask:
    """Raises BadAsk. `max_version_lag` and `on_stale` hold where the body does not say."""
    if not isinstance(body, dict):
        raise BadAsk("the body must be a JSON object")
    _check_id(request_id)
    _check_label("X-Group-Id", group)
    _check_label("X-Tag", tag)
    answers = _whole(body, "n", 1, least=1)
    streaming = bool(body.get("stream"))
    if body.get("use_beam_search") and answers > 1:
        raise BadAsk("beam search with n > 1 needs all its beams on one engine and is not offered here", "n")
    prompts = _prompts(body) if endpoint is Endpoint.COMPLETIONS else [None]
    if len(prompts) * answers > MAX_ANSWERS:
        raise BadAsk(f"{len(prompts)} prompts with n = {answers} are more than {MAX_ANSWERS} answers", "n")
    form = _form(endpoint, body, request_id, default_model, int(now_s))
    enough = _whole(body, "group_enough", 0, least=1)
    lag = _whole(body, "max_version_lag", -1, least=0)
    stale = _on_stale(body, on_stale)
    shared = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
    max_tokens = asked_tokens(endpoint, body)
    because = immovable_because(endpoint, body)
    single = len(prompts) * answers == 1
    records = []
    for index in range(len(prompts) * answers):
        prompt = prompts[index // answers]
        ids = tuple(prompt) if isinstance(prompt, list) else None
        records.append(
            Record(
                id=RequestId(request_id if single else f"{request_id}-{index}"),
                endpoint=endpoint,
                body=_own_body(shared, prompt, index % answers if answers > 1 else None),
                streaming=streaming,
                arrived_s=now_s,
                progressed_s=now_s,
                max_tokens=max_tokens,
                # The samples of one body are a group, if they have to be one.
                group=group or (request_id if enough else ""),
                tag=tag,
                group_enough=enough,
                max_version_lag=max_version_lag if lag < 0 else lag,
                on_stale=stale,
                immovable_because=because,
                prompt_ids=ids,
                prompt_tokens_estimate=len(ids) if ids else _estimate_tokens(prompt, body),
            )
        )
    return Ask(form, tuple(records), answers, streaming)


def _check_id(request_id: str) -> None:
    if not 0 < len(request_id) <= MAX_ID_LENGTH or not request_id.isascii() or not request_id.isprintable():
        raise BadAsk(f"X-Request-Id must be 1 to {MAX_ID_LENGTH} printable ASCII characters")


def _check_label(header: str, label: str) -> None:
    # Bytes that are no text would break every report to the daemon for as long as it has to be told of them.
    if len(label) > MAX_LABEL_LENGTH or not label.isprintable():
        raise BadAsk(f"{header} must be at most {MAX_LABEL_LENGTH} printable characters")


def _whole(body: Mapping[str, Any], name: str, default: int, *, least: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BadAsk(f"{name} must be a whole number >= {least}, got {value!r}", name)
    return value


def _on_stale(body: Mapping[str, Any], default: OnStale) -> OnStale:
    value = body.get("on_stale")
    if value is None:
        return default
    if value not in list(OnStale):
        raise BadAsk(f"on_stale must be one of {', '.join(OnStale)}, got {value!r}", "on_stale")
    return OnStale(value)


def _prompts(body: Mapping[str, Any]) -> Sequence[str | list[int] | None]:
    """A prompt is text or token ids, and there may be a list of either."""
    prompt = body.get("prompt")
    if prompt is None and body.get("prompt_embeds") is not None:
        return [None]
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_ids(prompt):
            return [prompt]
        if all(isinstance(item, str) or (isinstance(item, list) and item and _is_ids(item)) for item in prompt):
            return prompt
    raise BadAsk("prompt must be text, a list of token ids, or a non-empty list of either", "prompt")


def _is_ids(items: list[Any]) -> bool:
    # Ids are looked at once more by the engine; here it only matters that they are numbers that an array can hold.
    return all(type(item) is int and 0 <= item < 1 << 32 for item in items)


def _own_body(shared: Mapping[str, Any], prompt: str | list[int] | None, sample: int | None) -> Mapping[str, Any]:
    """The body of one answer. Each of `n` samples has its own seed, as vLLM derives them."""
    body = dict(shared)
    if prompt is not None:
        body["prompt"] = prompt
    if sample is not None and isinstance(body.get("seed"), int):
        body["seed"] += sample
    return body


def _estimate_tokens(prompt: str | list[int] | None, body: Mapping[str, Any]) -> int:
    if isinstance(prompt, str):
        return len(prompt) // CHARACTERS_PER_TOKEN + 1
    messages = body.get("messages")
    if not isinstance(messages, list):
        return 1
    texts = [str(message.get("content", "")) for message in messages if isinstance(message, dict)]
    return sum(len(text) for text in texts) // CHARACTERS_PER_TOKEN + 1


def _form(endpoint: Endpoint, body: Mapping[str, Any], request_id: str, default_model: str, created_s: int) -> Form:
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadAsk("stream_options must be an object", "stream_options")
    if options and not body.get("stream"):
        raise BadAsk("stream_options can only be given with stream", "stream_options")
    logprobs = body.get("logprobs")
    model = body.get("model")
    return Form(
        endpoint=endpoint,
        request_id=request_id,
        model=model if isinstance(model, str) else default_model,
        created_unix_s=created_s,
        role=_role(body) if endpoint is Endpoint.CHAT else "assistant",
        token_ids=bool(body.get("return_token_ids")),
        policy_versions=bool(body.get("return_policy_versions")),
        logprobs=bool(logprobs) if endpoint is Endpoint.CHAT else logprobs is not None,
        top_logprobs=_whole(body, "top_logprobs", 0, least=-1),
        usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
    )


def _role(body: Mapping[str, Any]) -> str:
    """Without a generation prompt the answer goes on in the last message's role."""
    messages = body.get("messages")
    if body.get("add_generation_prompt", True) or not isinstance(messages, list) or not messages:
        return "assistant"
    last = messages[-1]
    return str(last.get("role", "assistant")) if isinstance(last, dict) else "assistant"
