"""Intents as JSON: round trips, and all possible faults."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fabric.intents import MOST_BYTES, intent_to_json, parse_intent
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.model import GpuId

groups = st.lists(st.lists(st.integers(0, 5000), min_size=1, max_size=5).map(tuple), min_size=1, max_size=4).map(tuple)


@st.composite
def traffics(draw: st.DrawFn) -> Traffic:
    primitive = draw(st.sampled_from(Primitive))
    chosen = draw(groups)
    has_receivers = primitive in (Primitive.BIPARTITE, Primitive.BROADCAST)
    receivers = tuple(draw(st.lists(st.integers(0, 5000), min_size=1, max_size=4).map(tuple)) for _ in chosen)
    return Traffic(
        draw(st.sampled_from(TrafficOperation)),
        primitive,
        chosen,
        draw(st.floats(0, 1e15)),
        draw(st.floats(0, 1e6)),
        receivers if has_receivers else (),
        draw(st.booleans()),
    )


@given(
    stage=st.sampled_from(Stage),
    traffic=st.lists(traffics(), max_size=3).map(tuple),
    gpus=st.dictionaries(st.integers(0, 10**8), st.integers(0, 10**6).map(GpuId), max_size=5),
    job=st.text(st.characters(codec="utf-8"), max_size=20),
)
def test_intent_round_trips_through_json(
    stage: Stage, traffic: tuple[Traffic, ...], gpus: dict[int, GpuId], job: str
) -> None:
    intent = Intent("gradients", stage, traffic, gpus, job)
    assert parse_intent("gradients", intent_to_json(intent)) == intent


PART: dict[str, Any] = {
    "operation": "DP",
    "primitive": "ring_all_reduce",
    "groups": [[0, 1]],
    "bytes_per_rank": 4e9,
}


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"traffic": []}, "intent.stage: is missing"),
        ({"stage": "trian", "traffic": []}, "intent.stage: should be 'train', 'gen' or 'weight_sync', got 'trian'"),
        ({"stage": "train", "traffic": [], "gpu": {}}, "intent.gpu: is not a known field"),
        ({"stage": "train", "traffic": [], "gpus": {"a": 1}}, "intent.gpus"),
        ({"stage": "train", "traffic": [], "gpus": {"0": -1}}, "intent.gpus.0: should be greater than or equal to 0"),
        ({"stage": "train", "traffic": [{**PART, "groups": [[0, -1]]}]}, "intent.traffic[0].groups[0][1]"),
        ({"stage": "train", "traffic": [{**PART, "bytes_per_rank": -1}]}, "intent.traffic[0].bytes_per_rank"),
        ({"stage": "train", "traffic": [{**PART, "bytes_per_rank": 1e308}]}, "intent.traffic[0].bytes_per_rank"),
        ({"stage": "train", "traffic": [{**PART, "times": float("inf")}]}, "intent.traffic[0].times"),
        ({"stage": "train", "traffic": [{**PART, "times": 1e999}]}, "intent.traffic[0]"),
        (
            {"stage": "train", "traffic": [PART, {**PART, "primitive": "bipartite"}]},
            "intent.traffic[1]: receivers must be set",
        ),
        ({"stage": "train", "traffic": [{**PART, "receivers": [[1], [2]]}]}, "intent.traffic[0]: receivers must have"),
        ([], "intent"),
        ("train", "intent"),
    ],
)
def test_invalid_field_is_reported(document: object, fault: str) -> None:
    with pytest.raises(ProblemFaults) as wrong:
        parse_intent("gradients", json.dumps(document))
    assert any(each.startswith(fault) for each in wrong.value.faults), wrong.value.faults


@pytest.mark.parametrize("text", ["", "{", "NaN", "x" * (MOST_BYTES + 1)])
def test_non_intent_is_rejected(text: str) -> None:
    with pytest.raises(ProblemFaults) as wrong:
        parse_intent("", text)
    assert wrong.value.faults[0] == "period: must be a name, got ''"
    assert len(wrong.value.faults) == 2


def test_job_of_16384_mapped_gpus_fits() -> None:
    ranks = 16384

    def strided(size: int) -> tuple[tuple[int, ...], ...]:
        apart = ranks // size
        return tuple(tuple(range(first, ranks, apart)) for first in range(apart))

    traffic = tuple(
        Traffic(operation, Primitive.RING_ALL_REDUCE, strided(size), 1e9)
        for operation, size in zip(
            (TrafficOperation.TP, TrafficOperation.DP, TrafficOperation.EP, TrafficOperation.PP, TrafficOperation.CP),
            (8, 128, 64, 16, 2),
            strict=True,
        )
    )
    gpus = {rank: GpuId(ranks - 1 - rank) for rank in range(ranks)}
    intent = Intent("gradients", Stage.TRAIN, traffic, gpus, "trainer")
    text = intent_to_json(intent)
    assert len(text) < MOST_BYTES / 2
    assert parse_intent("gradients", text) == intent
