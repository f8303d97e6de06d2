"""Requests to misbehaving servers: the raised error states whether the request may have had an effect."""

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
    """Serve the same answer on every connection after the head of the request, then close the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if (await reader.readexactly(1)).isalpha():  # otherwise it is not HTTP
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
        # the connection is closed, before or after the request was carried out
        (b"", DriverRetryable, DriverOutcomeUnknown),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n[]", DriverPermanent, DriverOutcomeUnknown),  # truncated
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n[]", DriverPermanent, DriverOutcomeUnknown),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", DriverPermanent, DriverOutcomeUnknown),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", DriverPermanent, DriverOutcomeUnknown),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", DriverPermanent, DriverOutcomeUnknown),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n", DriverPermanent, DriverOutcomeUnknown),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (MAX_BODY_BYTES + 1), DriverRetryable, DriverOutcomeUnknown),
    ],
)
async def test_invalid_answers_are_classified(
    answer: bytes, read: type[DriverError], setter: type[DriverError]
) -> None:
    async with server(answer) as address, session(address) as http:
        for is_setter, kind in ((False, read), (True, setter)):
            async with refusal(kind, "POST /x"):
                await http.request("POST", "/x", content=[], is_setter=is_setter)


async def test_unsent_setter_is_retryable() -> None:
    async with session("127.0.0.1:1") as http:
        async with refusal(DriverRetryable, "the connection failed"):
            await http.request("POST", "/x", is_setter=True)
    async with refusal(DriverRetryable, "the session is closed"):
        await http.request("POST", "/x", is_setter=True)


async def test_missing_answer_raises_after_time_limit() -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with silent:
        host, port = silent.sockets[0].getsockname()[:2]
        async with session(f"{host}:{port}", limit_s=0.05) as http:
            async with refusal(DriverRetryable, "the device did not respond within 0.05 s"):
                await http.request("GET", "/x")
            async with refusal(DriverOutcomeUnknown, "the device did not respond within 0.05 s"):
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
def test_status_codes_map_to_driver_errors(
    status: int, read: type[DriverError] | None, setter: type[DriverError] | None
) -> None:
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
def test_parse_json_refuses_invalid_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"not valid JSON|."):
        parse_json(text.encode("utf-8", "surrogatepass"))


@given(st.binary(max_size=200))
def test_parse_json_raises_only_value_error(body: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_json(body)


@given(body=st.binary(max_size=60), status=st.integers(100, 999))
def test_excerpt_is_printable_and_short(body: bytes, status: int) -> None:
    shown = DeviceResponse(status, {}, body).excerpt
    assert shown.isprintable()
    assert len(shown) < 400
