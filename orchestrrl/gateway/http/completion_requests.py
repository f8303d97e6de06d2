"""Parse completion requests, without side effects. A request for several answers (`n`, or a list of prompts) is split
into one record per answer, apart from the beams of a beam search.

The types of known fields (field_types.py) and the values that the gateway relies on are checked. The engine checks
everything else.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.http.field_types import (
    MOST_ID,
    HttpRefusal,
    is_token_ids,
    name_set,
    raise_faults,
    shown,
    type_faults,
    with_types,
)
from orchestrrl.gateway.http.generate_requests import generate_faults, sample_body, typed_generate, whole_prompt
from orchestrrl.gateway.http.responses import ResponseForm
from orchestrrl.gateway.ledger.ledger import OnStale, RequestRecord
from orchestrrl.gateway.moves.generate_fields import SAMPLING_PARAMS
from orchestrrl.gateway.moves.movable import (
    immovable_because,
    max_answer_tokens,
    parsed_after_moves,
    relayed_because,
    sampling_fields,
)
from orchestrrl.gateway.moves.reseed import RESEED_HEADER, reseed_allowed, seed_of
from planner.model import RequestId

MAX_ANSWERS = 4096  # answers to one body
MAX_NAME_LENGTH = 256  # length of a request id, a group and a tag
# Estimate of a prompt's length for routing, until the engine reports the prompt's tokens.
CHARACTERS_PER_TOKEN = 4

# The gateway handles these fields itself, or sets them for each attempt.
_OWN_FIELDS = name_set(
    """
    stream stream_options n return_token_ids request_id return_policy_versions max_version_lag on_stale group_enough
    """
)


# Fields that shape the answer. An engine needs them if the body is sent unchanged.
_FORM_FIELDS = ("stream", "stream_options", "return_token_ids")
# vLLM decodes greedily at temperatures below this.
GREEDY_BELOW = 1e-5
MOST_WHOLE = 2**31 - 1  # the largest integer in reports to the daemon
_RANK_HEADER = "x-data-parallel-rank"


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """The parsed body of one completion request. The records are in the order of their indices: first the answers to
    the first prompt, then the answers to the second prompt, and so on. All beams of one beam search have one record."""

    form: ResponseForm
    records: tuple[RequestRecord, ...]
    answers_per_prompt: int
    streaming: bool


def read_completion_request(
    endpoint: CompletionEndpoint,
    body: object,
    *,
    request_id: str,
    group: str,
    tag: str,
    session: str = "",
    default_model: str,
    now_s: float,
    headers: tuple[tuple[str, str], ...] = (),
    reseed: bool = False,
    reseed_header: str | None = None,
) -> CompletionRequest:
    """Return the parsed body with one record per answer. `headers` are the client's headers that are forwarded to
    engines. `reseed` is the gateway's setting, which the header `X-Reseed` overrides. `session` is the
    session's id in the headers; as in vLLM, an id in the body has priority.

    Raises HttpRefusal with all faults if the body or a header is invalid."""
    if not isinstance(body, dict):
        raise HttpRefusal(f"the body must be a JSON object, got {shown(body)}")
    prompts = _prompts(body) if endpoint is CompletionEndpoint.COMPLETIONS else [None]
    may_reseed = reseed_allowed(reseed_header, reseed)
    faults = [*header_faults(request_id, group, tag, session), *_body_faults(endpoint, body, len(prompts))]
    if may_reseed is None:
        faults.insert(0, (RESEED_HEADER, f"must be true or false, got {shown(reseed_header)}"))
    raise_faults(faults)
    if generates := endpoint is CompletionEndpoint.GENERATE:
        body = typed_generate(body)
        prompts = [whole_prompt(body)]
    else:
        body = with_types(endpoint, body)
    # The engine returns all beams in one answer, which is relayed.
    beams = not generates and bool(body.get("use_beam_search"))
    answers = 1 if beams else sampling_fields(endpoint, body).get("n") or 1
    streaming = bool(body.get("stream"))
    form = _form(endpoint, body, request_id, default_model, int(now_s))
    enough = body.get("group_enough") or 0
    named = body.get("session_id")
    session = named if isinstance(named, str) and named else session
    shared = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
    max_tokens = max_answer_tokens(endpoint, body)
    relayed = relayed_because(endpoint, body)
    pinned = next((f"{name}: names a rank of one engine" for name, _ in headers if name.lower() == _RANK_HEADER), "")
    because = immovable_because(endpoint, body, reseed=bool(may_reseed)) or pinned
    parsed = not pinned and parsed_after_moves(endpoint, body, reseed=bool(may_reseed))
    form_fields = {name: body[name] for name in (*_FORM_FIELDS, *(["n"] if beams else [])) if name in body}
    single = len(prompts) * answers == 1
    records = []
    for index in range(len(prompts) * answers):
        prompt, sample = prompts[index // answers], index % answers if answers > 1 else None
        # The engine reports a prompt that it truncates.
        ids = tuple(prompt) if isinstance(prompt, list) and body.get("truncate_prompt_tokens") is None else None
        records.append(
            RequestRecord(
                id=RequestId(request_id if single else f"{request_id}-{index}"),
                endpoint=endpoint,
                body=sample_body(shared, sample) if generates else _own_body(shared, prompt, sample),
                streaming=streaming,
                arrived_s=now_s,
                progressed_s=now_s,
                max_tokens=max_tokens,
                # With `group_enough`, the samples of one body form a group even without a group name.
                group=group or (request_id if enough else ""),
                tag=tag,
                session=session,
                group_enough=enough,
                max_version_lag=body.get("max_version_lag"),
                on_stale=OnStale(body.get("on_stale") or OnStale.ABORT),
                immovable_because=because,
                relayed_because=relayed,
                parsed_after_moves=parsed,
                pinned_because=pinned,
                form_fields=form_fields,
                headers=headers,
                prompt_ids=ids,
                prompt_tokens_estimate=_estimate_tokens(body["token_ids"] if generates else prompt, body),
            )
        )
    return CompletionRequest(form, tuple(records), answers, streaming)


def header_faults(request_id: str, group: str, tag: str, session: str = "") -> Iterator[tuple[str, str]]:
    if not 0 < len(request_id) <= MAX_NAME_LENGTH or not request_id.isascii() or not request_id.isprintable():
        yield "X-Request-Id", f"must be 1 to {MAX_NAME_LENGTH} printable ASCII characters, got {shown(request_id)}"
    for header, label in (("X-Group-Id", group), ("X-Tag", tag), ("X-Session-ID", session)):
        # Bytes that are not text would break the reports to the daemon.
        if len(label) > MAX_NAME_LENGTH or not label.isprintable():
            yield header, f"must be at most {MAX_NAME_LENGTH} printable characters, got {shown(label)}"


def _body_faults(endpoint: CompletionEndpoint, body: Mapping[str, Any], prompts: int) -> Iterator[tuple[str, str]]:
    wrong_types = type_faults(endpoint, body)
    yield from wrong_types.items()
    if endpoint is CompletionEndpoint.COMPLETIONS:
        yield from _prompt_faults(body.get("prompt"), prompts)
    elif endpoint is CompletionEndpoint.GENERATE:
        yield from generate_faults(body, wrong_types.keys())
        sampling = sampling_fields(endpoint, body)
        wrong_sampling = type_faults(endpoint, sampling)
        for name, wrong in (*wrong_sampling.items(), *_number_faults(sampling, prompts, wrong_sampling)):
            yield f"{SAMPLING_PARAMS}.{name}", wrong
    elif body.get("messages") is None:
        yield "messages", "must be a list of objects with a role and a content, got nothing"
    if endpoint is not CompletionEndpoint.GENERATE:
        yield from _number_faults(body, prompts, wrong_types)
    for name, least in (("group_enough", 1), ("max_version_lag", 0), ("top_logprobs", -1)):
        yield from _range_faults(body, name, least, wrong_types)
    session = body.get("session_id")
    if isinstance(session, str) and len(session) > MAX_NAME_LENGTH:
        yield "session_id", f"must have at most {MAX_NAME_LENGTH} characters, got {shown(session)}"
    if body.get("on_stale") not in (None, *OnStale):
        yield "on_stale", f"must be one of {', '.join(OnStale)}, got {shown(body['on_stale'])}"
    if "stream_options" not in wrong_types:
        yield from _stream_faults(endpoint, body)


def _number_faults(sampling: Mapping[str, Any], prompts: int, wrong_types: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the faults of the number of answers per prompt. `sampling` has the sampling fields, and `wrong_types`
    their faults that are already known."""
    if out_of_range := list(_range_faults(sampling, "n", 1, wrong_types)):
        return out_of_range
    several = "n" not in wrong_types and (sampling.get("n") or 1) > 1
    return list(_several_faults(sampling, prompts, wrong_types.keys())) if several else []


def _range_faults(
    fields: Mapping[str, Any], name: str, least: int, wrong_types: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    value = fields.get(name)
    if name not in wrong_types and value is not None and not least <= value <= MOST_WHOLE:
        yield name, f"must be a whole number in {least}..{MOST_WHOLE}, got {shown(value)}"


def _several_faults(body: Mapping[str, Any], prompts: int, faulty: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the faults of a body that requests more than one answer per prompt. Each fault is a field and a message.
    `prompts` is the number of prompts, and `faulty` names the fields whose faults are already known."""
    answers = body["n"]
    temperature = None if "temperature" in faulty else body.get("temperature")
    greedy = temperature is not None and 0 <= temperature < GREEDY_BELOW
    if greedy and not body.get("use_beam_search"):
        yield "n", f"must be 1 if temperature is {temperature:g} (greedy decoding), got {answers}"
    if prompts * answers > MAX_ANSWERS >= prompts > 0:
        yield "n", f"must be at most {MAX_ANSWERS // prompts} with {prompts} prompts, got {shown(answers)}"


def _stream_faults(endpoint: CompletionEndpoint, body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    options = body.get("stream_options") or {}
    if options and not body.get("stream") and endpoint is not CompletionEndpoint.GENERATE:
        yield "stream_options", f"requires stream, got {shown(options)}"
    for name in ("include_usage", "continuous_usage_stats"):
        if type(options.get(name)) not in (bool, NoneType):
            yield f"stream_options.{name}", f"must be true or false, got {shown(options[name])}"


def _prompt_faults(prompt: object, prompts: int) -> Iterator[tuple[str, str]]:
    if not prompts:
        wanted = f"must be text, a list of token ids below {MOST_ID}, or a non-empty list of one of these"
        yield "prompt", f"{wanted}, got {'nothing' if prompt is None else shown(prompt)}"
    elif prompts > MAX_ANSWERS:
        yield "prompt", f"must be at most {MAX_ANSWERS} prompts, got {prompts}"


def _prompts(body: Mapping[str, Any]) -> Sequence[str | list[int] | None]:
    """Return the prompts of the body as text or token ids. A prompt that consists of embeddings is returned as None.
    The list is empty if the field `prompt` is missing or invalid."""
    prompt = body.get("prompt")
    if prompt is None and body.get("prompt_embeds") is not None:
        return [None]
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if is_token_ids(prompt):
            return [prompt]
        if set(map(type, prompt)) == {str} or all(
            type(item) is list and item and is_token_ids(item) for item in prompt
        ):
            return prompt
    return []


def _own_body(shared: Mapping[str, Any], prompt: str | list[int] | None, sample: int | None) -> Mapping[str, Any]:
    """Return the body for one answer. `sample` is the index of the answer among the `n` answers to the prompt, or None
    if `n` is 1. If the body has a seed, `sample` is added to the seed, as in vLLM."""
    body = dict(shared)
    if prompt is not None:
        body["prompt"] = prompt
    if sample is not None and (seed := seed_of(body)) is not None:
        body["seed"] = seed + sample
    return body


def _estimate_tokens(prompt: str | list[int] | None, body: Mapping[str, Any]) -> int:
    if isinstance(prompt, list):
        return len(prompt)
    if isinstance(prompt, str):
        return len(prompt) // CHARACTERS_PER_TOKEN + 1
    messages = body.get("messages")
    if not isinstance(messages, list):
        return 1
    texts = [str(message.get("content", "")) for message in messages if isinstance(message, dict)]
    return sum(len(text) for text in texts) // CHARACTERS_PER_TOKEN + 1


def _form(
    endpoint: CompletionEndpoint, body: Mapping[str, Any], request_id: str, default_model: str, created_s: int
) -> ResponseForm:
    options = body.get("stream_options") or {}
    logprobs = sampling_fields(endpoint, body).get("logprobs")
    model = body.get("model")
    return ResponseForm(
        endpoint=endpoint,
        request_id=request_id,
        model=model if isinstance(model, str) else default_model,
        created_unix_s=created_s,
        role=_role(body) if endpoint is CompletionEndpoint.CHAT else "assistant",
        token_ids=bool(body.get("return_token_ids")),
        text=endpoint is not CompletionEndpoint.GENERATE or body.get("output_mode") == "text",
        policy_versions=bool(body.get("return_policy_versions")),
        logprobs=bool(logprobs) if endpoint is CompletionEndpoint.CHAT else logprobs is not None,
        top_logprobs=body.get("top_logprobs") or 0,
        usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
    )


def _role(body: Mapping[str, Any]) -> str:
    """Return the role of the answer. It is `assistant` or, if `add_generation_prompt` is false, the role of the last
    message, which the answer continues."""
    messages = body.get("messages")
    if body.get("add_generation_prompt", True) or not isinstance(messages, list) or not messages:
        return "assistant"
    last = messages[-1]
    return str(last.get("role", "assistant")) if isinstance(last, dict) else "assistant"
