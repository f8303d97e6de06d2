"""Figures that the redeployment demo computes from reports, plans and snapshots."""

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.demo.redeploy_run import FlightSnapshot, ObservedRedeployment, resumption
from orchestrrl.lab.demo.redeploy_stack import GEN_POD, ObservedFabric, followed, site_of
from orchestrrl.lab.demo.report import PAPER
from orchestrrl.lab.demo.scenario import load_scenario, samples
from planner.model import GpuId

REFERENCE = Path(__file__).parents[5] / "shared" / "reference" / "paper.yaml"
FENCED_S, ADMITTED_S = 10.0, 12.0


def report(old: str = "narrow", new: str = "wide") -> dict[str, Any]:
    return {
        "old_engines": [{"engine_id": old}, {"engine_id": "stays"}],
        "new_engines": [{"engine_id": new}, {"engine_id": "stays"}],
        "steps": [
            {"kind": "fence", "began_unix_s": FENCED_S, "elapsed_s": 0.1},
            {"kind": "admit", "began_unix_s": ADMITTED_S - 0.1, "elapsed_s": 0.1},
        ],
        "closed_s": ADMITTED_S - FENCED_S,
    }


def plan(*migration_s: float) -> dict[str, Any]:
    return {"instances": [{"migration_s": each} for each in migration_s]}


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 9000), st.floats(0.1, 9.0)), min_size=1))
def test_resumption_is_timed_from_admission_to_first_new_token(
    waiting: dict[str, tuple[int, float]],
) -> None:
    before = {request: tokens for request, (tokens, _) in waiting.items()}
    looks = [
        FlightSnapshot(FENCED_S - 1, {**dict.fromkeys(waiting, "narrow"), "other": "stays"}, {**before, "other": 5}),
        FlightSnapshot(FENCED_S + 1, {**dict.fromkeys(waiting, ""), "other": "stays"}, {**before, "other": 50}),
    ]
    for request, (tokens, after_s) in sorted(waiting.items(), key=lambda item: item[1][1]):
        looks.append(
            FlightSnapshot(
                ADMITTED_S + after_s, {request: "wide", "other": "stays"}, {request: tokens + 1, "other": 99}
            )
        )
    found = resumption(report(), plan(3.0, 4.0), looks)
    assert found is not None
    after = [after_s for _, after_s in waiting.values()]
    assert (found.requests, found.context_tokens) == (len(waiting), sum(before.values()))
    assert found.last_s == pytest.approx(max(after))
    assert found.median_s == pytest.approx(median(after))
    assert found.predicted_s == 4.0
    redeployed = ObservedRedeployment(report(), plan(), found, None)
    assert redeployed.total_s == pytest.approx(redeployed.redeploying_s + found.last_s)


def test_no_requests_give_no_resumption() -> None:
    assert resumption(report(), plan(), []) is None
    assert resumption(report(), plan(), [FlightSnapshot(FENCED_S - 1, {"a": "stays"}, {"a": 3})]) is None


def test_scenario_has_the_fleet_of_the_paper() -> None:
    scenario = load_scenario("simulated-redeploy")
    assert scenario.deployment is not None
    assert (scenario.deployment.gpus, scenario.engines) == (16, 8)
    step = samples(scenario, "simulated", scenario.seeds[0])
    assert max(sample.output_tokens for sample in step) == scenario.max_tokens  # the distribution has a tail


def fabric_of(*announced_s: float, over: bool = True) -> ObservedFabric:
    ended = {"code": "committed", "moves": 8, "commits": [{"commanded_unix_s": 5.0, "usable_unix_s": 5.5}]}
    periods = [
        {"announced_unix_s": at_s, "ended_unix_s": at_s + 1 if over else None, "state": "", "stages": number, **ended}
        for number, at_s in enumerate(announced_s)
    ]
    return ObservedFabric({("gen0", "t0", "t1"): 2, ("", "gen0", "train0"): 1}, periods)


def test_followed_circuits_are_those_announced_during_admission() -> None:
    redeployment = report()
    redeployment["steps"][1]["detail"] = "its words"
    found = followed(redeployment, fabric_of(ADMITTED_S + 9, ADMITTED_S - 0.05, FENCED_S))
    assert found is not None
    shown = (found["said"], found["moves"], found["wall_s"], found["switches_wall_s"])
    assert shown == ("its words", 8, 1.0, 0.5)
    assert found["stages"] == 1  # the second announced period
    assert followed(redeployment, fabric_of(FENCED_S)) is None
    assert followed(redeployment, fabric_of(ADMITTED_S - 0.05, over=False)) is None


def test_only_narrow_engines_fit_into_one_server_of_the_site() -> None:
    deployment = load_scenario("simulated-redeploy").deployment
    assert deployment is not None
    site = site_of(deployment)
    fleet = [GpuId(gpu) for gpu in range(deployment.gpus, 2 * deployment.gpus)]
    narrow, wide = ({gpus[0]: gpus for gpus in zip(*[iter(fleet)] * size, strict=True)} for size in (2, 8))
    assert {len({site.server_of[gpu].id for gpu in gpus}) for gpus in narrow.values()} == {1}
    assert {len({site.server_of[gpu].id for gpu in gpus}) for gpus in wide.values()} == {2}
    assert {site.pod[site.server_of[gpu].pod].id for gpu in fleet} == {GEN_POD}


@pytest.mark.shared
@pytest.mark.skipif(not REFERENCE.exists(), reason="shared/reference is not there")
def test_figures_of_the_paper() -> None:
    shown = yaml.safe_load(REFERENCE.read_text())
    found = next(value for value in _sections(shown) if "case_study_switch" in value)["case_study_switch"]
    found["redeploying_s"] = found.pop("switching_s")
    assert found == PAPER


def _sections(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, dict):
        return []
    return [value, *(section for each in value.values() for section in _sections(each))]
