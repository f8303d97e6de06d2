"""The conformance suite of weight backends. It tests the guarantees of the version protocol, including after failures.

    class TestMine(BackendConformance):
        @pytest.fixture
        async def world(self, ...): yield MyWorld(...)

A world consists of a daemon's WeightSync, some engines, and a trainer that publishes through the backend. Engines may
be fakes if they can fail like real ones.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import pytest

from orchestrrl.weights.controller.reports import SyncReport, SyncState
from planner.model import EngineId


class BackendStep(StrEnum):
    PREPARE = "prepare"
    INSTALL = "install"  # the engine then has part of the version
    VERIFY = "verify"  # the engine then generates other tokens than the others


class BackendWorld(Protocol):
    """A test environment with at least three engines that serve requests, with version 0 or unversioned weights."""

    @property
    def engines(self) -> Sequence[EngineId]: ...

    @property
    def keeps_versions(self) -> bool:
        """Return whether all bytes of the new and of the previous version are on the engines' hosts before the
        fence."""
        ...

    def holds(self, engine: EngineId) -> int | None:
        """Return the version of the weights with which the engine generates tokens. Return None if the version is
        unknown or the weights are incomplete."""
        ...

    def gets_requests(self, engine: EngineId) -> bool: ...

    def fleet(self) -> int | None:
        """Return the fleet's version as reported by the daemon, or None if the fleet has no version."""
        ...

    @property
    def changed_while_open(self) -> Sequence[str]:
        """Return a description of each change of an engine's weights that occurred while the engine served requests."""
        ...

    def fail(self, step: BackendStep, engines: Sequence[EngineId]) -> None:
        """Make the step fail once at these engines."""
        ...

    def lose_trainer(self, step: BackendStep) -> None:
        """Make the trainer fail the next time it takes part in the step."""
        ...

    async def publish(self, version: int) -> SyncReport:
        """Publish a version. Return the report once the sync is over, the pause barrier is open, and repairs are
        done."""
        ...


class BackendConformance:
    """The tests that every weight backend must pass. Worlds must set `attempts: 2`, which permits two attempts per
    version."""

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
            pass  # without a majority the correct engines cannot be determined
        elif world.keeps_versions:
            assert all(world.gets_requests(engine) for engine in world.engines[count:])
        elif step is not BackendStep.PREPARE and report.state is SyncState.ABORTED:
            # An engine that was changed has lost the previous version and gets no requests.
            assert not any(world.gets_requests(engine) for engine in world.engines if world.holds(engine) != 1)
        await self._goes_on(world)

    @pytest.mark.parametrize("step", [BackendStep.PREPARE, BackendStep.INSTALL])
    async def test_the_trainer_fails_in_a_step(self, world: BackendWorld, step: BackendStep) -> None:
        await world.publish(1)
        world.lose_trainer(step)
        report = await world.publish(2)
        _check_one_version(world, report, (1, 2))
        if world.keeps_versions and step is BackendStep.INSTALL:  # the trainer is not needed any more
            assert report.state is SyncState.DONE
        await self._goes_on(world)

    async def test_the_first_version_fails_at_one_engine(self, world: BackendWorld) -> None:
        """Check a failed installation while the fleet has no previous version that could be restored."""
        world.fail(BackendStep.INSTALL, world.engines[:1])
        report = await world.publish(1)
        _check_one_version(world, report, (None, 1))
        await self._goes_on(world)

    async def _goes_on(self, world: BackendWorld) -> None:
        """Check that the next version reaches all engines, regardless of earlier failures."""
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
