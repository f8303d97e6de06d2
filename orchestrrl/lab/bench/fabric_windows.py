"""Measure the circuit changes that are committed in the windows of a torch.distributed job: the share of commits that
are inside a window, their latency, and the slowdown of the job.

Eight gloo processes with a daemon, an agent and virtual switches (lab/demo/fabric_stack.py) take turns with eight
processes without OrchestrRL. Afterwards, the recorded events of all ranks show whether a collective was in flight
during a commit. For comparison, a separate program (echo.py) reads the job's pauses from shared memory and sends them
to a socket in the same turns.
"""

import asyncio
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory

import numpy as np

from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.demo.fabric_stack import RANKS, CommitRecord, FabricDemoStack, PeriodOutcomes, fabric_demo
from orchestrrl.lab.testbed.processes import LabProcess

DEVICE_S, WINDOW_S = 0.025, 0.16
TURNS, ITERATIONS = 42, 5  # the first turn of each job is not timed
SLOW_DEVICE_S, SHORT_WINDOW_S = 0.1, 0.05
SLOW_ITERATIONS = 40
POLL_S = 0.0001
ALLOWED_OUTSIDE = 0.01


@dataclass(frozen=True, slots=True)
class Shown:
    """The measurements of the benchmark. `pairs` contains, per turn, the mean time of an iteration with and without
    OrchestrRL. `echo_s` contains the latencies that echo.py measured. All times are in seconds."""

    run: PeriodOutcomes
    pairs: Sequence[tuple[float, float]]
    echo_s: Sequence[float]


def fabric_windows(log_dir: Path) -> list[Figure]:
    """Measure the share of commits that are inside a window, the slowdown of the job, and the latencies of commits.
    This takes about three minutes."""
    log_dir.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    # Each job has its own working directory.
    with TemporaryDirectory(dir=log_dir.resolve(), prefix="fabric-") as folder:
        shown = asyncio.run(_show(Path(folder) / "shown"))
        slow = asyncio.run(_refuse(Path(folder) / "slow"))
    return [_aim(shown, load), _pace(shown), *_soon(shown), _too_slow(slow, shown.run)]


async def _show(folder: Path) -> Shown:
    async with fabric_demo(folder, device_s=DEVICE_S) as stack:
        stamps = await stack.start_job("watched", WINDOW_S)
        await stack.start_job("alone", WINDOW_S, recorded=False)
        words = (sys.executable, "-m", "orchestrrl.lab.bench.echo", stamps, str(RANKS), str(POLL_S))
        async with LabProcess("echo", words, folder) as echo:
            pairs = [await _pair(stack, turn) for turn in range(TURNS)]
        run = await _seen(stack)
    return Shown(run, pairs[1:], json.loads(echo.out_path.read_text()))


async def _pair(stack: FabricDemoStack, turn: int) -> tuple[float, float]:
    """Run one turn of each job, in an order that alternates with `turn`. Return the mean time of an iteration, in
    seconds, with and without OrchestrRL."""
    order = ("watched", "alone") if turn % 2 else ("alone", "watched")
    taken_s = {name: fmean(await stack.turn(name, ITERATIONS)) for name in order}
    return taken_s["watched"], taken_s["alone"]


async def _refuse(folder: Path) -> PeriodOutcomes:
    """Run a job with devices whose reconfiguration takes longer than any window, so that commits are refused. Return
    the outcomes of the job's periods."""
    async with fabric_demo(folder, device_s=SLOW_DEVICE_S, within_s=SHORT_WINDOW_S + 0.03) as stack:
        await stack.start_job("slow", SHORT_WINDOW_S)
        await stack.turn("slow", SLOW_ITERATIONS)
        return await _seen(stack)


async def _seen(stack: FabricDemoStack) -> PeriodOutcomes:
    """Return the outcomes of the job's periods. Call this function while the job's processes run, because rings of dead
    processes are removed. Raises RuntimeError if the trace of a rank is missing."""
    outcome = await stack.outcome()
    if (ranks := sorted(outcome.traffic.traces)) != list(range(RANKS)):
        raise RuntimeError(f"the traces must be of ranks 0 to {RANKS - 1}, got {ranks}")
    return outcome


def _latencies_s(run: PeriodOutcomes, until: Callable[[CommitRecord], float | None]) -> list[float]:
    """Return the latencies, in seconds, of the commits that waited for a period's last collective. A latency starts
    when the last rank has finished that collective, and ends at the time that `until` returns for the commit."""
    found: list[float] = []
    for commit in run.commits:
        quiet, at_s = run.traffic.quiet_around(commit.commanded_s), until(commit)
        if quiet is not None and at_s is not None and commit.armed_s <= quiet[0]:
            found.append(at_s - quiet[0])
    return found


def _aim(shown: Shown, load: float) -> Figure:
    run = shown.run
    took_ms = median(commit.usable_s - commit.commanded_s for commit in run.commits) * 1e3
    met_ms = max((run.traffic.during(each.commanded_s, each.usable_s) for each in run.outside), default=0.0) * 1e3
    made, outside = len(run.commits), len(run.outside)
    note = (
        f"{made - outside} of {made} commits inside a window by the trace of all {RANKS} ranks (overlap at most "
        f"{met_ms:.1f} ms), {TURNS * ITERATIONS} iterations, device {DEVICE_S * 1e3:.0f} ms, commit {took_ms:.0f} ms; "
        f"periods: {_counted(period.code for period in run.status.periods)}; load before: {load:.1f}"
    )
    share = 100 * outside / max(1, made)
    return Figure("fabric_windows_outside", share, "%", "limit", 100 * ALLOWED_OUTSIDE, note)


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
        ("order", lambda commit: commit.commanded_s, "the daemon sends the command"),
        ("wire", lambda commit: commit.received_s, "the first switch's process receives it"),
        ("mirror", lambda commit: commit.set_s, "the first mirror is commanded to move"),
    ):
        taken_s = _latencies_s(shown.run, until)
        note = (
            f"from the last rank's last collective until {where}: {len(taken_s)} commits that waited for it; echo: "
            f"{len(echo_s)} pauses of the same turns, polled every {POLL_S * 1e3:g} ms"
        )
        for percent in (50, 99):
            # The smallest sample that at least `percent` of the samples do not exceed.
            ours_ms, echo_ms = (
                float(np.percentile(each_s, percent, method="inverted_cdf")) * 1e3 for each_s in (taken_s, echo_s)
            )
            figure = f"fabric_windows_{name}_p{percent}"
            found.append(Figure(figure, ours_ms, "ms", f"bare echo, p{percent}", echo_ms, note))
    return found


def _too_slow(run: PeriodOutcomes, shown: PeriodOutcomes) -> Figure:
    windows = f"windows of {SHORT_WINDOW_S * 1e3:.0f} ms, {SLOW_ITERATIONS} iterations"
    baseline = f"device of {DEVICE_S * 1e3:.0f} ms, windows of {WINDOW_S * 1e3:.0f} ms"
    held = _counted(_reason(period.code, period.detail) for period in run.status.periods)
    note = f"device of {SLOW_DEVICE_S * 1e3:.0f} ms, {windows}; periods held: {held}"
    return Figure("fabric_windows_too_slow", len(run.commits), "commits", baseline, len(shown.commits), note)


def _counted(reasons: Iterable[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).most_common())


def _reason(code: str, detail: str) -> str:
    """Return the reason code of a period. For `no_window`, add the reason of the last check, which is part of
    `detail`."""
    return f"{code} ({detail.split(': ')[1]})" if code == "no_window" else code
