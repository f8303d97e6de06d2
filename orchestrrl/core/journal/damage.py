"""Detect damage to a journal, and replace a damaged journal with a new one that contains its readable entries.

Every entry has a checksum. The file `<journal>.tail` next to the journal contains the number of the last acknowledged
entry and the sum of the checksums of all entries ever written. The tail is written after each entry. A process that is
killed between the two writes therefore leaves a journal with one entry more than its tail records, but never with fewer
entries. If a journal has fewer entries than its tail records, entries were lost, even if the file itself is consistent.
"""

import hashlib
import json
import os
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrrl.core.errors import Permanent, few

APPLICATION_ID = 0x4F52_4C31  # "ORL1"
SCHEMA_VERSION = 2
UNGUARDED = 1  # the format without checksums and tail
MASK = 2**64 - 1

_TAIL = struct.Struct(">8sIQQQ")  # magic, format, generation, sequence, sum
_MAGIC = b"ORLTAIL\n"
_ENTRY = struct.Struct(">qdqIII")  # sequence, time, generation, lengths of kind, subject and body
FAULTS_NAMED = 5
_WRONG_CONTENT = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
_VERSIONS = ((1, 1), (2, 2))  # of a file's format for writers and readers: without and with a write-ahead log
COLUMNS = "sequence, at_s, generation, kind, subject, body"

Row = tuple[Any, ...]


def checksum(sequence: int, at_s: float, generation: int, kind: bytes, subject: bytes, body: bytes) -> int:
    """Return the checksum of an entry as a signed 64-bit integer, the type that SQLite stores."""
    head = _ENTRY.pack(sequence, at_s, generation, len(kind), len(subject), len(body))
    digest = hashlib.blake2b(b"".join((head, kind, subject, body)), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def is_intact(row: Row) -> bool:
    """Return whether an entry is unchanged since it was written. `row` has the columns in `COLUMNS`, followed by the
    checksum. Texts in `row` must be bytearrays, so that the function detects a text that was turned into a blob by
    damage."""
    if any(type(text) is not bytearray for text in row[3:6]):
        return False
    try:
        return bool(checksum(row[0], row[1], row[2], row[3], row[4], row[5]) == row[6])
    except struct.error:  # a number was turned into another type
        return False


# --- Tail file


@dataclass(frozen=True, slots=True)
class JournalTail:
    """The last state of a journal that its writer has acknowledged, as recorded in the tail file."""

    generation: int = 0
    sequence: int = 0
    total: int = 0  # of the checksums of all entries ever written, modulo 2**64
    format: int = SCHEMA_VERSION

    def encoded(self) -> bytes:
        record = _TAIL.pack(_MAGIC, self.format, self.generation, self.sequence, self.total)
        return record + hashlib.blake2b(record, digest_size=8).digest()


class TailFile:
    """The tail file of a journal, opened by the journal's writer."""

    def __init__(self, journal: Path, tail: JournalTail) -> None:
        """Open the tail file of `journal` and write `tail`, which survives a power failure after this call. Raises
        OSError if the file cannot be written."""
        self.path = tail_path(journal)
        if not self.path.exists():  # the file never exists without its record
            half = beside(journal, ".tail.half")
            half.write_bytes(tail.encoded())
            os.replace(half, self.path)
        self._descriptor = os.open(self.path, os.O_RDWR)
        try:
            self.write(tail)
            os.fsync(self._descriptor)
            sync_folder(journal)
        except BaseException:
            self.close()
            raise

    def write(self, tail: JournalTail, *, durable: bool = False) -> None:
        """Replace the file's record with `tail`. If the process is killed during the call, the file contains either the
        previous or the new record. If `durable` is True, the record survives a power failure after this call. Raises
        OSError if the file cannot be written."""
        os.pwrite(self._descriptor, tail.encoded(), 0)
        if durable:
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def tail_path(journal: Path) -> Path:
    return beside(journal, ".tail")


def beside(journal: Path, suffix: str) -> Path:
    return journal.with_name(journal.name + suffix)


def sync_folder(journal: Path) -> None:
    folder = os.open(journal.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_tail(journal: Path) -> JournalTail | None:
    """Return the content of a journal's tail file, or None if the file does not exist. Raises ValueError if the file is
    damaged."""
    try:
        data = tail_path(journal).read_bytes()
    except FileNotFoundError:
        return None
    record, digest = data[: _TAIL.size], data[_TAIL.size :]
    is_whole = len(data) == _TAIL.size + 8 and hashlib.blake2b(record, digest_size=8).digest() == digest
    if not is_whole or not record.startswith(_MAGIC):
        raise ValueError("the tail file is damaged")
    _, format, generation, sequence, total = _TAIL.unpack(record)
    return JournalTail(generation, sequence, total, format)


# --- Examination


@dataclass(slots=True)
class JournalExamination:
    """The result of examining a journal's files. `faults` is empty if no entry is lost or damaged."""

    faults: list[str] = field(default_factory=list)
    version: int = 0  # of the format; 0: there is no journal yet
    tail: JournalTail = field(default_factory=JournalTail)  # as computed from the entries

    def fault(self, text: str) -> None:
        if text not in self.faults:
            self.faults.append(text)


def examine(path: Path) -> JournalExamination:
    """Check a journal against its checksums and its tail file, without changing any file. Raises Permanent if the file
    at `path` is not a journal, or has a format that this version does not support."""
    found = JournalExamination()
    tail: JournalTail | None = None
    try:
        tail = read_tail(path)
    except ValueError as error:
        found.fault(str(error))
    is_ours = tail is not None or bool(found.faults)
    if not path.exists() or path.stat().st_size == 0:
        _examine_absence(path, tail, found)
        return found
    try:
        with closing(open_read_only(path)) as db:
            db.execute("BEGIN")
            (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if tables or (is_ours and (tail is None or tail.generation)):  # otherwise its first start was interrupted
                version = identify(path, db, tail, is_ours)
                columns = [bytes(name) for (name,) in db.execute("SELECT name FROM pragma_table_info('entries')")]
                if version == UNGUARDED and b"checksum" in columns:
                    raise ValueError("the header is damaged")
                found.version = version
            with path.open("rb") as file:
                versions = tuple(file.read(20)[18:])
            _examine_database(db, versions, tail, found)
    except sqlite3.DatabaseError as error:
        if not is_ours or not _is_damage(error):
            raise
        found.fault(f"the file cannot be read: {error}")
    except ValueError as error:
        found.fault(str(error))
    if found.version == SCHEMA_VERSION and not is_ours:
        found.fault(f"{tail_path(path).name} is missing, so the newest entries may be lost")
    return found


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether the error shows that the file's content is damaged, rather than that the file cannot be opened or
    read at present."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & 0xFF in _WRONG_CONTENT


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open a journal without changing the file or its write-ahead log. Texts are read as bytearray."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    db.text_factory = bytearray
    return db


def _examine_absence(path: Path, tail: JournalTail | None, found: JournalExamination) -> None:
    log = beside(path, "-wal")
    how = "is empty" if path.exists() else "is missing"
    if tail is not None and tail.generation:
        found.fault(f"the file {how}, but {tail.sequence} entries were written to it")
    elif log.exists() and log.stat().st_size:
        found.fault(f"the file {how}, but its write-ahead log exists")
    elif found.faults:
        found.fault(f"the file {how}")


def identify(path: Path, db: sqlite3.Connection, tail: JournalTail | None = None, is_ours: bool = False) -> int:
    """Return the version of the journal's format. `tail` is the content of the tail file, or None if it cannot be read.
    `is_ours` is True if a tail file shows that the file at `path` was a journal. Raises ValueError if the file's header
    is damaged. Otherwise, raises Permanent if the file is not a journal or has an unsupported format."""
    (identity,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if identity != APPLICATION_ID:
        if is_ours:
            raise ValueError("the header is damaged")
        raise Permanent(f"{path}: is not an OrchestrRL journal")
    if version not in (UNGUARDED, SCHEMA_VERSION):
        if tail is not None and tail.format != version:
            raise ValueError("the header is damaged")
        raise Permanent(f"{path}: has journal format {version}, but this version supports only format {SCHEMA_VERSION}")
    return int(version)


def _examine_database(
    db: sqlite3.Connection, versions: tuple[int, ...], tail: JournalTail | None, found: JournalExamination
) -> None:
    if found.version == 0:
        return
    guarded = found.version == SCHEMA_VERSION
    if versions not in _VERSIONS:
        found.fault("the header is damaged")
    meta = meta_of(db)
    if guarded and (meta.get("schema") != schema_sum(db) or meta.get("generation_sum") != number_sum(meta)):
        found.fault("the table of contents is damaged")
    for (text,) in db.execute(f"PRAGMA integrity_check({FAULTS_NAMED})").fetchall():
        if text != b"ok":
            found.fault(f"the database is damaged: {bytes(text).decode(errors='replace')}")
    total, last, broken = meta.get("pruned", 0), 0, []
    later = 0  # the checksums of entries after the tail, which a killed process may leave
    for row in rows_of(db, guarded):
        if not is_intact(row):
            broken.append(str(row[0]))
            continue
        last = row[0]
        if tail is not None and last > tail.sequence:
            later += row[6]
        else:
            total += row[6]
    if broken:
        found.fault(f"{len(broken)} entries are damaged: {few(broken, between=', ')}")
    _compare(db, tail, found, total & MASK, last)
    found.tail = JournalTail(int(meta.get("generation", 0)), last, (total + later) & MASK)


def _compare(
    db: sqlite3.Connection, tail: JournalTail | None, found: JournalExamination, total: int, last: int
) -> None:
    """Compare the entries with the tail file and with the last entry number that SQLite assigned, and add a fault to
    `found` for each difference."""
    numbered = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'entries'").fetchone()
    if (numbered[0] if numbered else 0) != last:
        found.fault(f"the last entry is {last}, but {numbered[0] if numbered else 0} were written")
    if tail is None:
        return
    if last < tail.sequence:
        found.fault(f"the newest entries are lost: the last is {last}, but {tail.sequence} were written")
    elif total != tail.total:
        found.fault("entries were lost or changed: their checksums do not add up")
    if meta_of(db).get("generation", 0) < tail.generation:
        found.fault("the journal is older than its tail file")


def meta_of(db: sqlite3.Connection) -> dict[str, int]:
    """Return the numbers in the journal's table `meta`, by name. Raises ValueError if a value is not a number."""
    rows = db.execute("SELECT key, value FROM meta").fetchall()
    if any(type(key) is not bytearray or type(value) is not int for key, value in rows):
        raise ValueError("the table of contents is damaged")
    return {key.decode(errors="replace"): value for key, value in rows}


def number_sum(meta: Mapping[str, int]) -> int:
    """Return the checksum of the generation that is stored in the table `meta`."""
    return checksum(0, 0.0, meta.get("generation", 0), b"generation", b"", b"")


def schema_sum(db: sqlite3.Connection) -> int:
    """Return the checksum of the definitions of all tables and indexes. The `text_factory` of the connection must be
    `bytearray`."""
    rows = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name").fetchall()
    text = b"\n".join(each for row in rows for each in row if isinstance(each, bytearray))
    return checksum(0, 0.0, 0, b"schema", b"", text)


def rows_of(db: sqlite3.Connection, guarded: bool, order: str = "ASC") -> Iterator[Row]:
    """Yield all entries sorted by number in ascending or descending `order`, each with its checksum. If `guarded` is
    False, the journal stores no checksums, so they are computed."""
    column = ", checksum" if guarded else ""
    for row in db.execute(f"SELECT {COLUMNS}{column} FROM entries NOT INDEXED ORDER BY sequence {order}"):
        yield row if guarded else (*row, _checksum_of(row))


def _checksum_of(row: Row) -> int | None:
    """Return the checksum of an entry's row, or None if the row has a value that no version of the daemon writes."""
    try:
        for text in row[3:6]:
            bytes(text).decode()
        return checksum(*row)
    except (struct.error, TypeError, ValueError):
        return None


# --- Replacement


def replace_damaged(path: Path, found: JournalExamination, schema: str, kind: str, at_s: float) -> None:
    """Replace a damaged journal with a new one that has all readable entries, and keep the damaged files next to it.
    The new journal's last entry records the damage and has the given `kind`. The files are exchanged at the end. If the
    process is killed before the exchange, the old files remain in place. If it is killed during the exchange, `finish`
    completes the exchange. Raises OSError or sqlite3.Error if a file cannot be written."""
    with suppress(ValueError):
        told, read = read_tail(path) or JournalTail(), found.tail
        found.tail = JournalTail(max(told.generation, read.generation), max(told.sequence, read.sequence))
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    kept_as = next(
        name
        for name in (f"{path.name}.damaged-{stamp}{f'-{n}' if n else ''}" for n in range(1000))
        if not path.with_name(name).exists()
    )
    draft = beside(path, ".new")
    _remove_draft(draft)
    with closing(sqlite3.connect(draft, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = FULL")
        db.text_factory = bytearray
        db.executescript(schema)
        db.execute("BEGIN")
        kept, highest, total, generation = 0, found.tail.sequence, 0, found.tail.generation
        for row in _readable(path, found.version != UNGUARDED):
            texts = (bytes(each).decode() for each in row[3:6])
            taken = db.execute(
                f"INSERT OR IGNORE INTO entries ({COLUMNS}, checksum) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*row[:3], *texts, row[6]),
            ).rowcount
            if taken:
                kept, highest, total = kept + 1, max(highest, row[0]), total + row[6]
                generation = max(generation, row[2])
        body = {"faults": found.faults, "kept_as": kept_as, "entries_kept": kept}
        text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
        sequence = highest + 1
        sum_ = checksum(sequence, at_s, generation, kind.encode(), b"", text.encode())
        db.execute(
            f"INSERT INTO entries ({COLUMNS}, checksum) VALUES (?, ?, ?, ?, '', ?, ?)",
            (sequence, at_s, generation, kind, text, sum_),
        )
        write_meta(db, {"generation": generation, "pruned": 0})
        db.execute("COMMIT")
    tail = JournalTail(generation, sequence, (total + sum_) & MASK)
    half = beside(path, ".tail.half")
    half.write_bytes(tail.encoded())
    for written in (draft, half):
        with written.open("rb") as file:
            os.fsync(file.fileno())
    os.replace(half, beside(path, ".tail.new"))
    sync_folder(path)
    finish(path)


def finish(path: Path) -> None:
    """Complete an interrupted exchange of files by `replace_damaged`. If no exchange had begun, delete the unfinished
    draft of the new journal, if there is one. The function is idempotent."""
    draft, tail = beside(path, ".new"), beside(path, ".tail.new")
    if not tail.exists():
        _remove_draft(draft)
        return
    if draft.exists():
        with closing(open_read_only(draft)) as db:
            (text,) = db.execute("SELECT body FROM entries ORDER BY sequence DESC LIMIT 1").fetchone()
        kept_as = path.with_name(json.loads(text)["kept_as"])
        for suffix in ("-journal", "-wal", "-shm", ".tail", ""):
            if beside(path, suffix).exists():
                os.rename(beside(path, suffix), beside(kept_as, suffix))
        os.rename(draft, path)
    os.rename(tail, tail_path(path))
    sync_folder(path)


def roll_back(path: Path) -> None:
    """Undo the incomplete write of a process that was killed while it created the journal. Opening the file with write
    access makes SQLite roll the write back. Raises OSError if the files cannot be accessed."""
    if path.exists() and beside(path, "-journal").exists():
        with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(path)) as db:
            db.execute("SELECT count(*) FROM sqlite_schema").fetchone()


def write_meta(db: sqlite3.Connection, numbers: Mapping[str, int]) -> None:
    """Write numbers to the journal's table `meta`, with the checksums of the generation and the schema. The connection
    must read texts as bytearray."""
    sums = {"generation_sum": number_sum(numbers), "schema": schema_sum(db)}
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", {**numbers, **sums}.items())


def _remove_draft(draft: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        beside(draft, suffix).unlink(missing_ok=True)


def _readable(path: Path, guarded: bool) -> Iterator[Row]:
    """Yield all readable entries of a damaged journal. The entries before the damage are yielded in ascending order,
    and those after it in descending order. An entry may be yielded twice."""
    if not path.exists() or not path.stat().st_size:  # SQLite would delete the log of an empty file
        return
    for order in ("ASC", "DESC"):
        # If a name is damaged, sqlite3 cannot even format the error's message.
        with suppress(sqlite3.Error, UnicodeDecodeError), closing(open_read_only(path)) as db:
            for row in rows_of(db, guarded, order):
                if is_intact(row) and _is_entry(row):
                    yield row


def _is_entry(row: Row) -> bool:
    try:
        return isinstance(json.loads(row[5]), dict) and bool(bytes(row[3] + row[4]).decode() or True)
    except ValueError:
        return False
