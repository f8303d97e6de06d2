"""Detection of the repetition in a stream of collectives, and of the position in it."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planner.fabric.sequence import PLACE_UNKNOWN, UNLEARNT, MarkedIterations, QuietSpan, RepetitionFinder, repetition
from planner.model import Hold

QUIET = QuietSpan(0.0, 0.0, 0.01)


def feed(follower: RepetitionFinder | MarkedIterations, ids: list[int]) -> list[bool]:
    """Return whether each collective was expected: the position was certain, and the collective was the one there."""
    fitted = []
    for id in ids:
        place = follower.place
        known = follower.sequence if isinstance(follower, RepetitionFinder) else follower.here
        expected = None
        if not isinstance(place, Hold) and known is not None:
            expected = known.ids[place[0]] if place[0] < len(known.ids) else None
        follower.step(id, QUIET)
        fitted.append(expected == id)
    return fitted


def certain(follower: RepetitionFinder | MarkedIterations) -> bool:
    return not isinstance(follower.place, Hold)


@given(st.lists(st.integers(0, 2), max_size=40))
def test_repetition_is_the_one_that_covers_most(ids: list[int]) -> None:
    best = (0, 0)
    for covered in range(2, len(ids) + 1):
        tail = ids[-covered:]
        for period in range(1, covered // 2 + 1):
            if all(tail[k] == tail[k - period] for k in range(period, covered)):
                best = (period, covered)
                break
    assert repetition(ids) == best


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.lists(st.integers(6, 9), max_size=10))
@example([0], [6] * 9)
def test_repetition_is_found_after_any_prefix(loop: list[int], before: list[int]) -> None:
    """A prefix may repeat, too. If it breaks, the loop has to hold for longer than the prefix did."""
    follower = RepetitionFinder()
    feed(follower, before)
    feed(follower, loop * (12 + len(before)))
    assert certain(follower)
    assert all(feed(follower, loop * 3))
    assert follower.sequence is not None
    doubled = list(follower.sequence.ids) * 2
    length = len(follower.sequence.ids)
    assert len(loop) % length == 0
    assert any(doubled[k : k + length] == loop[:length] for k in range(length))


@pytest.mark.parametrize(("layers", "per_layer"), [(48, [1, 2, 3, 2]), (94, [1, 1, 2]), (4, [1, 2])])
def test_equal_layers_are_distinguished_from_iterations(layers: int, per_layer: list[int]) -> None:
    """A layer is mistaken for the iteration once; the end of the layers is unexpected only that once."""
    iteration = per_layer * layers + [7, 8, 9] + per_layer[::-1] * layers + [5]
    follower, surprises = RepetitionFinder(), 0
    for _ in range(4):
        for id in iteration:
            sure = certain(follower)
            surprises += sure and feed(follower, [id]) == [False]
            if not sure:
                feed(follower, [id])
    assert surprises <= 1
    assert follower.sequence is not None
    assert len(follower.sequence.ids) == len(iteration)
    assert all(feed(follower, iteration * 2))


def test_endless_short_loop_is_an_iteration() -> None:
    follower = RepetitionFinder()
    feed(follower, [1, 2] * 200)
    assert follower.sequence is not None
    assert len(follower.sequence.ids) == 2
    # A mismatch now is no end of a layer: the position is certain again after one more round.
    feed(follower, [9])
    assert not certain(follower)
    assert follower.place.code == PLACE_UNKNOWN
    feed(follower, [1, 2, 1, 2])
    assert certain(follower)
    assert follower.relearned == 0


def test_new_sequence_is_learned() -> None:
    follower = RepetitionFinder()
    feed(follower, [1, 2, 3] * 200)
    feed(follower, [1, 4, 3, 5] * 20)
    assert follower.sequence is not None
    assert sorted(follower.sequence.ids) == [1, 3, 4, 5]
    assert follower.relearned == 1
    assert "every 4" in follower.reason


@given(st.integers(0, 1000))
def test_noise_is_trusted_only_if_it_repeats(seed: int) -> None:
    rng, follower, expected = random.Random(seed), RepetitionFinder(), list[int]()
    for _ in range(300):
        id = rng.randrange(3)
        feed(follower, [id])
        expected.append(id)
        if certain(follower):
            assert repetition(expected)[1] >= 8


def iterate(follower: MarkedIterations, iterations: list[list[int]]) -> list[list[bool]]:
    fitted = []
    for ids in iterations:
        follower.begin()
        fitted.append(feed(follower, ids))
    return fitted


def test_one_marked_iteration_suffices() -> None:
    follower = MarkedIterations()
    assert isinstance(follower.place, Hold)
    assert follower.place.code == UNLEARNT
    first, second = iterate(follower, [[1, 2, 3]] * 2)
    assert not any(first)
    assert all(second)


@given(
    st.lists(st.integers(0, 4), min_size=3, max_size=20),
    st.data(),
    st.sampled_from(["skipped", "extra", "other"]),
)
def test_mismatch_makes_position_unknown_until_next_mark(ids: list[int], data: st.DataObject, how: str) -> None:
    at = data.draw(st.integers(0, len(ids) - 1))
    odd = {
        "skipped": ids[:at] + ids[at + 1 :],
        "extra": [*ids[:at], 99, *ids[at:]],
        "other": [*ids[:at], 99, *ids[at + 1 :]],
    }
    follower = MarkedIterations()
    iterate(follower, [ids] * 3)
    follower.begin()
    differs = next((k for k, (a, b) in enumerate(zip(odd[how], ids, strict=False)) if a != b), None)
    for index, id in enumerate(odd[how]):
        follower.step(id, QUIET)
        assert certain(follower) == (differs is None or index < differs)
    follower.begin()
    assert certain(follower)
    assert all(feed(follower, ids))
    assert follower.relearned == 0


def test_every_fourth_iteration_sends_the_weights() -> None:
    """The position stays certain where two variants differ, once both were seen; their quiet times are stored
    together."""
    follower = MarkedIterations()
    plain, sending = [1, 2, 3], [1, 2, 3, 9, 9]
    iterate(follower, ([plain] * 3 + [sending]) * 3)
    assert {tuple(known.ids) for known in follower.known} == {(1, 2, 3), (1, 2, 3, 9, 9)}
    one, other = sorted(follower.known, key=lambda known: len(known.ids))
    assert all(a is b for a, b in zip(one.gaps, other.gaps, strict=False))
    follower.begin()
    for id in sending:
        follower.step(id, QUIET)
        assert certain(follower)
    assert follower.relearned == 0


def test_sequence_seen_twice_in_a_row_is_a_change() -> None:
    follower = MarkedIterations()
    iterate(follower, [[1, 2]] * 3 + [[1, 3, 4]] * 3)
    assert follower.relearned == 1
    assert "3 collectives" in follower.reason
    follower.begin()
    assert all(feed(follower, [1, 3, 4]))


def test_lost_events_make_position_unknown_until_next_mark() -> None:
    follower = MarkedIterations()
    iterate(follower, [[1, 2, 3]] * 3)
    follower.lose("ring overran")
    assert isinstance(follower.place, Hold)
    assert "ring overran" in follower.place.detail
    follower.step(3, QUIET)
    assert not certain(follower)
    follower.begin()
    assert certain(follower)
    assert len(follower.known) == 1


def test_lost_events_without_marks_make_position_unknown_for_one_round() -> None:
    follower = RepetitionFinder()
    feed(follower, [1, 2, 3, 4] * 20)
    follower.lose("ring overran")
    feed(follower, [3, 4, 1])
    assert not certain(follower)
    feed(follower, [2, 3, 4])
    assert certain(follower)
    assert all(feed(follower, [1, 2, 3, 4]))
