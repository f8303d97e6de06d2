"""Tests of circuits for gradients: they change if a window covers that; otherwise the shorter alternative is used."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.train.iteration import iteration
from orchestrrl.lab.sim.train.model import TrainJob, TrainLayout
from tests.orchestrrl.lab.sim.train.train_builders import MOE, Circuits, for_gradients, job, star

FOUR = Servers(4)
ACROSS = TrainLayout(tp=8, dp=2, pp=2)  # stages are two servers each: pipeline and gradients go between servers


def pipelined(tokens: float = 65536) -> TrainJob:
    return job(ACROSS, sequences=8, tokens=tokens)


def experts() -> TrainJob:
    """Return a job whose last backward pass sends until its end."""
    return job(TrainLayout(tp=8, dp=4, ep=16), model=MOE, sequences=16)


def test_window_hides_a_circuit_change() -> None:
    """The last backward pass of the first stage sends nothing after its input has arrived."""
    of = pipelined()
    changed, kept = (iteration(of, for_gradients(FOUR, 0.2, each)) for each in (0.0005, 1000.0))
    assert changed.parts_s["circuits"] == pytest.approx(0.0, abs=1e-9)
    assert changed.parts_s["dp"] < kept.parts_s["dp"] + kept.parts_s["circuits"]


def test_slow_circuit_change_is_not_made() -> None:
    kept, free = (iteration(experts(), for_gradients(FOUR, 0.2, each)) for each in (1000.0, 0.0))
    assert kept.seconds < 1000
    assert kept.parts_s["circuits"] > 0
    assert kept.parts_s["circuits"] == pytest.approx(kept.seconds - free.seconds)


def test_iteration_waits_for_circuits_if_gradients_have_no_path() -> None:
    """The iteration waits twice: after the last message of the backward pass and its compute, and before the first."""
    of = pipelined(2048)
    found, free = (iteration(of, for_gradients(FOUR, 1.0, each, apart=True)) for each in (0.5, 0.0))
    assert found.parts_s["circuits"] == pytest.approx(found.seconds - free.seconds)
    assert 0.98 < found.parts_s["circuits"] < 1.0
    with pytest.raises(ValueError, match="no path for the gradients of small"):
        iteration(of, Circuits(FOUR, {"": star(FOUR, apart=True)}))


@given(st.sampled_from([0.0, 0.001, 0.025, 0.3]), st.sampled_from([0.05, 0.5, 1.0]), st.booleans())
@settings(max_examples=20)
def test_slower_circuit_change_never_helps(reconfigures_s: float, share: float, moe: bool) -> None:
    of = experts() if moe else pipelined(4096)
    fast, slow = (iteration(of, for_gradients(FOUR, share, each)) for each in (reconfigures_s, reconfigures_s + 0.02))
    assert fast.seconds <= slow.seconds + 1e-9
    assert fast.parts_s["circuits"] <= slow.parts_s["circuits"] + 1e-9


def test_fabrics_without_circuits_never_wait() -> None:
    for kind in ("fat_tree", "rail_optimized", "oversubscribed"):
        assert iteration(pipelined(), build(kind, FOUR)).parts_s["circuits"] == 0.0
