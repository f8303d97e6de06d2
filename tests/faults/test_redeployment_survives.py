"""Redeployments on real processes, and what goes wrong in their middle.

Whatever it is, the fleet ends as it was or as it was wanted, no process is left over, no GPU has two, and every request
is answered once, with the tokens of the undisturbed run. What the daemon decides in all these cases is tested on the
virtual clock in tests/orchestrrl/fleet/redeployment/test_redeployment_*.py; where no process dies, these are slow
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
    """Narrow, and at rest."""
    whole_harness.unmark()
    await whole_harness.become(NARROW)
    return whole_harness


async def check_whole(harness: Harness, report: control_pb2.RedeploymentReport, *states: str) -> None:
    """The fleet is the one before or the one after, by the redeployment's own word, and that is all there is."""
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
# here by `make test-slow`. These are the ones with a world of their own: requests leave, a process is told to end, one
# is spawned and not yet written down, all is verified, all is done and nobody has been told.
SPREAD = (4, 8, 12, 20, 24)
LONG = 1500  # tokens: still under way when a second gateway's requests are, too
VERIFIED = 20  # the last entry before which it goes back


@pytest.mark.smoke
async def test_nothing_goes_wrong(harness: Harness) -> None:
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
async def test_the_daemon_is_killed_before_it_writes(harness: Harness, entry: int) -> None:
    """What a step does has been done where it is the entry after it."""
    harness.mark(number=entry, before=True)
    async with harness.step():
        id = await harness.begin_and_die(WIDE)
        await harness.daemon.start()
        report = await harness.until_over(id)
    await check_whole(harness, report, "done" if entry > VERIFIED else "rolled_back")


async def test_the_daemon_is_killed_again_on_the_way_back(harness: Harness) -> None:
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


async def test_the_daemon_is_told_to_end(harness: Harness) -> None:
    async with harness.step():
        id = await harness.begin(WIDE)
        await harness.until_at(id, "ready")
        assert await harness.daemon.stop() == 0
        await harness.daemon.start()
        report = await harness.until_over(id)
    await check_whole(harness, report, "rolled_back", "done")


async def test_daemon_and_gateway_are_killed_at_once(harness: Harness) -> None:
    harness.mark(kind="ready", state="running")
    async with harness.step() as step:
        id = await harness.begin_and_die(WIDE)
        harness.gateway.kill()
        step.gateway_was_killed = True
        await asyncio.gather(harness.daemon.start(), harness.gateway.start())
        report = await harness.until_over(id)
    await check_whole(harness, report, "rolled_back")


async def test_daemon_and_new_engine_are_killed_at_once(harness: Harness) -> None:
    """All had been verified, and one of it is not there any more."""
    harness.mark(kind="verify", state="done")
    async with harness.step():
        id = await harness.begin_and_die(WIDE)
        await harness.kill(await new_engine(harness, id))
        await harness.daemon.start()
        report = await harness.until_over(id)
    await check_whole(harness, report, "rolled_back")


@pytest.mark.parametrize("kind", ["ready", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("stop", "admit"))])
async def test_the_gateway_is_killed(harness: Harness, kind: str) -> None:
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
async def test_the_new_engine_is_killed_before_it_serves(harness: Harness, kind: str) -> None:
    async with harness.step():
        async with harness.standing_still(WIDE, kind, "done") as id:
            await harness.kill(await new_engine(harness, id))
        report = await harness.until_over(id)
    assert f"{id}.0" in report.detail
    await check_whole(harness, report, "rolled_back")


async def test_the_new_engine_is_killed_when_it_is_the_deployment(harness: Harness) -> None:
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


async def test_an_old_engine_is_killed_while_its_requests_leave(harness: Harness) -> None:
    old = await harness.named("tp1")
    async with harness.step():
        async with harness.standing_still(WIDE, "evacuate", "running") as id:
            await harness.kill(old)
        report = await harness.until_over(id)
    await check_whole(harness, report, "done")


async def test_the_engine_that_stays_is_killed(harness: Harness) -> None:
    """It is none of the redeployment's; its requests wait for the one to come."""
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
    ("fault", "says"),
    [
        ("fails", "ready of {new}: {new} ended while it started"),
        pytest.param("wrong", "verify of {new}", marks=pytest.mark.slow),
        pytest.param("lies", "verify of {new}: is laid out otherwise", marks=pytest.mark.slow),
        pytest.param("hangs", "ready of {new}: took longer than", marks=pytest.mark.slow),
    ],
)
async def test_the_new_engine_is_not_as_wanted(harness: Harness, fault: str, says: str) -> None:
    async with harness.step():
        id = await harness.begin((("tp2", 1), (fault, 1)))
        report = await harness.until_over(id)
    assert says.format(new=f"{id}.0") in report.detail
    await check_whole(harness, report, "rolled_back")


@pytest.mark.slow
async def test_where_old_engines_do_not_come_back_the_others_serve(harness: Harness) -> None:
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
async def test_an_operator_calls_it_off(harness: Harness, kind: str) -> None:
    """Told while the daemon stands still before that step; it may be done with it before it hears of it."""
    async with harness.step():
        async with harness.standing_still(WIDE, kind, "running") as id:
            order = control_pb2.CancelRedeploymentRequest(redeployment_id=id, reason="the test says so")
            calling = asyncio.create_task(harness.ask("CancelRedeployment", order))
            await asyncio.sleep(0.3)
        refused = (await asyncio.gather(calling, return_exceptions=True))[0]
        report = await harness.until_over(id)
    if kind == "admit":
        assert isinstance(refused, Permanent), refused
        await check_whole(harness, report, "done")
    else:
        assert report.detail == "called off: the test says so"
        await check_whole(harness, report, "rolled_back")


@pytest.mark.slow
async def test_a_hung_engine_is_called_off(harness: Harness) -> None:
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


async def test_two_gateways(harness: Harness) -> None:
    other = harness.make_gateway("other")
    await other.start()
    try:
        await harness.routed(other)
        # Those of the first are still there when the second's are, and the daemon has begun, on a slow machine, too.
        async with harness.step(tokens=3 * LONG) as one, harness.step(gateway=other, tokens=3 * LONG) as another:
            async with harness.evacuating(WIDE, one, another) as (id, there):
                assert all(there)
            report = await harness.until_over(id)
            assert report.requests_parked + report.requests_moved >= sum(map(len, there))
        await check_whole(harness, report, "done")
    finally:
        await other.stop()


async def test_a_trainer_that_closes_the_barrier_waits_for_the_redeployment(harness: Harness) -> None:
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


async def test_the_daemon_is_killed_with_a_trainer_at_the_barrier(harness: Harness) -> None:
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
async def test_an_operator_drains_an_engine_that_stays(harness: Harness) -> None:
    stays = await harness.named("tp2")
    async with harness.step():
        async with harness.standing_still(WIDE, "ready", "running") as id:
            order = control_pb2.DrainEngineRequest(engine_id=stays, move_requests=True)
            draining = asyncio.create_task(harness.ask("DrainEngine", order))
        await draining
        report = await harness.until_over(id)
        with pytest.raises(ProblemFaults, match="do not fit"):
            await harness.begin((("tp1", 4),))  # it is the operator's
    await harness.ask("DrainEngine", control_pb2.DrainEngineRequest(engine_id=stays, undo=True))
    await check_whole(harness, report, "done")


async def test_the_journals_disk_is_full(harness: Harness) -> None:
    async with harness.step():
        async with harness.standing_still(WIDE, "ready", "running") as id:
            _, most = resource.prlimit(harness.daemon.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(harness.daemon.process.pid, resource.RLIMIT_FSIZE, (65_536, most))
        report = await harness.until_over(id)
    await check_whole(harness, report, "rolled_back")
    assert "cannot be written down" in report.detail
    # There is room again; the next daemon knows no less.
    await harness.daemon.stop()
    await harness.daemon.start()
    await check_whole(harness, await harness.until_over(id), "rolled_back")


async def new_engine(harness: Harness, redeployment: str) -> str:
    (name,) = [name for name in await harness.engines() if name.startswith(f"{redeployment}.")]
    return name


def leaving(report: control_pb2.RedeploymentReport) -> set[str]:
    wanted = {engine.engine_id for engine in report.new_engines}
    return {engine.engine_id for engine in report.old_engines} - wanted
