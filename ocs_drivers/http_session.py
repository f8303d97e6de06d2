"""Send HTTP requests to a device, one at a time and each on a new connection, so that the outcome of each request can
be classified.

Connections are not reused. If the device closed an idle connection while a setter was being sent on it, it would not be
known whether the setter took effect. Requests are not retried, redirects are not followed, responses are limited in
size, and certificates are verified.
"""

import base64
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar
from urllib.parse import quote

import aiohttp
from yarl import URL

from ocs_drivers.base import DeviceClock
from ocs_drivers.driver import within
from ocs_drivers.errors import DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.options import (
    Address,
    DriverOptions,
    FilledText,
    Flag,
    Password,
    SecondsOr0,
    is_text,
    must_be,
    split_address,
)

T = TypeVar("T")

MAX_BODY_BYTES = 4 * 1024 * 1024  # a list of 65,535 cross-connects takes half of it
MAX_HEADER_BYTES = 8 * 1024
SHOWN_CHARACTERS = 300
MAX_RETRY_AFTER_S = 60.0


class Scheme(StrEnum):
    HTTP = "http"
    HTTPS = "https"


@dataclass(frozen=True, slots=True)
class DeviceResponse:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def excerpt(self) -> str:
        """The status and the beginning of the body, as printable text for messages."""
        text = " ".join(self.body[: 4 * SHOWN_CHARACTERS].decode("utf-8", "replace").split())
        shown = "".join(sign if sign.isprintable() else "?" for sign in text)
        return f"HTTP {self.status}" + (f": {shown[:SHOWN_CHARACTERS]}" if shown else "")


class HttpOptions(DriverOptions):
    """The options of every driver that uses HTTP. The certificates in `tls_ca_file` (PEM) replace the system's
    authorities."""

    default_ports: ClassVar[Mapping[Scheme, int]]

    address: Address
    scheme: Scheme = Scheme.HTTP
    tls_verify: Flag = True
    tls_ca_file: FilledText | None = None
    # Basic authentication ends the user name at a colon.
    user: Annotated[str, must_be("without a colon", lambda value: ":" not in value), must_be("text", is_text)] = ""
    password: Password = ""
    reconfiguration_s: SecondsOr0

    def conflicts(self) -> list[str]:
        wrong = ["user: must be set when password is given, got ''"] if self.password and not self.user else []
        if self.tls_ca_file is not None:
            if self.scheme != Scheme.HTTPS or not self.tls_verify:
                wrong.append(f"tls_ca_file: needs scheme https and tls_verify, got {self.tls_ca_file!r}")
            try:
                ssl.create_default_context(cafile=self.tls_ca_file)
            except (OSError, ssl.SSLError) as error:
                wrong.append(f"tls_ca_file: cannot be used ({error}), got {self.tls_ca_file!r}")
        return wrong

    @property
    def url(self) -> str:
        """The device's base URL, which consists of the scheme, the host and the port."""
        host, port = split_address(self.address, self.default_ports[self.scheme])
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def tls(self) -> ssl.SSLContext | bool:
        return self.tls_verify if self.tls_ca_file is None else ssl.create_default_context(cafile=self.tls_ca_file)


class HttpSession:
    """Sends requests to one device. If `cookies` is True, requests carry the device's session cookie instead of the
    password as soon as the device has sent a cookie. When the device no longer accepts the cookie, the password is sent
    again."""

    def __init__(self, options: HttpOptions, clock: DeviceClock, *, cookies: bool = False) -> None:
        self._options = options
        self._url = options.url
        self._tls = options.tls
        self._clock = clock
        self._with_cookies = cookies
        self._client: aiohttp.ClientSession | None = None
        self._cookie = ""

    async def open(self) -> None:
        await self.close()
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_note_sent)
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, ssl=self._tls),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # the driver limits time by its own clock
            trace_configs=[trace],
            auto_decompress=False,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            headers={"Accept-Encoding": "identity"},
        )

    async def close(self) -> None:
        client, self._client = self._client, None
        self._cookie = ""
        if client is not None:
            await client.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        content: object = None,
        headers: Mapping[str, str] | None = None,
        is_setter: bool = False,
    ) -> DeviceResponse:
        """Send a request and return the response, regardless of its status. `content` is sent as JSON.

        Raises DriverOutcomeUnknown if a setter was sent and no valid response arrived. Raises DriverPermanent if the
        device's certificate is not trusted, or if the response to a request other than a setter is not HTTP. Raises
        DriverRetryable for other failures, which certainly had no effect.
        """
        target = path + ("?" + "&".join(f"{quote(k)}={quote(v, safe='')}" for k, v in query.items()) if query else "")
        body = None if content is None else json.dumps(content, separators=(",", ":")).encode()
        answer = await self._bounded(method, target, body, headers or {}, is_setter)
        if answer.status == 401 and self._cookie:
            # Refused before anything was done: the session has expired or was replaced.
            self._cookie = ""
            answer = await self._bounded(method, target, body, headers or {}, is_setter)
        if self._with_cookies and answer.status < 300:
            self._cookie = answer.headers.get("Set-Cookie", "").partition(";")[0].strip() or self._cookie
        return answer

    async def _bounded(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str], is_setter: bool
    ) -> DeviceResponse:
        command = f"{method} {target}"
        noted = SimpleNamespace(is_sent=False)
        try:
            return await within(
                self._clock, self._options.command_timeout_s, self._exchange(method, target, body, headers, noted)
            )
        except aiohttp.ClientConnectorCertificateError as error:
            wrong = f"the certificate is not trusted ({error.certificate_error}): set tls_ca_file"
            raise DriverPermanent(wrong, command=command) from None
        except aiohttp.ClientConnectorSSLError as error:
            raise DriverPermanent(f"the TLS handshake failed: {error}", command=command) from None
        except _TooLong:
            wrong = f"the response is longer than {MAX_BODY_BYTES} bytes"
        except TimeoutError as error:
            wrong = str(error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            is_http = not isinstance(error, aiohttp.ClientResponseError | aiohttp.ClientPayloadError | ValueError)
            what = "the connection failed" if is_http else "the response is not HTTP"
            wrong = f"{what} ({str(error) or type(error).__name__})"
            if not is_http and not is_setter:
                raise DriverPermanent(wrong, command=command) from None
        if is_setter and noted.is_sent:
            raise DriverOutcomeUnknown(wrong, command=command)
        raise DriverRetryable(wrong, command=command)

    async def _exchange(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str], noted: SimpleNamespace
    ) -> DeviceResponse:
        if self._client is None:
            raise DriverRetryable("the session is closed")
        sent = {**headers, **({"Cookie": self._cookie} if self._cookie else self._authorization())}
        url = URL(self._url + target, encoded=True)
        async with self._client.request(
            method, url, data=body, headers=sent, allow_redirects=False, trace_request_ctx=noted
        ) as response:
            received = bytearray()
            async for chunk in response.content.iter_any():
                received += chunk
                if len(received) > MAX_BODY_BYTES:
                    raise _TooLong
            return DeviceResponse(response.status, dict(response.headers), bytes(received))

    def _authorization(self) -> dict[str, str]:
        if not self._options.user:
            return {}
        words = f"{self._options.user}:{self._options.password}".encode()
        return {"Authorization": f"Basic {base64.b64encode(words).decode()}"}


class _TooLong(Exception):
    pass


async def _note_sent(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:
    context.trace_request_ctx.is_sent = True


def check_status(answer: DeviceResponse, command: str, is_setter: bool, text: str = "") -> None:
    """Raise the driver error that corresponds to the response's status, unless the status is 2xx. `text` is the
    device's error message, if it is known from the body. Otherwise, the error quotes the beginning of the body."""
    text = text or answer.excerpt
    match answer.status:
        case status if 200 <= status < 300:
            return
        case 401:
            raise DriverPermanent("authentication failed: check user and password", command=command, answer=text)
        case 403:
            raise DriverPermanent("the user does not have permission for this request", command=command, answer=text)
        case status if 300 <= status < 400:
            to = answer.headers.get("Location", "nowhere")[:SHOWN_CHARACTERS]
            wrong = f"the device redirects to {to!r}, which is not followed: set address and scheme to the final URL"
            raise DriverPermanent(wrong, command=command, answer=text)
        case 429:
            raise DriverRetryable(
                "the device received too many requests", after_s=_after_s(answer), command=command, answer=text
            )
        case status if (status < 500 and status != 408) or status == 501:
            raise DriverPermanent("refused", command=command, answer=text)
        case _ if is_setter:
            raise DriverOutcomeUnknown(
                "the device failed during the change, which may or may not have been applied",
                command=command,
                answer=text,
            )
        case _:
            raise DriverRetryable("the device is unavailable", after_s=_after_s(answer), command=command, answer=text)


def _after_s(answer: DeviceResponse) -> float:
    text = answer.headers.get("Retry-After", "")
    return min(float(text), MAX_RETRY_AFTER_S) if text.isascii() and text.isdecimal() and len(text) < 6 else 1.0


def parse_json(body: bytes) -> object:
    """Parse any bytes as JSON. Raises ValueError with the reason if they are not valid JSON."""
    try:
        value: object = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not valid JSON: {error or 'it is nested too deeply'}") from None
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a valid JSON value")


def read_answer(
    answer: DeviceResponse, command: str, parse: Callable[[object], T], *, is_setter: bool = False, text: str = ""
) -> T:
    """Return the result of `parse` for the JSON in the response's body. An empty body is treated as an empty list.
    Raises the errors of `check_status`. If the body is invalid, raises DriverOutcomeUnknown for a setter and
    DriverPermanent for any other request."""
    check_status(answer, command, is_setter, text)
    try:
        return parse(parse_json(answer.body) if answer.body.strip() else [])
    except ValueError as error:
        kind = DriverOutcomeUnknown if is_setter else DriverPermanent
        raise kind(f"invalid response: {error}", command=command, answer=answer.excerpt) from None
