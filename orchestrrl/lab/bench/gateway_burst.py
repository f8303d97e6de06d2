"""What ten thousand requests at once take of the gateway: CPU time and memory, beside a plain proxy.

Each request has a connection of its own; none is answered in under a third of a second, so that they pile up. Clients
and engine run in other processes. Memory is the peak of what is resident, less what was before.
"""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.bench.plain_client import all_at_once, request
from orchestrrl.lab.bench.ways import PLAIN, PLAIN_ENGINE, PLAIN_PROXY, gateway_words, served
from orchestrrl.lab.testbed.processes import LabProcess
from orchestrrl.lab.testbed.stack import Stack

REQUESTS = 10_000
TOKENS = 64  # 5 ms each
ANSWERED_WITHIN_S = 240.0
FILES_EACH = 2  # of a proxy, for each request: the client's connection and the engine's


@dataclass(frozen=True, slots=True)
class Spent:
    """Of one process, for one burst."""

    cpu_s: float
    peak_bytes: int  # beyond what it held before


def gateway_burst(log_dir: Path, requests: int = REQUESTS) -> list[Figure]:
    """Raises Permanent where an answer is not complete."""
    with _many_files() as files:
        at_once = min(requests, (files - 200) // FILES_EACH)
        ours, theirs = asyncio.run(_measure(log_dir, at_once))
    fewer = "" if at_once == requests else f"; {files} files may be open, so fewer than {requests}"
    note = f"{at_once} requests at once, {TOKENS} tokens each, not streamed, all complete{fewer}"
    each = (
        f"{ours.peak_bytes / at_once / 1024:.1f} KiB for each request, theirs {theirs.peak_bytes / at_once / 1024:.1f}"
    )
    cpu, theirs_cpu = (1e3 * spent.cpu_s / at_once for spent in (ours, theirs))
    peak, theirs_peak = (spent.peak_bytes / (1 << 20) for spent in (ours, theirs))
    return [
        Figure("gateway_burst_cpu", cpu, "CPU s per 1,000 requests", PLAIN, theirs_cpu, note),
        Figure("gateway_burst_memory", peak, "MiB more at the peak", PLAIN, theirs_peak, f"{each}; {note}"),
    ]


async def _measure(log_dir: Path, requests: int) -> tuple[Spent, Spent]:
    """The gateway's and the proxy's, in turn in front of one engine."""
    async with Stack(log_dir / "burst") as stack:
        engine = await served(stack, "engine", *PLAIN_ENGINE)
        spent = []
        for name, words in (("gateway", gateway_words(engine.url)), ("proxy", (*PLAIN_PROXY, engine.url))):
            way = await served(stack, name, *words)
            spent.append(await _burst(way, requests))
            await way.stop()
    ours, theirs = spent
    return ours, theirs


async def _burst(way: LabProcess, requests: int) -> Spent:
    asked = request(way.url, max_tokens=TOKENS, stream=False)
    await all_at_once(way.url, asked, 50)
    before_bytes, before_s = _peak_bytes(way.pid), way.cpu_s()
    answers = await all_at_once(way.url, asked, requests, ANSWERED_WITHIN_S)
    lacking = sum(answer.tokens != TOKENS for answer in answers)
    if lacking:
        raise Permanent(f"{lacking} of {requests} answers of {way.url} had other than {TOKENS} tokens")
    return Spent(way.cpu_s() - before_s, _peak_bytes(way.pid) - before_bytes)


def _peak_bytes(pid: int) -> int:
    """The most that the process has held in memory so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10


@contextmanager
def _many_files() -> Iterator[int]:
    """As many open files as are allowed, here and in what is started."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
