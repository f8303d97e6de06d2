"""The streaming client against aiohttp's: the same bytes, cut anywhere, give the same answer, or none."""

import asyncio
import itertools
from collections.abc import Sequence

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.engines.exchange import ConnectionPool

DEADLINE_S = 120.0
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"5\r\ndata:\r\n3;a=b\r\n 1\n\r\n0\r\n\r\n"

# Complete answers, after which the engine closes the connection.
ANSWERS = {
    "chunked": CHUNKED + b"\r\n" + CHUNKS,
    "chunked, in capitals": OK + b"TRANSFER-ENCODING: Chunked\r\n\r\nA\r\n0123456789\r\n0\r\n\r\n",
    "trailers": CHUNKED + b"\r\n2\r\nab\r\n0\r\nX-Sum: 1\r\nX: 2\r\n\r\n",
    "padded sizes": CHUNKED + b"\r\n2 \r\nab\r\n0 \r\n\r\n",
    "an empty chunked body": CHUNKED + b"\r\n0\r\n\r\n",
    "length": OK + b"Content-Length: 4\r\n\r\nabcd",
    "no body": OK + b"Content-Length: 0\r\n\r\n",
    "until it closes": OK + b"\r\nabcd",
    "http 1.0": b"HTTP/1.0 200 OK\r\n\r\nabcd",
    "continue": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 E\r\nLink: x\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\na",
    "500": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 21\r\n\r\nInternal Server Error",
    "no reason": b"HTTP/1.1 503\r\nContent-Length: 1\r\n\r\na",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "length and chunks": CHUNKED + b"Content-Length: 3\r\n\r\n" + CHUNKS,
    "bytes after the length": OK + b"Content-Length: 4\r\n\r\nabcdGARBAGE\r\n\r\n",
    "an answer after the answer": OK + b"Content-Length: 4\r\n\r\nabcd" + OK + b"Content-Length: 1\r\n\r\nx",
    "bytes after the chunks": CHUNKED + b"\r\n" + CHUNKS + b"GARBAGE\r\n\r\n",
    "cut in the head": OK + b"Content-Len",
    "cut after the head": OK + b"Content-Length: 4\r\n\r\n",
    "cut in the length": OK + b"Content-Length: 4\r\n\r\nabc",
    "cut in a chunk": CHUNKED + b"\r\n5\r\nda",
    "cut between chunks": CHUNKED + b"\r\n5\r\ndata:\r\n",
    "cut before the last line": CHUNKED + b"\r\n2\r\nab\r\n0\r\n",
    "size that is none": CHUNKED + b"\r\nxy\r\nab\r\n0\r\n\r\n",
    "negative size": CHUNKED + b"\r\n-2\r\nab\r\n0\r\n\r\n",
    "chunk longer than its size": CHUNKED + b"\r\n1\r\nab\r\n0\r\n\r\n",
    "length that is none": OK + b"Content-Length: four\r\n\r\nabcd",
    "negative length": OK + b"Content-Length: -4\r\n\r\nabcd",
    "two lengths": OK + b"Content-Length: 4\r\nContent-Length: 3\r\n\r\nabcd",
    "no http": b"220 mail.example ESMTP\r\n\r\n",
    "tls": b"\x15\x03\x01\x00\x02\x02\x46",
    "nothing": b"",
    "header without a colon": OK + b"Content-Length 4\r\n\r\nabcd",
    "long head": OK + b"X: %b\r\nContent-Length: 1\r\n\r\na" % (b"a" * 8000),
}
# aiohttp refuses some of these depending on the cuts. This client reads the answer and does not keep the connection.
LENIENT = {"bytes after the length", "bytes after the chunks"}
# It waits forever for the rest of some. The server runs in the same event loop, so it gets its turns even if the host
# stalls for a while.
AIOHTTP_TURNS = 100
TURN_S = 0.01


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place for place in cuts if place < len(data))})
    return [data[start:stop] for start, stop in itertools.pairwise(edges)]


async def answers_by_both(pieces: list[bytes]) -> tuple[tuple[int, bytes] | None, tuple[int, bytes] | None]:
    """Return the status and body that each client reads; None if it reads no answer."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(script, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with asyncio.timeout(DEADLINE_S):
        found = await asyncio.gather(_ours(url), _aiohttps(url))
    server.close()
    return found


async def _ours(url: str) -> tuple[int, bytes] | None:
    pool = ConnectionPool(url, connect_timeout_s=5)
    asked = pool.exchange("/p", b"{}", ())
    try:
        connection = await asked.begin()
        body = await connection.read_all()
        asked.leave()
        return connection.status, body
    except OrchestrRLError:
        return None
    finally:
        pool.close()


async def _aiohttps(url: str) -> tuple[int, bytes] | None:
    async def ask() -> tuple[int, bytes] | None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
            try:
                async with http.post(url + "/p", data=b"{}") as answer:
                    return answer.status, await answer.read()
            except aiohttp.ClientError:
                return None

    asking = asyncio.create_task(ask())
    for _ in range(AIOHTTP_TURNS):
        if asking.done():
            return asking.result()
        await asyncio.sleep(TURN_S)
    asking.cancel()
    await asyncio.wait([asking])
    return None


@pytest.mark.parametrize("name", ANSWERS)
async def test_every_answer_is_read_like_aiohttp(name: str) -> None:
    everywhere = range(min(len(ANSWERS[name]), 500))
    whole, theirs = await answers_by_both([ANSWERS[name]])
    assert whole == theirs or (theirs is None and name in LENIENT)
    cut_up, theirs = await answers_by_both(cut(ANSWERS[name], everywhere))
    assert cut_up == theirs or (theirs is None and name in LENIENT)
    assert cut_up == whole


@given(st.sampled_from(sorted(ANSWERS)), st.lists(st.integers(0, 120), max_size=10))
def test_answer_cut_anywhere_is_read_like_aiohttp(name: str, cuts: list[int]) -> None:
    ours, theirs = asyncio.run(answers_by_both(cut(ANSWERS[name], cuts)))
    assert ours == theirs or (theirs is None and name in LENIENT)
