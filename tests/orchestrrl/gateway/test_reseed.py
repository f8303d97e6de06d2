"""Seeded requests continue on another engine with derived seeds, and their answers state these seeds."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.cli.gateway import GatewayFlags
from orchestrrl.cli.gateway_options import read_options
from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.http.completion_requests import CompletionRequest, read_completion_request
from orchestrrl.gateway.http.field_types import HttpRefusal
from orchestrrl.gateway.http.responses import ChunkWriter, response
from orchestrrl.gateway.ledger.pieces import RecordCutter, give_back, put_together
from orchestrrl.gateway.moves.movable import immovable_because
from orchestrrl.gateway.moves.reseed import drawing_seed, reseed_allowed, seed_at
from tests.orchestrrl.gateway.fakes import World, undisturbed, world
from tests.orchestrrl.gateway.http_harness import http_harness
from tests.orchestrrl.gateway.test_carried import NAMED, asked_of, release, until_tokens
from tests.orchestrrl.gateway.test_carried import move as http_move
from tests.orchestrrl.gateway.test_relay import PROMPT, finish, move

SEED = 11
INT64 = st.integers(-(2**63), 2**63 - 1)


@given(INT64, st.integers(1, 2**32))
def test_derived_seeds_are_valid_for_engines_and_differ_between_positions(seed: int, position: int) -> None:
    derived = seed_at(seed, position)
    assert 0 <= derived < 2**63
    assert derived == seed_at(seed, position)
    assert derived != seed_at(seed, position + 1)
    assert derived != seed_at(seed + 1, position)
    assert seed_at(seed, 0) == seed


@pytest.mark.parametrize(
    ("seed", "position", "derived"),
    [(7, 1, 2776804601523485429), (-3, 12, 8322085235943452135), (2**63 - 1, 4096, 6017851168604590557)],
)
def test_derived_seeds_never_change(seed: int, position: int, derived: int) -> None:
    """Clients compute these numbers themselves."""
    assert seed_at(seed, position) == derived


@pytest.mark.parametrize(
    ("sampling", "seed"),
    [
        ({"seed": 7}, 7),
        ({"seed": 0, "temperature": 0.3}, 0),
        ({"seed": 7, "temperature": 0}, None),
        ({"seed": -1, "temperature": 1.0}, None),  # vLLM treats it as absent
        ({"seed": None}, None),
        ({}, None),
    ],
)
def test_only_seeded_draws_have_a_drawing_seed(sampling: dict[str, Any], seed: int | None) -> None:
    assert drawing_seed(sampling) == seed
    because = immovable_because(CompletionEndpoint.COMPLETIONS, sampling)
    assert because.startswith("seed: ") == (seed is not None)
    assert "--reseed" in because or seed is None
    assert immovable_because(CompletionEndpoint.COMPLETIONS, sampling, reseed=True) == ""


@pytest.mark.parametrize("default", [True, False])
def test_header_overrides_the_setting(default: bool) -> None:
    assert reseed_allowed(None, default) is default
    assert reseed_allowed("true", default) is True
    assert reseed_allowed("false", default) is False
    assert reseed_allowed("True", default) is None


def asked(reseed: bool = True, header: str | None = None, **body: Any) -> CompletionRequest:
    asked = {"prompt": PROMPT, "max_tokens": 30, "seed": SEED, "temperature": 1.0, **body}
    ids = {"request_id": "r", "group": "", "tag": "", "default_model": "model"}
    return read_completion_request(
        CompletionEndpoint.COMPLETIONS, asked, now_s=0.0, reseed=reseed, reseed_header=header, **ids
    )


def test_flag_is_off_by_default() -> None:
    options = [read_options(GatewayFlags(engines=["e=http://h"], **flags)) for flags in ({}, {"reseed": True})]
    assert [option.reseed for option in options] == [False, True]


def test_invalid_header_is_refused_together_with_other_faults() -> None:
    with pytest.raises(HttpRefusal, match=r"X-Reseed: must be true or false, got 'yes'.*seed: must be a whole number"):
        asked(header="yes", seed="x")


async def test_header_reaches_the_gateway_and_no_engine() -> None:
    async with http_harness(engines=2) as harness:
        seeded = {"prompt": "p", "max_tokens": 3, "seed": SEED, "return_token_ids": True}
        status, refusal = await harness.post(seeded, headers=b"X-Reseed: 1\r\n")
        assert (status, refusal["error"]["param"]) == (400, "X-Reseed")
        for engine in harness.engines:
            engine.hold_after = 2
        asking = asyncio.create_task(harness.post(seeded, headers=b"X-Reseed: true\r\n" + NAMED))
        await until_tokens(harness, 2)
        release(harness)
        assert (await http_move(harness)).done
        (choice,) = (await asking)[1]["choices"]
        assert choice["reseeded"] == [{"position": 2, "seed": seed_at(SEED, 2)}]
        assert [asked.body["seed"] for asked in asked_of(harness)] == [SEED, seed_at(SEED, 2)]
        assert [asked.values("X-Reseed") for asked in asked_of(harness)] == [[], []]


def test_header_decides_whether_a_request_may_move() -> None:
    assert asked(reseed=True, header="false").records[0].immovable_because.startswith("seed: ")
    assert asked(reseed=False, header="true").records[0].immovable_because == ""


def test_each_sample_has_its_own_seed_and_none_without_a_seed() -> None:
    assert [record.body["seed"] for record in asked(n=3).records] == [SEED, SEED + 1, SEED + 2]
    assert [record.body["seed"] for record in asked(n=3, seed=-1).records] == [-1] * 3


async def moved(w: World, request: CompletionRequest, *cuts: int) -> Any:
    """Run the request and move it after each number of tokens in `cuts`. Returns its record, which has ended."""
    async with w.gateway.request_group(request) as job:
        await w.settle()
        (record,) = job.records
        for position in cuts:
            while len(record.generated_ids) < position:
                await w.step()
            moving = move(w, "e1" if record.engine == "e0" else "e0")
            await w.settle()
            await w.step()
            assert (await moving).done
        await finish(w, job)
        return record


def seeds_sent(w: World) -> list[int]:
    seen = sorted(
        (request.request_id, request.body["seed"]) for engine in w.engines.values() for request in engine.seen
    )
    return [seed for _, seed in seen]


async def test_moved_answer_states_position_and_seed_of_each_part() -> None:
    w, request = world(), asked()
    record = await moved(w, request, 3, 8)
    assert seeds_sent(w) == [SEED, seed_at(SEED, 3), seed_at(SEED, 8)]
    expected = [{"position": position, "seed": seed_at(SEED, position)} for position in (3, 8)]
    assert response(request.form, [record], 1)["choices"][0]["reseeded"] == expected
    assert list(record.generated_ids) == undisturbed(PROMPT, 30)[0]


@pytest.mark.parametrize("body", [{}, {"temperature": 0}])
async def test_answers_without_new_seeds_do_not_state_any(body: dict[str, Any]) -> None:
    w, request = world(), asked(**body)
    record = await moved(w, request, *([4] if body else []))
    assert set(seeds_sent(w)) == {SEED}
    assert "reseeded" not in response(request.form, [record], 1)["choices"][0]


async def test_stream_states_the_seed_in_the_first_chunk_after_the_cut() -> None:
    w, request = world(), asked(stream=True, return_token_ids=True)
    record = await moved(w, request, 5)
    lines = ChunkWriter(request.form, 0, record).news().decode().strip().split("\n\n")
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    tokens = 0
    for choice in choices:
        expected = [{"position": 5, "seed": seed_at(SEED, 5)}] if tokens == 5 and choice["token_ids"] else None
        assert choice.get("reseeded") == expected
        tokens += len(choice["token_ids"])
    assert tokens > 6


async def test_failover_continues_with_a_new_seed_and_states_it_once() -> None:
    w, request = world(3), asked()
    async with w.gateway.request_group(request) as job:
        await w.settle()
        (record,) = job.records
        for _ in range(4):
            await w.step()
        for _ in range(2):  # the second engine fails before its first token
            w.engines[str(record.engine)].die()
            await w.settle()
            await w.settle()
        await finish(w, job)
        assert seeds_sent(w) == [SEED, seed_at(SEED, 4), seed_at(SEED, 4)]
        assert record.choice_fields["reseeded"] == [{"position": 4, "seed": seed_at(SEED, 4)}]


@pytest.mark.parametrize("collected", [(), (6,), (6, 7, 10)])
async def test_stored_answer_keeps_its_seeds(collected: tuple[int, ...]) -> None:
    """The gateway is killed after the last collection, and another continues the answer."""
    w, request = world(), asked()
    pieces = []
    async with w.gateway.request_group(request) as job:
        await w.settle()
        (record,) = job.records
        cutter = RecordCutter(0, record, prompt_wanted=True)
        for tokens in range(1, 12):
            await w.step()
            if tokens == 5:
                moving = move(w, "e1" if record.engine == "e0" else "e0")
                await w.settle()
            if tokens in (*collected, 11):
                pieces.append(cutter.cut())
        assert (await moving).done
        first = list(record.choice_fields["reseeded"])
    again = asked(stream=True)
    (record,) = again.records
    assert give_back(record, put_together(piece for piece in pieces if piece is not None)[0], 0.0)
    assert record.choice_fields["reseeded"] == first == [{"position": 5, "seed": seed_at(SEED, 5)}]
    position = len(record.generated_ids)
    async with w.gateway.request_group(again) as job:
        await w.settle()
        await finish(w, job)
    seeds = [*first, {"position": position, "seed": seed_at(SEED, position)}]
    assert record.choice_fields["reseeded"] == seeds
    announced = [
        delta.chunk.choice_fields["reseeded"] for delta in record.take_undelivered() if delta.chunk.choice_fields
    ]
    assert [each for part in announced for each in part] == seeds
    last = RecordCutter(0, record, prompt_wanted=True)
    restored = asked().records[0]
    assert give_back(restored, put_together([p for p in [last.cut()] if p is not None])[0], 0.0)
    assert restored.choice_fields == {"reseeded": seeds}
