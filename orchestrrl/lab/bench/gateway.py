"""Measure the gateway's CPU time, added latency and memory, and compare them with those of plain proxies and routers,
and with direct requests. Also measure the CPU time of the gateway's ledger on disk.

One engine with minimal CPU cost serves all paths in rotation, so that background load affects all paths alike. The
gateway does more than a proxy: it requests a stream of token ids from the engine, stores every token of every request,
and can continue each request on another engine at any time.
"""

import asyncio
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.bench import ways
from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.bench.ways import DIRECT, OURS, PLAIN, PLAIN_ENGINE, PLAIN_PROXY, LoadClient, TimedResponse
from orchestrrl.lab.testbed.processes import LabProcess
from orchestrrl.lab.testbed.stack import Stack

STREAM_TOKENS = 64  # 5 ms each
PER_THOUSAND = "CPU s per 1,000 requests"


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """The numbers of rounds, requests and streams in a measurement. With the defaults, every reported number is based
    on at least 10 ms of CPU time."""

    rounds: int = 3
    whole_requests: int = 300
    in_flight: int = 16
    streams: int = 32  # number of streamed responses, and of long responses that are not streamed
    settle_s: float = 0.0  # wait for data that is written after the responses
    lone_requests: int = 100
    bursts: tuple[int, ...] = (256, 1024)  # numbers of streams that open at once


LEDGER_LOAD = GatewayLoad(rounds=6, whole_requests=1000, streams=192, settle_s=0.3)


@dataclass(frozen=True, slots=True)
class Burst:
    """The latency, CPU time and memory of a burst: requests that arrive at once, each on its own connection."""

    first_p99_s: float
    whole_s: float  # until all are complete
    cpu_s: float
    chunks: int
    peak_bytes: int  # increase of the peak resident memory

    def text(self, tokens: int) -> str:
        speed = f"{1e3 * self.first_p99_s:.0f} ms, all in {self.whole_s:.1f} s"
        return f"{speed}, CPU {1e6 * self.cpu_s / tokens:.0f} us per token, {tokens / self.chunks:.1f} tokens per chunk"


@dataclass(slots=True)
class WaySpent:
    """The measurements of one path to the engine. `latency_s` has one entry per request; the other lists have one entry
    per round."""

    served: LabProcess
    whole_s: list[float] = field(default_factory=list)  # CPU seconds per 1,000 requests
    wall_s: list[float] = field(default_factory=list)  # seconds per 1,000 requests
    chunks_us: list[float] = field(default_factory=list)  # CPU microseconds per chunk
    rollout_s: list[float] = field(default_factory=list)  # CPU seconds per 1,000 long responses, not streamed
    tokens_per_chunk: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)  # of requests that run alone
    bursts: dict[int, Burst] = field(default_factory=dict)  # number of streams -> burst

    def latency_percentile_s(self, percent: int) -> float:
        return quantiles(self.latency_s, n=100)[percent - 1]


def gateway_cpu(log_dir: Path, load: GatewayLoad = GatewayLoad()) -> list[Figure]:
    """Measure the CPU time and the latency of all paths to the engine, and their behaviour in bursts of streams. Raises
    Permanent if a response is incomplete."""
    spent, left_out = asyncio.run(_all_ways(log_dir, load))
    missing = "".join(f"; {name} skipped: {reason}" for name, reason in left_out.items())
    return [*_cpu_figures(spent, missing), *_time_figures(spent), *_burst_figures(spent, load)]


def _cpu_figures(spent: dict[str, WaySpent], missing: str) -> list[Figure]:
    """Return figures that compare the gateway's CPU times with those of each proxy and router. `missing` is a note
    about the paths that were skipped."""
    ours = spent[OURS]
    figures = []
    for other, theirs in spent.items():
        if other in (DIRECT, OURS):
            continue
        against = "" if other == PLAIN else f"_{other.replace('-', '_')}"
        note = missing if other == PLAIN else ""
        coalesced = (
            f"tokens per chunk {median(ours.tokens_per_chunk):.2f}, theirs {median(theirs.tokens_per_chunk):.2f}"
        )
        long = f"{STREAM_TOKENS} tokens out, not streamed; ours requests chunks of 8 tokens and stores each one"
        figures += [
            Figure(f"gateway_cpu_{what}{against}", median(our), unit, other, median(their), why)
            for what, our, their, unit, why in (
                ("whole", ours.whole_s, theirs.whole_s, PER_THOUSAND, f"1 KB in, one token out{note}"),
                ("rollout", ours.rollout_s, theirs.rollout_s, PER_THOUSAND, long),
                ("streamed", ours.chunks_us, theirs.chunks_us, "CPU us per chunk", f"as delivered; {coalesced}"),
            )
        ]
    return figures


def _time_figures(spent: dict[str, WaySpent]) -> list[Figure]:
    direct, ours, plain = spent[DIRECT], spent[OURS], spent[PLAIN]
    direct_wall_s = median(direct.wall_s)
    shares = ", ".join(
        f"{name} {direct_wall_s / median(way.wall_s):.0%}" for name, way in spent.items() if name != DIRECT
    )
    note = f"requests/s relative to direct: {shares}"
    our_wall_s, baseline = median(ours.wall_s), "direct"
    figures = [Figure("gateway_wall_whole", our_wall_s, "s per 1,000 requests", baseline, direct_wall_s, note)]
    for percent in (50, 99):
        direct_s, our_s, plain_s = (way.latency_percentile_s(percent) for way in (direct, ours, plain))
        note = f"added to the direct latency of {1e3 * direct_s:.2g} ms, one request at a time"
        beyond_ms, plain_ms = 1e3 * (our_s - direct_s), 1e3 * (plain_s - direct_s)
        figures.append(Figure(f"gateway_added_p{percent}", beyond_ms, "ms", PLAIN, plain_ms, note))
    return figures


def _burst_figures(spent: dict[str, WaySpent], load: GatewayLoad) -> list[Figure]:
    figures = []
    for streams in load.bursts:
        each = "; ".join(f"{name} {way.bursts[streams].text(STREAM_TOKENS * streams)}" for name, way in spent.items())
        note = f"{streams} streams of {STREAM_TOKENS} tokens at 5 ms that open at once, all complete: {each}"
        our_ms, plain_ms = (1e3 * spent[name].bursts[streams].first_p99_s for name in (OURS, PLAIN))
        figures.append(Figure(f"gateway_first_chunk_{streams}", our_ms, "ms, p99", PLAIN, plain_ms, note))
    return figures


async def _all_ways(log_dir: Path, load: GatewayLoad) -> tuple[dict[str, WaySpent], dict[str, str]]:
    async with ways.started(log_dir) as (processes, left_out):
        spent = {name: WaySpent(served) for name, served in processes.items()}
        await _rounds(spent, load)
        for streams in load.bursts:
            for way in spent.values():
                way.bursts[streams] = await _burst(way.served, streams, stream=True)
    return spent, left_out


async def _rounds(spent: dict[str, WaySpent], load: GatewayLoad) -> None:
    """Measure all paths in rotation and add the measurements to `spent`. The first round is not counted."""
    with ExitStack() as undo:
        clients = {name: undo.enter_context(closing(LoadClient(way.served.url))) for name, way in spent.items()}
        for number in range(-1, load.rounds):
            for name in reversed(spent) if number % 2 else spent:  # alternate the order
                await _round(spent[name] if number >= 0 else WaySpent(spent[name].served), clients[name], load)
        asked = ways.request(max_tokens=1, stream=False)
        for _ in range(load.lone_requests):
            for name, way in spent.items():
                way.latency_s.append((await clients[name].send(asked)).whole_s)


async def _round(way: WaySpent, client: LoadClient, load: GatewayLoad) -> None:
    async def spent(requests: int, tokens: int, *, stream: bool = False) -> tuple[float, float, int]:
        """Send requests for `tokens` tokens each. Return the CPU time and the wall-clock time, in seconds, and the
        number of chunks received."""
        asked = ways.request(max_tokens=tokens, stream=stream)
        before_s, started_s = way.served.cpu_s(), time.perf_counter()
        chunks = _counted(await client.send_in_turn(asked, requests, load.in_flight), tokens)
        whole_s = time.perf_counter() - started_s
        await asyncio.sleep(load.settle_s)
        return way.served.cpu_s() - before_s, whole_s, chunks

    cpu_s, whole_s, _ = await spent(load.whole_requests, 1)
    way.whole_s.append(1e3 * cpu_s / load.whole_requests)
    way.wall_s.append(1e3 * whole_s / load.whole_requests)
    cpu_s, _, _ = await spent(load.streams, STREAM_TOKENS)
    way.rollout_s.append(1e3 * cpu_s / load.streams)
    cpu_s, _, chunks = await spent(load.streams, STREAM_TOKENS, stream=True)
    way.chunks_us.append(1e6 * cpu_s / chunks)
    way.tokens_per_chunk.append(STREAM_TOKENS * load.streams / chunks)


async def _burst(way: LabProcess, requests: int, *, stream: bool, within_s: float = ways.ANSWER_WITHIN_S) -> Burst:
    before_bytes, before_s, started_s = _peak_bytes(way.pid), way.cpu_s(), time.perf_counter()
    with closing(LoadClient(way.url, within_s)) as client:
        asked = ways.request(max_tokens=STREAM_TOKENS, stream=stream)
        answers = await client.send_in_turn(asked, requests, at_once=requests)
    whole_s, cpu_s = time.perf_counter() - started_s, way.cpu_s() - before_s
    first_p99_s = quantiles((answer.first_s for answer in answers), n=100)[98]
    return Burst(first_p99_s, whole_s, cpu_s, _counted(answers, STREAM_TOKENS), _peak_bytes(way.pid) - before_bytes)


def _counted(answers: Sequence[TimedResponse], tokens: int) -> int:
    """Return the total number of chunks in the responses. Raises Permanent if a response does not have `tokens`
    tokens."""
    lacking = [answer.tokens for answer in answers if answer.tokens != tokens]
    if lacking:
        raise Permanent(f"responses must have {tokens} tokens, {len(lacking)} of {len(answers)} have: {lacking[:8]}")
    return sum(answer.chunks for answer in answers)


# --- the ledger on disk

WITHOUT = "without --ledger"
_LEDGERS: dict[str, tuple[str, ...] | None] = {"plain": None, "ledger": (), "ledger-of-all": ("--keep-from-s", "0")}


def gateway_ledger(log_dir: Path, load: GatewayLoad = LEDGER_LOAD) -> list[Figure]:
    """Measure the gateway's CPU time with `--ledger`, including the ledger's writer thread. By default, the ledger does
    not store responses that took less than 0.2 s. Responses of a single token are therefore also measured with a ledger
    that stores all responses. Raises Permanent if a response is incomplete."""
    spent = asyncio.run(_with_ledgers(log_dir, load))
    plain, kept, all_kept = (spent[name] for name in _LEDGERS)
    short, long = "1 KB in, one token out", f"{STREAM_TOKENS} tokens out at 5 ms"
    return [
        Figure(f"ledger_cpu_{what}", median(ours), unit, WITHOUT, median(theirs), note)
        for what, ours, theirs, unit, note in (
            ("whole", kept.whole_s, plain.whole_s, PER_THOUSAND, f"{short}, too short to be stored"),
            ("whole_kept", all_kept.whole_s, plain.whole_s, PER_THOUSAND, f"{short}, stored (--keep-from-s 0)"),
            ("rollout", kept.rollout_s, plain.rollout_s, PER_THOUSAND, f"{long}, not streamed"),
            ("streamed", kept.chunks_us, plain.chunks_us, "CPU us per chunk", f"{long}, streamed"),
        )
    ]


async def _with_ledgers(log_dir: Path, load: GatewayLoad) -> dict[str, WaySpent]:
    async with Stack(log_dir / "ledger") as stack:
        folder = stack.undo.enter_context(tempfile.TemporaryDirectory(dir=stack.folder))
        engine = await ways.served(stack, "engine", *PLAIN_ENGINE)
        spent: dict[str, WaySpent] = {}
        for name, more in _LEDGERS.items():
            ledger = ("--ledger", f"{folder}/{name}", *more) if more is not None else ()
            spent[name] = WaySpent(await ways.served(stack, name, *ways.gateway_words(engine.url, *ledger)))
        await _rounds(spent, load)
    return spent


# --- ten thousand requests at once

REQUESTS = 10_000
ANSWERED_WITHIN_S = 240.0
FILES_EACH = 2  # open files of a proxy per request: the client's connection and the engine's


def gateway_burst(log_dir: Path, requests: int = REQUESTS) -> list[Figure]:
    """Measure the gateway's CPU time and memory in a burst of requests. Every response takes at least 0.3 s, so that
    requests accumulate. The clients and the engine run in other processes. Raises Permanent if a response is
    incomplete."""
    with _many_files() as files:
        at_once = min(requests, (files - 200) // FILES_EACH)
        ours, theirs = asyncio.run(_bursts(log_dir, at_once))
    fewer = "" if at_once == requests else f"; fewer than {requests} because of the limit of {files} open files"
    note = f"{at_once} requests at once, {STREAM_TOKENS} tokens each, not streamed, all complete{fewer}"
    each = f"{ours.peak_bytes / at_once / 1024:.1f} KiB per request, theirs {theirs.peak_bytes / at_once / 1024:.1f}"
    cpu, theirs_cpu = (1e3 * spent.cpu_s / at_once for spent in (ours, theirs))
    peak, theirs_peak = (spent.peak_bytes / (1 << 20) for spent in (ours, theirs))
    return [
        Figure("gateway_burst_cpu", cpu, PER_THOUSAND, PLAIN, theirs_cpu, note),
        Figure("gateway_burst_memory", peak, "MiB added at peak", PLAIN, theirs_peak, f"{each}; {note}"),
    ]


async def _bursts(log_dir: Path, requests: int) -> list[Burst]:
    """Run a burst through the gateway and then one through the proxy, in front of the same engine. Return the
    measurements of both bursts."""
    async with Stack(log_dir / "burst") as stack:
        engine = await ways.served(stack, "engine", *PLAIN_ENGINE)
        bursts = []
        for name, words in (("gateway", ways.gateway_words(engine.url)), ("proxy", (*PLAIN_PROXY, engine.url))):
            async with await ways.served(stack, name, *words) as way:
                await _burst(way, 50, stream=False)
                bursts.append(await _burst(way, requests, stream=False, within_s=ANSWERED_WITHIN_S))
    return bursts


def _peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process so far, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10


@contextmanager
def _many_files() -> Iterator[int]:
    """Raise the limit of open files to the hard limit, for this process and its children, and yield the limit. Restore
    the previous limit on exit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
