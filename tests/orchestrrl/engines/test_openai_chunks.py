"""Reading events by position gives the same chunks as parsing them."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from orchestrrl.engines.base import Chunk
from orchestrrl.engines.openai_chunks import ChunkReader, StreamError, parse_chunk

TEXTS = st.one_of(st.text(), st.sampled_from(["", " the", '"', "\\", '","token_ids":[3]', "\x7f", "é", "漢", "\u200b"]))
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=3)


@st.composite
def choices(draw: st.DrawFn, chat: bool) -> dict[str, Any]:
    """Return a choice as written by vLLM: most are plain; the first and last, and possibly others, have more fields."""
    content: dict[str, Any] = {"delta": {"content": draw(TEXTS)}} if chat else {"text": draw(TEXTS)}
    if chat and draw(st.integers(0, 5)) == 0:
        content["delta"] |= draw(
            st.sampled_from([{"role": "assistant"}, {"reasoning": "x"}, {"tool_calls": [{"index": 0}]}])
        )
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": None, "stop_reason": None}
    choice |= {"prompt_token_ids": None, "token_ids": draw(IDS)}
    further: dict[str, Any] = {"finish_reason": "stop", "stop_reason": 7, "prompt_token_ids": [1, 2]}
    if draw(st.integers(0, 5)) == 0:
        name = draw(st.sampled_from(sorted(further)))
        choice[name] = further[name]
    for name in draw(st.sets(st.sampled_from(["logprobs", "prompt_token_ids", "stop_reason"]))):
        if choice[name] is None:
            del choice[name]
    return choice


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    chat = draw(st.booleans())
    head = {"id": draw(st.sampled_from(["cmpl-a~1", 'a"text":"b'])), "created": 1, "model": "m"}
    separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    ascii_only = draw(st.booleans())
    return [
        json.dumps({**head, "choices": [choice]}, separators=separators, ensure_ascii=ascii_only).encode(
            errors="surrogatepass"
        )
        for choice in draw(st.lists(choices(chat), min_size=1, max_size=12))
    ]


def parsed(event: bytes) -> Chunk | type[Exception] | None:
    try:
        chunk = parse_chunk(json.loads(event))
    except ValueError:  # text that is not UTF-8
        return ValueError
    return None if chunk is None else replace(chunk, raw=None)


def read_one(reader: ChunkReader, event: bytes) -> Chunk | None:
    return reader.read_on([event], 0)[0]


def read(reader: ChunkReader, event: bytes) -> Chunk | type[Exception] | None:
    try:
        chunk = read_one(reader, event)
    except ValueError:
        return ValueError
    return None if chunk is None else replace(chunk, raw=None)


@given(streams())
def test_framed_reading_equals_parsing(events: list[bytes]) -> None:
    reader = ChunkReader()
    assert [read(reader, event) for event in events] == [parsed(event) for event in events]


PLAIN = b'{"choices":[{"index":0,"text":"a","finish_reason":null,"token_ids":[5]}]}'


@given(st.binary(max_size=12), st.integers(0, len(PLAIN)), st.integers(0, 12))
@example(b"07", PLAIN.index(b"5"), 1)
@example(b"b\x01", PLAIN.index(b'a"'), 1)
def test_framed_reading_of_mutated_events_equals_parsing(junk: bytes, at: int, dropped: int) -> None:
    reader = ChunkReader()
    read_one(reader, PLAIN)
    event = PLAIN[:at] + junk + PLAIN[at + dropped :]
    outcomes: list[Any] = []
    for call in (lambda: parse_chunk(json.loads(event)), lambda: read_one(reader, event)):
        try:
            chunk = call()
            outcomes.append(chunk and replace(chunk, raw=None))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]


@given(streams(), st.integers(1, 5))
def test_merged_events_have_the_same_content(events: list[bytes], together: int) -> None:
    reader = ChunkReader()
    one_by_one, merged = [parsed(event) for event in events], []
    assume(ValueError not in one_by_one)
    for start in range(0, len(events), together):
        at, some = 0, events[start : start + together]
        while at < len(some):
            chunk, at = reader.read_on(some, at)
            merged.append(chunk)
    assert joined(merged) == joined(one_by_one)


def joined(chunks: list[Any]) -> list[Any]:
    """Return the whole content in order, independent of the cuts."""
    content: list[Any] = []
    for chunk in chunks:
        content += [*chunk.token_ids]
        content += [chunk.prompt_token_ids, chunk.finish_reason, chunk.stop_reason]
    return [item for item in content if item is not None] + ["".join(chunk.text for chunk in chunks)]


def test_forwarded_fields_are_kept() -> None:
    reader = ChunkReader()
    for delta in ({"content": "a"}, {"content": "a"}, {"content": "a", "reasoning": "b"}):
        choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [5]}
        chunk = read_one(reader, json.dumps({"choices": [choice]}).encode())
        assert chunk is not None
        assert "reasoning" not in delta or chunk.raw == choice


def test_error_event_raises_stream_error() -> None:
    event = {"error": {"message": "dying", "code": 500}}
    with pytest.raises(StreamError) as raised:
        read_one(ChunkReader(), json.dumps(event).encode())
    assert raised.value.event == event
