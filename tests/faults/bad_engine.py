"""A process with an engine that fails in every way an HTTP server can: `python bad_engine.py` prints its URL.

The `user` field of a request, which the gateway forwards like any unknown field, selects the failure. Tokens that it
does return are correct, so that another engine can continue from them. It counts its requests (`GET /seen`), and always
reports itself healthy.
"""

import asyncio
import json
import socket
import struct
import sys
from collections import Counter
from typing import Any

from orchestrrl.lab.simulated_engine.tokens import TokenModel

TOKENS_BEFORE = 3  # tokens of an answer that fails in its middle

_JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_ERROR = b'{"error": {"message": "out of order", "type": "InternalServerError", "param": null, "code": 500}}'
_HALF_JSON = b'{"id": "c", "choices": [{"index": 0, "te'
_HALF_EVENT = b"data: " + _HALF_JSON


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _status(status: bytes, body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (status, kind, len(body), body)


# Before the first token.
AT_ONCE = {
    "closes": b"",
    "500": _status(b"500 Internal Server Error", _ERROR),
    "500 of a proxy": _status(b"500 Oops", b"<html>" + b"oops " * 1000, b"text/html"),
    "503, cut": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 400\r\n\r\n" + _HALF_JSON,
    "cut in its head": b"HTTP/1.1 200 OK\r\nContent-Type: text/ev",
    "head without end": b"HTTP/1.1 200 OK\r\n" + b"X-More: and more\r\n" * 100_000,
    "not http": b"\x15\x03\x01\x00\x02\x02\x46 220 smtp ready\r\n\r\n",
    "half a json": _JSON + b"Content-Length: 400\r\n\r\n" + _HALF_JSON,
    "a json instead of events": _status(b"200 OK", b'{"choices": []}'),
}
# After `TOKENS_BEFORE` tokens; the HTTP framing is complete in the first three.
MIDWAY = {
    "ends early": _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
    "half an event": _chunk(_HALF_EVENT + b"\n\n") + b"0\r\n\r\n",
    "an error event": _chunk(b"data: " + _ERROR + b"\n\n") + b"0\r\n\r\n",
    "half an event, cut": _chunk(_HALF_EVENT),
    "cut in a chunk": b"fff\r\n" + _HALF_EVENT,
    "nonsense for a chunk": b"not a number\r\n",
}
# Failures without a body.
SILENT = "silent"  # from the beginning
SILENT_MIDWAY = "silent midway"
RESET_MIDWAY = "reset midway"
ENDLESS_MIDWAY = "an event without end"
DEAF = "deaf"  # no answer from then on, including health


class BadEngine:
    """A server with one connection per request."""

    def __init__(self) -> None:
        self._model = TokenModel()
        self._asked: Counter[str] = Counter()
        self._left: Counter[str] = Counter()  # requests that their client closed
        self._deaf = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = await reader.readexactly(int(lengths[0].partition(b":")[2])) if lengths else b""
            if head.startswith(b"GET /seen "):
                seen = {"asked": self._asked, "left": self._left}
                writer.write(_status(b"200 OK", json.dumps(seen).encode()))
            elif head.startswith(b"POST /hear "):
                self._deaf = False
                writer.write(_status(b"200 OK", b"{}"))
            elif head.startswith(b"POST /v1/"):
                await self._complete(json.loads(body), reader, writer)
            elif self._deaf:
                await reader.read()
            elif head.startswith(b"GET /health "):
                writer.write(_status(b"200 OK", b""))
            else:
                writer.write(_status(b"404 Not Found", b"{}"))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = body["user"]
        self._asked[fault] += 1
        self._deaf = self._deaf or fault == DEAF
        if fault in AT_ONCE:
            writer.write(AT_ONCE[fault])
        elif fault in (SILENT, DEAF):
            await self._wait_for_leaving(fault, reader)
        else:
            left = body["max_tokens"]
            writer.write(_STREAM + self._tokens(body["prompt"], min(TOKENS_BEFORE, left), left <= TOKENS_BEFORE))
            if left > TOKENS_BEFORE:
                await self._break(fault, reader, writer)

    async def _break(self, fault: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if fault in MIDWAY:
            writer.write(MIDWAY[fault])
        elif fault == SILENT_MIDWAY:
            await self._wait_for_leaving(fault, reader)
        elif fault == RESET_MIDWAY:
            await writer.drain()
            connection: socket.socket = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif fault == ENDLESS_MIDWAY:
            writer.write(_chunk(b"data: {"))
            try:
                while True:
                    writer.write(_chunk(b" " * (1 << 20)))
                    await writer.drain()
            except ConnectionError:
                self._left[fault] += 1
        else:
            raise ValueError(f"no such fault: {fault!r}")

    async def _wait_for_leaving(self, fault: str, reader: asyncio.StreamReader) -> None:
        await reader.read()
        self._left[fault] += 1

    def _tokens(self, prompt: list[int], count: int, whole: bool) -> bytes:
        """Yield one event per token."""
        generation = self._model.begin(prompt)
        reported = b""
        for number in range(1, count + 1):
            token, _ = generation.next_token()
            choice = {"index": 0, "text": self._model.detokenize([token]), "token_ids": [token], "logprobs": None}
            choice["prompt_token_ids"] = prompt if number == 1 else None
            choice["finish_reason"] = "length" if whole and number == count else None
            reported += b"data: %b\n\n" % json.dumps({"id": "c", "choices": [choice]}).encode()
        return _chunk(reported) + (_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n" if whole else b"")


async def main() -> None:
    server = await asyncio.start_server(BadEngine().serve, "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
