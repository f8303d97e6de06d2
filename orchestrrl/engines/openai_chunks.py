"""Read what OpenAI-compatible engines stream: server-sent events, as Chunks. Pure.

The events of one stream are alike but for a text and its tokens. Once one has been parsed, those that equal it around
these two are read by their place, at a third of the price; whatever looks different is parsed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrrl.engines.base import Chunk, TokenLogprob

_TEXTS = (b'"text":"', b'"text": "', b'"content":"', b'"content": "')
# Fields that Chunk or the writer of the answer has a place for.
_CHOICE_FIELDS = frozenset(
    {"index", "text", "delta", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids"}
)
_ANSWER_FIELDS = frozenset({"id", "object", "created", "model", "choices", "usage", "prompt_token_ids"})
_TOKENS = (b'"token_ids":[', b'"token_ids": [')
DONE = b"[DONE]"
MOST_LINE_BYTES = 128 << 20  # the ids of a prompt of ten million tokens; whatever has no end has to have one


class ServerSentEvents:
    """The content of each `data:` line, however the network cut the lines up; comments (keep-alives) and other fields
    are left out. A line may be long: the one that carries a long prompt's ids has hundreds of kilobytes. An unfinished
    last line is never given out. Pure."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []  # of a line that is not all there
        self._pending_bytes = 0

    def feed(self, read: bytes) -> list[bytes]:
        """Raises ValueError for a line that is longer than any should be."""
        *lines, rest = read.split(b"\n")
        if lines and self._pending:
            lines[0] = b"".join((*self._pending, lines[0]))
            self._pending.clear()
            self._pending_bytes = 0
        if rest:
            self._pending.append(rest)
            self._pending_bytes += len(rest)
            if self._pending_bytes > MOST_LINE_BYTES:
                raise ValueError(f"a line of more than {MOST_LINE_BYTES >> 20} MiB")
        return [line[len(b"data:") :].strip() for line in lines if line.startswith(b"data:")]


class StreamError(Exception):
    """The event is an error object: `event`, and within it `error`."""

    def __init__(self, event: Mapping[str, Any]) -> None:
        super().__init__(event["error"])
        self.event = event
        self.error: Mapping[str, Any] = event["error"]


class ChunkReader:
    """Reads one stream's events, in order."""

    def __init__(self) -> None:
        # What stands before the text, between it and the tokens, and after them.
        self._frame: tuple[bytes, bytes, bytes] | None = None
        self._tries = 8  # to find a frame: the first event may hold more than the rest

    def read_on(self, events: Sequence[bytes], at: int) -> tuple[Chunk | None, int]:
        """The chunk at `at`, and the place after it. Plain events that came together are one chunk, as vLLM makes of
        those that its own sender is behind with. As `parse_chunk`, but for `raw`, which is left out where it would tell
        nothing more. Raises StreamError, and what `parse_chunk` raises."""
        first = self._framed(events[at])
        if first is None:
            return self._parsed(events[at]), at + 1
        at += 1
        if at == len(events) or (following := self._framed(events[at])) is None:
            return Chunk(first[0], first[1]), at
        ids, texts = [*first[0]], [first[1]]
        found: tuple[tuple[int, ...], str] | None = following
        while found is not None:
            ids += found[0]
            texts.append(found[1])
            at += 1
            found = self._framed(events[at]) if at < len(events) else None
        return Chunk(tuple(ids), "".join(texts)), at

    def _framed(self, data: bytes) -> tuple[tuple[int, ...], str] | None:
        """The tokens and the text of an event that looks as the last parsed one did around them."""
        if self._frame is None:
            return None
        head, middle, tail = self._frame
        if not (data.startswith(head) and data.endswith(tail)):
            return None
        text_at = len(head)
        text_stop = data.find(b'"', text_at)
        if not data.startswith(middle, text_stop):
            return None
        listed = data[text_stop + len(middle) : -len(tail)].split(b",")
        if not all(number.isdigit() and (number[0] != ord("0") or number == b"0") for number in listed):
            return None
        try:
            text = data[text_at:text_stop].decode()
        except UnicodeDecodeError:
            return None
        # Escapes and control characters are for the parser.
        return None if "\\" in text or not text.isprintable() else (tuple(map(int, listed)), text)

    def _parsed(self, data: bytes) -> Chunk | None:
        chunk = parse_chunk(parse_event(data))
        if self._tries and chunk is not None and chunk.token_ids and plain(chunk):
            self._tries -= 1
            self._frame = _frame(data) or self._frame
        return chunk


def _frame(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """How an event is written around its text and its tokens; None where it does not become a plain event when both are
    replaced."""
    text_at = next((at + len(name) for name in _TEXTS if (at := data.find(name)) >= 0), -1)
    text_stop = data.find(b'"', text_at)
    ids_at = next((at + len(name) for name in _TOKENS if (at := data.find(name, text_stop)) >= 0), -1)
    ids_stop = data.find(b"]", ids_at)
    if min(text_at, text_stop, ids_at, ids_stop) < 0:
        return None
    head, middle, tail = data[:text_at], data[text_stop:ids_at], data[ids_stop:]
    try:
        event = json.loads(b"%bx%b7%b" % (head, middle, tail))
        chunk = parse_chunk(event)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    if chunk is None or "error" in event or not plain(chunk) or (chunk.text, chunk.token_ids) != ("x", (7,)):
        return None
    return head, middle, tail


def plain(chunk: Chunk) -> bool:
    """Whether it tells of a text and its tokens, and of nothing else."""
    parsed = (chunk.raw or {}).get("delta") or {}
    told = (chunk.prompt_token_ids, chunk.logprobs, chunk.finish_reason, chunk.stop_reason)
    more = (chunk.choice_fields, chunk.answer_fields, chunk.usage)
    return (
        told == (None,) * 4
        and more == (None,) * 3
        and not any(parsed[name] for name in parsed.keys() - {"role", "content"})
    )


def parse_event(data: bytes) -> dict[str, Any]:
    """One event of a stream. Raises StreamError for an error object, and ValueError and others for no event at all."""
    try:
        event: dict[str, Any] = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if event.get("error") is not None:
        raise StreamError(event)
    return event


def parse_chunk(event: Mapping[str, Any]) -> Chunk | None:
    """A `/v1/completions` or `/v1/chat/completions` stream event as a Chunk. One without a choice has the usage of the
    whole answer; None for one that has none."""
    if not event["choices"]:
        usage, fields = event.get("usage"), _others(event, _ANSWER_FIELDS)
        return Chunk(usage=usage, answer_fields=fields) if usage or fields else None
    choice = event["choices"][0]
    token_ids = tuple(choice.get("token_ids") or ())
    prompt_ids = choice.get("prompt_token_ids") or event.get("prompt_token_ids")
    return Chunk(
        token_ids=token_ids,
        text=(choice["delta"].get("content") or "") if "delta" in choice else choice["text"],
        prompt_token_ids=None if prompt_ids is None else tuple(prompt_ids),
        logprobs=parse_logprobs(choice.get("logprobs"), len(token_ids)),
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason"),
        raw=choice,
        choice_fields=_others(choice, _CHOICE_FIELDS),
        answer_fields=_others(event, _ANSWER_FIELDS),
    )


def _others(found: Mapping[str, Any], known: frozenset[str]) -> Mapping[str, Any] | None:
    """Return the fields that are neither known nor null; None where there are none."""
    if found.keys() <= known:
        return None
    return {name: value for name, value in found.items() if name not in known and value is not None} or None


def other_answer_fields(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of an answer, or of an event of one, beside its choices, its name and its usage."""
    return _others(event, _ANSWER_FIELDS) or {}


def parse_logprobs(logprobs: Mapping[str, Any] | None, tokens: int) -> tuple[TokenLogprob, ...] | None:
    """Both formats as one; the last `tokens` entries, since `echo` puts the prompt's before them."""
    if logprobs is None:
        return None
    if "content" in logprobs:
        content = logprobs["content"] or ()
        entries = [
            TokenLogprob(
                item["token"], item["logprob"], tuple((top["token"], top["logprob"]) for top in item["top_logprobs"])
            )
            for item in content[len(content) - tokens :]
        ]
    else:
        first = len(logprobs["tokens"]) - tokens
        tops = logprobs["top_logprobs"] or [{}] * len(logprobs["tokens"])
        rows = zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
        entries = [TokenLogprob(token, logprob, tuple((top or {}).items())) for token, logprob, top in rows][first:]
    return tuple(entries)
