"""Build responses, stream chunks and error objects in OpenAI's format, with vLLM's extensions. The functions have no
side effects.

Each token may need a chunk, so serialising whole chunks would be slow. Instead, the few parts that change are inserted
into prepared text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from orchestrrl.engines.base import Chunk, CompletionEndpoint, TokenLogprob
from orchestrrl.gateway.ledger.ledger import AnswerDelta, RequestRecord
from orchestrrl.gateway.moves.movable import UNTIED_FIELDS

DONE = b"data: [DONE]\n\n"
_CHAT_CHUNK = "chat.completion.chunk"
_ID_PREFIXES = {
    CompletionEndpoint.COMPLETIONS: "cmpl",
    CompletionEndpoint.CHAT: "chatcmpl",
    CompletionEndpoint.GENERATE: "generate-tokens",
}
# The fields of an answer or event that the gateway writes itself.
_WRITTEN_FIELDS = frozenset({"id", "object", "created", "model", "choices", "usage"})

_ERROR_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    411: "LengthRequiredError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
}


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(status, "ServiceUnavailableError" if status > 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def event(value: Mapping[str, Any]) -> bytes:
    """Return `value` as a server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """The format in which the client requested its answer."""

    endpoint: CompletionEndpoint
    request_id: str
    model: str
    created_unix_s: int
    role: str = "assistant"
    token_ids: bool = False
    text: bool = True  # False: the answer consists of tokens alone
    policy_versions: bool = False  # include the policy version of each token
    logprobs: bool = False
    top_logprobs: int = 0
    usage: bool = False  # end a stream with a usage chunk
    continuous_usage: bool = False  # include the usage in every chunk

    @property
    def chat(self) -> bool:
        return self.endpoint is CompletionEndpoint.CHAT

    @property
    def answer_id(self) -> str:
        return f"{_ID_PREFIXES[self.endpoint]}-{self.request_id}"

    def head(self, chat_object: str) -> dict[str, Any]:
        """Return the fields of a response that precede the choices. `chat_object` is the value of `object` for the chat
        endpoint."""
        return {
            "id": self.answer_id,
            "object": chat_object if self.chat else "text_completion",
            "created": self.created_unix_s,
            "model": self.model,
        }


def usage(records: Sequence[RequestRecord], prompts: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the usage object of all answers. `prompts` has one record per distinct prompt, so that each prompt is
    counted once. If no answer has moved, the sums of additional counts from the engines are included."""
    prompt_tokens = sum(record.prompt_tokens for record in prompts)
    completion_tokens = sum(record.generated_tokens for record in records)
    counts = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    for name in (records[0].usage or {}).keys() - counts.keys():
        parts = [record.usage or {} for record in (prompts if name.startswith("prompt") else records)]
        counts[name] = _sum([part.get(name) for part in parts])
    return counts


def _sum(parts: Sequence[Any]) -> Any:
    """Return the sum of `parts`, which are counts of several answers or objects of such counts. Return None if the
    parts cannot be added."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Mapping) for part in parts):
        return {name: _sum([part.get(name) for part in parts]) for name in parts[0]}
    return sum(parts) if all(isinstance(part, int | float) for part in parts) else None


def response(form: ResponseForm, records: Sequence[RequestRecord], answers_per_prompt: int) -> dict[str, Any]:
    """Return the complete response object. `records` must be sorted by index."""
    body = {
        **form.head("chat.completion"),
        "choices": _choices(form, records),
        "usage": usage(records, records[::answers_per_prompt]),
    }
    if form.chat and form.token_ids:
        body["prompt_token_ids"] = _prompt_ids(records[0])
    body.update(_common_fields(records))
    if len(records) == 1 and records[0].relayed_answer is not None:
        body["model"] = records[0].relayed_answer.get("model", form.model)
        body["usage"] = records[0].relayed_answer.get("usage", body["usage"])
    return body


def _choices(form: ResponseForm, records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    common = _common_fields(records)
    choices: list[dict[str, Any]] = []
    for record in records:
        # Fields that differ between answers are written in each choice.
        fields = {name: value for name, value in _engine_fields(record).items() if name not in common}
        if record.relayed_answer is None:
            choices.append({**_choice(form, len(choices), record), **record.choice_fields, **fields})
            continue
        for choice in record.relayed_answer["choices"]:
            passed_on = {**choice, "index": len(choices), **fields}
            if form.policy_versions:
                tokens = len(choice.get("token_ids") or ()) or record.relayed_tokens
                passed_on["policy_versions"] = policy_versions(record, tokens)
            choices.append(passed_on)
    return choices


def _engine_fields(record: RequestRecord) -> Mapping[str, Any]:
    """Return the fields that the engine added to the answer as a whole, without the fields that the gateway writes
    itself."""
    if record.relayed_answer is None:
        return record.answer_fields
    return {name: value for name, value in record.relayed_answer.items() if name not in _WRITTEN_FIELDS}


def _common_fields(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the fields of `_engine_fields` that are equal in all answers."""
    first, *others = [_engine_fields(record) for record in records]
    return {
        name: value
        for name, value in first.items()
        if all(name in fields and fields[name] == value for fields in others)
    }


def _choice(form: ResponseForm, index: int, record: RequestRecord) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        **({"message": _message(form, record)} if form.chat else {"text": record.text}),
        "logprobs": _logprobs(form, record.logprobs or (), 0) if form.logprobs else None,
        "finish_reason": record.finish_reason,
        "stop_reason": record.stop_reason,
    }
    if form.token_ids:
        choice["token_ids"] = list(record.generated_ids)
        if not form.chat:
            choice["prompt_token_ids"] = _prompt_ids(record)
    if form.policy_versions:
        choice["policy_versions"] = policy_versions(record, len(record.generated_ids))
    return choice


def policy_versions(record: RequestRecord, tokens: int) -> list[dict[str, int | None]]:
    return [span._asdict() for span in record.versions.spans(tokens)]


def _message(form: ResponseForm, record: RequestRecord) -> dict[str, Any]:
    message: dict[str, Any] = {"role": form.role, "content": record.text}
    for extra in record.extras:
        _merge_extra(message, extra)
    if record.extras and not record.text:
        message["content"] = None
    return message


def _prompt_ids(record: RequestRecord) -> list[int] | None:
    return None if record.prompt_ids is None else list(record.prompt_ids)


def _merge_extra(message: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """Merge a streamed delta into the message as OpenAI's clients do. Texts are concatenated, and tool calls are merged
    by index."""
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


def _logprobs(form: ResponseForm, logprobs: Sequence[TokenLogprob], first_offset: int) -> dict[str, Any]:
    """Return the logprobs object of an answer. For the completions endpoint, the object includes the character offset
    of each token. The first token has offset `first_offset`."""
    if form.chat:
        return {"content": _chat_logprobs(logprobs, form.top_logprobs)}
    lengths = [len(item.token) for item in logprobs]
    return {
        "text_offset": list(accumulate(lengths, initial=first_offset))[:-1],
        "token_logprobs": [item.logprob for item in logprobs],
        "tokens": [item.token for item in logprobs],
        "top_logprobs": [dict(item.top) for item in logprobs],
    }


def _chat_logprobs(logprobs: Sequence[TokenLogprob], top: int) -> list[dict[str, Any]]:
    # An attempt continued as a completion lists the sampled token among its alternatives, so it has one too many.
    return [
        {
            **_chat_logprob(item.token, item.logprob),
            "top_logprobs": [_chat_logprob(token, value) for token, value in (item.top if top < 0 else item.top[:top])],
        }
        for item in logprobs
    ]


def _chat_logprob(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", errors="replace"))}


class ChunkWriter:
    """Writes the stream chunks of one answer in the format that the client requested. `index` is the index of the
    answer in the response."""

    def __init__(self, form: ResponseForm, index: int, record: RequestRecord) -> None:
        self._form = form
        self._record = record
        self._index = index
        self._ended = False  # a finish_reason has been written
        self._chat = form.chat
        head = json.dumps(form.head(_CHAT_CHUNK), separators=(",", ":"))
        self._head = f'data: {head[:-1]},"choices":[{{"index":{index},'
        self._begun = False
        self._offset = 0
        self._tokens = 0

    def news(self) -> bytes:
        """Return the part of the answer that has not been delivered, as server-sent events. The last event of the
        answer contains the finish_reason."""
        parts = []
        deltas, ends = self._record.take_undelivered(), self._record.finish_reason
        for number, delta in enumerate(deltas, 1):
            if delta.chunk.event is not None:
                parts.append(self._passed_on(delta.chunk.event, delta.version))
            else:
                parts.append(self._begin())
                parts.append(self._chunk(delta, ends if number == len(deltas) else None))
        if ends is not None and not self._ended:
            parts.append(self._begin())
            parts.append(self._chunk(AnswerDelta(Chunk()), ends))
        return "".join(parts).encode()

    def _passed_on(self, event: Mapping[str, Any], version: int | None) -> str:
        """Return the engine's event with the gateway's response id, creation time and index, or "" for an event without
        choices. An event without choices contains only the usage, which the gateway writes for all answers at the end
        of the stream."""
        if not event["choices"]:
            return ""
        self._begun = True
        # Only the choices of a beam search have other indices than 0.
        choices = [{**choice, "index": self._index + choice.get("index", 0)} for choice in event["choices"]]
        self._ended = self._ended or any(choice.get("finish_reason") is not None for choice in choices)
        if self._form.policy_versions:
            choices = [{**choice, "policy_version": version} for choice in choices]
        named = {"id": self._form.answer_id, "created": self._form.created_unix_s, "choices": choices}
        return f"data: {json.dumps({**event, **named}, separators=(',', ':'))}\n\n"

    def _begin(self) -> str:
        """Return the first chunk of a chat stream, which contains the role. Return "" if the stream has begun or is not
        a chat stream."""
        if self._begun or not self._chat:
            return ""
        self._begun = True
        role = f'"delta":{{"role":{quoted(self._form.role)},"content":""}},"logprobs":null,"finish_reason":null'
        return f"{self._head}{role}}}]{self._prompt_ids()}{self._usage()}}}\n\n"

    def _chunk(self, delta: AnswerDelta, finish_reason: str | None) -> str:
        form, chunk = self._form, delta.chunk
        self._tokens += len(chunk.token_ids)
        self._ended = finish_reason is not None
        prompt_ids = ""
        if self._chat:
            content = self._chat_delta(delta)
        else:
            content = f'"text":{quoted(delta.text)}'
            if not self._begun:
                self._begun = True
                prompt_ids = self._prompt_ids()
        logprobs = "null"
        if form.logprobs and chunk.logprobs is not None:
            logprobs = json.dumps(_logprobs(form, chunk.logprobs, self._offset), separators=(",", ":"))
            self._offset += sum(len(item.token) for item in chunk.logprobs)
        ends = f'"finish_reason":{quoted(finish_reason)}' if finish_reason is not None else '"finish_reason":null'
        if finish_reason is not None or not self._chat:
            ends += f',"stop_reason":{json.dumps(self._record.stop_reason if finish_reason is not None else None)}'
        if form.token_ids:
            ends += f',"token_ids":[{",".join(map(str, chunk.token_ids))}]'
        if form.policy_versions:
            ends += f',"policy_version":{json.dumps(delta.version)}'
        ends += _written(chunk.choice_fields)
        others = _written(chunk.answer_fields)
        return f'{self._head}{content},"logprobs":{logprobs},{ends}{prompt_ids}}}]{others}{self._usage()}}}\n\n'

    def _chat_delta(self, delta: AnswerDelta) -> str:
        if delta.extra is None:
            return f'"delta":{{"content":{quoted(delta.text)}}}'
        fields = dict(delta.extra)
        if delta.text:
            fields["content"] = delta.text
        return f'"delta":{json.dumps(fields, separators=(",", ":"))}'

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


def _written(fields: Mapping[str, Any] | None) -> str:
    """Return the fields as JSON text that can be appended inside an object, or "" if there are no fields."""
    return f",{json.dumps(fields, separators=(',', ':'))[1:-1]}" if fields else ""


def usage_chunk(form: ResponseForm, records: Sequence[RequestRecord], answers_per_prompt: int) -> bytes:
    """Return the last chunk of a stream whose client requested the usage."""
    return event(
        {
            **form.head(_CHAT_CHUNK),
            "choices": [],
            "usage": usage(records, records[::answers_per_prompt]),
            **{name: value for name, value in _common_fields(records).items() if name in UNTIED_FIELDS},
        }
    )
