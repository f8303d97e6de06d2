"""Tests of the lease as a state machine: any sequence of calls and times, against a model of a few lines."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.errors import Permanent
from orchestrrl.core.operations import FrozenRequests, PauseMode
from orchestrrl.fleet.pause_lease import PAUSE_STATE, LeaseEnd, PauseLease, PauseState
from orchestrrl.fleet.reports import BarrierPhase
from planner.model import EngineId

ENGINES = [EngineId(f"e{n}") for n in range(3)]


def lease(id: str, now_s: float, lasts_s: float, quiet_s: float | None = None) -> PauseLease:
    quiet_by_s = now_s + (lasts_s if quiet_s is None else quiet_s)
    return PauseLease(id, "trainer", PauseMode.KEEP, FrozenRequests.RECOMPUTE, now_s, now_s + lasts_s, quiet_by_s)


@dataclass
class Told:
    """A model of the state, independent of the code under test."""

    now_s: float = 0.0
    holder: str | None = None
    until_s: float = 0.0
    versions: dict[str, int] = field(default_factory=dict)
    newest: int | None = None
    source: str = ""
    without: set[str] = field(default_factory=set)
    leases: int = 0

    def brought(self, version: int | None, source: str) -> None:
        """Set the fleet's weights; None keeps the version."""
        if version not in (None, self.newest):
            self.newest, self.source = version, ""
        self.source = source or self.source

    def pass_time(self, by_s: float) -> None:
        self.now_s += by_s
        if self.holder is not None and self.now_s >= self.until_s:
            self.holder = None


ENGINE_SETS = st.sets(st.sampled_from(ENGINES))
WORDS = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.0, 40.0)),
    st.tuples(st.just("pause"), st.floats(1.0, 60.0)),
    st.tuples(st.just("rest"), st.sampled_from(["mine", "old"])),
    st.tuples(st.just("renew"), st.sampled_from(["mine", "old"]), st.floats(1.0, 60.0)),
    st.tuples(
        st.just("resume"),
        st.sampled_from(["mine", "old", ""]),
        st.one_of(st.none(), st.integers(0, 9)),
        ENGINE_SETS,
        st.sampled_from(["", "/a", "/b"]),
    ),
    st.tuples(st.just("abandon"), st.sampled_from(["mine", "old"])),
    st.tuples(st.just("set"), ENGINE_SETS.filter(bool), st.integers(0, 9), st.sampled_from(["", "/a", "/b"])),
    st.tuples(st.just("daemon restarts")),
    st.tuples(st.just("engine restarts"), st.sampled_from(ENGINES)),
)


@given(st.lists(WORDS, max_size=25))
def test_never_two_leases_and_versions_as_last_set(words: list[tuple[object, ...]]) -> None:
    state, reported = PauseState(), Told()
    for word in words:
        named = {"mine": reported.holder or "none", "old": "lease-0", "": ""}
        match word:
            case ("wait", float(by_s)):
                reported.pass_time(by_s)
                state = state.at(reported.now_s)
            case ("pause", float(lasts_s)):
                reported.leases += 1
                id = f"lease-{reported.leases}"
                if reported.holder is not None:
                    with pytest.raises(Permanent, match=f"held by lease {reported.holder} of trainer"):
                        state.paused(lease(id, reported.now_s, lasts_s))
                else:
                    state = state.paused(lease(id, reported.now_s, lasts_s))
                    reported.holder, reported.until_s = id, reported.now_s + lasts_s
            case ("rest", str(whose)):
                if whose == "mine" and reported.holder:
                    state = state.at_rest(named[whose])
                    assert state.phase is BarrierPhase.QUIET
                else:
                    with pytest.raises(Permanent):
                        state.at_rest(named[whose])
            case ("renew", str(whose), float(lasts_s)):
                if whose == "mine" and reported.holder:
                    state = state.renewed(named[whose], reported.now_s + lasts_s)
                    reported.until_s = max(reported.until_s, reported.now_s + lasts_s)
                else:
                    with pytest.raises(Permanent):
                        state.renewed(named[whose], reported.now_s + lasts_s)
            case ("resume", str(whose), version, set(without), str(source)):
                assert version is None or isinstance(version, int)
                if reported.holder and whose != "old":
                    state = state.resumed(named[whose], reported.now_s, ENGINES, version, without, "", source)
                    reported.holder = None
                    reported.brought(version, source)
                    if version is None:
                        reported.without |= without
                    else:
                        reported.without = set(without)
                        reported.versions |= dict.fromkeys(set(ENGINES) - without, version)
                else:
                    with pytest.raises(Permanent):
                        state.resumed(named[whose], reported.now_s, ENGINES, version, without)
            case ("abandon", str(whose)):
                if whose == "mine" and reported.holder:
                    state = state.abandoned(named[whose], reported.now_s, "because")
                    reported.holder = None
                else:
                    with pytest.raises(Permanent):
                        state.abandoned(named[whose], reported.now_s, "because")
            case ("set", set(engines), int(version), str(source)):
                state = state.with_versions(engines, version, source)
                reported.versions |= dict.fromkeys(engines, version)
                reported.without -= engines
                serving = {v for engine, v in reported.versions.items() if engine not in reported.without}
                if reported.newest not in serving or reported.newest == version:
                    reported.brought(version, source)
            case ("engine restarts", str(engine)):
                state = state.forgotten([EngineId(engine)])
                reported.versions.pop(engine, None)
                if reported.newest is not None:
                    reported.without.discard(engine)
            case ("daemon restarts",):
                state = PAUSE_STATE.validate_python(PAUSE_STATE.dump_python(state, mode="json")).at(reported.now_s)
        assert (state.lease.id if state.lease else None) == reported.holder
        assert state.lease is None or (state.lease.until_s == reported.until_s and reported.now_s < reported.until_s)
        assert state.versions == reported.versions
        assert (state.newest, state.newest_source) == (reported.newest, reported.source)
        for engine in ENGINES:
            serves = engine not in reported.without and reported.versions.get(engine) == reported.newest
            assert state.serves(engine) == serves
    assert state.at(reported.now_s + 61.0).phase is BarrierPhase.OPEN


def test_ended_lease_is_refused_with_its_end_time() -> None:
    state = PauseState().paused(lease("a", 0.0, 60.0)).at_rest("a").at(3661.0)
    assert state.opened is not None
    assert (state.opened.how, state.opened.at_s) == (LeaseEnd.EXPIRED, 60.0)
    with pytest.raises(Permanent, match=r"has already ended \(expired\); requests have continued since 00:01:00 UTC"):
        state.renewed("a", 4000.0)
    with pytest.raises(Permanent, match="lease b is unknown or ended long ago; the pause barrier is open"):
        state.resumed("b", 4000.0, [], None, [])
    with pytest.raises(Permanent, match="the pause barrier is open, so there is nothing to resume"):
        state.resumed("", 4000.0, [], None, [])


def test_version_may_decrease_and_left_out_engines_wait_for_their_own() -> None:
    state = PauseState().with_versions(ENGINES, 7)
    state = state.paused(lease("a", 0.0, 60.0)).resumed("a", 1.0, ENGINES, 5, [EngineId("e2")])
    assert (dict(state.versions), state.newest) == ({"e0": 5, "e1": 5, "e2": 7}, 5)
    assert [state.serves(engine) for engine in ENGINES] == [True, True, False]
    state = state.paused(lease("b", 2.0, 60.0)).resumed("b", 3.0, ENGINES, None, [])
    assert not state.serves(EngineId("e2")), "a pause without new weights changes nothing"
    assert not state.with_versions([EngineId("e2")], 6).serves(EngineId("e2"))
    assert state.with_versions([EngineId("e2")], 5).serves(EngineId("e2"))


def test_left_out_engines_wait_even_without_versions() -> None:
    state = PauseState().paused(lease("a", 0.0, 60.0)).resumed("a", 1.0, ENGINES, None, ENGINES[:1])
    state = state.paused(lease("b", 2.0, 60.0)).resumed("b", 3.0, ENGINES, None, ENGINES[1:2])
    assert [state.serves(engine) for engine in ENGINES] == [False, False, True]
    state = state.paused(lease("c", 4.0, 60.0)).resumed("c", 5.0, ENGINES, 1, [])
    assert all(map(state.serves, ENGINES))


def test_lease_expires_at_its_end() -> None:
    state = PauseState().paused(lease("a", 0.0, 60.0))
    assert [state.at(now_s).phase for now_s in (59.9, 60.0)] == [BarrierPhase.CLOSING, BarrierPhase.OPEN]


def test_version_set_engine_by_engine_is_the_fleets_after_the_last() -> None:
    state = PauseState().with_versions(ENGINES, 1)
    for engine in ENGINES[:2]:
        state = state.with_versions([engine], 2)
        assert (state.newest, state.serves(engine)) == (1, False)
    state = state.with_versions(ENGINES[2:], 2)
    assert (state.newest, [state.serves(engine) for engine in ENGINES]) == (2, [True] * 3)


@pytest.mark.parametrize(("lasts_s", "quiet_s"), [(10.0, 11.0), (10.0, 0.0), (-1.0, -1.0)])
def test_invalid_lease_is_rejected(lasts_s: float, quiet_s: float) -> None:
    with pytest.raises(ValueError, match="quiet_by_s must be after began_s"):
        lease("a", 0.0, lasts_s, quiet_s)


def test_state_from_before_weight_folders_is_read() -> None:
    state = PauseState().paused(lease("a", 0.0, 60.0)).resumed("a", 1.0, ENGINES, 3, [], "", "/shared/3")
    body = PAUSE_STATE.dump_python(state, mode="json")
    assert PAUSE_STATE.validate_python(body) == state
    del body["newest_source"], body["opened"]["weights_source"]
    old = PAUSE_STATE.validate_python(body)
    assert (old.newest, old.newest_source) == (3, "")


def test_weights_folder_is_kept_while_the_version_is_unchanged() -> None:
    state = PauseState().with_versions(ENGINES, 1, "/shared/1")
    assert state.with_versions(ENGINES[:1], 1).newest_source == "/shared/1", "an engine that was started later"
    assert state.with_versions(ENGINES[:1], 2, "/shared/2").newest_source == "/shared/1", (
        "the fleet still has version 1"
    )
    assert state.with_versions(ENGINES, 2).newest_source == ""
    state = state.paused(lease("a", 0.0, 60.0)).resumed("a", 1.0, ENGINES, None, [])
    assert state.newest_source == "/shared/1"
    state = state.paused(lease("b", 2.0, 60.0)).resumed("b", 3.0, ENGINES, None, [], "", "/shared/1b")
    assert (state.newest, state.newest_source) == (1, "/shared/1b")


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("weights_change", [False, True])
def test_versions_are_unknown_after_a_lease_expired_during_a_weight_change(weights_change: bool, quiet: bool) -> None:
    """An engine that was left out before remains so: it was not at rest for this lease."""
    known = PauseState().paused(lease("a", 0.0, 10.0)).resumed("a", 1.0, ENGINES, 7, [ENGINES[2]], weights_source="/w")
    changing = PauseLease(
        "b", "sync", PauseMode.KEEP, FrozenRequests.TAKEN_BACK, 2.0, 12.0, 12.0, weights_change=weights_change
    )
    state = known.paused(changing)
    state = (state.at_rest("b") if quiet else state).at(12.0)
    assert state.opened is not None
    assert state.opened.how is LeaseEnd.EXPIRED
    if weights_change and quiet:
        assert (state.versions, state.newest, state.newest_source) == ({}, None, "")
    else:
        assert (state.versions, state.newest, state.newest_source) == (known.versions, 7, "/w")
    assert [state.serves(engine) for engine in ENGINES] == [True, True, False]
    assert PAUSE_STATE.validate_python(PAUSE_STATE.dump_python(state, mode="json")) == state
