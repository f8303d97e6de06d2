"""What noting a collective costs: a real program over gloo, with the recorder and without it, in turn."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from orchestrrl.bench.figure import Figure

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
INSTRUMENT = REPOSITORY / "orchestrrl" / "instrument"
PAIRS, CALLS = 150, 80  # short blocks: both of a pair see the same neighbours on the machine
SIZES = (1, 2)

# Blocks with the recorder and without it alternate in one program, ABBA. Each call is timed by itself, and a block by
# the CPU time of all its threads, which sees less of what else runs on the machine.
PROGRAM = """
import json, os, sys, time
instrument, rings, store, size, pairs, calls = *sys.argv[1:4], *map(int, sys.argv[4:])
sys.path.insert(0, instrument)
import torch, torch.distributed as dist
import recorder
torch.set_num_threads(1)
rank = 0
for other in range(1, size):
    if not os.fork():
        rank = other
        break
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
tensor = torch.zeros(1024)
def sync(): dist.all_reduce(tensor)
def asynchronous(): dist.all_reduce(tensor, async_op=True).wait()
spent = {name: {"wall": [], "cpu": []} for name in ("sync", "async")}
for number in range(-2, pairs):
    for name, call in (("sync", sync), ("async", asynchronous)):
        of = {"wall": {}, "cpu": {}}
        for recorded in (False, True) if number % 2 else (True, False):
            if recorded:
                recorder.start(rings)
            for _ in range(5):
                call()
            times, cpu = [], time.process_time_ns()
            for _ in range(calls):
                begun = time.perf_counter_ns()
                call()
                times.append(time.perf_counter_ns() - begun)
            of["cpu"][recorded] = (time.process_time_ns() - cpu) / calls
            of["wall"][recorded] = sorted(times)[calls // 2]
            recorder.stop()
        if number >= 0:
            for kind, found in of.items():
                spent[name][kind].append((found[True], found[False]))
dist.barrier()
if rank == 0:
    print(json.dumps(spent), flush=True)
os._exit(0)
"""


def recorder() -> list[Figure]:
    """Microseconds of one all-reduce at the median; nothing, and a word on stderr, where there is no torch."""
    if not PYTHON.exists():
        print(f"recorder: left out, {PYTHON} is missing: make venv-vllm", file=sys.stderr)  # noqa: T201
        return []
    found: list[Figure] = []
    for size in SIZES:
        spent = _run(size)
        found += [_figure(form, size, of["wall"], of["cpu"]) for form, of in spent.items()]
    return found


def _run(size: int) -> dict[str, Any]:
    with TemporaryDirectory(dir=_memory()) as rings:
        done = subprocess.run(
            [PYTHON, "-c", PROGRAM, INSTRUMENT, rings, f"{rings}/store", str(size), str(PAIRS), str(CALLS)],
            check=True,
            capture_output=True,
            text=True,
        )
    spent: dict[str, Any] = json.loads(done.stdout)
    return spent


def _figure(form: str, size: int, wall_ns: list[tuple[float, float]], cpu_ns: list[tuple[float, float]]) -> Figure:
    """Of pairs, with the recorder and without it."""
    added_ns = sorted(recorded - plain for recorded, plain in wall_ns)
    half = len(added_ns) // 4
    cpu_added_ns = median(recorded - plain for recorded, plain in cpu_ns)
    return Figure(
        f"recorder_{form}_{size}",
        median(recorded for recorded, _ in wall_ns) / 1e3,
        "us",
        "the same program without the recorder",
        median(plain for _, plain in wall_ns) / 1e3,
        f"p50 of one all-reduce over {size} rank{'s' * (size > 1)}; the recorder adds {median(added_ns) / 1e3:.1f} us "
        f"(half of {len(added_ns)} pairs: {added_ns[half] / 1e3:.1f} to {added_ns[-half - 1] / 1e3:.1f}), "
        f"{cpu_added_ns / 1e3:.1f} us of the process's CPU time",
    )


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
