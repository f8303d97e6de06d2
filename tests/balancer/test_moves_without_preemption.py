"""Tests that no move causes a preemption if lengths are known exactly, for any number of moves and any delay of their
arrival. The fleet is simulated by decoding_fleet.py."""

from dataclasses import dataclass, field

import pytest
from decoding_fleet import DecodingFleet
from hypothesis import given
from hypothesis import strategies as st

from balancer.balance import decide_balance
from balancer.kv_headroom import ARRIVES_LATE
from orchestrrl.core.config.schema import FastSettings
from planner.model import EngineId, FastPolicy, RequestState

BETWEEN_TICKS = 20  # iterations
POLICIES = (FastPolicy.PACKING, FastPolicy.PAPER)


@dataclass
class Went:
    """The engines with preemptions (after the arrival of a running request, and in total) and the moves of a run."""

    fleet: DecodingFleet
    moves: int = 0
    joined: dict[EngineId, int] = field(default_factory=dict)  # preemptions of an engine when the first one arrived

    @property
    def preemptions(self) -> int:
        return sum(self.fleet.preemptions.values())

    @property
    def preemptions_after_joining(self) -> int:
        return sum(self.fleet.preemptions[engine] - before for engine, before in self.joined.items())


def settings(policy: FastPolicy) -> FastSettings:
    return FastSettings(policy=policy, theta=0.0, tolerance=0.0, max_moves_per_request=100, headroom_tokens=0)


def went(fleet: DecodingFleet, policy: FastPolicy, late: int) -> Went:
    """Run to the end, with any number of moves per tick; each arrives `late` iterations after it left."""
    done, now_s = Went(fleet), 0.0
    while fleet.busy:
        fleet.iterate(BETWEEN_TICKS)
        now_s += 1.0
        snapshot = fleet.snapshot(now_s)
        decision = decide_balance(snapshot, settings(policy), fleet.situation(snapshot))
        left = [(move, one) for move in decision.balance.moves if (one := fleet.take_out(move)) is not None]
        fleet.iterate(late if left else 0)
        states = {move.request: move.state for move in decision.balance.moves}
        for move, one in left:
            fleet.put(move, one)
            done.moves += 1
            if states[move.request] is RequestState.RUNNING:
                done.joined.setdefault(move.to_engine, fleet.preemptions[move.to_engine])
    return done


seeds = st.integers(0, 10**6)
# An engine twice as fast as the clock that counts lateness runs two iterations per count.
lateness = st.integers(0, ARRIVES_LATE // 2)


@given(seeds, st.sampled_from(POLICIES), lateness, st.booleans())
def test_moves_of_running_requests_cause_no_preemption(seed: int, policy: FastPolicy, late: int, crowded: bool) -> None:
    assert went(DecodingFleet(seed, crowded=crowded), policy, late).preemptions_after_joining == 0


@given(seeds, st.sampled_from(POLICIES), lateness)
def test_moves_cause_no_preemption_in_a_fleet_without_any(seed: int, policy: FastPolicy, late: int) -> None:
    if went(DecodingFleet(seed), FastPolicy.NONE, 0).preemptions == 0:
        assert went(DecodingFleet(seed), policy, late).preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_fleets_have_enough_moves_to_test(policy: FastPolicy) -> None:
    runs = [went(DecodingFleet(seed, crowded=seed % 2 == 0), policy, 8) for seed in range(60)]
    assert sum(run.moves for run in runs) > 60
    assert sum(len(run.joined) for run in runs) > 20


def test_moves_by_current_context_alone_would_cause_preemptions() -> None:
    """The fleets are loaded enough for the properties above to be meaningful."""
    runs = [went(DecodingFleet(seed, told=False), FastPolicy.PAPER, 8) for seed in range(60)]
    assert sum(run.preemptions_after_joining for run in runs) > 0
