"""Whose answers a new engine's are compared with, where engines are so full that one more question would wait."""

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
    """Two narrow engines, all of whose seats are taken: a further question waits until there are fewer requests."""
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
    return [told.step.kind for told in report.steps if told.state is StepState.FAILED]


async def test_the_first_that_is_emptied_is_asked_and_nobody_waits_for_a_seat(harness: Harness) -> None:
    harness.machines.made = wide_ones_answer_otherwise
    async with harness.daemon() as redeployer:
        began_s = harness.clock.now_s()
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
    assert (report.state, failed_at(report)) == (OperationState.ROLLED_BACK, [StepKind.VERIFY])
    assert "answers otherwise than the engines before" in report.detail
    fence = next(told for told in report.steps if told.step.kind is StepKind.FENCE)
    assert fence.began_s is not None
    assert fence.began_s - began_s < 1.0


async def test_with_a_right_answer_it_is_done(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
    assert report.state is OperationState.DONE
    (verified,) = [told for told in report.steps if told.step.kind is StepKind.VERIFY]
    assert "no other to compare" not in verified.detail
    assert harness.asked == ["a", *[f"{report.id}.0"] * 2]  # type: ignore[attr-defined]  # one of those before; the new


async def test_a_later_daemon_still_knows_the_answer(harness: Harness) -> None:
    """It goes back, and compares the engines that it starts anew."""
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        while not any(entry.body["kind"] == StepKind.READY for entry in harness.entries(EntryKind.REDEPLOYMENT_STEP)):
            await harness.clock.advance(0.05)
    harness.machines.made = answers_otherwise
    async with harness.daemon():
        report = await harness.until_ended()
    assert report.state is OperationState.DEGRADED
    assert "answers otherwise than the engines before" in report.detail


async def test_where_no_engine_leaves_a_seat_is_waited_for(harness: Harness) -> None:
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


async def test_but_not_for_ever(harness: Harness) -> None:
    async with harness.daemon() as redeployer:
        redeployer.begin(MORE_TP1)
        report = await harness.until_ended()
    assert report.state is OperationState.DONE
    (verified,) = [told for told in report.steps if told.step.kind is StepKind.VERIFY]
    assert "no other to compare" in verified.detail


async def test_it_can_be_called_off_meanwhile(harness: Harness) -> None:
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
