"""The demo's scenario and report. The demo itself runs in tests/vllm."""

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.demo.demo import _tables
from orchestrrl.cli.main import application
from orchestrrl.cli.output import print_view
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.lab.demo.report import as_json, draw
from orchestrrl.lab.demo.run import DemoOutcome, MethodMark, OracleMark, SeedOutcome, marks_by_method
from orchestrrl.lab.demo.scenario import ENGINES, expected_ids, load_scenario, samples
from orchestrrl.lab.demo.step import DemoStepRecord
from orchestrrl.lab.simulated_engine.tokens import EOS
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2


def test_step_has_prompts_with_samples_assigned_round_robin():
    scenario = load_scenario("simulated")
    step = samples(scenario, "simulated", 1)
    assert len(step) == 32 * 8
    assert [sample.dealt_to for sample in step[:40:8]] == [0, 1, 2, 3, 0]
    assert all(len({s.dealt_to for s in step[i : i + 8]}) == 1 for i in range(0, 256, 8))
    assert len({sample.prompt_ids for sample in step}) == 256
    assert step == samples(scenario, "simulated", 1)
    assert step != samples(scenario, "simulated", 2)


def test_each_move_method_is_cheaper_for_some_requests():
    scenario = load_scenario("simulated-kv")
    assert scenario.kv
    engine = scenario.engine
    rate = engine.kv_gbps * 1e9 / 8
    contexts = [len(sample.prompt_ids) for seed in scenario.seeds for sample in samples(scenario, "simulated", seed)]
    by_kv = [
        engine.kv_latency_s + tokens * engine.kv_bytes_per_token / rate < tokens * engine.shape.prefill_s_per_token
        for tokens in contexts
    ]
    assert 0.1 < sum(by_kv) / len(by_kv) < 0.9


def test_lengths_have_a_heavy_tail():
    scenario = load_scenario("simulated")
    lengths = sorted(s.output_tokens for seed in range(20) for s in samples(scenario, "simulated", seed))
    # Sampling error of a median over 640 prompts whose samples are correlated.
    assert lengths[len(lengths) // 2] == pytest.approx(602, rel=0.15)
    assert lengths[int(len(lengths) * 0.9)] == pytest.approx(1818, rel=0.25)
    assert lengths[-1] == scenario.max_tokens


def test_response_ends_with_eos_or_at_the_limit():
    scenario = load_scenario("simulated")
    for sample in samples(scenario, "simulated", 3)[:64]:
        ids = expected_ids(scenario, sample)
        assert len(ids) == sample.output_tokens
        assert (ids[-1] == EOS) == (sample.output_tokens < scenario.max_tokens)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_request_fits_on_an_engine(engine: str):
    scenario = load_scenario(engine)
    longest = scenario.prompt_tokens[1] + scenario.max_tokens
    assert longest <= scenario.engine.max_model_len_tokens <= scenario.engine.kv_capacity_tokens


def outcome() -> DemoOutcome:
    scenario = load_scenario("simulated")
    seeds = []
    for seed, (static_s, ours_s, oracle_s) in enumerate([(200, 160, 150), (100, 95, 90), (300, 200, 150)], start=1):
        step = samples(scenario, "simulated", seed)[:4]
        answers = {sample.id: [1, 2] for sample in step}

        def record(makespan_s: float, step=step, answers=answers) -> DemoStepRecord:
            finish_s = {s.id: makespan_s * (i + 1) / 4 for i, s in enumerate(step)}
            return DemoStepRecord(makespan_s, finish_s, dict(answers), idle_s=[1.0, 2.0, 3.0, 4.0])

        mark = OracleMark(oracle_s, static_s, oracle_s - 1, 8192)
        seeds.append(SeedOutcome(seed, step, record(static_s), record(ours_s), None, mark, 7, 900))
    return DemoOutcome(scenario, seeds, "simulated")


def test_report_has_the_contract_keys(tmp_path: Path):
    report = json.loads(json.dumps(as_json(outcome()), allow_nan=False))
    assert report["engine"] == "simulated"
    assert report["requests"] == 4
    assert report["seeds"] == [1, 2, 3]
    assert report["makespan_s"]["static"] == [200, 100, 300]
    assert report["makespan_s"]["orchestrrl"] == [160, 95, 200]
    assert math.isclose(report["ratio_median"], 200 / 160)
    assert math.isclose(report["oracle_ratio_median"], 200 / 150)
    assert math.isclose(report["gain_kept"], 0.25 / (200 / 150 - 1))
    assert (report["moves"], report["tokens_recomputed"]) == (21, 2700)
    assert (report["lost"], report["differing"]) == (0, 0)
    assert set(report["idle_s"]) == {"static", "orchestrrl"}
    draw(outcome(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_lost_and_differing_requests_are_counted():
    (seed, *_) = outcome().seeds
    seed.expected = {sample.id: [1, 2] for sample in seed.samples}
    assert seed.lost == []
    assert seed.differing == []
    del seed.shown.answers[seed.samples[0].id]
    seed.shown.answers[seed.samples[1].id] = [1, 3]
    seed.baseline.answers[seed.samples[2].id] = [1]
    assert seed.lost == [seed.samples[0].id]
    assert seed.differing == [seed.samples[1].id, seed.samples[2].id]


def test_gain_kept_is_none_without_oracle_gain():
    demo = outcome()
    for seed in demo.seeds:
        seed.oracle = OracleMark(100, 100, 90, 8192)
    assert as_json(demo)["gain_kept"] is None


def entry(kind: str, subject: str, **body: Any) -> control_pb2.JournalEntry:
    return control_pb2.JournalEntry(kind=kind, subject_id=subject, body_json=json.dumps(body))


class Told:
    """A client that returns the entries of a daemon's journal."""

    def __init__(self, *entries: control_pb2.JournalEntry) -> None:
        self.control, self._entries = self, entries

    async def WatchJournal(self, request: control_pb2.WatchJournalRequest) -> AsyncIterator[control_pb2.JournalEntry]:
        for each in self._entries:
            if each.kind in request.kinds:
                yield each


def ordered(request: str, method: str, predicted_s: float) -> dict[str, Any]:
    return {"request": request, "method": method, "predicted_s": predicted_s, "other_s": 0.0}


def seen(request: str, method: str | None, seconds: float, *, tokens: int = 100, done: bool = True) -> dict[str, Any]:
    return {
        "id": request,
        "done": done,
        "method": method,
        "duration_s": seconds,
        "recomputed_tokens": tokens,
        "loaded_tokens": 0,
    }


async def test_predicted_and_actual_times_are_of_the_same_moves(capsys: pytest.CaptureFixture[str]) -> None:
    """Moves that failed, were not observed, were not predicted, or used another method than ordered are excluded."""
    orders = [
        *(ordered(f"r{n}", "recompute", 0.1 * (n + 1)) for n in range(3)),
        ordered("failed", "recompute", 9.0),
        ordered("unseen", "recompute", 9.0),
        ordered("queued", "recompute", 0.0),
        ordered("fell back", "transfer", 9.0),
    ]
    items = [
        *(seen(f"r{n}", "recompute", 0.2 * (n + 1), tokens=100 * (n + 1)) for n in range(3)),
        seen("failed", "recompute", 7.0, done=False),
        seen("unseen", "recompute", 0.0),
        seen("queued", "recompute", 7.0),
        seen("fell back", "recompute", 7.0),
    ]
    printed = Told(
        entry(EntryKind.OPERATION_INTENT, "o1", operation={"action": {"moves": orders}}),
        entry(EntryKind.OPERATION_INTENT, "o2", operation={"action": {"kind": "set_routes"}}),
        entry(EntryKind.OPERATION_RESULT, "o1", items=items),
        entry(EntryKind.OPERATION_RESULT, "o2", items=[]),
    )
    marks = await marks_by_method(cast(ControlClient, printed), speed=50.0)
    assert marks == [MethodMark("recompute", 3, 200, pytest.approx(10.0), pytest.approx(20.0), pytest.approx(0.5), 0.0)]
    demo = outcome()
    demo.moves_by_method = marks
    (reported,) = as_json(demo)["moves_by_method"]
    assert reported["predicted_over_actual"] == pytest.approx(0.5)
    print_view(_tables(demo))
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["recompute"]]
    assert row == ["recompute", "3", "200", "10.000", "20.000", "0.50"]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--engine-kind", "sglang"], "--engine-kind: must be one of simulated, vllm, got 'sglang'"),
        (["--engine-kind", "vllm", "--kv"], "--kv: requires --engine-kind simulated, got 'vllm'"),
        (["--engine-kind", "vllm", "--redeploy"], "--redeploy: requires --engine-kind simulated, got 'vllm'"),
        (["--redeploy", "--kv"], "--redeploy: cannot be combined with --kv"),
        (["--seeds", "1,x,-2"], "--seeds[1]: must be a whole number, got 'x'"),
    ],
)
def test_invalid_flags_exit_2(arguments: list[str], fault: str):
    result = CliRunner().invoke(application(), ["demo", *arguments])
    assert result.exit_code == 2
    assert fault in result.stderr
    assert result.stdout == ""
