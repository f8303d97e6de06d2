"""Damage of a journal's files: either all acknowledged entries are read back, or the damage is reported."""

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrrl.cli.fleet.status import summary
from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal import damage as journal_guard
from orchestrrl.core.journal import store as journal_module
from orchestrrl.core.journal.kinds import OPERATIONS
from orchestrrl.core.journal.store import EntryKind, Journal, JournalEntry, JournalReader
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.metrics import DaemonCollector
from orchestrrl.daemon.wiring import Daemon, build_daemon
from orchestrrl.rpc.codecs.control import status_to_pb
from orchestrrl.rpc.plain_values import plain
from planner.admission import ControlState
from planner.model import Mode

SUFFIXES = ("", "-wal", "-shm", ".tail")
OURS = "journal.sqlite"


@dataclass(frozen=True)
class Written:
    """A journal as a killed process leaves it, with its acknowledged entries."""

    folder: Path
    entries: tuple[JournalEntry, ...]
    generation: int
    ever: tuple[JournalEntry, ...] = ()  # including those that were pruned

    def copy(self, to: Path) -> Path:
        to.mkdir()
        for suffix in SUFFIXES:
            if (self.folder / (OURS + suffix)).exists():
                shutil.copy(self.folder / (OURS + suffix), to / (OURS + suffix))
        return to / OURS


def write(folder: Path, count: int, checkpoint_at: int | None = None, prune: bool = False) -> Written:
    """Write entries of several kinds, and copy the files while the writer is still open."""
    live = folder / "live"
    live.mkdir(parents=True)
    journal = Journal(live / OURS, 0.0, max_entries=count // 2 if prune else 10**6)
    ever: list[JournalEntry] = []
    for i in range(count):
        kind = (
            EntryKind.OPERATION_INTENT,
            EntryKind.OPERATION_RESULT,
            EntryKind.BALANCE,
            EntryKind.MODE,
            EntryKind.PLAN_CONTROL,
        )[i % 5]
        ever.append(JournalEntry(i + 1, float(i), 1, kind, f"s{i // 5}", {"i": i, "text": "é" * (i % 40)}))
        journal.append(float(i), kind, ever[-1].subject, ever[-1].body)
        if i == checkpoint_at:
            journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    entries = tuple(journal.since(0, limit=10**6))
    killed = Written(folder / "killed", entries, journal.generation, tuple(ever))
    Written(live, entries, journal.generation).copy(killed.folder)
    journal.close()
    return killed


def bits(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def check(path: Path, written: Written) -> bool:
    """Open the journal and return whether damage was reported. Without a report, no acknowledged entry may be
    missing."""
    before = {name: data for name, data in bits(path.parent).items() if not name.endswith("-shm")}
    with Journal(path, 1000.0) as journal:
        read = tuple(journal.since(0, limit=10**6))
        assert journal.generation > written.generation
        if not journal.damage:
            assert read == written.entries
            assert journal.append(9.0, EntryKind.MODE, "after", {}) == written.entries[-1].sequence + 1
            return False
        assert all(entry in written.ever for entry in read[:-1])  # no entry is invented
        assert read[-1].kind == EntryKind.JOURNAL_DAMAGED
        kept_as = read[-1].body["kept_as"]
        assert any(kept_as in text for text in journal.damage)
    kept = {name.replace(kept_as, OURS): data for name, data in bits(path.parent).items() if kept_as in name}
    for name, data in before.items():  # every damaged file is kept for examination, bit for bit
        assert kept.get(name) == data, name
    with Journal(path, 0.0) as journal:  # the next start still reports it
        assert journal.damage
        journal.confirm_damage(1.0, "seen")
    with Journal(path, 0.0) as journal:
        assert not journal.damage
    return True


# --- Any change of the files


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    folder = tmp_path_factory.mktemp("written")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(journal_module, "PRUNE_EVERY", 20)
    made = [
        write(folder / "log", 40),  # all of it is in the write-ahead log
        write(folder / "half", 60, checkpoint_at=30),
        write(folder / "whole", 60, checkpoint_at=59),  # all of it is in the file
        write(folder / "pruned", 80, checkpoint_at=50, prune=True),
    ]
    monkeypatch.undo()
    return made


def flip(data: bytearray, at: int, bit: int) -> None:
    data[at] ^= 1 << bit


def regions(suffix: str, size: int) -> list[range]:
    """Return the regions of a file: its header, and the heads and contents of its pages or frames."""
    if suffix == "-wal":
        frames = range(32, size, 24 + 4096)
        return [range(32), *(range(at, min(at + 24, size)) for at in frames), range(32, size)]
    if suffix == "":
        pages = range(0, size, 4096)
        return [range(min(100, size)), *(range(at, min(at + 12, size)) for at in pages), range(size)]
    return [range(size)]


@pytest.mark.parametrize("seed", range(8))
def test_flipped_bits_are_detected_or_harmless(journals: list[Written], tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    reported = 0
    for number in range(25):
        written = rng.choice(journals)
        path = written.copy(tmp_path / str(number))
        for _ in range(rng.choice((1, 1, 2, 3))):
            files = [path.with_name(OURS + suffix) for suffix in ("", "", "-wal", "-wal", ".tail")]
            file = rng.choice([file for file in files if file.stat().st_size])
            suffix = file.name.removeprefix(OURS)
            data = bytearray(file.read_bytes())
            flip(data, rng.choice(rng.choice(regions(suffix, len(data)))), rng.randrange(8))
            file.write_bytes(data)
        reported += check(path, written)
    assert reported  # the test detects damage at all


@pytest.mark.parametrize("seed", range(4))
def test_truncated_and_deleted_files_are_detected_or_harmless(
    journals: list[Written], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for number in range(25):
        written = rng.choice(journals)
        path = written.copy(tmp_path / str(number))
        suffix = rng.choice(SUFFIXES)
        file = path.with_name(OURS + suffix)
        size = file.stat().st_size
        match rng.randrange(4):
            case 0:
                file.unlink()
            case 1:
                os.truncate(file, 0)
            case 2:
                os.truncate(file, rng.randrange(size + 1))
            case 3:  # some of it becomes zeros
                data = bytearray(file.read_bytes())
                at = rng.randrange(size + 1)
                data[at : at + 4096] = bytes(len(data[at : at + 4096]))
                file.write_bytes(data)
        check(path, written)


def test_damaged_name_in_schema_is_reported(journals: list[Written], tmp_path: Path) -> None:
    """Check a damaged name for which sqlite3 cannot format its own error."""
    path = journals[2].copy(tmp_path / "schema")
    data = bytearray(path.read_bytes())
    flip(data, data.index(b"results_by_subject") + len("results_by_"), 7)
    path.write_bytes(data)
    assert check(path, journals[2])


def emptied(suffix: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path.with_name(OURS + suffix), 0)


def deleted(*suffixes: str) -> Callable[[Path], None]:
    def delete(path: Path) -> None:
        for suffix in suffixes:
            path.with_name(OURS + suffix).unlink()

    return delete


def deleted_entries(where: str) -> Callable[[Path], None]:
    def delete(path: Path) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            assert database.execute(f"DELETE FROM entries WHERE {where}").rowcount

    return delete


LOST = {
    "file emptied": emptied(""),
    "log emptied": emptied("-wal"),
    "log deleted": deleted("-wal"),
    "log and its index deleted": deleted("-wal", "-shm"),
    "file deleted": deleted(""),
    "file and log deleted": deleted("", "-wal", "-shm"),
    "tail deleted": deleted(".tail"),
    "tail emptied": emptied(".tail"),
    "tail and log deleted": deleted(".tail", "-wal"),
    "tail and file deleted": deleted(".tail", ""),
    "last entry deleted": deleted_entries("sequence = (SELECT max(sequence) FROM entries)"),
    "an entry deleted": deleted_entries("sequence = 7"),
    "all entries deleted": deleted_entries("TRUE"),
    "an operator's entries deleted": deleted_entries("kind = 'mode'"),
}


@pytest.mark.parametrize("how", LOST)
def test_lost_data_is_reported(journals: list[Written], tmp_path: Path, how: str) -> None:
    path = journals[1].copy(tmp_path / "lost")
    LOST[how](path)
    assert check(path, journals[1])


@pytest.mark.parametrize(
    "how", ["log deleted after a checkpoint", "index of the log deleted", "index of the log spoilt", "lock deleted"]
)
def test_harmless_changes_are_not_damage(journals: list[Written], tmp_path: Path, how: str) -> None:
    written = journals[2] if how.startswith("log") else journals[1]
    path = written.copy(tmp_path / "whole")
    if how.startswith("log"):
        deleted("-wal", "-shm")(path)
    elif how == "index of the log spoilt":
        path.with_name(OURS + "-shm").write_bytes(b"\xa5" * 32768)
    elif how == "index of the log deleted":
        deleted("-shm")(path)
    assert not check(path, written)


def test_older_copy_is_detected(tmp_path: Path) -> None:
    path = tmp_path / OURS
    with Journal(path, 0.0) as journal:
        journal.append(0.0, EntryKind.MODE, "advise", {})
    old = path.read_bytes()
    with Journal(path, 0.0) as journal:
        journal.append(0.0, EntryKind.PLAN_CONTROL, "pinned", {})
    path.write_bytes(old)
    with Journal(path, 0.0) as journal:
        assert journal.generation == 3  # no generation is used twice
        assert "the newest entries are lost: the last is 1, but 2 were written" in journal.damage
        assert [entry.kind for entry in journal.since(0)] == [EntryKind.MODE, EntryKind.JOURNAL_DAMAGED]
        assert journal.append(0.0, EntryKind.MODE, "", {}) == 4  # nor is the number of a lost entry


def test_older_copy_without_new_entries_is_detected(tmp_path: Path) -> None:
    path = tmp_path / OURS
    Journal(path, 0.0).close()
    old = path.read_bytes()
    Journal(path, 0.0).close()
    path.write_bytes(old)
    with Journal(path, 0.0) as journal:
        assert journal.damage
        assert journal.generation == 3


def test_replaced_journal_is_detected(journals: list[Written], tmp_path: Path) -> None:
    path = journals[2].copy(tmp_path / "swapped")
    other = journals[3].copy(tmp_path / "other")
    shutil.copy(other.with_name(OURS + ".tail"), path.with_name(OURS + ".tail"))
    with Journal(path, 0.0) as journal:
        assert journal.damage


def test_fleet_state_is_not_recovered_after_damage(tmp_path: Path) -> None:
    path = tmp_path / OURS
    with Journal(path, 0.0) as journal:
        for kind in (
            EntryKind.BARRIER,
            EntryKind.WEIGHTS,
            EntryKind.REDEPLOYMENT_ENDED,
            EntryKind.PAUSES,
            EntryKind.ENGINES,
            EntryKind.PLAN_CONTROL,
        ):
            journal.append(0.0, kind, "before", {})
        for intent in (
            EntryKind.OPERATION_INTENT,
            EntryKind.CIRCUITS_INTENT,
            EntryKind.REDEPLOYMENT_BEGAN,
            EntryKind.SYNC_BEGAN,
        ):
            journal.append(0.0, intent, "open", {})
        journal.append(0.0, EntryKind.BALANCE, "last", {})
    deleted_entries("subject = 'last'")(path)
    with Journal(path, 0.0) as journal:
        for kind in (EntryKind.BARRIER, EntryKind.WEIGHTS, EntryKind.REDEPLOYMENT_ENDED):
            assert journal.latest(kind) is None
        for entries in OPERATIONS:
            assert journal.open_operations(entries) == []
        for kind in (EntryKind.PAUSES, EntryKind.ENGINES, EntryKind.PLAN_CONTROL):  # an operator's orders
            assert journal.latest(kind) is not None
        journal.append(1.0, EntryKind.BARRIER, "after", {})
        journal.append(1.0, EntryKind.OPERATION_INTENT, "after", {})
        assert journal.latest(EntryKind.BARRIER) is not None
        assert [entry.subject for entry in journal.open_operations()] == ["after"]


# --- A writer that is killed between any two writes


class Killed(BaseException):
    pass


@pytest.mark.parametrize("appends", range(4))
def test_writer_killed_before_tail_leaves_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appends: int
) -> None:
    path = tmp_path / "live" / OURS
    path.parent.mkdir()
    for life in range(3):
        journal = Journal(path, 0.0)
        for i in range(appends):
            journal.append(0.0, EntryKind.BALANCE, f"{life}-{i}", {})

        def die(*_: object, **__: object) -> None:
            raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(journal_guard.TailFile, "write", die)
            with pytest.raises(Killed):
                journal.append(0.0, EntryKind.BALANCE, f"{life}-killed", {})
        files = Written(path.parent, tuple(journal.since(0)), journal.generation)
        path = files.copy(tmp_path / f"life{life}")
        journal.close()
        with Journal(path, 0.0) as journal:
            assert not journal.damage
            assert len(journal.since(0)) == (life + 1) * (appends + 1)


@pytest.mark.parametrize("old_format", [False, True])
def test_first_start_killed_at_any_point_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_format: bool
) -> None:
    """Kill the process after each statement and each write of the tail, in turn."""
    for count in range(80):
        path = tmp_path / str(count) / OURS
        path.parent.mkdir()
        if old_format:
            write_old_format(path, 5)
        ended = False
        with monkeypatch.context() as patched:
            kill_after(count, patched)
            try:
                Journal(path, 0.0).close()
                ended = True
            except Killed:
                pass
        with Journal(path, 0.0) as journal:
            assert not journal.damage, count
            assert [entry.body for entry in journal.since(0)] == ([{"i": i} for i in range(5)] if old_format else [])
        if ended:
            return
    pytest.fail("it was never left alone")


def kill_after(steps: int, patched: pytest.MonkeyPatch) -> None:
    """Count the statements and file operations of the process that opens a journal, and kill it after `count`. Open
    files are closed, as by the system, and nothing else is done."""
    left = [steps]

    def step() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    class Connection(sqlite3.Connection):
        def execute(self, *values: Any) -> sqlite3.Cursor:
            try:
                step()
            except Killed:
                self.close()
                raise
            return super().execute(*values)

    real_connect, real_write, real_rename, real_replace = sqlite3.connect, os.pwrite, os.rename, os.replace

    def connect(*values: Any, **more: Any) -> sqlite3.Connection:
        return real_connect(*values, factory=Connection, **more)

    def before(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            step()
            return real(*values)

        return call

    patched.setattr(sqlite3, "connect", connect)
    patched.setattr(os, "pwrite", before(real_write))
    patched.setattr(os, "rename", before(real_rename))
    patched.setattr(os, "replace", before(real_replace))


def test_replacement_killed_at_any_point_is_completed_or_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write(tmp_path / "written", 8, checkpoint_at=4)
    for count in range(400):
        path = written.copy(tmp_path / str(count))
        deleted_entries("sequence = 7")(path)
        ended = False
        with monkeypatch.context() as patched:
            kill_after(count, patched)
            try:
                Journal(path, 0.0).close()
                ended = True
            except Killed:
                pass
        with Journal(path, 0.0) as journal:
            assert journal.damage, count
            kept = [entry for entry in journal.since(0) if entry.kind != EntryKind.JOURNAL_DAMAGED]
            assert [entry.sequence for entry in kept] == [1, 2, 3, 4, 5, 6, 8]
        assert len(list(path.parent.glob("*.damaged-*Z"))) == 1
        if ended:
            return
    pytest.fail("it was never left alone")


# --- Files of earlier versions


OLD_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE entries (
  sequence INTEGER PRIMARY KEY AUTOINCREMENT,
  at_s REAL NOT NULL, generation INTEGER NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, body TEXT NOT NULL
);
CREATE INDEX entries_by_kind ON entries (kind, sequence);
PRAGMA application_id = 1330793521;
PRAGMA user_version = 1;
INSERT INTO meta VALUES ('generation', 7);
"""


def write_old_format(path: Path, count: int) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.executescript(OLD_SCHEMA)
        rows = [(float(i), 7, "balance", f"s{i}", f'{{"i":{i}}}') for i in range(count)]
        with database:
            database.executemany(
                "INSERT INTO entries (at_s, generation, kind, subject, body) VALUES (?, ?, ?, ?, ?)", rows
            )


def test_journal_of_previous_format_is_converted(tmp_path: Path) -> None:
    path = tmp_path / OURS
    write_old_format(path, 5)
    with pytest.raises(Permanent, match="has journal format 1; start a daemon to convert it to format 2"):
        JournalReader(path)
    with Journal(path, 0.0) as journal:
        assert not journal.damage
        assert journal.generation == 8
        assert [entry.body for entry in journal.since(0)] == [{"i": i} for i in range(5)]
        assert journal.append(0.0, EntryKind.MODE, "", {}) == 6
    deleted_entries("sequence = 2")(path)  # guarded from then on
    with Journal(path, 0.0) as journal:
        assert journal.damage


def page_spoilt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-4096 * 2 + 5] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [page_spoilt, LOST["last entry deleted"]], ids=["page", "last entry"])
def test_damaged_journal_of_previous_format_is_reported(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = tmp_path / OURS
    write_old_format(path, 200)
    spoil(path)
    with Journal(path, 0.0) as journal:
        assert journal.damage


# --- Damage found while reading


def test_damaged_entry_is_skipped_and_reported(tmp_path: Path) -> None:
    path = tmp_path / OURS
    with Journal(path, 0.0) as journal:
        for i in range(3):
            journal.append(float(i), EntryKind.BALANCE, f"s{i}", {"i": i})
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("UPDATE entries SET body = '{\"i\":7}' WHERE sequence = 2")
        reader = JournalReader(path)
        with pytest.raises(Permanent, match="entry 2 is damaged"):
            reader.tail(3)
        reader.close()
        assert not journal.damage
        assert [entry.body["i"] for entry in journal.tail(3)] == [0, 2]
        assert journal.damage == ("entry 2 is damaged",)


def test_damaged_journal_that_cannot_be_moved_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / OURS
    with Journal(path, 0.0) as journal:
        journal.append(0.0, EntryKind.MODE, "advise", {})
    path.write_bytes(b"")
    before = bits(tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(Permanent, match="is damaged and cannot be moved: Permission denied"):
        Journal(path, 0.0)
    assert {name: bits(tmp_path)[name] for name in before} == before


# --- Effects on the daemon


def daemon_at(path: Path, mode: str = "act") -> Daemon:
    clock = VirtualClock(1000.0)
    return build_daemon(parse_config(f"mode: {mode}\njournal: {{path: {path}}}\n"), Journal(path, clock.now_s()), clock)


def damaged_metric(parts: Daemon) -> float:
    families = DaemonCollector(parts).collect()
    return next(each.value for one in families for each in one.samples if each.name == "orchestrrl_journal_damaged")


def test_lost_log_affects_only_entries_since_start(tmp_path: Path) -> None:
    path = tmp_path / "live" / OURS
    path.parent.mkdir()
    with Journal(path, 0.0) as journal:
        journal.append(0.0, EntryKind.PLAN_CONTROL, "pinned", {})
    second = Journal(path, 0.0)
    second.append(0.0, EntryKind.MODE, "advise", {})
    third = Written(path.parent, (), 2).copy(tmp_path / "killed")  # as it is when the process is killed
    second.close()
    with Journal(third, 0.0) as journal:
        journal.append(0.0, EntryKind.BALANCE, "", {})
        fourth = Written(third.parent, (), 3).copy(tmp_path / "again")
    os.truncate(fourth.with_name(OURS + "-wal"), 0)
    with Journal(fourth, 0.0) as journal:
        assert journal.damage
        kinds = [entry.kind for entry in journal.since(0)]
        assert kinds == [EntryKind.PLAN_CONTROL, EntryKind.MODE, EntryKind.JOURNAL_DAMAGED]


def test_daemon_with_damaged_journal_does_not_act_until_confirmed(tmp_path: Path) -> None:
    path = tmp_path / OURS
    parts = daemon_at(path)
    plane = parts.control_plane
    plane.plans.pin("step 12 is precious", 0.0)
    plane.journal.append(0.0, EntryKind.BALANCE, "last", {})
    plane.journal.close()
    deleted_entries("subject = 'last'")(path)
    for _ in range(2):
        parts = daemon_at(path)
        plane = parts.control_plane
        assert plane.mode.current is Mode.ADVISE
        assert "the journal is damaged" in plane.mode.reason
        seen = plain(status_to_pb(parts, "test"))
        assert any("the journal is damaged" in line for line in summary(seen))
        assert any("`orchestrrl mode act" in line for line in summary(seen))
        assert damaged_metric(parts) == 1.0
        assert plane.plans.control.state is ControlState.PINNED
        plane.reconfigure(plane.config.model_copy(update={"mode": Mode.ADVISE}))
        plane.reconfigure(plane.config.model_copy(update={"mode": Mode.ACT}))  # a configuration file is no confirmation
        assert plane.mode.current is Mode.ADVISE
        plane.journal.close()
    parts = daemon_at(path)
    plane = parts.control_plane
    plane.mode.set(Mode.ADVISE, "not yet")
    assert plane.journal.damage
    plane.mode.set(Mode.ACT, "the pin is right")
    assert not plane.journal.damage
    assert damaged_metric(parts) == 0.0
    assert plain(status_to_pb(parts, "test"))["journal_damage"] == []
    confirmed = plane.journal.latest(EntryKind.JOURNAL_CONFIRMED)
    assert confirmed is not None
    assert confirmed.body["reason"] == "the pin is right"
    plane.journal.close()
    assert daemon_at(path).control_plane.mode.current is Mode.ACT


def test_damage_found_at_runtime_stops_acting(tmp_path: Path) -> None:
    parts = daemon_at(tmp_path / OURS)
    plane = parts.control_plane
    plane.fast_tick()
    assert plane.mode.current is Mode.ACT
    with closing(sqlite3.connect(tmp_path / OURS, isolation_level=None)) as database:
        database.execute("UPDATE entries SET subject = 'other' WHERE sequence = 1")
    plane.journal.tail(10)
    plane.fast_tick()
    assert plane.mode.current is Mode.ADVISE
    assert "entry 1 is damaged" in plane.mode.reason
    plane.mode.set(Mode.ACT, "seen")
    plane.fast_tick()
    assert plane.mode.current is Mode.ACT
    plane.journal.tail(10)
    plane.fast_tick()  # the same damage is not reported again
    assert plane.mode.current is Mode.ACT


def test_operator_orders_are_on_disk_before_acknowledgement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(tmp_path / OURS, 0.0) as journal:
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", synced.append)
        journal.append(0.0, EntryKind.BALANCE, "", {})
        assert synced == []
        journal.append(0.0, EntryKind.MODE, "advise", {"mode": "advise", "configured": "act"})
        assert synced == [journal._tail._descriptor]
        assert journal._db.execute("PRAGMA synchronous").fetchone() == (1,)  # NORMAL again


def test_half_written_start_is_rolled_back(tmp_path: Path) -> None:
    """Check that a start's rollback journal, used until the write-ahead log is active, is rolled back."""
    path = tmp_path / OURS
    with Journal(path, 0.0) as journal:
        journal.append(0.0, EntryKind.MODE, "advise", {"mode": "advise", "configured": "act"})
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("PRAGMA cache_size = 1")  # spills into the file while the transaction is open
        db.execute("BEGIN IMMEDIATE")
        db.execute("CREATE TABLE filler (text)")
        db.executemany("INSERT INTO filler VALUES (?)", [("x" * 4000,)] * 200)
        killed = tmp_path / "killed"
        killed.mkdir()
        for suffix in ("", "-journal", ".tail"):
            shutil.copy(tmp_path / (OURS + suffix), killed / (OURS + suffix))
    with Journal(killed / OURS, 0.0) as journal:
        assert not journal.damage
        assert journal.latest(EntryKind.MODE) is not None


def test_second_damage_does_not_hide_first(tmp_path: Path) -> None:
    path = tmp_path / OURS
    Journal(path, 0.0).close()
    (tmp_path / f"{OURS}.tail").unlink()
    with Journal(path, 0.0) as journal:
        first = journal.damage
    (tmp_path / f"{OURS}.tail").write_bytes(b"spoilt")
    with Journal(path, 0.0) as journal:
        assert first
        assert journal.damage[: len(first)] == first
        assert len(journal.damage) > len(first)
        journal.confirm_damage(0.0, "seen")
    with Journal(path, 0.0) as journal:
        assert journal.damage == ()


def test_journal_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    link = tmp_path / OURS
    link.symlink_to(tmp_path / "large" / OURS)
    with Journal(link, 0.0) as journal:
        journal.append(0.0, EntryKind.MODE, "advise", {"mode": "advise", "configured": "act"})
    (tmp_path / "large" / f"{OURS}.tail").unlink()
    with Journal(link, 0.0) as journal:
        assert journal.damage
    assert link.is_symlink()
    assert list((tmp_path / "large").glob("*.damaged-*"))


def test_unreadable_mode_is_advise(tmp_path: Path) -> None:
    clock = VirtualClock(0.0)
    with Journal(tmp_path / OURS, 0.0) as journal:
        journal.append(0.0, EntryKind.MODE, "act", {"mode": "act", "configured": "act", "reason": ""})
        journal.append(0.0, EntryKind.MODE, "later", {"mode": "rest", "configured": "act", "reason": ""})
    with Journal(tmp_path / OURS, 0.0) as journal:
        parts = build_daemon(parse_config("mode: act\n"), journal, clock)
        plane = parts.control_plane
        assert (plane.mode.current, "cannot be read" in plane.mode.reason) == (Mode.ADVISE, True)


def test_unreadable_tail_is_not_damage(tmp_path: Path) -> None:
    Journal(tmp_path / OURS, 0.0).close()
    (tmp_path / f"{OURS}.tail").unlink()
    (tmp_path / f"{OURS}.tail").mkdir()
    with pytest.raises(Permanent, match=r"\.tail: cannot be read: Is a directory"):
        Journal(tmp_path / OURS, 0.0)


def test_unwritable_tail_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    Journal(tmp_path / OURS, 0.0).close()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(Permanent, match="No space left on device"):
        Journal(tmp_path / OURS, 0.0)
    assert tmp_path / f"{OURS}.tail" not in [link.resolve() for link in Path("/proc/self/fd").iterdir()]
