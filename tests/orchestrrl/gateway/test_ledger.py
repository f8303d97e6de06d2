"""The record of a request, and the summaries and reports of ended requests."""

import pytest

from orchestrrl.engines.base import Chunk, CompletionEndpoint, TokenLogprob
from orchestrrl.gateway.ledger.ledger import DuplicateRequest, Ledger, RequestRecord, VersionSpan
from planner.model import EngineId, RequestId, RequestState


def record(name: str = "r", *, streaming: bool = True, **more: object) -> RequestRecord:
    return RequestRecord(RequestId(name), CompletionEndpoint.COMPLETIONS, {}, streaming, 100.0, 16, **more)  # type: ignore[arg-type]


def test_record_returns_each_delta_once() -> None:
    r = record()
    r.begin_attempt(EngineId("e0"), 101.0)
    assert (r.attempt_id, r.state, r.prompt_tokens) == ("r~1", RequestState.WAITING, 1)
    r.append(Chunk((5,), "a", prompt_token_ids=(1, 2, 3)), "a", None, 102.0)
    r.append(Chunk((6, 7), "bc", logprobs=(TokenLogprob("b", -1.0), TokenLogprob("c", -2.0))), "bc", None, 103.0)
    assert (r.text, list(r.generated_ids), r.context_tokens, r.started_s) == ("abc", [5, 6, 7], 6, 102.0)
    assert [delta.chunk.token_ids for delta in r.take_undelivered()] == [(5,), (6, 7)]
    assert r.take_undelivered() == []
    r.append(Chunk((8,), "d", finish_reason="length"), "d", None, 104.0)
    assert [delta.text for delta in r.take_undelivered()] == ["d"]
    assert r.done
    summary = r.summary()
    assert (summary.generated_tokens, summary.finish_reason, summary.duration_s) == (4, "length", 4.0)


def test_prompt_ids_are_kept_from_the_first_attempt() -> None:
    r = record()
    r.append(Chunk((5,), "a", prompt_token_ids=(1, 2)), "a", None, 1.0)
    r.append(Chunk((6,), "b", prompt_token_ids=(1, 2, 5)), "b", None, 2.0)
    assert r.prompt_ids == (1, 2)


def test_delivered_answer_cannot_start_over() -> None:
    r = record(immovable_because="stop: x")
    r.append(Chunk((5,), "a"), "a", None, 1.0)
    assert r.fixed_because
    r.forget_answer()
    assert (list(r.generated_ids), r.text, r.take_undelivered(), r.fixed_because) == ([], "", [], "")
    r.append(Chunk((5,), "a"), "a", None, 1.0)
    r.take_undelivered()
    with pytest.raises(ValueError, match="a part of its response was delivered"):
        r.forget_answer()


@pytest.mark.parametrize("relayed", [False, True])
def test_answer_that_starts_over_is_empty(relayed: bool) -> None:
    def answer(r: RequestRecord) -> list[object]:
        names = "choice_fields answer_fields extras logprobs relayed_answer relayed_tokens text text_complete usage"
        return [list(r.generated_ids), r.versions.spans(1), *(getattr(r, name) for name in names.split())]

    r = record()
    r.text_complete, r.usage = False, {"completion_tokens": 1}
    if relayed:
        r.relay(Chunk(event={"choices": []}), 1, 1.0, 3)
        r.relay(Chunk(answer={"choices": []}), 1, 1.0, 4)
    else:
        fields = {"choice_fields": {"a": 1}, "answer_fields": {"b": 2}}
        r.append(Chunk((5,), "a", logprobs=(TokenLogprob("a", -1.0),), **fields), "a", {"c": 3}, 1.0, 3)
    r.forget_answer()
    assert answer(r) == answer(record())
    assert r.take_undelivered() == []
    r.append(Chunk((6,), "b"), "b", None, 2.0, 4)
    assert (r.text, r.versions.spans(1)) == ("b", (VersionSpan(4, 0, 1),))


def test_ledger_adds_all_records_of_a_request_or_none() -> None:
    ledger = Ledger()
    ledger.add(record("a"))
    with pytest.raises(DuplicateRequest):
        ledger.add(record("b"), record("a"))
    assert [r.id for r in ledger] == ["a"]


def test_ended_request_is_reported_until_acknowledged() -> None:
    ledger = Ledger()
    names = ["a", "b", "c"]
    records = {name: record(name) for name in names}
    ledger.add(*records.values())
    ledger.close(records["a"])
    first, finished = ledger.report()
    assert [summary.id for summary in finished] == ["a"]
    ledger.close(records["b"])
    second, finished = ledger.report()
    assert [summary.id for summary in finished] == ["a", "b"]
    ledger.acknowledge(first)
    _, finished = ledger.report()
    assert [summary.id for summary in finished] == ["b"]
    ledger.close(records["b"])  # a repeated acknowledgement has no effect
    ledger.acknowledge(second + 100)  # from an earlier process
    assert [summary.id for summary in ledger.report()[1]] == ["b"]
    ledger.acknowledge(second)
    assert ledger.report()[1] == ()


def test_number_of_summaries_is_bounded() -> None:
    ledger = Ledger(keep_finished=3)
    for index in range(10):
        r = record(str(index))
        ledger.add(r)
        ledger.close(r)
    assert [summary.id for summary in ledger.finished] == ["7", "8", "9"]
    assert len(ledger.report()[1]) == 3
    assert ledger.finished_by_reason["error"] == 10
