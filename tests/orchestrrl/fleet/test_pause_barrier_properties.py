"""Tests of the daemon's barrier in any order of events: calls of trainers; gateways that attach, detach, drain slowly
or lose results; and restarts of the daemon."""

import asyncio
import tempfile
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from barrier_harness import E0, E1, Harness
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.operations import PauseMode
from orchestrrl.fleet.pause_barrier import PauseRequest
from orchestrrl.fleet.pause_lease import LeaseEnd
from orchestrrl.fleet.reports import BarrierPhase

LONGEST_S = 60.0
GATEWAYS = st.sampled_from(["gw0", "gw1"])
EVENTS = st.one_of(
    st.tuples(
        st.just("pause"),
        st.sampled_from(PauseMode),
        st.sampled_from([5.0, 20.0, LONGEST_S]),
        st.sampled_from([0.0, 3.0]),
    ),
    st.tuples(st.just("renew"), st.sampled_from([5.0, LONGEST_S])),
    st.tuples(st.just("resume"), st.sampled_from([None, 1, 2, 3]), st.sampled_from([(), (E1,)])),
    st.tuples(st.just("break off")),
    st.tuples(st.just("wait"), st.sampled_from([0.25, 1.0, 4.0, 12.0])),
    st.tuples(st.just("leaves"), GATEWAYS),
    st.tuples(st.just("comes"), GATEWAYS),
    st.tuples(st.just("drains"), GATEWAYS, st.sampled_from([0.1, 2.0, 10.0])),
    st.tuples(st.just("answers get lost"), GATEWAYS, st.booleans()),
    st.tuples(st.just("daemon restarts")),
)


class Trainers:
    """The callers of the barrier, and the answers they received."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.asking: list[asyncio.Task[Any]] = []
        self.lease = "none"
        self.version: int | None = None  # as the daemon has accepted it

    def ask(self, question: Coroutine[Any, Any, None]) -> None:
        self.asking.append(asyncio.create_task(self._asked(question)))

    async def _asked(self, question: Coroutine[Any, Any, None]) -> None:
        with suppress(OrchestrRLError):
            await question

    async def pause(self, mode: PauseMode, lease_s: float, deadline_s: float) -> None:
        state = await self.harness.plane.fleet.barrier.pause(PauseRequest(mode, lease_s=lease_s, deadline_s=deadline_s))
        assert state.lease is not None
        self.lease = state.lease.id
        event("the fleet came to rest")
        attached = [gateway for gateway in self.harness.gateways.values() if gateway.attachment is not None]
        assert {gateway.phase for gateway in attached} <= {BarrierPhase.QUIET}
        assert {gateway.lease for gateway in attached} <= {self.lease}

    def stop_asking(self) -> None:
        for task in self.asking:
            if task.done() and not task.cancelled():
                task.result()  # violations that they found
            task.cancel()


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(EVENTS, max_size=16))
def test_no_engine_stays_frozen_and_quiet_is_reported_truthfully(events: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_play(Path(folder) / "journal.sqlite", events))


async def _play(path: Path, events: list[tuple[Any, ...]]) -> None:
    harness = Harness(path)
    harness.start()
    async with harness.running("gw0", "gw1"):
        trainers = Trainers(harness)
        for happening in events:
            await _happen(harness, trainers, happening)
            await harness.clock.advance(0.0)
            _check(harness)
        await harness.clock.advance(0.25)
        trainers.stop_asking()
        for gateway in harness.gateways.values():
            gateway.broken = False
        await harness.clock.advance(LONGEST_S + 1.0)  # no renewals
        assert harness.plane.fleet.barrier.state.phase is BarrierPhase.OPEN
        assert [gateway.phase for gateway in harness.gateways.values()] == [BarrierPhase.OPEN] * 2
        for gateway in harness.gateways.values():
            if gateway.attachment is None:
                gateway.come_back()
        await harness.clock.advance(2.0)
        state = harness.plane.fleet.barrier.state
        for gateway in harness.gateways.values():
            for route in gateway.routes:
                assert route.newest_policy_version == state.newest
                assert route.policy_version == state.versions.get(route.engine)
                assert route.draining == (route.policy_version != state.newest or route.engine in state.left_out)
    assert harness.journal is not None
    harness.journal.close()


async def _happen(harness: Harness, trainers: Trainers, happening: tuple[Any, ...]) -> None:
    match happening:
        case ("pause", mode, lease_s, deadline_s):
            trainers.ask(trainers.pause(mode, lease_s, deadline_s))
        case ("renew", lease_s):
            trainers.ask(_discarded(harness.plane.fleet.barrier.renew(trainers.lease, lease_s)))
        case ("resume", version, without):
            trainers.ask(_discarded(harness.plane.fleet.barrier.resume(trainers.lease, version, without)))
        case ("break off",):
            trainers.stop_asking()
        case ("wait", seconds):
            await harness.clock.advance(seconds)
        case ("leaves", name):
            harness.gateways[name].leave()
        case ("comes", name) if harness.gateways[name].attachment is None:
            harness.gateways[name].come_back()
        case ("drains", name, drains_s):
            harness.gateways[name].drains_s = drains_s
        case ("answers get lost", name, lost):
            harness.gateways[name].broken = lost
        case ("daemon restarts",):
            trainers.stop_asking()  # their connections break
            await harness.clock.advance(0.0)
            await harness.restart()


async def _discarded(question: Coroutine[Any, Any, Any]) -> None:
    await question


def _check(harness: Harness) -> None:
    state = harness.plane.fleet.barrier.state
    now_s = harness.clock.now_s()
    if state.lease is not None:
        assert now_s < state.lease.until_s <= now_s + LONGEST_S
    if state.opened is not None and state.opened.how is LeaseEnd.RESUMED and state.opened.policy_version is not None:
        assert state.newest == state.opened.policy_version
        assert state.serves(E0)
    for gateway in harness.gateways.values():
        if gateway.lease:
            assert gateway.until_s <= now_s + LONGEST_S
