"""Whatever goes wrong, and whenever: engines that serve have what the pause barrier says, and all end with one
version."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st
from weights_house import House, played

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


def _strikes(house: House, kind: str, whom: str, amount: float) -> None:
    match kind:
        case "peer":
            house.peer(whom).die()
            house.later(amount, house.peer(whom).come_back)
        case "engine":
            engine = house.engine(whom)
            engine.alive = False
            house.later(amount, lambda: house.restart(whom))
        case "fails" | "spoils":
            house.engine(whom).fails = int(amount)
            house.engine(whom).spoils = kind == "spoils"
        case "rots":
            house.peer(whom).rots = int(amount)
        case "stalls":
            house.peer(whom).stalls = True
            house.later(amount, lambda: setattr(house.peer(whom), "stalls", False))
        case "daemon":
            house.kill()
            house.later(amount, lambda: house.start() if house.daemon is None else None)
        case "expires":
            house.fence.expire()
        case "restless":
            house.fence.refuses = int(amount)


@given(st.lists(st.tuples(_WHEN, _FAULT), min_size=1, max_size=5), st.booleans())
def test_it_ends_with_one_version(faults: list[tuple[float, tuple[str, str, float]]], has_gateways: bool) -> None:
    async def scene(house: House) -> None:
        house.fence.manned = has_gateways
        await house.pass_time(0.5)
        await house.report(house.publish(1))
        await house.pass_time(1.0)
        version = 2
        house.publish(version)
        began_s = house.clock.now_s()
        for at_s, (kind, whom, amount) in sorted(faults):
            while house.clock.now_s() < began_s + at_s:
                await house.pass_time(0.1)
            if kind == "publish" and house.daemon is not None:
                version += 1
                house.publish(version)
            else:
                _strikes(house, kind, whom, amount)
        await house.settled()
        done = [report.version for report in house.sync.history(0) if report.state is SyncState.DONE]
        house.check_one_version(max(done))
        for engine in house.engines.values():
            engine.fails = 0
        for peer in house.peers.values():
            peer.rots = 0
        house.fence.refuses = 0
        report = await house.report(house.publish(version + 1))
        assert report.state is SyncState.DONE, report
        house.check_one_version(version + 1)

    with TemporaryDirectory() as folder:
        played(Path(folder), scene)
