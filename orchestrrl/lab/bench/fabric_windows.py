"""Commits of circuits in the windows of a real job of torch.distributed: how many, how well aimed, how soon.

Eight processes over gloo under a daemon, an agent and virtual switches (lab/demo/fabric_stack.py) take turns with eight
that are left alone. Afterwards the recorders of all ranks say whether any collective was in flight during a commit.
In the same turns, a bare poller carries each pause from shared memory to a socket (echo.py).
"""

import asyncio
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory

import numpy as np

from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.demo import fabric_stack
from orchestrrl.lab.testbed.processes import VLLM_PYTHON, LabProcess
from orchestrrl.rpc.pb import fabric_pb2

DEVICE_S, WINDOW_S = 0.025, 0.16
TURNS, ITERATIONS = 42, 5  # the first turn of each job is not timed
SLOW_DEVICE_S, SHORT_WINDOW_S = 0.1, 0.05
SLOW_ITERATIONS = 40
POLL_S = 0.0001
ALLOWED_OUTSIDE = 0.01


@dataclass(frozen=True, slots=True)
class WindowsRun:
    """One recorded job under a running."""

    iterations: int
    periods: Sequence[fabric_pb2.PeriodReport]
    commits: Sequence[fabric_stack.CommitRecord]
    traffic: fabric_stack.RecordedTraffic

    @property
    def outside(self) -> list[fabric_stack.CommitRecord]:
        """Commits during which some rank had a collective in flight."""
        return [each for each in self.commits if self.traffic.during(each.commanded_s, each.usable_s) > 0]

    def latencies_s(self, until: Callable[[fabric_stack.CommitRecord], float | None]) -> list[float]:
        """From the end of the last rank's last collective, of commits that waited for it."""
        found: list[float] = []
        for commit in self.commits:
            quiet, at_s = self.traffic.quiet_around(commit.commanded_s), until(commit)
            if quiet is not None and at_s is not None and commit.armed_s <= quiet[0]:
                found.append(at_s - quiet[0])
        return found

    def periods_text(self) -> str:
        """Periods by what became of them."""
        counts = Counter(str(period.code) for period in self.periods)
        return ", ".join(f"{count} {code}" for code, count in counts.most_common())


@dataclass(frozen=True, slots=True)
class Shown:
    """`pairs`: mean seconds of an iteration with and without OrchestrRL, turn by turn. `echo_s`: how long each took."""

    run: WindowsRun
    pairs: Sequence[tuple[float, float]]
    echo_s: Sequence[float]


def fabric_windows(log_dir: Path) -> list[Figure]:
    """About three minutes."""
    log_dir.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    # Jobs have working directories of their own.
    with TemporaryDirectory(dir=log_dir.resolve(), prefix="fabric-") as folder:
        shown, slow = asyncio.run(_run(Path(folder)))
    return [_aim(shown, load), _pace(shown), *_soon(shown), _too_slow(slow, shown.run)]


async def _run(folder: Path) -> tuple[Shown, WindowsRun]:
    async with fabric_stack.Launcher(folder, VLLM_PYTHON) as launcher:
        return await _show(launcher, folder), await _refuse(launcher, folder)


async def _show(launcher: fabric_stack.Launcher, folder: Path) -> Shown:
    made = folder / "shown"
    made.mkdir()
    stamps = made / "stamps"
    async with fabric_stack.fabric_demo(made, device_s=DEVICE_S) as running:
        await launcher.start("watched", WINDOW_S, running.rings, stamps)
        await launcher.start("alone", WINDOW_S, None, made / "stamps-alone")
        await running.reads("watched")
        words = (sys.executable, "-m", "orchestrrl.lab.bench.echo", stamps, str(fabric_stack.RANKS), str(POLL_S))
        async with LabProcess("echo", words, made) as echo:
            pairs = [await _pair(launcher, turn) for turn in range(TURNS)]
        run = await _seen(running, TURNS * ITERATIONS)
        await launcher.stop("watched")
        await launcher.stop("alone")
    return Shown(run, pairs[1:], json.loads(echo.out_path.read_text()))


async def _pair(launcher: fabric_stack.Launcher, turn: int) -> tuple[float, float]:
    """Each goes first in every other turn."""
    order = ("watched", "alone") if turn % 2 else ("alone", "watched")
    taken_s = {name: fmean(await launcher.turn(name, ITERATIONS)) for name in order}
    return taken_s["watched"], taken_s["alone"]


async def _refuse(launcher: fabric_stack.Launcher, folder: Path) -> WindowsRun:
    """A device that is slower than any window is long."""
    made = folder / "slow"
    made.mkdir()
    async with fabric_stack.fabric_demo(made, device_s=SLOW_DEVICE_S, within_s=SHORT_WINDOW_S + 0.03) as running:
        await launcher.start("slow", SHORT_WINDOW_S, running.rings)
        await running.reads("slow")
        await launcher.turn("slow", SLOW_ITERATIONS)
        run = await _seen(running, SLOW_ITERATIONS)
        await launcher.stop("slow")
    return run


async def _seen(running: fabric_stack.FabricDemoStack, iterations: int) -> WindowsRun:
    """While the job's processes still are there: rings of dead ones are removed."""
    outcome = await running.outcome()
    traces = fabric_stack.read_traces(running.rings)
    if sorted(traces) != list(range(fabric_stack.RANKS)):
        raise RuntimeError(f"the traces must be of ranks 0 to {fabric_stack.RANKS - 1}, got {sorted(traces)}")
    return WindowsRun(iterations, outcome.status.periods, outcome.commits, fabric_stack.RecordedTraffic.of(traces))


def _aim(shown: Shown, load: float) -> Figure:
    run = shown.run
    took_ms = median(commit.usable_s - commit.commanded_s for commit in run.commits) * 1e3
    met_ms = max((run.traffic.during(each.commanded_s, each.usable_s) for each in run.outside), default=0.0) * 1e3
    made, outside = len(run.commits), len(run.outside)
    note = (
        f"{made - outside} of {made} commits inside a window by the trace of all {fabric_stack.RANKS} ranks "
        f"({met_ms:.1f} ms met at worst), {run.iterations} iterations, device {DEVICE_S * 1e3:.0f} ms, "
        f"a commit takes {took_ms:.0f} ms; periods: {run.periods_text()}; load before: {load:.1f}"
    )
    share = 100 * outside / max(1, made)
    return Figure("fabric_windows_outside", share, "%", "allowed", 100 * ALLOWED_OUTSIDE, note)


def _pace(shown: Shown) -> Figure:
    from scipy.stats import t

    ratios = [watched_s / alone_s for watched_s, alone_s in shown.pairs]
    reach = float(t.ppf(0.975, len(ratios) - 1)) * stdev(ratios) / math.sqrt(len(ratios))
    note = (
        f"mean of {len(ratios)} pairs of turns of {ITERATIONS} iterations; ratio {fmean(ratios):.4f}, "
        f"95 % interval {fmean(ratios) - reach:.4f} to {fmean(ratios) + reach:.4f}"
    )
    watched_ms, alone_ms = (fmean(each_s) * 1e3 for each_s in zip(*shown.pairs, strict=True))
    return Figure("fabric_windows_iteration", watched_ms, "ms", "the same job without OrchestrRL", alone_ms, note)


def _soon(shown: Shown) -> list[Figure]:
    echo_s = shown.echo_s
    found: list[Figure] = []
    for name, until, where in (
        ("order", lambda commit: commit.commanded_s, "the order is given"),
        ("wire", lambda commit: commit.received_s, "the first switch's process has it from its socket"),
        ("mirror", lambda commit: commit.set_s, "the first mirror is told to move"),
    ):
        taken_s = shown.run.latencies_s(until)
        note = (
            f"from the last rank's last collective until {where}: {len(taken_s)} commits that waited for it; echo: "
            f"{len(echo_s)} pauses of the same turns, polled every {POLL_S * 1e3:g} ms"
        )
        for percent in (50, 99):
            # The least value that at least so many do not exceed.
            ours_ms, echo_ms = (
                float(np.percentile(each_s, percent, method="inverted_cdf")) * 1e3 for each_s in (taken_s, echo_s)
            )
            figure = f"fabric_windows_{name}_p{percent}"
            found.append(Figure(figure, ours_ms, "ms", f"bare echo, p{percent}", echo_ms, note))
    return found


def _too_slow(run: WindowsRun, shown: WindowsRun) -> Figure:
    reasons = Counter(_reason(period.code, period.detail) for period in run.periods)
    listed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    slow = (
        f"device of {SLOW_DEVICE_S * 1e3:.0f} ms, windows of {SHORT_WINDOW_S * 1e3:.0f} ms, {run.iterations} iterations"
    )
    baseline = f"device of {DEVICE_S * 1e3:.0f} ms, windows of {WINDOW_S * 1e3:.0f} ms"
    note = f"{slow}, {run.iterations} iterations; periods held: {listed}"
    return Figure("fabric_windows_too_slow", len(run.commits), "commits", baseline, len(shown.commits), note)


def _reason(code: str, detail: str) -> str:
    """Of a period that no window came for: what the last look at one said."""
    return f"{code} ({detail.split(': ')[1]})" if code == "no_window" else code
