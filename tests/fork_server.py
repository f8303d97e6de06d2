"""Start OrchestrRL's processes in tests by forking a process that has everything imported.

A daemon, a gateway or an engine imports for 0.3 to 0.6 CPU-seconds before it does anything, and the process tests start
a thousand of them. `install` replaces `subprocess.Popen` in the test process: commands of the forms
`python -m orchestrrl WORDS...` and `python tests/SCRIPT.py WORDS...` go to the fork server, all others start as usual.
The result is a process of its own and a child of the test process, which can wait for it, signal it and kill it.

The server starts with the first such command. It clones itself with CLONE_PARENT, which makes the new process its
sibling instead of its child, and must therefore have one thread only.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
IMPORTED = (
    "orchestrrl.agent.host",
    "orchestrrl.agent.sidecar",
    "orchestrrl.cli.agent",
    "orchestrrl.cli.daemon",
    "orchestrrl.cli.engine",
    "orchestrrl.cli.gateway_options",
    "orchestrrl.cli.sync_peer",
    "orchestrrl.daemon",
    "orchestrrl.engines.simulated",
    "orchestrrl.gateway.processes",
    "orchestrrl.gateway.service",
    "orchestrrl.weights.peer",
    "planner.plan",
    "planner.solver",
    "ortools.sat.python.cp_model",
    "scipy.optimize",
)
CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
MESSAGE_BYTES = 1 << 18
_popen = subprocess.Popen


def install() -> None:
    if sys.platform == "linux" and SYS_CLONE is not None:
        subprocess.Popen = Popen  # type: ignore[misc]


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` that has the fork server start the commands which it can start."""

    def _execute_child(self, *arguments: Any) -> None:
        # In CPython's order: args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
        # shell, six ends of pipes, restore_signals, gid, gids, uid, umask, start_new_session, process_group.
        args, executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *pipes = arguments[:16]
        _, gid, gids, uid, umask, new_session, group = arguments[16:]
        is_plain = not (executable or preexec_fn or pass_fds or shell) and (gid, gids, uid) == (None, None, None)
        if not (is_plain and umask < 0 and (group is None or group < 0) and _is_ours(args)):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        environment = dict(os.environ if env is None else env)
        server = _Server.running()
        if not server.suits(environment):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        fds = [end if end >= 0 else standard for standard, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        sys.audit("subprocess.Popen", args[0], args, cwd, env)
        order = {"args": [os.fspath(word) for word in args], "env": environment, "new_session": bool(new_session)}
        self.pid = server.start({**order, "cwd": os.fspath(cwd or os.getcwd())}, fds)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _is_ours(args: Any) -> bool:
    if isinstance(args, str | bytes | os.PathLike) or len(args) < 2 or args[0] != sys.executable:
        return False
    return list(args[1:3]) == ["-m", "orchestrrl"] or (str(args[1]).endswith(".py") and TESTS in Path(args[1]).parents)


def _python_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What a running interpreter cannot take up any more."""
    prefixes = ("PYTHON", "COVERAGE_", "OPENBLAS_", "GRPC_", "LD_")
    return {
        name: value for name, value in environment.items() if name.startswith(prefixes) and name != "PYTHONUNBUFFERED"
    }


class _Server:
    _one: "_Server | None" = None
    _starting = threading.Lock()

    @classmethod
    def running(cls) -> "_Server":
        with cls._starting:
            if cls._one is None:
                cls._one = cls()
            return cls._one

    def __init__(self) -> None:
        self._settings = _python_settings(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = _popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        self._lock = threading.Lock()
        atexit.register(self._close)

    def suits(self, environment: Mapping[str, str]) -> bool:
        return _python_settings(environment) == self._settings and "COVERAGE_PROCESS_START" not in environment

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


def serve(connection: socket.socket) -> list[str]:
    """Clone this process for each order. Return in the clone alone: the words to run."""
    inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all of its foreground
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"an import has started {len(threads) - 1} threads"
    while True:
        data, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        if not data:
            sys.exit()
        pid = _clone()
        if pid == 0:
            connection.close()
            signal.signal(signal.SIGINT, inherited)
            return _become(json.loads(data), fds)
        for fd in fds:
            os.close(fd)
        connection.send(str(pid).encode())


def _clone() -> int:
    """os.fork, but the new process has this one's parent."""
    python, c = ctypes.pythonapi, ctypes.PyDLL(None)
    python.PyOS_BeforeFork()
    pid = int(c.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    assert pid >= 0, "clone failed"
    return pid


def _become(order: Mapping[str, Any], fds: list[int]) -> list[str]:
    """Take on what the order says: files, session, folder, environment."""
    for standard, fd in enumerate(fds):
        os.dup2(fd, standard)
        os.close(fd)
    if order["new_session"]:
        os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    unbuffered = bool(order["env"].get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(open(0, "rb", closefd=False))  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _text(1, "strict", unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, "backslashreplace", unbuffered)  # type: ignore[misc]
    words: list[str] = order["args"][1:]
    return words


def _text(fd: int, errors: str, unbuffered: bool) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    by_line = not unbuffered and (fd == 2 or os.isatty(fd))
    buffer: Any = raw if unbuffered else io.BufferedWriter(raw)
    encoding = sys.stdout.encoding
    return io.TextIOWrapper(buffer, encoding, errors, line_buffering=by_line, write_through=unbuffered)


if __name__ == "__main__":
    sys.path[0] = str(TESTS.parent)  # tests/orchestrrl would pass for the package
    words = serve(socket.socket(fileno=int(sys.argv[1])))
    if words[:2] == ["-m", "orchestrrl"]:
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module("orchestrrl", run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
