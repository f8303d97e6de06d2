"""Run a cycle of an RL job in a box: training, generation, weight sync and training again. Measure each stage's traffic
on the circuits of the previous stage and on the stage's own circuits."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from orchestrrl.fabric.client import FabricClient
from orchestrrl.fabric.periods import PeriodReport, PeriodState
from orchestrrl.integrations.instrument.rings import RingWriter, group_id
from orchestrrl.lab.box import intents
from orchestrrl.lab.box.run import BoxOrder
from orchestrrl.lab.box.testbed import Testbed
from orchestrrl.lab.box.traffic import Flow, mbps, running
from orchestrrl.lab.testbed.processes import beside
from planner.fabric.intent import Intent, Stage

# Maximum number of announcements, and the iterations for which each waits; a trainer announces in every iteration.
ANNOUNCED, ANNOUNCED_FOR = 20, 2
SAMPLE_S = 0.1
WARM_UP_S = 0.3  # start of a burst, until TCP reaches its rate

Burst = tuple[float, float, list[Flow]]  # start, end, flows


class TestbedTrainer:
    """A trainer whose iterations consist of one collective and one pause. `run` iterates until cancelled. `bursts`
    contains the start, the end and the flows of each collective."""

    def __init__(
        self, rings: Path, job: str, ranks: Sequence[int], flows: Callable[[], list[Flow]], order: BoxOrder
    ) -> None:
        self.bursts: list[Burst] = []
        self._flows = flows
        self._order = order
        self._writers = [RingWriter(rings, job=job) for _ in ranks]
        self._group = group_id(ranks, "all")
        self._reduce = [writer.op("all_reduce") for writer in self._writers]
        for rank, writer in zip(ranks, self._writers, strict=True):
            writer.set_rank(rank)

    async def run(self) -> None:
        while True:
            for writer in self._writers:
                writer.moment("iteration", len(self.bursts))
            writing = list(zip(self._writers, self._reduce, strict=True))
            begun = [(writer, writer.begin(reduce, self._group, 1 << 20)) for writer, reduce in writing]
            flows = self._flows()
            began_s = time.monotonic()
            try:
                async with running(flows):
                    await asyncio.sleep(self._order.collective_s)
                    ended_s = time.monotonic()
            finally:
                for writer, sequence in begun:
                    writer.end(sequence)
            self.bursts.append((began_s, ended_s, flows))
            await asyncio.sleep(self._order.pause_s)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@dataclass(slots=True)
class Cycle:
    """Runs the stages of a cycle and records their results. `bursts` contains the start, the end and the flows of each
    burst of traffic."""

    box: Testbed
    client: FabricClient
    order: BoxOrder
    stages: list[dict[str, Any]] = field(default_factory=list)
    bursts: list[Burst] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    async def stage(self, intent: Intent) -> None:
        """Run a stage that sends no traffic while circuits change, such as generation between two deployments or a
        weight sync before its start. Measure the stage's traffic before and after the change."""
        began_s = time.monotonic()
        before = await self._burst(intent)
        report = await self.client.announce(intent.period, intent, boundary=True)
        after = await self._burst(intent)
        self._note(intent, began_s, report, [before], [after])

    async def training(self, intent: Intent, trainer: TestbedTrainer) -> None:
        """Run training until its circuits have been used for some iterations. The circuits change in one of the
        trainer's pauses; the trainer is not stopped for the change."""
        began_s, first, iterations = time.monotonic(), len(trainer.bursts), self.order.iterations
        within_s = ANNOUNCED_FOR * (self.order.collective_s + self.order.pause_s)
        async with beside(trainer.run()) as running_on:
            for _ in range(ANNOUNCED):
                report = await self.client.announce(intent.period, intent, within_s=within_s)
                if report.state is not PeriodState.KEPT:
                    break
            then = len(trainer.bursts)
            while len(trainer.bursts) < then + iterations and not running_on.done():
                await asyncio.sleep(0.05)
        offset_s = time.monotonic() - time.time()
        begun_s = min((commit.commanded_s for commit in report.commits), default=report.announced_s) + offset_s
        usable_s = max((commit.usable_s for commit in report.commits), default=report.announced_s) + offset_s
        bursts = trainer.bursts[first:]
        self.bursts += bursts
        before = [burst for burst in bursts if burst[1] <= begun_s]
        after = [burst for burst in bursts if burst[0] >= usable_s]
        self._note(intent, began_s, report, before[-iterations:], after)

    def report(self) -> dict[str, Any]:
        return {"stages": self.stages, "timeline": self._timeline()}

    async def _burst(self, intent: Intent) -> Burst:
        flows = flows_between_tors(self.box, intent)
        async with running(flows):
            began_s = time.monotonic()
            await asyncio.sleep(WARM_UP_S + self.order.seconds)
            ended_s = time.monotonic()
        self.bursts.append((began_s, ended_s, flows))
        return self.bursts[-1]

    def _note(
        self, intent: Intent, began_s: float, report: PeriodReport, before: Sequence[Burst], after: Sequence[Burst]
    ) -> None:
        offset_s = time.monotonic() - time.time() - self.began_s
        self.stages.append(
            {
                "period": intent.period,
                "stage": str(intent.stage),
                "state": str(report.state),
                "detail": report.detail,
                "code": report.code,
                "from_s": began_s - self.began_s,
                "until_s": time.monotonic() - self.began_s,
                "moves": sum(commit.moves for commit in report.commits),
                "commits": [[commit.commanded_s + offset_s, commit.usable_s + offset_s] for commit in report.commits],
                "in_window": all(commit.window_opened_s is not None for commit in report.commits)
                if intent.stage is Stage.TRAIN
                else None,
                "circuits": self._circuits(),
                "before_mbps": _mean(before),
                "mbps": _mean(after),
            }
        )

    def _circuits(self) -> dict[str, int]:
        """Return the number of circuits that the panel has joined between each pair of endpoints."""
        return Counter(" - ".join(self.box.ends_of(pair)) for pair in sorted(self.box.panel.joined))

    def _timeline(self) -> list[list[float]]:
        """Return the rate between ToRs over time, as rows of [seconds since the start of the cycle, Mbit/s]."""
        now_s = time.monotonic()
        edges = [self.began_s + SAMPLE_S * k for k in range(int((now_s - self.began_s) / SAMPLE_S) + 1)]
        points = []
        for since_s, until_s in pairwise(edges):
            under_way = [burst for burst in self.bursts if burst[0] < until_s and burst[1] > since_s]
            points.append([until_s - self.began_s, sum(mbps(flows, since_s, until_s) for *_, flows in under_way)])
        return points


async def cycle(box: Testbed, order: BoxOrder) -> dict[str, Any]:
    """Run a cycle with an `orchestrrl agent` that reads the trainer's recorders, and return a report of its stages."""
    site, rings, training = box.site, box.folder / "rings", intents.training(box.site)
    trainer = TestbedTrainer(
        rings, intents.JOB, sorted(training.ranks), lambda: flows_between_tors(box, training), order
    )
    agent = box.start_agent("--rings", str(rings), "--host-name", "box")
    try:
        async with FabricClient(box.daemon_address) as client:
            made = Cycle(box, client, order)
            await made.training(training, trainer)
            await made.stage(intents.generation(site))
            await made.stage(intents.weights(site))
            await made.training(training, trainer)
            return made.report()
    finally:
        trainer.close()
        await agent.stop()


def flows_between_tors(box: Testbed, intent: Intent) -> list[Flow]:
    """Return a flow for each pair of GPUs in the intent's traffic matrix that have different ToRs."""
    senders = intents.senders(box.site, intent)
    pairs = {pair for pair in senders if box.site.tor_of(pair[0]) != box.site.tor_of(pair[1])}
    return [Flow(box.plan.nic_of(source), box.plan.nic_of(sink)) for source, sink in sorted(pairs)]


def _mean(bursts: Sequence[Burst]) -> float | None:
    """Return the mean rate of bursts in Mbit/s, or None if there are no bursts. The rate of a burst is summed over its
    flows and does not include the warm-up."""
    rates = [mbps(flows, since_s + WARM_UP_S, until_s) for since_s, until_s, flows in bursts]
    return sum(rates) / len(rates) if rates else None
