"""An engine with minimal CPU cost, used behind all measured proxies. It runs as a module.

It implements the part of vLLM's HTTP API that routers use. A response of one token is sent immediately. In longer
responses, a token is sent every `CHUNK_S` seconds, at the same time in all responses.
"""

import asyncio
import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

from httptools import HttpRequestParser

CHUNK_S = 0.005
PROMPT_TOKENS = 200
MODEL = "plain"
TOKEN = b" token"  # the text of each token

_HEAD = {"id": "cmpl-plain", "object": "text_completion", "created": 1_700_000_000, "model": MODEL}
_OK = b"HTTP/1.1 200 OK\r\n"
_STREAM_HEAD = _OK + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32_768}]}
_ABOUT = {"model_path": MODEL, "served_model_name": MODEL, "tp_size": 1, "dp_size": 1, "status": "ok", **_MODELS}


def _whole(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (_OK, len(text), text)


def _event(tokens: int, *, ids: bool, first: bool = False, finish_reason: str | None = None) -> bytes:
    """Return a stream event with `tokens` tokens as an HTTP chunk. If `ids` is set, the event includes token ids, as
    vLLM's events do on request. The first event of a response then includes the prompt's token ids."""
    choice: dict[str, Any] = {"index": 0, "text": TOKEN.decode() * tokens, "logprobs": None}
    choice |= {"finish_reason": finish_reason, "stop_reason": None}
    if ids:
        choice["prompt_token_ids"] = list(range(1000, 1000 + PROMPT_TOKENS)) if first else None
        choice["token_ids"] = [4711] * tokens
    text = b"data: %b\n\n" % json.dumps({**_HEAD, "choices": [choice]}, separators=(",", ":")).encode()
    return b"%x\r\n%b\r\n" % (len(text), text)


@functools.cache
def streamed(tokens: int, interval_tokens: int, *, ids: bool) -> tuple[bytes, ...]:
    """Return the data to send after each token of a streamed response, in reverse order of tokens.

    A chunk is sent after the first token, after every `interval_tokens` tokens and at the end, as with vLLM's stream
    interval. The data of other tokens is empty.
    """
    sent: list[bytes] = []
    held = 0
    for number in range(1, tokens + 1):
        held += 1
        if number < tokens and number > 1 and held < interval_tokens:
            sent.append(b"")
            continue
        ends = "length" if number == tokens else None
        sent.append(_event(held, ids=ids, first=number == 1, finish_reason=ends) + (_STREAM_END if ends else b""))
        held = 0
    return tuple(reversed(sent))


@functools.cache
def whole(tokens: int) -> bytes:
    choice = {"index": 0, "text": TOKEN.decode() * tokens, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}
    return _whole({**_HEAD, "choices": [{**choice, "stop_reason": None}], "usage": usage})


_OTHER = _whole(_ABOUT)


class _Connection(asyncio.Protocol):
    def __init__(self, pace: "_Pace") -> None:
        self._pace = pace
        self._url = self._body = b""
        self._parser = HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        url, body = self._url, self._body
        self._url = self._body = b""
        if url != b"/v1/completions":
            self.transport.write(_OTHER)
            return
        asked = json.loads(body)
        tokens = asked["max_tokens"]
        if asked.get("stream"):
            ids = bool(asked.get("return_token_ids"))
            chunks = streamed(tokens, asked.get("stream_interval", 1), ids=ids)
            self.transport.write(_STREAM_HEAD + (chunks[0] if tokens == 1 else b""))
        else:
            chunks = (whole(tokens), *[b""] * (tokens - 1))
            if tokens == 1:
                self.transport.write(chunks[0])
        if tokens > 1:
            self._pace.add(self.transport, list(chunks))


class _Pace:
    """Sends the next token of every response at each tick."""

    def __init__(self) -> None:
        self._streams: list[tuple[asyncio.Transport, list[bytes]]] = []

    def add(self, transport: asyncio.Transport, chunks: list[bytes]) -> None:
        """Add a response. `chunks` contains the data to send after each token, in reverse order of tokens."""
        self._streams.append((transport, chunks))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + CHUNK_S, loop.time())  # missed ticks are skipped
            await asyncio.sleep(next_s - loop.time())
            streams, self._streams = self._streams, []
            for transport, chunks in streams:
                if chunk := chunks.pop():
                    transport.write(chunk)
                if chunks and not transport.is_closing():
                    self._streams.append((transport, chunks))


async def serve() -> None:
    """Serve requests until terminated. The first line of output is the engine's URL."""
    pace = _Pace()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(pace), "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await pace.run()


if __name__ == "__main__":
    asyncio.run(serve())
