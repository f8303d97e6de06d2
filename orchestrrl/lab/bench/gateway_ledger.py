"""What the gateway's ledger on disk costs: its CPU time with `--ledger`, beside the same without.

All answer the same requests at the same time, so that a noisy machine disturbs them alike, each with an id of its own,
in front of one engine that costs next to nothing. The time of the thread that writes is counted, and that of what it
leaves to be written later. By default the ledger keeps no answer that took less than a fifth of a second, so the single
tokens are also asked of one that keeps all.
"""

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.bench.gateway import STREAM_TOKENS, WaySpent
from orchestrrl.lab.bench.plain_client import ClientConnection, Lanes, TimedResponse, request
from orchestrrl.lab.bench.ways import PLAIN_ENGINE, gateway_words, served
from orchestrrl.lab.testbed.stack import Stack

WITHOUT = "without --ledger"
_WAYS: dict[str, tuple[str, ...] | None] = {"plain": None, "ledger": (), "ledger-of-all": ("--keep-from-s", "0")}
WRITTEN_S = 0.3  # after which nothing is left to be written


@dataclass(frozen=True, slots=True)
class LedgerLoad:
    rounds: int = 6
    whole_requests: int = 1000
    in_flight: int = 16
    rollouts: int = 192  # of STREAM_TOKENS, and as many streams


def gateway_ledger(log_dir: Path, load: LedgerLoad = LedgerLoad()) -> list[Figure]:
    """Raises Permanent where an answer is not complete."""
    spent = asyncio.run(_measure(log_dir, load))
    plain, kept, all_kept = (spent[name] for name in _WAYS)
    per_thousand, short = "CPU s per 1,000 requests", "1 KB in, one token out"
    long = f"{STREAM_TOKENS} tokens out at 5 ms"
    return [
        Figure(f"ledger_cpu_{what}", median(ours), unit, WITHOUT, median(theirs), note)
        for what, ours, theirs, unit, note in (
            ("whole", kept.whole_s, plain.whole_s, per_thousand, f"{short}, too soon to be kept"),
            ("whole_kept", all_kept.whole_s, plain.whole_s, per_thousand, f"{short}, kept (--keep-from-s 0)"),
            ("rollout", kept.rollout_s, plain.rollout_s, per_thousand, f"{long}, not streamed"),
            ("streamed", kept.chunks_us, plain.chunks_us, "CPU us per chunk", f"{long}, streamed"),
        )
    ]


async def _measure(log_dir: Path, load: LedgerLoad) -> dict[str, WaySpent]:
    names = map("request-{}".format, itertools.count())
    async with Stack(log_dir / "ledger") as stack:
        folder = stack.undo.enter_context(tempfile.TemporaryDirectory(dir=stack.folder))
        engine = await served(stack, "engine", *PLAIN_ENGINE)
        spent: dict[str, WaySpent] = {}
        for name, more in _WAYS.items():
            ledger = ("--ledger", f"{folder}/{name}", *more) if more is not None else ()
            spent[name] = WaySpent(await served(stack, name, *gateway_words(engine.url, *ledger)))
        lanes = {name: Lanes(some.served.url) for name, some in spent.items()}
        for some in lanes.values():
            await some.open(load.in_flight)
        for round_number in range(-1, load.rounds):
            turned = dict(reversed(spent.items()) if round_number % 2 else spent.items())  # nobody is always the first
            ways = {name: WaySpent(way.served) for name, way in turned.items()} if round_number < 0 else turned
            await _round(ways, lanes, load, names)
        for some in lanes.values():
            some.close()
    return spent


async def _round(spent: dict[str, WaySpent], lanes: dict[str, Lanes], load: LedgerLoad, names: Iterator[str]) -> None:
    for name, (cpu_s, _) in (
        await _cost(spent, lanes, 1, stream=False, names=names, count=load.whole_requests)
    ).items():
        spent[name].whole_s.append(1e3 * cpu_s / load.whole_requests)
    for name, (cpu_s, _) in (
        await _cost(spent, lanes, STREAM_TOKENS, stream=False, names=names, count=load.rollouts)
    ).items():
        spent[name].rollout_s.append(1e3 * cpu_s / load.rollouts)
    for name, (cpu_s, chunks) in (
        await _cost(spent, lanes, STREAM_TOKENS, stream=True, names=names, count=load.rollouts)
    ).items():
        spent[name].chunks_us.append(1e6 * cpu_s / chunks)


async def _cost(
    spent: dict[str, WaySpent], lanes: dict[str, Lanes], tokens: int, stream: bool, names: Iterator[str], count: int
) -> dict[str, tuple[float, int]]:
    """CPU seconds until all is written, and chunks."""
    before_s = {name: way.served.cpu_s() for name, way in spent.items()}
    asking = (
        _send_in_turn(lanes[name], request(way.served.url, max_tokens=tokens, stream=stream), names, count)
        for name, way in spent.items()
    )
    answers = dict(zip(spent, await asyncio.gather(*asking), strict=True))
    await asyncio.sleep(WRITTEN_S)
    if any(answer.tokens != tokens for some in answers.values() for answer in some):
        raise Permanent(f"an answer has other than {tokens} tokens")
    return {
        name: (way.served.cpu_s() - before_s[name], sum(answer.chunks for answer in answers[name]))
        for name, way in spent.items()
    }


async def _send_in_turn(lanes: Lanes, asked: bytes, names: Iterator[str], count: int) -> list[TimedResponse]:
    """So many, each with the next name, one after another on every connection."""
    head, rest = asked.split(b"\r\n", 1)
    left = itertools.islice(names, count)

    async def run(lane: ClientConnection) -> list[TimedResponse]:
        return [await lane.send(b"%b\r\nX-Request-Id: %b\r\n%b" % (head, name.encode(), rest)) for name in left]

    answers = await asyncio.gather(*(run(lane) for lane in lanes.lanes))
    return [answer for some in answers for answer in some]
