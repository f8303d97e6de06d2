"""What a command costs before it does anything."""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from statistics import median

from orchestrrl.bench.figure import Figure

REPETITIONS = 7
VERSION = ("-m", "orchestrrl", "--version")
NOTHING = ("-c", "pass")


def import_cli() -> list[Figure]:
    """CPU seconds of whole processes. The first round compiles the modules and does not count."""
    spent_s: dict[Sequence[str], list[float]] = {VERSION: [], NOTHING: []}
    with tempfile.TemporaryDirectory() as cache:
        # Where PYTHONDONTWRITEBYTECODE is set, every process would compile everything again.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = cache
        for repetition in range(-1, REPETITIONS):
            for arguments, times_s in spent_s.items():
                cpu_s = _run(arguments, environment)
                if repetition >= 0:
                    times_s.append(cpu_s)
    version_s, nothing_s = (median(times_s) for times_s in spent_s.values())
    return [Figure("import_cli", version_s, "s", "python -c pass", nothing_s, "CPU of `orchestrrl --version`")]


def _run(arguments: Sequence[str], environment: Mapping[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
