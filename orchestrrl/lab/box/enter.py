"""Run a module in new user, network, mount and process namespaces, which are removed when the module's process ends.

When the first process of a process namespace ends, the kernel removes the namespaces with all interfaces, bridges and
processes inside. That process exits when its standard input is closed (`end_with_input`), so that nothing remains even
if its parent is killed by SIGKILL.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.testbed.processes import LabProcess

TOOLS = ("unshare", "ip", "tc", "mount")
SEARCHED = ("/usr/sbin", "/sbin")  # locations of `ip` and `tc` that are often not in an unprivileged user's PATH
KINDS = ("veth", "bridge")
# A quick test of all kernel features that a box needs.
PROBE_WITHIN_S = 20.0
PROBE = """
mount -t tmpfs none /run && ip netns add one && ip netns add two
ip link add name probe netns one type veth peer name probe netns two && ip -n one link add name probe0 type bridge
tc -n one qdisc add dev probe root tbf rate 1mbit burst 16k limit 16k
"""


def lacking() -> str:
    """Return the reason why a box cannot be created on this machine, or an empty string if it can be created."""
    missing = [tool for tool in TOOLS if _found(tool) is None]
    if not sys.platform.startswith("linux"):
        return f"network namespaces require Linux, got {sys.platform}"
    if missing:
        return f"{', '.join(missing)} not found: install them (Debian packages util-linux, iproute2 and mount)"
    try:
        tried = subprocess.run(
            [*_prefix(), "sh", "-ec", PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_WITHIN_S,
            env={**os.environ, "PATH": _path()},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"creating namespaces took more than {PROBE_WITHIN_S:g} s"
    if tried.returncode == 0:
        return ""
    errors = " | ".join(line.strip() for line in tried.stderr.splitlines() if line.strip())
    return f"a box requires root or permitted user namespaces, and veth, bridge and tbf in the kernel: {errors}"


def start(name: str, words: Sequence[str | Path], folder: Path) -> LabProcess:
    """Start Python with the arguments `words` inside new namespaces. The process must call `end_with_input`, so that it
    does not outlive this process. Raises Permanent if this machine cannot create the namespaces."""
    if why := lacking():
        raise Permanent(why)
    command = [*_prefix(), sys.executable, *words]
    process = LabProcess(name, command, folder, environment={"PATH": _path()}, takes_input=True)
    process.spawn()
    return process


def end_with_input(stop: Callable[[], object]) -> None:
    """Start a thread that calls `stop` when the standard input is closed, and exits the process 5 s later at the
    latest."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        stop()
        threading.Event().wait(5.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _path() -> str:
    return os.pathsep.join(filter(None, (os.environ.get("PATH", ""), *SEARCHED)))


def _found(tool: str) -> str | None:
    return shutil.which(tool, path=_path())


def _prefix() -> list[str]:
    """Return the `unshare` command that creates the namespaces. They include a user namespace if the user is not
    root."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [_found("unshare") or "unshare", *user, "--net", "--mount", "--pid", "--fork", "--kill-child"]
