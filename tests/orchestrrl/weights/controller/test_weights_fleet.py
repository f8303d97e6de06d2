"""Engines come and go, and versions with them: peers are told whom to serve, nobody is mourned who left by order, and
what a trainer brings in its own way stays."""

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
    """As the daemon has it."""
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


# --- who serves whom


def test_an_engine_that_comes_with_the_version_is_not_given_it_again(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        peer = serving_peer(harness, "p3", "h3")
        await _begun(harness)
        assert peer.folders.keys() == {1}, "who serves a host has the fleet's weights before an engine is started there"
        harness.come("e3", "h3", weights=1)
        await harness.pass_time(3.0)
        assert serves(harness, "p3") == {"e3"}
        assert installs(peer) == []
        harness.check_one_version(1)
        committed = harness.sync.book.fleet.committed
        assert committed is not None
        assert E3 in committed.has

    played(tmp_path, scene)


def test_one_that_comes_with_its_own_weights_is_brought_the_version(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        peer = serving_peer(harness, "p3", "h3")
        await _begun(harness)
        harness.come("e3", "h3")
        await harness.pass_time(5.0)
        assert installs(peer) == [1]
        harness.check_one_version(1)

    played(tmp_path, scene)


def test_who_was_told_of_an_engine_serves_it_after_its_restart_and_the_daemons(tmp_path: Path) -> None:
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


def test_an_engine_that_leaves_soon_after_the_daemon_came_is_served_no_longer(tmp_path: Path) -> None:
    """What a daemon that has just come does not know stays its peer's, what it has seen leave does not."""

    async def scene(harness: Harness) -> None:
        serving_peer(harness, "p3", "h3")
        harness.come("e3", "h3")
        await _begun(harness)
        assert serves(harness, "p3") == {"e3"}
        harness.leave("e3")
        await harness.pass_time(3.0)
        assert serves(harness, "p3") == set()

    played(tmp_path, scene)


def test_of_two_the_first_by_id_serves_it_and_keeps_it(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        serving_peer(harness, "p4", "h3")
        first = serving_peer(harness, "p3", "h3")
        harness.come("e3", "h3")
        await _begun(harness)
        assert (serves(harness, "p3"), serves(harness, "p4")) == ({"e3"}, set())
        first.die()
        await harness.pass_time(8.0)  # longer than its patience
        assert serves(harness, "p4") == {"e3"}
        first.come_back()
        await harness.pass_time(3.0)
        assert (serves(harness, "p3"), serves(harness, "p4")) == (set(), {"e3"})
        assert first.engines == []
        await harness.settled()
        harness.check_one_version(1)

    played(tmp_path, scene)


def test_a_peer_that_is_started_with_an_engine_has_it_from_who_was_told(tmp_path: Path) -> None:
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


def test_an_engine_that_nobody_serves_is_left_out_with_what_to_start(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        serving_peer(harness, "p3", "h3")
        harness.come("e4", "h4")
        await harness.pass_time(1.0)
        report = await harness.report(harness.publish(1))
        assert report.code == "some_quarantined"
        (stands,) = [each for each in report.engines if each.engine == E4]
        assert stands.state is EngineSync.QUARANTINED
        assert "no attached peer serves h4: start `orchestrrl sync peer --engines-here` there" in stands.detail
        serving_peer(harness, "p4", "h4")
        await harness.settled()
        harness.check_one_version(1)

    played(tmp_path, scene)


# --- while a version is on its way


def test_a_redeployment_while_bytes_are_on_their_way(tmp_path: Path) -> None:
    """The sync waits for it, however long it takes, and then takes the engines that there are."""

    async def scene(harness: Harness) -> None:
        peer = serving_peer(harness, "p3", "h3")
        harness.come("e3", "h3")
        await _begun(harness)
        peer.stalls = True  # so that it is still under way
        sync = harness.publish(2)
        await harness.pass_time(1.0)
        harness.deploying = True
        harness.leave("e3")
        peer.stalls = False
        await harness.pass_time(90.0)  # longer than the fence may take
        report = harness.sync.report(sync)
        assert (report.state, report.detail) == (SyncState.PREPARED, "waits: engines are being started or stopped")
        harness.come("e4", "h3", weights=1)
        harness.deploying = False
        report = await harness.report(sync)
        assert (report.state, report.code, report.attempt) == (SyncState.DONE, "done", 1)
        assert {str(each.engine) for each in report.engines} == {"e0", "e1", "e2", "e4"}
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_an_engine_that_comes_before_the_barrier_closes_takes_part(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        serving_peer(harness, "p3", "h3")
        await _begun(harness)
        sync = harness.publish(2, install="next_pause")
        await harness.pass_time(10.0)
        harness.come("e3", "h3", weights=1)
        harness.sync.install_now(sync, "")
        await harness.clock.advance(0.05)
        assert harness.sync.report(sync).detail == "waits: peers are being told of engines that have come"
        report = await harness.report(sync)
        assert (report.code, report.attempt, {each.state for each in report.engines}) == (
            "done",
            1,
            {EngineSync.SERVES},
        )
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_engines_that_left_by_order_are_not_lost(tmp_path: Path) -> None:
    """One that goes with its host, one in the middle of an install: no attempt is lost on either."""

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


def test_a_host_without_engines_that_fails_keeps_nobody_from_the_version(tmp_path: Path) -> None:
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
def test_whoever_comes_and_goes_it_ends_with_one_version(changes: list[tuple[float, tuple[str, str]]]) -> None:
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
        assert sorted(given) == sorted(set(given)), "an engine is two peers'"

    with TemporaryDirectory() as folder:
        played(Path(folder), scene)


# --- weights by another way


def test_what_a_trainer_brings_in_its_own_way_is_not_undone(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await _begun(harness)
        lease = harness.fence.close_by("a trainer of its own way")
        for engine in harness.engines.values():
            engine.weights = 7
        for peer in harness.peers.values():  # its engines say so
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


def test_a_version_that_fails_after_that_leaves_nobody_with_the_one_from_before_it(tmp_path: Path) -> None:
    """Peers have version 1; the fleet had 7 by another way, which nobody here can bring back."""

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


def test_what_a_trainer_brings_while_a_version_waits_is_the_fleets_until_that_is_installed(tmp_path: Path) -> None:
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


def test_a_trainer_that_closes_the_barrier_again_at_once_has_its_own_weights(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await _begun(harness)
        await _another_way(harness, is_told=False)
        harness.fence._put(harness.fence.state.resumed("", harness.clock.now_s(), harness.now(), 7, ()))
        harness.fence.close_by("the same trainer")
        assert await harness.sync.before_resume(harness.clock.now_s() + 30.0) == (None, ())
        assert harness.sync.status().committed is None

    played(tmp_path, scene)


@pytest.mark.parametrize("told", [None, 1])
def test_a_barrier_of_which_nobody_knows_any_version_is_opened_with_the_fleets(
    tmp_path: Path, told: int | None
) -> None:
    """Without engines that have lost it, as they say when they are asked."""

    async def scene(harness: Harness) -> None:
        await _begun(harness)
        harness.fence._state = PauseState()  # as when a lease ends by itself
        harness.fence.close_by("a trainer")
        harness.restart_unseen("e1")
        asked = harness.task(harness.sync.before_resume(harness.clock.now_s() + 30.0, told))
        await harness.pass_time(1.0)
        assert asked.result() == (1, ("e1",))

    played(tmp_path, scene)


async def _another_way(harness: Harness, *, is_told: bool = True) -> None:
    """Engines are given weights by a trainer itself, and go on saying that they have what they had before."""
    lease = harness.fence.close_by("a trainer of its own way")
    for engine in harness.engines.values():
        engine.weights, engine.unnamed = 7, True
    if is_told:
        await _opened(harness, lease, 7, (), "its own")


def test_engines_that_were_not_changed_go_on_by_what_another_brought(tmp_path: Path) -> None:
    """Peers take them for version 1, which nothing is done to bring back."""

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


def test_a_version_that_engines_still_say_they_have_is_loaded_again_after_that(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await _begun(harness)
        await _another_way(harness)
        await harness.pass_time(2.0)
        assert (await harness.report(harness.publish(1))).state is SyncState.DONE
        harness.check_one_version(1)

    played(tmp_path, scene)


# --- the decision alone

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
    """As the hub has them: no engine is two attached peers'."""
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
def test_no_engine_is_two_peers_and_who_can_be_served_is(
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
        assert not others & wanted.keys(), "given before who has it has let go of it"
        assert all(engines[engine].url == url for engine, url in wanted.items())
    held = {each.engine for state in there.values() for each in state.peer.engines}
    for engine in engines:
        assert engine in givers or engine in found.unserved or engine in held
    kept = served({}, states, 100.0, 5.0, gone=())
    for id, wanted in kept.wanted.items():
        assert wanted == {each.engine: each.url for each in states[id].peer.engines if each.given}
