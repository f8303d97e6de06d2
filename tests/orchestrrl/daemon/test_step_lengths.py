"""Tests of lengths of recent steps: queued, used for forecasts, and recovered after a restart."""

from pathlib import Path

import pytest

from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.daemon.planning import StepLengths
from planner.model import FinishedLength

STEP = [FinishedLength(5, tag="a"), FinishedLength(15), FinishedLength(15, tag="a"), FinishedLength(40, censored=True)]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.sqlite", 0.0)


def write(journal: Journal, lengths: StepLengths, *steps: list[FinishedLength]) -> None:
    for step in steps:
        journal.append(0.0, EntryKind.STEP_ENDED, "", {"lengths": lengths.step_ended(step)})


def test_journalled_steps_are_recovered(journal: Journal) -> None:
    first = StepLengths(10, 80)
    assert first.expected() is None
    write(journal, first, STEP, STEP[:2], [])
    reported = first.expected()
    assert reported is not None
    assert reported.tags
    again = StepLengths(10, 80)
    again.recover(journal)
    assert again.expected() == reported


def test_steps_counted_in_other_bins_or_not_at_all_are_skipped(journal: Journal) -> None:
    write(journal, StepLengths(20, 80), STEP)
    journal.append(0.0, EntryKind.STEP_ENDED, "", {"started_s": 0.0, "ended_s": 1.0})
    lengths = StepLengths(10, 80)
    lengths.recover(journal)
    assert lengths.expected() is None


def test_journal_entry_contains_only_occupied_bins() -> None:
    assert StepLengths(10, 80).step_ended(STEP) == {
        "bin_tokens": 10,
        "max_output_tokens": 80,
        "all": {"ended": {"0": 1, "1": 2}, "outlived": {"4": 1}},
        "tags": {"a": {"ended": {"0": 1, "1": 1}, "outlived": {}}},
    }
