"""Prefix caching of the simulated scheduler, compared with a count of the required blocks."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.simulated_engine.scheduler import EngineShape, Scheduler, Sequence
from planner.model import RequestId

BLOCK_TOKENS = 4
PROMPT_TOKENS = 10  # two full blocks and a partial one

groups = st.sampled_from(["", "g0", "g1"])
# The longest sequence has 38 tokens at its end: it fits alone into 10 blocks of KV.
MIN_BLOCKS = 10
steps = st.lists(st.tuples(groups, st.integers(0, 12), st.integers(1, 16)), min_size=1, max_size=10)


def shape(blocks: int, *, caching: bool = True) -> EngineShape:
    return EngineShape(0.01, 0.0, 0.0, 6, blocks * BLOCK_TOKENS, 1e-4, BLOCK_TOKENS, prefix_caching=caching)


def submitted(shape: EngineShape, requests: list[tuple[str, int, int]]) -> Scheduler:
    scheduler = Scheduler(shape)
    for index, (group, generated, left) in enumerate(requests):
        name = RequestId(f"r{index}")
        scheduler.submit(0.0, name, PROMPT_TOKENS + generated, left, group=group, prompt_tokens=PROMPT_TOKENS)
    return scheduler


def blocks_needed(running: list[Sequence]) -> int:
    """Return the blocks of all sequences, with the full blocks of a prompt counted once per group."""
    own, common = 0, defaultdict(int)
    for sequence in running:
        shared = PROMPT_TOKENS // BLOCK_TOKENS if sequence.group else 0
        own += sequence.blocks - shared
        common[sequence.group] = shared
    return own + sum(common.values())


@given(st.integers(MIN_BLOCKS, 24), steps, st.lists(st.floats(0.005, 0.1), min_size=1, max_size=4), st.integers(0, 9))
def test_samples_share_the_blocks_of_their_prompt(
    blocks: int, requests: list[tuple[str, int, int]], strides_s: list[float], aborted: int
) -> None:
    scheduler = submitted(shape(blocks), requests)
    until_s = 0.0
    for turn in range(2000):
        if scheduler.idle:
            break
        until_s += strides_s[turn % len(strides_s)]
        scheduler.advance(until_s)
        if turn == 2:
            scheduler.abort([RequestId(f"r{aborted}")])
        assert scheduler.kv_used_tokens == blocks_needed(scheduler.running) * BLOCK_TOKENS
        assert all(sequence.blocks * BLOCK_TOKENS >= sequence.context_tokens for sequence in scheduler.running)
    assert scheduler.idle
    assert scheduler.kv_used_tokens == 0


@given(st.integers(MIN_BLOCKS, 24), steps)
def test_prefix_caching_without_groups_changes_nothing(blocks: int, requests: list[tuple[str, int, int]]) -> None:
    plain = submitted(shape(blocks, caching=False), requests)
    alone = submitted(shape(blocks), [("", generated, left) for _, generated, left in requests])
    assert plain.advance(1e6) == alone.advance(1e6)
    assert plain.prefilled_tokens_total == alone.prefilled_tokens_total


def test_only_the_first_sample_is_fully_prefilled() -> None:
    scheduler = submitted(shape(40), [("g0", 0, 5), ("g0", 0, 9), ("g0", 3, 5)])
    scheduler.advance(0.02)
    rest = PROMPT_TOKENS % BLOCK_TOKENS
    assert scheduler.prefilled_tokens_total == PROMPT_TOKENS + rest + rest + 3
    assert scheduler.cached_tokens("g0", PROMPT_TOKENS) == PROMPT_TOKENS - rest
    assert scheduler.cached_tokens("g1", PROMPT_TOKENS) == scheduler.cached_tokens("", PROMPT_TOKENS) == 0
    scheduler.advance(1e6)
    assert scheduler.cached_tokens("g0", PROMPT_TOKENS) == 0


def test_next_sample_reuses_cached_blocks() -> None:
    times = {}
    for caching in (False, True):
        scheduler = submitted(shape(40, caching=caching), [("g0", 0, 30)])
        scheduler.advance(0.1)
        scheduler.submit(0.1, RequestId("late"), PROMPT_TOKENS, 1, group="g0", prompt_tokens=PROMPT_TOKENS)
        times[caching] = next(made.finished_s for made in scheduler.advance(1e6) if made.id == "late")
    assert times[True] == pytest.approx(times[False] - 1e-4 * (PROMPT_TOKENS - PROMPT_TOKENS % BLOCK_TOKENS))
