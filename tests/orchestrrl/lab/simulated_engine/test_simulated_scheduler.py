"""The simulated scheduler, compared with a simple one that computes every step."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.simulated_engine.scheduler import EngineShape, Scheduler, decode_alone_s
from planner.model import RequestId

BLOCK_TOKENS = 4


@dataclass
class Plain:
    id: RequestId
    context_tokens: int
    to_generate: int
    blocks: int = 0


def step_by_step(shape: EngineShape, lengths: list[tuple[int, int]]) -> tuple[dict[RequestId, float], int]:
    """Return the finish time of each request and the preemptions, by the scheduler's rules, one step at a time."""

    def blocks(tokens: int) -> int:
        return -(-tokens // shape.block_tokens)

    def free() -> int:
        return shape.blocks - sum(r.blocks for r in running)

    waiting = [Plain(RequestId(f"r{i}"), context, new) for i, (context, new) in enumerate(lengths)]
    running: list[Plain] = []
    finish_s: dict[RequestId, float] = {}
    now_s, preemptions = 0.0, 0
    while waiting or running:
        preempted, index = False, 0
        while index < len(running):
            needed = blocks(running[index].context_tokens + 1)
            if needed - running[index].blocks <= free():
                running[index].blocks = max(running[index].blocks, needed)
                index += 1
                continue
            victim = running.pop()
            victim.blocks = 0
            waiting.insert(0, victim)
            preempted, preemptions = True, preemptions + 1
        prefill_tokens = 0
        while not (preempted and running) and waiting and len(running) < shape.max_num_seqs:
            needed = blocks(waiting[0].context_tokens + 1)
            if needed > free():
                break
            running.append(waiting.pop(0))
            running[-1].blocks = needed
            prefill_tokens += running[-1].context_tokens
        kv_tokens = sum(r.context_tokens for r in running)
        now_s += shape.alpha_s + shape.beta_s * len(running) + shape.gamma_s * kv_tokens
        now_s += shape.prefill_s_per_token * prefill_tokens
        for request in running:
            request.context_tokens += 1
            request.to_generate -= 1
            if request.to_generate == 0:
                finish_s[request.id] = now_s
        running = [r for r in running if r.to_generate > 0]
    return finish_s, preemptions


shapes = st.builds(
    EngineShape,
    alpha_s=st.just(0.01),
    beta_s=st.floats(0, 0.001),
    gamma_s=st.floats(0, 1e-4),
    max_num_seqs=st.integers(1, 6),
    kv_capacity_tokens=st.integers(8, 30).map(lambda blocks: blocks * BLOCK_TOKENS),
    prefill_s_per_token=st.floats(0, 1e-3),
    block_tokens=st.just(BLOCK_TOKENS),
)
steps = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 16)), min_size=1, max_size=12)


def submitted(shape: EngineShape, lengths: list[tuple[int, int]]) -> Scheduler:
    scheduler = Scheduler(shape)
    for index, (context_tokens, new_tokens) in enumerate(lengths):
        scheduler.submit(0.0, RequestId(f"r{index}"), context_tokens, new_tokens)
    return scheduler


@given(shapes, steps, st.lists(st.floats(0.001, 0.3), min_size=1, max_size=5))
def test_batched_steps_equal_single_steps(
    shape: EngineShape, lengths: list[tuple[int, int]], strides_s: list[float]
) -> None:
    expected_s, preemptions = step_by_step(shape, lengths)
    scheduler = submitted(shape, lengths)
    finish_s: dict[RequestId, float] = {}
    made = dict.fromkeys(expected_s, 0)
    until_s, turn = 0.0, 0
    while not scheduler.idle:
        until_s += strides_s[turn % len(strides_s)]
        turn += 1
        for progress in scheduler.advance(until_s):
            made[progress.id] += progress.tokens
            if progress.finished_s is not None:
                finish_s[progress.id] = progress.finished_s
    assert finish_s == pytest.approx(expected_s)
    assert made == {RequestId(f"r{i}"): new for i, (_, new) in enumerate(lengths)}
    assert scheduler.preemptions_total == preemptions
    assert scheduler.kv_used_tokens == 0


@given(shapes, steps)
def test_no_request_ends_earlier_than_alone(shape: EngineShape, lengths: list[tuple[int, int]]) -> None:
    finished = submitted(shape, lengths).advance(1e9)
    for progress in finished:
        context_tokens, new_tokens = lengths[int(progress.id[1:])]
        assert progress.finished_s is not None
        assert progress.finished_s >= decode_alone_s(shape, context_tokens, new_tokens) - 1e-9


@given(shapes, steps, st.sets(st.integers(0, 11)), st.floats(0, 0.5))
def test_abort_frees_all_blocks(
    shape: EngineShape, lengths: list[tuple[int, int]], aborted: set[int], at_s: float
) -> None:
    scheduler = submitted(shape, lengths)
    gone = {p.id for p in scheduler.advance(at_s) if p.finished_s is not None}
    wanted = {RequestId(f"r{i}") for i in aborted if i < len(lengths)}
    assert {s.id for s in scheduler.abort(wanted)} == wanted - gone
    scheduler.advance(1e9)
    assert scheduler.idle
    assert scheduler.kv_used_tokens == 0


def test_paused_engine_generates_nothing_and_resumes() -> None:
    shape = EngineShape(0.01, 0, 0, 4, 400)
    scheduler = submitted(shape, [(10, 100)])
    (before,) = scheduler.advance(0.5)
    scheduler.pause()
    assert scheduler.advance(10.0) == []
    scheduler.resume(10.0)
    (after,) = scheduler.advance(100.0)
    assert before.tokens + after.tokens == 100
    assert after.finished_s == pytest.approx(10.0 + 0.01 * after.tokens)


def test_request_that_can_never_fit_is_rejected() -> None:
    with pytest.raises(ValueError, match="tokens must fit KV of"):
        Scheduler(EngineShape(0.01, 0, 0, 4, 64)).submit(0.0, RequestId("r"), 40, 40)


def test_larger_shape_admits_waiting_and_full_scheduler_rejects_smaller() -> None:
    small = EngineShape(1.0, 0.0, 0.0, 2, 64, block_tokens=BLOCK_TOKENS)
    big = EngineShape(1.0, 0.0, 0.0, 4, 128, block_tokens=BLOCK_TOKENS)
    scheduler = Scheduler(small)
    for number in range(4):
        scheduler.submit(0.0, RequestId(f"r{number}"), 20, 8)
    scheduler.advance(1.5)
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 2)
    scheduler.reshape(big)
    scheduler.advance(2.5)
    assert (len(scheduler.running), len(scheduler.waiting)) == (4, 0)
    with pytest.raises(ValueError, match="must fit the 4 running sequences"):
        scheduler.reshape(small)
    scheduler.advance(100.0)
    scheduler.reshape(small)
    assert scheduler.kv_used_tokens == 0
    assert scheduler.generated_tokens_total == 32
