"""Tests of the limits on moves: requests do not move back and forth, and no engine receives too many."""

from collections import Counter
from dataclasses import replace

import pytest
from balance_builders import running
from decoding_fleet import DecodingFleet
from hypothesis import given
from hypothesis import strategies as st

from balancer.balance import BalanceDecision, BalanceSituation, decide_balance
from balancer.load_index import Worker
from balancer.load_index_moves import decide
from balancer.move_limits import LastMoves, MoveLimits
from orchestrrl.core.config.schema import FastSettings
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.daemon.configuration import parse_config
from planner.model import EngineId, FastPolicy, Mode, RequestId, RequestState, Snapshot

POLICIES = (FastPolicy.PACKING, FastPolicy.PAPER)
seeds = st.integers(0, 10**6)


def eager(policy: FastPolicy, **changes: object) -> FastSettings:
    return FastSettings(policy=policy, theta=0.0, tolerance=0.0, max_moves_per_request=100).model_copy(update=changes)


def decided(fleet: DecodingFleet, settings: FastSettings, **known: object) -> BalanceDecision:
    fleet.iterate(1)
    snapshot = fleet.snapshot(1.0)
    return decide_balance(snapshot, settings, replace(fleet.situation(snapshot), **known))  # type: ignore[arg-type]


@given(seeds, st.sampled_from(POLICIES), st.sampled_from([0.0, 3.0, 10.0]))
def test_moved_request_rests(seed: int, policy: FastPolicy, rest_s: float) -> None:
    """Over a whole step with a tick per second, two moves of a request are at least its rest apart."""
    fleet, last_moves, now_s = DecodingFleet(seed, crowded=True), LastMoves(), 0.0
    moved_s: dict[RequestId, float] = {}
    settings = eager(policy, rest_after_move_s=rest_s)
    while fleet.busy:
        fleet.iterate(20)
        now_s += 1.0
        snapshot = fleet.snapshot(now_s)
        situation = replace(fleet.situation(snapshot), moved_s=last_moves.within(rest_s, now_s))
        for move in decide_balance(snapshot, settings, situation).moves:
            assert now_s - moved_s.get(move.request, -rest_s) >= rest_s
            moved_s[move.request] = now_s
            one = fleet.take_out(move)
            assert one is not None
            fleet.put(move, one)
            last_moves.moved(now_s, [move.request])


def test_requests_on_stalled_engines_do_not_rest() -> None:
    snapshot = _stalled()
    lately = {request.id: 99.5 for request in snapshot.requests}
    settings = eager(FastPolicy.PAPER, rest_after_move_s=10.0)
    at_rest = decide_balance(snapshot, settings, BalanceSituation(Mode.ACT, moved_s=lately))
    assert {move.from_engine for move in at_rest.moves} == {"e0"}
    well = replace(snapshot, engines=tuple(replace(one, decode_tokens_per_s=100.0) for one in snapshot.engines))
    assert decide_balance(well, settings, BalanceSituation(Mode.ACT)).moves != ()
    assert decide_balance(well, settings, BalanceSituation(Mode.ACT, moved_s=lately)).moves == ()


def _stalled() -> Snapshot:
    """Return a fleet in which e0 has all the requests and decodes no tokens."""
    fleet = next(fleet for fleet in map(DecodingFleet, range(1000)) if _has_work(fleet))
    snapshot = fleet.snapshot(100.0)
    engines = tuple(replace(one, decode_tokens_per_s=0.0 if one.id == "e0" else 100.0) for one in snapshot.engines)
    return replace(snapshot, engines=engines)


def _has_work(fleet: DecodingFleet) -> bool:
    first, *others = (len(decoder.running) for decoder in fleet.decoders.values())
    return first >= 4 and not any(others)


def test_old_moves_are_forgotten() -> None:
    last = LastMoves()
    last.moved(10.0, [RequestId("a")])
    last.moved(14.0, [RequestId("c")])
    assert last.within(5.0, 14.9) == {"a": 10.0, "c": 14.0}
    assert last.within(5.0, 15.0) == {"c": 14.0}
    assert last.within(100.0, 15.0) == {"c": 14.0}


@given(seeds, st.sampled_from(POLICIES), st.integers(1, 3), st.integers(1, 6))
def test_moves_to_one_engine_are_limited(seed: int, policy: FastPolicy, to_engine: int, in_all: int) -> None:
    settings = eager(policy, max_moves_to_engine=to_engine, max_moves_per_tick=in_all)
    moves = decided(DecodingFleet(seed, crowded=True), settings).balance.moves
    coming = Counter(move.to_engine for move in moves if move.state is RequestState.RUNNING)
    assert len(moves) <= in_all
    assert max(coming.values(), default=0) <= to_engine


@given(seeds, st.sampled_from(POLICIES), st.booleans())
def test_last_request_does_not_move_to_an_idle_engine(seed: int, policy: FastPolicy, told: bool) -> None:
    """The engines are equal, so the move has no gain."""
    fleet = DecodingFleet(seed, crowded=True, told=told)
    fleet.paces = dict.fromkeys(fleet.paces, 1)
    fleet.iterate(1)
    held = {engine: len(one.running) + len(one.waiting) for engine, one in fleet.decoders.items()}
    snapshot = fleet.snapshot(1.0)
    for move in decide_balance(snapshot, eager(policy), fleet.situation(snapshot)).balance.moves:
        alone = held[move.from_engine] == 1 and held[move.to_engine] == 0
        assert not (alone and move.state is RequestState.RUNNING)
        held[move.from_engine] -= 1
        held[move.to_engine] += 1


def test_last_request_leaves_a_stalled_engine() -> None:
    alone = Worker(EngineId("e0"), running(("r0", 10)), (), 1000, 900, 8, 0.0)
    empty = Worker(EngineId("e1"), (), (), 1000, 1000, 8, None)
    restraint = MoveLimits((alone, empty), None, max_to_engine=1, keep_last=True)
    assert [move.request for move in decide(0.0, (alone, empty), room=restraint).moves] == ["r0"]
    well = (replace(alone, decode_tokens_per_s=1.0), empty)
    assert not MoveLimits(well, None, max_to_engine=1, keep_last=True).fits(
        RequestId("r0"), EngineId("e0"), EngineId("e1")
    )


def test_invalid_settings_are_all_reported_at_once() -> None:
    wrong = {
        "max_moves_to_engine": 0,
        "rest_after_move_s": -1.0,
        "tolerance": 1.0,
    }
    listing = "\n".join(f"  {name}: {value}" for name, value in wrong.items())
    with pytest.raises(ProblemFaults) as caught:
        parse_config(f"fast:\n{listing}\n")
    assert sorted(fault.split(":")[0] for fault in caught.value.faults) == sorted(f"fast.{name}" for name in wrong)
