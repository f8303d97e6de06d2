"""Parse the events of vLLM's endpoint /inference/v1/generate into Chunks, without I/O.

The endpoint returns tokens, and with `output_mode: text` also their text. Its log-probabilities name tokens by integer
ids and have ranks, or have the shape of chats: with `output_mode: text`, and in vLLM 0.31, which has no output modes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrrl.engines.base import Chunk, TokenLogprob
from orchestrrl.engines.openai_chunks import StreamError, other_fields, parse_logprobs

PLACEHOLDER = "token_id:"  # vLLM's text for a token that it does not decode, before the token's id
_NO_TEXT = {
    "message": "the engine ignores output_mode and returns tokens only; text needs vLLM 0.32 or later",
    "type": "BadRequestError",
    "param": "output_mode",
    "code": 400,
}

# Fields that Chunk represents or that the writer of the answer produces.
_CHOICE_FIELDS = frozenset({"index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids"})
_ANSWER_FIELDS = frozenset({"request_id", "output_mode", "choices", "usage", "prompt_token_ids"})


def parse_generate_chunk(event: Mapping[str, Any], *, text: bool = False) -> Chunk | None:
    """Convert an event into a Chunk. For an event without choices, return a Chunk with the usage of the whole answer
    and any further fields, or None if the event has neither. Raises StreamError if `text` is True and the event's
    choice has no text."""
    if not event["choices"]:
        usage, fields = event.get("usage"), other_fields(event, _ANSWER_FIELDS)
        return Chunk(usage=usage, answer_fields=fields) if usage or fields else None
    choice = event["choices"][0]
    if text and "text" not in choice:
        raise StreamError({"error": _NO_TEXT})
    _check_spans(choice.get("weight_versions"))
    token_ids = tuple(choice["token_ids"] or ())
    prompt_ids = event.get("prompt_token_ids")
    return Chunk(
        token_ids=token_ids,
        text=choice.get("text") or "",
        prompt_token_ids=None if prompt_ids is None else tuple(prompt_ids),
        logprobs=_logprobs(choice.get("logprobs"), len(token_ids)),
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason"),
        choice_fields=other_fields(choice, _CHOICE_FIELDS),
        answer_fields=other_fields(event, _ANSWER_FIELDS),
    )


def _check_spans(spans: Sequence[Mapping[str, Any]] | None) -> None:
    """Raise ValueError if the spans of tokens with the label of their weights are not contiguous from 0, and TypeError
    or KeyError if they are malformed."""
    end = 0
    for span in spans or ():
        if not isinstance(span["version"], str) or span["start"] != end or type(span["end"]) is not int:
            raise ValueError(f"weight_versions: must have contiguous spans of tokens with labels, got {span}")
        end = max(end, span["end"])


def _logprobs(logprobs: Mapping[str, Any] | None, tokens: int) -> tuple[TokenLogprob, ...] | None:
    content = (logprobs or {}).get("content")
    if not content or "token_id" not in content[0]:
        return parse_logprobs(logprobs, tokens)
    return tuple(
        TokenLogprob(
            f"{PLACEHOLDER}{item['token_id']}",
            item["logprob"],
            tuple((f"{PLACEHOLDER}{top['token_id']}", top["logprob"]) for top in item["top_logprobs"]),
            (item.get("rank"), *(top.get("rank") for top in item["top_logprobs"])),
        )
        for item in content
    )
