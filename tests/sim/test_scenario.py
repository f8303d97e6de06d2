"""Scenarios: every fault at once, with its path; and what is drawn from one."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.errors import ProblemFaults
from orchestrrl.sim.scenario import EXAMPLE, built_in_names, load_scenario, parse_scenario
from orchestrrl.sim.workload import requests_of_step
from tests.sim.builders import TEXT

SCENARIOS = sorted(Path(__file__).with_name("scenarios").glob("*.yaml"))


@pytest.mark.parametrize("source", [*map(str, SCENARIOS), *built_in_names()])
def test_the_shipped_ones_are_sound(source: str) -> None:
    assert load_scenario(source).name


def test_every_fault_is_reported_at_once() -> None:
    document = yaml.safe_load(TEXT)
    document["gpus"] = 0
    document["surprise"] = 1
    document["workload"]["lengths"] = {"kind": "pareto", "minimum_tokens": 10}
    document["daemon"]["fast"] = {"interval_s": -1}
    document["daemon"]["fleet"] = {}
    with pytest.raises(ProblemFaults) as caught:
        parse_scenario(yaml.safe_dump(document))
    paths = {fault.split(":")[0] for fault in caught.value.faults}
    assert paths == {
        "gpus",
        "surprise",
        "workload.lengths.pareto.exponent",
        "daemon.fast.interval_s",
        "daemon.fleet",
    }


def test_faults_between_fields() -> None:
    document = yaml.safe_load(TEXT)
    document["arms"] = ["both", "magic"]
    document["workload"]["warmup_steps"] = 1
    document["engines"]["configurations"][1]["id"] = "narrow"
    with pytest.raises(ProblemFaults) as caught:
        parse_scenario(yaml.safe_dump(document))
    assert [fault.split(":")[0] for fault in caught.value.faults] == [
        "arms[1]",
        "engines.configurations[1].id",
        "workload.warmup_steps",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.yaml"], r"nowhere\.yaml: No such file"),
        (["nothing"], rf"one of .*{EXAMPLE}.*, got 'nothing'"),
        ([], r"SCENARIO: give one, or --example"),
        (["--example", "--arms", "x"], r"--arms\[0\]: must be one of .*, got 'x'"),
        (["--example", "--seeds", "1,x"], r"--seeds\[1\]: must be a whole number, got 'x'"),
    ],
)
def test_bad_usage_is_exit_status_2(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(application("sim"), ["sim", "gen", *arguments])
    assert result.exit_code == 2
    assert re.search(said, result.stderr)
    assert result.stdout == ""


@given(st.integers(0, 100), st.integers(0, 5))
def test_the_same_seed_draws_the_same_step(seed: int, step: int) -> None:
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
def test_lengths_have_the_median_that_was_asked_for(lengths: str, median: int) -> None:
    text = re.sub(r"lengths: .*", f"lengths: {lengths}", TEXT).replace("prompts: 8", "prompts: 2000")
    drawn = [request.output_tokens for request in requests_of_step(parse_scenario(text).workload, 1, 0)]
    assert np.median(drawn) == pytest.approx(median, rel=0.1)
