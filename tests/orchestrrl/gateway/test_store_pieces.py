"""Answers in pieces: after any loss, the reassembled answer is an earlier state of the record, never another answer."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.engines.base import Chunk, CompletionEndpoint, TokenLogprob
from orchestrrl.gateway.http.completion_requests import read_completion_request
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.ledger.pieces import AnswerPiece, RecordCutter, digest_of, give_back, key_of, put_together

PROMPT = "a prompt"


def record_of(*, streaming: bool = False, **body: Any) -> RequestRecord:
    asked = {"prompt": PROMPT, "max_tokens": 1000, "stream": streaming, **body}
    ask = read_completion_request(
        CompletionEndpoint.COMPLETIONS, asked, request_id="r", group="", tag="", default_model="m", now_s=0.0
    )
    (record,) = ask.records
    return record


def shown(record: RequestRecord) -> tuple[Any, ...]:
    """Return all parts of an answer that a client can receive."""
    ids = tuple(record.generated_ids)
    logprobs = tuple(record.logprobs) if record.logprobs is not None else None
    spans = record.versions.spans(len(ids))
    ends = (record.finish_reason, record.stop_reason)
    return (ids, record.text, logprobs, tuple(map(str, record.extras)), spans, ends, record.prompt_ids)


@dataclass
class Disk:
    """A fake disk with queued and written pieces. As in the store, a batch arrives as a whole or is lost."""

    record: RequestRecord = field(default_factory=record_of)
    queued: list[AnswerPiece] = field(default_factory=list)
    arrived: list[AnswerPiece] = field(default_factory=list)
    once: list[tuple[Any, ...]] = field(default_factory=list)  # the states of the record at each collection
    lost: bool = False

    def __post_init__(self) -> None:
        self.cutter = RecordCutter(0, self.record, prompt_wanted=True)

    def look(self) -> None:
        if self.lost:
            self.lost = False
            self.cutter.restart()
        piece = self.cutter.cut()
        if piece is not None:
            self.queued.append(piece)
            self.once.append(shown(self.record))

    def write(self, *, arrives: bool) -> None:
        if arrives and not self.lost:
            self.arrived += self.queued
        elif self.queued:
            self.lost = True
        self.queued = []


TEXTS = st.text(alphabet="ab é漢😀\ud800\0", max_size=3)
CHUNKS = st.builds(
    lambda ids, text, logprobs: Chunk(
        tuple(ids),
        text,
        tuple(range(7)),
        tuple(
            TokenLogprob(
                f"<{i}>", -i / 3, ((f"<{i}>", -i / 3), ("\udc80", float("-inf"))), (i, 1, None) if i % 2 else ()
            )
            for i in ids
        )
        if logprobs
        else None,
    ),
    st.lists(st.integers(0, 2**32 - 1), max_size=4),
    TEXTS,
    st.booleans(),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), CHUNKS, st.none() | st.integers(0, 3)),
        st.tuples(st.just("look")),
        st.tuples(st.just("write"), st.booleans()),
        st.tuples(st.just("anew")),
        st.tuples(st.just("extra"), TEXTS),
    ),
    max_size=40,
)


@given(STEPS, st.sampled_from([None, ("stop", "\ud800"), ("stop", 7), ("length", None)]), st.booleans(), st.booleans())
def test_reassembled_answer_is_a_past_state_of_the_record(
    steps: list[tuple[Any, ...]], ends: tuple[str, Any] | None, last_arrives: bool, streaming: bool
) -> None:
    disk = Disk()
    for step in steps:
        match step:
            case ("grow", chunk, version):
                disk.record.append(chunk, chunk.text, None, 1.0, version)
            case ("look",):
                disk.look()
            case ("write", arrives):
                disk.write(arrives=arrives)
            case ("anew",):
                disk.record.forget_answer()
            case ("extra", text):
                disk.record.append(Chunk(), "", {"reasoning": text}, 1.0)
    if ends is not None:
        disk.record.finish(*ends, 2.0)
    disk.look()
    disk.write(arrives=last_arrives)
    # The gateway was killed, and another serves the same request.
    again = record_of(streaming=streaming)
    kept = put_together(disk.arrived).get(0)
    if kept is None:
        return
    if not give_back(again, kept, 3.0):
        assert shown(again)[:-1] == shown(record_of())[:-1]
        return
    assert shown(again) in disk.once
    if ends is not None and last_arrives and not disk.lost:
        assert shown(again) == shown(disk.record)
    if streaming:
        deltas = again.take_undelivered()
        assert tuple(token for delta in deltas for token in delta.chunk.token_ids) == tuple(again.generated_ids)
        assert "".join(delta.text for delta in deltas) == again.text
        assert [delta.extra for delta in deltas if delta.extra] == again.extras


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), min_size=1, max_size=6), st.data())
def test_answer_continues_after_repeated_kills(chunks: list[list[int]], data: st.DataObject) -> None:
    arrived: list[AnswerPiece] = []
    expected: list[int] = []
    for ids in chunks:
        record = record_of()
        cutter = RecordCutter(0, record, prompt_wanted=True)
        kept = put_together(arrived).get(0)
        if kept is not None and give_back(record, kept, 0.0):
            cutter.resume(kept.pieces)
        assert list(record.generated_ids) == expected
        record.append(Chunk(tuple(ids), "x", (1, 2)), "x", None, 0.0, None)
        piece = cutter.cut()
        assert piece is not None
        assert (piece.prompt_ids is None) == (piece.number > 0)  # it is written once
        if data.draw(st.booleans()):
            arrived.append(piece)
            expected += ids
        assert cutter.cut() is None


def test_immovable_answer_is_restored_only_when_complete() -> None:
    disk = Disk(record_of(seed=7, temperature=1.0))
    disk.record.append(Chunk((1, 2), "ab", (5,)), "ab", None, 0.0)
    disk.look()
    disk.write(arrives=True)
    again = record_of(seed=7, temperature=1.0)
    assert not give_back(again, put_together(disk.arrived)[0], 0.0)
    assert not again.generated_ids
    disk.record.finish("stop", None, 0.0)
    disk.look()
    disk.write(arrives=True)
    assert give_back(again, put_together(disk.arrived)[0], 0.0)
    assert (list(again.generated_ids), again.text, again.done) == ([1, 2], "ab", True)


def test_stored_answer_as_a_stream_has_its_other_fields() -> None:
    disk = Disk(record_of())
    last = Chunk((1, 2), "ab", (5,), finish_reason="stop", choice_fields={"odd": [1]}, answer_fields={"f": "x"})
    disk.record.append(last, "ab", None, 0.0)
    disk.look()
    disk.write(arrives=True)
    again = record_of(streaming=True)
    assert give_back(again, put_together(disk.arrived)[0], 0.0)
    assert (again.choice_fields, again.answer_fields) == ({"odd": [1]}, {"f": "x"})
    delta = again.take_undelivered()[-1]
    assert (delta.chunk.choice_fields, delta.chunk.answer_fields) == ({"odd": [1]}, {"f": "x"})


def test_forgotten_answer_is_not_restored() -> None:
    disk = Disk()
    disk.record.append(Chunk((1, 2), "ab", (5,)), "ab", None, 0.0)
    disk.look()
    disk.write(arrives=True)
    assert not give_back(record_of(), put_together([*disk.arrived, disk.cutter.forget()])[0], 0.0)


def test_restarted_answer_is_stored_from_its_beginning() -> None:
    disk = Disk()
    for token in (1, 2, 3):
        if token < 3:
            disk.record.forget_answer()
            disk.look()
        disk.record.append(Chunk((token,), "ab", (5,)), "ab", None, 0.0)
        disk.look()
    disk.write(arrives=True)
    assert list(put_together(disk.arrived)[0].ids) == [2, 3]


def test_attempt_ids_are_not_reused() -> None:
    record = record_of()
    record.attempt = 3
    cutter = RecordCutter(0, record, prompt_wanted=True)
    record.append(Chunk((1,), "a", (5,)), "a", None, 0.0)
    piece = cutter.cut()
    assert piece is not None
    again = record_of()
    give_back(again, put_together([piece, cutter.forget()])[0], 0.0)
    assert again.attempt == 3


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
        ({"return_policy_versions": True, "request_id": "r"}, True),
        ({"return_token_ids": True}, False),
        ({"temperature": 1.0}, False),
        ({"prompt": "a prompt "}, False),
        ({"prompt": [97]}, False),
        ({"max_tokens": 1000.0}, False),
        ({"n": 2}, False),
    ],
)
def test_digest_ignores_the_form_of_the_response(other: dict[str, Any], same: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1000}
    assert (
        digest_of(CompletionEndpoint.COMPLETIONS, body)
        == digest_of(CompletionEndpoint.COMPLETIONS, dict(reversed({**body, **other}.items())))
    ) is same
    assert digest_of(CompletionEndpoint.COMPLETIONS, body) != digest_of(CompletionEndpoint.CHAT, body)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1), st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_digests_of_different_token_prompts_differ(one: list[int], other: list[int]) -> None:
    bodies = [{"prompt": one}, {"prompt": other}]
    assert (
        digest_of(CompletionEndpoint.COMPLETIONS, bodies[0]) == digest_of(CompletionEndpoint.COMPLETIONS, bodies[1])
    ) is (one == other)


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), min_size=1))
def test_keys_fit_in_a_row(name: str) -> None:
    assert 0 <= key_of(name) < 2**63
