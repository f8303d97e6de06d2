"""The table of vLLM's endpoints, and the engines that hold responses."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.gateway.http.response_owners import FirstEvent, ResponseOwners, response_id
from orchestrrl.gateway.http.vllm_endpoints import ENDPOINTS, EndpointHandling, find_endpoint, path_hint
from planner.model import EngineId

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.parametrize(
    ("path", "template", "response"),
    [
        ("/tokenize", "/tokenize", ""),
        ("/v1/responses", "/v1/responses", ""),
        ("/v1/responses/r 1", "/v1/responses/{response_id}", "r 1"),
        ("/v1/responses/r1/cancel", "/v1/responses/{response_id}/cancel", "r1"),
        ("/v1/responses/render", "/v1/responses/render", ""),
        ("/v1/responses/", None, ""),
        ("/v1/responses/r1/", None, ""),
        ("/v1/responses//cancel", None, ""),
        ("/v1/responses/r1/cancel/", None, ""),
        ("/v1/responses/r1/other", None, ""),
        ("/x/v1/responses/r1", None, ""),
        ("/tokenize/", None, ""),
        ("/nothing", None, ""),
    ],
)
def test_path_names_an_endpoint(path: str, template: str | None, response: str) -> None:
    found = find_endpoint(path)
    assert (template, response) == (None, "") if found is None else (found[0].path, found[1]) == (template, response)


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/inference/v1/generate", "/inference/v1/generate"),
        ("/v1/tokenize", "/tokenize"),
        ("/nothing", None),
        ("/v1", None),
        ("/", None),
    ],
)
def test_hint_for_a_base_url_with_a_wrong_prefix(path: str, endpoint: str | None) -> None:
    assert path_hint(path) == (f"; the endpoint is {endpoint}: check /v1 in the base URL" if endpoint else "")


def test_refused_endpoints_say_what_to_use_instead() -> None:
    for endpoint in ENDPOINTS.values():
        assert bool(endpoint.instead) == (endpoint.handling is EndpointHandling.REFUSED)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef"))), st.integers(1, 4))
def test_owners_of_the_latest_responses_are_known(uses: list[tuple[bool, str]], most: int) -> None:
    owners = ResponseOwners(most)
    recent: list[str] = []
    for created, name in uses:
        if created:
            owners.remember(name, EngineId(name.upper()))
        else:
            assert owners.get(name) == (name.upper() if name in recent else None)
        if created or name in recent:
            recent = [*(other for other in recent if other != name), name][-most:]


@given(ANY_JSON, st.binary(), st.integers(1, 9))
def test_response_id_is_found_in_any_division_of_a_stream(value: Any, noise: bytes, size: int) -> None:
    assert response_id(noise) is None or json.loads(noise)
    assert response_id(json.dumps({"id": value}).encode()) == (value if isinstance(value, str) else None)
    event = json.dumps({"type": "response.created", "response": {"id": "r"}, "more": value}).encode()
    stream, first = b"event: a\ndata: " + event + b"\n\ndata: {}\n\n", FirstEvent()
    parts = [first.feed(stream[start : start + size]) for start in range(0, len(stream), size)]
    assert [part for part in parts if part is not None] == [event]
    assert response_id(event) == "r"
