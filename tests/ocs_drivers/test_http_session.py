"""Requests to servers that behave badly: what is raised says whether anything can have happened."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from emulated import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st

from ocs_drivers.base import SystemClock
from ocs_drivers.conformance import refusal
from ocs_drivers.errors import DriverError, DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.http_session import (
    MAX_BODY_BYTES,
    DeviceResponse,
    HttpSession,
    check_status,
    parse_json,
)
from ocs_drivers.registry import make_driver
from ocs_drivers.restconf import RestconfOptions

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"


@asynccontextmanager
async def server(answer: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Says the same to everybody, then closes the connection; reads the head of the request first."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if (await reader.readexactly(1)).isalpha():  # else this is no HTTP
                await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with listening:
        host, port = listening.sockets[0].getsockname()[:2]
        yield f"{host}:{port}"


@asynccontextmanager
async def session(address: str, limit_s: float = PATIENCE_S) -> AsyncIterator[HttpSession]:
    http = HttpSession(RestconfOptions(address=address, command_timeout_s=limit_s), SystemClock())
    await http.open()
    yield http
    await http.close()


@pytest.mark.parametrize(
    ("answer", "read", "setter"),
    [
        (b"", DriverRetryable, DriverOutcomeUnknown),  # taken or not, the connection is gone
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n[]", DriverPermanent, DriverOutcomeUnknown),  # cut short
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n[]", DriverPermanent, DriverOutcomeUnknown),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", DriverPermanent, DriverOutcomeUnknown),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", DriverPermanent, DriverOutcomeUnknown),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", DriverPermanent, DriverOutcomeUnknown),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n", DriverPermanent, DriverOutcomeUnknown),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (MAX_BODY_BYTES + 1), DriverRetryable, DriverOutcomeUnknown),
    ],
)
async def test_an_answer_that_is_none(answer: bytes, read: type[DriverError], setter: type[DriverError]) -> None:
    async with server(answer) as address, session(address) as http:
        for is_setter, kind in ((False, read), (True, setter)):
            async with refusal(kind, "POST /x"):
                await http.request("POST", "/x", content=[], is_setter=is_setter)


async def test_a_setter_that_could_not_be_sent_has_done_nothing() -> None:
    async with session("127.0.0.1:1") as http:
        async with refusal(DriverRetryable, "the connection failed"):
            await http.request("POST", "/x", is_setter=True)
    async with refusal(DriverRetryable, "the session is closed"):
        await http.request("POST", "/x", is_setter=True)


async def test_silence_is_bounded_in_time() -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with silent:
        host, port = silent.sockets[0].getsockname()[:2]
        async with session(f"{host}:{port}", limit_s=0.05) as http:
            async with refusal(DriverRetryable, "no answer within 0.05 s"):
                await http.request("GET", "/x")
            async with refusal(DriverOutcomeUnknown, "no answer within 0.05 s"):
                await http.request("POST", "/x", is_setter=True)


@pytest.mark.parametrize(
    ("status", "read", "setter"),
    [
        (200, None, None),
        (204, None, None),
        (302, DriverPermanent, DriverPermanent),
        (400, DriverPermanent, DriverPermanent),
        (401, DriverPermanent, DriverPermanent),
        (403, DriverPermanent, DriverPermanent),
        (404, DriverPermanent, DriverPermanent),
        (408, DriverRetryable, DriverOutcomeUnknown),
        (409, DriverPermanent, DriverPermanent),
        (429, DriverRetryable, DriverRetryable),
        (500, DriverRetryable, DriverOutcomeUnknown),
        (501, DriverPermanent, DriverPermanent),
        (503, DriverRetryable, DriverOutcomeUnknown),
        (999, DriverRetryable, DriverOutcomeUnknown),
    ],
)
def test_what_a_status_means(status: int, read: type[DriverError] | None, setter: type[DriverError] | None) -> None:
    answer = DeviceResponse(status, {"Location": "http://elsewhere/", "Retry-After": "7"}, b"no \x1b[31m way")
    for is_setter, kind in ((False, read), (True, setter)):
        if kind is None:
            check_status(answer, "GET /x", is_setter)
            continue
        with pytest.raises(kind) as raised:
            check_status(answer, "GET /x", is_setter)
        assert type(raised.value) is kind
        assert "\x1b" not in str(raised.value)
        if isinstance(raised.value, DriverRetryable):
            assert raised.value.after_s == 7.0


async def test_redirects_are_not_followed() -> None:
    async with server(OK) as target:
        moved = f"HTTP/1.1 302 Found\r\nLocation: http://{target}/rest/\r\nContent-Length: 0\r\n\r\n".encode()
        async with server(moved) as address:
            for name in ("restconf", "calient_rest"):
                driver = make_driver(name, "ocs1", {"address": address, "user": "u", "password": "secret"})
                async with refusal(DriverPermanent, "redirects to", target, "not followed"):
                    await driver.cross_connects()
                await driver.close()


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "NaN", "-Infinity", "{", "", "\ud800", '{"a":1}x'])
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"not JSON|."):
        parse_json(text.encode("utf-8", "surrogatepass"))


@given(st.binary(max_size=200))
def test_bytes_are_json_or_a_value_error(body: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_json(body)


@given(body=st.binary(max_size=60), status=st.integers(100, 999))
def test_words_can_be_shown(body: bytes, status: int) -> None:
    shown = DeviceResponse(status, {}, body).excerpt
    assert shown.isprintable()
    assert len(shown) < 400
