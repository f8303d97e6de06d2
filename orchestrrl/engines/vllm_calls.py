"""Calls to a vLLM server's control endpoints: one exchange each, and every failure as one of ours.

Streams of tokens go another way (exchange.py).
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp

from orchestrrl.core.addresses import without_login
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable, shorten
from orchestrrl.engines.base import RequestRefused

RETRY_AFTER_S = 1.0
BUSY_STATUSES = frozenset({408, 425, 429})
# What reading a document of another form raises.
NOT_OF_VLLM = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError)


class VllmCalls:
    """To the server at `url`, which calls itself `product`. `timeout_s` bounds connecting, and each call that brings no
    time of its own. Connections are opened when they are used; `close` releases them."""

    def __init__(self, url: str, product: str, timeout_s: float) -> None:
        self.url = url
        self.where = without_login(url)  # for messages
        self.timeout_s = timeout_s
        self._product = product
        self._session: aiohttp.ClientSession | None = None

    async def json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """The answer. Raises Retryable, Permanent (Refused where the server says no) and, where what was sent may have
        had its effect, OutcomeUnknown."""
        status, text = await self.exchange(method, path, body, timeout_s)
        if status != 200:
            raise failure(self.where + path, status, text, None)
        with self.reading(path):
            return json.loads(text)

    async def exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> tuple[int, str]:
        """Status and text, whatever they are."""
        total_s = self.timeout_s if timeout_s is None else timeout_s
        timeout = aiohttp.ClientTimeout(total=None if total_s == math.inf else total_s, sock_connect=self.timeout_s)
        with self._reporting(path, sent=Retryable if method == "GET" else OutcomeUnknown):
            async with self._open_session().request(method, self.url + path, json=body, timeout=timeout) as response:
                return response.status, await response.text(errors="replace")
        raise AssertionError("unreachable")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Each control call has a connection of its own: vLLM closes kept ones after 5 s, and where its event loop
            # lags, as it does on a busy machine, it does so before reading what was just sent, and an order is lost.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    @contextmanager
    def _reporting(self, path: str, sent: type[Retryable] | type[OutcomeUnknown]) -> Iterator[None]:
        """Network failures as ours: Retryable before the request was sent, `sent` once it may have arrived."""
        where = self.where + path
        try:
            yield
        except aiohttp.InvalidURL as error:
            raise Permanent(f"{where}: not a URL") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Retryable(f"{where}: cannot be reached: {error}", RETRY_AFTER_S) from error
        except aiohttp.ClientResponseError as error:
            raise Permanent(f"{where}: the answer is not HTTP: {error.message}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = f"{where}: {str(error) or type(error).__name__}"
            raise (Retryable(reason, RETRY_AFTER_S) if sent is Retryable else OutcomeUnknown(reason)) from error

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """An answer that does not look like vLLM's is Permanent."""
        try:
            yield
        except NOT_OF_VLLM as error:
            raise self.nonsense(path, error) from error

    def nonsense(self, path: str, error: Exception) -> Permanent:
        return Permanent(f"{self.where}{path}: not an answer of {self._product}: {error!r}")


def failure(where: str, status: int, text: str, retry_after: str | None) -> OrchestrRLError:
    """An HTTP status that is not 200 as an error of ours, with the engine's own words."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str):
        message = shorten(text, 300)
    if not isinstance(body, dict):
        body = {"error": {"message": message, "type": "error", "param": None, "code": status}}
    if status in BUSY_STATUSES or status >= 500:
        after_s = float(retry_after) if retry_after and retry_after.isdecimal() else RETRY_AFTER_S
        return Retryable(f"{where}: {status}: {message}", after_s)
    return RequestRefused(f"{where}: {status}: {message}", status, body)
