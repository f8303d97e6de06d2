"""Weight syncs in a changing fleet: engines join and leave, peers get assignments, and weights that a trainer installs
itself are kept."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights_harness import FakePeer, Harness, played

from orchestrrl.fleet.pause_lease import PauseState
from orchestrrl.weights.controller.peer_hub import PeerState
from orchestrrl.weights.controller.reports import EngineSync, SyncState
from orchestrrl.weights.controller.serving import served
from orchestrrl.weights.controller.state import EngineNow
from orchestrrl.weights.model import (
    EngineAt,
    Peer,
    PeerLocation,
    PeerRole,
)
from orchestrrl.weights.orders import InstallVersion
from planner.model import EngineId, PeerId

E3, E4 = EngineId("e3"), EngineId("e4")


def serving_peer(harness: Harness, id: str, *hosts: str) -> FakePeer:
    peer = FakePeer(harness, PeerId(id), PeerRole.ENGINE, serves=hosts)
    harness.peers[peer.id] = peer
    peer.attach()
    return peer


def serves(harness: Harness, id: str) -> set[str]:
    """Return the engines of a peer as reported to the daemon."""
    assert harness.daemon is not None
    return {str(each.engine) for each in harness.daemon.hub.peers[PeerId(id)].peer.engines}


def installs(peer: FakePeer) -> list[int]:
    return [order.version for order in peer.orders if isinstance(order, InstallVersion)]


async def _begun(harness: Harness, version: int = 1) -> None:
    await harness.pass_time(1.0)
    assert (await harness.report(harness.publish(version))).state is SyncState.DONE
    await harness.pass_time(1.0)


async def _opened(
    harness: Harness, lease: str, version: int | None, without: tuple[EngineId, ...], reason: str
) -> None:
    task = harness.task(harness.fence.resume(lease, version, without, reason))
    await harness.pass_time(0.5)
    await task


# --- assignment of engines to peers


def test_engine_that_joins_with_the_version_is_not_installed_again(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        peer = serving_peer(harness, "p3", "h3")
        await _begun(harness)
        assert peer.folders.keys() == {1}, "a serving host has the fleet's version before an engine starts there"
        harness.come("e3", "h3", weights=1)
        await harness.pass_time(3.0)
        assert serves(harness, "p3") == {"e3"}
        assert installs(peer) == []
        harness.check_one_version(1)
        committed = harness.sync.book.fleet.committed
        assert committed is not None
        assert E3 in committed.has

    played(tmp_path, scene)


def test_engine_that_joins_with_other_weights_gets_the_version(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        peer = serving_peer(harness, "p3", "h3")
        await _begun(harness)
        harness.come("e3", "h3")
        await harness.pass_time(5.0)
        assert installs(peer) == [1]
        harness.check_one_version(1)

    played(tmp_path, scene)


def test_peer_keeps_an_assigned_engine_after_restarts_of_peer_and_daemon(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        peer = serving_peer(harness, "p3", "h3")
        harness.come("e3", "h3")
        await _begun(harness)
        peer.die()
        peer.come_back()
        harness.kill()
        await harness.pass_time(1.0)
        harness.start()
        await harness.pass_time(3.0)
        assert serves(harness, "p3") == {"e3"}
        assert (await harness.report(harness.publish(2))).state is SyncState.DONE
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_engine_that_leaves_soon_after_daemon_start_is_unassigned(tmp_path: Path) -> None:
    """A new daemon leaves unknown engines with their peers, but not engines that it has seen leave."""

    async def scene(harness: Harness) -> None:
        serving_peer(harness, "p3", "h3")
        harness.come("e3", "h3")
        await _begun(harness)
        assert serves(harness, "p3") == {"e3"}
        harness.leave("e3")
        await harness.pass_time(3.0)
        assert serves(harness, "p3") == set()

    played(tmp_path, scene)


def test_first_peer_by_id_gets_an_engine_and_its_holder_keeps_it(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        serving_peer(harness, "p4", "h3")
        first = serving_peer(harness, "p3", "h3")
        harness.come("e3", "h3")
        await _begun(harness)
        assert (serves(harness, "p3"), serves(harness, "p4")) == ({"e3"}, set())
        first.die()
        await harness.pass_time(8.0)  # longer than the patience
        assert serves(harness, "p4") == {"e3"}
        first.come_back()
        await harness.pass_time(3.0)
        assert (serves(harness, "p3"), serves(harness, "p4")) == (set(), {"e3"})
        assert first.engines == []
        await harness.settled()
        harness.check_one_version(1)

    played(tmp_path, scene)


def test_peer_started_with_an_engine_takes_it_from_an_assigned_peer(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        serving_peer(harness, "p3", "h3")
        engine = harness.come("e3", "h3")
        await _begun(harness)
        own = FakePeer(harness, PeerId("p9"), PeerRole.ENGINE, [engine], installed={E3: 1})
        harness.peers[own.id] = own
        own.attach()
        await harness.pass_time(3.0)
        assert (serves(harness, "p3"), serves(harness, "p9")) == (set(), {"e3"})

    played(tmp_path, scene)


def test_unserved_engine_is_quarantined_with_the_remedy(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        serving_peer(harness, "p3", "h3")
        harness.come("e4", "h4")
        await harness.pass_time(1.0)
        report = await harness.report(harness.publish(1))
        assert report.code == "some_quarantined"
        (stands,) = [each for each in report.engines if each.engine == E4]
        assert stands.state is EngineSync.QUARANTINED
        assert "no attached peer serves h4: start `orchestrrl sync peer --engines-here` on that host" in stands.detail
        serving_peer(harness, "p4", "h4")
        await harness.settled()
        harness.check_one_version(1)

    played(tmp_path, scene)


# --- during a sync


def test_sync_waits_for_a_redeployment_during_the_transfer(tmp_path: Path) -> None:
    """The sync waits for any time until the redeployment ends, and then uses the engines that exist."""

    async def scene(harness: Harness) -> None:
        peer = serving_peer(harness, "p3", "h3")
        harness.come("e3", "h3")
        await _begun(harness)
        peer.stalls = True  # keeps the transfer running
        sync = harness.publish(2)
        await harness.pass_time(1.0)
        harness.deploying = True
        harness.leave("e3")
        peer.stalls = False
        await harness.pass_time(90.0)  # longer than the limit of the fence
        report = harness.sync.report(sync)
        assert (report.state, report.detail) == (SyncState.PREPARED, "waiting: engines are being started or stopped")
        harness.come("e4", "h3", weights=1)
        harness.deploying = False
        report = await harness.report(sync)
        assert (report.state, report.code, report.attempt) == (SyncState.DONE, "done", 1)
        assert {str(each.engine) for each in report.engines} == {"e0", "e1", "e2", "e4"}
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_engine_that_joins_before_the_barrier_closes_takes_part(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        serving_peer(harness, "p3", "h3")
        await _begun(harness)
        sync = harness.publish(2, install="next_pause")
        await harness.pass_time(10.0)
        harness.come("e3", "h3", weights=1)
        harness.sync.install_now(sync, "")
        await harness.clock.advance(0.05)
        assert harness.sync.report(sync).detail == "waiting: peers are being assigned new engines"
        report = await harness.report(sync)
        assert (report.code, report.attempt, {each.state for each in report.engines}) == (
            "done",
            1,
            {EngineSync.SERVES},
        )
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_engines_that_leave_by_order_do_not_fail_an_attempt(tmp_path: Path) -> None:
    """One engine leaves with its host, another during its installation; neither costs an attempt."""

    async def scene(harness: Harness) -> None:
        await _begun(harness)
        harness.peer("p2").die()
        sync = harness.publish(2)
        harness.leave("e2")
        await harness.until(sync, SyncState.INSTALLING)
        harness.leave("e1")
        report = await harness.report(sync)
        assert (report.state, report.code, report.attempt) == (SyncState.DONE, "done", 1)
        await harness.pass_time(5.0)
        harness.check_one_version(2)
        assert harness.sync.status().quarantined == ()

    played(tmp_path, scene, attempts=1)


def test_failing_host_without_engines_does_not_block_a_sync(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        idle = serving_peer(harness, "p3", "h3")
        idle.stalls = True
        await harness.pass_time(1.0)
        sync = harness.publish(1)
        await harness.pass_time(1.0)
        idle.die()
        assert (await harness.report(sync)).state is SyncState.DONE
        harness.check_one_version(1)

    played(tmp_path, scene)


_CHANGE = st.one_of(
    st.tuples(st.just("leave"), st.sampled_from(("e0", "e1", "e3", "e4"))),
    st.tuples(st.just("come"), st.sampled_from(("h3", "h4"))),
    st.tuples(st.just("redeployment"), st.sampled_from(("h3", "h4"))),
    st.tuples(st.just("peer"), st.sampled_from(("p3", "p4", "p0"))),
    st.tuples(st.just("daemon"), st.just("")),
    st.tuples(st.just("publish"), st.just("")),
)


@given(st.lists(st.tuples(st.sampled_from((0.2, 0.7, 1.5, 3.0)), _CHANGE), min_size=2, max_size=8))
def test_random_changes_of_the_fleet_end_with_one_version(changes: list[tuple[float, tuple[str, str]]]) -> None:
    async def scene(harness: Harness) -> None:
        serving_peer(harness, "p3", "h3")
        serving_peer(harness, "p4", "h3", "h4")
        harness.come("e3", "h3")
        harness.come("e4", "h4")
        await _begun(harness)
        version, number = 1, 5
        for after_s, (kind, what) in changes:
            await harness.pass_time(after_s)
            closed = harness.fence.state.lease is not None
            if kind == "leave" and what in harness.engines and len(harness.engines) > 2 and not closed:
                harness.leave(what)
            elif kind == "come" and not closed:
                harness.come(f"e{number}", what)
                number += 1
            elif kind == "redeployment" and not closed and harness.fence.state.newest is not None:
                harness.come(f"e{number}", what, weights=harness.fence.state.newest)
                number += 1
            elif kind == "peer":
                harness.peer(what).die()
                harness.later(2.0, harness.peer(what).come_back)
            elif kind == "daemon" and harness.daemon is not None:
                harness.kill()
                harness.later(1.0, lambda: harness.start() if harness.daemon is None else None)
            elif kind == "publish" and harness.daemon is not None:
                version += 1
                harness.publish(version)
        await harness.settled()
        done = [report.version for report in harness.sync.history(0) if report.state is SyncState.DONE]
        harness.check_one_version(max(done))
        given = [each.engine for peer in harness.daemon.hub.peers.values() for each in peer.peer.engines]  # type: ignore[union-attr]
        assert sorted(given) == sorted(set(given)), "an engine has two peers"

    with TemporaryDirectory() as folder:
        played(Path(folder), scene)


# --- weights installed by a trainer itself


def test_weights_installed_by_a_trainer_are_kept(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await _begun(harness)
        lease = harness.fence.close_by("a trainer of its own way")
        for engine in harness.engines.values():
            engine.weights = 7
        for peer in harness.peers.values():  # as their engines report
            peer.installed.update({engine.id: 7 for engine in peer.engines})
        await _opened(harness, lease, 7, (), "its own")
        for peer in harness.peers.values():
            peer.introduce()
            peer.orders.clear()
        await harness.pass_time(20.0)
        assert [order for peer in harness.peers.values() for order in peer.orders] == []
        assert {engine.weights for engine in harness.engines.values()} == {7}
        assert all(harness.fence.state.serves(engine) for engine in harness.engines)
        assert harness.sync.book.fleet.version is None
        harness.kill()
        await harness.pass_time(1.0)
        harness.start()
        await harness.pass_time(10.0)
        assert {engine.weights for engine in harness.engines.values()} == {7}
        lease = harness.fence.close_by("somebody else")
        assert await harness.sync.before_resume(harness.clock.now_s() + 30) == (None, ())
        await _opened(harness, lease, None, (), "")
        await harness.report(harness.publish(8))
        harness.check_one_version(8)

    played(tmp_path, scene)


def test_failed_version_does_not_restore_one_older_than_the_fleets(tmp_path: Path) -> None:
    """Peers store version 1; the fleet had version 7 from a trainer, which peers cannot restore."""

    async def scene(harness: Harness) -> None:
        await _begun(harness)
        lease = harness.fence.close_by("a trainer of its own way")
        for engine in harness.engines.values():
            engine.weights = 7
        for peer in harness.peers.values():
            peer.installed.update({engine.id: 7 for engine in peer.engines})
        await _opened(harness, lease, 7, (), "its own")
        harness.engine("e1").fails, harness.engine("e1").spoils = 9, True
        report = await harness.report(harness.publish(8))
        assert report.state is SyncState.ABORTED or report.code == "some_quarantined"
        await harness.pass_time(2.0)
        assert 1 not in {engine.weights for engine in harness.engines.values()}

    played(tmp_path, scene, attempts=1)


def test_trainers_weights_replace_the_committed_version_while_a_sync_waits(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await _begun(harness)
        sync = harness.publish(2, install="next_pause")
        await harness.pass_time(10.0)
        await _another_way(harness)
        harness.sync.install_now(sync, "")
        await harness.until(sync, SyncState.INSTALLING)
        assert harness.sync.status().committed is None
        assert (await harness.report(sync)).state is SyncState.DONE
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_trainer_that_closes_the_barrier_again_keeps_its_weights(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await _begun(harness)
        await _another_way(harness, is_told=False)
        harness.fence._put(harness.fence.state.resumed("", harness.clock.now_s(), harness.now(), 7, ()))
        harness.fence.close_by("the same trainer")
        assert await harness.sync.before_resume(harness.clock.now_s() + 30.0) == (None, ())
        assert harness.sync.status().committed is None

    played(tmp_path, scene)


@pytest.mark.parametrize("told", [None, 1])
def test_barrier_without_versions_opens_with_the_committed_version(tmp_path: Path, told: int | None) -> None:
    """Engines that report its loss when queried are left out."""

    async def scene(harness: Harness) -> None:
        await _begun(harness)
        harness.fence._state = PauseState()  # as after an expired lease
        harness.fence.close_by("a trainer")
        harness.restart_unseen("e1")
        asked = harness.task(harness.sync.before_resume(harness.clock.now_s() + 30.0, told))
        await harness.pass_time(1.0)
        assert asked.result() == (1, ("e1",))

    played(tmp_path, scene)


async def _another_way(harness: Harness, *, is_told: bool = True) -> None:
    """Have a trainer install weights itself; the engines still report their previous version."""
    lease = harness.fence.close_by("a trainer of its own way")
    for engine in harness.engines.values():
        engine.weights, engine.unnamed = 7, True
    if is_told:
        await _opened(harness, lease, 7, (), "its own")


def test_unchanged_engines_keep_the_trainers_weights(tmp_path: Path) -> None:
    """Peers still report version 1 for them, which must not be restored."""

    async def scene(harness: Harness, *, is_manned: bool) -> None:
        harness.fence.manned = is_manned
        await _begun(harness)
        await _another_way(harness)
        for engine in harness.engines.values():
            engine.fails = 1
        assert (await harness.report(harness.publish(8))).state is SyncState.ABORTED
        await harness.pass_time(5.0)
        assert {id: e.weights for id, e in harness.engines.items()} == dict.fromkeys(harness.engines, 7)
        assert dict(harness.fence.state.versions) == dict.fromkeys(harness.engines, 7)
        assert all(harness.fence.state.serves(engine) for engine in harness.engines)
        assert (await harness.report(harness.publish(9))).state is SyncState.DONE
        harness.check_one_version(9)

    for is_manned in (True, False):
        folder = tmp_path / str(is_manned)
        folder.mkdir()
        played(folder, lambda harness, is_manned=is_manned: scene(harness, is_manned=is_manned), attempts=1)


def test_version_that_engines_wrongly_report_is_loaded_again(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await _begun(harness)
        await _another_way(harness)
        await harness.pass_time(2.0)
        assert (await harness.report(harness.publish(1))).state is SyncState.DONE
        harness.check_one_version(1)

    played(tmp_path, scene)


# --- the pure decision

_HOSTS = ("h0", "h1", "localhost", "h2", "h2")
_URLS = ("", "http://h0:1", "http://H1:5", "http://127.0.0.1:9", "http://h2:8000", "http://h2:8002", "http://h9")
_ENGINES = st.dictionaries(
    st.sampled_from("abcdef").map(EngineId), st.sampled_from(_URLS).map(lambda url: EngineNow("c", True, url))
)
_CLAIMS = st.dictionaries(st.sampled_from("abcdef").map(EngineId), st.booleans(), max_size=3)
_PEERS = st.lists(
    st.tuples(st.lists(st.sampled_from(_HOSTS), max_size=3), _CLAIMS, st.sampled_from((None, 1.0, 99.0))), max_size=4
)


def _states(told: list[tuple[list[str], dict[EngineId, bool], float | None]]) -> dict[PeerId, PeerState]:
    """Build states as in the hub: no engine belongs to two attached peers."""
    states, taken = {}, set()
    for number, (hosts, claims, gone_s) in enumerate(told):
        engines = tuple(
            EngineAt(e, f"http://old/{e}", None, is_given) for e, is_given in claims.items() if e not in taken
        )
        taken |= {each.engine for each in engines}
        id = PeerId(f"p{number}")
        peer = Peer(id, PeerRole.ENGINE, "", PeerLocation(), {}, engines, serves=tuple(hosts))
        states[id] = PeerState(peer, gone_s is None, 100.0 - (gone_s or 0.0))
    return states


@given(_ENGINES, _PEERS)
def test_assignment_serves_every_engine_at_most_once(
    engines: dict[EngineId, EngineNow], told: list[tuple[list[str], dict[EngineId, bool], float | None]]
) -> None:
    states = _states(told)
    found = served(engines, states, 100.0, 5.0)
    there = {id: state for id, state in states.items() if state.attached or 100.0 - state.last_report_s < 5.0}
    givers = [engine for wanted in found.wanted.values() for engine in wanted]
    assert len(givers) == len(set(givers))
    fixed = {each.engine for state in there.values() for each in state.peer.engines if not each.given}
    assert not fixed & set(givers)
    for id, wanted in found.wanted.items():
        others = {each.engine for other in there if other != id for each in there[other].peer.engines}
        assert not others & wanted.keys(), "assigned before its holder has dropped it"
        assert all(engines[engine].url == url for engine, url in wanted.items())
    held = {each.engine for state in there.values() for each in state.peer.engines}
    for engine in engines:
        assert engine in givers or engine in found.unserved or engine in held
    kept = served({}, states, 100.0, 5.0, gone=())
    for id, wanted in kept.wanted.items():
        assert wanted == {each.engine: each.url for each in states[id].peer.engines if each.given}
