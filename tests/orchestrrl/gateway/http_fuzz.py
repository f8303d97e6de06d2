"""Send a gateway randomly mutated requests, and check that each is refused as a client error.

`python -m tests.orchestrrl.gateway.http_fuzz --inputs 20000 --seed 1` runs more of them than the tests do.
"""

import argparse
import asyncio
import gzip
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.orchestrrl.gateway.http_harness import CHAT_PATH, PATH, SANE, HttpHarness, http_harness, request

BATCH = 25  # inputs between two valid requests
PATIENCE_S = 2.0  # for an incomplete input, which is not answered
SURROGATE = "\ud800"

COMPLETION: dict[str, Any] = {
    **dict.fromkeys(("n", "max_tokens", "min_tokens", "best_of", "seed", "top_k", "logprobs", "prompt_logprobs"), 1),
    **dict.fromkeys(("priority", "stream_interval", "truncate_prompt_tokens", "thinking_token_budget"), 1),
    **dict.fromkeys(("routed_experts_prompt_start", "group_enough", "max_version_lag"), 1),
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), 0.5),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), 1.5),
    **dict.fromkeys(("stream", "echo", "ignore_eos", "skip_special_tokens", "use_beam_search"), True),
    **dict.fromkeys(("include_stop_str_in_output", "return_token_ids", "return_policy_versions"), True),
    **dict.fromkeys(("add_special_tokens", "spaces_between_special_tokens", "watermarking"), False),
    **dict.fromkeys(("model", "user", "suffix", "cache_salt", "session_id", "request_id"), "text"),
    **{key: [1, 2] for key in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")},
    **{key: {"a": 1} for key in ("kv_transfer_params", "ec_transfer_params", "structured_outputs", "vllm_xargs")},
    **{key: {"type": "text"} for key in ("response_format", "repetition_detection", "metadata")},
    "on_stale": "abort",
    "stop": ["x"],
    "bad_words": ["x"],
    "logit_bias": {"3": 1.0},
    "stream_options": {"include_usage": True},
    "prompt": "text",
}
MESSAGES = [{"role": "user", "content": "text"}]
CHAT: dict[str, Any] = {
    **{name: value for name, value in COMPLETION.items() if name not in ("prompt", "suffix", "logprobs")},
    **dict.fromkeys(("max_completion_tokens", "top_logprobs"), 1),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message", "return_prompt_text", "logprobs"), True),
    "messages": MESSAGES,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "documents": [{"a": "b"}],
    "chat_template_kwargs": {"a": 1},
    "chat_template": "text",
}


def nested(depth: int, seed: random.Random) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if seed.random() < 0.5 else {"a": value}
    return value


def odd_value(seed: random.Random) -> Any:
    """Return a value that is invalid for most fields."""
    odd: list[Callable[[], Any]] = [
        lambda: seed.choice([None, True, False, 0, -1, 2**31, 2**32, 2**63, 2**64, -(2**64), 10**40]),
        lambda: seed.choice([0.5, -0.0, 1e308, -1e308, 5e-324, 16.0, float("nan"), float("inf"), float("-inf")]),
        lambda: seed.choice(["", "x", "false", "16", "\0", "\x1b[2J\n", SURROGATE, "a" + SURROGATE, "\U0001f600" * 9]),
        lambda: seed.choice([[], [[]], [[[1]]], [SURROGATE], [True], [1.5], [-1], [2**40], [None], [1, "a"], [{}]]),
        lambda: seed.choice([{}, {"a": SURROGATE}, {SURROGATE: 1}, {"": None}, {"a": float("nan")}, {"role": 3}]),
        lambda: nested(seed.choice([3, 100, 127, 128, 129, 400, 900]), seed),
        lambda: "x" * seed.choice([1, 10_000, 300_000]),
    ]
    return seed.choice(odd)()


def spoilt_body(seed: random.Random) -> tuple[bytes, bytes]:
    """Return a path, and a valid body with one to three fields mutated or added."""
    path, sane = seed.choice([(PATH, COMPLETION), (CHAT_PATH, CHAT)])
    needed = {"prompt": "text"} if path == PATH else {"messages": MESSAGES}
    body = {**needed, "max_tokens": 3}
    for name in seed.sample(sorted(sane), seed.randint(0, 4)):
        body[name] = sane[name]
    for _ in range(seed.randint(1, 3)):
        name = seed.choice([*sane, "not_known", "return_nothing", SURROGATE, "", "a\nb"])
        body[name] = odd_value(seed)
    if seed.random() < 0.1:
        body.pop(seed.choice(sorted(needed)), None)
    text = json.dumps(body, ensure_ascii=seed.random() < 0.8)
    if seed.random() < 0.1:  # a duplicate name
        text = text[:-1] + ',"max_tokens":2,"prompt":"again"}'
    return path.encode(), text.encode(errors="surrogatepass")


def no_json(seed: random.Random) -> bytes:
    text = json.dumps(SANE).encode()
    at = seed.randrange(len(text))
    spoilt: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: text[:at],
        lambda: text[:at] + bytes([seed.randrange(256)]) + text[at:],
        lambda: seed.randbytes(seed.randint(1, 200)),
        lambda: b"[" * seed.choice([10, 1_000, 100_000]),
        lambda: b'{"a":' * 3_000,
        lambda: json.dumps(odd_value(seed)).encode(),
        lambda: b'{"prompt":"x","max_tokens":' + b"9" * seed.choice([30, 4_299, 5_000]) + b"}",
        lambda: text.decode().encode(seed.choice(["utf-16", "utf-32", "utf-16-be", "cp037"])),
        lambda: b"\xef\xbb\xbf" + text,
    ]
    return seed.choice(spoilt)()


def encoded(body: bytes, seed: random.Random) -> tuple[bytes, bytes]:
    """Return a Content-Encoding header and a body, which may have another encoding."""
    coding = seed.choice(
        ["gzip", "x-gzip", "deflate", "br", "zstd", "identity", "GZIP", "gzip, gzip", "\x80", "a" * 99]
    )
    ways: list[Callable[[], bytes]] = [
        lambda: body,
        lambda: gzip.compress(body),
        lambda: gzip.compress(gzip.compress(body)),
        lambda: zlib.compress(body),
        lambda: gzip.compress(body)[: seed.randrange(1, 30)],
        lambda: gzip.compress(body) + b"trailing",
        lambda: gzip.compress(body) + gzip.compress(b" "),
        lambda: b"",
        lambda: gzip.compress(b" " * (80 << 20)) if seed.random() < 0.05 else gzip.compress(b""),
    ]
    return f"Content-Encoding: {coding}\r\n".encode("latin-1"), seed.choice(ways)()


def odd_headers(seed: random.Random) -> bytes:
    names = ["X-Request-Id", "X-Tag", "X-Group-Id", "Authorization", "X-Session-ID", "X-data-parallel-rank", "X-Other"]
    values = [b"", b"a", b"\xed\xa0\x80", b"\xff\xfe", b"a\tb", b"x" * 300, b"x" * 9_000, "é😀".encode(), b"-1", b'"']
    values += [b"\x7f", b"a\0b", b"a\x01b", b"a\rb", b"a\nb", b"a\r\n b"]
    lines = [seed.choice(names).encode() + b": " + seed.choice(values) + b"\r\n" for _ in range(seed.randint(1, 3))]
    extra = [
        b"Expect: 200-ok\r\n",
        b"Connection: close, x-other\r\n",
        b"Content-Type: text/plain; charset=none\r\n",
        b"X_Under.score!: a\r\n",
        b": a\r\n",
        b"No colon\r\n",
        b"Content-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Upgrade: h2c\r\nConnection: Upgrade\r\n",
        b"X-%d: a\r\n" * 200 % tuple(range(200)),
    ]
    return b"".join([*lines, seed.choice(extra) if seed.random() < 0.4 else b""])


def odd_framing(seed: random.Random) -> bytes:
    """Return bytes that are not a request, or a request with inconsistent parts."""
    body = json.dumps(SANE).encode()
    line = seed.choice(
        [
            b"POST /v1/completions HTTP/9.9",
            b"POST /v1/completions",
            b"POST  /v1/completions HTTP/1.1",
            b"post /v1/completions HTTP/1.1",
            b"P\x01ST /v1/completions HTTP/1.1",
            b"GET /v1/completions HTTP/1.1",
            b"PUT /v1/chat/completions HTTP/1.1",
            b"POST http://[::1 HTTP/1.1",
            b"POST /v1/completions?a=%ff%0a HTTP/1.1",
            b"POST /%0aodd/\xff HTTP/1.1",
            b"OPTIONS * HTTP/1.1",
            b"POST /" + b"a" * 9_000 + b" HTTP/1.1",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            seed.randbytes(40).replace(b"\n", b"."),
        ]
    )
    chunks = seed.choice(
        [
            b"zz\r\nab\r\n0\r\n\r\n",
            b"-1\r\n",
            b"5\r\nab\r\n0\r\n\r\n",
            b"ffffffffffffffffff\r\n",
            b"2;a=b\r\n{}\r\n0\r\n\r\n",
        ]
    )
    length = seed.choice([b"-3", b"+3", b"0x3", b"abc", b"9" * 30, b"3, 3", b"", b" ", b"3.0"])
    whole = [
        line + b"\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body),
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks,
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: " + length + b"\r\n\r\n" + body,
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\nHost: h\n\n",
        b"GET /" + seed.choice([b"", b"%", b"v1/models/../..", b"\xff", b"a" * 200]) + b" HTTP/1.1\r\nHost: [\r\n\r\n",
    ]
    return seed.choice(whole)


def spoilt(seed: random.Random) -> bytes:
    """Return the bytes of one input."""
    kind = seed.random()
    if kind < 0.5:
        path, body = spoilt_body(seed)
        data = request(body, path=path)
    elif kind < 0.62:
        data = request(no_json(seed), path=seed.choice([PATH, CHAT_PATH, "/orchestrrl/move"]).encode())
    elif kind < 0.74:
        header, body = encoded(json.dumps(SANE).encode(), seed)
        data = request(body, headers=header)
    elif kind < 0.86:
        data = request(json.dumps(SANE).encode(), headers=odd_headers(seed))
    else:
        data = odd_framing(seed)
    if seed.random() < 0.1:  # a valid request was pipelined before it
        data += request(json.dumps(SANE).encode())
    return data


async def fuzz(harness: HttpHarness, inputs: int, seed: random.Random) -> Counter[int]:
    """Send the inputs. Returns the number of inputs by status (0: the connection was closed). Raises AssertionError."""
    statuses: Counter[int] = Counter()
    for number in range(inputs):
        data = spoilt(seed)
        tries = harness.tries
        status, answer = await harness.send(data, pieces=seed.choice([1, 1, 1, 2, 5]), patience_s=PATIENCE_S)
        statuses[status] += 1
        case = f"input {number}: {data[:300]!r}... was answered {status} {answer[:300]!r}"
        assert status < 500, case
        if status >= 400:
            assert answer.startswith(b"{"), case
            error = json.loads(answer)["error"]
            assert error["code"] == status, case
            assert error["message"], case
        await settled(harness)
        log = harness.log.take()
        assert not any("Traceback" in line for line in log), f"{case}; log: {log}"
        assert all("\n" not in line for line in log), f"{case}; log: {log}"
        assert len(log) <= 2, f"{case}; log: {log}"  # two requests may have arrived together
        asked = harness.engine.asked[tries:]
        attempts = Counter(tuple(each.values("X-Request-Id")) for each in asked)
        assert all(count == 1 for count in attempts.values()), f"{case}; {attempts}"
        assert not any(name.endswith("~2") for names in attempts for name in names), f"{case}; {attempts}"
        harness.engine.asked.clear()
        if number % BATCH == 0:
            status, answer = await harness.send(request(json.dumps(SANE).encode()))
            assert status == 200, f"after {case}: {answer!r}"
            harness.engine.asked.clear()
    return statuses


async def settled(harness: HttpHarness) -> None:
    """Wait until no request of the last client is in flight."""
    async with asyncio.timeout(60):
        while len(harness.gateway.ledger) or harness.gateway.relays:
            await asyncio.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    async def run() -> Counter[int]:
        async with http_harness() as harness:
            return await fuzz(harness, asked.inputs, random.Random(asked.seed))

    print(dict(sorted(asyncio.run(run()).items())))


if __name__ == "__main__":
    main()
