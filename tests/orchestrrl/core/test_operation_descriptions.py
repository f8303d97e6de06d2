"""Every kind of operation ends in the old or the new state of its world after any interruption, and reports which.

To add a kind of operation, add a class that derives from `OperationWorld`, and a line in `WORLDS`.

| kind                 | old state                                | new state                                          |
|----------------------|------------------------------------------|----------------------------------------------------|
| toy                  | all parts old, users go to the old ones  | all parts new, users go to the new ones            |
| circuits             | the switch has its previous circuits     | it has those of the change; others stay            |
| prepared circuits    | as above, with the change journalled     | as above                                           |
| circuits on trial    | as above, automatic unless confirmed     | as above, and confirmed                            |
| redeployment         | two narrow engines with their requests   | a wide engine in their place, with their requests  |
| weight version       | all engines have the previous version    | all engines have the published version             |
| request move         | both requests on their previous engine   | both on the ordered engine                         |
| pause                | all gateways and the barrier are open    | all gateways are paused under the lease            |
| pause after requests | as above                                 | as above, after requests have finished             |
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from operation_circuits import CircuitWorld, PreparedCircuitWorld, TrialCircuitWorld
from operation_move import MoveWorld
from operation_pause import PauseWorld, WaitingPauseWorld
from operation_redeployment import RedeploymentWorld
from operation_toy import ToyWorld
from operation_weights import WeightVersionWorld
from operation_world import KilledJournal, OperationWorld, until_over

from orchestrrl.core.journal.store import Journal

WORLDS: dict[str, type[OperationWorld]] = {
    "toy": ToyWorld,
    "circuits": CircuitWorld,
    "prepared circuits": PreparedCircuitWorld,
    "circuits on trial": TrialCircuitWorld,
    "redeployment": RedeploymentWorld,
    "weight version": WeightVersionWorld,
    "request move": MoveWorld,
    "pause": PauseWorld,
    "pause after requests": WaitingPauseWorld,
}
KINDS = list(WORLDS)
KILLED = [(kind, after) for kind in KINDS for after in range(1, WORLDS[kind].written + 1)]
STEPS = [(kind, step) for kind in KINDS for step in WORLDS[kind].steps]
# A rollback writes more entries than a successful operation.
KILLED_ON_ANY_WAY = [(kind, step, after) for kind, step in STEPS for after in range(1, 2 * WORLDS[kind].written)]
MOMENTS = [(kind, at_s) for kind in KINDS for at_s in WORLDS[kind].moments_s]


class Site:
    """A world with the journal of its daemons."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.world = WORLDS[kind]()
        self._path = folder / "journal.sqlite"
        self.journal: KilledJournal | None = None
        self.has_crashed = False

    def open(self, killed_after: int | None = None) -> KilledJournal:
        self.close()
        self.has_crashed = False
        self.journal = KilledJournal(self._path, killed_after=killed_after, kinds=self.world.counted)
        return self.journal

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()

    async def begin(self, killed_after: int | None = None, within_s: float = 100.0) -> bool:
        """Order the operation; return whether its daemon was killed."""
        journal = await self.start(killed_after)
        killed = await until_over(self.world.clock, self.world.begin(journal), within_s)
        if killed:
            await self.crash()
        return killed

    async def start(self, killed_after: int | None = None) -> Journal:
        """Start the first daemon."""
        journal = self.open(killed_after)
        with journal.uncounted():
            assert not await until_over(self.world.clock, self.world.start(journal))
        return journal

    async def restart(self, killed_after: int | None = None) -> bool:
        await self.crash()
        journal, world = self.open(killed_after), self.world
        killed = await until_over(world.clock, world.start(journal)) or await until_over(
            world.clock, world.restart(journal)
        )
        if killed:
            await self.crash()
        return killed

    async def crash(self) -> None:
        """End the daemon, which writes nothing more."""
        assert self.journal is not None
        if not self.has_crashed:
            self.has_crashed = True
            self.journal.killed.set()
            await self.world.crash()

    async def settle(self) -> None:
        assert not await until_over(self.world.clock, self.world.settle())

    @property
    def outcome(self) -> str | None:
        assert self.journal is not None
        return self.world.outcome(self.journal)

    def agrees(self) -> str:
        """Return the state of the world, which must be the old or the new one and match the journal."""
        state = self.world.state()
        assert state in ("old", "new")
        assert self.outcome == state
        return state


@pytest.fixture
def site(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    why_not = WORLDS[kind].without.get(request.function.__name__)
    if why_not is not None:
        pytest.skip(why_not)
    site = Site(kind, tmp_path)
    yield site
    site.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_operation_without_faults_ends_in_new_state(site: Site) -> None:
    assert not await site.begin()
    assert site.agrees() == "new"
    assert isinstance(site.journal, KilledJournal)
    assert site.journal.written == site.world.written
    assert not await site.restart()
    assert site.agrees() == "new", "nothing was left open"


@pytest.mark.parametrize(("kind", "after"), KILLED)
async def test_killed_after_any_entry(site: Site, after: int) -> None:
    assert await site.begin(after)
    assert not await site.restart()
    site.agrees()


@pytest.mark.parametrize(("kind", "at_s"), MOMENTS)
async def test_killed_at_any_moment(site: Site, at_s: float) -> None:
    assert await site.begin(within_s=at_s)
    assert not await site.restart()
    site.agrees()


@pytest.mark.parametrize(("kind", "after"), KILLED)
async def test_killed_twice_including_during_recovery(site: Site, after: int) -> None:
    assert await site.begin(1)
    await site.restart(after)
    await site.restart()
    site.agrees()


@pytest.mark.parametrize(("kind", "step"), STEPS)
async def test_failed_step(site: Site, step: str) -> None:
    site.world.fail(step)
    assert not await site.begin()
    site.agrees()


@pytest.mark.parametrize(("kind", "step", "after"), KILLED_ON_ANY_WAY)
async def test_failed_step_and_killed_daemon(site: Site, step: str, after: int) -> None:
    site.world.fail(step)
    if await site.begin(after):
        assert not await site.restart()
    site.agrees()


@pytest.mark.parametrize("restarts", [False, True], ids=["same daemon", "next daemon"])
@pytest.mark.parametrize(("kind", "step"), STEPS)
async def test_lost_result(site: Site, step: str, restarts: bool) -> None:
    site.world.lose(step)
    assert not await site.begin()
    if site.outcome is None:
        await (site.restart() if restarts else site.settle())
    site.agrees()


@pytest.mark.parametrize(("kind", "step", "after"), KILLED_ON_ANY_WAY)
async def test_lost_result_and_killed_daemon(site: Site, step: str, after: int) -> None:
    site.world.lose(step)
    if await site.begin(after) or site.outcome is None:
        assert not await site.restart()
    site.agrees()


@pytest.mark.parametrize("kind", KINDS)
async def test_order_delivered_twice_takes_effect_once(site: Site) -> None:
    await site.begin()
    assert isinstance(site.journal, KilledJournal)
    assert not await until_over(site.world.clock, site.world.repeat())
    assert site.journal.written == site.world.written
    assert site.agrees() == "new"


@pytest.mark.parametrize("kind", KINDS)
async def test_order_delivered_late_has_no_effect(site: Site) -> None:
    assert not await until_over(site.world.clock, site.world.begin_late(await site.start()))
    assert site.agrees() == "old"


@pytest.mark.parametrize("is_mended", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_failed_undo(site: Site, is_mended: bool) -> None:
    """Check that the operation is never reported as undone, and ends once that is possible."""
    site.world.fail(site.world.steps[0])
    site.world.fail_to_undo()
    await site.begin()
    if site.outcome is not None:
        assert site.outcome == site.world.state()
        return
    assert site.world.state() == "between"
    if is_mended:
        site.world.mend()
    await site.restart()
    if is_mended:
        site.agrees()
    else:
        assert site.outcome in (None, site.world.state())


@pytest.mark.parametrize(("kind", "step", "after"), KILLED_ON_ANY_WAY)
async def test_failed_undo_and_killed_daemon(site: Site, step: str, after: int) -> None:
    site.world.fail(step)
    site.world.fail_to_undo()
    await site.begin(after)
    await site.restart()
    assert site.outcome in (None, site.world.state())
    site.world.mend()
    await site.restart()
    assert site.outcome == site.world.state()
