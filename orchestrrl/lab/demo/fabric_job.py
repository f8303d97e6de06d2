"""Run small training jobs whose pauses are windows for circuit changes. The jobs use torch and gloo, and their ranks
are forked from a process that has imported torch.

Compute is simulated by sleeping. An iteration consists of a forward pass with one EP all-to-all per layer, a pause
without traffic, a backward pass with overlapped DP all-reduces of gradient buckets, and a pause for the optimizer.
Every `SEND_WEIGHTS_EVERY` iterations, weights are broadcast.

`python -m orchestrrl.lab.demo.fabric_job` reads orders from standard input and responds to each with one line of JSON:

    {"start": NAME, "ranks": 8, "window_s": 0.12, "store": FILE, "rings": FOLDER or null, "stamps": FILE}
        Start a job, as described in JobOrder. The response is NAME, when all ranks are ready.
    {"turn": NAME, "iterations": N}
        Run N iterations. The response is a list with the duration of each iteration on its slowest rank, in seconds.
    {"stop": NAME}
        Stop the job. The response is a list with the exit status of each rank.

The collectives of a job with rings are recorded (the folder orchestrrl/integrations/instrument is on PYTHONPATH), and
its rank 0 announces periods. The start time of each rank's latest pause is written to `stamps`. The module uses only
the standard library and torch, because it runs without OrchestrRL's dependencies.
"""

import contextlib
import datetime
import json
import mmap
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from orchestrrl.lab.testbed.ranks import Ranks, print_json

LAYERS = 2
BUCKETS = 3
LAYER_S = 0.02
SEND_WEIGHTS_EVERY = 10
ELEMENTS = 4096


class Stamps:
    """Shared memory with two integers per rank: the number of pauses, and the start time of the latest pause in
    nanoseconds."""

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._at = 2 * rank

    def pause(self) -> None:
        self._words[self._at + 1] = time.monotonic_ns()
        self._words[self._at] += 1


class JobRank:
    """One rank of a job. The EP groups are the two halves of the job, one per PoD. Each DP group consists of one rank
    of each half."""

    def __init__(self, order: "JobOrder", recorder: ModuleType | None, stamps: Stamps) -> None:
        self._rank, half = dist.get_rank(), order.ranks // 2
        self._order = order
        self._recorder = recorder
        self._stamps = stamps
        self.experts = [list(range(half)), list(range(half, order.ranks))]
        self.replicas = [[rank, rank + half] for rank in range(half)]
        # Every rank creates all groups, as torch requires.
        self._expert_group = self._mine(self.experts)
        self._replica_group = self._mine(self.replicas)
        self._tokens = torch.ones(half * 64)
        self._gradients = [torch.ones(ELEMENTS) for _ in range(BUCKETS)]
        self._weights = torch.ones(ELEMENTS)
        self._iteration = 0

    def iterate(self) -> float:
        """Run one iteration and return its duration in seconds."""
        began_s = time.perf_counter()
        if self._recorder is not None:
            self._recorder.iteration(self._iteration)
        # The period after the next pause is announced before the pause, so that its circuits are ready to commit.
        self._announce("gradients", "DP", "ring_all_reduce", self.replicas, 4e9)
        with self._mark("forward"):
            for _ in range(LAYERS):
                time.sleep(LAYER_S)
                received = torch.empty_like(self._tokens)
                dist.all_to_all_single(received, self._tokens, group=self._expert_group)
        self._pause()
        self._announce("experts", "EP", "all_to_all", self.experts, 1e9)
        with self._mark("backward"):
            pending = []
            for bucket in self._gradients:
                time.sleep(LAYER_S)
                pending.append(dist.all_reduce(bucket, group=self._replica_group, async_op=True))
            for work in pending:
                work.wait()
        with self._mark("optimizer"):
            self._pause()
        self._iteration += 1
        if self._iteration % SEND_WEIGHTS_EVERY == 0:
            with self._mark("weight_send"):
                dist.broadcast(self._weights, src=0)
        return time.perf_counter() - began_s

    def _pause(self) -> None:
        self._stamps.pause()
        time.sleep(max(0.0, self._order.window_s - LAYER_S))  # the next layer's compute has no traffic either

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
        intent = {"stage": "train", "traffic": [traffic], "job": self._order.start}
        self._recorder.announce(period, intent if self._iteration == 0 else {})


@dataclass(frozen=True, slots=True)
class JobOrder:
    """The order to start a training job. `start` is the job's name, and `window_s` is the length of each pause in
    seconds. `store` is the file through which the ranks find each other (torch.distributed's FileStore). `rings` is the
    folder of the rings, or None if the job is not recorded. `stamps` is the file of the pauses' start times."""

    start: str
    ranks: int
    window_s: float
    store: str
    rings: str | None
    stamps: str


def run_rank(order: JobOrder, rank: int, line: Connection) -> None:
    """Run one rank of a job in a forked process. Each number received from `line` is a number of iterations to run; the
    response is the list of their durations in seconds. Return when None is received or the other end of `line` is
    closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent process ends the job
    torch.set_num_threads(1)
    recorder: ModuleType | None = None
    if order.rings is not None:
        import recorder as here  # type: ignore[import-not-found]  # from the folder on PYTHONPATH

        here.start(order.rings, job=order.start)
        recorder = here
    store = dist.FileStore(order.store, order.ranks)
    patience = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=order.ranks, timeout=patience)
    made = JobRank(order, recorder, Stamps(Path(order.stamps), rank))
    dist.barrier()
    line.send(None)
    with contextlib.suppress(EOFError):
        while (iterations := line.recv()) is not None:
            line.send([made.iterate() for _ in range(iterations)])
    dist.destroy_process_group()


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    jobs: dict[str, Ranks] = {}
    for text in sys.stdin:
        match json.loads(text):
            case {"start": name}:
                order = JobOrder(**json.loads(text))
                jobs[name] = Ranks(order.ranks, partial(run_rank, order))
                jobs[name].receive()
                answer: Any = name
            case {"turn": name, "iterations": iterations}:
                answer = [max(times) for times in zip(*jobs[name].ask(iterations), strict=True)]
            case {"stop": name}:
                answer = jobs.pop(name).stop()
        print_json(answer)
    for job in jobs.values():
        job.stop()


if __name__ == "__main__":
    main()
