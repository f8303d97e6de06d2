"""Parse and format `/v1/responses`, limited to text in and text out. The module has no side effects.

The shapes are those of vLLM for a model without a reasoning or tool parser. Stored responses are not supported.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrrl.lab.simulated_engine.endings import AnswerPart, ResponseText
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.refusals import refusal, validated
from orchestrrl.lab.simulated_engine.requests import ChatMessage, tokenize_chat
from orchestrrl.lab.simulated_engine.responses import TokenFormatter
from orchestrrl.lab.simulated_engine.sampling import (
    Alternatives,
    SamplingBody,
    SimulatedRequest,
    check_model,
    limit_tokens,
    requests_for,
)
from orchestrrl.lab.simulated_engine.tokens import TokenModel

LOGPROBS = "message.output_text.logprobs"
STATUSES = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}


class _ResponsesBody(SamplingBody):
    input: str | list[ChatMessage]
    instructions: str | None = None
    max_output_tokens: int | None = None
    model: str | None = None
    stream: bool | None = False
    include: list[str] | None = None
    top_logprobs: Alternatives | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    n: Literal[1] | None = None
    previous_response_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SimulatedResponsesCall:
    """A validated call of `/v1/responses`."""

    body: _ResponsesBody
    request: SimulatedRequest


def read_responses(body: Any, options: SimulatedOptions, model: TokenModel) -> SimulatedResponsesCall:
    """Parse a `/v1/responses` body. Raises RequestRefused if it is invalid or unsupported."""
    read = validated(_ResponsesBody, body)
    check_model(read.model, options)
    if read.previous_response_id is not None:
        raise refusal(
            f"Response with id '{read.previous_response_id}' not found.", "response_id", 404, "invalid_request_error"
        )
    longest = options.max_model_len_tokens
    if (read.max_output_tokens or 0) > longest:
        raise refusal(
            f"max_output_tokens={read.max_output_tokens} cannot be greater than max_model_len={longest}. Please "
            "request fewer output tokens.",
            "max_output_tokens",
        )
    asked = [ChatMessage(role="user", content=read.input)] if isinstance(read.input, str) else read.input
    system = [] if read.instructions is None else [ChatMessage(role="system", content=read.instructions)]
    prompt_ids = tokenize_chat([*system, *asked], True, model)
    max_tokens = limit_tokens(read.max_output_tokens, len(prompt_ids), longest)
    top_logprobs = (read.top_logprobs or 0) if LOGPROBS in (read.include or ()) else None
    (request,) = requests_for(read, prompt_ids, max_tokens, top_logprobs, read.kv_transfer_params)
    return SimulatedResponsesCall(read, request)


class ResponsesFormatter:
    """Formats the answer to a `/v1/responses` call."""

    def __init__(
        self, call: SimulatedResponsesCall, response_id: str, created: int, model_name: str, model: TokenModel
    ) -> None:
        self._request = call.request
        self._body = call.body
        self._head = {"id": response_id, "created_at": created, "model": model_name}
        self._message_id = response_id.replace("resp_", "msg_")
        self._tokens = TokenFormatter(model)
        self._text = ResponseText(call.request, model)
        self._made = AnswerPart([], [])  # all tokens so far
        self._made_text = ""
        self._finish_reason: str | None = None
        self._events = 0

    def opening(self) -> list[bytes]:
        response = self._response("in_progress", [], None)
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def part(self, choice: int, part: AnswerPart) -> bytes:
        self._take(part)
        delta = self._text.add(part)
        is_first = not self._made_text
        self._made_text += delta
        if not delta:
            return b""
        events = self._item_opening() if is_first else []
        # Entries of a stream have no bytes in vLLM.
        shown = [_without_bytes(entry) for entry in self._logprobs(part) or ()]
        return b"".join([*events, self._text_event("response.output_text.delta", delta=delta, logprobs=shown)])

    def closing(self) -> list[bytes]:
        events = self._item_closing() if self._made_text else []
        return [*events, self._event("response.completed", response=self._finished())]

    def whole(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        (part,) = parts
        self._take(part)
        self._made_text = self._text.add(part)
        return self._finished()

    def _take(self, part: AnswerPart) -> None:
        self._made.token_ids.extend(part.token_ids)
        self._made.logprobs.extend(part.logprobs)
        self._finish_reason = part.finish_reason

    def _finished(self) -> dict[str, Any]:
        prompt_tokens, tokens = len(self._request.prompt_ids), len(self._made.token_ids)
        usage = {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": 0,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": tokens,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": prompt_tokens + tokens,
        }
        output = [self._item("completed", [self._content()])] if self._made_text else []
        return self._response(STATUSES[self._finish_reason or "stop"], output, usage)

    def _response(self, status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        body = self._body
        return {
            **self._head,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": body.used_temperature,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "background": False,
            "max_output_tokens": self._request.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": self._request.top_logprobs,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _content(self) -> dict[str, Any]:
        logprobs = self._logprobs(self._made)
        return {"annotations": [], "text": self._made_text, "type": "output_text", "logprobs": logprobs}

    def _logprobs(self, part: AnswerPart) -> list[dict[str, Any]] | None:
        if self._request.top_logprobs is None:
            return None
        entries: list[dict[str, Any]] = self._tokens.chat_logprobs(part, self._request.top_logprobs)["content"]
        return entries

    def _item_opening(self) -> list[bytes]:
        empty = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        item = self._item("in_progress", [])
        return [
            self._event("response.output_item.added", item=item, output_index=0),
            self._text_event("response.content_part.added", part=empty),
        ]

    def _item_closing(self) -> list[bytes]:
        return [
            self._text_event("response.output_text.done", text=self._made_text, logprobs=[]),
            self._text_event("response.content_part.done", part=self._content()),
            self._event("response.output_item.done", item=self._item("completed", [self._content()]), output_index=0),
        ]

    def _text_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, content_index=0, item_id=self._message_id, output_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = json.dumps({**fields, "sequence_number": self._events, "type": kind}, separators=(",", ":"))
        self._events += 1
        return f"event: {kind}\ndata: {body}\n\n".encode()


def _without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    tops = [{"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": tops}
