"""Run one command line and leave none of its processes behind. This script runs between a Ray actor and an engine.

The script imports the standard library only: its text is sent to the node, where OrchestrRL need not be installed. The
first line of standard input is a JSON object `{"argv": [...], "log": path}`. A second line `end SECONDS` requests a
graceful end with that grace period. If standard input is closed, the actor is gone and the engine is killed at once.
The script prints `{"pid": n}`, and finally `{"status": n}`, the exit status as a shell reports it (128 + signal
number).

The script detaches from the actor, because Ray kills an actor's child processes. It adopts orphaned processes of the
engine, and exits after all processes of the engine have ended. If the script is killed, the engine's first process is
killed too.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_STARTED = 127


def main() -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    order = json.loads(sys.stdin.buffer.readline() or b"null")
    if order is None:  # the actor ended before it sent a command
        return
    with open(order["log"], "ab", buffering=0) as log:
        try:
            first = subprocess.Popen(
                order["argv"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        except OSError as error:
            log.write(f"{error}\n".encode())
            _report({"status": NOT_STARTED})
            return
    _report({"pid": first.pid})
    threading.Thread(target=_listen, args=(first.pid,), daemon=True).start()
    _report({"status": _outlive(first.pid)})
    os._exit(0)  # without waiting for the listener thread


def _listen(group: int) -> None:
    for line in sys.stdin.buffer:
        _signal(group, signal.SIGTERM)
        timer = threading.Timer(float(line.split()[1]), _signal, (group, signal.SIGKILL))
        timer.daemon = True
        timer.start()
    _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _outlive(first: int) -> int:
    """Reap child processes until the process `first` has ended, then kill all other processes of the engine. Return the
    exit status of `first`."""
    status = 0
    while True:
        pid, code = os.waitpid(-1, 0)
        if pid == first:
            status = os.waitstatus_to_exitcode(code)
            break
    with contextlib.suppress(ChildProcessError):
        while True:
            # Orphans become children of this process and are killed in the next round.
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
    return status if status >= 0 else 128 - status


def _children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def _report(what: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # the actor is gone
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
