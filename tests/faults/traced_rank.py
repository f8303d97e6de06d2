"""A small traced process: writes its ring as the recorder does, with sleeps in place of collectives.

`python traced_rank.py RINGS RANK RANKS PROGRESS [--announce]`, with orchestrrl/integrations/instrument on PYTHONPATH.
Ranks keep step by the clock that they share. PROGRESS holds the number of iterations so far.
"""

import itertools
import json
import sys
import time
from pathlib import Path

from rings import RingWriter, group_id  # type: ignore[import-not-found]  # of the folder on PYTHONPATH

ITERATION_NS = 400_000_000
BUSY_S = 0.03
PERIODS = {"near": {"0": 0, "1": 1}, "far": {"0": 0, "1": 2}}  # the GPUs of the two ranks


def wait_for_turn() -> None:
    """Sleep until the next multiple of an iteration's length."""
    time.sleep((ITERATION_NS - time.monotonic_ns() % ITERATION_NS) * 1e-9)


def announce(writer: RingWriter, iteration: int, ranks: int) -> None:
    """Announce the periods alternately, each time with its intent: the daemon may not have received it before."""
    name = list(PERIODS)[iteration % 2]
    traffic = {
        "operation": "DP",
        "primitive": "ring_all_reduce",
        "groups": [list(range(ranks))],
        "bytes_per_rank": 1e9,
    }
    body = {"stage": "train", "job": "small", "traffic": [traffic], "gpus": PERIODS[name]}
    writer.announce("announce", json.dumps({"period": name, "body": body}).encode())


def main(rings: str, rank: int, ranks: int, progress: Path, announces: bool) -> None:
    writer = RingWriter(Path(rings), job="small")
    writer.set_rank(rank)
    group, reduce = group_id(range(ranks), "all"), writer.op("all_reduce")
    for iteration in itertools.count():
        wait_for_turn()
        writer.moment("iteration", iteration)
        if announces:
            announce(writer, iteration, ranks)
        collective = writer.begin(reduce, group, 4096)
        time.sleep(BUSY_S)
        writer.end(collective)
        progress.write_text(f"{iteration + 1}\n")


if __name__ == "__main__":
    folder, number, count, reported = sys.argv[1:5]
    main(folder, int(number), int(count), Path(reported), "--announce" in sys.argv)
