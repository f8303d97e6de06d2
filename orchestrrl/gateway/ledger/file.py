"""The gateway's ledger on disk: pieces of answers in SQLite, shared by all gateway processes of a machine.

Rows are appended and never changed. They are found by the key of their request, and the oldest rows are removed first.
Writes are not synchronous (`synchronous = NORMAL`: SQLite calls fsync at a checkpoint, not for each transaction). A
power failure may lose recent pieces, but the file stays consistent. The lost pieces were already delivered or are
generated again. A killed process loses nothing that it has committed.

Claims show which process serves a request. A claim is a lock on one byte of a file. Taking or releasing a claim needs
one system call and no disk access, and the lock is released when its process ends. The locks are open file description
locks (fcntl(2)), so they also exclude another RequestClaims of the same process.
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
BUSY_WITHIN_S = 5.0  # timeout of SQLite's lock; other processes' writes take milliseconds
MOST_LOG_BYTES = 16 << 20  # size limit of SQLite's write-ahead log after a checkpoint
ROWS_AT_ONCE = 256  # rows read in one step of pruning
FREE_PAGES_AT_ONCE = 4096  # pages returned to the file system in one step
SHRINK_TO = 0.9  # pruning shrinks the file to this fraction of its limit, so that not every write prunes

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
# Rows per statement: each call into SQLite releases and reacquires the interpreter lock.
ROWS_OF_A_STATEMENT = 64


class NamedRequest(NamedTuple):
    """A request to which its client gave the id `name`. `digest` identifies the endpoint and the body, and `created_s`
    is the creation time in the response."""

    name: str
    digest: bytes
    created_s: float


class AnswerRow(NamedTuple):
    key: int
    written_s: float
    named_request: NamedRequest | None  # set for an answer's first piece
    piece: AnswerPiece


class AnswerFile:
    """A connection to the ledger's file, to be used by one thread at a time. All methods raise sqlite3.Error if the
    disk fails."""

    def __init__(self, path: Path, busy_within_s: float = BUSY_WITHIN_S) -> None:
        """Open or create the file. `busy_within_s` is the time, in seconds, to wait for a lock of another process.
        Raises sqlite3.Error if the file cannot be opened, and Permanent if it is not a ledger of this format."""
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
            raise Permanent(f"{path}: is not a gateway's ledger; set --ledger to another file")
        if tables and version != FORMAT:
            raise Permanent(
                f"{path}: must have ledger format {FORMAT}, got {version}; move the file away to create a new ledger"
            )
        if not tables:
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(f"PRAGMA journal_size_limit = {MOST_LOG_BYTES}")
        if not tables:
            self._db.executescript(_SCHEMA)

    def write(self, rows: Iterable[AnswerRow]) -> None:
        """Write the rows in one transaction."""
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
        """Return the stored request with this key and name, and the pieces of its answers. The request is None if it is
        not stored."""
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
        """Remove requests that have received no piece since `before_s`. If the file exceeds `most_bytes`, also remove
        the oldest requests until the file has shrunk to the fraction `SHRINK_TO` of this limit. Return the number of
        removed requests.

        `take` claims a request by its key and returns False if the request is being served. A request that is being
        served is not removed. `free` releases the claim.
        """
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
    """Create the ledger's file if it does not exist. Raises Permanent if the path cannot hold a ledger."""
    try:
        with closing(AnswerFile(path)) as file:
            file.has(0)
    except sqlite3.OperationalError as error:
        raise Permanent(f"{path}: cannot open the ledger: {error}") from error
    except sqlite3.DatabaseError as error:
        raise Permanent(
            f"{path}: is damaged or is not a ledger ({error}); move the file away to create a new ledger"
        ) from error


# The kernel scans a file's locks linearly. With this many files, the scans stay short for ten thousand requests.
FILES = 64
_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_POSITION = (1 << 62) - 1


class RequestClaims:
    """Claims on requests by their keys, which are integers below 2**63. The methods `take` and `free` are
    thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Open the lock files in `folder`, and create them if necessary. Raises OSError if a file cannot be opened."""
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
        """Claim the key and return True. Returns False if this process or another process has already claimed the key.
        Raises OSError if the file system does not support locks."""
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
