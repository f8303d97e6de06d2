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
from redeploying_fleet import LENGTHS, NARROW, WIDE, House

from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.fleet.deployers.base import EngineLife
from orchestrrl.rpc.pb import control_pb2


@pytest.fixture(scope="module")
def whole_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("redeploying"))
    try:
        asyncio.run(house.open())
        yield house
    finally:
        asyncio.run(house.close())


@pytest.fixture
async def house(whole_house: House) -> House:
    """Narrow, and at rest."""
    whole_house.unmark()
    await whole_house.become(NARROW)
    return whole_house


async def check_whole(house: House, report: control_pb2.RedeploymentReport, *states: str) -> None:
    """The fleet is the one before or the one after, by the redeployment's own word, and that is all there is."""
    assert report.state in states, (report.state, report.detail)
    side = report.new_engines if report.state == "done" else report.old_engines
    wanted = {engine.engine_id: tuple(engine.gpus) for engine in side}
    deployed = await house.engines()
    assert {name: engine.gpus for name, engine in deployed.items()} == wanted
    assert {engine.life for engine in deployed.values()} == {EngineLife.ALIVE}
    assert set(report.engine_ids) == wanted.keys()
    found = house.found()
    assert {name: len(processes) for name, processes in found.items()} == dict.fromkeys(wanted, 1)
    house.check_gpus()
    await house.routed(house.gateway)


# A redeployment from NARROW to WIDE has twelve steps, and an entry before and after each.
ENTRIES = 24
# All of them are tried in virtual time, in tests/orchestrrl/fleet/redeployment/test_redeployment_transaction.py, and
# here by `make test-slow`. These are the ones with a world of their own: requests leave, a process is told to end, one
# is spawned and not yet written down, all is verified, all is done and nobody has been told.
SPREAD = (4, 8, 12, 20, 24)
LONG = 1500  # tokens: still under way when a second gateway's requests are, too
VERIFIED = 20  # the last entry before which it goes back


@pytest.mark.smoke
async def test_nothing_goes_wrong(house: House) -> None:
    stays = await house.named("tp2")
    before = house.leader(stays)
    async with house.step(tokens=LONG) as step:
        async with house.evacuating(WIDE, step) as (id, (there,)):
            assert there
        report = await house.until_over(id)
        assert report.requests_parked + report.requests_moved >= len(there)
    await check_whole(house, report, "done")
    assert house.leader(stays) == before


@pytest.mark.parametrize(
    "entry",
    [pytest.param(entry, marks=() if entry in SPREAD else pytest.mark.slow) for entry in range(1, ENTRIES + 1)],
)
async def test_the_daemon_is_killed_before_it_writes(house: House, entry: int) -> None:
    """What a step does has been done where it is the entry after it."""
    house.mark(number=entry, before=True)
    async with house.step():
        id = await house.begin_and_die(WIDE)
        await house.daemon.start()
        report = await house.until_over(id)
    await check_whole(house, report, "done" if entry > VERIFIED else "rolled_back")


async def test_the_daemon_is_killed_again_on_the_way_back(house: House) -> None:
    house.mark(kind="ready", state="running", direction="forward")
    async with house.step():
        id = await house.begin_and_die(WIDE)
        for kind in ("stop", "start", "verify"):
            house.mark(kind=kind, state="running", direction="back")
            await house.daemon.start()
            await house.daemon.until_ended()
        await house.daemon.start()
        report = await house.until_over(id)
    await check_whole(house, report, "rolled_back")


async def test_the_daemon_is_told_to_end(house: House) -> None:
    async with house.step():
        id = await house.begin(WIDE)
        await house.until_at(id, "ready")
        assert await house.daemon.stop() == 0
        await house.daemon.start()
        report = await house.until_over(id)
    await check_whole(house, report, "rolled_back", "done")


async def test_daemon_and_gateway_are_killed_at_once(house: House) -> None:
    house.mark(kind="ready", state="running")
    async with house.step() as step:
        id = await house.begin_and_die(WIDE)
        house.gateway.kill()
        step.gateway_was_killed = True
        await asyncio.gather(house.daemon.start(), house.gateway.start())
        report = await house.until_over(id)
    await check_whole(house, report, "rolled_back")


async def test_daemon_and_new_engine_are_killed_at_once(house: House) -> None:
    """All had been verified, and one of it is not there any more."""
    house.mark(kind="verify", state="done")
    async with house.step():
        id = await house.begin_and_die(WIDE)
        await house.kill(await new_engine(house, id))
        await house.daemon.start()
        report = await house.until_over(id)
    await check_whole(house, report, "rolled_back")


@pytest.mark.parametrize("kind", ["ready", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("stop", "admit"))])
async def test_the_gateway_is_killed(house: House, kind: str) -> None:
    async with house.step() as step:
        async with house.standing_still(WIDE, kind, "running") as id:
            house.gateway.kill()
            step.gateway_was_killed = True
        await house.gateway.start()
        report = await house.until_over(id)
    await check_whole(house, report, "done")


@pytest.mark.parametrize(
    "kind", ["verify", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("start", "warm_up"))]
)
async def test_the_new_engine_is_killed_before_it_serves(house: House, kind: str) -> None:
    async with house.step():
        async with house.standing_still(WIDE, kind, "done") as id:
            await house.kill(await new_engine(house, id))
        report = await house.until_over(id)
    assert f"{id}.0" in report.detail
    await check_whole(house, report, "rolled_back")


async def test_the_new_engine_is_killed_when_it_is_the_deployment(house: House) -> None:
    stays = await house.named("tp2")
    async with house.step():
        async with house.standing_still(WIDE, "commit", "done") as id:
            await house.kill(await new_engine(house, id))
        report = await house.until_over(id)
    assert report.state == "done"

    async def cleared() -> bool:
        return set(await house.engines()) == set(house.found()) == {stays}

    await until(cleared, 0.2)
    await house.routed(house.gateway)


async def test_an_old_engine_is_killed_while_its_requests_leave(house: House) -> None:
    old = await house.named("tp1")
    async with house.step():
        async with house.standing_still(WIDE, "evacuate", "running") as id:
            await house.kill(old)
        report = await house.until_over(id)
    await check_whole(house, report, "done")


async def test_the_engine_that_stays_is_killed(house: House) -> None:
    """It is none of the redeployment's; its requests wait for the one to come."""
    stays = await house.named("tp2")
    async with house.step():
        async with house.standing_still(WIDE, "ready", "running") as id:
            await house.kill(stays)
        report = await house.until_over(id)
    assert report.state == "done"

    async def cleared() -> bool:
        return set(await house.engines()) == set(house.found()) == {f"{id}.0"}

    await until(cleared, 0.2)
    await house.routed(house.gateway)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("fails", "ready of {new}: {new} ended while it started"),
        pytest.param("wrong", "verify of {new}", marks=pytest.mark.slow),
        pytest.param("lies", "verify of {new}: is laid out otherwise", marks=pytest.mark.slow),
        pytest.param("hangs", "ready of {new}: took longer than", marks=pytest.mark.slow),
    ],
)
async def test_the_new_engine_is_not_as_wanted(house: House, fault: str, says: str) -> None:
    async with house.step():
        id = await house.begin((("tp2", 1), (fault, 1)))
        report = await house.until_over(id)
    assert says.format(new=f"{id}.0") in report.detail
    await check_whole(house, report, "rolled_back")


@pytest.mark.slow
async def test_where_old_engines_do_not_come_back_the_others_serve(house: House) -> None:
    await house.become((("own-file", 2), ("tp2", 1)))
    stays = await house.named("tp2")
    house.lengths.unlink()
    try:
        async with house.step():
            report = await house.until_over(await house.begin((("tp2", 1), ("fails", 1))))
    finally:
        house.lengths.write_text(LENGTHS)
    assert report.state == "degraded"
    assert set(report.engine_ids) == set(await house.engines()) == set(house.found()) == {stays}
    for engine in leaving(report):
        assert f"of {engine}: " in report.detail
    await house.routed(house.gateway)


@pytest.mark.parametrize(
    "kind", ["ready", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("evacuate", "stop", "start", "admit"))]
)
async def test_an_operator_calls_it_off(house: House, kind: str) -> None:
    """Told while the daemon stands still before that step; it may be done with it before it hears of it."""
    async with house.step():
        async with house.standing_still(WIDE, kind, "running") as id:
            order = control_pb2.CancelRedeploymentRequest(redeployment_id=id, reason="the test says so")
            calling = asyncio.create_task(house.ask("CancelRedeployment", order))
            await asyncio.sleep(0.3)
        refused = (await asyncio.gather(calling, return_exceptions=True))[0]
        report = await house.until_over(id)
    if kind == "admit":
        assert isinstance(refused, Permanent), refused
        await check_whole(house, report, "done")
    else:
        assert report.detail == "called off: the test says so"
        await check_whole(house, report, "rolled_back")


@pytest.mark.slow
async def test_a_hung_engine_is_called_off(house: House) -> None:
    async with house.step():
        id = await house.begin((("tp2", 1), ("hangs", 1)))
        await house.until_at(id, "ready")
        await asyncio.sleep(1.0)
        await house.ask("CancelRedeployment", control_pb2.CancelRedeploymentRequest(redeployment_id=id))
        report = await house.until_over(id)
    await check_whole(house, report, "rolled_back")


async def test_clients_leave_while_their_requests_are_kept(house: House) -> None:
    async with house.step(tokens=LONG) as step:
        async with house.evacuating(WIDE, step) as (id, (there,)):
            assert there
            house.mark(stop=True, kind="ready", state="running")
        await house.daemon.until_still()
        try:
            kept = [item["id"] for item in (await step.shown())["in_flight"] if item["engine"] is None]
            assert set(kept) <= there
            assert kept
            await step.leave(*kept[: len(kept) // 2 + 1])
        finally:
            house.daemon.go_on()
        report = await house.until_over(id)
    await check_whole(house, report, "done")


async def test_two_gateways(house: House) -> None:
    other = house.make_gateway("other")
    await other.start()
    try:
        await house.routed(other)
        # Those of the first are still there when the second's are, and the daemon has begun, on a slow machine, too.
        async with house.step(tokens=3 * LONG) as one, house.step(gateway=other, tokens=3 * LONG) as another:
            async with house.evacuating(WIDE, one, another) as (id, there):
                assert all(there)
            report = await house.until_over(id)
            assert report.requests_parked + report.requests_moved >= sum(map(len, there))
        await check_whole(house, report, "done")
    finally:
        await other.stop()


async def test_a_trainer_that_closes_the_barrier_waits_for_the_redeployment(house: House) -> None:
    async with house.step():
        async with house.standing_still(WIDE, "ready", "running") as id:
            closing = asyncio.create_task(house.ask("PauseFleet", control_pb2.PauseFleetRequest(holder="trainer")))
        barrier = await closing
        assert barrier.phase == "quiet"
        report = await house.report(id)
        assert report.state == "done"
        with pytest.raises(Permanent, match="the pause barrier is closed"):
            await house.begin(NARROW)
        await house.ask("ResumeFleet", control_pb2.ResumeFleetRequest(lease_id=barrier.lease_id))
    await check_whole(house, report, "done")


async def test_the_daemon_is_killed_with_a_trainer_at_the_barrier(house: House) -> None:
    async with house.step():
        async with house.standing_still(WIDE, "ready", "running") as id:
            closing = asyncio.create_task(house.ask("PauseFleet", control_pb2.PauseFleetRequest(holder="trainer")))
            await asyncio.sleep(0.3)
            house.mark(kind="warm_up", state="running")
        await house.daemon.until_ended()
        await asyncio.gather(closing, return_exceptions=True)
        await house.daemon.start()
        with contextlib.suppress(Permanent):
            await house.ask("ResumeFleet", control_pb2.ResumeFleetRequest())
        report = await house.until_over(id)
    await check_whole(house, report, "rolled_back")


@pytest.mark.slow
async def test_an_operator_drains_an_engine_that_stays(house: House) -> None:
    stays = await house.named("tp2")
    async with house.step():
        async with house.standing_still(WIDE, "ready", "running") as id:
            order = control_pb2.DrainEngineRequest(engine_id=stays, move_requests=True)
            draining = asyncio.create_task(house.ask("DrainEngine", order))
        await draining
        report = await house.until_over(id)
        with pytest.raises(ProblemFaults, match="do not fit"):
            await house.begin((("tp1", 4),))  # it is the operator's
    await house.ask("DrainEngine", control_pb2.DrainEngineRequest(engine_id=stays, undo=True))
    await check_whole(house, report, "done")


async def test_the_journals_disk_is_full(house: House) -> None:
    async with house.step():
        async with house.standing_still(WIDE, "ready", "running") as id:
            _, most = resource.prlimit(house.daemon.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(house.daemon.process.pid, resource.RLIMIT_FSIZE, (65_536, most))
        report = await house.until_over(id)
    await check_whole(house, report, "rolled_back")
    assert "cannot be written down" in report.detail
    # There is room again; the next daemon knows no less.
    await house.daemon.stop()
    await house.daemon.start()
    await check_whole(house, await house.until_over(id), "rolled_back")


async def new_engine(house: House, redeployment: str) -> str:
    (name,) = [name for name in await house.engines() if name.startswith(f"{redeployment}.")]
    return name


def leaving(report: control_pb2.RedeploymentReport) -> set[str]:
    wanted = {engine.engine_id for engine in report.new_engines}
    return {engine.engine_id for engine in report.old_engines} - wanted
