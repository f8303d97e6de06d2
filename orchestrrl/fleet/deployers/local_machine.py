"""Manage the records, logs and processes of the engines that `local.py` starts on this machine.

Each record is replaced atomically and synced to disk, so that a daemon that is killed leaves either the old or the new
record. Processes outlive the daemon and can be found without a record. They are identified by a variable in their
environment, which child processes inherit. A process that has overwritten its environment is identified by the log file
that it writes to. vLLM's workers overwrite their environment, because they use setproctitle.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote, unquote

import psutil
from pydantic import TypeAdapter

from orchestrrl.fleet.deployers.command_line import CommandLine, EngineSpec
from orchestrrl.fleet.deployers.machine import log_tail
from planner.model import EngineId

log = logging.getLogger(__name__)

MARK = "ORCHESTRRL_LOCAL_ENGINE"
CREATED_WITHIN_S = 1.0  # tolerance for creation times: the boot time that they are based on may be corrected
_LOG_NAME = re.compile(r"(.+)\.log(?:\.\d+)?(?: \(deleted\))?")


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """The record of one engine. `spec` is the requested spec; the port in `url` may differ from the port in `spec`."""

    spec: EngineSpec
    url: str
    processes: int  # number of processes, each leading a session
    # Their ids and creation times (s since the epoch). Empty until all are spawned.
    leaders: tuple[tuple[int, float], ...] = ()
    stopping: bool = False
    lent: bool = False


_RECORD = TypeAdapter(EngineRecord)


class EngineRecords:
    """The records of one fleet, in `folder/engines`. Construction has no side effects."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "engines"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock that prevents other threads and processes from changing the fleet. The system releases the lock
        if the holding process ends."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def read(self) -> dict[EngineId, EngineRecord]:
        """Return all readable records by engine. A record that cannot be read is treated as lost; the engine's
        processes can be found without it."""
        records = map(_read, sorted(self._folder.glob("*.json")))
        return {record.spec.engine: record for record in records if record is not None}

    def read_one(self, engine: EngineId) -> EngineRecord | None:
        return _read(self._path(engine))

    def write(self, record: EngineRecord) -> None:
        path = self._path(record.spec.engine)
        draft = path.with_suffix(".draft")
        # A record contains the engine's environment, which may contain secrets.
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(_RECORD.dump_python(record, mode="json"), file)
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
        return _RECORD.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        log.warning("%s is not a valid engine record", path)
        return None


class EngineLogs:
    """The log files in `folder/logs`, one per engine and start. `ENGINE.log` is the log of the latest start. The logs
    of earlier starts are `ENGINE.log.1`, `ENGINE.log.2` and so on. `kept` is the number of earlier logs to keep per
    engine."""

    def __init__(self, folder: Path, kept: int) -> None:
        self._folder = folder / "logs"
        self._kept = kept

    def path(self, engine: EngineId) -> Path:
        return self._folder / f"{quote(engine, safe='')}.log"

    def rotate(self, engine: EngineId) -> Path:
        """Rotate the engine's logs and return the path of the new log."""
        self._folder.mkdir(parents=True, exist_ok=True)
        current = self.path(engine)
        files = [current, *(Path(f"{current}.{age}") for age in range(1, self._kept + 1))]
        files[-1].unlink(missing_ok=True)
        for younger, older in reversed(list(pairwise(files))):
            if younger.exists():
                younger.replace(older)
        return current

    def engine_of(self, output: str) -> EngineId | None:
        """Return the engine whose log has the absolute path `output`, or None if the path is not that of a log."""
        folder, _, name = output.rpartition("/")
        match = _LOG_NAME.fullmatch(name)
        if match is None or folder != os.path.realpath(self._folder):
            return None
        return EngineId(unquote(match.group(1)))

    def tail(self, engine: EngineId) -> str:
        path = self.path(engine)
        try:
            return f"the end of {path}:\n{log_tail(path)}"
        except FileNotFoundError:
            return f"{path} does not exist"


@dataclass(frozen=True, slots=True)
class FoundProcess:
    """A process of an engine. `record` is the engine's record at the time when the process started, or None if the
    process has overwritten its environment."""

    process: psutil.Process
    identity: tuple[int, float]  # its id and creation time
    leads: bool  # a deployer spawned it; it is not a child of such a process
    record: EngineRecord | None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process only. Does nothing if the process has ended, even if another process has its id
        now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.send_signal(number)

    def is_same(self, leader: tuple[int, float]) -> bool:
        """Return whether this is the process with the id and creation time of `leader`, and not a later process with
        the same id."""
        return self.identity[0] == leader[0] and abs(self.identity[1] - leader[1]) <= CREATED_WITHIN_S


def spawn(line: CommandLine, fleet: str, record: EngineRecord, log: Path, port_holder: int) -> tuple[int, float]:
    """Start a process in a new session, and return its id and its creation time in seconds since the epoch. The process
    inherits the descriptor `port_holder`, which reserves the port while the process lives. Raises OSError if the
    program cannot be started."""
    mark = json.dumps({"fleet": fleet, "record": _RECORD.dump_python(record, mode="json")})
    with log.open("ab") as output:
        pid = os.posix_spawnp(
            line.argv[0],
            list(line.argv),
            {**os.environ, **line.environment, MARK: mark},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
                (os.POSIX_SPAWN_DUP2, port_holder, 3),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
        )
    return pid, psutil.Process(pid).create_time()


def find_processes(fleet: str, logs: EngineLogs) -> dict[EngineId, list[FoundProcess]]:
    """Return all processes of a fleet's engines. The function inspects every process of the machine, except this
    process and processes of other users."""
    engines: dict[EngineId, list[FoundProcess]] = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            found = _inspect(psutil.Process(pid), fleet, logs) if pid != os.getpid() else None
            if found is not None:
                engines.setdefault(found[0], []).append(found[1])
    return engines


def is_alive(leader: tuple[int, float]) -> bool:
    """Return whether the process with the id and creation time of `leader` is alive. A zombie process is not alive."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(leader[0])
        there = abs(process.create_time() - leader[1]) <= CREATED_WITHIN_S
        return there and process.status() != psutil.STATUS_ZOMBIE
    return False


def exit_status(pid: int) -> int | None:
    """Reap a child process and return its exit status. Return None if the process has not ended or is not a child of
    this process."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended else None


def _inspect(process: psutil.Process, fleet: str, logs: EngineLogs) -> tuple[EngineId, FoundProcess] | None:
    record = _marked(process, fleet)
    engine = record.spec.engine if record is not None else _writes_to(process.pid, logs)
    if engine is None or process.status() == psutil.STATUS_ZOMBIE:
        return None
    leads = os.getsid(process.pid) == process.pid
    return engine, FoundProcess(process, (process.pid, process.create_time()), leads, record)


def _marked(process: psutil.Process, fleet: str) -> EngineRecord | None:
    # The mark is missing, or truncated because the process overwrote its environment.
    with contextlib.suppress(KeyError, TypeError, ValueError):
        mark = json.loads(process.environ()[MARK])
        if mark["fleet"] == fleet:
            return _RECORD.validate_python(mark["record"])
    return None


def _writes_to(pid: int, logs: EngineLogs) -> EngineId | None:
    """Return the engine whose log the process writes to, or None if there is none. The function requires a system that
    lists open files in `/proc` (Linux)."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            engine = logs.engine_of(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
            if engine is not None:
                return engine
    return None
