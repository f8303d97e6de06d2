"""A profile survives a round trip through its file without loss, and all faults of a file are reported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.engines.profiles.store import (
    as_document,
    as_text,
    parse_profile,
    read_profile,
    tidy,
    with_engine,
    write_profile,
)
from planner.cost.profile import (
    Curve,
    EngineProfile,
    MoveCosts,
    Parallelism,
    Profile,
    ProfileSource,
    Provenance,
    StepTime,
)
from planner.model import ConfigurationId

numbers = st.floats(min_value=0, max_value=1e15, allow_nan=False)
positive = st.floats(min_value=1e-12, max_value=1e15)
counts = st.integers(min_value=1, max_value=10**9)
names = st.text(min_size=1, max_size=8)
errors = st.none() | numbers


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    xs = sorted(draw(st.sets(numbers, min_size=1, max_size=6)))
    return Curve(tuple(xs), tuple(draw(numbers) for _ in xs))


provenances = st.builds(
    Provenance,
    source=st.sampled_from(ProfileSource),
    date=st.dates().map(str) | names,
    detail=st.text(max_size=20),
    samples=st.integers(min_value=0, max_value=10**6),
    fit_error_mean=errors,
    fit_error_max=errors,
)
parallelisms = st.builds(
    Parallelism, tp=counts, dp=counts, ep=counts, micro_batches=counts, attention_gpus=st.just(2), ffn_gpus=counts
) | st.builds(Parallelism, tp=counts)


@st.composite
def engines(draw: st.DrawFn, identity: str) -> EngineProfile:
    named = draw(st.lists(st.sampled_from(["prefill_tokens_per_s", "switch_s"]), unique=True).map(sorted))
    return EngineProfile(
        id=ConfigurationId(identity),
        parallelism=draw(parallelisms),
        step=StepTime(draw(curves()), draw(numbers), draw(numbers)),
        prefill_tokens_per_s=draw(positive),
        kv_capacity_tokens=draw(counts),
        max_sequences=draw(counts),
        switch_s=draw(numbers),
        provenance=draw(provenances),
        spill_capacity_tokens=draw(st.integers(min_value=0, max_value=10**9)),
        others=tuple((name, draw(provenances)) for name in named),
    )


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    identities = draw(st.lists(names, max_size=2, unique=True))
    moves = draw(st.none() | st.builds(MoveCosts, positive, curves(), curves(), st.none() | provenances))
    configurations = tuple(draw(engines(identity)) for identity in identities)
    return Profile(draw(names), draw(names), draw(names), configurations, moves)


@given(profiles())
def test_written_profile_is_read_back(profile: Profile) -> None:
    assert parse_profile(as_text(profile)) == profile


def test_profile_may_be_json() -> None:
    profile = parse_profile(GOOD)
    assert parse_profile(json.dumps(as_document(profile), indent=1)) == profile


def test_file_is_replaced_atomically(tmp_path: Path) -> None:
    path, profile = tmp_path / "deep" / "p.yaml", parse_profile(GOOD)
    write_profile(path, replace(profile, gpu="another"))
    write_profile(path, profile)
    assert read_profile(path) == profile
    assert list(path.parent.iterdir()) == [path]


GOOD = """
model: m
gpu: g
engine: vllm
configurations:
  - id: tp2
    parallelism: {tp: 2}
    step_s: {sequences: [1, 64], seconds: [0.018, 0.023], per_kv_token: 4e-8}
    prefill_tokens_per_s: 18000
    kv_capacity_tokens: 582885
    max_sequences: 1024
    switch_s: 1.7
    provenance: {source: measured, date: 2026-01-31, samples: 3, fit_error_mean: 0.01}
    others:
      switch_s: {source: given, date: 2026-01-31, detail: by hand}
"""


def test_hand_written_profile_is_read() -> None:
    (engine,) = parse_profile(GOOD).configurations
    assert engine.provenance == Provenance(ProfileSource.MEASURED, "2026-01-31", samples=3, fit_error_mean=0.01)
    assert engine.step == StepTime(Curve((1, 64), (0.018, 0.023)), 4e-8)
    assert dict(engine.others)["switch_s"].detail == "by hand"
    assert engine.configuration().gpus == 2


def test_all_faults_are_reported_with_path_and_value() -> None:
    with pytest.raises(ProblemFaults) as caught:
        parse_profile(
            """
            model: ""
            gpu: g
            colour: red
            configurations:
              - id: a
                parallelism: {tp: 0}
                step_s: {sequences: [4, 2], seconds: [0.1, .nan], per_kv_token: -1}
                prefill_tokens_per_s: 0
                kv_capacity_tokens: 1.5
                max_sequences: 8
                switch_s: 1
                provenance: {source: hearsay, date: 2026-01-31}
                others: {colour: {source: given, date: "2026"}}
              - id: a
                parallelism: {attention_gpus: 2}
                step_s: {sequences: [1], seconds: [0.1, 0.2], per_kv_token: 0}
                prefill_tokens_per_s: 1
                kv_capacity_tokens: 5
                max_sequences: 8
                switch_s: 1
                provenance: {source: given, date: x}
            """
        )
    starts = [fault.split(", got")[0] for fault in caught.value.faults]
    assert starts == [
        "model: String should have at least 1 character",
        "engine: is missing",
        "configurations[0].parallelism.tp: must be > 0",
        "configurations[0].step_s.seconds[1]: must be >= 0",
        "configurations[0].step_s.sequences: must have at least one entry, and the entries must be in strictly "
        "increasing order",
        "configurations[0].step_s.per_kv_token: must be >= 0",
        "configurations[0].prefill_tokens_per_s: must be > 0",
        "configurations[0].kv_capacity_tokens: should be a valid integer",
        "configurations[0].provenance.source: should be 'measured', 'imported', 'roofline' or 'given'",
        "configurations[0].others: must contain only step_s, spill_s_per_token, "
        "prefill_tokens_per_s, kv_capacity_tokens, max_sequences, switch_s, spill_capacity_tokens, not colour",
        "configurations[1].parallelism: attention_gpus and ffn_gpus must both be 0 or both be > 0",
        "configurations[1].step_s: must have as many seconds (2) as sizes (1)",
        "colour: is not a known field",
        "configurations[1].id: is already the id of configurations[0]",
    ]


@pytest.mark.parametrize("text", ["", "[]", "a: [", "configurations: 3", "? {a: 1}\n: 1", "configurations: [3]"])
def test_document_that_is_not_a_profile_is_a_fault(text: str) -> None:
    with pytest.raises(ProblemFaults):
        parse_profile(text)


def test_configuration_replaces_the_one_with_the_same_id() -> None:
    profile = parse_profile(GOOD)
    (engine,) = profile.configurations
    other = replace(engine, id=ConfigurationId("tp4"))
    both = with_engine(profile, other)
    assert [c.id for c in both.configurations] == ["tp2", "tp4"]
    quicker = replace(engine, switch_s=0.5)
    assert with_engine(both, quicker).configurations == (quicker, other)


def test_tidy_configuration_is_equal_within_its_digits() -> None:
    (engine,) = parse_profile(GOOD.replace("0.018,", "0.018123456789,")).configurations
    clean = tidy(engine)
    assert clean.step.base_s.ys[0] == 0.0181235
    assert tidy(clean) == clean
    assert replace(clean, step=engine.step) == engine


def test_tidy_rounds_figures_but_not_sizes() -> None:
    assert tidy((0.123456789, 1_234_567.0, 1_234_567.8)) == (0.123457, 1_234_567.0, 1_234_570.0)
