"""Print the properties of this process as JSON, then end in the way given by the first argument."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

print(
    json.dumps(
        {
            "argv": [sys.argv, sys.orig_argv],
            "command line": [word for word in Path("/proc/self/cmdline").read_text().split("\0") if word],
            "path": sys.path,
            "name": __name__,
            "cwd": os.getcwd(),
            "environment": dict(os.environ),
            "parent": os.getppid(),
            "leads its session": os.getsid(0) == os.getpid(),
            "files": sorted(os.listdir("/proc/self/fd"))[:3],
            "threads": threading.active_count(),
            "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "input": sys.stdin.read(),
            "encoding": [sys.stdout.encoding, sys.stderr.errors, sys.stdout.line_buffering, sys.stderr.line_buffering],
        }
    )
)
print("no text: \ud800", file=sys.stderr)
match sys.argv[1]:
    case "raise":
        raise ValueError("as requested")
    case "exit":
        sys.exit(7)
    case "kill":
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
