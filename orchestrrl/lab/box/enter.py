"""Run a module of ours in user, network, mount and process namespaces of its own: what it makes there ends with it.

The kernel takes down the namespaces, and with them every interface, bridge and process inside, once the first process
of the process namespace is gone. That one ends with its standard input (`end_with_input`), so that nothing is left
even after a SIGKILL of whoever started it.
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
SEARCHED = ("/usr/sbin", "/sbin")  # where `ip` and `tc` are, and an unprivileged user's PATH often is not
KINDS = ("veth", "bridge")
# Quicker than anything that needs a site.
PROBE_WITHIN_S = 20.0
PROBE = """
mount -t tmpfs none /run && ip netns add one && ip netns add two
ip link add name probe netns one type veth peer name probe netns two && ip -n one link add name probe0 type bridge
tc -n one qdisc add dev probe root tbf rate 1mbit burst 16k limit 16k
"""


def lacking() -> str:
    """What keeps a box from being made here; empty: nothing does."""
    missing = [tool for tool in TOOLS if _found(tool) is None]
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, this is {sys.platform}"
    if missing:
        return f"{', '.join(missing)} cannot be found (Debian: util-linux, iproute2 and mount have them)"
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
        return f"namespaces could not be made within {PROBE_WITHIN_S:g} s"
    if tried.returncode == 0:
        return ""
    said = " | ".join(line.strip() for line in tried.stderr.splitlines() if line.strip())
    return f"it needs root, or user namespaces that are permitted, and veth, bridge and tbf in the kernel: {said}"


def start(name: str, words: Sequence[str | Path], folder: Path) -> LabProcess:
    """Start `python WORDS` inside, as a process that takes input and ends with it. Raises Permanent."""
    if why := lacking():
        raise Permanent(why)
    command = [*_prefix(), sys.executable, *words]
    process = LabProcess(name, command, folder, environment={"PATH": _path()}, takes_input=True)
    process.spawn()
    return process


def end_with_input(stop: Callable[[], object]) -> None:
    """For the process inside: `stop` once its input has ended; whatever becomes of that, the end soon after."""

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
    """Without root, as the root of a user namespace."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [_found("unshare") or "unshare", *user, "--net", "--mount", "--pid", "--fork", "--kill-child"]
