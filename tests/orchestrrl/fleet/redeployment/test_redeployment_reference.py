"""Tests of the reference answers for new engines when all engines are full, so that another request would wait."""

from pathlib import Path
from typing import Any

import pytest
from redeployment_harness import Client, FakeEngine, Harness

from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.core.operation import OperationState, StepState
from orchestrrl.engines.base import AnswerExcerpt
from orchestrrl.fleet.redeployment.steps import (
    RedeploymentReport,
    RedeployRequest,
    StepKind,
)
from planner.model import RequestId

SEATS = 16
TO_TP2 = RedeployRequest((("tp2", 1),))
MORE_TP1 = RedeployRequest((("tp1", 3),))


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """Provide two narrow engines without a free seat: another request waits until there are fewer."""
    harness = Harness(tmp_path)
    harness.place("a", "tp1", 0)
    harness.place("b", "tp1", 1)
    for number in range(2 * SEATS):
        harness.gateway.put(f"r{number}", "ab"[number % 2])
    harness.asked = []  # type: ignore[attr-defined]
    answer = Client.excerpt

    async def with_a_seat(self: Client, *asked: Any) -> AnswerExcerpt:
        harness.asked.append(str(self._id))  # type: ignore[attr-defined]
        while len(harness.gateway.on(self._id)) >= SEATS:
            await harness.clock.sleep(0.1)
        await harness.clock.sleep(0.05)
        return await answer(self, *asked)

    monkeypatch.setattr(Client, "excerpt", with_a_seat)
    return harness


def answers_otherwise(engine: FakeEngine) -> None:
    engine.logprob -= 3.0


def wide_ones_answer_otherwise(engine: FakeEngine) -> None:
    if engine.spec.configuration == "tp2":
        answers_otherwise(engine)


def failed_at(report: RedeploymentReport) -> list[StepKind]:
    return [reported.step.kind for reported in report.steps if reported.state is StepState.FAILED]


async def test_first_evacuated_engine_gives_the_reference_without_waiting(harness: Harness) -> None:
    harness.machines.made = wide_ones_answer_otherwise
    async with harness.daemon() as redeployer:
        began_s = harness.clock.now_s()
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
    assert (report.state, failed_at(report)) == (OperationState.ROLLED_BACK, [StepKind.VERIFY])
    assert "differs from the previous engines' answers" in report.detail
    fence = next(reported for reported in report.steps if reported.step.kind is StepKind.FENCE)
    assert fence.began_s is not None
    assert fence.began_s - began_s < 1.0


async def test_correct_answer_completes_the_redeployment(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
    assert report.state is OperationState.DONE
    (verified,) = [reported for reported in report.steps if reported.step.kind is StepKind.VERIFY]
    assert "no reference answers to compare" not in verified.detail
    assert harness.asked == ["a", *[f"{report.id}.0"] * 2]  # type: ignore[attr-defined]  # one of those before; the new


async def test_later_daemon_has_the_reference_answer(harness: Harness) -> None:
    """It undoes the redeployment and checks the engines that it restarts."""
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        while not any(entry.body["kind"] == StepKind.READY for entry in harness.entries(EntryKind.REDEPLOYMENT_STEP)):
            await harness.clock.advance(0.05)
    harness.machines.made = answers_otherwise
    async with harness.daemon():
        report = await harness.until_ended()
    assert report.state is OperationState.DEGRADED
    assert "differs from the previous engines' answers" in report.detail


async def test_reference_waits_for_a_seat_if_no_engine_leaves(harness: Harness) -> None:
    harness.machines.made = answers_otherwise
    async with harness.daemon() as redeployer:
        redeployer.begin(MORE_TP1)
        await harness.clock.advance(3.0)
        assert redeployer.redeploying()
        assert harness.machines.starts.total() == 0
        del harness.gateway.requests[RequestId("r0")]
        report = await harness.until_ended()
    assert (report.state, failed_at(report)) == (OperationState.ROLLED_BACK, [StepKind.VERIFY])
    assert report.closed_s is None


async def test_wait_for_a_seat_is_limited(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        redeployer.begin(MORE_TP1)
        report = await harness.until_ended()
    assert report.state is OperationState.DONE
    (verified,) = [reported for reported in report.steps if reported.step.kind is StepKind.VERIFY]
    assert "no reference answers to compare" in verified.detail


async def test_redeployment_can_be_cancelled_while_it_waits_for_a_seat(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        id = redeployer.begin(MORE_TP1)
        await harness.clock.advance(1.0)
        redeployer.cancel(id, "enough")
        report = await harness.until_ended()
    assert report.state is OperationState.ROLLED_BACK
    assert "enough" in report.detail
    assert harness.machines.starts.total() == 0


async def test_next_stopped_engine_is_asked_after_the_first_fails(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_a_seat = Client.excerpt

    async def fails_on_a(self: Client, *asked: Any) -> AnswerExcerpt:
        if self._id == "a":
            raise Permanent("out of memory")
        return await with_a_seat(self, *asked)

    monkeypatch.setattr(Client, "excerpt", fails_on_a)
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
    assert report.state is OperationState.DONE
    assert "b" in harness.asked  # type: ignore[attr-defined]
