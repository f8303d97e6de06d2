"""Whose answers a new engine's are compared with, where engines are so full that one more question would wait."""

from pathlib import Path
from typing import Any

import pytest
from redeployment_house import Client, FakeEngine, House

from orchestrrl.core.journal.store import EntryKind
from orchestrrl.engines.managed import AnswerExcerpt
from orchestrrl.fleet.redeployment.steps import (
    RedeploymentReport,
    RedeploymentState,
    RedeployRequest,
    RedeployStepState,
    StepKind,
)
from planner.model import RequestId

SEATS = 16
TO_TP2 = RedeployRequest((("tp2", 1),))
MORE_TP1 = RedeployRequest((("tp1", 3),))


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """Two narrow engines, all of whose seats are taken: a further question waits until there are fewer requests."""
    house = House(tmp_path)
    house.place("a", "tp1", 0)
    house.place("b", "tp1", 1)
    for number in range(2 * SEATS):
        house.gateway.put(f"r{number}", "ab"[number % 2])
    house.asked = []  # type: ignore[attr-defined]
    answer = Client.excerpt

    async def with_a_seat(self: Client, *asked: Any) -> AnswerExcerpt:
        house.asked.append(str(self._id))  # type: ignore[attr-defined]
        while len(house.gateway.on(self._id)) >= SEATS:
            await house.clock.sleep(0.1)
        await house.clock.sleep(0.05)
        return await answer(self, *asked)

    monkeypatch.setattr(Client, "excerpt", with_a_seat)
    return house


def answers_otherwise(engine: FakeEngine) -> None:
    engine.logprob -= 3.0


def wide_ones_answer_otherwise(engine: FakeEngine) -> None:
    if engine.spec.configuration == "tp2":
        answers_otherwise(engine)


def failed_at(report: RedeploymentReport) -> list[StepKind]:
    return [told.step.kind for told in report.steps if told.state is RedeployStepState.FAILED]


async def test_the_first_that_is_emptied_is_asked_and_nobody_waits_for_a_seat(house: House) -> None:
    house.machines.made = wide_ones_answer_otherwise
    async with house.daemon() as redeployer:
        began_s = house.clock.now_s()
        redeployer.begin(TO_TP2)
        report = await house.until_ended()
    assert (report.state, failed_at(report)) == (RedeploymentState.ROLLED_BACK, [StepKind.VERIFY])
    assert "answers otherwise than the engines before" in report.detail
    fence = next(told for told in report.steps if told.step.kind is StepKind.FENCE)
    assert fence.began_s is not None
    assert fence.began_s - began_s < 1.0


async def test_with_a_right_answer_it_is_done(house: House) -> None:
    async with house.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await house.until_ended()
    assert report.state is RedeploymentState.DONE
    (verified,) = [told for told in report.steps if told.step.kind is StepKind.VERIFY]
    assert "no other to compare" not in verified.detail
    assert house.asked == ["a", *[f"{report.id}.0"] * 2]  # type: ignore[attr-defined]  # one of those before; the new


async def test_a_later_daemon_still_knows_the_answer(house: House) -> None:
    """It goes back, and compares the engines that it starts anew."""
    async with house.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        while not any(entry.body["kind"] == StepKind.READY for entry in house.entries(EntryKind.REDEPLOYMENT_STEP)):
            await house.clock.advance(0.05)
    house.machines.made = answers_otherwise
    async with house.daemon():
        report = await house.until_ended()
    assert report.state is RedeploymentState.DEGRADED
    assert "answers otherwise than the engines before" in report.detail


async def test_where_no_engine_leaves_a_seat_is_waited_for(house: House) -> None:
    house.machines.made = answers_otherwise
    async with house.daemon() as redeployer:
        redeployer.begin(MORE_TP1)
        await house.clock.advance(3.0)
        assert redeployer.busy
        assert house.machines.starts.total() == 0
        del house.gateway.requests[RequestId("r0")]
        report = await house.until_ended()
    assert (report.state, failed_at(report)) == (RedeploymentState.ROLLED_BACK, [StepKind.VERIFY])
    assert report.closed_s is None


async def test_but_not_for_ever(house: House) -> None:
    async with house.daemon() as redeployer:
        redeployer.begin(MORE_TP1)
        report = await house.until_ended()
    assert report.state is RedeploymentState.DONE
    (verified,) = [told for told in report.steps if told.step.kind is StepKind.VERIFY]
    assert "no other to compare" in verified.detail


async def test_it_can_be_called_off_meanwhile(house: House) -> None:
    async with house.daemon() as redeployer:
        id = redeployer.begin(MORE_TP1)
        await house.clock.advance(1.0)
        redeployer.cancel(id, "enough")
        report = await house.until_ended()
    assert report.state is RedeploymentState.ROLLED_BACK
    assert "enough" in report.detail
    assert house.machines.starts.total() == 0
