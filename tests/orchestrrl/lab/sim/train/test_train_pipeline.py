"""Tests of the pipeline schedule against closed forms."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.sim.train.stages import PipelineOp, PipelineSchedule, Stages, forward_only, order, run

ranks = st.integers(1, 6)
seconds = st.floats(0.01, 2.0)


def scheduled(stages: Stages, ranks: int, micro: int, chunks: int = 1) -> PipelineSchedule:
    return run(order(ranks, micro, chunks), stages, micro)


def even(count: int, forward_s: float, backward_s: float, send_s: float = 0.0) -> Stages:
    return Stages(np.outer([forward_s, backward_s], np.ones(count)), send_s)


@given(ranks, st.integers(1, 24), seconds, seconds)
def test_bubble_of_even_stages_matches_closed_form(p: int, m: int, forward_s: float, backward_s: float) -> None:
    """The bubble is the fraction (p - 1) / (m + p - 1), also with fewer micro-batches than ranks."""
    total_s = scheduled(even(p, forward_s, backward_s), p, m).seconds
    assert 1 - m * (forward_s + backward_s) / total_s == pytest.approx((p - 1) / (m + p - 1))


@given(st.integers(2, 5), st.integers(1, 5), st.integers(2, 4), seconds)
def test_interleaving_divides_the_bubble(p: int, groups: int, chunks: int, forward_s: float) -> None:
    """The bubble is (p - 1) / (chunks * m) of the work (Narayanan et al., section 2.2.2)."""
    m, backward_s = groups * p, 2 * forward_s
    total_s = scheduled(even(p * chunks, forward_s, backward_s), p, m, chunks).seconds
    work_s = m * chunks * (forward_s + backward_s)
    assert (total_s - work_s) / work_s == pytest.approx((p - 1) / (chunks * m))


@given(ranks, st.integers(1, 8), st.data())
def test_schedule_of_uneven_stages_is_within_bounds(p: int, m: int, data: st.DataObject) -> None:
    each = st.lists(seconds, min_size=p, max_size=p)
    stages = Stages(np.array([data.draw(each), data.draw(each)]))
    total_s, both = scheduled(stages, p, m).seconds, stages.pass_s.sum(axis=0)
    before_s = np.cumsum(both) - both  # the passes of the stages before it
    assert total_s >= (before_s + m * both).max() - 1e-9
    assert total_s <= (m + p - 1) * stages.pass_s.max(axis=1).sum() + 1e-9


@given(ranks, st.integers(1, 4), st.integers(1, 3), st.floats(0, 0.5), st.booleans())
def test_every_pass_runs_once_after_its_inputs(p: int, groups: int, chunks: int, send_s: float, blocks: bool) -> None:
    m, chunks = groups * p, chunks if p > 1 else 1
    count = p * chunks
    stages = replace(even(count, 1.0, 2.0, send_s), blocks=blocks)
    found = scheduled(stages, p, m, chunks)
    assert {op for ops in found.ops for op in ops} == {
        PipelineOp(side, stage, micro) for side in (0, 1) for stage in range(count) for micro in range(m)
    }
    (forward, backward), (forward_end, backward_end) = found.begin_s, found.end_s
    assert np.all(forward[1:] >= forward_end[:-1] + send_s - 1e-9)
    assert np.all(backward[:-1] >= backward_end[1:] + send_s - 1e-9)
    assert np.all(backward[-1] >= forward_end[-1] - 1e-9)
    for rank in range(p):
        begin_s, end_s = found.begin_s[:, rank::p].ravel(), found.end_s[:, rank::p].ravel()
        turn = np.argsort(begin_s)
        assert np.all(begin_s[turn][1:] >= end_s[turn][:-1] - 1e-9)


@given(ranks, st.integers(1, 12), st.floats(0, 0.3), st.floats(0, 0.3))
def test_slower_messages_never_help(p: int, m: int, send_s: float, more_s: float) -> None:
    slow, fast = (scheduled(even(p, 1.0, 2.0, each), p, m).seconds for each in (send_s + more_s, send_s))
    assert slow >= fast - 1e-9


def test_first_forward_waits_for_parameters() -> None:
    stages = even(2, 1.0, 2.0)
    gathered = replace(stages, gathered_s=np.array([1.5, 1.5]))
    assert scheduled(gathered, 2, 4).seconds == pytest.approx(scheduled(stages, 2, 4).seconds + 0.5)


def test_interleaving_requires_whole_groups() -> None:
    with pytest.raises(ValueError, match="interleaving needs a multiple of 4 micro-batches, got 6"):
        order(4, 6, 2)


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(1, 1, 4), (4, 1, 6), (4, 2, 8), (2, 4, 6)])
def test_forward_passes_fill_the_pipeline_once(ranks: int, chunks: int, micro_batches: int) -> None:
    """Filling takes one stage fewer than there are ranks; interleaved stages are shorter."""
    stages = even(ranks * chunks, 1.0, 1.0)
    found = run(forward_only(order(ranks, micro_batches, chunks)), stages, micro_batches)
    assert found.seconds == micro_batches * chunks + ranks - 1
    assert found.end_s[1].max() == 0
