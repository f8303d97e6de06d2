"""The append-only record of inputs, decisions and outcomes, in SQLite; recovery and replay read it.

One process writes (a lock file beside the journal sees to it), any number read meanwhile. An entry is on disk for good
once `append` returns, as far as a killed process goes; a power cut may take the last few, never a generation. The
oldest entries beyond `max_entries` are dropped, except what recovery needs: open operations, switches and weight syncs,
and the latest control, calibration, change of the deployment, mode, routes, gate, roster of engines, word on the
fabric, pauses, way of its packets and weights, and of each switch the latest word on whose its circuits are.
"""

import asyncio
import fcntl
import json
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from orchestrrl.errors import Permanent

APPLICATION_ID = 0x4F52_4C31  # "ORL1"
SCHEMA_VERSION = 1
# How many appends pass between two removals of old entries.
PRUNE_EVERY = 1000


class Kind(StrEnum):
    """What an entry tells. Operations have an intent before anything is sent and a result when it is known."""

    DAEMON_STARTED = "daemon.started"
    DAEMON_STOPPED = "daemon.stopped"
    CONFIG_RELOADED = "config.reloaded"
    MODE = "mode"
    NODE_ATTACHED = "node.attached"
    NODE_DETACHED = "node.detached"
    ENGINE_HEALTH = "engine.health"
    ENGINES = "engines"  # an operator added, drained or removed one; who stands how since
    STEP_ENDED = "step.ended"
    PLAN = "plan"
    PLAN_ACTED = "plan.acted"
    PLAN_ACTUAL = "plan.actual"
    PLAN_CALIBRATION = "plan.calibration"
    PLAN_CONTROL = "plan.control"
    DEPLOYMENT_BEGAN = "deployment.began"
    DEPLOYMENT_ENDED = "deployment.ended"
    SWITCH_BEGAN = "switch.began"
    SWITCH_STEP = "switch.step"
    SWITCH_ENDED = "switch.ended"
    ENGINE_STARTED = "engine.started"
    ENGINE_STOPPED = "engine.stopped"
    PROFILE_REFITTED = "profile.refitted"
    BALANCE = "balance"
    GATE = "gate"
    ROUTES = "routes"
    OPERATION_INTENT = "operation.intent"
    OPERATION_SENT = "operation.sent"
    OPERATION_RESULT = "operation.result"
    CIRCUITS_INTENT = "circuits.intent"
    CIRCUITS_RESULT = "circuits.result"
    CIRCUITS_OWNED = "circuits.owned"  # of a switch: which of its circuits are ours since
    PERIOD_INTENT = "period.intent"  # of a name, as it was announced last
    PERIOD = "period"  # a period has ended: committed, kept, superseded or failed
    FABRIC_CONTROL = "fabric.control"  # an operator's pins, override and masks
    STEERED = "fabric.steered"  # over which cross-connects packets are routed
    HOLDS = "holds"  # what an operator has paused
    SYNC_BEGAN = "sync.began"  # a weight version was published
    SYNC_STEP = "sync.step"  # how it stands; what it is about to do is written down before
    SYNC_ENDED = "sync.ended"
    WEIGHTS = "weights"  # the version that the fleet is committed to, and engines that have not got it


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal. `subject` is the id of what it is about: an operation, a plan, an engine."""

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
  at_s REAL NOT NULL, generation INTEGER NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS entries_by_kind ON entries (kind, sequence);
CREATE INDEX IF NOT EXISTS results_by_subject ON entries (subject) WHERE kind = '{Kind.OPERATION_RESULT}';
CREATE INDEX IF NOT EXISTS switches_by_subject ON entries (subject) WHERE kind = '{Kind.SWITCH_ENDED}';
CREATE INDEX IF NOT EXISTS syncs_by_subject ON entries (subject) WHERE kind = '{Kind.SYNC_ENDED}';
CREATE INDEX IF NOT EXISTS circuits_by_subject ON entries (subject) WHERE kind = '{Kind.CIRCUITS_RESULT}';
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""

_COLUMNS = "sequence, at_s, generation, kind, subject, body"

_RESULT_OF = {
    Kind.OPERATION_INTENT: Kind.OPERATION_RESULT,
    Kind.CIRCUITS_INTENT: Kind.CIRCUITS_RESULT,
    Kind.SWITCH_BEGAN: Kind.SWITCH_ENDED,
    Kind.SYNC_BEGAN: Kind.SYNC_ENDED,
}
_STEP_OF = {Kind.SWITCH_STEP: Kind.SWITCH_BEGAN, Kind.SYNC_STEP: Kind.SYNC_BEGAN}


def _open(intent: Kind) -> str:
    return f"""
(kind = '{intent}' AND NOT EXISTS (
  SELECT 1 FROM entries AS result WHERE result.kind = '{_RESULT_OF[intent]}' AND result.subject = entries.subject
))"""


_RECOVERED_FROM_LATEST = (
    Kind.PLAN_CONTROL,
    Kind.PLAN_CALIBRATION,
    Kind.DEPLOYMENT_ENDED,
    Kind.SWITCH_ENDED,
    Kind.MODE,
    Kind.ROUTES,
    Kind.ENGINES,
    Kind.GATE,
    Kind.FABRIC_CONTROL,
    Kind.STEERED,
    Kind.HOLDS,
    Kind.WEIGHTS,
)


class JournalReader:
    """Reading, also while another process writes."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise Permanent(f"{path}: there is no journal")
        self.path = path
        with _naming(path):
            self._db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
            _check_identity(path, self._db)

    def tail(self, count: int, kinds: Sequence[str] = ()) -> list[Entry]:
        """The newest `count` entries, oldest first."""
        where, values = _of_kinds(kinds)
        query = f"SELECT {_COLUMNS} FROM entries WHERE {where} ORDER BY sequence DESC LIMIT ?"
        return self._read(query, *values, count)[::-1]

    def since(self, sequence: int, kinds: Sequence[str] = (), limit: int = 1000) -> list[Entry]:
        """Entries after `sequence`, oldest first, at most `limit`."""
        where, values = _of_kinds(kinds)
        query = f"SELECT {_COLUMNS} FROM entries WHERE {where} AND sequence > ? ORDER BY sequence LIMIT ?"
        return self._read(query, *values, sequence, limit)

    @property
    def last_sequence(self) -> int:
        """Of the newest entry; 0: there is none."""
        newest = self.tail(1)
        return newest[0].sequence if newest else 0

    def latest(self, kind: Kind) -> Entry | None:
        entries = self.tail(1, (kind,))
        return entries[0] if entries else None

    def latest_by_subject(self, kind: Kind) -> dict[str, Entry]:
        """The newest entry of this kind of every subject that has one."""
        newest = "SELECT max(sequence) FROM entries WHERE kind = ? GROUP BY subject"
        query = f"SELECT {_COLUMNS} FROM entries WHERE sequence IN ({newest}) ORDER BY sequence"
        return {entry.subject: entry for entry in self._read(query, kind)}

    def open_operations(self, intent: Kind = Kind.OPERATION_INTENT) -> list[Entry]:
        """Intents of this kind without a result, oldest first: what a restarted daemon has to settle."""
        return self._read(f"SELECT {_COLUMNS} FROM entries WHERE {_open(intent)} ORDER BY sequence")

    def close(self) -> None:
        self._db.close()

    def _read(self, query: str, *values: object) -> list[Entry]:
        with _naming(self.path):
            rows = self._db.execute(query, values).fetchall()
        return [
            Entry(sequence, at_s, generation, kind, subject, json.loads(body))
            for sequence, at_s, generation, kind, subject, body in rows
        ]


class Journal(JournalReader):
    """The writer. Opening it starts a new generation, greater than every one before.

    Generations follow the clock where that is ahead: nodes refuse orders of an older generation than they have seen, so
    a daemon whose journal was lost must not begin at 1 again.
    """

    def __init__(self, path: Path, at_s: float, max_entries: int = 1_000_000) -> None:
        self.path = path
        self._max_entries = max_entries
        self._followers: set[asyncio.Event] = set()
        self._lock_file = _locked(path)
        try:
            with _naming(path):
                self._db = sqlite3.connect(path, isolation_level=None)
                _check_identity(path, self._db, may_be_empty=True)
                self.generation = self._begin(max(1, int(at_s)))
        except Permanent:
            os.close(self._lock_file)
            raise
        self._until_prune = PRUNE_EVERY

    def _begin(self, first_generation: int) -> int:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")  # a generation must never be given out twice
        self._db.executescript(_SCHEMA)
        (generation,) = self._db.execute(
            "INSERT INTO meta VALUES ('generation', ?1)"
            " ON CONFLICT (key) DO UPDATE SET value = max(value + 1, ?1) RETURNING value",
            (first_generation,),
        ).fetchone()
        self._db.execute("PRAGMA synchronous = NORMAL")
        return int(generation)

    def append(self, at_s: float, kind: Kind, subject: str, body: Mapping[str, Any]) -> int:
        """Write one entry; its sequence number. Raises Permanent when the file cannot take it."""
        text = json.dumps(body, allow_nan=False, separators=(",", ":"))
        with _naming(self.path):
            cursor = self._db.execute(
                "INSERT INTO entries (at_s, generation, kind, subject, body) VALUES (?, ?, ?, ?, ?)",
                (at_s, self.generation, kind, subject, text),
            )
        sequence = cursor.lastrowid
        assert sequence is not None
        self._until_prune -= 1
        if self._until_prune <= 0:
            self._prune(sequence)
        for follower in self._followers:
            follower.set()
        return sequence

    async def follow(self, sequence: int, kinds: Sequence[str] = ()) -> AsyncIterator[Entry]:
        """Entries after `sequence`, then each new one as it is written; never ends by itself."""
        news = asyncio.Event()
        self._followers.add(news)
        try:
            while True:
                news.clear()
                for entry in self.since(sequence, kinds):
                    sequence = entry.sequence
                    yield entry
                    news.set()  # there may be more than one read gives
                await news.wait()
        finally:
            self._followers.discard(news)

    def close(self) -> None:
        super().close()
        os.close(self._lock_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prune(self, newest: int) -> None:
        self._until_prune = PRUNE_EVERY
        kept = ", ".join("?" * len(_RECOVERED_FROM_LATEST))
        still_open = " OR ".join(_open(intent) for intent in _RESULT_OF)
        for step, began in _STEP_OF.items():  # what an open one has changed so far
            subjects = f"SELECT subject FROM entries WHERE {_open(began)}"
            still_open += f" OR (kind = '{step}' AND subject IN ({subjects}))"
        with _naming(self.path):
            self._db.execute(
                f"DELETE FROM entries WHERE sequence <= ? AND NOT ({still_open}) AND sequence NOT IN"
                f" (SELECT max(sequence) FROM entries WHERE kind IN ({kept}) GROUP BY kind)"
                " AND sequence NOT IN (SELECT max(sequence) FROM entries WHERE kind = ? GROUP BY subject)",
                (newest - self._max_entries, *_RECOVERED_FROM_LATEST, Kind.CIRCUITS_OWNED),
            )


def _of_kinds(kinds: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    return (f"kind IN ({', '.join('?' * len(kinds))})", tuple(kinds)) if kinds else ("TRUE", ())


def _locked(path: Path) -> int:
    """A descriptor that holds the writer's lock for as long as it is open; the system frees it with the process."""
    lock = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise Permanent(f"{lock}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Permanent(
            f"{path}: another daemon writes this journal; give this one a journal.path of its own"
        ) from None
    return descriptor


def _check_identity(path: Path, db: sqlite3.Connection, may_be_empty: bool = False) -> None:
    (identity,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if may_be_empty and tables == 0:
        return
    if identity != APPLICATION_ID:
        raise Permanent(f"{path}: is not a journal of OrchestrRL")
    if version != SCHEMA_VERSION:
        raise Permanent(f"{path}: has journal format {version}, this version reads {SCHEMA_VERSION}")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours, with the file's name and what to do."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise Permanent(f"{path}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise Permanent(f"{path}: is damaged or not a journal ({error}); move it away to start a new one") from error
