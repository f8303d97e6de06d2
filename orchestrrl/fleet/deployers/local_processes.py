"""Processes of this machine that belong to engines: spawned to outlive us, found again without any record, ended.

A process is known by a variable in its environment, which its children inherit, and where a process has overwritten its
environment (setproctitle does, as vLLM's workers use it), by where its output goes: the engine's log.
"""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from orchestrrl.fleet.deployers.local_records import EngineLogs, EngineRecord, read_record
from planner.model import EngineId

MARK = "ORCHESTRRL_LOCAL_ENGINE"
CREATED_WITHIN_S = 1.0  # a process is the same if created then: the boot time that it is counted from may be corrected


@dataclass(frozen=True, slots=True)
class FoundProcess:
    """A process of an engine. `record`: as it was when it was spawned, None where its environment no longer tells."""

    process: psutil.Process
    created_s: float
    leads: bool  # it was spawned by a deployer, and is no child of such a one
    record: EngineRecord | None

    def signal(self, number: signal.Signals) -> None:
        """To this process alone. One that has gone, its id with another process by now included, takes none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.send_signal(number)

    @property
    def alive(self) -> bool:
        """Those that nobody has waited for are not."""
        try:
            return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def spawn(
    argv: Sequence[str], environment: Mapping[str, str], fleet: str, record: EngineRecord, log: Path, port_holder: int
) -> tuple[int, float]:
    """Start a process in a session of its own, and return its id and when it was created. It keeps the descriptor
    `port_holder`, and with it the port, for as long as it lives. Raises OSError where there is no such program."""
    mark = json.dumps({"fleet": fleet, "record": record.document()})
    with log.open("ab") as output:
        pid = os.posix_spawnp(
            argv[0],
            list(argv),
            {**os.environ, **environment, MARK: mark},
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
    """All processes of a fleet's engines. Looks at every process of the machine; those of other users are not ours."""
    engines: dict[EngineId, list[FoundProcess]] = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            found = _inspect(psutil.Process(pid), fleet, logs) if pid != os.getpid() else None
            if found is not None:
                engines.setdefault(found[0], []).append(found[1])
    return engines


def same(found: FoundProcess, leader: tuple[int, float]) -> bool:
    """Whether it is the process that was noted down, and no later one of its id."""
    pid, created_s = leader
    return found.process.pid == pid and abs(found.created_s - created_s) <= CREATED_WITHIN_S


def is_alive(leader: tuple[int, float]) -> bool:
    """Whether the process that was noted down lives."""
    pid, created_s = leader
    try:
        process = psutil.Process(pid)
        there = abs(process.create_time() - created_s) <= CREATED_WITHIN_S
        return there and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def exit_status(pid: int) -> int | None:
    """Of a child of ours that has ended, which is waited for by this; None: it has not, or is not ours."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended else None


def hold_port(host: str, wanted: int, spare: Iterable[int], insist: bool) -> tuple[socket.socket, int]:
    """A port that nobody else has, kept by a socket that is bound to it and never listens: the wanted one, else the
    first spare one that is free; 0 stands for any. A server that sets SO_REUSEADDR, as vLLM does, can bind beside it.

    Bound without that option it goes to one holder only, whoever else tries; but a port with connections that have just
    been closed (TIME_WAIT) is refused too. `insist`: such a one will do. Raises OSError where none is free.
    """
    tries = [(wanted, False), *([(wanted, True)] if insist else []), *((port, False) for port in spare)]
    for port, reuse in tries[:-1]:
        with contextlib.suppress(OSError):
            return _bound(host, port, reuse)
    return _bound(host, *tries[-1])


def _bound(host: str, port: int, reuse: bool) -> tuple[socket.socket, int]:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    holder = socket.socket(family, kind)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        holder.bind(address)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        holder.close()
        raise
    return holder, holder.getsockname()[1]


def _inspect(process: psutil.Process, fleet: str, logs: EngineLogs) -> tuple[EngineId, FoundProcess] | None:
    record = _marked(process, fleet)
    engine = record.spec.engine if record is not None else _writes_to(process.pid, logs)
    if engine is None or process.status() == psutil.STATUS_ZOMBIE:
        return None
    leads = os.getsid(process.pid) == process.pid
    return engine, FoundProcess(process, process.create_time(), leads, record)


def _marked(process: psutil.Process, fleet: str) -> EngineRecord | None:
    text = process.environ().get(MARK)
    if text is None:
        return None
    try:
        mark = json.loads(text)
    except ValueError:  # cut, by a process that overwrites its environment
        return None
    if not isinstance(mark, dict) or mark.get("fleet") != fleet:
        return None
    return read_record(mark.get("record"))


def _writes_to(pid: int, logs: EngineLogs) -> EngineId | None:
    """Only where the system shows open files (Linux)."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            engine = logs.engine_of(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
            if engine is not None:
                return engine
    return None
