"""Load new weights from a folder into vLLM servers. The pause barrier is closed while the servers load.

With a gateway, a lease keeps the fleet paused and is renewed while the servers load. If the trainer dies, the lease
ends, and no server stays paused. Without a gateway, each server is paused through its own API, and stays paused until
this module resumes it.

The module runs in the trainer's environment and needs aiohttp and pydantic.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable, shorten

RETRY_AFTER_S = 5.0
# The lease ends the pause of a fleet whose trainer has died. Three renewals per lease tolerate delays on a busy
# machine.
LEASE_S = 60.0
RENEWALS_PER_LEASE = 3
_T = TypeVar("_T")


def reload_weights(
    engine_urls: Sequence[str],
    weights_path: Path | str,
    *,
    gateway_url: str | None = None,
    policy_version: int | None = None,
    holder: str = "",
    lease_s: float = LEASE_S,
    timeout_s: float = 600.0,
) -> None:
    """Load the weights in the folder `weights_path`, in Hugging Face's format, into vLLM servers. The servers must be
    able to read the folder.

    All engines are paused during the load, so that no two engines serve different versions at the same time. Running
    requests are kept. They lose their KV cache and continue with the new weights. Requires `VLLM_SERVER_DEV_MODE=1` on
    the servers. `policy_version` is the version of the weights; if it is None, the gateway assumes that the weights
    have not changed. `holder` and `lease_s` are the name of the holder and the duration of the gateway's pause lease.
    The gateway stores the path for engines that start later, so keep the folder until other weights have been loaded.

    Engines of the gateway that are not in `engine_urls` are not updated, and get no requests until their version is
    reported. If the gateway is down, the servers are updated without it.

    Raises Retryable or Permanent if no server was changed and all servers continue. Raises OutcomeUnknown if some
    servers may have only part of the new weights. These servers stay paused, and the other servers continue with the
    new weights.
    """
    urls, weights = [url.rstrip("/") for url in engine_urls], str(weights_path)

    async def reload() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as http:
            if gateway_url is not None:
                barrier = _Barrier(http, gateway_url.rstrip("/"), lease_s)
                with _unchanged():
                    is_closed = await barrier.close(holder)
                if is_closed:
                    await _reload_behind(barrier, urls, weights, policy_version)
                    return
            await _reload_alone(http, urls, weights)

    run(reload())


@contextmanager
def _unchanged() -> Iterator[None]:
    """Add the statement that no weights were changed to the messages of the Retryable and Permanent errors that the
    enclosed code raises."""
    try:
        yield
    except Retryable as error:
        raise Retryable(f"cannot pause the engines: {error}; no weights were changed", error.after_s) from error
    except Permanent as error:
        raise Permanent(f"cannot pause the engines: {error}; no weights were changed") from error


class _Barrier:
    """The pause barrier of the gateway. Once this process has closed the barrier, it holds the barrier by a lease. The
    barrier is part of the operator API, whose port may change when the gateway restarts."""

    def __init__(self, http: aiohttp.ClientSession, url: str, lease_s: float) -> None:
        self.http = http
        self._url = url
        self._lease_s = lease_s
        self._lease = ""
        self._name: object = None  # name of the gateway at this URL
        self.ids: dict[str, list[str]] = {}  # engine ids by URL
        self.restless: dict[str, str] = {}  # engines that could not be paused, with the reason

    async def close(self, holder: str) -> bool:
        """Close the barrier in the name of `holder`. Return True, or False if no gateway is running. Raises Retryable
        or Permanent if the gateway refuses, and Permanent if its operator API cannot be reached."""
        try:
            operator_url = await self._operator_url()
        except Retryable as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectorError):
                return False
            raise
        asked = {"mode": "keep", "frozen": "recompute", "holder": holder, "lease_s": self._lease_s}
        try:
            await self._check(operator_url)
            told = await _call(self.http, f"{operator_url}/orchestrrl/pause", asked)
        except Retryable as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectorError):
                raise Permanent(self._out_of_reach(str(error))) from error
            raise
        self._lease = told["lease_id"]
        for engine in told["engines"]:
            self.ids.setdefault(engine["url"].rstrip("/"), []).append(engine["engine_id"])
            if not engine["done"]:
                self.restless[engine["engine_id"]] = engine["detail"]
        return True

    async def _check(self, operator_url: str) -> None:
        """Raise Permanent if another gateway responds at `operator_url`. This is possible because a loopback URL refers
        to a different server on each host."""
        wanted, found = self._name, (await _call(self.http, f"{operator_url}/version", method="GET")).get("gateway")
        if found != wanted:
            raise Permanent(self._out_of_reach(f"{operator_url} belongs to gateway {found!r}, expected {wanted!r}"))

    def _out_of_reach(self, because: str) -> str:
        return (
            f"the operator API of the gateway {self._url} cannot be reached from this host ({because}); start the "
            "gateway with --operator HOST:PORT --allow-remote"
        )

    async def renew(self) -> None:
        """Renew the lease until cancelled. Raises Permanent if the lease has ended."""
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            with suppress(Retryable):  # the next renewal may succeed
                await self._post("renew", {"lease_id": self._lease, "lease_s": self._lease_s})

    async def open(self, policy_version: int | None, without: Sequence[str], weights_source: str = "") -> None:
        asked = {
            "lease_id": self._lease,
            "policy_version": policy_version,
            "weights_source": weights_source,
            "without_engines": list(without),
        }
        await self._post("resume", asked)

    async def _post(self, name: str, asked: Mapping[str, Any]) -> None:
        await _call(self.http, f"{await self._operator_url()}/orchestrrl/{name}", asked)

    async def _operator_url(self) -> str:
        told = await _call(self.http, f"{self._url}/version", method="GET")
        url, self._name = told.get("operator_url"), told.get("gateway")
        if not isinstance(url, str):
            raise Permanent(
                f"{self._url}/version must return an operator_url, got {shorten(told)}; use the URL of an OrchestrRL"
                " gateway"
            )
        return url.rstrip("/")


async def _reload_behind(barrier: _Barrier, urls: Sequence[str], weights_path: str, policy_version: int | None) -> None:
    strangers = [url for url in urls if url not in barrier.ids]
    if strangers or barrier.restless:
        await barrier.open(None, ())
        because = [f"{url} is not an engine of the gateway (engines: {', '.join(barrier.ids)})" for url in strangers]
        because += [f"{engine} could not be paused: {detail}" for engine, detail in barrier.restless.items()]
        raise Permanent(f"cannot reload the weights: {'; '.join(because)}; no weights were changed")
    holding = asyncio.create_task(barrier.renew())
    try:
        torn = await _load(barrier.http, urls, weights_path)
    finally:
        holding.cancel()
    others = {url for url in barrier.ids if url not in urls}
    without = [engine for url in (*torn, *sorted(others)) for engine in barrier.ids[url]]
    try:
        await barrier.open(policy_version, without, weights_path)
    except OrchestrRLError as error:
        raise OutcomeUnknown(f"cannot open the pause barrier after loading {weights_path}: {error}") from error
    if torn:
        raise _torn(weights_path, torn)


async def _reload_alone(http: aiohttp.ClientSession, urls: Sequence[str], weights_path: str) -> None:
    # By default this also drops vLLM's KV cache, prefix cache included.
    failures = await _each(urls, lambda url: _call(http, f"{url}/pause?mode=keep"))
    if failures:
        # A server that did not answer may be paused nevertheless.
        failures = await _each(urls, lambda url: _call(http, f"{url}/resume")) | failures
        message = "; ".join(str(error) for error in failures.values())
        with _unchanged():
            if all(isinstance(error, Retryable) for error in failures.values()):
                raise Retryable(message, RETRY_AFTER_S)
            raise Permanent(message)
    torn = await _load(http, urls, weights_path)
    stuck = await _each([url for url in urls if url not in torn], lambda url: _call(http, f"{url}/resume"))
    if torn or stuck:
        raise _torn(weights_path, torn | stuck)


async def _load(http: aiohttp.ClientSession, urls: Sequence[str], weights_path: str) -> dict[str, OrchestrRLError]:
    order = {"method": "reload_weights", "kwargs": {"weights_path": weights_path}}
    return await _each(urls, lambda url: _call(http, f"{url}/collective_rpc", order))


def _torn(weights_path: str, failures: Mapping[str, OrchestrRLError]) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"these engines stay paused after loading {weights_path}, which they must be able to read; restart them, or "
        "load weights again and POST /resume: " + "; ".join(str(error) for error in failures.values())
    )


async def _each(urls: Sequence[str], act: Callable[[str], Coroutine[Any, Any, Any]]) -> dict[str, OrchestrRLError]:
    """Call `act` for each URL concurrently; return the OrchestrRLErrors by URL. Other exceptions are raised."""
    outcomes = await asyncio.gather(*(act(url) for url in urls), return_exceptions=True)
    failures: dict[str, OrchestrRLError] = {}
    for url, outcome in zip(urls, outcomes, strict=True):
        if isinstance(outcome, OrchestrRLError):
            failures[url] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
    return failures


async def _call(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any] | None = None, method: str = "POST"
) -> dict[str, Any]:
    """Send a request to a server. Return the JSON object of the response, or {} if the response is not a JSON object.
    Raises Retryable if the server is unreachable or busy, and Permanent if it rejects the request."""
    try:
        async with http.request(method, url, json=body) as response:
            text = await response.text()
            answer = await response.json() if response.status == 200 and "json" in response.content_type else {}
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Retryable(f"cannot call {url}: {str(error) or type(error).__name__}", RETRY_AFTER_S) from error
    if response.status == 404:
        raise Permanent(f"{url} returned status 404; vLLM must be started with VLLM_SERVER_DEV_MODE=1")
    if response.status in (503, 504):
        raise Retryable(f"{url} returned status {response.status}: {shorten(text, 300)}", RETRY_AFTER_S)
    if response.status != 200:
        raise Permanent(f"{url} returned status {response.status}: {shorten(text, 300)}")
    return answer if isinstance(answer, dict) else {}


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine from synchronous code. If an event loop is already running in this thread, as in a notebook, run
    it in another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
