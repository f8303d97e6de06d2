"""The events of /inference/v1/generate become chunks, in the formats of vLLM 0.31 and 0.32."""

from typing import Any

import pytest

from orchestrrl.engines.base import Chunk, TokenLogprob
from orchestrrl.engines.generate_chunks import parse_generate_chunk
from orchestrrl.engines.openai_chunks import ChunkReader, StreamError

NULLS = {"stop_reason": None, "routed_experts": None, "sampling_mask": None, "weight_versions": None}
# As vLLM 0.32 sends them.
BY_ID = {"token_id": 7, "logprob": -0.5, "rank": 2}
TOKENS = {
    "request_id": "generate-tokens-r",
    "usage": None,
    "prompt_token_ids": [1, 2],
    "output_mode": "tokens",
    "choices": [
        {
            "index": 0,
            "finish_reason": None,
            **NULLS,
            "token_ids": [7],
            "logprobs": {"content": [{**BY_ID, "top_logprobs": [BY_ID, {"token_id": 9, "logprob": -0.1, "rank": 1}]}]},
        }
    ],
}
SPANS = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]
LAST = {
    "request_id": "generate-tokens-r",
    "usage": None,
    "output_mode": "text",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            **NULLS,
            "stop_reason": 8,
            "weight_versions": SPANS,
            "token_ids": [8],
            "text": "x",
            "logprobs": {"content": [{"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": []}]},
        }
    ],
}


def test_tokens_have_ids_and_ranks() -> None:
    assert parse_generate_chunk(TOKENS) == Chunk(
        (7,),
        prompt_token_ids=(1, 2),
        logprobs=(TokenLogprob("token_id:7", -0.5, (("token_id:7", -0.5), ("token_id:9", -0.1)), (2, 2, 1)),),
    )


def test_text_has_logprobs_of_texts_and_the_last_event_has_the_labels() -> None:
    assert parse_generate_chunk(LAST, text=True) == Chunk(
        (8,),
        "x",
        logprobs=(TokenLogprob("x", -1.0),),
        finish_reason="stop",
        stop_reason=8,
        choice_fields={"weight_versions": SPANS},
    )


def test_events_of_vllm_0_31_have_logprobs_of_placeholders() -> None:
    content = [{"token": "token_id:7", "logprob": -0.5, "bytes": None, "top_logprobs": []}]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": None, "token_ids": [7]}
    event = {"request_id": "r", "choices": [choice], "usage": None}
    assert parse_generate_chunk(event) == Chunk((7,), logprobs=(TokenLogprob("token_id:7", -0.5),))
    with pytest.raises(StreamError, match="output_mode") as refused:
        parse_generate_chunk(event, text=True)
    assert (refused.value.error["code"], refused.value.error["param"]) == (400, "output_mode")


def test_event_without_choices_has_the_usage_and_metrics() -> None:
    usage = {"prompt_tokens": 2}
    event = {"request_id": "r", "usage": usage, "output_mode": "tokens", "choices": []}
    assert parse_generate_chunk(event) == Chunk(usage=usage)
    assert parse_generate_chunk({**event, "metrics": {"a": 1}}) == Chunk(
        usage=usage, answer_fields={"metrics": {"a": 1}}
    )
    assert parse_generate_chunk({**event, "usage": None}) is None


def test_unknown_fields_are_kept() -> None:
    chunk = parse_generate_chunk({**TOKENS, "new": 1, "choices": [{**TOKENS["choices"][0], "routed_experts": "AA"}]})  # type: ignore[index, dict-item]
    assert chunk is not None
    assert (chunk.choice_fields, chunk.answer_fields) == ({"routed_experts": "AA"}, {"new": 1})


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": 4, "start": 0, "end": 1}],
        [{"version": "4", "start": 1, "end": 2}],
        [{"version": "4", "start": 0, "end": None}],
        [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 1, "end": 3}],
        [{"version": "4"}],
        [4],
    ],
)
def test_malformed_labels_are_refused(spans: Any) -> None:
    choice = {**LAST["choices"][0], "weight_versions": spans}  # type: ignore[index, dict-item]
    with pytest.raises((ValueError, TypeError, KeyError)):
        parse_generate_chunk({**LAST, "choices": [choice]})


def test_reader_parses_each_event_with_the_given_function() -> None:
    event = b'{"request_id":"r","choices":[{"index":0,"token_ids":[%d]}]}'
    reader = ChunkReader(parse_generate_chunk)
    events = [event % token for token in range(20)]
    at, ids = 0, []
    while at < len(events):
        chunk, at = reader.read_on(events, at)
        assert chunk is not None
        ids += chunk.token_ids
    assert ids == list(range(20))
