"""Random faults at random times: serving engines always have the version of the pause barrier, and all end with one
version."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st
from weights_harness import Harness, played

from orchestrrl.weights.controller.reports import SyncState

_WHEN = st.floats(0.0, 12.0).map(lambda at_s: round(at_s, 1))
_FAULT = st.one_of(
    st.tuples(st.just("peer"), st.sampled_from(("p0", "p1", "p2", "t")), st.sampled_from((0.3, 2.0, 9.0))),
    st.tuples(st.just("engine"), st.sampled_from(("e0", "e1", "e2")), st.sampled_from((0.3, 3.0))),
    st.tuples(st.just("fails"), st.sampled_from(("e0", "e1", "e2")), st.just(1)),
    st.tuples(st.just("spoils"), st.sampled_from(("e0", "e1", "e2")), st.just(2)),
    st.tuples(st.just("rots"), st.sampled_from(("p0", "p1", "p2")), st.just(1)),
    st.tuples(st.just("stalls"), st.sampled_from(("p0", "p1", "p2", "t")), st.sampled_from((1.0, 6.0))),
    st.tuples(st.just("daemon"), st.just(""), st.sampled_from((0.5, 4.0))),
    st.tuples(st.just("expires"), st.just(""), st.just(0)),
    st.tuples(st.just("publish"), st.just(""), st.just(0)),
    st.tuples(st.just("restless"), st.just(""), st.just(1)),
)


def _strikes(harness: Harness, kind: str, whom: str, amount: float) -> None:
    match kind:
        case "peer":
            harness.peer(whom).die()
            harness.later(amount, harness.peer(whom).come_back)
        case "engine":
            engine = harness.engine(whom)
            engine.alive = False
            harness.later(amount, lambda: harness.restart(whom))
        case "fails" | "spoils":
            harness.engine(whom).fails = int(amount)
            harness.engine(whom).spoils = kind == "spoils"
        case "rots":
            harness.peer(whom).rots = int(amount)
        case "stalls":
            harness.peer(whom).stalls = True
            harness.later(amount, lambda: setattr(harness.peer(whom), "stalls", False))
        case "daemon":
            harness.kill()
            harness.later(amount, lambda: harness.start() if harness.daemon is None else None)
        case "expires":
            harness.fence.expire()
        case "restless":
            harness.fence.refuses = int(amount)


@given(st.lists(st.tuples(_WHEN, _FAULT), min_size=1, max_size=5), st.booleans())
def test_faults_end_with_one_version(faults: list[tuple[float, tuple[str, str, float]]], has_gateways: bool) -> None:
    async def scene(harness: Harness) -> None:
        harness.fence.manned = has_gateways
        await harness.pass_time(0.5)
        await harness.report(harness.publish(1))
        await harness.pass_time(1.0)
        version = 2
        harness.publish(version)
        began_s = harness.clock.now_s()
        for at_s, (kind, whom, amount) in sorted(faults):
            while harness.clock.now_s() < began_s + at_s:
                await harness.pass_time(0.1)
            if kind == "publish" and harness.daemon is not None:
                version += 1
                harness.publish(version)
            else:
                _strikes(harness, kind, whom, amount)
        await harness.settled()
        done = [report.version for report in harness.sync.history(0) if report.state is SyncState.DONE]
        harness.check_one_version(max(done))
        for engine in harness.engines.values():
            engine.fails = 0
        for peer in harness.peers.values():
            peer.rots = 0
        harness.fence.refuses = 0
        report = await harness.report(harness.publish(version + 1))
        assert report.state is SyncState.DONE, report
        harness.check_one_version(version + 1)

    with TemporaryDirectory() as folder:
        played(Path(folder), scene)
