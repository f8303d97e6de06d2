"""The requests with which a bare server reproduces the samples of recorded answers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.recordings import types_at
from tests.clients.samples import CHAT, COMPLETIONS, GENERATE, samples_of

BODY: dict[str, Any] = {"model": "m", "prompt": [1, 2], "max_tokens": 20, "temperature": 1, "seed": 5}


def answer_of(token_ids: list[int], cuts: list[int]) -> dict[str, Any]:
    reseeded = [{"position": cut, "seed": 100 + cut} for cut in cuts]
    logprobs = {"token_logprobs": [-float(token) for token in token_ids]}
    choice = {"index": 0, "prompt_token_ids": [1, 2], "token_ids": token_ids, "logprobs": logprobs}
    return {"choices": [{**choice, "reseeded": reseeded, "finish_reason": "length"}]}


@given(st.lists(st.integers(0, 99), min_size=5, max_size=20), st.sets(st.integers(1, 4)))
def test_parts_of_a_reseeded_sample_cover_it(token_ids: list[int], cuts: set[int]) -> None:
    (sample,) = samples_of(COMPLETIONS, BODY, answer_of(token_ids, sorted(cuts)))
    covered: list[int] = []
    for body, start, end in sample.references():
        assert body["prompt"] == [1, 2, *covered]
        assert body["seed"] == (100 + start if start else 5)
        covered += token_ids[start:end]
        assert body["max_tokens"] == (end - start if end in cuts else 20 - start)
    assert covered == token_ids


def test_samples_of_one_prompt_have_consecutive_seeds() -> None:
    choices = [{"index": index, "token_ids": [index], "finish_reason": "length"} for index in range(4)]
    body = {"token_ids": [1], "model": "m", "sampling_params": {"n": 2, "seed": 5, "max_tokens": 1}}
    samples = samples_of(GENERATE, body, {"choices": choices})
    assert [(sample.own_seed, sample.prompt_ids) for sample in samples] == [(5, [1]), (6, [1])] * 2


def test_events_of_a_stream_are_joined() -> None:
    entry = {"content": [{"logprob": -1.0}]}
    events = [
        {"prompt_token_ids": [7], "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
        {"choices": [{"index": 0, "token_ids": [3], "logprobs": entry}]},
        {"choices": [{"index": 0, "token_ids": [4], "logprobs": entry, "finish_reason": "stop"}]},
    ]
    (sample,) = samples_of(CHAT, {"model": "m", "messages": [], "max_tokens": 9}, events)
    assert (sample.prompt_ids, sample.token_ids, sample.logprobs) == ([7], [3, 4], [-1.0, -1.0])
    assert not sample.reproducible


def test_field_without_a_known_effect_is_refused() -> None:
    with pytest.raises(ValueError, match="no reference request is known for fields \\['watermarking'\\]"):
        samples_of(COMPLETIONS, {**BODY, "watermarking": True, "stream": None}, {"choices": []})


def test_types_at_a_path() -> None:
    answer = {"a": [{"b": [1, 2.0]}, {"b": []}, {}], "c": None}
    assert types_at(answer, "a[].b[]") == {"number"}
    assert types_at(answer, "a[].b") == {"list"}
    assert types_at([answer, {"d": "x"}], "d") == {"str"}
    assert types_at(answer, "c.d") == set()
