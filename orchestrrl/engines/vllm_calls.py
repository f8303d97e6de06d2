"""Calls to a vLLM server's control endpoints: one exchange each, and every failure as one of ours."""

import asyncio
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from orchestrrl.core.addresses import without_login
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable, shorten
from orchestrrl.engines.base import RequestRefused
from orchestrrl.engines.exchange import RETRY_AFTER_S, ConnectionPool

BUSY_STATUSES = frozenset({408, 425, 429})
# What reading a document of another form raises.
NOT_OF_VLLM = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError)


class VllmCalls:
    """To the server at `url`. `timeout_s` bounds connecting, and each call that brings no time of its own. Connections
    are opened when they are used; `close` releases them."""

    name = "vllm"  # of the product

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self.where = without_login(self.url)  # for messages
        self.timeout_s = timeout_s

    @cached_property
    def pool(self) -> ConnectionPool:
        """Connections to the server. Raises Permanent where the URL is none."""
        return ConnectionPool(self.url, connect_timeout_s=self.timeout_s)

    async def ask(
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
        data = b"" if body is None else json.dumps(body).encode()
        exchange = self.pool.exchange(path, data, method=method, alone=True)
        total_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(total_s if math.isfinite(total_s) else None):
                connection = await exchange.begin()
                return connection.status, (await connection.read_all()).decode(errors="replace")
        except (OutcomeUnknown, TimeoutError) as error:
            because = str(error).removeprefix(f"{self.where}: ") or f"no answer within {total_s:g} s"
            reason = f"{self.where}{path}: {because}"
            if exchange.sent and method != "GET":
                raise OutcomeUnknown(reason) from error
            raise Retryable(reason, RETRY_AFTER_S) from error
        finally:
            exchange.close()

    async def close(self) -> None:
        if "pool" in vars(self):
            self.pool.close()

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """An answer that does not look like vLLM's is Permanent."""
        try:
            yield
        except NOT_OF_VLLM as error:
            raise self.nonsense(path, error) from error

    def nonsense(self, path: str, error: Exception) -> Permanent:
        return Permanent(f"{self.where}{path}: not an answer of {self.name}: {error!r}")


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
