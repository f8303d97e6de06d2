"""What the gateway's ledger on disk costs: its CPU time with `--ledger`, beside the same without.

Both answer the same requests in turn, each with an id of its own, in front of one engine that costs next to nothing.
The time of the thread that writes is counted, and that of what it leaves to be written later.
"""

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from orchestrrl.bench.figure import Figure
from orchestrrl.bench.gateway import STREAM_TOKENS
from orchestrrl.bench.plain_client import Answer, Lane, Lanes, request
from orchestrrl.bench.processes import Served, serving
from orchestrrl.errors import Permanent

WITHOUT = "without --ledger"
WRITTEN_S = 0.5  # after which nothing is left to be written


@dataclass(frozen=True, slots=True)
class Load:
    rounds: int = 5
    whole_requests: int = 400
    in_flight: int = 16
    rollouts: int = 64  # of STREAM_TOKENS, and as many streams


@dataclass(slots=True)
class _Spent:
    """By one of the two, in each round."""

    served: Served
    whole_s: list[float] = field(default_factory=list)  # CPU seconds per 1,000 requests
    rollout_s: list[float] = field(default_factory=list)  # the same of long answers that are not streamed
    chunk_us: list[float] = field(default_factory=list)  # CPU microseconds per streamed chunk


def gateway_ledger(log_dir: Path, load: Load = Load()) -> list[Figure]:
    """Raises Permanent where an answer is not complete."""
    kept, plain = asyncio.run(_measure(log_dir, load))
    unit = "CPU s per 1,000 requests"
    long = f"{STREAM_TOKENS} tokens out at 5 ms"
    return [
        Figure("ledger_cpu_whole", median(kept.whole_s), unit, WITHOUT, median(plain.whole_s), "1 KB in, a token out"),
        Figure(
            "ledger_cpu_rollout", median(kept.rollout_s), unit, WITHOUT, median(plain.rollout_s), f"{long}, at once"
        ),
        Figure(
            "ledger_cpu_streamed",
            median(kept.chunk_us),
            "CPU us per chunk",
            WITHOUT,
            median(plain.chunk_us),
            f"{long}, streamed",
        ),
    ]


async def _measure(log_dir: Path, load: Load) -> tuple[_Spent, _Spent]:
    names = map("request-{}".format, itertools.count())
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=log_dir))
        engine = await stack.enter_async_context(
            serving("orchestrrl.bench.plain_engine", log_path=log_dir / "ledger-engine.log")
        )
        flags = ("gateway", "--listen", "127.0.0.1:0", "--engine", f"e0={engine.url}", "--log-level", "warning")
        both = []
        for name, more in (("with", ("--ledger", f"{folder}/ledger")), ("without", ())):
            log_path = log_dir / f"gateway-{name}-ledger.log"
            both.append(
                _Spent(await stack.enter_async_context(serving("orchestrrl", *flags, *more, log_path=log_path)))
            )
        lanes = [Lanes(spent.served.url) for spent in both]
        for some in lanes:
            await some.open(load.in_flight)
        for round_number in range(-1, load.rounds):
            for spent, some in zip(both, lanes, strict=True):
                await _round(_Spent(spent.served) if round_number < 0 else spent, some, load, names)
        for some in lanes:
            some.close()
    return both[0], both[1]


async def _round(spent: _Spent, lanes: Lanes, load: Load, names: Iterator[str]) -> None:
    for tokens, stream, count in (
        (1, False, load.whole_requests),
        (STREAM_TOKENS, False, load.rollouts),
        (STREAM_TOKENS, True, load.rollouts),
    ):
        asked = request(spent.served.url, max_tokens=tokens, stream=stream)
        before_s = spent.served.cpu_s()
        answers = await _ask_in_turn(lanes, asked, itertools.islice(names, count))
        await asyncio.sleep(WRITTEN_S)
        spent_s = spent.served.cpu_s() - before_s
        if any(answer.tokens != tokens for answer in answers):
            raise Permanent(f"an answer has other than {tokens} tokens")
        if stream:
            spent.chunk_us.append(1e6 * spent_s / sum(answer.chunks for answer in answers))
        else:
            (spent.whole_s if tokens == 1 else spent.rollout_s).append(1e3 * spent_s / count)


async def _ask_in_turn(lanes: Lanes, asked: bytes, names: Iterator[str]) -> list[Answer]:
    """One for each name, one after another on every connection."""
    head, rest = asked.split(b"\r\n", 1)

    async def run(lane: Lane) -> list[Answer]:
        return [await lane.ask(b"%b\r\nX-Request-Id: %b\r\n%b" % (head, name.encode(), rest)) for name in names]

    answers = await asyncio.gather(*(run(lane) for lane in lanes.lanes))
    return [answer for some in answers for answer in some]
