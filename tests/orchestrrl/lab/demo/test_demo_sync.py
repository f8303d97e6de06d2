"""The demo's report of a weight sync: tokens are compared with the version that their span names."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.demo.demo import sync_demo_view
from orchestrrl.cli.main import application
from orchestrrl.cli.output import print_view
from orchestrrl.gateway.ledger.ledger import VersionSpan
from orchestrrl.lab.demo.report import sync_json
from orchestrrl.lab.demo.scenario import DemoScenario, Sample, load_scenario, samples
from orchestrrl.lab.demo.step import DemoStepRecord
from orchestrrl.lab.demo.sync_run import AFTER, BEFORE, SyncOutcome, simulated_ids, stretches
from orchestrrl.lab.simulated_engine.tokens import TokenModel
from orchestrrl.weights.controller.profile import profile
from orchestrrl.weights.controller.reports import PhaseTime, SyncPhase, SyncReport, SyncState

SEEDS = {BEFORE: 11, AFTER: 12}  # of weights
REPORT = SyncReport(
    "s1",
    AFTER,
    SyncState.DONE,
    0.0,
    code="done",
    ended_s=2.0,
    phases=(PhaseTime(SyncPhase.PHASE_B, 0.0, 1.0), PhaseTime(SyncPhase.INSTALL, 1.0, 2.0)),
    bytes=33_000_000,
    estimate_s=0.9,
)


def generated(scenario: DemoScenario, seed: int, context: tuple[int, ...], count: int) -> list[int]:
    generation = TokenModel(lengths=scenario.lengths, weights_seed=seed).begin(context)
    return [generation.next_token()[0] for _ in range(count)]


def crossing(scenario: DemoScenario, sample: Sample) -> DemoStepRecord:
    """Build a response of twenty tokens of one version followed by twelve of the next."""
    first = generated(scenario, SEEDS[BEFORE], sample.prompt_ids, 20)
    second = generated(scenario, SEEDS[AFTER], (*sample.prompt_ids, *first), 12)
    spans = [VersionSpan(BEFORE, 0, 20), VersionSpan(AFTER, 20, 32)]
    return DemoStepRecord(answers={sample.id: [*first, *second]}, spans={sample.id: spans})


def differing(scenario: DemoScenario, sample: Sample, record: DemoStepRecord) -> int:
    printed = stretches([sample], record)
    return sum(list(each.ids) != simulated_ids(scenario, SEEDS, each) for each in printed)


def test_tokens_match_the_version_of_their_span() -> None:
    scenario = load_scenario("simulated")
    sample = samples(scenario, "simulated", 1)[0]
    record = crossing(scenario, sample)
    assert differing(scenario, sample, record) == 0
    record.spans[sample.id] = [VersionSpan(BEFORE, 0, 32)]
    assert differing(scenario, sample, record) == 1
    record.spans[sample.id] = [VersionSpan(None, 0, 32)]
    assert differing(scenario, sample, record) == 1


def outcome(**changes: Any) -> SyncOutcome:
    made = SyncOutcome(profile(REPORT), 4, 4, 256, 256, 21, {BEFORE: 900, AFTER: 100}, 0)
    return replace(made, **changes)


def test_sync_is_well_only_if_every_part_is() -> None:
    assert outcome().is_well
    for changes in (
        {"serve_it": 3},
        {"answered": 255},
        {"differing": 1},
        {"tokens": {None: 5, AFTER: 995}},
        {"profile": profile(replace(REPORT, code="some_quarantined"))},
    ):
        assert not outcome(**changes).is_well, changes


def test_sync_is_reported_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    printed = json.loads(json.dumps(sync_json(outcome()), allow_nan=False))
    assert (printed["version"], printed["code"], printed["serve_it"]) == (AFTER, "done", 4)
    assert printed["tokens_by_version"] == {"1": 900, "2": 100}
    assert printed["phases_s"] == {"phase_b": 1.0, "install": 1.0}
    print_view(sync_demo_view(outcome()))
    shown = " ".join(capsys.readouterr().out.split())
    assert "version 2 (33 MB): installed on 4 of 4 engines; requests were paused for 1 s of 2 s" in shown
    assert "responses: 256 of 256, 21 with tokens of both versions" in shown
    assert "1.11 x the estimate" in shown


def test_conflicting_flags_are_rejected() -> None:
    result = CliRunner().invoke(application(), ["demo", "--sync", "--seeds", "1"])
    assert result.exit_code == 2
    assert "--sync: cannot be combined with --kv, --redeploy or --seeds" in result.stderr
