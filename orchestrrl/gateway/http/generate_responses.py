"""Build the answers of vLLM's endpoint /inference/v1/generate, whole and streamed, with the gateway's extensions. The
functions have no side effects.

Fields without a value are null, as in vLLM's answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrrl.engines.base import Chunk, TokenLogprob
from orchestrrl.engines.generate_chunks import PLACEHOLDER
from orchestrrl.gateway.http.responses import ResponseForm, event, policy_versions, usage
from orchestrrl.gateway.ledger.ledger import AnswerDelta, RequestRecord
from orchestrrl.gateway.ledger.weight_labels import WEIGHT_VERSIONS, joined_labels

_NO_DETAILS = {"prompt_tokens_details": None, "completion_tokens_details": None}
_MM_PLACEHOLDERS = "mm_placeholders"  # positions in the prompt, sent together with its tokens
# Fields of a whole answer that the engine sets.
_ENGINE_FIELDS = (
    "prompt_logprobs",
    "prompt_token_id_logprobs",
    "prompt_token_ids",
    _MM_PLACEHOLDERS,
    "metrics",
    "kv_transfer_params",
    "ec_transfer_params",
)
_OPTIONAL_CHOICE_FIELDS = ("routed_experts", "sampling_mask", WEIGHT_VERSIONS)


def generate_response(form: ResponseForm, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the complete response object. `records` are the samples of one prompt, sorted by index."""
    first = records[0]
    relayed = first.relayed_answer or {}
    head = {
        "request_id": form.answer_id,
        "model": relayed.get("model", form.model),
        "created": form.created_unix_s,
        "usage": {**_NO_DETAILS, **usage(records, records[:1])},
    }
    tail = {
        "output_mode": _mode(form),
        "choices": [
            {**choice, "index": index}
            for index, choice in enumerate(choice for record in records for choice in _choices(form, record))
        ],
    }
    fields = {**dict.fromkeys(_ENGINE_FIELDS), **first.answer_fields, **relayed}
    if form.token_ids and not relayed:
        fields["prompt_token_ids"] = None if first.prompt_ids is None else list(first.prompt_ids)
    if len(records) > 1:
        fields["metrics"] = None  # they describe one sample
    return {**head, **{name: value for name, value in fields.items() if name not in head}, **tail}


def _choices(form: ResponseForm, record: RequestRecord) -> list[dict[str, Any]]:
    """Return the choices of one record: one, unless the engine's own answer has several."""
    if record.relayed_answer is None:
        choices = [_choice(form, record)]
    else:
        choices = [{**choice} for choice in record.relayed_answer["choices"]]
    if form.policy_versions:
        for choice in choices:
            choice["policy_versions"] = policy_versions(record, len(choice["token_ids"] or ()))
    return choices


def _choice(form: ResponseForm, record: RequestRecord) -> dict[str, Any]:
    return {
        "index": 0,
        "finish_reason": record.finish_reason,
        "stop_reason": record.stop_reason,
        "token_ids": list(record.generated_ids),
        **dict.fromkeys(_OPTIONAL_CHOICE_FIELDS),
        **({"text": record.text} if form.text else {}),
        "logprobs": _logprobs(record.logprobs or ()) if form.logprobs else None,
        **record.choice_fields,
        **_labels(record),
    }


def _labels(record: RequestRecord) -> dict[str, Any]:
    """Return the labels of the weights that generated the tokens. If no engine reported the end of the answer, for
    example because the client cancelled it, the labels are those of the policy versions in the ledger."""
    if WEIGHT_VERSIONS in record.choice_fields:
        return {WEIGHT_VERSIONS: record.choice_fields[WEIGHT_VERSIONS]}
    return {WEIGHT_VERSIONS: joined_labels(record.versions, len(record.generated_ids), ())}


def _mode(form: ResponseForm) -> str:
    return "text" if form.text else "tokens"


def _logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [_by_id(item) if item.ranks else _by_text(item) for item in logprobs]}


def _by_id(item: TokenLogprob) -> dict[str, Any]:
    rank, *ranks = item.ranks
    tops = [_entry(token, value, of_top) for (token, value), of_top in zip(item.top, ranks, strict=True)]
    return {**_entry(item.token, item.logprob, rank), "top_logprobs": tops}


def _entry(token: str, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"token_id": int(token.removeprefix(PLACEHOLDER)), "logprob": logprob, "rank": rank}


def _by_text(item: TokenLogprob) -> dict[str, Any]:
    tops = [_text_entry(token, value) for token, value in item.top]
    return {**_text_entry(item.token, item.logprob), "top_logprobs": tops}


def _text_entry(token: str, logprob: float) -> dict[str, Any]:
    # A token that the engine did not decode has no bytes.
    encoded = None if token.startswith(PLACEHOLDER) else list(token.encode("utf-8", errors="replace"))
    return {"token": token, "logprob": logprob, "bytes": encoded}


class GenerateStream:
    """Creates the writers of one streamed response. The tokens of the prompt are written once."""

    def __init__(self, form: ResponseForm) -> None:
        self.form = form
        self._prompt_due = form.token_ids

    def writer(self, index: int, record: RequestRecord) -> "GenerateChunkWriter":
        return GenerateChunkWriter(self, index, record)

    def takes_prompt(self) -> bool:
        """Return True, once, if an event must describe the prompt."""
        due, self._prompt_due = self._prompt_due, False
        return due

    def prompt_fields(self, record: RequestRecord, chunk: Chunk) -> dict[str, Any]:
        """Return the fields that describe the prompt, for the first event of the response, or else no fields."""
        if record.prompt_ids is None or not self.takes_prompt():
            return {}
        placeholders = (chunk.answer_fields or {}).get(_MM_PLACEHOLDERS)
        fields: dict[str, Any] = {"prompt_token_ids": list(record.prompt_ids)}
        return fields if placeholders is None else {**fields, _MM_PLACEHOLDERS: placeholders}


class GenerateChunkWriter:
    """Writes the events of one sample."""

    def __init__(self, stream: GenerateStream, index: int, record: RequestRecord) -> None:
        self._stream = stream
        self._form = stream.form
        self._record = record
        self._index = index
        self._ended = False  # a finish_reason has been written
        self._tokens = 0

    def news(self) -> bytes:
        """Return the part of the answer that has not been delivered, as server-sent events. The last event of the
        answer contains the finish_reason."""
        deltas, ended = self._record.take_undelivered(), self._record.finish_reason is not None
        parts = [self._event(delta, ended and number == len(deltas)) for number, delta in enumerate(deltas, 1)]
        if ended and not self._ended:
            parts.append(self._event(AnswerDelta(Chunk()), last=True))
        return b"".join(parts)

    def _event(self, delta: AnswerDelta, last: bool) -> bytes:
        if delta.chunk.event is not None:
            return self._passed_on(delta.chunk.event, delta.version)
        form, chunk = self._form, delta.chunk
        self._tokens += len(chunk.token_ids)
        self._ended = last
        choice = {
            "index": self._index,
            "finish_reason": self._record.finish_reason if last else None,
            "stop_reason": self._record.stop_reason if last else None,
            "token_ids": list(chunk.token_ids),
            **dict.fromkeys(_OPTIONAL_CHOICE_FIELDS),
            **({"text": delta.text} if form.text else {}),
            "logprobs": _logprobs(chunk.logprobs or ()) if form.logprobs else None,
            **(chunk.choice_fields or {}),
            **(_labels(self._record) if last else {}),
            **({"policy_version": delta.version} if form.policy_versions else {}),
        }
        others = {name: value for name, value in (chunk.answer_fields or {}).items() if name != _MM_PLACEHOLDERS}
        return event(
            {
                "request_id": form.answer_id,
                "usage": self._usage(),
                **self._stream.prompt_fields(self._record, chunk),
                **others,
                "output_mode": _mode(form),
                "choices": [choice],
            }
        )

    def _passed_on(self, engines: Mapping[str, Any], version: int | None) -> bytes:
        """Return the engine's event with the gateway's response id and index, or b"" for an event without choices,
        which contains only the usage."""
        choices = [{**choice, "index": self._index} for choice in engines["choices"]]
        if not choices:
            return b""
        self._ended = self._ended or any(choice.get("finish_reason") is not None for choice in choices)
        if self._form.policy_versions:
            choices = [{**choice, "policy_version": version} for choice in choices]
        passed_on = {**engines, "request_id": self._form.answer_id, "choices": choices}
        if "prompt_token_ids" in engines and not self._stream.takes_prompt():
            del passed_on["prompt_token_ids"]
            passed_on.pop(_MM_PLACEHOLDERS, None)
        return event(passed_on)

    def _usage(self) -> dict[str, Any] | None:
        if not self._form.continuous_usage:
            return None
        prompt = self._record.prompt_tokens
        counts = {"prompt_tokens": prompt, "total_tokens": prompt + self._tokens, "completion_tokens": self._tokens}
        return {**counts, **_NO_DETAILS}


def generate_usage_chunk(form: ResponseForm, records: Sequence[RequestRecord]) -> bytes:
    """Return the last event of a stream whose client requested the usage."""
    metrics = records[0].answer_fields.get("metrics") if len(records) == 1 else None
    return event(
        {
            "request_id": form.answer_id,
            "usage": usage(records, records[:1]),
            **({} if metrics is None else {"metrics": metrics}),
            "output_mode": _mode(form),
            "choices": [],
        }
    )
