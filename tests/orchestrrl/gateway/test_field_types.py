"""Any JSON is accepted or refused with a path, and accepted bodies can be forwarded and continued."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.http.completion_requests import read_completion_request
from orchestrrl.gateway.http.field_types import HttpRefusal, read_json, type_faults, with_types
from orchestrrl.gateway.ledger.pieces import digest_of
from orchestrrl.gateway.moves.movable import KNOWN_FIELDS, continued, sampling_fields

TEXT = st.text(st.characters(categories=None), max_size=6)  # includes lone surrogates
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
GENERATE_ONLY = ("content_parts", "detokenize", "features", "output_mode", "token_ids", "token_offsets")
NAMES = st.sampled_from([*sorted(KNOWN_FIELDS), *GENERATE_ONLY, "return_nothing", "not_known"])
BODIES = st.dictionaries(NAMES, JSON, max_size=4)


def fits(value: Any) -> bool:
    """Return whether the value can be sent to any engine."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


@given(JSON)
def test_read_json_accepts_only_documents_that_can_be_forwarded(value: Any) -> None:
    text = json.dumps(value).encode()
    if fits(value):
        assert read_json(text) == value
    else:
        with pytest.raises(HttpRefusal, match=r"must (be|have)") as raised:
            read_json(text)
        assert raised.value.param is not None
        raised.value.args[0].encode()  # the message must be valid text as well


@given(st.binary(max_size=40))
def test_invalid_json_is_refused(data: bytes) -> None:
    try:
        value = read_json(data)
    except HttpRefusal:
        return
    assert fits(value)


@pytest.mark.parametrize("depth", [1, 127, 128, 129, 500])
@pytest.mark.parametrize("kind", ["list", "object"])
def test_nesting_depth_is_bounded(depth: int, kind: str) -> None:
    opening, closing = ("[", "]") if kind == "list" else ('{"a":', "}")
    text = (opening * depth + "1" + closing * depth).encode()
    if depth <= 128:
        assert json.dumps(read_json(text))
    else:
        with pytest.raises(HttpRefusal, match="128 levels deep"):
            read_json(text)


@given(st.sampled_from(CompletionEndpoint), BODIES, BODIES)
def test_any_body_is_accepted_or_refused_with_a_path(
    endpoint: CompletionEndpoint, fields: dict[str, Any], sampling: dict[str, Any]
) -> None:
    needed: dict[str, Any] = {
        CompletionEndpoint.COMPLETIONS: {"prompt": "a"},
        CompletionEndpoint.CHAT: {"messages": [{"role": "user"}]},
        CompletionEndpoint.GENERATE: {"token_ids": [1], "sampling_params": sampling},
    }[endpoint]
    refused_for = ""
    try:
        body = read_json(json.dumps({**needed, **fields}).encode())
        ask = read_completion_request(endpoint, body, request_id="r", group="", tag="", default_model="m", now_s=0.0)
    except HttpRefusal as fault:
        refused_for = fault.param or "nothing"
    if refused_for:
        assert refused_for.partition(".")[0].partition("[")[0] in {*needed, *fields}
        return
    for record in ask.records:
        assert fits({**record.body, **record.form_fields})
        on = continued(endpoint, record.body, [1], [2], record.max_tokens or 9)
        assert fits(on)
        left = sampling_fields(endpoint, on)["max_tokens"]
        assert record.max_tokens is None or left == record.max_tokens - 1
        digest_of(endpoint, record.body)
        if record.relayed_because:
            assert record.immovable_because


@given(st.sampled_from(CompletionEndpoint), BODIES)
def test_known_fields_have_one_type(endpoint: CompletionEndpoint, body: dict[str, Any]) -> None:
    if type_faults(endpoint, body):
        return
    settled = with_types(endpoint, body)
    assert with_types(endpoint, settled) == settled
    assert type_faults(endpoint, settled) == {}
    assert settled.keys() == body.keys()
    assert all(settled[name] == value or value != value for name, value in body.items())


def test_integral_floats_and_numeric_flags_are_accepted() -> None:
    body = {"max_tokens": 16.0, "stream": 1, "echo": None, "temperature": 1, "logprobs": 2.0}
    assert with_types(CompletionEndpoint.COMPLETIONS, body) == {**body, "max_tokens": 16, "stream": True, "logprobs": 2}
    assert type_faults(CompletionEndpoint.CHAT, {"logprobs": 2}) == {"logprobs": "must be true or false, got 2"}
    assert type_faults(CompletionEndpoint.COMPLETIONS, {"logprobs": True}) == {
        "logprobs": "must be a whole number, got True"
    }


def test_message_content_may_contain_plain_texts() -> None:
    """vLLM accepts the same."""
    parts = ["a", {"type": "text", "text": "b"}]
    assert type_faults(CompletionEndpoint.CHAT, {"messages": [{"role": "user", "content": parts}]}) == {}
    assert type_faults(CompletionEndpoint.CHAT, {"messages": [{"role": "user", "content": [1]}]})
