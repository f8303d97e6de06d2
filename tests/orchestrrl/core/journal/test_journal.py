"""The journal: append-only, one writer, readable in the meantime, and intact after the writer was killed."""

import asyncio
import sqlite3
import stat
from pathlib import Path

import pytest

from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.damage import JournalTail, tail_path
from orchestrrl.core.journal.store import EntryKind, Journal, JournalReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def fill(journal: Journal, count: int) -> None:
    for i in range(count):
        journal.append(float(i), EntryKind.BALANCE, f"s{i}", {"i": i})


def test_entries_are_read_back_unchanged(path: Path) -> None:
    with Journal(path, 0.0) as journal:
        fill(journal, 5)
        journal.append(9.0, EntryKind.MODE, "act", {"mode": "act"})
        assert [entry.subject for entry in journal.tail(2)] == ["s4", "act"]
        assert [entry.body for entry in journal.tail(2, (EntryKind.BALANCE,))] == [{"i": 3}, {"i": 4}]
        assert [entry.sequence for entry in journal.since(3)] == [4, 5, 6]
        assert [entry.sequence for entry in journal.since(0, limit=2)] == [1, 2]
        latest = journal.latest(EntryKind.MODE)
        assert latest is not None
        assert (latest.at_s, latest.generation, latest.body) == (9.0, 1, {"mode": "act"})
        assert journal.latest(EntryKind.PLAN) is None


def test_generation_grows_at_each_start_and_follows_clock(path: Path) -> None:
    generations = []
    for at_s in (0.0, 0.0, 500.7, 400.0):
        with Journal(path, at_s) as journal:
            generations.append(journal.generation)
    assert generations == [1, 2, 500, 501]


def test_open_operations_are_intents_without_result(path: Path) -> None:
    with Journal(path, 0.0) as journal:
        for id in ("a", "b", "c"):
            journal.append(0.0, EntryKind.OPERATION_INTENT, id, {"id": id})
            journal.append(0.0, EntryKind.OPERATION_SENT, id, {})
        journal.append(0.0, EntryKind.OPERATION_RESULT, "b", {})
    with Journal(path, 0.0) as journal:
        assert [entry.subject for entry in journal.open_operations()] == ["a", "c"]


def test_lock_file_is_private_to_its_user(path: Path) -> None:
    with Journal(path, 0.0):
        assert stat.S_IMODE(path.with_name(f"{path.name}.lock").stat().st_mode) == 0o600


def test_second_writer_is_refused_but_readers_are_not(path: Path) -> None:
    with Journal(path, 0.0) as journal:
        fill(journal, 1)
        with pytest.raises(Permanent, match="another daemon already uses this journal"):
            Journal(path, 0.0)
        reader = JournalReader(path)
        fill(journal, 1)
        assert len(reader.tail(10)) == 2
        reader.close()
    with Journal(path, 0.0) as journal:
        assert journal.generation == 2


@pytest.mark.parametrize("content", [b"this is no database" * 100, b"SQLite format 3\x00" + b"\xff" * 4000])
def test_damaged_file_is_reported_and_unchanged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for open_it in (lambda: Journal(path, 0.0), lambda: JournalReader(path)):
        with pytest.raises(Permanent, match=r"journal\.sqlite: is damaged or is not a journal .*move the file away"):
            open_it()
    assert path.read_bytes() == content


def test_database_of_another_program_is_refused(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE theirs (x)")
    database.close()
    with pytest.raises(Permanent, match="is not an OrchestrRL journal"):
        Journal(path, 0.0)


def test_later_format_is_refused(path: Path) -> None:
    Journal(path, 0.0).close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    tail_path(path).write_bytes(JournalTail(generation=1, format=99).encoded())  # as a later version would write
    with pytest.raises(Permanent, match="has journal format 99, but this version supports only format 2"):
        Journal(path, 0.0)
    tail_path(path).unlink()
    with pytest.raises(Permanent, match="has journal format 99, but this version supports only format 2"):
        Journal(path, 0.0)


def test_unwritable_path_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Permanent, match="No such file or directory"):
        Journal(tmp_path / "absent" / "journal.sqlite", 0.0)
    with pytest.raises(Permanent, match="the journal does not exist"):
        JournalReader(tmp_path / "absent.sqlite")


def test_pruning_keeps_entries_needed_for_recovery(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrrl.core.journal.store.PRUNE_EVERY", 10)
    with Journal(path, 0.0, max_entries=20) as journal:
        journal.append(0.0, EntryKind.PLAN_CONTROL, "free", {})
        journal.append(0.0, EntryKind.PLAN_CONTROL, "pinned", {})
        journal.append(0.0, EntryKind.OPERATION_INTENT, "open", {})
        journal.append(0.0, EntryKind.OPERATION_INTENT, "closed", {})
        journal.append(0.0, EntryKind.OPERATION_RESULT, "closed", {})
        journal.append(0.0, EntryKind.REROUTED, "routes", {})  # not written again while it is in force
        fill(journal, 94)
        entries = journal.since(0)
        assert [entry.subject for entry in entries[:3]] == ["pinned", "open", "routes"]
        assert [entry.sequence for entry in entries[3:]] == list(range(81, 101))
    with Journal(path, 0.0) as journal:
        assert journal.append(0.0, EntryKind.MODE, "", {}) == 101


def test_pruning_keeps_steps_of_open_operations(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the entries of an open redeployment or sync are kept, from which a restarted daemon rolls engines
    back."""
    monkeypatch.setattr("orchestrrl.core.journal.store.PRUNE_EVERY", 10)
    with Journal(path, 0.0, max_entries=20) as journal:
        for began, step, ended in (
            (EntryKind.REDEPLOYMENT_BEGAN, EntryKind.REDEPLOYMENT_STEP, EntryKind.REDEPLOYMENT_ENDED),
            (EntryKind.SYNC_BEGAN, EntryKind.SYNC_STEP, EntryKind.SYNC_ENDED),
        ):
            for subject in ("open", "over"):
                journal.append(0.0, began, subject, {})
                journal.append(0.0, step, subject, {})
            journal.append(0.0, ended, "over", {})
        fill(journal, 90)
        kept = [(entry.kind, entry.subject) for entry in journal.since(0) if entry.sequence <= 10]
    assert kept == [
        (EntryKind.REDEPLOYMENT_BEGAN, "open"),
        (EntryKind.REDEPLOYMENT_STEP, "open"),
        (EntryKind.REDEPLOYMENT_ENDED, "over"),  # the latest of its kind
        (EntryKind.SYNC_BEGAN, "open"),
        (EntryKind.SYNC_STEP, "open"),
    ]


async def test_follow_yields_missed_and_new_entries(path: Path) -> None:
    with Journal(path, 0.0) as journal:
        fill(journal, 3)
        following = journal.follow(1, (EntryKind.BALANCE,))
        seen = [(await anext(following)).sequence, (await anext(following)).sequence]
        coming = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0)
        journal.append(0.0, EntryKind.MODE, "", {})
        await asyncio.sleep(0)
        assert not coming.done()
        fill(journal, 1)
        seen.append((await coming).sequence)
        assert seen == [2, 3, 5]
        await following.aclose()


async def test_follow_catches_up_over_several_reads(path: Path) -> None:
    with Journal(path, 0.0) as journal:
        fill(journal, 2500)
        following = journal.follow(0)
        assert [(await anext(following)).sequence for _ in range(2500)] == list(range(1, 2501))
        await following.aclose()
