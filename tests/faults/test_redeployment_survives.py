"""Tests of redeployments on real processes with failures in their middle.

In every case the fleet ends in the old or the new state, no process is left over, no GPU has two engines, and every
request is answered once, with the tokens of the undisturbed run. The daemon's decisions in these cases are tested on
the virtual clock in tests/orchestrrl/fleet/redeployment/test_redeployment_*.py; cases in which no process dies are slow
tests.
"""

import asyncio
import contextlib
import resource
from collections.abc import Iterator

import pytest
from front import until
from redeploying_fleet import LENGTHS, NARROW, WIDE, Harness

from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.fleet.deployers.base import EngineLife
from orchestrrl.rpc.pb import control_pb2


@pytest.fixture(scope="module")
def whole_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    harness = Harness(tmp_path_factory.mktemp("redeploying"))
    try:
        asyncio.run(harness.open())
        yield harness
    finally:
        asyncio.run(harness.close())


@pytest.fixture
async def harness(whole_harness: Harness) -> Harness:
    """Provide a narrow fleet at rest."""
    whole_harness.unmark()
    await whole_harness.become(NARROW)
    return whole_harness


async def check_whole(harness: Harness, report: control_pb2.RedeploymentReport, *states: str) -> None:
    """Check that the fleet is the old or the new one, as the redeployment reports, and nothing more."""
    assert report.state in states, (report.state, report.detail)
    side = report.new_engines if report.state == "done" else report.old_engines
    wanted = {engine.engine_id: tuple(engine.gpus) for engine in side}
    deployed = await harness.engines()
    assert {name: engine.gpus for name, engine in deployed.items()} == wanted
    assert {engine.life for engine in deployed.values()} == {EngineLife.ALIVE}
    assert set(report.engine_ids) == wanted.keys()
    found = harness.found()
    assert {name: len(processes) for name, processes in found.items()} == dict.fromkeys(wanted, 1)
    harness.check_gpus()
    await harness.routed(harness.gateway)


# A redeployment from NARROW to WIDE has twelve steps, and an entry before and after each.
ENTRIES = 24
# All of them are tried in virtual time, in tests/orchestrrl/fleet/redeployment/test_redeployment_transaction.py, and
# here by `make test-slow`. These have real-world effects of their own: requests leave, a process gets SIGTERM,
# a process is spawned but not journalled, all engines are verified, all steps are done but not reported.
SPREAD = (4, 8, 12, 20, 24)
LONG = 1500  # tokens: still under way when a second gateway's requests are, too
VERIFIED = 20  # the last entry before which it goes back


@pytest.mark.smoke
async def test_redeployment_without_a_failure(harness: Harness) -> None:
    stays = await harness.named("tp2")
    before = harness.leader(stays)
    async with harness.step(tokens=LONG) as step:
        async with harness.evacuating(WIDE, step) as (id, (there,)):
            assert there
        report = await harness.until_over(id)
        assert report.requests_parked + report.requests_moved >= len(there)
    await check_whole(harness, report, "done")
    assert harness.leader(stays) == before


@pytest.mark.parametrize(
    "entry",
    [pytest.param(entry, marks=() if entry in SPREAD else pytest.mark.slow) for entry in range(1, ENTRIES + 1)],
)
async def test_daemon_killed_before_an_entry(harness: Harness, entry: int) -> None:
    """The effect of a step is complete when the next entry is written."""
    harness.mark(number=entry, before=True)
    async with harness.step():
        id = await harness.begin_and_die(WIDE)
        await harness.daemon.start()
        report = await harness.until_over(id)
    await check_whole(harness, report, "done" if entry > VERIFIED else "rolled_back")


async def test_daemon_killed_again_while_undoing(harness: Harness) -> None:
    harness.mark(kind="ready", state="running", direction="forward")
    async with harness.step():
        id = await harness.begin_and_die(WIDE)
        for kind in ("stop", "start", "verify"):
            harness.mark(kind=kind, state="running", direction="back")
            await harness.daemon.start()
            await harness.daemon.until_ended()
        await harness.daemon.start()
        report = await harness.until_over(id)
    await check_whole(harness, report, "rolled_back")


async def test_daemon_terminated_by_sigterm(harness: Harness) -> None:
    async with harness.step():
        id = await harness.begin(WIDE)
        await harness.until_at(id, "ready")
        assert await harness.daemon.stop() == 0
        await harness.daemon.start()
        report = await harness.until_over(id)
    await check_whole(harness, report, "rolled_back", "done")


async def test_daemon_and_gateway_killed_at_once(harness: Harness) -> None:
    harness.mark(kind="ready", state="running")
    async with harness.step() as step:
        id = await harness.begin_and_die(WIDE)
        harness.gateway.kill()
        step.gateway_was_killed = True
        await asyncio.gather(harness.daemon.start(), harness.gateway.start())
        report = await harness.until_over(id)
    await check_whole(harness, report, "rolled_back")


async def test_daemon_and_new_engine_killed_at_once(harness: Harness) -> None:
    """All engines had been verified, but one of them is gone."""
    harness.mark(kind="verify", state="done")
    async with harness.step():
        id = await harness.begin_and_die(WIDE)
        await harness.kill(await new_engine(harness, id))
        await harness.daemon.start()
        report = await harness.until_over(id)
    await check_whole(harness, report, "rolled_back")


@pytest.mark.parametrize("kind", ["ready", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("stop", "admit"))])
async def test_gateway_killed(harness: Harness, kind: str) -> None:
    async with harness.step() as step:
        async with harness.standing_still(WIDE, kind, "running") as id:
            harness.gateway.kill()
            step.gateway_was_killed = True
        await harness.gateway.start()
        report = await harness.until_over(id)
    await check_whole(harness, report, "done")


@pytest.mark.parametrize(
    "kind", ["verify", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("start", "warm_up"))]
)
async def test_new_engine_killed_before_it_serves(harness: Harness, kind: str) -> None:
    async with harness.step():
        async with harness.standing_still(WIDE, kind, "done") as id:
            await harness.kill(await new_engine(harness, id))
        report = await harness.until_over(id)
    assert f"{id}.0" in report.detail
    await check_whole(harness, report, "rolled_back")


async def test_new_engine_killed_after_admission(harness: Harness) -> None:
    stays = await harness.named("tp2")
    async with harness.step():
        async with harness.standing_still(WIDE, "commit", "done") as id:
            await harness.kill(await new_engine(harness, id))
        report = await harness.until_over(id)
    assert report.state == "done"

    async def cleared() -> bool:
        return set(await harness.engines()) == set(harness.found()) == {stays}

    await until(cleared, 0.2)
    await harness.routed(harness.gateway)


async def test_old_engine_killed_while_evacuating(harness: Harness) -> None:
    old = await harness.named("tp1")
    async with harness.step():
        async with harness.standing_still(WIDE, "evacuate", "running") as id:
            await harness.kill(old)
        report = await harness.until_over(id)
    await check_whole(harness, report, "done")


async def test_staying_engine_killed(harness: Harness) -> None:
    """It is not part of the redeployment; its requests wait for the new engine."""
    stays = await harness.named("tp2")
    async with harness.step():
        async with harness.standing_still(WIDE, "ready", "running") as id:
            await harness.kill(stays)
        report = await harness.until_over(id)
    assert report.state == "done"

    async def cleared() -> bool:
        return set(await harness.engines()) == set(harness.found()) == {f"{id}.0"}

    await until(cleared, 0.2)
    await harness.routed(harness.gateway)


@pytest.mark.parametrize(
    ("fault", "reports"),
    [
        ("fails", "ready of {new}: engine {new} ended while it started"),
        pytest.param("wrong", "verify of {new}", marks=pytest.mark.slow),
        pytest.param("lies", "verify of {new}: has another layout", marks=pytest.mark.slow),
        pytest.param("hangs", "ready of {new}: timed out after", marks=pytest.mark.slow),
    ],
)
async def test_new_engine_with_wrong_properties(harness: Harness, fault: str, reports: str) -> None:
    async with harness.step():
        id = await harness.begin((("tp2", 1), (fault, 1)))
        report = await harness.until_over(id)
    assert reports.format(new=f"{id}.0") in report.detail
    await check_whole(harness, report, "rolled_back")


@pytest.mark.slow
async def test_old_engines_that_do_not_return_leave_the_others_serving(harness: Harness) -> None:
    await harness.become((("own-file", 2), ("tp2", 1)))
    stays = await harness.named("tp2")
    harness.lengths.unlink()
    try:
        async with harness.step():
            report = await harness.until_over(await harness.begin((("tp2", 1), ("fails", 1))))
    finally:
        harness.lengths.write_text(LENGTHS)
    assert report.state == "degraded"
    assert set(report.engine_ids) == set(await harness.engines()) == set(harness.found()) == {stays}
    for engine in leaving(report):
        assert f"of {engine}: " in report.detail
    await harness.routed(harness.gateway)


@pytest.mark.parametrize(
    "kind", ["ready", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("evacuate", "stop", "start", "admit"))]
)
async def test_operator_cancels_the_redeployment(harness: Harness, kind: str) -> None:
    """The cancellation is sent while the daemon is stopped before that step; the step may complete before the daemon
    receives it."""
    async with harness.step():
        async with harness.standing_still(WIDE, kind, "running") as id:
            order = control_pb2.CancelRedeploymentRequest(redeployment_id=id, reason="requested by the test")
            calling = asyncio.create_task(harness.ask("CancelRedeployment", order))
            await asyncio.sleep(0.3)
        refused = (await asyncio.gather(calling, return_exceptions=True))[0]
        report = await harness.until_over(id)
    if kind == "admit":
        assert isinstance(refused, Permanent), refused
        await check_whole(harness, report, "done")
    else:
        assert report.detail == "called off: requested by the test"
        await check_whole(harness, report, "rolled_back")


@pytest.mark.slow
async def test_hung_engine_is_cancelled(harness: Harness) -> None:
    async with harness.step():
        id = await harness.begin((("tp2", 1), ("hangs", 1)))
        await harness.until_at(id, "ready")
        await asyncio.sleep(1.0)
        await harness.ask("CancelRedeployment", control_pb2.CancelRedeploymentRequest(redeployment_id=id))
        report = await harness.until_over(id)
    await check_whole(harness, report, "rolled_back")


async def test_clients_leave_while_their_requests_are_kept(harness: Harness) -> None:
    async with harness.step(tokens=LONG) as step:
        async with harness.evacuating(WIDE, step) as (id, (there,)):
            assert there
            harness.mark(stop=True, kind="ready", state="running")
        await harness.daemon.until_still()
        try:
            kept = [item["id"] for item in (await step.shown())["in_flight"] if item["engine"] is None]
            assert set(kept) <= there
            assert kept
            await step.leave(*kept[: len(kept) // 2 + 1])
        finally:
            harness.daemon.go_on()
        report = await harness.until_over(id)
    await check_whole(harness, report, "done")


async def test_redeployment_with_two_gateways(harness: Harness) -> None:
    other = harness.make_gateway("other")
    await other.start()
    try:
        await harness.routed(other)
        # Those of the first are still there when the second's are, and the daemon has begun, even on a slow machine.
        async with harness.step(tokens=3 * LONG) as one, harness.step(gateway=other, tokens=3 * LONG) as another:
            async with harness.evacuating(WIDE, one, another) as (id, there):
                assert all(there)
            report = await harness.until_over(id)
            assert report.requests_parked + report.requests_moved >= sum(map(len, there))
        await check_whole(harness, report, "done")
    finally:
        await other.stop()


async def test_trainer_that_closes_the_barrier_waits_for_the_redeployment(harness: Harness) -> None:
    async with harness.step():
        async with harness.standing_still(WIDE, "ready", "running") as id:
            closing = asyncio.create_task(harness.ask("PauseFleet", control_pb2.PauseFleetRequest(holder="trainer")))
        barrier = await closing
        assert barrier.phase == "quiet"
        report = await harness.report(id)
        assert report.state == "done"
        with pytest.raises(Permanent, match="the pause barrier is closed"):
            await harness.begin(NARROW)
        await harness.ask("ResumeFleet", control_pb2.ResumeFleetRequest(lease_id=barrier.lease_id))
    await check_whole(harness, report, "done")


async def test_daemon_killed_with_a_trainer_at_the_barrier(harness: Harness) -> None:
    async with harness.step():
        async with harness.standing_still(WIDE, "ready", "running") as id:
            closing = asyncio.create_task(harness.ask("PauseFleet", control_pb2.PauseFleetRequest(holder="trainer")))
            await asyncio.sleep(0.3)
            harness.mark(kind="warm_up", state="running")
        await harness.daemon.until_ended()
        await asyncio.gather(closing, return_exceptions=True)
        await harness.daemon.start()
        with contextlib.suppress(Permanent):
            await harness.ask("ResumeFleet", control_pb2.ResumeFleetRequest())
        report = await harness.until_over(id)
    await check_whole(harness, report, "rolled_back")


@pytest.mark.slow
async def test_operator_drains_a_staying_engine(harness: Harness) -> None:
    stays = await harness.named("tp2")
    async with harness.step():
        async with harness.standing_still(WIDE, "ready", "running") as id:
            order = control_pb2.DrainEngineRequest(engine_id=stays, move_requests=True)
            draining = asyncio.create_task(harness.ask("DrainEngine", order))
        await draining
        report = await harness.until_over(id)
        with pytest.raises(ProblemFaults, match="must fit on the"):
            await harness.begin((("tp1", 4),))  # the operator's drain stays
    await harness.ask("DrainEngine", control_pb2.DrainEngineRequest(engine_id=stays, undo=True))
    await check_whole(harness, report, "done")


async def test_full_journal_disk(harness: Harness) -> None:
    async with harness.step():
        async with harness.standing_still(WIDE, "ready", "running") as id:
            _, most = resource.prlimit(harness.daemon.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(harness.daemon.process.pid, resource.RLIMIT_FSIZE, (65_536, most))
        report = await harness.until_over(id)
    await check_whole(harness, report, "rolled_back")
    assert "cannot be journalled" in report.detail
    # There is room again; the next daemon has recovered everything.
    await harness.daemon.stop()
    await harness.daemon.start()
    await check_whole(harness, await harness.until_over(id), "rolled_back")


async def new_engine(harness: Harness, redeployment: str) -> str:
    (name,) = [name for name in await harness.engines() if name.startswith(f"{redeployment}.")]
    return name


def leaving(report: control_pb2.RedeploymentReport) -> set[str]:
    wanted = {engine.engine_id for engine in report.new_engines}
    return {engine.engine_id for engine in report.old_engines} - wanted
