"""Measure the time that the recorder adds to a collective. A torch program with the gloo backend alternates between
calls with and without the recorder."""

import json
import subprocess
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.testbed.processes import REPOSITORY, VLLM_PYTHON

INSTRUMENT = REPOSITORY / "orchestrrl" / "integrations" / "instrument"
ROUNDS = {1: 100, 2: 50}  # number of ranks -> rounds
CALLS = 100  # calls per block; short blocks of a round run under the same load of the machine

# A round is a block without the recorder, one with it, and one without it. The recorder's cost is the second minus the
# mean of the others; the third minus the first is the machine's noise. Each call is timed separately; the CPU time of a
# block is that of all threads.
PROGRAM = """
import json, os, sys, time
instrument, rings, store, size, rounds, calls = *sys.argv[1:4], *map(int, sys.argv[4:])
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
for number in range(-2, rounds):
    for name, call in (("sync", sync), ("async", asynchronous)):
        wall, cpu = [], []
        for recorded in (False, True, False):
            if recorded:
                recorder.start(rings)
            for _ in range(10):
                call()
            times, cpu_ns = [], time.process_time_ns()
            for _ in range(calls):
                begun = time.perf_counter_ns()
                call()
                times.append(time.perf_counter_ns() - begun)
            cpu.append((time.process_time_ns() - cpu_ns) / calls)
            wall.append(sorted(times)[calls // 2])
            recorder.stop()
        if number >= 0:
            spent[name]["wall"].append(wall)
            spent[name]["cpu"].append(cpu)
dist.barrier()
if rank == 0:
    print(json.dumps(spent), flush=True)
os._exit(0)
"""


def recorder() -> list[Figure]:
    """Measure the median duration of one all-reduce, in microseconds, with and without the recorder."""
    found: list[Figure] = []
    for size, rounds in ROUNDS.items():
        with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as rings:
            words = (VLLM_PYTHON, "-c", PROGRAM, INSTRUMENT, rings, f"{rings}/store", size, rounds, CALLS)
            done = subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True)
        spent = json.loads(done.stdout)
        found += [_figure(form, size, of["wall"], of["cpu"]) for form, of in spent.items()]
    return found


def _figure(form: str, size: int, wall_ns: list[list[float]], cpu_ns: list[list[float]]) -> Figure:
    """Return the figure for one form of call on `size` ranks. Each round in `wall_ns` and `cpu_ns` contains the time
    per call, in nanoseconds, without the recorder, with the recorder, and again without it."""
    cpu_added_ns = median(recorded - (before + after) / 2 for before, recorded, after in cpu_ns)
    return Figure(
        f"recorder_{form}_{size}",
        median(recorded for _, recorded, _ in wall_ns) / 1e3,
        "us",
        "the same program without the recorder",
        median((before + after) / 2 for before, _, after in wall_ns) / 1e3,
        f"p50 of one all-reduce over {size} rank{'s' * (size > 1)}; the recorder adds "
        f"{_spread([recorded - (before + after) / 2 for before, recorded, after in wall_ns])}, "
        f"{cpu_added_ns / 1e3:.1f} us of the process's CPU time; "
        f"two blocks without it differ by {_spread([after - before for before, _, after in wall_ns])}",
    )


def _spread(found_ns: list[float]) -> str:
    low, middle, high = (each / 1e3 for each in quantiles(found_ns, n=4))
    return f"{middle:.1f} us (half of {len(found_ns)} rounds: {low:.1f} to {high:.1f})"
