"""What noting a collective costs: a real program over gloo, with the recorder and without it, in turn."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from orchestrrl.bench.figure import Figure

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
INSTRUMENT = REPOSITORY / "orchestrrl" / "instrument"
ROUNDS, CALLS = 40, 250
FORMS = ("sync", "async")

# One process that is a group of its own: a second one would add its waiting, many times what is to be measured. The
# rounds alternate, and each call is timed by itself.
PROGRAM = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
import recorder
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(1024)
def sync(): dist.all_reduce(tensor)
def asynchronous(): dist.all_reduce(tensor, async_op=True).wait()
spent = {name: {"with": [], "without": []} for name in ("sync", "async")}
for number in range(-2, int(sys.argv[3])):
    for kind in ("with", "without"):
        if kind == "with":
            recorder.start(sys.argv[2])
        for name, call in (("sync", sync), ("async", asynchronous)):
            times = []
            for _ in range(int(sys.argv[4])):
                begun = time.perf_counter_ns()
                call()
                times.append(time.perf_counter_ns() - begun)
            if number >= 0:
                spent[name][kind].append(sorted(times)[len(times) // 2])
        recorder.stop()
print(json.dumps(spent))
"""


def recorder() -> list[Figure]:
    """Microseconds of one all-reduce at the median; nothing, and a word on stderr, where there is no torch."""
    if not PYTHON.exists():
        print(f"recorder: left out, {PYTHON} is missing: make venv-vllm", file=sys.stderr)  # noqa: T201
        return []
    with TemporaryDirectory(dir=_memory()) as rings:
        done = subprocess.run(
            [PYTHON, "-c", PROGRAM, INSTRUMENT, rings, str(ROUNDS), str(CALLS)],
            check=True,
            capture_output=True,
            text=True,
        )
    spent = json.loads(done.stdout)
    return [_figure(form, spent[form]["with"], spent[form]["without"]) for form in FORMS]


def _figure(form: str, recorded_ns: list[float], plain_ns: list[float]) -> Figure:
    added_ns = sorted(a - b for a, b in zip(recorded_ns, plain_ns, strict=True))
    half = len(added_ns) // 4
    return Figure(
        f"recorder_{form}",
        median(recorded_ns) / 1e3,
        "us",
        "the same program without the recorder",
        median(plain_ns) / 1e3,
        f"p50 of one all-reduce, a group of one; the recorder adds {median(added_ns) / 1e3:.1f} us "
        f"(half of {len(added_ns)} pairs: {added_ns[half] / 1e3:.1f} to {added_ns[-half - 1] / 1e3:.1f})",
    )


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
