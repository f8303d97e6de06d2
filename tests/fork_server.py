"""Start processes in tests by forking a process that has imported everything.

OrchestrRL's daemon, gateway or engine imports for 0.3 to 0.6 CPU-seconds before it does anything, and the process tests
start a thousand of them; a vLLM server imports for 8. `install` replaces `subprocess.Popen` in the test process:
commands of the forms `python -m orchestrrl WORDS...`, `python tests/SCRIPT.py WORDS...` and `.venv-vllm/bin/python -m
vllm.entrypoints.openai.api_server WORDS...` go to a fork server, all others start as usual. The result is a separate
process and a child of the test process, which can wait for it, signal it and kill it.

There is one server for each Python, and it starts with the first such command. It clones itself with CLONE_PARENT,
which makes the new process its sibling instead of its child, and must therefore have only one thread.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

TESTS = Path(__file__).resolve().parent
CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
MESSAGE_BYTES = 1 << 18
SPACE = " " * 4096  # last argument of the server's command line, used for its clones
_popen = subprocess.Popen


@dataclass(frozen=True)
class Program:
    """Commands that a fork server starts: those of `python` whose arguments `takes` accepts.

    The server imports `modules`, with `environment` set. A command whose environment differs in variables that an
    import or the interpreter reads (those that begin with one of `settings` and none of `late`) is started as usual.
    """

    python: str
    modules: Sequence[str]
    takes: Callable[[Sequence[str]], bool]
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ("PYTHON", "COVERAGE_", "OPENBLAS_", "GRPC_", "LD_")
    late: tuple[str, ...] = ("PYTHONUNBUFFERED", "PYTHONPATH")

    def settings_of(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in environment.items()
            if name.startswith(self.settings) and not name.startswith(self.late)
        }


OURS = Program(
    sys.executable,
    (
        "orchestrrl.agent.host",
        "orchestrrl.agent.sidecar",
        "orchestrrl.cli.agent",
        "orchestrrl.cli.daemon",
        "orchestrrl.cli.fleet.engine",
        "orchestrrl.cli.gateway_options",
        "orchestrrl.cli.sync.peer",
        "orchestrrl.daemon.running",
        "orchestrrl.lab.simulated_engine.server",
        "orchestrrl.gateway.service",
        "orchestrrl.weights.peer.peer",
        "planner.plan",
        "planner.solver",
        "ortools.sat.python.cp_model",
        "scipy.optimize",
    ),
    lambda words: (
        list(words[:2]) == ["-m", "orchestrrl"] or (str(words[0]).endswith(".py") and TESTS in Path(words[0]).parents)
    ),
)
_programs = [OURS]


def install(*programs: Program) -> None:
    """Start OrchestrRL's commands, and those of `programs`, by forking."""
    if sys.platform == "linux" and SYS_CLONE is not None:
        _programs.extend(programs)
        subprocess.Popen = Popen  # type: ignore[misc]


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A `subprocess.Popen` that uses a fork server for the commands it supports."""

    def _execute_child(self, *arguments: Any) -> None:
        # In CPython's order: args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
        # shell, six ends of pipes, restore_signals, gid, gids, uid, umask, start_new_session, process_group.
        args, executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *pipes = arguments[:16]
        _, gid, gids, uid, umask, new_session, group = arguments[16:]
        is_plain = not (executable or preexec_fn or pass_fds or shell) and (gid, gids, uid) == (None, None, None)
        program = _program_of(args) if is_plain and umask < 0 and (group is None or group < 0) else None
        environment = dict(os.environ if env is None else env)
        if program is None or not (server := _Server.of(program)).suits(environment):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        fds = [end if end >= 0 else standard for standard, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        sys.audit("subprocess.Popen", args[0], args, cwd, env)
        order = {"args": [os.fspath(word) for word in args], "env": environment, "new_session": bool(new_session)}
        self.pid = server.start({**order, "cwd": os.fspath(cwd or os.getcwd())}, fds)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _program_of(args: Any) -> Program | None:
    if isinstance(args, str | bytes | os.PathLike) or len(args) < 2:
        return None
    found = (program for program in _programs if str(args[0]) == program.python and program.takes(args[1:]))
    return next(found, None)


class _Server:
    _of: ClassVar[dict[str, "_Server"]] = {}  # by Python
    _starting = threading.Lock()

    @classmethod
    def of(cls, program: Program) -> "_Server":
        with cls._starting:
            if program.python not in cls._of:
                cls._of[program.python] = cls(program)
            return cls._of[program.python]

    def __init__(self, program: Program) -> None:
        environment = {**os.environ, **program.environment}
        self._settings_of = program.settings_of
        self._settings = program.settings_of(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [__file__, str(theirs.fileno()), *program.modules, SPACE]
        self._process = _popen([program.python, *words], env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self._lock = threading.Lock()
        atexit.register(self._close)

    def suits(self, environment: Mapping[str, str]) -> bool:
        return self._settings_of(environment) == self._settings and "COVERAGE_PROCESS_START" not in environment

    def start(self, order: Mapping[str, Any], fds: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
            answer = self._socket.recv(64)
        assert answer, "the fork server has ended"
        return int(answer)

    def _close(self) -> None:
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


# --- the server's own process -----------------------------------------------------------------------------------------


def serve(connection: socket.socket, modules: Sequence[str]) -> list[str]:
    """Clone this process for each order. Returns only in the clone, with the arguments to run."""
    inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all of its foreground processes
    found = dict(os.environ)
    for name in modules:
        importlib.import_module(name)
    imports_set = {name: value for name, value in os.environ.items() if found.get(name) != value}
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"an import has started {len(threads) - 1} threads"
    while True:
        data, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        if not data:
            os._exit(0)  # at a normal exit, vLLM's libraries print their leaks
        pid = _clone()
        if pid == 0:
            connection.close()
            signal.signal(signal.SIGINT, inherited)
            return _become(json.loads(data), fds, imports_set)
        for fd in fds:
            os.close(fd)
        connection.send(str(pid).encode())


def _clone() -> int:
    """Fork as os.fork does, but with this process's parent as the parent of the new process."""
    python, c = ctypes.pythonapi, ctypes.PyDLL(None)
    python.PyOS_BeforeFork()
    pid = int(c.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    assert pid >= 0, "clone failed"
    return pid


def _become(order: Mapping[str, Any], fds: list[int], imports_set: Mapping[str, str]) -> list[str]:
    """Apply the order: files, session, folder, environment, and the state that imports derived from it."""
    for standard, fd in enumerate(fds):
        os.dup2(fd, standard)
        os.close(fd)
    if order["new_session"]:
        os.setsid()
    os.chdir(order["cwd"])
    given = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update({**imports_set, **order["env"]})
    sys.orig_argv[:] = order["args"]
    _show(order["args"])
    _take_path(given, order["env"].get("PYTHONPATH", ""))
    unbuffered = bool(order["env"].get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(open(0, "rb", closefd=False))  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _text(1, "strict", unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, "backslashreplace", unbuffered)  # type: ignore[misc]
    words: list[str] = order["args"][1:]
    return words


def _show(args: Sequence[str]) -> None:
    """Set the command line of this process as other processes see it."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])  # arg_start, arg_end
    shown = b"".join(os.fsencode(word) + b"\0" for word in args)[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _take_path(given: str, wanted: str) -> None:
    """Search the folders of another PYTHONPATH, and run its sitecustomize, as the interpreter does at its start."""
    had, has = ([os.path.abspath(folder) for folder in path.split(os.pathsep) if path] for path in (given, wanted))
    sys.path[1:] = dict.fromkeys([*has, *(folder for folder in sys.path[1:] if folder not in had)])
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")


def _text(fd: int, errors: str, unbuffered: bool) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    by_line = not unbuffered and (fd == 2 or os.isatty(fd))
    buffer: Any = raw if unbuffered else io.BufferedWriter(raw)
    encoding = sys.stdout.encoding
    return io.TextIOWrapper(buffer, encoding, errors, line_buffering=by_line, write_through=unbuffered)


if __name__ == "__main__":
    sys.path[0] = str(TESTS.parent)  # tests/orchestrrl would be found as the package
    words = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:-1])
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        sys.modules.pop(words[1], None)  # it runs as __main__
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
