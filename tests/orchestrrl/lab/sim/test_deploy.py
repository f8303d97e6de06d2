"""Tests of redeployments in virtual time: requests wait in the gateway and continue, also after failures."""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.core.journal.store import EntryKind, JournalReader
from orchestrrl.core.operation import OperationState, StepState
from orchestrrl.fleet.deployers.base import DeployedInstance
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.redeployment.steps import (
    StepKind,
)
from orchestrrl.lab.sim.engines import homogeneous
from orchestrrl.lab.sim.run import ControlledRun, steps_of
from orchestrrl.lab.sim.world import World
from planner.model import Act, ConfigurationId, EngineId, GpuId, Plan, PlannedInstance
from tests.orchestrrl.lab.sim.gen_scenarios import kinds, scenario

NARROW, WIDE = ConfigurationId("narrow"), ConfigurationId("wide")


def fresh_world(journal_path: Path) -> World:
    of = scenario()
    config = ControlledRun(of, kinds(of), NARROW, "balancing", 1, []).config()
    world = World(config, kinds(of), of, journal_path)
    world.deploy(NARROW, homogeneous(kinds(of)[NARROW], 8, 4))
    world.control_plane.plans.pin("only the test plans", 0.0)
    return world


def to_wide(world: World) -> Plan:
    """Return a plan with two wide engines instead of eight narrow ones."""
    latest = world.control_plane.plans.latest
    assert latest is not None
    instances = tuple(
        PlannedInstance(
            id=EngineId(f"w{node}"),
            configuration=WIDE,
            gpus=tuple(GpuId(gpu) for gpu in range(4 * node, 4 * node + 4)),
            kept=False,
            requests_count=16,
            decode_s=10.0,
            migration_s=0.0,
            switch_s=2.0,
        )
        for node in range(2)
    )
    return replace(
        latest, decision="reconfigure", verdict=Act("gain", "planned by the test"), instances=instances, moves=()
    )


async def changed(world: World, at_s: float = 6.0) -> str:
    """Run a step and change the fleet during it. Return the outcome of the redeployment as text."""
    requests = steps_of(scenario(), 1)[0]
    outcome_text: list[str] = []

    async def change() -> None:
        await world.clock.sleep(at_s)
        outcome = await world.deployment.carry_out(to_wide(world))
        outcome_text.append(f"{outcome.done}: {outcome.detail}")

    async with world:
        task = asyncio.create_task(change())
        step = await world.run_step(requests)
        await task
        assert len(step.finish_s) == len(requests)
        assert step.output_tokens == sum(request.output_tokens for request in requests)
    return outcome_text[0]


async def test_all_engines_are_replaced_during_a_step(tmp_path: Path) -> None:
    world = fresh_world(tmp_path / "journal.sqlite")
    outcome_text = await changed(world)
    assert outcome_text.startswith("True: 8 engines stopped, 2 started")
    assert sorted(world.engines) == ["w0", "w1"]
    report = world.deployment.report()
    assert report.state is OperationState.DONE
    assert [step.state for step in report.steps] == [StepState.DONE] * len(report.steps)
    assert report.requests_parked > 0
    assert report.closed_s == pytest.approx(2.0, abs=0.5)  # slightly more than the start time of the wide ones
    assert [engine.started_s for engine in world.engines.values()] == [pytest.approx(2.0 + 6.0 + 2.0, abs=0.3)] * 2
    assert sorted(engine.id for engine in world.control_plane.fleet.state.engines(world.clock.now_s())) == ["w0", "w1"]
    assert world.gateway.tokens_recomputed > 0
    assert not world.control_plane.fleet.routes.draining
    assert not world.control_plane.fleet.routes.expected


async def test_start_times_of_engines_are_journaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start time counts from when the engines on the same GPUs began to stop."""
    world = fresh_world(tmp_path / "journal.sqlite")
    stop = world.deployment._deployer.stop

    async def slow(engine: EngineId) -> None:
        await world.clock.sleep(5.0)
        await stop(engine)

    monkeypatch.setattr(world.deployment._deployer, "stop", slow)
    await changed(world)
    with closing(JournalReader(tmp_path / "journal.sqlite")) as reader:
        started = reader.tail(9, (EntryKind.ENGINE_STARTED,))
    assert [(entry.subject, entry.body["configuration"]) for entry in started] == [("w0", "wide"), ("w1", "wide")]
    assert [entry.body["elapsed_s"] for entry in started] == [pytest.approx(5.0 + 2.0, abs=0.3)] * 2
    assert [entry.body["expected_s"] for entry in started] == [2.0] * 2


async def test_failed_engine_start_rolls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = fresh_world(tmp_path / "journal.sqlite")
    start = world.deployment._deployer.start

    async def broken(spec: EngineSpec) -> DeployedInstance:
        if spec.engine == "w0":
            raise Permanent("no such image")
        return await start(spec)

    monkeypatch.setattr(world.deployment._deployer, "start", broken)
    outcome_text = await changed(world)
    assert outcome_text.startswith("False: rolled back: start of w0: no such image")
    assert sorted(world.engines) == [f"e{number}" for number in range(8)]
    report = world.deployment.report()
    assert report.state is OperationState.ROLLED_BACK
    assert report.engines == tuple(sorted(world.engines))
    skipped = [step.step.kind for step in report.steps if step.state is StepState.SKIPPED]
    assert StepKind.ADMIT in skipped


async def test_retryable_deployer_error_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = fresh_world(tmp_path / "journal.sqlite")
    start, asked = world.deployment._deployer.start, []

    async def busy(spec: EngineSpec) -> DeployedInstance:
        asked.append(spec.engine)
        if asked.count(spec.engine) == 1:
            raise Retryable("the queue is full", 1.0)
        return await start(spec)

    monkeypatch.setattr(world.deployment._deployer, "start", busy)
    assert (await changed(world)).startswith("True")
    assert sorted(asked) == ["w0", "w0", "w1", "w1"]


async def test_failed_engine_stop_rolls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = fresh_world(tmp_path / "journal.sqlite")
    stop = world.deployment._deployer.stop

    async def stuck(engine: EngineId) -> None:
        if engine == "e0":
            raise Permanent("its process does not end")
        await stop(engine)

    monkeypatch.setattr(world.deployment._deployer, "stop", stuck)
    outcome_text = await changed(world)
    assert outcome_text.startswith("False: rolled back: stop of e0: its process does not end; stop of e0:")
    assert sorted(world.engines) == [f"e{number}" for number in range(8)]


async def test_failed_rollback_is_reported_and_other_engines_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = fresh_world(tmp_path / "journal.sqlite")
    start = world.deployment._deployer.start

    async def broken(spec: EngineSpec) -> DeployedInstance:
        if spec.engine in ("w0", "e3"):
            raise Permanent("its node is gone")
        return await start(spec)

    monkeypatch.setattr(world.deployment._deployer, "start", broken)
    outcome_text = await changed(world)
    assert outcome_text.startswith("False: degraded: start of w0: its node is gone; start of e3: its node is gone")
    assert sorted(world.engines) == [f"e{number}" for number in range(8) if number != 3]


async def test_second_redeployment_is_rejected(tmp_path: Path) -> None:
    world = fresh_world(tmp_path / "journal.sqlite")
    async with world:
        first = asyncio.create_task(world.deployment.carry_out(to_wide(world)))
        await world.advance(1.0)
        assert world.deployment.redeploying()
        with pytest.raises(Permanent, match="in progress"):
            await world.deployment.carry_out(to_wide(world))
        await world.advance(10.0)
        assert (await first).done
        again = await world.deployment.carry_out(to_wide(world))  # the fleet already matches the plan
        assert again.detail.startswith("0 engines stopped, 0 started")
