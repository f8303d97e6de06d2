"""Advice on slow syncs, and no advice on negligible times."""

from dataclasses import replace

import pytest
from fake_syncs import BEGAN_S, done, phases
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.weights.controller.advice import (
    LARGE_SHARE,
    LEAST_S,
    LEAST_SHARE,
    MOST,
    SENTENCES,
    SLOW_TRANSFER,
    Advice,
    advice,
    slow_by,
)
from orchestrrl.weights.controller.profile import BESIDE, PHASE_WORDS, profile
from orchestrrl.weights.controller.reports import TRANSFER, EdgeTime, EngineStatus, EngineSync, SyncPhase, SyncReport
from planner.model import EngineId

SECONDS = st.one_of(st.just(0.0), st.floats(1e-3, 1e3))


def found(*seconds: tuple[SyncPhase, float], report: SyncReport | None = None) -> tuple[Advice, ...]:
    took = done(7, *seconds)
    report = took if report is None else replace(report, phases=took.phases, ended_s=took.ended_s)
    return advice(profile(report))


def codes(*seconds: tuple[SyncPhase, float]) -> list[str]:
    return [each.code for each in found(*seconds)]


def test_dominating_offload_comes_first() -> None:
    """The offload took 227 of 231 s, the transfer 1.7 s and loading 1.5 s."""
    told = found((SyncPhase.OFFLOAD, 227.3), (SyncPhase.PHASE_A, 1.7), (SyncPhase.INSTALL, 1.5))
    assert [each.code for each in told] == ["offload"]
    assert told[0].text.startswith("trainer offload takes 227 s, 99 % of the whole: ")
    assert "optimizer" in told[0].text


@given(st.dictionaries(st.sampled_from(SyncPhase), SECONDS, min_size=1))
def test_advice_covers_exactly_the_significant_phases(took: dict[SyncPhase, float]) -> None:
    counted = {phase: seconds for phase, seconds in took.items() if phase not in BESIDE}
    whole_s, transfer_s = sum(counted.values()), sum(counted.get(phase, 0.0) for phase in TRANSFER)
    told = found(*took.items())
    for each in told:
        assert each.seconds >= LEAST_S
        assert each.share >= LEAST_SHARE
        assert 0 < each.share <= 1 + 1e-9
    of_phases = [SyncPhase(each.code) for each in told if each.code in set(SyncPhase)]
    assert not set(of_phases) & (TRANSFER | BESIDE)
    assert len(of_phases) <= MOST
    shares = [each.share for each in told if each.code in set(SyncPhase)]
    assert shares == sorted(shares, reverse=True)
    others = {phase: seconds for phase, seconds in counted.items() if phase not in TRANSFER}
    longest = max(others, key=lambda phase: others[phase], default=None)
    least_s = max(transfer_s, LEAST_S, whole_s * LEAST_SHARE) * 1.001
    if longest is not None and others[longest] > least_s:
        assert others[of_phases[0]] == pytest.approx(others[longest])
    for phase, seconds in others.items():
        if seconds < min(transfer_s, whole_s * LARGE_SHARE) * 0.999:
            assert phase not in of_phases


@pytest.mark.parametrize("phase", sorted(SENTENCES))
def test_each_phase_has_a_sentence_with_a_remedy(phase: SyncPhase) -> None:
    (told,) = found((phase, 8.0), (SyncPhase.PHASE_B, 2.0))
    assert told.code == phase
    assert told.text.startswith(f"{PHASE_WORDS[phase]} takes 8 s, 80 % of the whole: ")
    assert len(told.text) > 80


def test_gather_advice_has_the_copy_rate() -> None:
    (told,) = found((SyncPhase.GATHER, 8.0), (SyncPhase.PHASE_B, 2.0))
    assert "0.25 GB/s into the peer's folder" in told.text


def gap(seconds: float, *after: SyncPhase) -> tuple[Advice, ...]:
    """Return advice on one second of staging, a gap, and one second of each phase in `after`."""
    took = (
        *phases((SyncPhase.GATHER, 1.0)),
        *phases(*((phase, 1.0) for phase in after), began_s=BEGAN_S + 1.0 + seconds),
    )
    return advice(profile(replace(done(), phases=took, ended_s=took[-1].ended_s)))


def test_gap_between_phases_gets_advice() -> None:
    (told,) = gap(7.0, SyncPhase.PUBLISH, SyncPhase.PHASE_A)
    assert (told.code, told.seconds) == ("between", pytest.approx(7.0))
    assert told.text.startswith("7 s, 70 % of the whole, pass after gather outside any phase: ")
    assert "the trainer's peer was not attached" in told.text
    assert "daemon's log" in gap(7.0, SyncPhase.PHASE_A)[-1].text
    assert "between" not in [each.code for each in gap(0.09, SyncPhase.PHASE_A)]
    assert "between" not in [each.code for each in gap(0.9, SyncPhase.PHASE_A, SyncPhase.PHASE_B, SyncPhase.RESUME)]


def test_every_other_phase_than_transfer_and_unawaited_ones_has_a_sentence() -> None:
    assert set(SENTENCES) == set(SyncPhase) - TRANSFER - BESIDE


def test_advice_respects_thresholds() -> None:
    assert codes((SyncPhase.INSTALL, LEAST_S * 0.99), (SyncPhase.PHASE_A, 0.01)) == []
    assert codes((SyncPhase.INSTALL, LEAST_S * 1.01), (SyncPhase.PHASE_A, 0.01)) == ["install"]
    transfer = (SyncPhase.PHASE_A, 1.0)
    assert codes(transfer, (SyncPhase.INSTALL, 0.3)) == []  # below a quarter, and below the transfer
    assert codes(transfer, (SyncPhase.INSTALL, 0.4)) == ["install"]
    many = [(phase, 1.0) for phase in SENTENCES]
    assert codes(*many) == [phase.value for phase in list(SENTENCES)[:MOST]]


def edge(src: str, dst: str, times: float) -> EdgeTime:
    return EdgeTime(src, dst, "B", 10**9, times, 1.0)


@pytest.mark.parametrize(
    ("edges", "of", "code", "named"),
    [
        ([edge("t", "g0", 1.1), edge("t", "g1", 1.0)], 2, "slow_between", "between waves"),
        ([edge("t", "g0", 3.0), edge("t", "g1", 1.0)], 2, "slow_edge", "t -> g0"),
        # g1 to g3 wait for bytes that g0 receives slowly
        ([edge("g0", "g1", 3.0), edge("t", "g0", 3.0), edge("g1", "g3", 3.0)], 9, "slow_edge", "t -> g0"),
        ([edge("t", f"g{n}", 2.0) for n in range(4)] + [edge("u", "g9", 1.0)], 9, "slow_peer", "from t"),
        ([edge(f"t{n}", "g0", 2.0) for n in range(4)] + [edge("t0", "g9", 1.0)], 9, "slow_peer", "to g0"),
        ([edge(f"t{n}", f"g{n}", 2.0) for n in range(4)], 4, "slow_everywhere", "2 times"),
        ([edge(f"t{n}", f"g{n}", 2.0) for n in range(4)], 90, "slow_everywhere", "weights.rate_share"),
        ([edge("t", "g0", 2.0), edge("t", "g1", 2.0)], 2, "slow_everywhere", "2 times"),  # all edges, from one source
        ([EdgeTime("t", "g0", "B", 10**4, 0.015, 1e-6)], 9, "slow_between", "small pieces"),
        ([edge("g0", "g1", 2.0), edge("g1", "g0", 2.0)], 9, "slow_everywhere", "2 times"),  # edges of two shards
    ],
)
def test_slow_transfer_names_its_cause(edges: list[EdgeTime], of: int, code: str, named: str) -> None:
    report = replace(done(), slowest=tuple(edges), edges=of)
    assert slow_by(report)[0] == code
    assert named in slow_by(report)[1]
    slow = found((SyncPhase.PHASE_A, 4.0), report=replace(report, estimate_s=2.0, mended_edges=1))
    assert [each.code for each in slow] == [code]
    assert slow[0].text.startswith("the transfer takes 4 s, 2 times its estimate (edges that broke on the way: 1): ")


def test_transfer_as_planned_gets_no_advice() -> None:
    report = replace(done(), slowest=(edge("t", "g0", 3.0),), estimate_s=4.0 / SLOW_TRANSFER * 1.01)
    assert found((SyncPhase.PHASE_A, 4.0), report=report) == ()
    assert found((SyncPhase.PHASE_A, 4.0), report=replace(report, estimate_s=0.0)) == ()  # a backend without a plan


def test_slowest_engine_is_named_if_all_others_wait_for_it() -> None:
    def installed(*seconds: float) -> str:
        engines = tuple(
            EngineStatus(EngineId(f"e{n}"), EngineSync.SERVES, install_s=each) for n, each in enumerate(seconds)
        )
        (told,) = found((SyncPhase.INSTALL, 8.0), report=replace(done(), engines=engines))
        return told.text

    assert "e1 takes 8 s, the others at most half of that" in installed(2.0, 8.0, 3.0)
    assert "read a whole checkpoint" in installed(7.0, 8.0, 3.0)
    assert "read a whole checkpoint" in installed(8.0, 1.0)  # with two engines neither is an outlier
