"""The gateway's ledger on disk: pieces of answers in SQLite, which all gateway processes of a machine share.

Rows are only ever added, at the end, and found by their request's key; the oldest go first. Nothing is waited for on
its way to the disk (`synchronous = NORMAL`: SQLite calls fsync when it moves its log into the file, and not for each
transaction): what a power cut takes was delivered or is generated again, and the file stays sound. A killed process
takes nothing that it had committed.

Claims show which process has a request in hand. A claim is a lock on one byte of a file, taken and freed by a system
call each, without a disk, and gone with the process that holds it, however it ends. (Locks of open file descriptions,
fcntl(2): another RequestClaims of the same process is kept out as well.)
"""

import errno
import fcntl
import itertools
import os
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from orchestrrl.core.errors import Permanent
from orchestrrl.gateway.ledger.pieces import AnswerPiece

APPLICATION_ID = 0x4F52_4C32  # "ORL2"
FORMAT = 1
BUSY_WITHIN_S = 5.0  # the other processes' writing takes milliseconds
MOST_LOG_BYTES = 16 << 20  # what SQLite's log keeps on disk between two moves into the file
ROWS_AT_ONCE = 256  # are looked at in one step of pruning
FREE_PAGES_AT_ONCE = 4096  # are given back to the file system in one step
SHRINK_TO = 0.9  # of the most bytes, so that not every write removes something

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS pieces (
  row INTEGER PRIMARY KEY, key INTEGER NOT NULL, written_s REAL NOT NULL,
  name TEXT, digest BLOB, created_s REAL,
  answer INTEGER NOT NULL, number INTEGER NOT NULL, ids BLOB NOT NULL, text BLOB NOT NULL, prompt_ids BLOB,
  prompt_tokens INTEGER NOT NULL, max_tokens INTEGER, attempt INTEGER NOT NULL, version INTEGER,
  finish_reason TEXT, more TEXT
);
CREATE INDEX IF NOT EXISTS pieces_by_key ON pieces (key);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
"""
_COLUMNS = "answer, number, ids, text, prompt_ids, prompt_tokens, max_tokens, attempt, version, finish_reason, more"
_INSERT = f"INSERT INTO pieces (key, written_s, name, digest, created_s, {_COLUMNS}) VALUES "
_VALUES = f"({', '.join('?' * 16)})"
# So many rows with one statement: each call into SQLite hands the interpreter over to the requests and takes it back.
ROWS_OF_A_STATEMENT = 64


class NamedRequest(NamedTuple):
    """What a client asked under a name. `created_s` is what its answer gives as its time."""

    name: str
    digest: bytes
    created_s: float


class AnswerRow(NamedTuple):
    key: int
    written_s: float
    named_request: NamedRequest | None  # with an answer's first piece
    piece: AnswerPiece


class AnswerFile:
    """One connection. Of one thread at a time. Everything raises sqlite3.Error when the disk fails."""

    def __init__(self, path: Path, busy_within_s: float = BUSY_WITHIN_S) -> None:
        """Opens the file, or makes it. Raises sqlite3.Error, and Permanent for a file of something else."""
        self._db = sqlite3.connect(
            path, timeout=busy_within_s, isolation_level=None, check_same_thread=False, cached_statements=128
        )
        self._lookup = self._db.cursor()
        try:
            self._prepare(path)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, path: Path) -> None:
        identity, version, tables = self._db.execute(
            "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)"
            " FROM pragma_application_id, pragma_user_version"
        ).fetchone()
        if tables and identity != APPLICATION_ID:
            raise Permanent(f"{path}: is not a gateway's ledger")
        if tables and version != FORMAT:
            raise Permanent(f"{path}: has ledger format {version}, this version reads {FORMAT}; move it away")
        if not tables:
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(f"PRAGMA journal_size_limit = {MOST_LOG_BYTES}")
        if not tables:
            self._db.executescript(_SCHEMA)

    def write(self, rows: Iterable[AnswerRow]) -> None:
        """All of them, or none."""
        nothing = (None, None, None)
        values = [(row.key, row.written_s, *(row.named_request or nothing), *row.piece) for row in rows]
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for start in range(0, len(values), ROWS_OF_A_STATEMENT):
                batch = values[start : start + ROWS_OF_A_STATEMENT]
                statement = _INSERT + ", ".join([_VALUES] * len(batch))
                self._db.execute(statement, list(itertools.chain.from_iterable(batch)))

    def has(self, key: int) -> bool:
        return self._lookup.execute("SELECT 1 FROM pieces WHERE key = ? LIMIT 1", (key,)).fetchall() != []

    def read(self, key: int, name: str) -> tuple[NamedRequest | None, list[AnswerPiece]]:
        """Return what was asked under this name, None where nothing was, and the pieces of its answers."""
        query = f"SELECT name, digest, created_s, {_COLUMNS} FROM pieces WHERE key = ? ORDER BY row"
        rows = self._db.execute(query, (key,)).fetchall()
        asked = next((NamedRequest(*row[:3]) for row in reversed(rows) if row[0] == name), None)
        return asked, [AnswerPiece(*row[3:]) for row in rows]

    @property
    def used_bytes(self) -> int:
        query = "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count"
        (used_bytes,) = self._db.execute(f"{query}, pragma_page_size").fetchone()
        return int(used_bytes)

    def prune(self, before_s: float, most_bytes: int, take: Callable[[int], bool], free: Callable[[int], None]) -> int:
        """Remove requests of which nothing was written since `before_s`, and the oldest where the file holds more than
        `most_bytes`; none that cannot be taken because it is in hand. Returns how many went."""
        removed = 0
        row = 0
        too_large = self.used_bytes > most_bytes
        while True:
            too_large = too_large and self.used_bytes > SHRINK_TO * most_bytes
            query = "SELECT row, key, written_s FROM pieces WHERE row > ? ORDER BY row LIMIT ?"
            found = self._db.execute(query, (row, ROWS_AT_ONCE)).fetchall()
            if not found or not (too_large or found[0][2] < before_s):
                break
            row = found[-1][0]
            old = {key: None for _, key, written_s in found if too_large or written_s < before_s}
            taken = [key for key in old if (too_large or self._written_s(key) < before_s) and take(key)]
            try:
                with self._db:
                    self._db.execute("BEGIN IMMEDIATE")
                    self._db.executemany("DELETE FROM pieces WHERE key = ?", [(key,) for key in taken])
            finally:
                for key in taken:
                    free(key)
            removed += len(taken)
        if removed:
            self._db.execute(f"PRAGMA incremental_vacuum({FREE_PAGES_AT_ONCE})").fetchall()
        return removed

    def _written_s(self, key: int) -> float:
        (newest_s,) = self._db.execute("SELECT max(written_s) FROM pieces WHERE key = ?", (key,)).fetchone()
        return float(newest_s)

    def close(self) -> None:
        self._db.close()


def check(path: Path) -> None:
    """Make the file where it is not there. Raises Permanent when there can be no ledger at this path."""
    try:
        with closing(AnswerFile(path)) as file:
            file.has(0)
    except sqlite3.OperationalError as error:
        raise Permanent(f"{path}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise Permanent(f"{path}: is damaged or no ledger ({error}); move it away to start a new one") from error


# The kernel walks a file's locks one by one: with so many files, ten thousand requests are short walks.
FILES = 64
_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_POSITION = (1 << 62) - 1


class RequestClaims:
    """Claims of requests by their keys, whole numbers below 2**63. Any thread may call."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._files: list[int] = []
        try:
            for number in range(FILES):
                self._files.append(os.open(folder / f"{number:02d}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError:
            self.close()
            raise
        self._held: set[int] = set()
        self._guard = threading.Lock()

    def take(self, key: int) -> bool:
        """False: it is held, here or by another process. Raises OSError where the file system has no locks."""
        with self._guard:
            if key in self._held:
                return False
            try:
                self._lock(key, fcntl.F_WRLCK)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    return False
                raise
            self._held.add(key)
            return True

    def free(self, key: int) -> None:
        with self._guard:
            if key in self._held:
                self._held.remove(key)
                self._lock(key, fcntl.F_UNLCK)

    def close(self) -> None:
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []

    def _lock(self, key: int, kind: int) -> None:
        lock = _LOCK.pack(kind, os.SEEK_SET, key & _POSITION, 1, 0)
        fcntl.fcntl(self._files[key % FILES], fcntl.F_OFD_SETLK, lock)
