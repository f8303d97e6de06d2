"""Tests of weight syncs through the daemon's own barrier, on a virtual clock: its control plane, gateways that enforce
leases themselves, and behaving peers. At every moment an engine that gets requests has the version that the pause
barrier reports."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import barrier_harness
import pytest
from barrier_harness import E0, E1, Gateway
from builders import sample
from changeable_daemon import changeable
from fabric_harness import Killed, RestingClock
from weights_harness import TENSORS, Engine, FakePeer

from orchestrrl.core.errors import OrchestrRLError, Permanent, Retryable
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.operations import CloseBarrier, FrozenRequests, OpenBarrier
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.wiring import WeightSyncParts, build_daemon
from orchestrrl.fleet.pause_barrier import PauseRequest
from orchestrrl.fleet.reports import BarrierPhase
from orchestrrl.rpc.control_service import ControlService
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.weights.controller.controller import WeightSync
from orchestrrl.weights.controller.reports import SyncReport, SyncState
from orchestrrl.weights.model import (
    PeerRole,
)
from orchestrrl.weights.orders import InstallVersion, RestEngine
from orchestrrl.weights.publication import Publication
from planner.model import EngineId, PeerId

CONFIG = (
    barrier_harness.CONFIG
    + """
weights: {transports: [tcp], chunk_bytes: 64, stall_s: 2, patience_s: 5, attempts: 2, fence_within_s: 10, lease_s: 30}
"""
)
# The entries that a daemon writes for a version; it may die before and after each.
WAY = frozenset(
    {
        EntryKind.SYNC_BEGAN,
        EntryKind.SYNC_STEP,
        EntryKind.SYNC_ENDED,
        EntryKind.WEIGHTS,
        EntryKind.BARRIER,
        EntryKind.OPERATION_INTENT,
        EntryKind.OPERATION_RESULT,
    }
)


class MortalJournal(Journal):
    """A journal that accepts no write after its daemon's death: a writer dies too."""

    harness: "Harness"
    dead = False

    def append(self, at_s: float, kind: EntryKind, subject: str, body: Mapping[str, Any]) -> int:
        if kind in WAY:
            self.harness.point(f"before {kind} {body.get('step', body.get('event', ''))}")
        if self.dead:
            raise Killed
        if self.harness.full:
            raise Permanent("database or disk is full")
        sequence = super().append(at_s, kind, subject, body)
        if kind in WAY:
            self.harness.point(f"after {kind} {body.get('step', body.get('event', ''))}")
        if self.dead:
            raise Killed
        return sequence


class KeepingGateway(Gateway):
    """A gateway that derives from its routes and orders which engine has which version. It outlives daemons."""

    weights_change = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.versions: dict[EngineId, int] = {}  # of the engines that it sends requests to

    def report(self) -> None:
        with suppress(Killed):
            if self.attachment is not None:
                super().report()

    async def _attach(self) -> None:
        with suppress(Killed):
            await super()._attach()

    async def _close(self, order: CloseBarrier) -> Any:
        self.weights_change = order.weights_change
        return await super()._close(order)

    def _open(self) -> None:
        if self.clock.now_s() >= self.until_s and self.weights_change and self.phase is BarrierPhase.QUIET:
            self.versions = {}
            self.routes = ()
        super()._open()

    def serves(self) -> dict[EngineId, int]:
        """Return the version of each engine that gets requests."""
        if self.lease:
            return {}
        return {r.engine: r.policy_version for r in self.routes if not r.draining and r.policy_version is not None}


class _Daemon:
    def __init__(self, weights: WeightSyncParts, task: "asyncio.Task[None]") -> None:
        self.hub, self.sync, self.task = weights.hub, weights.syncs, task


class Harness(barrier_harness.Harness):
    """Two engines with a peer each, a trainer's peer, and successive daemons."""

    journal: MortalJournal | None

    def __init__(self, folder: Path, config: str = CONFIG) -> None:
        super().__init__(folder / "journal.sqlite")
        self.clock = RestingClock(1000.0)
        self.config = config
        self.engines = {engine: Engine(engine) for engine in (E0, E1)}
        self.peers: dict[PeerId, FakePeer] = {}
        for name, role, own in (
            ("t", PeerRole.TRAINER, []),
            ("p0", PeerRole.ENGINE, [self.engines[E0]]),
            ("p1", PeerRole.ENGINE, [self.engines[E1]]),
        ):
            self.peers[PeerId(name)] = FakePeer(self, PeerId(name), role, own)  # type: ignore[arg-type]
        self.daemon: _Daemon | None = None
        self.points: list[str] = []
        self.counting = False
        self.kill_at: int | None = None
        self.full = False
        self.blind: set[EngineId] = set()  # restarted engines whose restart cannot be noticed yet

    def engine(self, id: str) -> Engine:
        return self.engines[EngineId(id)]

    def peer(self, id: str) -> FakePeer:
        return self.peers[PeerId(id)]

    # --- daemons

    def start(self, config: str = "") -> ControlPlane:
        assert self.daemon is None
        journal = self.journal = MortalJournal.__new__(MortalJournal)
        journal.harness = self
        journal.__init__(self.path, self.clock.now_s())  # type: ignore[misc]
        parsed = parse_config(config or self.config)
        self.parts = changeable(build_daemon(parsed, journal, self.clock))
        self.plane = self.parts.control_plane
        weights = self.parts.weights
        weights.syncs.recover()
        self.daemon = _Daemon(weights, asyncio.ensure_future(weights.syncs.run()))
        for peer in self.peers.values():
            peer.attach()
        return self.plane

    def kill(self) -> None:
        """Kill the daemon, as with SIGKILL."""
        daemon, self.daemon = self.daemon, None
        if daemon is None:
            return
        assert self.journal is not None
        self.journal.dead = True
        for peer in self.peers.values():
            peer.stream = None
        for gateway in self.gateways.values():
            gateway.attachment = None
        daemon.hub.close()
        mine = asyncio.current_task() if asyncio.get_running_loop() else None
        for task in (daemon.task, self._loops, *self.plane.fleet.barrier.waiting):
            if task is not None and task is not mine:
                task.cancel()
        self._loops = None

    async def back(self) -> None:
        """Start another daemon, to which all nodes and peers attach."""
        assert self.daemon is None
        assert self.journal is not None
        with suppress(Exception):
            self.journal.close()
        self.start()
        for name, old in list(self.gateways.items()):
            await self.stopped(old)
            new = self.gateways[name] = KeepingGateway(self.plane, self.clock, name, old.drains_s)
            new.lease, new.until_s, new.quiet_at_s, new.ended = old.lease, old.until_s, old.quiet_at_s, old.ended
            new.routes, new.generated = old.routes, old.generated
            new.weights_change = old.weights_change  # type: ignore[attr-defined]
            new.start()
        self._loops = asyncio.create_task(barrier_harness.run_loops(self.plane, self.clock))
        await self.pass_time(0.5)

    async def stopped(self, gateway: Gateway) -> None:
        for task in gateway._tasks:
            task.cancel()
        await asyncio.gather(*gateway._tasks, return_exceptions=True)

    def point(self, what: str) -> None:
        self.check()
        if self.counting and self.daemon is not None and not (self.journal and self.journal.dead):
            self.points.append(what)
            if self.kill_at == len(self.points) - 1:
                self.kill()

    @property
    def sync(self) -> WeightSync:
        assert self.daemon is not None
        return self.daemon.sync

    # --- observations

    def publish(self, version: int, **more: Any) -> str:
        boxes = {tensor.name: (tensor.whole,) for tensor in TENSORS}
        return self.sync.publish(Publication(version, 0, 1, PeerId("t"), TENSORS, boxes, **more))

    async def over(self, sync_id: str, within_s: float = 120.0) -> SyncReport:
        until_s = self.clock.now_s() + within_s
        while not (report := self.sync.report(sync_id)).over:
            assert self.clock.now_s() < until_s, report
            await self.pass_time(0.25)
        return report

    async def until(self, state: SyncState, within_s: float = 60.0) -> SyncReport:
        until_s = self.clock.now_s() + within_s
        while (report := self.sync.report()).state is not state:
            assert self.clock.now_s() < until_s, report
            await self.pass_time(0.05)
        return report

    async def pass_time(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / 0.25))):
            await self.clock.advance(min(0.25, seconds))
            self.check()
            if self.daemon is not None and self.daemon.task.done():
                raise AssertionError(f"weight syncs have ended: {self.daemon.task}")

    async def first(self) -> None:
        report = await self.over(self.publish(1))
        assert (report.state, report.code) == (SyncState.DONE, "done"), report
        await self.pass_time(1.0)
        self.check_one_version(1)

    def check(self) -> None:
        """Check that the versions that gateways and the pause barrier report for serving engines are the real ones."""
        for gateway in self.gateways.values():
            assert isinstance(gateway, KeepingGateway)
            for engine, reported in gateway.serves().items():
                self._is_so(gateway.node, engine, reported)
        if self.daemon is not None and not (self.journal and self.journal.dead):
            state = self.plane.fleet.barrier._fleet.weights
            if state.lease is None:
                for engine, reported in state.versions.items():
                    if state.serves(engine):
                        self._is_so("the pause barrier", engine, reported)

    def _is_so(self, who: str, engine: EngineId, reported: int) -> None:
        has = self.engines[engine]
        assert not has.alive or engine in self.blind or has.weights == reported, (
            f"{who}: {engine} serves as version {reported}, and has {has.weights}"
        )

    def check_one_version(self, version: int) -> None:
        state = self.plane.fleet.barrier.state
        assert state.lease is None, state
        assert self.sync.book.fleet.version == version
        assert self.sync.book.fleet.quarantined == {}
        assert {id: e.weights for id, e in self.engines.items()} == dict.fromkeys(self.engines, version)
        assert all(state.serves(id) and state.versions[id] == version for id in self.engines)
        for gateway in self.gateways.values():
            assert gateway.phase is BarrierPhase.OPEN
            assert isinstance(gateway, KeepingGateway)
            assert gateway.serves() == dict.fromkeys(self.engines, version)
        assert not any(engine.resting for engine in self.engines.values())

    async def ends_in_one_version(self, within_s: float = 120.0) -> None:
        until_s = self.clock.now_s() + within_s
        while True:
            await self.pass_time(2.0)
            fleet, state = self.sync.book.fleet, self.plane.fleet.barrier.state
            over = all(r.over for r in self.sync.history(0))
            if over and not fleet.quarantined and state.lease is None and set(state.versions) == set(self.engines):
                break
            assert self.clock.now_s() < until_s, (fleet, state, self.sync.history(1))
        await self.pass_time(3.0)
        done = [report.version for report in self.sync.history(0) if report.state is SyncState.DONE]
        self.check_one_version(max(done))

    async def asked(self, work: Coroutine[Any, Any, Any], within_s: float = 60.0) -> Any:
        task = asyncio.ensure_future(work)
        until_s = self.clock.now_s() + within_s
        while not task.done():
            assert self.clock.now_s() < until_s, task
            await self.pass_time(0.25)
        return await task

    async def paused_by(self, holder: str, **wish: Any) -> str:
        frozen = FrozenRequests.TAKEN_BACK
        state = await self.asked(self.plane.fleet.barrier.pause(PauseRequest(holder=holder, frozen=frozen, **wish)))
        return str(state.lease.id)

    async def resumed(self, lease: str, version: int | None = None) -> None:
        await self.asked(self.resuming(lease, version))

    async def resuming(self, lease: str, version: int | None = None) -> None:
        """Resume, as a trainer does."""
        request = pb.ResumeFleetRequest(lease_id=lease)
        if version is not None:
            request.policy_version = version
        await ControlService(self.parts).ResumeFleet(request, None)  # type: ignore[arg-type]


def played(
    folder: Path, scene: Callable[[Harness], Coroutine[Any, Any, None]], *gateways: str, config: str = CONFIG
) -> None:
    async def play() -> None:
        harness = Harness(folder, config)
        harness.start()
        try:
            for name in gateways or ("gw0",):
                harness.gateways[name] = KeepingGateway(harness.plane, harness.clock, name)
                harness.gateways[name].start()
            harness._loops = asyncio.create_task(barrier_harness.run_loops(harness.plane, harness.clock))
            await harness.pass_time(1.0)
            await scene(harness)
        finally:
            harness.kill()
            for gateway in harness.gateways.values():
                await harness.stopped(gateway)
            for peer in harness.peers.values():
                peer.die()
            if harness.journal is not None:
                harness.journal.close()

    asyncio.run(play())


def test_versions_reach_every_gateway_through_the_barrier(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        for version in (1, 2, 3):
            report = await harness.over(harness.publish(version))
            assert (report.state, report.code, report.attempt) == (SyncState.DONE, "done", 1), report
            await harness.pass_time(0.5)
            harness.check_one_version(version)
        for gateway in harness.gateways.values():
            closes = [order.action for order in gateway.of(CloseBarrier)]
            assert all(isinstance(c, CloseBarrier) and c.frozen is FrozenRequests.TAKEN_BACK for c in closes)
            assert all(isinstance(c, CloseBarrier) and c.weights_change for c in closes)
            opens = [order.action for order in gateway.of(OpenBarrier)]
            assert [o.policy_version for o in opens if isinstance(o, OpenBarrier)] == [1, 2, 3]

    played(tmp_path, scene, "gw0", "gw1")


def test_gateway_that_dies_during_the_pause_costs_an_attempt(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await harness.first()
        gateway = harness.gateways["gw1"]
        gateway.drains_s = 3.0
        harness.publish(2)
        await harness.until(SyncState.FENCING)
        await harness.pass_time(0.5)
        gateway.leave()
        await harness.stopped(gateway)
        del harness.gateways["gw1"]
        report = await harness.over(harness.sync.report().id)
        assert (report.state, report.attempt) == (SyncState.DONE, 2), report
        assert any("gateway gw1 detached" in note for note in report.notes)
        await harness.ends_in_one_version()
        harness.check_one_version(2)

    played(tmp_path, scene, "gw0", "gw1")


def test_lease_that_expires_while_the_daemon_is_dead_leaves_no_version(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await harness.first()
        harness.publish(2)
        await harness.until(SyncState.INSTALLING)
        await harness.pass_time(0.05)
        harness.kill()
        await harness.pass_time(40.0)
        for gateway in harness.gateways.values():
            assert gateway.phase is BarrierPhase.OPEN
            assert isinstance(gateway, KeepingGateway)
            assert gateway.serves() == {}
        await harness.back()
        assert harness.plane.fleet.barrier.state.opened is not None
        await harness.ends_in_one_version()
        harness.check_one_version(1)
        assert harness.sync.report(version=2).code == "restarted"
        assert (await harness.over(harness.publish(3))).state is SyncState.DONE
        await harness.pass_time(0.5)
        harness.check_one_version(3)

    played(tmp_path, scene, "gw0", "gw1")


def test_version_waiting_for_a_closed_barrier_is_installed_before_it_opens(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await harness.first()
        sync_id = harness.publish(2, install="next_pause")
        await harness.until(SyncState.PREPARED)
        await harness.pass_time(20.0)
        assert harness.sync.report(sync_id).state is SyncState.PREPARED
        lease = await harness.paused_by("trainer", lease_s=60.0)
        await harness.resumed(lease)
        report = await harness.over(sync_id)
        assert (report.state, report.code) == (SyncState.DONE, "done")
        await harness.pass_time(1.0)
        harness.check_one_version(2)

    played(tmp_path, scene, "gw0", "gw1")


@pytest.mark.parametrize("with_lease", [True, False])
@pytest.mark.parametrize("reported", [2, None])
def test_resume_with_the_waiting_version_or_without_a_lease_installs_it(
    tmp_path: Path, reported: int | None, with_lease: bool
) -> None:
    async def scene(harness: Harness) -> None:
        await harness.first()
        sync_id = harness.publish(2, install="next_pause")
        await harness.until(SyncState.PREPARED)
        lease = await harness.paused_by("trainer", lease_s=60.0)
        await harness.resumed(lease if with_lease else "", reported)
        report = await harness.over(sync_id)
        assert (report.state, report.code) == (SyncState.DONE, "done")
        await harness.pass_time(1.0)
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_version_not_installed_is_not_reported_for_engines(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await harness.first()
        sync_id = harness.publish(2, install="next_pause")
        await harness.until(SyncState.PREPARED)
        harness.engine("e0").fails = harness.engine("e1").fails = 1
        lease = await harness.paused_by("trainer", lease_s=60.0)
        with pytest.raises(Permanent, match=r"cannot install version 2: .*out of memory"):
            await harness.resumed(lease, 2)
        assert harness.plane.fleet.barrier.state.phase is BarrierPhase.QUIET
        await harness.until(SyncState.PREPARED)
        await harness.resumed(lease, 2)  # its second attempt
        assert (await harness.over(sync_id)).state is SyncState.DONE
        await harness.pass_time(1.0)
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_version_in_progress_is_not_reported_for_engines(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await harness.first()
        lease = await harness.paused_by("trainer", lease_s=60.0)
        harness.peer("p0").stalls = True
        harness.publish(2, install="next_pause")
        await harness.until(SyncState.CARRYING)
        with pytest.raises(Retryable, match=r"do not have version 2 yet.*still carrying"):
            await harness.resumed(lease, 2)
        harness.peer("p0").stalls = False
        await harness.until(SyncState.PREPARED)
        await harness.resumed(lease, 2)
        await harness.pass_time(5.0)
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_resume_with_the_fleets_version_excludes_engines_that_lack_it(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await harness.first()
        harness.engine("e1").fails = 50
        assert (await harness.over(harness.publish(2))).code == "some_quarantined"
        lease = await harness.paused_by("trainer", lease_s=60.0)
        await harness.resumed(lease, 2)
        await harness.pass_time(1.0)
        assert (harness.plane.fleet.barrier.state.serves(E0), harness.plane.fleet.barrier.state.serves(E1)) == (
            True,
            False,
        )
        harness.engine("e1").fails = 0
        await harness.ends_in_one_version()
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_engine_that_restarts_while_the_barrier_opens_is_left_out(tmp_path: Path) -> None:
    """It restarts unnoticed by its peer, after the waiting version was installed."""

    async def scene(harness: Harness) -> None:
        await harness.first()
        harness.publish(2, install="next_pause")
        await harness.until(SyncState.PREPARED)
        lease = await harness.paused_by("trainer", lease_s=60.0)

        async def prepare(until_s: float) -> str:
            harness.engine("e1").restart()
            harness.plane.fleet.barrier.sampled(E1, sample(total=5))
            harness.plane.fleet.barrier.sampled(E1, sample(total=0))
            return "prepared"

        harness.parts.before_resume = prepare
        await harness.resumed(lease)
        harness.check()
        harness.parts.before_resume = None
        await harness.ends_in_one_version()
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_version_set_by_the_trainer_takes_precedence(tmp_path: Path) -> None:
    """The trainer has installed other weights itself: the peers' records of engines are void until it publishes
    again."""

    async def scene(harness: Harness) -> None:
        await harness.first()
        sync_id = harness.publish(2, install="next_pause")
        await harness.until(SyncState.PREPARED)
        lease = await harness.paused_by("trainer", lease_s=60.0)
        for engine in harness.engines.values():
            engine.weights = 7
        await harness.resumed(lease, 7)
        await harness.pass_time(5.0)
        state = harness.plane.fleet.barrier.state
        assert (state.newest, dict(state.versions)) == (7, {E0: 7, E1: 7})
        assert harness.sync.report(sync_id).state is SyncState.PREPARED
        harness.sync.abort(sync_id, "")
        for peer in harness.peers.values():  # what its engines are known to have
            peer.introduce()
        await harness.pass_time(5.0)
        assert all(harness.plane.fleet.barrier.state.serves(engine) for engine in harness.engines)
        lease = await harness.paused_by("trainer", lease_s=60.0)
        await harness.resumed(lease)  # nothing has changed
        await harness.pass_time(5.0)
        state = harness.plane.fleet.barrier.state
        assert (state.newest, dict(state.versions)) == (7, {E0: 7, E1: 7})
        assert all(state.serves(engine) for engine in harness.engines)
        for engine in harness.engines.values():  # and its next version is published again
            assert engine.weights == 7
        assert (await harness.over(harness.publish(8))).state is SyncState.DONE
        await harness.pass_time(1.0)
        harness.check_one_version(8)

    played(tmp_path, scene)


def test_barrier_held_by_another_is_waited_for_up_to_a_limit(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await harness.first()
        lease = await harness.paused_by("trainer", lease_s=300.0)
        harness.publish(2)
        await harness.until(SyncState.PREPARED)
        await harness.pass_time(3.0)
        assert "trainer" in harness.sync.report().detail
        report = await harness.over(harness.sync.report().id)
        assert (report.state, report.code) == (SyncState.ABORTED, "not_quiet")
        assert "trainer" in report.detail
        assert harness.plane.fleet.barrier.state.lease is not None  # it remains the trainer's
        await harness.resumed(lease)
        await harness.pass_time(0.5)
        harness.check_one_version(1)
        assert (await harness.over(harness.publish(2))).state is SyncState.DONE

    played(tmp_path, scene)


def test_trainers_lease_is_respected_and_the_sync_continues_after_it(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await harness.first()
        lease = await harness.paused_by("trainer", lease_s=300.0)
        sync_id = harness.publish(2)
        await harness.until(SyncState.PREPARED)
        await harness.pass_time(3.0)
        assert harness.plane.fleet.barrier.state.lease is not None
        assert harness.plane.fleet.barrier.state.lease.id == lease
        await harness.resumed(lease)
        report = await harness.over(sync_id)
        assert (report.state, report.code) == (SyncState.DONE, "done")
        await harness.pass_time(1.0)
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_repeated_resume_waits_for_the_same_change(tmp_path: Path) -> None:
    """Its first call was interrupted while engines were being changed."""

    async def scene(harness: Harness) -> None:
        await harness.first()
        sync_id = harness.publish(2, install="next_pause")
        await harness.until(SyncState.PREPARED)
        lease = await harness.paused_by("trainer", lease_s=60.0)
        first = asyncio.ensure_future(harness.resuming(lease))
        await harness.until(SyncState.INSTALLING)
        first.cancel()
        await harness.resumed(lease)
        report = await harness.over(sync_id)
        assert (report.state, report.attempt) == (SyncState.DONE, 1), report
        await harness.pass_time(1.0)
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_configured_behaviour_applies_if_the_trainer_sets_none(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        sync_id = harness.publish(1)
        await harness.until(SyncState.PREPARED)
        assert harness.publish(1) == sync_id  # its answer was lost
        await harness.pass_time(20.0)
        assert harness.sync.report(sync_id).state is SyncState.PREPARED
        assert (await harness.over(harness.publish(2, install="at_once"))).state is SyncState.DONE

    played(tmp_path, scene, config=CONFIG.replace("weights: {", "weights: {install: next_pause, "))


def test_absent_trainer_peer_is_not_a_fault_of_the_publication(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        harness.kill()
        await harness.back()
        harness.daemon.hub.peers.pop(PeerId("t"))  # type: ignore[union-attr]
        with pytest.raises(Retryable, match="peer: is not attached"):
            harness.publish(1)
        harness.peer("t").attach()
        assert (await harness.over(harness.publish(1))).state is SyncState.DONE

    played(tmp_path, scene)


@pytest.mark.parametrize(
    "where", [f"orchestrrl.weights.controller.installing.Installing.{name}" for name in ("go_back", "resume")]
)
def test_defect_ends_a_sync_but_not_the_daemon(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wrong(*_: object) -> None:
        raise KeyError("a defect")

    async def scene(harness: Harness) -> None:
        await harness.first()
        if "go_back" in where:
            for engine in harness.engines.values():
                engine.fails = 1
        with monkeypatch.context() as patched:
            patched.setattr(where, wrong)
            sync_id = harness.publish(2)
            while not harness.sync.defects:
                await harness.pass_time(0.05)
        report = await harness.over(sync_id)
        assert harness.sync.defects == 1
        assert (report.state, report.code) in ((SyncState.DONE, "done"), (SyncState.ABORTED, "internal"))
        await harness.ends_in_one_version()
        assert (await harness.over(harness.publish(3))).state is SyncState.DONE
        await harness.pass_time(1.0)
        harness.check_one_version(3)

    played(tmp_path, scene)


def test_sync_waits_for_a_running_redeployment_and_reports_it(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await harness.first()
        with harness.plane._turn.preparing():
            sync = harness.publish(2)
            await harness.until(SyncState.PREPARED)
            await harness.pass_time(30.0)  # longer than the fence may take
            report = harness.sync.report(sync)
            assert report.state is SyncState.PREPARED
            assert report.detail == "waiting: engines are being started or stopped"
            harness.check_one_version(1)
        assert (await harness.over(sync)).state is SyncState.DONE
        await harness.pass_time(1.0)
        harness.check_one_version(2)

    played(tmp_path, scene)


@pytest.mark.parametrize("state", [SyncState.CARRYING, SyncState.FENCING, SyncState.INSTALLING, SyncState.VERIFYING])
def test_engine_whose_restart_only_its_agent_noticed_does_not_serve(tmp_path: Path, state: SyncState) -> None:
    """Its token counter decreases. Its peer notices a moment later."""

    async def scene(harness: Harness) -> None:
        await harness.first()
        harness.publish(2)
        await harness.until(state)
        harness.blind.add(E1)
        harness.engine("e1").restart()
        harness.gateways["gw0"].generated["e1"] = 0
        await harness.pass_time(0.5)
        harness.peer("p1").engine_restarted(harness.engine("e1"))
        harness.blind.clear()
        harness.gateways["gw0"].generated.clear()
        await harness.ends_in_one_version()
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_restarted_engine_gets_its_version_again(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await harness.first()
        harness.blind.add(E1)
        harness.peer("p1").engine_restarted(harness.engine("e1"))
        await harness.clock.advance(0.0)  # gateways receive it
        harness.blind.clear()
        harness.check()
        assert not harness.plane.fleet.barrier.state.serves(E1)
        await harness.ends_in_one_version(30.0)
        harness.check_one_version(1)

    played(tmp_path, scene)


async def _second(harness: Harness) -> None:
    await harness.first()
    harness.counting = True
    with suppress(Killed, OrchestrRLError):
        harness.publish(2)
    for _ in range(60):
        await harness.pass_time(0.25)
        if harness.daemon is None or harness.sync.history(1)[0].over:
            break
    await harness.pass_time(1.0)


def test_daemon_killed_at_every_journal_entry_ends_in_one_version(tmp_path: Path) -> None:
    """The gateway's state meanwhile, and the next daemon's barrier, end in one version."""
    points: list[str] = []

    async def whole(harness: Harness) -> None:
        await _second(harness)
        harness.check_one_version(2)
        points.extend(harness.points)

    (tmp_path / "whole").mkdir()
    played(tmp_path / "whole", whole, "gw0", "gw1")
    assert len(points) > 30
    wrong, ends = [], set()
    for at, what in list(enumerate(points))[::2]:
        away_s = (1.0, 40.0, 3.0)[at // 2 % 3]  # shorter, and longer, than the lease
        folder = tmp_path / str(at)
        folder.mkdir()

        async def scene(harness: Harness, at: int = at, away_s: float = away_s) -> None:
            harness.kill_at = at
            await _second(harness)
            harness.counting = False
            assert harness.daemon is None, "it was not killed"
            await harness.pass_time(away_s)
            await harness.back()
            await harness.ends_in_one_version()
            ends.add(harness.sync.report().state)
            assert (await harness.over(harness.publish(3))).state is SyncState.DONE
            await harness.pass_time(0.5)
            harness.check_one_version(3)

        try:
            played(folder, scene, "gw0", "gw1")
        except (AssertionError, OrchestrRLError, Killed) as failure:
            wrong.append(f"killed at {at}: {what}, away {away_s}: {failure!r}")
    assert not wrong, "\n".join(wrong)
    assert ends == {SyncState.DONE, SyncState.ABORTED}


@pytest.mark.parametrize("fails", [0, 99])
def test_end_that_was_not_journalled_has_no_later_effect(
    tmp_path: Path, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full for a moment, so the next daemon finds the operation open. No engine is paused for that."""

    async def scene(harness: Harness) -> None:
        await harness.first()
        assert harness.journal is not None
        with monkeypatch.context() as patch:
            append = harness.journal.append

            def full(at_s: float, kind: EntryKind, subject: str, body: Mapping[str, Any]) -> int:
                if kind is EntryKind.SYNC_ENDED:
                    raise Permanent("database or disk is full")
                return append(at_s, kind, subject, body)

            patch.setattr(harness.journal, "append", full)
            for engine in harness.engines.values():
                engine.fails = fails
            assert (await harness.over(harness.publish(2))).state is (SyncState.ABORTED if fails else SyncState.DONE)
        for engine in harness.engines.values():
            engine.fails = 0
        if not fails:
            assert (await harness.over(harness.publish(3))).state is SyncState.DONE
        await harness.pass_time(2.0)
        harness.kill()
        reported = [len(peer.orders) for peer in harness.peers.values()]
        await harness.back()
        for _ in range(80):
            await harness.pass_time(0.25)
            assert harness.plane.fleet.barrier.state.lease is None
            assert all(harness.plane.fleet.barrier.state.serves(engine) for engine in harness.engines)
        orders = [order for peer, n in zip(harness.peers.values(), reported, strict=True) for order in peer.orders[n:]]
        assert not [order for order in orders if isinstance(order, InstallVersion | RestEngine)]
        assert all(report.over for report in harness.sync.history(0))
        harness.check_one_version(1 if fails else 3)

    played(tmp_path, scene)


def test_full_disk_at_any_moment_leaves_no_engine_with_a_wrong_version(tmp_path: Path) -> None:
    states = (SyncState.CARRYING, SyncState.FENCING, SyncState.INSTALLING, SyncState.VERIFYING)
    for state in states:
        folder = tmp_path / state
        folder.mkdir()

        async def scene(harness: Harness, state: SyncState = state) -> None:
            await harness.first()
            harness.publish(2)
            await harness.until(state)
            harness.full = True
            await harness.pass_time(8.0)
            harness.full = False
            await harness.ends_in_one_version()

        played(folder, scene)
