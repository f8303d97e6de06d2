"""What every weight backend keeps to, as a test class: the version protocol's promises, also where a step goes wrong.

    class TestMine(BackendConformance):
        @pytest.fixture
        async def world(self, ...): yield MyWorld(...)

A world is a daemon's WeightSync, some engines, and a trainer that publishes by the backend. Engines may be fakes, as
long as they can fail in the ways that real ones do.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import pytest

from orchestrrl.weights.controller.reports import SyncReport, SyncState
from planner.model import EngineId


class BackendStep(StrEnum):
    PREPARE = "prepare"
    INSTALL = "install"  # the engine has half of it then
    VERIFY = "verify"  # it goes on otherwise than others


class BackendWorld(Protocol):
    """At least three engines, which all get requests, of version 0 or of weights that nobody has named."""

    @property
    def engines(self) -> Sequence[EngineId]: ...

    @property
    def keeps_versions(self) -> bool:
        """All bytes are at the engines' hosts before the fence, and the version from before is held there."""
        ...

    def holds(self, engine: EngineId) -> int | None:
        """The version that it would answer with; None: half of one, or who knows what."""
        ...

    def gets_requests(self, engine: EngineId) -> bool: ...

    def fleet(self) -> int | None:
        """The version that the daemon says is the fleet's."""
        ...

    @property
    def changed_while_open(self) -> Sequence[str]:
        """Each time that an engine's answers changed while requests went to it."""
        ...

    def fail(self, step: BackendStep, engines: Sequence[EngineId]) -> None:
        """At these the step goes wrong the next time."""
        ...

    def lose_trainer(self, step: BackendStep) -> None:
        """It fails the next time it has something to do in the step."""
        ...

    async def publish(self, version: int) -> SyncReport:
        """Until it is over, the pause barrier is open, and what can be repaired is."""
        ...


class BackendConformance:
    """Worlds try a version twice (`attempts: 2`)."""

    async def test_versions_arrive_everywhere(self, world: BackendWorld) -> None:
        for version in (1, 2):
            report = await world.publish(version)
            assert (report.state, report.code) == (SyncState.DONE, "done"), report
            assert _served(world) == dict.fromkeys(world.engines, version)
        assert not world.changed_while_open

    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize("step", list(BackendStep))
    async def test_a_step_fails_at_some_engines(self, world: BackendWorld, step: BackendStep, count: int) -> None:
        await world.publish(1)
        world.fail(step, world.engines[:count])
        report = await world.publish(2)
        _check_one_version(world, report, (1, 2))
        if step is BackendStep.VERIFY and count > 1:
            pass  # nobody can say who is right
        elif world.keeps_versions:
            assert all(world.gets_requests(engine) for engine in world.engines[count:])
        elif step is not BackendStep.PREPARE and report.state is SyncState.ABORTED:
            # Whoever was touched has lost the version from before, and gets nothing.
            assert not any(world.gets_requests(engine) for engine in world.engines if world.holds(engine) != 1)
        await self._goes_on(world)

    @pytest.mark.parametrize("step", [BackendStep.PREPARE, BackendStep.INSTALL])
    async def test_the_trainer_fails_in_a_step(self, world: BackendWorld, step: BackendStep) -> None:
        await world.publish(1)
        world.lose_trainer(step)
        report = await world.publish(2)
        _check_one_version(world, report, (1, 2))
        if world.keeps_versions and step is BackendStep.INSTALL:  # it is not needed any more
            assert report.state is SyncState.DONE
        await self._goes_on(world)

    async def test_of_the_very_first_version(self, world: BackendWorld) -> None:
        """There is none to go back to."""
        world.fail(BackendStep.INSTALL, world.engines[:1])
        report = await world.publish(1)
        _check_one_version(world, report, (None, 1))
        await self._goes_on(world)

    async def _goes_on(self, world: BackendWorld) -> None:
        """Whatever was, the next version makes all of it good."""
        report = await world.publish(3)
        assert (report.state, world.fleet()) == (SyncState.DONE, 3), report
        assert _served(world) == dict.fromkeys(world.engines, 3)
        assert not world.changed_while_open


def _served(world: BackendWorld) -> dict[EngineId, int | None]:
    return {engine: world.holds(engine) for engine in world.engines if world.gets_requests(engine)}


def _check_one_version(world: BackendWorld, report: SyncReport, either: Sequence[int | None]) -> None:
    assert report.over, report
    assert world.fleet() == either[report.state is SyncState.DONE], report
    if world.fleet() is not None:
        assert set(_served(world).values()) <= {world.fleet()}, report
    assert None not in _served(world).values(), report
    assert not world.changed_while_open
