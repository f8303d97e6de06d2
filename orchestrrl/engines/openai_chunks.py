"""Parse the server-sent events of OpenAI-compatible engines into Chunks, without I/O.

The events of one stream usually differ only in their text and tokens. After one event has been parsed as JSON, the text
and tokens of later events that match it in all other bytes are read by position, which takes a third of the time that
parsing takes. All other events are parsed as JSON.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrrl.engines.base import Chunk, TokenLogprob

_TEXTS = (b'"text":"', b'"text": "', b'"content":"', b'"content": "')
# Fields that Chunk represents or that the writer of the answer produces.
_CHOICE_FIELDS = frozenset(
    {"index", "text", "delta", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids"}
)
_ANSWER_FIELDS = frozenset({"id", "object", "created", "model", "choices", "usage", "prompt_token_ids"})
_TOKENS = (b'"token_ids":[', b'"token_ids": [')
DONE = b"[DONE]"
ParseChunk = Callable[[Mapping[str, Any]], Chunk | None]
MOST_LINE_BYTES = 128 << 20  # fits the ids of a prompt of ten million tokens; bounds a line without an end


class ServerSentEvents:
    """Splits a byte stream into the contents of its `data:` lines. Comments (keep-alives) and other fields are skipped.
    A line may be hundreds of kilobytes long, for example if it contains the token ids of a long prompt. An incomplete
    last line is never returned."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []  # parts of an incomplete line
        self._pending_bytes = 0

    def feed(self, read: bytes) -> list[bytes]:
        """Return the contents of the lines that `read` completes. Raises ValueError if a line exceeds
        `MOST_LINE_BYTES`."""
        *lines, rest = read.split(b"\n")
        if lines and self._pending:
            lines[0] = b"".join((*self._pending, lines[0]))
            self._pending.clear()
            self._pending_bytes = 0
        if rest:
            self._pending.append(rest)
            self._pending_bytes += len(rest)
            if self._pending_bytes > MOST_LINE_BYTES:
                raise ValueError(
                    f"an event line must have at most {MOST_LINE_BYTES} bytes, got at least {self._pending_bytes}"
                )
        return [line[len(b"data:") :].strip() for line in lines if line.startswith(b"data:")]


class StreamError(Exception):
    """The engine sent an error event. `event` is the whole object, and `error` is the value of its field `error`."""

    def __init__(self, event: Mapping[str, Any]) -> None:
        super().__init__(event["error"])
        self.event = event
        self.error: Mapping[str, Any] = event["error"]


class ChunkReader:
    """Converts the events of one stream into Chunks, in order."""

    def __init__(self, parse: ParseChunk | None = None) -> None:
        """Create a reader. `parse` converts a parsed event into a Chunk. The default is `parse_chunk`."""
        self._parse = parse or parse_chunk
        # The bytes of an event before its text, between text and tokens, and after the tokens.
        self._frame: tuple[bytes, bytes, bytes] | None = None
        self._tries = 8  # attempts to find a frame; the first event may have more fields than the others

    def read_on(self, events: Sequence[bytes], at: int) -> tuple[Chunk | None, int]:
        """Return the chunk that starts at `events[at]`, and the index of the first event after the chunk. Consecutive
        plain events are merged into one chunk, as vLLM does when its sender lags. The chunk equals the result of
        `parse_chunk`, except that `raw` is omitted for plain events. Raises StreamError for an error event, and
        ValueError, KeyError, IndexError, TypeError or AttributeError for a malformed event."""
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
        """Return the tokens and text of an event if all its other bytes match those of an earlier plain event.
        Otherwise, return None."""
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
        # Events with escapes or control characters go to the JSON parser.
        return None if "\\" in text or not text.isprintable() else (tuple(map(int, listed)), text)

    def _parsed(self, data: bytes) -> Chunk | None:
        chunk = self._parse(parse_event(data))
        if self._tries and chunk is not None and chunk.token_ids and plain(chunk):
            self._tries -= 1
            self._frame = _frame(data, self._parse) or self._frame
        return chunk


def _frame(data: bytes, parse: ParseChunk) -> tuple[bytes, bytes, bytes] | None:
    """Return the bytes of an event before its text, between its text and tokens, and after its tokens. Return None if
    the event is not plain, because other events then cannot be compared with it."""
    text_at = next((at + len(name) for name in _TEXTS if (at := data.find(name)) >= 0), -1)
    text_stop = data.find(b'"', text_at)
    ids_at = next((at + len(name) for name in _TOKENS if (at := data.find(name, text_stop)) >= 0), -1)
    ids_stop = data.find(b"]", ids_at)
    if min(text_at, text_stop, ids_at, ids_stop) < 0:
        return None
    head, middle, tail = data[:text_at], data[text_stop:ids_at], data[ids_stop:]
    try:
        event = json.loads(b"%bx%b7%b" % (head, middle, tail))
        chunk = parse(event)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    if chunk is None or "error" in event or not plain(chunk) or (chunk.text, chunk.token_ids) != ("x", (7,)):
        return None
    return head, middle, tail


def plain(chunk: Chunk) -> bool:
    """Return whether the chunk contains only a text and its tokens."""
    parsed = (chunk.raw or {}).get("delta") or {}
    single = (chunk.prompt_token_ids, chunk.logprobs, chunk.finish_reason, chunk.stop_reason)
    more = (chunk.choice_fields, chunk.answer_fields, chunk.usage)
    return (
        single == (None,) * 4
        and more == (None,) * 3
        and not any(parsed[name] for name in parsed.keys() - {"role", "content"})
    )


def parse_event(data: bytes) -> dict[str, Any]:
    """Parse one event. Raises StreamError for an error object, ValueError if the event is not JSON, and AttributeError
    if it is not a JSON object."""
    try:
        event: dict[str, Any] = json.loads(data)
    except RecursionError as error:
        raise ValueError("an event of the stream cannot be parsed: its JSON is nested too deeply") from error
    if event.get("error") is not None:
        raise StreamError(event)
    return event


def parse_chunk(event: Mapping[str, Any]) -> Chunk | None:
    """Convert a `/v1/completions` or `/v1/chat/completions` stream event into a Chunk. For an event without choices,
    return a Chunk with the usage of the whole answer and any further fields, or None if the event has neither."""
    if not event["choices"]:
        usage, fields = event.get("usage"), other_fields(event, _ANSWER_FIELDS)
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
        choice_fields=other_fields(choice, _CHOICE_FIELDS),
        answer_fields=other_fields(event, _ANSWER_FIELDS),
    )


def other_fields(found: Mapping[str, Any], known: frozenset[str]) -> Mapping[str, Any] | None:
    """Return the fields that are neither in `known` nor null, or None if there are no such fields."""
    if found.keys() <= known:
        return None
    return {name: value for name, value in found.items() if name not in known and value is not None} or None


def other_answer_fields(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of an answer or event except its choices, identification and usage."""
    return other_fields(event, _ANSWER_FIELDS) or {}


def parse_logprobs(logprobs: Mapping[str, Any] | None, tokens: int) -> tuple[TokenLogprob, ...] | None:
    """Parse the logprobs of a completion or a chat, or return None if the engine sent none. Only the last `tokens`
    entries are returned, because with `echo` the entries of the prompt precede those of the answer."""
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
