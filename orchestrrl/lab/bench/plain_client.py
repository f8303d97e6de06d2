"""The load: completions over the connections that the gateway has to engines, read with as little work as can be."""

import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from http import HTTPStatus

from orchestrrl.core.errors import Permanent
from orchestrrl.engines.exchange import ConnectionPool
from orchestrrl.lab.bench.plain_engine import MODEL, TOKEN

BODY_BYTES = 1_024
ANSWER_WITHIN_S = 60.0
_ids = itertools.count()


@dataclass(slots=True)
class TimedResponse:
    """One answer, as it came. Seconds from the request, or from the opening of its connection."""

    tokens: int
    chunks: int  # events with content; 1 for a whole answer
    first_s: float  # until the first content
    whole_s: float


def request(*, max_tokens: int, stream: bool) -> bytes:
    """Return the body of a completion of `BODY_BYTES`."""
    asked = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    empty = json.dumps({**asked, "prompt": ""})
    return json.dumps({**asked, "prompt": ("a request of one kilobyte " * 64)[: BODY_BYTES - len(empty)]}).encode()


class LoadClient:
    """Sends completions to one URL; `close` closes its connections."""

    def __init__(self, url: str, within_s: float = ANSWER_WITHIN_S) -> None:
        self._pool = ConnectionPool(url, connect_timeout_s=within_s)
        self._within_s = within_s

    async def send(self, body: bytes) -> TimedResponse:
        """Raises Permanent for anything but a complete answer, and OrchestrRLError without one."""
        started_s, first_s, text = time.perf_counter(), 0.0, bytearray()
        exchange = self._pool.exchange("/v1/completions", body, [("X-Request-Id", f"request-{next(_ids)}")])
        connection = await exchange.begin()
        while piece := await connection.read():
            text += piece
            if not first_s and (b"data:" in piece or b'"choices"' in piece):
                first_s = time.perf_counter() - started_s
        whole_s, streamed = time.perf_counter() - started_s, text.startswith(b"data:")
        is_complete = not streamed or b"data: [DONE]" in text
        if connection.status != HTTPStatus.OK or b'"error"' in text or not is_complete:
            raise Permanent(f"not an answer: {bytes(text[:600])!r}")
        exchange.leave()
        return TimedResponse(text.count(TOKEN), text.count(b'data: {"id"') if streamed else 1, first_s, whole_s)

    async def send_in_turn(self, body: bytes, requests: int, at_once: int) -> list[TimedResponse]:
        """Send so many in all, one after another on each of so many connections."""
        left = iter(range(requests))

        async def run() -> list[TimedResponse]:
            return [await self.send(body) for _ in left]

        async with asyncio.timeout(self._within_s):
            answers = await asyncio.gather(*(run() for _ in range(at_once)))
        return [answer for some in answers for answer in some]

    async def all_at_once(self, body: bytes, streams: int) -> list[TimedResponse]:
        """Send so many now, each on a connection of its own."""
        async with asyncio.timeout(self._within_s):
            return await asyncio.gather(*(self.send(body) for _ in range(streams)))

    def close(self) -> None:
        self._pool.close()
