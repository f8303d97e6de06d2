"""Weights carried by edges, against one broadcast of torch.distributed of the same bytes: eight processes, loopback.

Both in turn in the same processes, and the medians of their ratios. The executor's time has all that belongs to each
sync: links are made and let go of, each edge has its threads. Checksums are apart, as peers make them before and after.
What moves it, as seen on two busy cores: chunks of 16 MiB cost gloo a tenth less CPU than of 4 MiB, of 1 MiB a third
more (each is a wake-up at either end); a chain and a tree cost the same. sendfile instead of send costs more: pages of
a file go to a socket by 4 KiB, and copying them is cheaper. Sockets with 512 KiB under way cost tcp a fifth less than
with 4 MiB, whose bytes have left the processor's cache when they are read.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from statistics import median

from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.testbed.processes import REPOSITORY, VLLM_PYTHON

RANKS = 8
SIZES = {128 * 1024 * 1024: 7, 512 * 1024 * 1024: 3}  # and rounds
CHUNK_BYTES = 4 * 1024 * 1024  # as `weights.chunk_bytes` is by default
PARENTS = (0, 0, 1, 1, 2, 2, 3)  # of ranks 1 and on: a tree of two children each, as in one ToR
BASELINE = "broadcast"
WAYS = ("gloo", "tcp")


Moved = Mapping[str, float]  # wall_s, cpu_s


def weights_bandwidth() -> list[Figure]:
    return [figure for size, rounds in SIZES.items() for figure in _figures(size, measured(size, rounds))]


def _figures(size: int, rounds: Sequence[Mapping[str, Moved]]) -> list[Figure]:
    baseline_s = median(each[BASELINE]["wall_s"] for each in rounds)
    figures = []
    for way in WAYS:
        cpu_ratio = median(each[way]["cpu_s"] / each[BASELINE]["cpu_s"] for each in rounds)
        ratio = median(each[way]["wall_s"] / each[BASELINE]["wall_s"] for each in rounds)
        note = (
            f"{RANKS} processes, {size >> 20} MiB, chunks of {CHUNK_BYTES >> 20} MiB, a tree;"
            f" median of {len(rounds)} ratios in turn, load {os.getloadavg()[0]:.0f};"
            f" CPU seconds {cpu_ratio:.2f} times its, checksums apart"
        )
        baseline = "torch.distributed.broadcast over gloo of the same bytes, in turn"
        name = f"weights_bandwidth_{way}_{size >> 20}mib"
        figures.append(Figure(name, ratio * baseline_s, "s", baseline, baseline_s, note))
    return figures


def measured(size: int, rounds: int) -> list[dict[str, Moved]]:
    """By way, in turn; a round that does not count comes first. Raises RuntimeError where bytes differ."""
    ways = (BASELINE, *WAYS)
    orders = "".join(f"{way}\n" for _ in range(rounds + 1) for way in ways)
    arguments = [str(RANKS), str(size), str(CHUNK_BYTES), ",".join(map(str, PARENTS))]
    done = subprocess.run(
        [VLLM_PYTHON, "-m", "orchestrrl.lab.bench.weights_ranks", *arguments],
        input=orders,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(answers) != (rounds + 1) * len(ways) or not all(each["same"] for each in answers):
        raise RuntimeError(f"ranks did not all end with the same bytes: {done.stdout[-500:]}{done.stderr[-2000:]}")
    starts = range(len(ways), len(answers), len(ways))
    return [dict(zip(ways, answers[at : at + len(ways)], strict=True)) for at in starts]
