"""Tests of scenarios: all faults at once with their paths, and the requests drawn from a scenario."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.engines.profiles.store import write_profile
from orchestrrl.lab.sim.engines import fleet_section, kinds_of
from orchestrrl.lab.sim.scenario import EXAMPLE, FOLDER, load_scenario, parse_scenario, scenario_names
from orchestrrl.lab.sim.workload import requests_of_step
from planner.cost.paper import named_profile
from planner.cost.profile import Curve, MoveCosts
from tests.orchestrrl.lab.sim.gen_scenarios import TEXT

SCENARIOS = sorted(Path(__file__).with_name("scenarios").glob("*.yaml"))


@pytest.mark.parametrize("source", [*map(str, SCENARIOS), *scenario_names(FOLDER)])
def test_built_in_scenarios_are_valid(source: str) -> None:
    assert load_scenario(source).name


def test_every_fault_is_reported_at_once() -> None:
    document = yaml.safe_load(TEXT)
    document["gpus"] = 0
    document["surprise"] = 1
    document["arms"] = ["both", "magic"]
    document["workload"]["lengths"] = {"kind": "pareto", "minimum_tokens": 10}
    document["daemon"]["fast"] = {"interval_s": -1}
    document["daemon"]["fleet"] = {}
    with pytest.raises(ProblemFaults) as caught:
        parse_scenario(yaml.safe_dump(document))
    paths = {fault.split(":")[0] for fault in caught.value.faults}
    assert paths == {
        "gpus",
        "surprise",
        "arms[1]",
        "workload.lengths.pareto.exponent",
        "daemon.fast.interval_s",
        "daemon.fleet",
    }


def test_inconsistent_fields_are_reported() -> None:
    document = yaml.safe_load(TEXT)
    document["workload"]["warmup_steps"] = 1
    document["engines"]["configurations"][1]["id"] = "narrow"
    with pytest.raises(ProblemFaults) as caught:
        parse_scenario(yaml.safe_dump(document))
    assert [fault.split(":")[0] for fault in caught.value.faults] == [
        "engines.configurations[1].id",
        "workload.warmup_steps",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.yaml"], r"nowhere\.yaml: No such file"),
        (["nothing"], rf"one of .*{EXAMPLE}.*, got 'nothing'"),
        ([], r"SCENARIO: exactly one of SCENARIO and --example must be given"),
        (["--example", "--arms", "x"], r"--arms\[0\]: must be one of .*, got 'x'"),
        (["--example", "--seeds", "1,x"], r"--seeds\[1\]: must be a whole number, got 'x'"),
        (["nothing", "--arms", "x", "--seeds", "x"], r"(?s)got 'nothing'.*--arms\[0\].*--seeds\[0\]"),
        (["--example", "--plot", "/dev/null/pictures"], r"--plot: must be a folder, got the file '/dev/null'"),
        (["--example", "--steps", "1"], r"--steps: must be > the scenario's warmup_steps \(1\), got 1"),
    ],
)
def test_invalid_arguments_exit_with_status_2(arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(application(), ["sim", "gen", *arguments])
    assert result.exit_code == 2
    assert re.search(expected, result.stderr)
    assert result.stdout == ""


def with_profile(name: str, **engines: object) -> str:
    document = yaml.safe_load(TEXT)
    document["engines"] = {"profile": name, **engines}
    return yaml.safe_dump(document)


def test_built_in_profile_sets_curves_of_engines_and_daemon() -> None:
    found = parse_scenario(with_profile("paper-14b-h800"))
    kinds, profile = kinds_of(found), named_profile("paper-14b-h800")
    assert [kind.profile for kind in kinds.values()] == list(profile.configurations)
    config = found.daemon_config(fleet_section(found, kinds))
    assert config.fleet.profile_value() == profile
    assert [configuration.id for configuration in config.fleet.configuration_values()] == ["tp1", "tp2", "tp4", "tp8"]


def test_profile_file_is_relative_to_the_scenario(tmp_path: Path) -> None:
    profile = named_profile("paper-32b-h800")
    moves = MoveCosts(1000.0, Curve.line(0.0, 1e-10), Curve.line(0.0, 1e-4))
    write_profile(tmp_path / "mine.yaml", replace(profile, configurations=profile.configurations[2:], moves=moves))
    (tmp_path / "mine.scenario.yaml").write_text(with_profile("mine.yaml", initial="tp8"))
    found = load_scenario(str(tmp_path / "mine.scenario.yaml"))
    assert list(kinds_of(found)) == ["tp4", "tp8"]
    assert found.engines.moved_bytes_per_token == 1000.0


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("h100", r"engines\.profile: must be a \.yaml or \.json file or one of .*paper-14b-h800.*, got 'h100'"),
        ("nowhere.yaml", r"engines\.profile: .*nowhere\.yaml: .*No such file"),
        ("faulty.yaml", r"engines\.profile: faulty\.yaml: gpu: is missing"),
        ("", r"engines\.profile: .*at least 1 character"),
    ],
)
def test_invalid_profile_is_reported_with_other_faults(tmp_path: Path, profile: str, expected: str) -> None:
    (tmp_path / "faulty.yaml").write_text("model: x\nengine: y\nconfigurations: []\n")
    path = tmp_path / "scenario.yaml"
    path.write_text(with_profile(profile).replace("gpus: 8", "gpus: 0"))
    with pytest.raises(ProblemFaults) as caught:
        load_scenario(str(path))
    listing = "\n".join(caught.value.faults)
    assert re.search(expected, listing)
    assert "gpus: should be greater than or equal to 1, got 0" in listing


def test_unknown_initial_configuration_is_rejected() -> None:
    with pytest.raises(ProblemFaults, match=r"engines\.initial: must be one of tp1, tp2, tp4, tp8, got 'tp16'"):
        parse_scenario(with_profile("paper-14b-h800", initial="tp16"))


@given(st.integers(0, 100), st.integers(0, 5))
def test_same_seed_draws_the_same_step(seed: int, step: int) -> None:
    workload = parse_scenario(TEXT).workload
    requests = requests_of_step(workload, seed, step)
    assert requests == requests_of_step(workload, seed, step)
    assert len({request.id for request in requests}) == workload.prompts * workload.samples
    assert all(1 <= request.output_tokens <= workload.max_tokens for request in requests)


@pytest.mark.parametrize(
    ("lengths", "median"),
    [
        ("{kind: lognormal, median_tokens: 300, sigma: 1.0}", 300),
        ("{kind: pareto, minimum_tokens: 100, exponent: 1.0}", 200),
        ("{kind: histogram, quantiles: [0, 0.5, 1], tokens: [10, 250, 1900]}", 250),
        ("{kind: empirical, tokens: [100, 400, 500]}", 400),
    ],
)
def test_drawn_lengths_have_the_configured_median(lengths: str, median: int) -> None:
    text = re.sub(r"lengths: .*", f"lengths: {lengths}", TEXT).replace("prompts: 8", "prompts: 2000")
    drawn = [request.output_tokens for request in requests_of_step(parse_scenario(text).workload, 1, 0)]
    assert np.median(drawn) == pytest.approx(median, rel=0.1)
