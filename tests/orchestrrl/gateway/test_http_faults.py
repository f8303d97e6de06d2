"""Requests with invalid HTTP or JSON are refused, with one line in the gateway's log."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from orchestrrl.gateway.http.bodies import MOST_BODY_BYTES, MOST_MEMBERS, decompressed
from orchestrrl.gateway.http.field_types import HttpRefusal
from tests.orchestrrl.gateway.http_harness import CHAT_PATH, PATH, SANE, HttpHarness, http_harness, request

BODY = json.dumps(SANE).encode()
SECRET = b"Authorization: Bearer s3cret\x01\r\n"


@pytest.fixture
async def harness() -> AsyncIterator[HttpHarness]:
    async with http_harness() as fixture:
        yield fixture


def asking(path: str = PATH, **fields: Any) -> bytes:
    return request(json.dumps({**SANE, **fields}).encode(), path=path.encode())


def chatting(messages: Any) -> bytes:
    return request(json.dumps({"messages": messages}).encode(), path=CHAT_PATH.encode())


# By fault: the bytes, the status, and a part of the message.
WRONG: dict[str, tuple[bytes, int, str]] = {
    "version": (b"POST /v1/completions HTTP/9.9\r\nHost: h\r\n\r\n", 400, "version"),
    "header": (b"GET / HTTP/1.1\r\nHost h\r\n\r\n", 400, "header"),
    "method": (b"SL\x01W / HTTP/1.1\r\nHost: h\r\n\r\n", 400, "method"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "HTTPS"),
    "url": (b"GET http://[::1 HTTP/1.1\r\nHost: h\r\n\r\n", 400, "http://[::1"),
    "long url": (b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n", 431, "8190"),
    "long header": (request(BODY, headers=b"X-A: " + b"a" * 9_000 + b"\r\n"), 431, "8190"),
    "zero byte": (request(BODY, headers=b"X-A: a\0b\r\n"), 400, "X-A"),
    "negative length": (
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: -3\r\n\r\n",
        400,
        "Content-Length",
    ),
    "two lengths": (request(BODY, headers=b"Content-Length: 3\r\n"), 400, "Content-Length"),
    "length and chunks": (request(BODY, headers=b"Transfer-Encoding: chunked\r\n"), 400, "Content-Length"),
    "chunks": (b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "chunk"),
    "no length": (b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n\r\n", 411, "Content-Length"),
    "expect": (request(BODY, headers=b"Expect: 200-ok\r\n"), 417, "Expect: must be 100-continue, got '200-ok'"),
    "get": (b"GET /v1/completions HTTP/1.1\r\nHost: h\r\n\r\n", 405, "Method Not Allowed"),
    "path": (request(BODY, path=b"/v1/%0Anothing"), 404, "Not Found"),
    "not gzip": (request(BODY, headers=b"Content-Encoding: gzip\r\n"), 400, "Content-Encoding"),
    "not deflate": (request(BODY, headers=b"Content-Encoding: deflate\r\n"), 400, "Content-Encoding"),
    "gzip, cut": (request(gzip.compress(BODY)[:-9], headers=b"Content-Encoding: gzip\r\n"), 400, "is truncated"),
    "brotli": (request(BODY, headers=b"Content-Encoding: br\r\n"), 415, "must be gzip, deflate or absent"),
    "an unknown coding": (request(BODY, headers=b"Content-Encoding: foo\r\n"), 415, "got 'foo'"),
    "no json": (request(b"{"), 400, "JSON"),
    "no utf-8": (request(b'{"prompt": "\xed\xa0\x80"}'), 400, "JSON"),
    "deep": (request(b"[" * 100_000), 400, "128 levels deep"),
    "deep field": (asking(logit_bias=json.loads("[" * 200 + "]" * 200)), 400, "logit_bias: must be nested"),
    "no object": (request(b"[]"), 400, "must be a JSON object, got []"),
    "surrogate": (asking(prompt="a\ud800"), 400, "prompt: must be text without lone surrogates, got 'a\\ud800'"),
    "surrogate within": (chatting([{"role": "user", "content": "\ud800"}]), 400, "messages[0].content: must be text"),
    "surrogate as a name": (asking(metadata={"\ud800": 1}), 400, "metadata.\\ud800: must have a name"),
    "nan": (asking(temperature=float("nan")), 400, "temperature: must be a finite number, got nan"),
    "inf": (request(b'{"prompt": "a", "top_p": 1e999}'), 400, "top_p: must be a finite number, got inf"),
    "stop_token_ids": (asking(stop_token_ids=5), 400, "stop_token_ids: must be a list of token ids, got 5"),
    "min_tokens": (asking(min_tokens="a"), 400, "min_tokens: must be a whole number, got 'a'"),
    "stream": (asking(stream="false"), 400, "stream: must be true or false, got 'false'"),
    "group_enough": (asking(group_enough=2**31), 400, "group_enough: must be a whole number in 1..2147483647"),
    "several": (asking(stop=5, seed="x", on_stale="no"), 400, "on_stale: must be one of abort, restart, got 'no'"),
    "prompt of both": (asking(prompt=["a", [1]]), 400, "prompt: must be text"),
    "prompt ids": (asking(prompt=[1.5]), 400, "got [1.5]"),
    "no prompt": (request(b"{}"), 400, "prompt: must be text, a list of token ids"),
    "no messages": (request(b"{}", path=CHAT_PATH.encode()), 400, "messages: must be a list of objects"),
    "messages": (chatting([1]), 400, "messages: must be a list of objects with a role and a content, got [1]"),
    "label": (request(BODY, headers=b"X-Tag: \xff\r\n"), 400, "X-Tag: must be at most 256 printable characters"),
    "moves": (request(b"[" * 100_000, path=b"/orchestrrl/move"), 400, "128 levels deep"),
    "a move": (request(b'{"moves": [7]}', path=b"/orchestrrl/move"), 400, "moves[0]: should be an object, got 7"),
    "barrier": (request(b'{"holder": "\\ud800"}', path=b"/orchestrrl/pause"), 400, "holder: must be text without"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_fault_is_named_in_the_response_and_in_one_log_line(harness: HttpHarness, name: str) -> None:
    data, wanted, message = WRONG[name]
    status, answer = await harness.send(data)
    error = json.loads(answer)["error"]
    assert (status, error["code"]) == (wanted, wanted)
    assert message in error["message"]
    (line,) = harness.log.take()
    assert str(wanted) in line
    assert "\n" not in line
    assert harness.tries == 0
    assert (await harness.post(SANE))[0] == 200


async def test_all_faults_are_reported_at_once(harness: HttpHarness) -> None:
    _, answer = await harness.send(asking(stop=5, n=0, on_stale="no", min_tokens="a", stream_options={"a": 1}))
    message = json.loads(answer)["error"]["message"]
    assert [part.split(":")[0] for part in message.split("; ")] == [
        "stop",
        "min_tokens",
        "n",
        "on_stale",
        "stream_options",
    ]


async def test_request_broken_off_by_client_is_no_error(harness: HttpHarness) -> None:
    whole = request(BODY, headers=b"Content-Type: application/json\r\n")
    for stop in range(1, len(whole), 17):
        assert await harness.send(whole[:stop], patience_s=0.01) == (0, b"")
    assert harness.log.take() == []
    assert (await harness.post(SANE))[0] == 200


async def test_pipelined_requests_are_answered_in_order(harness: HttpHarness) -> None:
    """An invalid request follows a valid one, which is answered first."""
    wrong, _, _ = WRONG["min_tokens"]
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
    writer.write(request(BODY) + wrong + request(BODY, headers=b"Connection: close\r\n"))
    answer = await reader.read()
    writer.close()
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400", b"200"]


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "raw deflate", "gzip, gzip", "identity"])
async def test_compressed_body_is_decompressed(harness: HttpHarness, coding: str) -> None:
    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    bodies = {
        "gzip": gzip.compress(BODY[:9]) + gzip.compress(BODY[9:]),  # with two members
        "x-gzip": gzip.compress(BODY),
        "deflate": zlib.compress(BODY),
        "raw deflate": raw.compress(BODY) + raw.flush(),
        "gzip, gzip": gzip.compress(gzip.compress(BODY)),
        "identity": BODY,
    }
    header = f"Content-Encoding: {coding.removeprefix('raw ')}\r\n".encode()
    status, answer = await harness.send(request(bodies[coding], headers=header))
    assert status == 200, answer
    assert harness.engine.asked[0].body["prompt"] == SANE["prompt"]
    assert harness.engine.asked[0].values("Content-Encoding") == []


def test_decompressed_body_is_bounded() -> None:
    with pytest.raises(HttpRefusal) as raised:
        decompressed(gzip.compress(b" " * (MOST_BODY_BYTES + 1)), "gzip")
    assert raised.value.status == 413


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_gzip_body_of_many_members_is_refused(coding: str) -> None:
    """Each member costs a copy of the data after it."""
    member = gzip.compress(b"") if coding == "gzip" else zlib.compress(b"")
    assert decompressed(member * MOST_MEMBERS, coding) == b""
    with pytest.raises(HttpRefusal, match=r"Content-Encoding: .* at most 16 .*members") as raised:
        decompressed(member * (MOST_MEMBERS + 1), coding)
    assert (raised.value.status, raised.value.param) == (400, "Content-Encoding")


async def test_credentials_appear_in_no_log_or_response(harness: HttpHarness) -> None:
    long = b"Authorization: Bearer " + b"s3cret" * 2_000 + b"\r\n"
    for headers in (SECRET, long, b"Authorization: Bearer s3cret\0\r\n", b"Authorization: Bearer s3cret\r\nbroken\r\n"):
        _, answer = await harness.send(request(BODY, headers=headers))
        assert b"s3cret" not in answer
    await harness.send(asking(min_tokens="a"))
    for url in (b"/v1/completions?key=s3cret", b"http://me:s3cret@h/v1/completions", b"http://me:s3cret@h/nothing"):
        await harness.send(asking(min_tokens="a").replace(b"/v1/completions", url))
    assert not any("s3cret" in line for line in harness.log.take())


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        (b"GET //x/health", 404, "GET //x/health: Not Found"),
        (b"GET /v1%2Fmodels", 404, "GET /v1%2Fmodels: Not Found"),
        (b"DELETE /%76%31/models", 405, "DELETE /v1/models: Method Not Allowed"),
        (b"GET /%6frchestrrl/requests", 404, "the operator API"),
    ],
)
async def test_path_is_matched_after_percent_decoding(
    harness: HttpHarness, asked: bytes, status: int, words: str
) -> None:
    got, answer = await harness.send(asked + b" HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (got, words in json.loads(answer)["error"]["message"]) == (status, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [{"error": {"message": "no", "type": "t", "param": "p", "code": 422}}, {"detail": "not so"}, {"error": "no"}],
)
async def test_engine_refusal_is_forwarded_unchanged_without_retry(
    harness: HttpHarness, stream: bool, body: dict[str, Any]
) -> None:
    harness.engine.refuses = lambda _: web.json_response(body, status=422)
    status, answer = await harness.send(asking(stream=stream))
    assert (status, json.loads(answer)) == (422, body)
    assert harness.tries == 1
    (line,) = harness.log.take()
    assert "422" in line
