"""Circuits follow the deployment, and their failures do not stop a redeployment. Virtual time, virtual switches."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from builders import engine_report, sample
from generation_harness import FIRST_GPU, MESH, PAIRS, FabricHarness
from redeployment_harness import CONFIG, Harness

from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.operation import OperationState
from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.fabric.generation_circuits import PERIOD, REPORTED_WITHIN_S
from orchestrrl.fabric.periods import PeriodState
from orchestrrl.fabric.site import site_text
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.redeployment.steps import (
    RedeployRequest,
)
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.model import Mode

TO_TP1 = RedeployRequest((("tp1", 0),), reason="test reason")
TO_TP2 = RedeployRequest((("tp2", 0),), reason="test reason")


@pytest.fixture
def narrow(tmp_path: Path) -> Harness:
    """Deploy four engines of one GPU, with requests."""
    harness = Harness(tmp_path)
    for gpu, name in enumerate("abcd"):
        harness.place(name, "tp1", gpu)
        harness.gateway.put(f"r{gpu}", name)
    return harness


async def during(harness: FabricHarness, work: Awaitable[str], most_s: float = 10.0) -> str:
    """Return the outcome of a redeployment while time passes."""
    task = asyncio.ensure_future(work)
    await harness.clock.advance(most_s)
    assert task.done()
    return await task


async def test_redeployment_changes_demand_and_circuits_before_admission(narrow: Harness) -> None:
    harness = FabricHarness(narrow)
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        assert (await narrow.until_ended()).state is OperationState.DONE
        assert harness.circuits() == PAIRS
        assert harness.let_in_under == [PAIRS, PAIRS]
        assert "circuits committed" in harness.admitted()
        redeployer.begin(TO_TP1)
        assert (await narrow.until_ended()).state is OperationState.DONE
        assert harness.circuits() == MESH
        assert harness.let_in_under[2:] == [MESH] * 4
        assert not narrow.gateway.cut
        assert {str(view.engine)[:2] for view in narrow.gateway.requests.values()} == {"s2"}


async def test_rollback_restores_circuits_of_earlier_engines(narrow: Harness) -> None:
    harness = FabricHarness(narrow)
    narrow.machines.faults["probe", "tp2"] = Permanent("is broken")
    async with harness.daemon() as redeployer:
        assert harness.circuits() == {}
        redeployer.begin(TO_TP2)
        assert (await narrow.until_ended()).state is OperationState.ROLLED_BACK
        assert harness.circuits() == MESH
        assert harness.let_in_under == [MESH] * 4
        assert "circuits committed" in harness.admitted()
        # A second failing redeployment finds them up.
        redeployer.begin(TO_TP2)
        assert (await narrow.until_ended()).state is OperationState.ROLLED_BACK
        assert "circuits committed: 0 cross-connects changed (was_so" in harness.admitted()
        assert harness.circuits() == MESH


def pause(harness: FabricHarness) -> None:
    harness.harness.plane.pause_registry.pause(PauseScope.FABRIC, "measuring")


def advise(harness: FabricHarness) -> None:
    harness.harness.plane.mode.set(Mode.ADVISE, "looking first")


def pin_all(harness: FabricHarness) -> None:
    harness.fabric.overrides.pin([], "measuring", 0.0)


def mask_all(harness: FabricHarness) -> None:
    harness.fabric.overrides.mask([f"server {server.id}" for server in harness.site.servers], "power is off")


def break_all(harness: FabricHarness) -> None:
    """Break the connection at each command, on every attempt."""
    for switch in harness.switches.values():
        for _ in range(50):
            switch.model.inject(DeviceFault(DeviceFaultKind.DROP_COMMAND))


HELD = {
    "paused": (pause, "circuits kept: 0 cross-connects changed (operator_paused: "),
    "advise": (advise, "circuits kept: 0 cross-connects changed (advise: "),
    "pinned": (pin_all, "circuits kept: 0 cross-connects changed (pinned: "),
    "unreachable": (mask_all, "circuits kept: 0 cross-connects changed (nobody_placed: "),
}


@pytest.mark.parametrize("case", sorted(HELD))
async def test_held_fabric_does_not_delay_serving(narrow: Harness, case: str) -> None:
    hold, message = HELD[case]
    harness = FabricHarness(narrow)
    async with harness.daemon() as redeployer:
        hold(harness)
        redeployer.begin(TO_TP2)
        assert (await narrow.until_ended()).state is OperationState.DONE
        assert message in harness.admitted()
        assert harness.circuits() == {}
        assert not narrow.gateway.cut


async def test_operator_circuits_take_precedence(narrow: Harness) -> None:
    """The deployment's circuits follow when the operator releases the fabric."""
    harness = FabricHarness(narrow)
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await narrow.until_ended()
        harness.fabric.override(PERIOD, "as they are", 0.0)
        pinned = [f"{each.switch}:{each.port_a}-{each.port_b}" for each in harness.fabric.site_reading.cross_connects]
        harness.fabric.overrides.pin(pinned, "each of them", 0.0)
        redeployer.begin(TO_TP1)
        assert (await narrow.until_ended()).state is OperationState.DONE
        assert harness.circuits() == PAIRS
        harness.fabric.overrides.release("done")
        harness.fabric.announce(PERIOD, boundary=True)
        await harness.clock.advance(5.0)
        assert harness.circuits() == MESH


async def test_slow_circuit_change_does_not_delay_serving(narrow: Harness) -> None:
    harness = FabricHarness(narrow, device_s=100.0, within_s=2.0)
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        report = await narrow.until_ended()
        assert report.state is OperationState.DONE
        assert "circuits are still changing after 2 s" in harness.admitted()
        (elapsed_s,) = (each.elapsed_s for each in report.steps if each.step.kind == "admit")
        assert elapsed_s == pytest.approx(2.0)


async def test_failed_circuit_change_does_not_delay_serving(narrow: Harness) -> None:
    harness = FabricHarness(narrow)
    async with harness.daemon() as redeployer:
        break_all(harness)
        redeployer.begin(TO_TP2)
        assert (await narrow.until_ended()).state is OperationState.DONE
        assert "; circuits failed: 0 cross-connects changed (switch_failed: " in harness.admitted()
        assert len(harness.admitted()) < 300  # the period's report has all details
        assert harness.circuits() == {}


async def test_gpus_outside_the_site_get_no_circuits(narrow: Harness) -> None:
    harness = FabricHarness(narrow, first_gpu=1000)
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        assert (await narrow.until_ended()).state is OperationState.DONE
        assert "circuits kept: 0 cross-connects changed (nobody_placed: " in harness.admitted()


# --- a daemon that finds engines running


@dataclass
class Found:
    """A starting fleet with scripted reports."""

    engines: Sequence[EngineSpec]
    idle_after: Sequence[bool | None] = (True,)  # one per poll; then the last one repeats
    busy: bool = False
    looks: int = field(default=0)

    def serving(self) -> Sequence[EngineSpec]:
        return self.engines

    def redeploying(self) -> bool:
        return self.busy

    def idle(self) -> bool | None:
        self.looks += 1
        return self.idle_after[min(self.looks, len(self.idle_after)) - 1]


def specs(harness: Harness) -> list[EngineSpec]:
    return [engine.spec for engine in harness.machines.engines.values()]


async def test_idle_engines_get_circuits_at_daemon_start(narrow: Harness) -> None:
    harness = FabricHarness(narrow)
    async with harness.daemon():
        found = Found(specs(narrow), (None, None, True))
        begun = await during(harness, harness.gen.begin(found))
        assert begun.startswith("circuits committed")
        assert harness.circuits() == MESH
        assert harness.fabric.period == PERIOD
        # The next daemon finds them.
        assert "was_so" in await during(harness, harness.gen.begin(found))


async def test_busy_engines_keep_circuits_until_idle(narrow: Harness) -> None:
    harness = FabricHarness(narrow)
    async with harness.daemon():
        found = Found(specs(narrow), (False,))
        begun = asyncio.create_task(harness.gen.begin(found))
        await harness.clock.advance(30.0)
        assert not begun.done()
        (kept,) = harness.fabric.reports(5)
        assert (kept.period, kept.state, kept.code) == (PERIOD, PeriodState.KEPT, "no_boundary")
        assert harness.circuits() == {}
        found.idle_after = [False, True] * 20 + [True] * 20  # between requests, then between steps
        found.looks = 0
        await harness.clock.advance(0.5 * 20)
        assert harness.circuits() == {}
        assert (await during(harness, begun)).startswith("circuits committed")
        assert harness.circuits() == MESH


async def test_unreported_engines_do_not_count_as_idle(narrow: Harness) -> None:
    harness = FabricHarness(narrow)
    async with harness.daemon():
        begun = asyncio.create_task(harness.gen.begin(Found(specs(narrow), (None,))))
        await harness.clock.advance(REPORTED_WITHIN_S - 5)
        assert harness.fabric.reports(5) == []
        await harness.clock.advance(100.0)
        assert [report.code for report in harness.fabric.reports(5)] == ["no_boundary"]
        # A caller that has paused its requests can announce the period by name.
        harness.fabric.announce(PERIOD, boundary=True)
        await harness.clock.advance(5.0)
        assert harness.circuits() == MESH
        begun.cancel()


async def test_circuits_lost_during_requests_are_replaced_when_idle(narrow: Harness) -> None:
    harness = FabricHarness(narrow)
    async with harness.daemon():
        found = Found(specs(narrow))
        tending = asyncio.create_task(harness.gen.maintain(found))
        await harness.clock.advance(10.0)
        assert harness.circuits() == MESH
        assert len(harness.fabric.reports(9)) == 1  # no further request
        found.idle_after = (False,)
        lost = next(each.cross_connect for each in harness.agg.model.circuits())
        harness.agg.model.inject(DeviceFault(DeviceFaultKind.FAIL_PORT, lost.ingress_port))
        await harness.clock.advance(30.0)
        assert harness.fabric.reports(1)[0].code == "no_boundary"
        assert lost in {each.cross_connect for each in harness.agg.model.circuits()}
        found.idle_after = (True,)
        await harness.clock.advance(10.0)
        assert harness.fabric.reports(1)[0].state is PeriodState.COMMITTED
        assert lost not in {each.cross_connect for each in harness.agg.model.circuits()}
        before = len(harness.fabric.reports(99))
        await harness.clock.advance(60.0)
        assert len(harness.fabric.reports(99)) == before
        tending.cancel()


SYNC = Intent(
    "sync",
    Stage.WEIGHT_SYNC,
    (Traffic(TrafficOperation.WEIGHT_SYNC, Primitive.BROADCAST, ((0,),), 1e9, receivers=((4, 5, 6, 7),)),),
)


async def test_internal_error_is_counted_and_maintenance_continues(narrow: Harness) -> None:
    harness = FabricHarness(narrow)
    async with harness.daemon():

        class Odd(Found):
            odd = True

            def idle(self) -> bool | None:
                if self.odd:
                    raise KeyError("a fault of ours")
                return super().idle()

        found = Odd(specs(narrow))
        tending = asyncio.create_task(harness.gen.maintain(found))
        await harness.clock.advance(10.0)
        assert not tending.done()
        assert harness.gen.defects == 1
        found.odd = False
        harness.fabric.expect(harness.gen.intent(found.serving()))  # the engines were not all reported idle
        await harness.clock.advance(10.0)
        assert harness.circuits() == MESH
        tending.cancel()


async def test_engines_get_circuits_back_after_weight_sync(narrow: Harness) -> None:
    harness = FabricHarness(narrow)
    async with harness.daemon():
        found = Found(specs(narrow))
        assert await during(harness, harness.gen.after_sync(found)) == ""  # there was no sync
        await during(harness, harness.gen.begin(found))
        assert harness.circuits() == MESH
        assert await during(harness, harness.gen.after_sync(found)) == ""
        harness.fabric.expect(SYNC, boundary=True)
        await harness.clock.advance(5.0)
        assert harness.fabric.period == "sync"
        assert harness.circuits() != MESH
        assert await during(harness, harness.gen.after_sync(Found(specs(narrow), busy=True))) == ""
        assert "no time left" in await during(harness, harness.gen.after_sync(found, harness.clock.now_s()))
        assert harness.circuits() != MESH
        assert (await during(harness, harness.gen.after_sync(found))).startswith("circuits committed")
        assert harness.circuits() == MESH
        assert await during(harness, harness.gen.after_sync(found)) == ""


async def test_idle_engines_do_not_disturb_sync(narrow: Harness) -> None:
    harness = FabricHarness(narrow)
    async with harness.daemon():
        tending = asyncio.create_task(harness.gen.maintain(Found(specs(narrow))))
        await harness.clock.advance(10.0)
        harness.fabric.expect(SYNC, boundary=True)
        await harness.clock.advance(60.0)
        assert harness.fabric.period == "sync"
        tending.cancel()


async def test_redeployment_precedes_found_engines(narrow: Harness) -> None:
    harness = FabricHarness(narrow)
    async with harness.daemon() as redeployer:
        assert await during(harness, harness.gen.begin(Found(specs(narrow), busy=True))) == ""
        assert await during(harness, harness.gen.begin(Found([]))) == ""
        old = Found(specs(narrow), (False,))
        waiting = asyncio.create_task(harness.gen.begin(old))
        await harness.clock.advance(1.0)
        redeployer.begin(TO_TP2)
        await narrow.until_ended()
        old.idle_after = (True,)
        assert "no_boundary" in await during(harness, waiting)
        assert await during(harness, harness.gen.begin(old)) == ""
        assert harness.circuits() == PAIRS


async def test_fleet_is_idle_if_engines_and_gateways_report_it(narrow: Harness) -> None:
    async with narrow.daemon() as found:
        assert [spec.engine for spec in found.serving()] == ["a", "b", "c", "d"]
        assert found.idle() is False  # as the gateway reports
        narrow.gateway.requests.clear()
        await narrow.clock.advance(1.0)
        assert found.idle() is None  # engines have not reported yet
        for number, name in enumerate("abcd"):
            report = sample(narrow.clock.now_s(), running=0, waiting=0)
            narrow.plane.fleet.engine_reported(engine_report(name, sequence=number + 1, sample=report), 1)
        assert found.idle() is True
        busy = sample(narrow.clock.now_s(), running=0, waiting=1)
        narrow.plane.fleet.engine_reported(engine_report("b", sequence=9, sample=busy), 1)
        assert found.idle() is False


# --- the configuration


def faults(folder: Path, **fabric: object) -> list[str]:
    document = yaml.safe_load(CONFIG)
    site = FabricHarness(Harness(folder)).site
    (folder / "site.yaml").write_text(site_text(site))
    document["fabric"] = {"site": "site.yaml", "model": "qwen2.5-14b", "first_fleet_gpu": FIRST_GPU, **fabric}
    document["ocs"] = [{"id": str(switch.id), "driver": "virtual"} for switch in site.switches]
    document["fleet"]["launch"] = {"engine": "simulated", "model": "tiny"}
    document["fleet"]["deployer"] = fabric.pop("deployer", {"product": "local"})
    document["fabric"].pop("deployer", None)
    try:
        parse_config(yaml.safe_dump(document), folder)
    except ProblemFaults as error:
        return error.faults
    return []


def test_configuration_faults_are_reported_at_once(tmp_path: Path) -> None:
    assert faults(tmp_path) == []
    unknown, nowhere, outside = faults(tmp_path, model="gpt-0", first_fleet_gpu=6, deployer=None)
    assert unknown.startswith("fabric.model: ")
    assert unknown.endswith(", got 'gpt-0'")
    assert "must" in unknown or "known" in unknown
    assert nowhere == "fabric.model: requires fleet.deployer, whose redeployments the circuits follow, got 'gpt-0'"
    assert outside == "fabric.first_fleet_gpu: 2 of the fleet's 4 GPUs are not in fabric.site (8 is the first), got 6"
