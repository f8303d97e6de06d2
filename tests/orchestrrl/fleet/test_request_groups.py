"""Tests of groups that have enough answers, against a plain count."""

from collections import Counter
from unittest.mock import patch

from builders import finished
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.fleet import request_groups
from orchestrrl.fleet.reports import FinishedRequest
from orchestrrl.fleet.request_groups import FinishedGroups

ANSWERS = st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.sampled_from(["stop", "length", "abort", "error"]))


def answer(group: str, enough: int, reason: str = "stop") -> FinishedRequest:
    reported = finished("r", reason=reason)
    return FinishedRequest(reported.id, reported.engine, 100, 50, reason, group=group, group_enough=enough)


@given(st.lists(st.one_of(st.lists(ANSWERS, max_size=5), st.none()), max_size=12))
def test_group_is_returned_once_per_batch_in_which_it_has_enough(
    batches: list[list[tuple[str, int, str]] | None],
) -> None:
    counted, found = Counter[str](), FinishedGroups()
    for batch in batches:
        if batch is None:
            counted.clear()
            found.forget()
            continue
        expected = set()
        for group, enough, reason in batch:
            if enough and reason in ("stop", "length"):
                counted[group] += 1
                if counted[group] >= enough:
                    expected.add(group)
        found.count(answer(*one) for one in batch)
        assert found.take() == expected
        assert found.take() == frozenset()


def test_answers_without_a_group_are_not_counted() -> None:
    found = FinishedGroups()
    found.count([answer("", 1)])
    assert found.take() == frozenset()


def test_latest_groups_are_kept() -> None:
    found = FinishedGroups()
    with patch.object(request_groups, "GROUPS_REMEMBERED", 2):
        for group in ("a", "b", "a", "c", "a"):
            found.count([answer(group, 3)])
    assert found.take() == {"a"}
    found.count([answer("b", 2)])
    assert found.take() == frozenset(), "b was forgotten"
