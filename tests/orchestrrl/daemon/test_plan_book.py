"""Tests of the plan book: its contents, its recovery after a restart, and calibration by results."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.daemon.plan_book import PlanBook
from orchestrrl.fleet.redeployment.book import RedeploymentOutcome
from orchestrrl.fleet.state import GenerationStep
from planner.calibration import STEPS_NEEDED, Calibration
from planner.model import Act, ConfigurationId, EngineId, GpuId, Histogram, Hold, Plan, PlanId, PlannedInstance

TP2 = ConfigurationId("tp2")
PLAN = Plan(
    id=PlanId("p1"),
    created_s=1000.0,
    decision="keep",
    verdict=Hold("gain_too_small", "too little"),
    current_configuration=TP2,
    proposed_configuration=TP2,
    proposed_instances=1,
    current_makespan_s=100.0,
    proposed_makespan_s=90.0,
    redeploy_cost_s=5.0,
    migration_cost_s=1.0,
    lower_bound_s=50.0,
    solve_s=0.1,
    alternatives=(),
    inputs_age_s=0.1,
    requests_running=3,
    requests_waiting=1,
    remaining=Histogram(256, (1.0, 3.0)),
    forecast_method="kaplan_meier",
    instances=(PlannedInstance(EngineId("e0"), TP2, (GpuId(0), GpuId(1)), True, 4, 90.0, 1.0, 5.0),),
    forgone=Hold("pinned", "pinned by the operator"),
    notes=("something",),
)
# As written before plans proposed mixed fleets.
OLD_BODY: dict[str, Any] = {
    "id": "old",
    "created_s": 900.0,
    "decision": "reconfigure",
    "verdict": {"code": "advise_only", "detail": "mode is advise"},
    "current_configuration": "tp2",
    "proposed_configuration": "tp4",
    "proposed_instances": 2,
    "current_makespan_s": 430.0,
    "proposed_makespan_s": 400.0,
    "redeploy_cost_s": 2.0,
    "lower_bound_s": 300.0,
    "solve_s": 0.1,
    "alternatives": [
        {
            "configuration": "tp4",
            "instances": 2,
            "makespan_s": 400.0,
            "redeploy_cost_s": 2.0,
            "infeasible_because": "",
        }
    ],
    "inputs_age_s": 0.2,
    "requests_running": 4,
    "requests_waiting": 0,
    "remaining": {"bin_tokens": 512, "counts": [4.0]},
    "forecast_method": "kaplan_meier",
    "actual_makespan_s": None,
    "acted": False,
    "acts": False,
    "inputs_digest": "0123456789abcdef",
}


class Shelf:
    """Successive books over one journal."""

    def __init__(self, path: Path) -> None:
        self.clock = VirtualClock(1000.0)
        self.path = path
        self.journal: Journal | None = None

    def open(self) -> PlanBook:
        self.close()
        self.journal = Journal(self.path, self.clock.now_s())
        book = PlanBook(self.journal, self.clock)
        book.recover()
        return book

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()

    def write(self, kind: EntryKind, subject: str, body: dict[str, Any]) -> None:
        assert self.journal is not None
        self.journal.append(1000.0, kind, subject, body)


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(tmp_path / "journal.sqlite")
    yield made
    made.close()


@pytest.mark.parametrize("verdict", [PLAN.verdict, Act("gain", "much sooner")])
def test_plan_is_recovered_completely(shelf: Shelf, verdict: Act | Hold) -> None:
    plan = replace(PLAN, verdict=verdict)
    shelf.open().add(plan, "digest")
    assert shelf.open().latest == plan


def test_result_of_a_plan_is_recovered(shelf: Shelf) -> None:
    book = shelf.open()
    book.add(PLAN, "digest")
    book.acted(PLAN.id, True, "3 of 4 requests moved")
    book.step_ended(GenerationStep(990.0, 1090.0))
    again = shelf.open().get(PLAN.id)
    assert (again.acted, again.acted_detail, again.actual_makespan_s) == (True, "3 of 4 requests moved", 90.0)
    assert again.predicted_s == 96.0  # it was acted on, so the proposal was predicted, including its costs


def test_plan_of_an_earlier_version_is_read_in_part(shelf: Shelf) -> None:
    shelf.open()
    shelf.write(EntryKind.PLAN, "old", OLD_BODY)
    plan = shelf.open().get(PlanId("old"))
    assert (plan.proposed_configuration, plan.current_makespan_s) == ("tp4", 430.0)
    assert plan.verdict == Hold("advise_only", "mode is advise")
    assert plan.instances == ()


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {**OLD_BODY, "verdict": "keep"},
        {**OLD_BODY, "remaining": {"bin_tokens": 0, "counts": []}},
        {key: value for key, value in OLD_BODY.items() if key != "solve_s"},
        {**OLD_BODY, "alternatives": [{"name": "tp4"}]},
    ],
)
def test_unreadable_plan_is_skipped_and_logged(
    shelf: Shelf, broken: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    book = shelf.open()
    shelf.write(EntryKind.PLAN, "broken", broken)
    shelf.write(EntryKind.PLAN_ACTUAL, "broken", {"actual_makespan_s": 3.0})
    book.add(PLAN, "digest")
    assert [plan.id for plan in shelf.open().newest(0)] == ["p1"]
    assert "plan broken is skipped: written by another version" in caplog.text


def test_plan_from_before_acts_were_journalled_counts_as_held(shelf: Shelf) -> None:
    shelf.open()
    shelf.write(EntryKind.PLAN, "old", {key: value for key, value in OLD_BODY.items() if key != "acts"})
    assert isinstance(shelf.open().get(PlanId("old")).verdict, Hold)


def test_results_calibrate_and_survive_a_restart(shelf: Shelf) -> None:
    book = shelf.open()
    for number in range(STEPS_NEEDED):
        assert book.calibration.correction == 1.0
        began_s = 1000.0 + 100 * number
        book.add(replace(PLAN, id=PlanId(f"p{number}"), created_s=began_s), "digest")
        book.step_ended(GenerationStep(began_s - 1.0, began_s + 80.0))
    assert book.calibration.bias == pytest.approx(0.25)
    assert book.calibration.correction == pytest.approx(0.8)
    assert shelf.open().calibration == book.calibration


def test_plans_before_the_last_acted_one_are_not_calibrated(shelf: Shelf) -> None:
    """Their predictions no longer applied."""
    book = shelf.open()
    book.add(PLAN, "digest")
    book.add(replace(PLAN, id=PlanId("p2"), created_s=1010.0), "digest")
    book.acted(PlanId("p2"), True, "")
    book.step_ended(GenerationStep(990.0, 1106.0))
    assert book.calibration == Calibration(1, 0.0, 0.0)  # p2 predicted 96 s, and took that


def test_corrected_prediction_is_calibrated_uncorrected(shelf: Shelf) -> None:
    """Otherwise a working correction would look unnecessary."""
    book = shelf.open()
    book.add(replace(PLAN, current_makespan_s=80.0, correction=0.8), "digest")
    book.step_ended(GenerationStep(990.0, 1080.0))
    assert book.calibration.bias == pytest.approx(0.25)


def test_last_change_of_the_deployment_is_recovered(shelf: Shelf) -> None:
    book = shelf.open()
    assert book.last_redeploy_s is None
    book.add(PLAN, "digest")
    book.deployment_ended(PLAN.id, RedeploymentOutcome(True, "2 started", 1005.0))
    assert book.last_redeploy_s == shelf.open().last_redeploy_s == 1005.0


def test_journal_entries_are_plain_json(shelf: Shelf) -> None:
    shelf.open().add(PLAN, "digest")
    assert shelf.journal is not None
    entry = shelf.journal.latest(EntryKind.PLAN)
    assert entry is not None
    assert json.loads(json.dumps(entry.body))["instances"][0]["gpus"] == [0, 1]
