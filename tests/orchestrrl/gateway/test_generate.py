"""Requests to /inference/v1/generate: the answer has vLLM's form, and is the same however often the request moves."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrrl.engines.base import Chunk, CompletionEndpoint
from orchestrrl.gateway.http.completion_requests import read_completion_request
from orchestrrl.gateway.http.field_types import HttpRefusal
from orchestrrl.gateway.http.generate_responses import GenerateStream, generate_response, generate_usage_chunk
from orchestrrl.gateway.http.server import GatewayServer
from orchestrrl.gateway.ledger.ledger import PolicyVersions, VersionSpan
from orchestrrl.gateway.ledger.weight_labels import correct_versions, joined_labels
from orchestrrl.gateway.moves.movable import (
    continued,
    immovable_because,
    max_answer_tokens,
    relayed_because,
    sampling_fields,
)
from orchestrrl.gateway.moves.reseed import seed_at
from tests.orchestrrl.gateway.fakes import FakeEngine, World, undisturbed, world
from tests.orchestrrl.gateway.test_relay import finish, move

GENERATE = CompletionEndpoint.GENERATE
PROMPT = list(b"what is the answer?")
MAX_TOKENS = 24


def body_of(**more: Any) -> dict[str, Any]:
    """Return a body. Names in `more` that start with `sampling_` are sampling parameters."""
    sampling: dict[str, Any] = {"max_tokens": MAX_TOKENS, "min_tokens": MAX_TOKENS, "logprobs": 1}
    body: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": sampling}
    for name, value in more.items():
        if name.startswith("sampling_"):
            sampling[name.removeprefix("sampling_")] = value
        else:
            body[name] = value
    return body


def choices_of(events: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the choices of a stream, joined over its events."""
    whole: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            mine = whole.setdefault(choice["index"], {})
            for name, value in choice.items():
                if isinstance(value, str) and name == "text":
                    mine[name] = mine.get(name, "") + value
                elif name == "logprobs" and value:
                    mine[name] = {"content": [*mine.get(name, {"content": []})["content"], *value["content"]]}
                elif isinstance(value, list) and isinstance(mine.get(name), list):
                    mine[name] = [*mine[name], *value]
                elif value is not None or name not in mine:
                    mine[name] = value
    return whole


def events_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[len(b"data: ") :]) for line in data.split(b"\n\n") if line]


async def answer_of(cuts: Sequence[int], body: dict[str, Any], label: str = "7", tokens_per_step: int = 1) -> Any:
    """Return the choices of the answer to a request that moves at each number of tokens in `cuts`, if it is reached."""
    w = world()
    for name, engine in w.engines.items():
        engine.label, engine.tokens_per_step = label, tokens_per_step
        backend = w.fleet.get(name)  # type: ignore[arg-type]
        assert backend is not None
        backend.policy_version = int(label) if label.isdecimal() else None
    async with w.gateway.request_group(w.ask(GENERATE, **body)) as job:
        (record,) = job.records
        for cut in cuts:
            while len(record.generated_ids) < cut and not job.done:
                await w.step()
            if job.done:
                break
            moving = move(w, "e1" if record.engine == "e0" else "e0")
            await w.settle()
            await w.step()
            assert (await moving).done
        await finish(w, job)
        assert record.moves == len([cut for cut in cuts if cut < MAX_TOKENS]) or tokens_per_step > 1
        if not body.get("stream"):
            return generate_response(job.request.form, job.records)["choices"]
        data = GenerateStream(job.request.form).writer(0, record).news()
        return list(choices_of(events_of(data)).values())


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, MAX_TOKENS - 2), max_size=4, unique=True).map(sorted),
    st.sampled_from(("tokens", "text")),
    st.booleans(),
    st.integers(1, 3),
)
def test_answer_of_several_attempts_equals_the_answer_of_one(
    cuts: list[int], mode: str, stream: bool, tokens_per_step: int
) -> None:
    body = body_of(output_mode=mode, stream=stream, return_policy_versions=True)
    moved = asyncio.run(answer_of(cuts, body, tokens_per_step=tokens_per_step))
    unmoved = asyncio.run(answer_of((), body))
    if stream:  # the last event's number
        assert {choice.pop("policy_version") for choice in (*moved, *unmoved)} == {7}
    assert moved == unmoved
    (choice,) = moved
    assert choice["token_ids"] == undisturbed(PROMPT, MAX_TOKENS, min_tokens=MAX_TOKENS)[0]
    assert choice["sampling_mask"] == [[token] for token in choice["token_ids"]]
    assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": MAX_TOKENS}]
    assert len(choice["logprobs"]["content"]) == MAX_TOKENS


def test_labels_of_a_moved_answer_are_null_if_the_first_engines_version_is_unknown() -> None:
    (choice,) = asyncio.run(answer_of((5,), body_of(), label="default"))
    assert choice["weight_versions"] is None
    (choice,) = asyncio.run(answer_of((), body_of(), label="default"))
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": MAX_TOKENS}]


async def test_whole_answer_has_the_form_of_vllms() -> None:
    w = world(1)
    async with w.gateway.request_group(w.ask(GENERATE, **body_of(return_token_ids=True))) as job:
        await finish(w, job)
        answer = generate_response(job.request.form, job.records)
    (choice,) = answer.pop("choices")
    content = choice.pop("logprobs")["content"]
    assert list(answer) == [
        "request_id",
        "model",
        "created",
        "usage",
        "prompt_logprobs",
        "prompt_token_id_logprobs",
        "prompt_token_ids",
        "mm_placeholders",
        "metrics",
        "kv_transfer_params",
        "ec_transfer_params",
        "output_mode",
    ]
    assert (answer["request_id"], answer["output_mode"]) == ("generate-tokens-r", "tokens")
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["usage"]["completion_tokens"] == MAX_TOKENS
    assert set(choice) == {
        "index",
        "finish_reason",
        "stop_reason",
        "token_ids",
        "routed_experts",
        "sampling_mask",
        "weight_versions",
    }
    first = choice["token_ids"][0]
    assert {**content[0], "logprob": 0, "top_logprobs": []} == {
        "token_id": first,
        "logprob": 0,
        "rank": 1,
        "top_logprobs": [],
    }
    assert [top["token_id"] for top in content[0]["top_logprobs"]] == [first, (first + 1) % 256]
    assert [top["rank"] for top in content[0]["top_logprobs"]] == [2, None]


async def test_each_sample_is_a_record_with_its_own_seed_and_index() -> None:
    w = world()
    body = body_of(sampling_n=3, sampling_seed=5, sampling_temperature=1.0, stream=True, return_token_ids=True)
    async with w.gateway.request_group(w.ask(GENERATE, **body)) as job:
        await finish(w, job)
        stream = GenerateStream(job.request.form)
        data = b"".join(stream.writer(index, record).news() for index, record in enumerate(job.records))
        usage = events_of(generate_usage_chunk(job.request.form, job.records))
    assert [record.id for record in job.records] == ["r-0", "r-1", "r-2"]
    sent = [request.body["sampling_params"] for engine in w.engines.values() for request in engine.seen]
    assert sorted(sampling["seed"] for sampling in sent) == [5, 6, 7]
    assert not any("n" in sampling for sampling in sent)
    events = events_of(data)
    assert [event.get("prompt_token_ids") for event in events].count(PROMPT) == 1
    assert events[0]["prompt_token_ids"] == PROMPT
    assert choices_of(events).keys() == {0, 1, 2}
    assert usage[0]["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 3 * MAX_TOKENS,
        "total_tokens": len(PROMPT) + 3 * MAX_TOKENS,
    }


async def test_engine_failure_continues_on_another_engine_as_a_generate_request() -> None:
    w = world()
    async with w.gateway.request_group(w.ask(GENERATE, **body_of(token_offsets=[[0, 1]]))) as job:
        (record,) = job.records
        await w.settle()
        for _ in range(5):
            await w.step()
        assert record.engine is not None
        w.engines[record.engine].die()
        await w.settle()
        assert record.engine is not None
        (sent,) = w.engines[record.engine].seen
        assert sent.endpoint is GENERATE
        assert sent.body["token_ids"] == [*PROMPT, *record.generated_ids[:5]]
        assert sent.body["sampling_params"] == {
            "max_tokens": MAX_TOKENS - 5,
            "min_tokens": MAX_TOKENS - 5,
            "logprobs": 1,
        }
        assert "token_offsets" not in sent.body
        await finish(w, job)


async def test_cancelled_answer_has_its_tokens_and_their_versions() -> None:
    w = world(1)
    (backend,) = w.fleet
    backend.policy_version = 3
    async with w.gateway.request_group(w.ask(GENERATE, **body_of())) as job:
        await w.settle()
        await w.step()
        await w.step()
        assert w.gateway.cancel(["r"], (), "too long") == ("r",)  # type: ignore[list-item]
        await w.settle()
        (choice,) = generate_response(job.request.form, job.records)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], len(choice["token_ids"])) == ("abort", "too long", 2)
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 2}]


async def test_enough_samples_end_the_others() -> None:
    w = world(1)
    w.engines["e0"].max_sequences = 1  # one sample ends before the other begins
    body = body_of(sampling_n=2, sampling_temperature=1.0, group_enough=1)
    async with w.gateway.request_group(w.ask(GENERATE, **body)) as job:
        await finish(w, job)
        reasons = sorted(str(record.finish_reason) for record in job.records)
    assert reasons == ["abort", "length"]
    assert not any("group_enough" in request.body for request in w.engines["e0"].seen)


async def test_tokens_alone_need_no_detokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> str:
        raise AssertionError("tokens were sent to be decoded")

    monkeypatch.setattr(FakeEngine, "detokenize", fails)
    (choice,) = await answer_of((1, 2, 3), body_of())
    assert len(choice["token_ids"]) == MAX_TOKENS


async def answered_over_http(w: World, body: dict[str, Any]) -> tuple[int, bytes]:
    """Send the body to a gateway's HTTP server, and step the engines until it answers."""
    server = GatewayServer(w.gateway)
    url = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as http:

        async def post() -> tuple[int, bytes]:
            async with http.post(f"{url}/inference/v1/generate", json=body, headers={"X-Request-Id": "r"}) as answer:
                return answer.status, await answer.read()

        posting = asyncio.create_task(post())
        while not posting.done():
            await w.step()
            await asyncio.sleep(0.001)
    await server.close()
    return posting.result()


async def test_server_answers_whole_and_streamed() -> None:
    body = body_of(sampling_n=2, sampling_temperature=1.0, return_token_ids=True)
    status, data = await answered_over_http(world(), body)
    assert status == 200
    whole = json.loads(data)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert (whole["model"], whole["prompt_token_ids"]) == ("model", PROMPT)
    options = {"include_usage": True, "continuous_usage_stats": True}
    status, data = await answered_over_http(world(), {**body, "stream": True, "stream_options": options})
    assert status == 200
    assert data.endswith(b"data: [DONE]\n\n")
    *events, last = events_of(data.removesuffix(b"data: [DONE]\n\n"))
    assert last["choices"] == []
    assert last["usage"].items() <= whole["usage"].items()
    assert max(event["usage"]["completion_tokens"] for event in events) == MAX_TOKENS
    for index, choice in choices_of(events).items():
        assert choice == whole["choices"][index]


async def test_server_refuses_invalid_bodies() -> None:
    status, data = await answered_over_http(world(), {"token_ids": [], "sampling_params": {"n": 0}})
    assert status == 400
    assert "token_ids: must be" in json.loads(data)["error"]["message"]


# --- engines without the endpoint ---


async def test_requests_go_only_to_engines_that_offer_the_endpoint() -> None:
    w = world(3)
    for name in ("e0", "e2"):
        w.engines[name].generate_endpoint = False
    for _ in range(4):
        async with w.gateway.request_group(w.ask(GENERATE, **body_of())) as job:
            await w.settle()
            await w.step()
            refused = await move(w, "e2")
            assert not refused.done
            assert "does not offer /inference/v1/generate: start vLLM with --enable-scale-out" in refused.detail
            await finish(w, job)
    assert [len(engine.seen) for engine in w.engines.values()] == [0, 4, 0]


async def test_failed_engine_is_not_replaced_by_one_without_the_endpoint() -> None:
    w = world()
    w.engines["e1"].generate_endpoint = False
    async with w.gateway.request_group(w.ask(GENERATE, **body_of())) as job:
        await w.settle()
        await w.step()
        w.engines["e0"].die()
        await w.settle()
        assert not w.engines["e1"].seen
        w.engines["e0"].revive()
        await finish(w, job)
    assert job.records[0].finish_reason == "length"


async def test_fleet_without_the_endpoint_answers_404() -> None:
    w = world()
    for engine in w.engines.values():
        engine.generate_endpoint = False
    async with w.gateway.request_group(w.ask(GENERATE, **body_of())) as job:
        await w.settle()
        assert job.failure is not None
        assert job.failure.status == 404
        assert job.failure.error["error"]["message"].endswith("start vLLM with --enable-scale-out")
    async with w.gateway.request_group(w.ask(prompt=PROMPT, max_tokens=3)) as other:
        await finish(w, other)


async def test_engine_with_routed_experts_streams_them_and_keeps_the_request() -> None:
    w = world(1)
    w.engines["e0"].routed_experts = True
    async with w.gateway.request_group(w.ask(GENERATE, **body_of())) as job:
        await w.settle()
        await w.step()
        (sent,) = w.engines["e0"].seen
        assert not sent.verbatim
        assert job.records[0].immovable_because == "routed_experts: it describes one undivided answer"
        await finish(w, job)


# --- versions ---


def versions_of(*starts: tuple[int, int | None]) -> PolicyVersions:
    versions = PolicyVersions()
    for start, version in starts:
        versions.add(version, start)
    return versions


def test_labels_of_the_last_attempt_follow_the_versions_of_the_tokens_before() -> None:
    labels = [{"version": "8", "start": 0, "end": 2}, {"version": "9", "start": 2, "end": 4}]
    versions = versions_of((0, 7), (3, 8), (6, 9))  # the ledger has noticed 9 late
    joined = joined_labels(versions, 5, labels)
    assert joined == [
        {"version": "7", "start": 0, "end": 3},
        {"version": "8", "start": 3, "end": 7},
        {"version": "9", "start": 7, "end": 9},
    ]
    correct_versions(versions, {"weight_versions": joined})
    assert versions.spans(9) == (VersionSpan(7, 0, 3), VersionSpan(8, 3, 7), VersionSpan(9, 7, 9))
    assert (versions.oldest, versions.newest) == (7, 9)


def test_unknown_version_before_the_last_attempt_leaves_the_labels_unknown() -> None:
    assert joined_labels(versions_of((0, None), (3, 8)), 5, [{"version": "8", "start": 0, "end": 2}]) is None
    assert joined_labels(versions_of((0, 8), (5, None)), 5, [{"version": "8", "start": 0, "end": 2}]) == [
        {"version": "8", "start": 0, "end": 7}
    ]


@pytest.mark.parametrize("label", ["default", "", "-1", "٣", "9" * 19])
def test_labels_that_are_not_versions_do_not_change_the_ledger(label: str) -> None:
    versions = versions_of((0, 4))
    correct_versions(versions, {"weight_versions": [{"version": label, "start": 0, "end": 3}]})
    assert versions.spans(3) == (VersionSpan(4, 0, 3),)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=6),
    st.integers(0, 20),
)
def test_labels_cut_at_any_token_are_joined_again(runs: list[tuple[int, int]], cut: int) -> None:
    """`runs` are numbers of tokens with their versions. The tokens before `cut` are those of earlier attempts."""
    tokens = [version for length, version in runs for _ in range(length)]
    start = min(cut, len(tokens))
    versions = versions_of(*((index, version) for index, version in enumerate(tokens[:start])))

    def labels(part: Sequence[int]) -> list[dict[str, Any]]:
        spans = versions_of(*enumerate(part)).spans(len(part))
        return [{"version": str(span.version), "start": span.start, "end": span.end} for span in spans]

    assert joined_labels(versions, start, labels(tokens[start:])) == labels(tokens)


# --- parsing ---


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"sampling_params": {}}, "token_ids"),
        ({"token_ids": [], "sampling_params": {}}, "token_ids"),
        ({"token_ids": "a", "sampling_params": {}}, "token_ids"),
        ({"token_ids": [-1], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [2**32], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [1]}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": []}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": "a"}}, "sampling_params.max_tokens"),
        ({"token_ids": [1], "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"token_ids": [1], "sampling_params": {"n": 2, "temperature": 0}}, "sampling_params.n"),
        ({"token_ids": [1], "sampling_params": {}, "output_mode": "ids"}, "output_mode"),
        ({"token_ids": [1], "sampling_params": {}, "on_stale": "x"}, "on_stale"),
        ({"token_ids": [1], "sampling_params": {}, "max_version_lag": -1}, "max_version_lag"),
    ],
)
def test_faults_name_the_field(body: dict[str, Any], path: str) -> None:
    with pytest.raises(HttpRefusal) as raised:
        world().ask(GENERATE, **body)
    assert raised.value.param == path
    assert f"{path}: must be" in str(raised.value)


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(HttpRefusal) as raised:
        world().ask(GENERATE, token_ids=[], sampling_params={"n": 0, "seed": "x"}, output_mode="ids", group_enough=0)
    for path in ("token_ids", "sampling_params.n", "sampling_params.seed", "output_mode", "group_enough"):
        assert f"{path}: must be" in str(raised.value)


def test_body_for_the_engine_lacks_only_the_gateways_fields() -> None:
    body = body_of(not_known=1, features=None, cache_salt="s", sampling_n=1.0, sampling_output_kind=2)
    own = {"request_id": "x", "stream": False, "stream_options": {"include_usage": True}, "return_policy_versions": 1}
    (record,) = world().ask(GENERATE, **{**body, **{k: v for k, v in own.items() if k != "request_id"}}).records
    del body["sampling_params"]["n"]
    assert record.body == body
    assert record.prompt_ids == tuple(PROMPT)


# --- moves ---


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (body_of(features={"mm_hashes": {}}), "features"),
        (body_of(content_parts=[{"type": "image_url", "url": "x"}]), "content_parts"),
        (body_of(not_known=1), "not_known"),
        (body_of(sampling_not_known=1), "sampling_params.not_known"),
        (body_of(sampling_seed=1), "sampling_params.seed"),
        (body_of(sampling_stop=["x"]), "sampling_params.stop"),
        (body_of(sampling_structured_outputs={"json": {}}), "sampling_params.structured_outputs"),
        (body_of(sampling_extra_args={"a": 1}), "sampling_params.extra_args"),
        (body_of(sampling_trace_decode_token_ids=[1]), "sampling_params.trace_decode_token_ids"),
        (body_of(sampling_prompt_logprobs=0), "sampling_params.prompt_logprobs"),
        (body_of(kv_transfer_params={"a": 1}), "kv_transfer_params"),
    ],
)
def test_immovable_requests_have_a_reason_with_a_path(body: dict[str, Any], name: str) -> None:
    assert immovable_because(GENERATE, body).split(":")[0] == name
    relayed = {"sampling_params.prompt_logprobs", "kv_transfer_params"}
    assert bool(relayed_because(GENERATE, body)) == (name in relayed)


def test_stop_strings_are_movable_in_text_mode() -> None:
    body = body_of(sampling_stop=["x"], output_mode="text")
    assert immovable_because(GENERATE, body) == ""
    assert "stop" not in continued(GENERATE, body, [1], [2], 9)["sampling_params"]


def test_requests_of_rl_clients_are_movable() -> None:
    """The fields that TRL, SkyRL and verifiers send."""
    body = body_of(
        request_id="trl-1",
        model="m",
        features=None,
        cache_salt="s",
        priority=1,
        return_token_ids=True,
        output_mode="tokens",
        reasoning_ended=True,
        sampling_repetition_penalty=1.1,
        sampling_temperature=0.7,
        sampling_top_p=0.9,
        sampling_top_k=0,
        sampling_min_p=0.0,
        sampling_output_kind=2,
        sampling_stop_token_ids=[3],
        sampling_skip_special_tokens=False,
        sampling_prompt_logprobs=None,
        sampling_routed_experts_prompt_start=4,
        sampling_seed=None,
    )
    assert immovable_because(GENERATE, body) == relayed_because(GENERATE, body) == ""
    assert immovable_because(GENERATE, body_of(sampling_seed=1), reseed=True) == ""


@pytest.mark.parametrize(("sampling", "tokens"), [({}, None), ({"max_tokens": None}, None), ({"max_tokens": 7}, 7)])
def test_absent_limit_means_the_context(sampling: dict[str, Any], tokens: int | None) -> None:
    assert max_answer_tokens(GENERATE, {"token_ids": [1], "sampling_params": sampling}) == tokens


async def test_request_without_a_limit_continues_up_to_the_context() -> None:
    w = world()
    for engine in w.engines.values():
        engine.model_length = len(PROMPT) + 12
    body = {"token_ids": PROMPT, "sampling_params": {"min_tokens": 12}}
    async with w.gateway.request_group(w.ask(GENERATE, **body)) as job:
        await w.settle()
        await w.step()
        (record,) = job.records
        moving = move(w, "e1" if record.engine == "e0" else "e0")
        await w.settle()
        await w.step()
        assert (await moving).done
        assert record.max_tokens == 12
        assert record.engine is not None
        assert w.engines[record.engine].seen[-1].body["sampling_params"] == {"max_tokens": 11, "min_tokens": 11}


async def test_seeded_request_continues_with_an_announced_seed() -> None:
    w = world()
    body = body_of(sampling_seed=5, sampling_temperature=1.0)
    request = read_completion_request(
        GENERATE, body, request_id="r", group="", tag="", default_model="m", now_s=w.clock.now_s(), reseed=True
    )
    async with w.gateway.request_group(request) as job:
        (record,) = job.records
        await w.settle()
        for _ in range(4):
            await w.step()
        moving = move(w, "e1" if record.engine == "e0" else "e0")
        await w.settle()
        await w.step()
        assert (await moving).done
        assert record.engine is not None
        assert w.engines[record.engine].seen[-1].body["sampling_params"]["seed"] == seed_at(5, 4)
        await finish(w, job)
        (choice,) = generate_response(job.request.form, job.records)["choices"]
    assert choice["reseeded"] == [{"position": 4, "seed": seed_at(5, 4)}]


def test_sampling_fields_are_those_of_the_endpoint() -> None:
    body = body_of()
    assert sampling_fields(GENERATE, body) is body["sampling_params"]
    assert sampling_fields(GENERATE, {"sampling_params": None}) == {}
    assert sampling_fields(CompletionEndpoint.CHAT, body) is body
    assert continued(GENERATE, body, [1], [2, 3], 9)["sampling_params"]["max_tokens"] == 7


def test_relayed_answer_is_passed_on_with_the_gateways_id() -> None:
    request = world().ask(GENERATE, **body_of(sampling_prompt_logprobs=1, return_policy_versions=True))
    (record,) = request.records
    theirs = {
        "request_id": "generate-tokens-theirs",
        "model": "m",
        "created": 5,
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
        "prompt_logprobs": [None, {"7": {"logprob": -1.0}}],
        "choices": [{"index": 0, "token_ids": [4], "finish_reason": "length", "new": 1}],
    }
    record.relay(Chunk(finish_reason="length", answer=theirs), 1, 0.0, 6)
    answer = generate_response(request.form, request.records)
    assert (answer["request_id"], answer["model"]) == ("generate-tokens-r", "m")
    assert answer["prompt_logprobs"] == theirs["prompt_logprobs"]
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["new"]) == ([4], 1)
    assert choice["policy_versions"] == [{"version": 6, "start": 0, "end": 1}]
