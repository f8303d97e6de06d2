"""Recorded calls of clients, and the fields of the answers that the clients read. The functions have no side effects.

`make test-clients RECORD=1` writes a recording of each client; `make test` sends the recorded calls to a gateway in
front of simulated engines.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.clients.recording_proxy import RecordedCall

FOLDER = Path(__file__).parent / "recordings"

_KEPT_HEADERS = frozenset({"accept", "content-type", "x-request-id", "x-session-id"})
_TOKENS = ("choices[].token_ids[]", "choices[].finish_reason")
_COMPLETION = (*_TOKENS, "choices[].logprobs.token_logprobs[]")
_CHAT = (*_TOKENS, "choices[].logprobs.content[].logprob")

# By client and endpoint: the fields that the client reads. A stream's fields are those of any of its events.
READ_FIELDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "openai": {
        "/v1/models": ("data[].id",),
        "/v1/completions": _COMPLETION,
        "/v1/chat/completions": ("choices[].token_ids[]", "choices[].logprobs.content[].logprob"),
    },
    "trl": {
        "/health": (),
        "/v1/models": ("data[].id", "data[].max_model_len"),
        "/get_world_size": ("world_size",),
        "/server_info": ("vllm_config.model_config.dtype",),
        "/v1/completions": (*_COMPLETION, "choices[].logprobs.tokens[]"),
    },
    "verl": {"/v1/completions": _COMPLETION},
    "skyrl": {
        "/tokenize": ("tokens[]",),
        "/detokenize": ("prompt",),
        "/inference/v1/generate": _CHAT,
        "/v1/chat/completions": _CHAT,
    },
    "verifiers": {
        "/v1/models": ("data[].id", "data[].max_model_len"),
        # On vLLM 0.31, it also reads each logprob's `token`, which vLLM 0.32 and simulated engines do not return.
        "/inference/v1/generate": _CHAT,
    },
}


def distinct_calls(client: str, calls: Iterable[RecordedCall]) -> list[dict[str, Any]]:
    """Return one call of each form as JSON values, with the types of the answer's fields that the client reads. The
    form is the method, the endpoint and the names of the fields."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for call in calls:
        if call.endpoint not in READ_FIELDS[client]:
            continue
        body = call.body or {}
        form = call.method, call.endpoint, *sorted(body), *sorted(body.get("sampling_params", ()))
        headers = {name: value for name, value in call.headers.items() if name.lower() in _KEPT_HEADERS}
        read = {path: sorted(types_at(call.answer, path)) for path in READ_FIELDS[client][call.endpoint]}
        sent = {"method": call.method, "path": call.path, "headers": headers, "body": call.body}
        found.setdefault(form, {**sent, "status": call.status, "read": read})
    return list(found.values())


def types_at(answer: Any, path: str) -> set[str]:
    """Return the types of the values at `path`, such as `choices[].token_ids[]`. They are those of JSON, in which all
    numbers have one type. The set is empty if the answer has no such field."""
    values: Iterator[Any] = iter(answer if isinstance(answer, list) else [answer])
    for name in path.split("."):
        found = [value[name.removesuffix("[]")] for value in values if name.removesuffix("[]") in (value or {})]
        values = iter([item for value in found for item in value or ()] if name.endswith("[]") else found)
    return {"number" if isinstance(value, int | float) else type(value).__name__ for value in values}
