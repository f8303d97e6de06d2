"""Read and write the journal, an append-only record of inputs, decisions and outcomes in SQLite.

Any number of processes may read a journal, but a lock file ensures that only one process writes. An entry that `append`
has written survives if the process is killed. A power failure may destroy the last few entries, but never the start of
a generation.

At the next start of the writer, missing or damaged data is detected (damage.py). The damaged files are kept, their
readable entries are copied to a new file, and `damage` describes the damage until an operator confirms it. After
damage, the earlier state of the fleet (open operations, the pause barrier, weights, engines) is not recovered, because
lost entries may have changed it. Operators' settings are recovered as far as they are readable.

The oldest entries beyond `max_entries` are dropped, except those needed for recovery. These are the entries of open
operations of every type, the latest ownership of circuits of each switch, and the latest entry of each of these kinds:
plan control, calibration, end of a deployment, end of a redeployment, mode, routes, barrier, engines, fabric control,
pauses, packet routes, weights, damage and its confirmation.
"""

import asyncio
import fcntl
import json
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from orchestrrl.core.errors import Permanent, cut, faults_of, few, shorten
from orchestrrl.core.journal.damage import (
    APPLICATION_ID,
    COLUMNS,
    MASK,
    SCHEMA_VERSION,
    UNGUARDED,
    JournalExamination,
    JournalTail,
    Row,
    TailFile,
    checksum,
    examine,
    finish,
    identify,
    is_intact,
    meta_of,
    replace_damaged,
    roll_back,
    rows_of,
    write_meta,
)
from orchestrrl.core.journal.kinds import NODE_OPERATIONS, OPERATIONS, OperationEntries
from orchestrrl.core.journal.kinds import EntryKind as EntryKind
from orchestrrl.core.journal.values import EARLIEST_S, LATEST_S, body_faults, can_be_written

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

# Number of appends between two removals of old entries.
PRUNE_EVERY = 1000


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One entry of the journal. `subject` is the id of the operation, plan, engine or other object that the entry
    concerns."""

    sequence: int
    at_s: float
    generation: int
    kind: str
    subject: str
    body: Mapping[str, Any]


_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
  sequence INTEGER PRIMARY KEY AUTOINCREMENT,
  at_s REAL NOT NULL, generation INTEGER NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, body TEXT NOT NULL,
  checksum INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS entries_by_kind ON entries (kind, sequence);
CREATE INDEX IF NOT EXISTS results_by_subject ON entries (subject) WHERE kind = '{EntryKind.OPERATION_RESULT}';
CREATE INDEX IF NOT EXISTS redeployments_by_subject ON entries (subject) WHERE kind = '{EntryKind.REDEPLOYMENT_ENDED}';
CREATE INDEX IF NOT EXISTS syncs_by_subject ON entries (subject) WHERE kind = '{EntryKind.SYNC_ENDED}';
CREATE INDEX IF NOT EXISTS circuits_by_subject ON entries (subject) WHERE kind = '{EntryKind.CIRCUITS_RESULT}';
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""

_READ = f"{COLUMNS}, checksum"
# How many entries of a kind are tried if the newest cannot be read.
TRIED = 8

# State of the fleet. After damage it must be observed again.
_OF_THE_FLEET = (EntryKind.BARRIER, EntryKind.WEIGHTS, EntryKind.REDEPLOYMENT_ENDED)
# An operator's orders, which also survive a power failure, because they are few.
_DURABLE = frozenset(
    {
        EntryKind.MODE,
        EntryKind.PAUSES,
        EntryKind.ENGINES,
        EntryKind.PLAN_CONTROL,
        EntryKind.FABRIC_CONTROL,
        EntryKind.JOURNAL_CONFIRMED,
    }
)


def _open(entries: OperationEntries) -> str:
    return f"""
(kind = '{entries.intent}' AND NOT EXISTS (
  SELECT 1 FROM entries AS result WHERE result.kind = '{entries.result}' AND result.subject = entries.subject
))"""


_RECOVERED_FROM_LATEST = (
    EntryKind.PLAN_CONTROL,
    EntryKind.PLAN_CALIBRATION,
    EntryKind.DEPLOYMENT_ENDED,
    EntryKind.REDEPLOYMENT_ENDED,
    EntryKind.MODE,
    EntryKind.ROUTES,
    EntryKind.ENGINES,
    EntryKind.BARRIER,
    EntryKind.FABRIC_CONTROL,
    EntryKind.REROUTED,
    EntryKind.PAUSES,
    EntryKind.WEIGHTS,
    EntryKind.JOURNAL_DAMAGED,
    EntryKind.JOURNAL_CONFIRMED,
)


class JournalReader:
    """Reads a journal, which another process may be writing at the same time."""

    def __init__(self, path: Path) -> None:
        path = Path(os.path.realpath(path))
        if not path.exists():
            raise Permanent(f"{path}: the journal does not exist")
        self.path = path
        self.set_aside: dict[int, str] = {}  # entries that this version cannot read, by number, with the reason
        with _naming(path):
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            self._db.text_factory = bytearray
            if identify(path, self._db) == UNGUARDED:
                raise Permanent(f"{path} has journal format 1; start a daemon to convert it to format {SCHEMA_VERSION}")

    def tail(self, count: int, kinds: Sequence[str] = ()) -> list[JournalEntry]:
        """Return the newest `count` entries of the given kinds, oldest first. If `kinds` is empty, entries of all kinds
        are returned."""
        where, values = _of_kinds(kinds)
        query = f"SELECT {_READ} FROM entries WHERE {where} ORDER BY sequence DESC LIMIT ?"
        return self._read(query, *values, count)[::-1]

    def since(self, sequence: int, kinds: Sequence[str] = (), limit: int = 1000) -> list[JournalEntry]:
        """Return at most `limit` entries of the given kinds with numbers greater than `sequence`, oldest first. If
        `kinds` is empty, entries of all kinds are returned."""
        where, values = _of_kinds(kinds)
        query = f"SELECT {_READ} FROM entries WHERE {where} AND sequence > ? ORDER BY sequence LIMIT ?"
        return self._read(query, *values, sequence, limit)

    @property
    def last_sequence(self) -> int:
        """The number of the newest entry, or 0 if the journal is empty."""
        newest = self.tail(1)
        return newest[0].sequence if newest else 0

    def latest(self, kind: EntryKind) -> JournalEntry | None:
        entries = self.tail(1, (kind,))
        return entries[0] if entries else None

    def latest_by_subject(self, kind: EntryKind) -> dict[str, JournalEntry]:
        """Return the newest entry of this kind for each subject."""
        newest = "SELECT max(sequence) FROM entries WHERE kind = ? GROUP BY subject"
        query = f"SELECT {_READ} FROM entries WHERE sequence IN ({newest}) ORDER BY sequence"
        return {entry.subject: entry for entry in self._read(query, kind)}

    def open_operations(self, entries: OperationEntries = NODE_OPERATIONS) -> list[JournalEntry]:
        """Return the intent entries of one type of operation that have no result entry, oldest first. A restarted
        daemon must complete these operations."""
        return self._read(f"SELECT {_READ} FROM entries WHERE {_open(entries)} ORDER BY sequence")

    def interpret(self, entry: JournalEntry, parse: Callable[[Mapping[str, Any]], _Value]) -> _Value | None:
        """Return `parse(entry.body)`, or None if this version cannot read the body. An entry that cannot be read is
        logged and recorded in `set_aside`."""
        try:
            if faults := body_faults(entry.body):
                raise ValueError(faults[0])
            return parse(entry.body)
        except Exception as error:  # noqa: BLE001  # any error from a body that another version wrote
            if entry.sequence not in self.set_aside:
                why = cut(few(faults_of(error), 2) if isinstance(error, ValidationError) else repr(error))
                self.set_aside[entry.sequence] = f"{entry.kind} {entry.subject}: {why}"
                logger.warning(
                    "%s: entry %d: %s %s is skipped: written by another version, or damaged: %s",
                    *(self.path, entry.sequence, entry.kind, entry.subject, why),
                )
            return None

    def newest(self, kind: EntryKind, parse: Callable[[Mapping[str, Any]], _Value]) -> _Value | None:
        """Return `parse` applied to the body of the newest readable entry of this kind, or None if none of the newest
        `TRIED` entries is readable."""
        newest = self.latest(kind)
        if newest is None or (value := self.interpret(newest, parse)) is not None:
            return None if newest is None else value
        for entry in reversed(self.tail(TRIED, (kind,))[:-1]):
            if (value := self.interpret(entry, parse)) is not None:
                return value
        return None

    def close(self) -> None:
        self._db.close()

    def _read(self, query: str, *values: object) -> list[JournalEntry]:
        with _naming(self.path):
            rows = self._db.execute(query, values).fetchall()
        return [entry for row in rows if (entry := self._entry(row)) is not None]

    def _entry(self, row: Row) -> JournalEntry | None:
        """Convert a row to an entry. If the row is damaged, call `_damaged`, which may raise an exception, and return
        None."""
        if not is_intact(row):
            self._damaged(f"entry {row[0]} is damaged")
            return None
        sequence, at_s, generation, kind, subject, body, _ = row
        try:
            return JournalEntry(sequence, at_s, generation, kind.decode(), subject.decode(), json.loads(body))
        except (ValueError, RecursionError) as error:
            self._damaged(f"entry {sequence} cannot be read: {error}")
            return None

    def _damaged(self, why: str) -> None:
        raise Permanent(f"{self.path}: {why}")


class Journal(JournalReader):
    """The writer of a journal. Opening the journal starts a new generation.

    The number of the generation is greater than those of all previous generations, and at least the current time in
    seconds. Nodes refuse orders of a generation older than the newest one that they have received, so a daemon whose
    journal was lost must not start at generation 1 again.
    """

    def __init__(self, path: Path, at_s: float, max_entries: int = 1_000_000) -> None:
        self.path = path = Path(os.path.realpath(path))  # SQLite's own files are next to the target of a link
        self.set_aside = {}
        self.damage: tuple[str, ...] = ()  # faults found, until an operator has confirmed them; empty: none
        self._damaged_at = 0  # number of the entry that records the damage
        self._confirmed: set[str] = set()
        self._max_entries = max_entries
        self._followers: set[asyncio.Event] = set()
        self._lock_file = _locked(path)
        try:
            with _naming(path):
                found = self._examined(at_s)
                self._db = sqlite3.connect(path, isolation_level=None)
                self._db.text_factory = bytearray
                self._begin(max(1, int(at_s)), found)
            self._find_damage()
        except BaseException:
            os.close(self._lock_file)
            raise
        self._until_prune = PRUNE_EVERY

    def _examined(self, at_s: float) -> JournalExamination:
        """Examine the journal, replace it if it is damaged, and return the result of the last examination. Raises
        Permanent if the journal cannot be read or replaced."""
        try:
            finish(self.path)
            roll_back(self.path)
            found = self._examine()
            if found.faults:
                replace_damaged(self.path, found, _SCHEMA, EntryKind.JOURNAL_DAMAGED, at_s)
                found = self._examine()
        except OSError as error:
            raise Permanent(f"{self.path}: is damaged and cannot be moved: {error.strerror or error}") from error
        if found.faults:
            raise Permanent(
                f"{self.path}: is damaged: {'; '.join(found.faults)}; move the file away to start a new journal"
            )
        return found

    def _examine(self) -> JournalExamination:
        try:
            return examine(self.path)
        except OSError as error:
            raise Permanent(f"{error.filename or self.path}: cannot be read: {error.strerror or error}") from error

    def _begin(self, first_generation: int, found: JournalExamination) -> None:
        """Start a new generation. For a new or converted journal, the tail file is written before the first entry can
        be written. For every journal, the tail file is written after the generation is on disk."""
        with _naming_tail(self.path):
            if found.version != SCHEMA_VERSION:
                TailFile(self.path, found.tail).close()
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")  # a generation must never be used twice
        self._db.execute("BEGIN IMMEDIATE")
        if found.version == UNGUARDED:
            sums = [(row[6], row[0]) for row in rows_of(self._db, guarded=False)]
            self._db.execute("ALTER TABLE entries ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0")
            self._db.executemany("UPDATE entries SET checksum = ? WHERE sequence = ?", sums)
        for statement in _SCHEMA.split(";"):
            self._db.execute(statement)
        meta = meta_of(self._db)
        self.generation = max(meta.get("generation", 0) + 1, first_generation)
        write_meta(self._db, {"generation": self.generation, "pruned": meta.get("pruned", 0)})
        self._db.execute("COMMIT")
        self._db.execute("PRAGMA synchronous = NORMAL")
        # After a checkpoint, damage to the log cannot affect this data.
        self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        self._sequence, self._total = found.tail.sequence, found.tail.total
        with _naming_tail(self.path):
            self._tail = TailFile(self.path, self._acknowledged())

    def _acknowledged(self) -> JournalTail:
        return JournalTail(self.generation, self._sequence, self._total)

    def _find_damage(self) -> None:
        """Set `damage` to the damage that was found at this start or an earlier one and that no operator has confirmed,
        and log it."""
        marks, confirmed = self.tail(TRIED, (EntryKind.JOURNAL_DAMAGED,)), super().latest(EntryKind.JOURNAL_CONFIRMED)
        if not marks:
            return
        self._damaged_at = marks[-1].sequence
        confirmed_at = 0 if confirmed is None else confirmed.sequence
        self.damage = tuple(text for mark in marks if mark.sequence > confirmed_at for text in _damage_in(mark.body))
        if not self.damage:
            return
        for text in self.damage:
            logger.error("%s is damaged: %s", self.path, text)
        logger.error("%s: the fleet is not changed until the damage is confirmed by `orchestrrl mode act`", self.path)

    def confirm_damage(self, at_s: float, reason: str) -> None:
        """Record that an operator has confirmed the damage. Raises Permanent if the journal cannot be written."""
        if self.damage:
            self.append(at_s, EntryKind.JOURNAL_CONFIRMED, "", {"damage": list(self.damage), "reason": reason})
            self._confirmed.update(self.damage)
            self.damage = ()

    @property
    def last_sequence(self) -> int:
        return self._sequence

    def latest(self, kind: EntryKind) -> JournalEntry | None:
        entry = super().latest(kind)
        stale = entry is not None and kind in _OF_THE_FLEET and entry.sequence < self._damaged_at
        return None if stale else entry

    def latest_by_subject(self, kind: EntryKind) -> dict[str, JournalEntry]:
        found = super().latest_by_subject(kind)
        return {subject: entry for subject, entry in found.items() if entry.sequence > self._damaged_at}

    def open_operations(self, entries: OperationEntries = NODE_OPERATIONS) -> list[JournalEntry]:
        return [entry for entry in super().open_operations(entries) if entry.sequence > self._damaged_at]

    def append(self, at_s: float, kind: EntryKind, subject: str, body: Mapping[str, Any]) -> int:
        """Write one entry and return its sequence number. Raises Permanent if the file cannot be written, or if the
        entry has a value that could not be read back unchanged."""
        try:
            if not isinstance(body, dict) or not can_be_written(body) or not EARLIEST_S <= at_s <= LATEST_S:
                raise ValueError
            at_s = at_s + 0.0  # SQLite has no negative zero
            text = json.dumps(body, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
            number, kind_, subject_, body_ = self._sequence + 1, kind.encode(), subject.encode(), text.encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise Permanent(
                f"{self.path}: the {kind} entry cannot be written: {_why_not(at_s, subject, body, error)}"
            ) from None
        sum_ = checksum(number, at_s, self.generation, kind_, subject_, body_)
        durable = kind in _DURABLE
        with _naming(self.path, self._damaged), self._synchronous(durable):
            self._db.execute(
                f"INSERT INTO entries ({_READ}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (number, at_s, self.generation, kind, subject, text, sum_),
            )
        self._sequence, self._total = number, (self._total + sum_) & MASK
        for follower in self._followers:
            follower.set()
        with _naming_tail(self.path):
            self._tail.write(self._acknowledged(), durable=durable)
        self._until_prune -= 1
        if self._until_prune <= 0:
            try:
                self._prune(number)
            except Permanent as error:  # the entry is written; the next removal follows PRUNE_EVERY entries later
                logger.error("old entries cannot be removed: %s", error)
        return number

    @contextmanager
    def _synchronous(self, durable: bool) -> Iterator[None]:
        """Run the block, which writes an entry. If `durable` is True, the entry survives a power failure once the block
        has ended."""
        if not durable:
            yield
            return
        self._db.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self._db.execute("PRAGMA synchronous = NORMAL")

    async def follow(self, sequence: int, kinds: Sequence[str] = ()) -> AsyncIterator[JournalEntry]:
        """Yield the entries with numbers greater than `sequence`, then each new entry when it is written. If `kinds` is
        not empty, only entries of these kinds are yielded. The iterator does not end by itself."""
        news = asyncio.Event()
        self._followers.add(news)
        try:
            while True:
                news.clear()
                for entry in self.since(sequence, kinds):
                    sequence = entry.sequence
                    yield entry
                    news.set()  # one read may not return all of them
                await news.wait()
        finally:
            self._followers.discard(news)

    def close(self) -> None:
        super().close()
        self._tail.close()
        os.close(self._lock_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prune(self, newest: int) -> None:
        self._until_prune = PRUNE_EVERY
        kept = ", ".join("?" * len(_RECOVERED_FROM_LATEST))
        still_open = " OR ".join(map(_open, OPERATIONS))
        for each in OPERATIONS:  # the steps of open operations
            subjects = f"SELECT subject FROM entries WHERE {_open(each)}"
            still_open += f" OR (kind = '{each.step}' AND subject IN ({subjects}))"
        with _naming(self.path, self._damaged), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            gone = self._db.execute(
                f"DELETE FROM entries WHERE sequence <= ? AND NOT ({still_open}) AND sequence NOT IN"
                f" (SELECT max(sequence) FROM entries WHERE kind IN ({kept}) GROUP BY kind)"
                " AND sequence NOT IN (SELECT max(sequence) FROM entries WHERE kind = ? GROUP BY subject)"
                " RETURNING checksum",
                (newest - self._max_entries, *_RECOVERED_FROM_LATEST, EntryKind.CIRCUITS_OWNED),
            ).fetchall()
            pruned = (meta_of(self._db)["pruned"] + sum(checksum_ for (checksum_,) in gone)) & MASK
            signed = pruned - (MASK + 1) if pruned > MASK // 2 else pruned
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'pruned'", (signed,))

    def _damaged(self, why: str) -> None:
        if why not in self.damage and why not in self._confirmed:
            self.damage = (*self.damage, why)
            logger.error("%s is damaged: %s", self.path, why)


def _damage_in(mark: Mapping[str, Any]) -> tuple[str, ...]:
    kept_as, kept = mark["kept_as"], mark["entries_kept"]
    went_on = f"{kept} readable entries continue in a new file; the damaged one is kept as {kept_as}"
    return (*mark["faults"], went_on)


def _of_kinds(kinds: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    return (f"kind IN ({', '.join('?' * len(kinds))})", tuple(kinds)) if kinds else ("TRUE", ())


def _locked(path: Path) -> int:
    """Lock the journal for writing, and return a file descriptor that holds the lock while it is open. The system
    releases the lock when the process ends. Raises Permanent if another process holds the lock."""
    lock = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise Permanent(f"{lock}: cannot open the lock file: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Permanent(
            f"{path}: another daemon already uses this journal; set another journal.path, or start in another folder"
        ) from None
    return descriptor


def _why_not(at_s: float, subject: str, body: Mapping[str, Any], error: Exception) -> str:
    """Return a text that lists every reason why an entry cannot be written."""
    faults = body_faults({"body": body, "subject": subject})
    if not isinstance(body, dict):
        faults.append(f"body: must be an object, got {shorten(body)}")
    if not EARLIEST_S <= at_s <= LATEST_S:
        faults.append(f"at_s: must be a time in seconds since 1970, got {at_s}")
    return "; ".join(faults) or str(error)


@contextmanager
def _naming(path: Path, on_damage: Callable[[str], None] = lambda why: None) -> Iterator[None]:
    """Convert SQLite errors raised in the block to Permanent. The message contains the file's name and, if the file is
    damaged, instructions for the operator. `on_damage` is called with the text of an error that shows damage."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise Permanent(f"{path}: {error}") from error
    except sqlite3.DatabaseError as error:
        on_damage(str(error))
        raise Permanent(
            f"{path}: is damaged or is not a journal ({error}); move the file away to start a new journal"
        ) from error


@contextmanager
def _naming_tail(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Permanent(f"{path}: the tail file cannot be written: {error.strerror}") from error
