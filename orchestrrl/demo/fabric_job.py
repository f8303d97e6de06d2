"""A training job in small, for showing windows: `python fabric_job.py`, one process per rank, torch and gloo.

Compute is sleeping. An iteration: forward with an EP all-to-all per layer, a pause without traffic, backward with
buckets of gradients that are all-reduced over DP meanwhile, the optimizer's pause; now and then weights are sent.
Reads `go N` on its standard input, runs N iterations, and answers with one line of JSON: how long each took, seconds.

With ORCHESTRRL_RECORDER set, and this package's folder `instrument` on PYTHONPATH, collectives are recorded, and rank 0
announces what comes next. Standard library and torch only: it runs where OrchestrRL is not installed.
"""

import argparse
import contextlib
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

LAYERS = 2
BUCKETS = 3
LAYER_S = 0.01
SEND_WEIGHTS_EVERY = 10
ELEMENTS = 4096


class Job:
    """One rank. EP groups are the halves of the job, one in each PoD; DP groups have a rank of either."""

    def __init__(self, window_s: float, recorder: ModuleType | None) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        half = self._ranks // 2
        self._window_s = window_s
        self._recorder = recorder
        self.experts = [list(range(half)), list(range(half, self._ranks))]
        self.replicas = [[rank, rank + half] for rank in range(half)]
        # Every rank makes all groups, as torch wants it.
        self._expert_group = self._mine(self.experts)
        self._replica_group = self._mine(self.replicas)
        self._tokens = torch.ones(half * 64)
        self._gradients = [torch.ones(ELEMENTS) for _ in range(BUCKETS)]
        self._weights = torch.ones(ELEMENTS)
        self._iteration = 0

    def iterate(self) -> float:
        """One iteration; how long it took, in seconds."""
        began_s = time.perf_counter()
        if self._recorder is not None:
            self._recorder.iteration(self._iteration)
        # What comes after the next pause is announced before it, so that it is materialised when the pause begins.
        self._announce("gradients", "DP", "ring_all_reduce", self.replicas, 4e9)
        with self._mark("forward"):
            for _ in range(LAYERS):
                time.sleep(LAYER_S)
                received = torch.empty_like(self._tokens)
                dist.all_to_all_single(received, self._tokens, group=self._expert_group)
        time.sleep(self._window_s)
        self._announce("experts", "EP", "all_to_all", self.experts, 1e9)
        with self._mark("backward"):
            pending = []
            for bucket in self._gradients:
                time.sleep(LAYER_S)
                pending.append(dist.all_reduce(bucket, group=self._replica_group, async_op=True))
            for work in pending:
                work.wait()
        with self._mark("optimizer"):
            time.sleep(self._window_s)
        self._iteration += 1
        if self._iteration % SEND_WEIGHTS_EVERY == 0:
            with self._mark("weight_send"):
                dist.broadcast(self._weights, src=0)
        return time.perf_counter() - began_s

    def _mine(self, groups: list[list[int]]) -> Any:
        made = [dist.new_group(ranks) for ranks in groups]
        return next(group for group, ranks in zip(made, groups, strict=True) if self._rank in ranks)

    def _mark(self, name: str) -> contextlib.AbstractContextManager[None]:
        if self._recorder is None:
            return contextlib.nullcontext()
        marked: contextlib.AbstractContextManager[None] = self._recorder.mark(name)
        return marked

    def _announce(self, period: str, operation: str, primitive: str, groups: list[list[int]], size: float) -> None:
        if self._recorder is None or self._rank != 0:
            return
        traffic = {"operation": operation, "primitive": primitive, "groups": groups, "bytes_per_rank": size}
        self._recorder.announce(period, {"stage": "train", "traffic": [traffic]} if self._iteration == 0 else {})


def turns() -> Iterator[int]:
    """Of how many iterations each, until the input ends."""
    for line in sys.stdin:
        word, _, count = line.strip().partition(" ")
        if word == "go":
            yield int(count)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--window-s", type=float, default=0.12, help="of each of an iteration's two pauses")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recorder: ModuleType | None = None
    if os.environ.get("ORCHESTRRL_RECORDER"):
        import recorder as here  # type: ignore[import-not-found]  # of the folder on PYTHONPATH

        here.start()
        recorder = here
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    job = Job(arguments.window_s, recorder)
    dist.barrier()
    _say("ready")
    for count in turns():
        _say(json.dumps([job.iterate() for _ in range(count)]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
