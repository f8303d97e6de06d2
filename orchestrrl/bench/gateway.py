"""What the gateway costs: its CPU time and the latency that it adds, beside a plain proxy and beside no proxy at all.

One simulated engine serves all three, in turn. The gateway does more than a proxy: it asks the engine for a stream of
token ids, keeps them, and gives each attempt a connection of its own.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp

from orchestrrl.bench.figure import Figure
from orchestrrl.bench.processes import Served, serving
from orchestrrl.errors import Permanent

BODY_BYTES = 1_024
PATH = "/v1/completions"
# A token every few milliseconds, and each is sent before the next is made: one chunk per token.
ENGINE = ("--alpha-s", "0.004", "--beta-s", "0", "--gamma-s", "0", "--tick-s", "0.002", "--max-num-seqs", "256")
WHOLE, STREAMED = {"max_tokens": 1}, {"max_tokens": 192, "ignore_eos": True, "stream": True}


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked. The defaults give 10 ms of CPU time or more for every number that is reported."""

    rounds: int = 5
    whole_requests: int = 200
    streams: int = 12
    in_flight: int = 16
    lone_requests: int = 300


@dataclass(slots=True)
class _Spent:
    """Of one way to the engine, by round: CPU seconds per 1,000 of each, and all latencies of lone requests."""

    whole_s: list[float] = field(default_factory=list)
    chunks_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)

    def percentile_s(self, percent: int) -> float:
        return quantiles(self.latency_s, n=100)[percent - 1]


def gateway_cpu(log_dir: Path, load: Load = Load()) -> list[Figure]:
    direct, proxy, gateway = asyncio.run(_measure(log_dir, load))
    plain = "plain aiohttp proxy"
    figures = [
        Figure(
            f"gateway_cpu_{name}",
            median(ours),
            f"CPU s per 1,000 {unit}",
            plain,
            median(theirs),
            f"{note}; of the engine itself, asked directly: {median(engine):.2g} s",
        )
        for name, unit, ours, theirs, engine, note in (
            ("whole", "requests", gateway.whole_s, proxy.whole_s, direct.whole_s, "1 KB in, one token out"),
            ("streamed", "chunks", gateway.chunks_s, proxy.chunks_s, direct.chunks_s, "a token in each chunk"),
        )
    ]
    for percent in (50, 99):
        direct_s = direct.percentile_s(percent)
        figures.append(
            Figure(
                f"gateway_added_p{percent}",
                1e3 * (gateway.percentile_s(percent) - direct_s),
                "ms",
                plain,
                1e3 * (proxy.percentile_s(percent) - direct_s),
                f"latency beyond the {1e3 * direct_s:.1f} ms of asking directly, one at a time",
            )
        )
    return figures


async def _measure(log_dir: Path, load: Load) -> tuple[_Spent, _Spent, _Spent]:
    async with AsyncExitStack() as servers:

        async def start(name: str, module: str, *arguments: str) -> Served:
            return await servers.enter_async_context(serving(module, *arguments, log_path=log_dir / f"{name}.log"))

        engine = await start("engine", "orchestrrl", "engine", "simulated", *ENGINE)
        proxy = await start("proxy", "orchestrrl.bench.proxy", engine.url)
        flags = ("--listen", "127.0.0.1:0", "--engine-kind", "simulated", "--engine", f"e0={engine.url}")
        gateway = await start("gateway", "orchestrrl", "gateway", *flags, "--log-level", "warning")
        session = await servers.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        client = _Client(session, load)
        ways = [(way, _Spent()) for way in (engine, proxy, gateway)]
        for way, _ in ways:
            await client.round(way, _Spent())
        for _ in range(load.rounds):
            for way, spent in ways:
                await client.round(way, spent)
        for _ in range(load.lone_requests):
            for way, spent in ways:
                spent.latency_s.append(await client.latency_s(way))
    return ways[0][1], ways[1][1], ways[2][1]


class _Client:
    def __init__(self, session: aiohttp.ClientSession, load: Load) -> None:
        self._session = session
        self._load = load
        self._turns = asyncio.Semaphore(load.in_flight)

    async def round(self, way: Served, spent: _Spent) -> None:
        for kind, requests, results in (
            (WHOLE, self._load.whole_requests, spent.whole_s),
            (STREAMED, self._load.streams, spent.chunks_s),
        ):
            before_s = way.cpu_s()
            counts = await asyncio.gather(*(self._in_turn(way, kind) for _ in range(requests)))
            results.append(1_000 * (way.cpu_s() - before_s) / sum(counts))

    async def latency_s(self, way: Served) -> float:
        started_s = time.perf_counter()
        await self._ask(way, WHOLE)
        return time.perf_counter() - started_s

    async def _in_turn(self, way: Served, kind: Mapping[str, Any]) -> int:
        async with self._turns:
            return await self._ask(way, kind)

    async def _ask(self, way: Served, kind: Mapping[str, Any]) -> int:
        """How many answers, or chunks of a streamed one, came back. Raises Permanent for anything but an answer."""
        async with self._session.post(way.url + PATH, json={**_BODY, **kind}) as answer:
            text = await answer.read()
            if answer.status != 200 or b'"error"' in text:
                raise Permanent(f"{way.url}{PATH}: {answer.status}: {text[:300]!r}")
        return text.count(b'data: {"id"') if "stream" in kind else 1


_HEAD = {"model": "simulated", "temperature": 0, "prompt": ""}
_BODY = {**_HEAD, "prompt": ("a request of one kilobyte " * 64)[: BODY_BYTES - len(str(_HEAD))]}
