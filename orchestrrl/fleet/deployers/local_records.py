"""What is on disk of the engines that `local.py` starts: a record of each, and its logs. Written before and after.

A record is replaced as a whole and synced, so that a daemon that is killed leaves the one before or the one after.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from pydantic import TypeAdapter, ValidationError

from orchestrrl.fleet.deployers.command_line import EngineSpec
from planner.model import EngineId

log = logging.getLogger(__name__)

LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 16_384
_LOG_NAME = re.compile(r"(.+)\.log(?:\.\d+)?(?: \(deleted\))?")


class RecordState(StrEnum):
    STARTING = "starting"  # what was spawned of it, if anything, is to be looked for
    STARTED = "started"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine. `spec` is what was asked for; the port in `url` may be another."""

    spec: EngineSpec
    url: str
    processes: int  # that lead a session each
    state: RecordState = RecordState.STARTING
    leaders: tuple[tuple[int, float], ...] = ()  # their ids, and when they were created (s since the epoch)
    lent: bool = False

    def document(self) -> Any:
        return _RECORD.dump_python(self, mode="json")


_RECORD = TypeAdapter(EngineRecord)


def read_record(document: Any) -> EngineRecord | None:
    """None: it is none."""
    try:
        return _RECORD.validate_python(document)
    except (ValidationError, ValueError):
        return None


class EngineRecords:
    """Those of one fleet, in `folder/engines`. Construction touches nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "engines"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No other thread or process changes the fleet meanwhile. The lock goes with who holds it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def read(self) -> dict[EngineId, EngineRecord]:
        """A record that cannot be read counts as lost: its processes are found without."""
        records = map(_read, sorted(self._folder.glob("*.json")))
        return {record.spec.engine: record for record in records if record is not None}

    def read_one(self, engine: EngineId) -> EngineRecord | None:
        return _read(self._path(engine))

    def write(self, record: EngineRecord) -> None:
        path = self._path(record.spec.engine)
        draft = path.with_suffix(".draft")
        # A record has the engine's environment, which may have secrets.
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(record.document(), file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        self._sync()

    def remove(self, engine: EngineId) -> None:
        self._path(engine).unlink(missing_ok=True)
        self._sync()

    def _path(self, engine: EngineId) -> Path:
        return self._folder / f"{quote(engine, safe='')}.json"

    def _sync(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(path: Path) -> EngineRecord | None:
    try:
        record = read_record(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except ValueError:
        record = None
    if record is None:
        log.warning("%s is no record of an engine", path)
    return record


class EngineLogs:
    """One file for each engine and start, in `folder/logs`: `ENGINE.log`, and earlier ones as `ENGINE.log.1` and up."""

    def __init__(self, folder: Path, kept: int) -> None:
        self._folder = folder / "logs"
        self._kept = kept

    def path(self, engine: EngineId) -> Path:
        return self._folder / f"{quote(engine, safe='')}.log"

    def rotate(self, engine: EngineId) -> Path:
        """Room for a new start."""
        self._folder.mkdir(parents=True, exist_ok=True)
        current = self.path(engine)
        files = [current, *(Path(f"{current}.{age}") for age in range(1, self._kept + 1))]
        files[-1].unlink(missing_ok=True)
        for younger, older in reversed(list(pairwise(files))):
            if younger.exists():
                younger.replace(older)
        return current

    def engine_of(self, output: str) -> EngineId | None:
        """Whose log the file is, by its absolute path; None: nobody's here."""
        folder, _, name = output.rpartition("/")
        match = _LOG_NAME.fullmatch(name)
        if match is None or folder != os.path.realpath(self._folder):
            return None
        return EngineId(unquote(match.group(1)))

    def tail(self, engine: EngineId) -> str:
        path = self.path(engine)
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return f"{path} is not there"
        return f"the end of {path}:\n" + "\n".join(lines[-LOG_TAIL_LINES:])
