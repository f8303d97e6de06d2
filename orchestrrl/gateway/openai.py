"""What clients read: OpenAI's responses, stream chunks and error objects, with vLLM's additions. Pure.

Chunks are put together as text around the few parts that change, since one is made for every token.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from orchestrrl.engines.base import Endpoint, TokenLogprob
from orchestrrl.gateway.ledger import Delta, Record

DONE = b"data: [DONE]\n\n"

_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 409: "ConflictError", 413: "RequestTooLargeError"}


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(status, "InternalServerError" if status == 500 else "ServiceUnavailableError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class Form:
    """How the client wants its answer written."""

    endpoint: Endpoint
    request_id: str
    model: str
    created_unix_s: int
    role: str = "assistant"
    token_ids: bool = False
    policy_versions: bool = False  # which policy generated which tokens
    logprobs: bool = False
    top_logprobs: int = 0
    usage: bool = False  # a last chunk with the usage
    continuous_usage: bool = False  # and one with every chunk

    @property
    def answer_id(self) -> str:
        return f"{'chatcmpl' if self.endpoint is Endpoint.CHAT else 'cmpl'}-{self.request_id}"


def usage(records: Iterable[Record], prompts: Iterable[Record]) -> dict[str, int]:
    """Tokens of all answers; `prompts` are the records whose prompts count, one for each distinct prompt."""
    prompt_tokens = sum(record.prompt_tokens for record in prompts)
    completion_tokens = sum(len(record.generated_ids) for record in records)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def response(form: Form, records: Sequence[Record], answers_per_prompt: int) -> dict[str, Any]:
    """The whole answer. Records are in order of their index."""
    chat = form.endpoint is Endpoint.CHAT
    write = _chat_choice if chat else _completion_choice
    body: dict[str, Any] = {
        "id": form.answer_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": form.created_unix_s,
        "model": form.model,
        "choices": [write(form, index, record) for index, record in enumerate(records)],
        "usage": usage(records, records[::answers_per_prompt]),
    }
    if chat and form.token_ids:
        body["prompt_token_ids"] = _prompt_ids(records[0])
    return body


def _completion_choice(form: Form, index: int, record: Record) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": record.text,
        "logprobs": _completion_logprobs(record.logprobs or (), 0) if form.logprobs else None,
        "finish_reason": record.finish_reason,
        "stop_reason": record.stop_reason,
    }
    if form.token_ids:
        choice["token_ids"] = list(record.generated_ids)
        choice["prompt_token_ids"] = _prompt_ids(record)
    if form.policy_versions:
        choice["policy_versions"] = _policy_versions(record)
    return choice


def _policy_versions(record: Record) -> list[dict[str, int | None]]:
    spans = record.versions.spans(len(record.generated_ids))
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]


def _chat_choice(form: Form, index: int, record: Record) -> dict[str, Any]:
    message: dict[str, Any] = {"role": form.role, "content": record.text}
    for extra in record.extras:
        _merge_extra(message, extra)
    if record.extras and not record.text:
        message["content"] = None
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": {"content": _chat_logprobs(record.logprobs or (), form.top_logprobs)} if form.logprobs else None,
        "finish_reason": record.finish_reason,
        "stop_reason": record.stop_reason,
    }
    if form.token_ids:
        choice["token_ids"] = list(record.generated_ids)
    if form.policy_versions:
        choice["policy_versions"] = _policy_versions(record)
    return choice


def _prompt_ids(record: Record) -> list[int] | None:
    return None if record.prompt_ids is None else list(record.prompt_ids)


def _merge_extra(message: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """Join a streamed delta to what came before it, as OpenAI's clients do: text grows, tool calls grow by index."""
    for name, value in extra.items():
        before = message.get(name)
        if isinstance(value, str) and isinstance(before, str):
            message[name] = before + value
        elif name == "tool_calls":
            calls = message.setdefault(name, [])
            for call in value:
                _merge_tool_call(calls, call)
        else:
            message[name] = value


def _merge_tool_call(calls: list[dict[str, Any]], call: Mapping[str, Any]) -> None:
    index = call.get("index", 0)
    while len(calls) <= index:
        calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    known = calls[index]
    known["id"] = call.get("id") or known["id"]
    function = call.get("function") or {}
    known["function"]["name"] = function.get("name") or known["function"]["name"]
    known["function"]["arguments"] += function.get("arguments") or ""


def _completion_logprobs(logprobs: Sequence[TokenLogprob], first_offset: int) -> dict[str, Any]:
    offsets = []
    offset = first_offset
    for item in logprobs:
        offsets.append(offset)
        offset += len(item.token)
    return {
        "text_offset": offsets,
        "token_logprobs": [item.logprob for item in logprobs],
        "tokens": [item.token for item in logprobs],
        "top_logprobs": [dict(item.top) for item in logprobs],
    }


def _chat_logprobs(logprobs: Sequence[TokenLogprob], top: int) -> list[dict[str, Any]]:
    # An attempt that was continued as a completion has the sampled token among its alternatives, and one too many.
    return [
        {
            **_chat_logprob(item.token, item.logprob),
            "top_logprobs": [_chat_logprob(token, value) for token, value in item.top[:top]],
        }
        for item in logprobs
    ]


def _chat_logprob(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", errors="replace"))}


class ChunkWriter:
    """Writes the stream of one answer (one index) as the client asked for it."""

    def __init__(self, form: Form, index: int, record: Record) -> None:
        self._form = form
        self._record = record
        self._chat = form.endpoint is Endpoint.CHAT
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        head = {"id": form.answer_id, "object": kind, "created": form.created_unix_s, "model": form.model}
        self._head = f'data: {json.dumps(head, separators=(",", ":"))[:-1]},"choices":[{{"index":{index},'
        self._begun = False
        self._offset = 0
        self._tokens = 0

    def chunks(self, deltas: Sequence[Delta], *, last: bool) -> bytes:
        """The deltas as events; with `last`, the finish_reason goes with the final one."""
        parts = [self._begin()]
        ends = self._record.finish_reason if last else None
        for number, delta in enumerate(deltas, 1):
            parts.append(self._chunk(delta, ends if number == len(deltas) else None))
        if last and not deltas:
            parts.append(self._chunk(Delta((), ""), ends))
        return "".join(parts).encode()

    def _begin(self) -> str:
        """A chat stream opens with the role."""
        if self._begun or not self._chat:
            return ""
        self._begun = True
        role = f'"delta":{{"role":{quoted(self._form.role)},"content":""}},"logprobs":null,"finish_reason":null'
        return f"{self._head}{role}}}]{self._prompt_ids()}{self._usage()}}}\n\n"

    def _chunk(self, delta: Delta, finish_reason: str | None) -> str:
        form = self._form
        self._tokens += len(delta.token_ids)
        prompt_ids = ""
        if self._chat:
            content = self._chat_delta(delta)
        else:
            content = f'"text":{quoted(delta.text)}'
            if not self._begun:
                self._begun = True
                prompt_ids = self._prompt_ids()
        logprobs = "null"
        if form.logprobs and delta.logprobs is not None:
            logprobs = json.dumps(self._logprobs(delta.logprobs), separators=(",", ":"))
        ends = f'"finish_reason":{quoted(finish_reason)}' if finish_reason is not None else '"finish_reason":null'
        if finish_reason is not None or not self._chat:
            ends += f',"stop_reason":{json.dumps(self._record.stop_reason if finish_reason is not None else None)}'
        if form.token_ids:
            ends += f',"token_ids":[{",".join(map(str, delta.token_ids))}]'
        if form.policy_versions:
            ends += f',"policy_version":{json.dumps(delta.version)}'
        return f'{self._head}{content},"logprobs":{logprobs},{ends}{prompt_ids}}}]{self._usage()}}}\n\n'

    def _chat_delta(self, delta: Delta) -> str:
        if delta.extra is None:
            return f'"delta":{{"content":{quoted(delta.text)}}}'
        fields = dict(delta.extra)
        if delta.text:
            fields["content"] = delta.text
        return f'"delta":{json.dumps(fields, separators=(",", ":"))}'

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Mapping[str, Any]:
        if self._chat:
            return {"content": _chat_logprobs(logprobs, self._form.top_logprobs)}
        written = _completion_logprobs(logprobs, self._offset)
        self._offset += sum(len(item.token) for item in logprobs)
        return written

    def _prompt_ids(self) -> str:
        ids = self._record.prompt_ids
        if not self._form.token_ids or ids is None:
            return ""
        return f',"prompt_token_ids":[{",".join(map(str, ids))}]'

    def _usage(self) -> str:
        if not self._form.continuous_usage:
            return ""
        prompt = self._record.prompt_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens}
        return f',"usage":{json.dumps(counts, separators=(",", ":"))}'


def usage_chunk(form: Form, records: Sequence[Record], answers_per_prompt: int) -> bytes:
    """The last chunk of a stream that was asked for its usage."""
    chat = form.endpoint is Endpoint.CHAT
    return event(
        {
            "id": form.answer_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": form.created_unix_s,
            "model": form.model,
            "choices": [],
            "usage": usage(records, records[::answers_per_prompt]),
        }
    )
