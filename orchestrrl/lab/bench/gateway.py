"""What the gateway costs: its CPU time and the latency that it adds, beside plain proxies, routers, and no proxy.

One engine that costs next to nothing serves all ways, in turn. The gateway does more than a proxy: it asks the engine
for a stream of token ids, keeps every token of every request, and could continue each of them elsewhere at any moment.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.bench.plain_client import Lanes, TimedResponse, all_at_once, request
from orchestrrl.lab.bench.ways import DIRECT, OURS, PLAIN, GatewayWays, started
from orchestrrl.lab.testbed.processes import LabProcess

STREAM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """How much is asked. The defaults give 10 ms of CPU time or more for every number that is reported."""

    rounds: int = 3
    whole_requests: int = 300
    in_flight: int = 16
    streams: int = 32  # and as many answers of their length that are not
    lone_requests: int = 100
    bursts: tuple[int, ...] = (256, 1024)  # streams that open at once


@dataclass(frozen=True, slots=True)
class _Burst:
    """Latency and cost of streams that open at once."""

    first_p99_s: float
    whole_s: float  # until all are complete
    token_us: float  # CPU microseconds per token
    tokens_per_chunk: float

    def __str__(self) -> str:
        speed = f"{1e3 * self.first_p99_s:.0f} ms, all in {self.whole_s:.1f} s, CPU {self.token_us:.0f} us per token"
        return f"{speed}, {self.tokens_per_chunk:.1f} tokens per chunk"


@dataclass(slots=True)
class WaySpent:
    """Of one way to the engine, by round."""

    served: LabProcess
    whole_s: list[float] = field(default_factory=list)  # CPU seconds per 1,000 requests
    wall_s: list[float] = field(default_factory=list)  # seconds per 1,000 requests
    chunks_us: list[float] = field(default_factory=list)  # CPU microseconds per chunk
    rollout_s: list[float] = field(default_factory=list)  # CPU seconds per 1,000 long answers that are not streamed
    tokens_per_chunk: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)  # of requests that are alone
    bursts: dict[int, "_Burst"] = field(default_factory=dict)  # by streams at once

    def latency_percentile_s(self, percent: int) -> float:
        return quantiles(self.latency_s, n=100)[percent - 1]


def gateway_cpu(log_dir: Path, load: GatewayLoad = GatewayLoad()) -> list[Figure]:
    """Raises Permanent where an answer is not complete."""
    spent, left_out = asyncio.run(_measure(log_dir, load))
    missing = "".join(f"; {name} left out: {reason}" for name, reason in left_out.items())
    return [*_cpu_figures(spent, missing), *_time_figures(spent), *_burst_figures(spent, load)]


def _cpu_figures(spent: dict[str, WaySpent], missing: str) -> list[Figure]:
    """Ours by each other's."""
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
        per_thousand = "CPU s per 1,000 requests"
        long = f"{STREAM_TOKENS} tokens out, not streamed; ours asks for them in chunks of 8 and keeps each at once"
        figures += [
            Figure(f"gateway_cpu_{what}{against}", median(our), unit, other, median(their), why)
            for what, our, their, unit, why in (
                ("whole", ours.whole_s, theirs.whole_s, per_thousand, f"1 KB in, one token out{note}"),
                ("rollout", ours.rollout_s, theirs.rollout_s, per_thousand, long),
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
    our_wall_s, baseline = median(ours.wall_s), "asking directly"
    rate = Figure("gateway_wall_whole", our_wall_s, "s per 1,000 requests", baseline, direct_wall_s, note)
    added = []
    for percent in (50, 99):
        direct_s, our_s, plain_s = (way.latency_percentile_s(percent) for way in (direct, ours, plain))
        note = f"latency beyond the {1e3 * direct_s:.2g} ms of asking directly, one at a time"
        beyond_ms, plain_ms = 1e3 * (our_s - direct_s), 1e3 * (plain_s - direct_s)
        added.append(Figure(f"gateway_added_p{percent}", beyond_ms, "ms", PLAIN, plain_ms, note))
    return [rate, *added]


def _burst_figures(spent: dict[str, WaySpent], load: GatewayLoad) -> list[Figure]:
    figures = []
    for streams in load.bursts:
        each = "; ".join(f"{name} {way.bursts[streams]}" for name, way in spent.items())
        note = f"{streams} streams of {STREAM_TOKENS} tokens at 5 ms that open at once, all complete: {each}"
        our_ms, plain_ms = (1e3 * spent[name].bursts[streams].first_p99_s for name in (OURS, PLAIN))
        figures.append(Figure(f"gateway_first_chunk_{streams}", our_ms, "ms, p99", PLAIN, plain_ms, note))
    return figures


async def _measure(log_dir: Path, load: GatewayLoad) -> tuple[dict[str, WaySpent], dict[str, str]]:
    async with started(log_dir) as ways:
        spent = {name: WaySpent(served) for name, served in ways.served.items()}
        lanes = await _open(ways, load)
        for round_number in range(-1, load.rounds):
            for name, way in spent.items():
                await _round(WaySpent(way.served) if round_number < 0 else way, lanes[name], load)
        for _ in range(load.lone_requests):
            for name, way in spent.items():
                asked = request(way.served.url, max_tokens=1, stream=False)
                way.latency_s.append((await lanes[name].lanes[0].send(asked)).whole_s)
        for some in lanes.values():
            some.close()
        for streams in load.bursts:
            for way in spent.values():
                await _burst(way, streams)
    return spent, ways.left_out


async def _open(ways: GatewayWays, load: GatewayLoad) -> dict[str, Lanes]:
    lanes = {name: Lanes(served.url) for name, served in ways.served.items()}
    for some in lanes.values():
        await some.open(load.in_flight)
    return lanes


async def _round(way: WaySpent, lanes: Lanes, load: GatewayLoad) -> None:
    asked = request(way.served.url, max_tokens=1, stream=False)
    before_s, started_s = way.served.cpu_s(), time.perf_counter()
    await lanes.send_in_turn(asked, load.whole_requests)
    way.whole_s.append(1e3 * (way.served.cpu_s() - before_s) / load.whole_requests)
    way.wall_s.append(1e3 * (time.perf_counter() - started_s) / load.whole_requests)
    asked = request(way.served.url, max_tokens=STREAM_TOKENS, stream=False)
    before_s = way.served.cpu_s()
    _counted(await lanes.send_in_turn(asked, load.streams))
    way.rollout_s.append(1e3 * (way.served.cpu_s() - before_s) / load.streams)
    asked = request(way.served.url, max_tokens=STREAM_TOKENS, stream=True)
    before_s = way.served.cpu_s()
    answers = await lanes.send_in_turn(asked, load.streams)
    chunks = _counted(answers)
    way.chunks_us.append(1e6 * (way.served.cpu_s() - before_s) / chunks)
    way.tokens_per_chunk.append(STREAM_TOKENS * len(answers) / chunks)


async def _burst(way: WaySpent, streams: int) -> None:
    asked = request(way.served.url, max_tokens=STREAM_TOKENS, stream=True)
    before_s, started_s = way.served.cpu_s(), time.perf_counter()
    answers = await all_at_once(way.served.url, asked, streams)
    whole_s, chunks, tokens = time.perf_counter() - started_s, _counted(answers), STREAM_TOKENS * streams
    first_p99_s = quantiles((answer.first_s for answer in answers), n=100)[98]
    way.bursts[streams] = _Burst(first_p99_s, whole_s, 1e6 * (way.served.cpu_s() - before_s) / tokens, tokens / chunks)


def _counted(answers: Sequence[TimedResponse]) -> int:
    """Chunks of all of them. Raises Permanent where one lacks a token."""
    lacking = [answer.tokens for answer in answers if answer.tokens != STREAM_TOKENS]
    if lacking:
        raise Permanent(
            f"{len(lacking)} of {len(answers)} streams had other than {STREAM_TOKENS} tokens: {lacking[:8]}"
        )
    return sum(answer.chunks for answer in answers)
