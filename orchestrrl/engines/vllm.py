"""The client of a vLLM server: tokens over its OpenAI endpoints, control over its development endpoints.

Features are found in `/openapi.json`, never inferred from a version. `/pause`, `/abort_requests` and `/server_info`
exist with VLLM_SERVER_DEV_MODE=1 only; without them an attempt is still stopped, by closing its connection.
"""

import json
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from orchestrrl.engines import sse
from orchestrrl.engines.base import (
    Capabilities,
    Chunk,
    Endpoint,
    EngineMetrics,
    GenerationRequest,
    PauseMode,
    Refused,
)
from orchestrrl.engines.exchange import Exchange, Pool
from orchestrrl.engines.handover import EXTERNAL_SOURCE
from orchestrrl.engines.openai_chunks import ChunkReader, StreamError
from orchestrrl.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable, shorten

RETRY_AFTER_S = 1.0
SERVER_INFO_TIMEOUT_S = 60.0  # the first answer collects facts about the machine, which takes seconds
BUSY_STATUSES = frozenset({408, 425, 429})
# What vLLM makes of `X-Request-Id: x`. It ignores ids that it does not know, so both are named.
ENGINE_ID_FORMS = ("cmpl-{}-0", "chatcmpl-{}")
# What reading a document of another form raises.
NOT_OF_VLLM = (ValueError, KeyError, IndexError, TypeError, AttributeError)

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
GENERATED = "vllm:generation_tokens_total"
PROMPT = "vllm:prompt_tokens_total"
PREEMPTIONS = "vllm:num_preemptions_total"
CACHE_CONFIG = "vllm:cache_config_info"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"  # not every version has it
_NAMES = (RUNNING, WAITING, KV_USAGE, GENERATED, PROMPT, PREEMPTIONS, CACHE_CONFIG, BY_SOURCE)
_SAMPLES = tuple(f"{name}{{" for name in _NAMES)


@dataclass(slots=True)
class _Attempt:
    """A request of ours in flight."""

    exchange: Exchange
    heard: bool = False  # the engine has sent some of it, so it knows the request by its id
    abandoned: bool = False  # we closed its connection

    def abandon(self) -> None:
        self.abandoned = True
        self.exchange.close()


class VllmEngine:
    """A client of the vLLM server at `url`. `timeout_s` bounds connecting and every control call, never a stream.

    Control calls use `session`, which is left open when it is given; else one is opened at the first and closed by
    `close`.
    """

    name = "vllm"

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 10.0,
        session: aiohttp.ClientSession | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._session = session
        self._owns_session = session is None
        self._headers = dict(headers or {})
        self._pool: Pool | None = None
        self._attempts: dict[str, _Attempt] = {}

    async def capabilities(self) -> Capabilities:
        api = await self._json("GET", "/openapi.json")
        with self._reading("/openapi.json"):
            paths = set(api["paths"])
            completion = api["components"]["schemas"].get("CompletionRequest", {})
            token_ids = "return_token_ids" in completion.get("properties", {})
        version = (await self._json("GET", "/version")).get("version", "") if "/version" in paths else ""
        models = await self._models()
        return Capabilities(
            engine=self.name,
            version=version,
            models=tuple(models),
            token_ids=token_ids,
            abort_requests="/abort_requests" in paths,
            pause={"/pause", "/resume", "/is_paused"} <= paths,
            collective_rpc="/collective_rpc" in paths,
            weight_transfer={"/init_weight_transfer_engine", "/update_weights"} <= paths,
            sleep={"/sleep", "/wake_up"} <= paths,
            scale_elastic_ep="/scale_elastic_ep" in paths,
            tokens_endpoint="/inference/v1/generate" in paths,
            max_model_len_tokens=next(iter(models.values()), None),
            max_sequences=await self._max_sequences() if "/server_info" in paths else None,
        )

    async def metrics(self) -> EngineMetrics:
        status, text = await self._call("GET", "/metrics")
        if status != 200:
            raise _failure(f"{self.url}/metrics", status, text, None)
        with self._reading("/metrics"):
            return parse_metrics(text)

    async def healthy(self) -> bool:
        try:
            status, _ = await self._call("GET", "/health")
        except OrchestrRLError:
            return False
        return status == 200

    async def probe(self) -> float:
        model = next(iter(await self._models()), "")
        started_s = time.monotonic()
        body = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0}
        answer = await self._json("POST", "/v1/completions", body)
        with self._reading("/v1/completions"):
            if answer["choices"][0]["finish_reason"] not in ("length", "stop"):
                raise Permanent(f"{self.url}: a completion of one token ended as {shorten(answer['choices'][0])}")
        return time.monotonic() - started_s

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        path = "/v1/completions" if request.endpoint is Endpoint.COMPLETIONS else "/v1/chat/completions"
        body = json.dumps(_asked(request), separators=(",", ":")).encode()
        exchange = self._open_pool().exchange(path, body, {"X-Request-Id": request.request_id})
        attempt = self._attempts[request.request_id] = _Attempt(exchange)
        tokens, finish_reason = 0, None
        try:
            connection = await exchange.begin()
            if connection.status != 200:
                text = (await connection.read_all()).decode(errors="replace")
                exchange.leave()
                raise _failure(self.url + path, connection.status, text, connection.headers.get("retry-after"))
            events, reader = sse.Events(), ChunkReader()
            while data := await connection.read():
                with self._reading(path):
                    told, at = events.feed(data), 0
                while at < len(told):
                    if told[at] == sse.DONE:
                        at += 1
                        # vLLM leaves out the last chunk of a request that was aborted before its first token.
                        if finish_reason is None and not tokens:
                            finish_reason = "abort"
                            yield Chunk(finish_reason=finish_reason)
                        continue
                    chunk, at = self._chunk(path, reader, told, at)
                    if chunk is not None:
                        attempt.heard = True
                        tokens += len(chunk.token_ids)
                        finish_reason = finish_reason or chunk.finish_reason
                        yield chunk
            if finish_reason is None:
                raise OutcomeUnknown(
                    f"{self.url}{path}: the stream of {request.request_id} ended without a finish_reason"
                )
        except OutcomeUnknown:
            if not attempt.abandoned:
                raise
            yield Chunk(finish_reason="abort")
        finally:
            self._attempts.pop(request.request_id, None)
            if finish_reason is not None:
                exchange.leave()
            else:
                exchange.close()

    async def abort(self, request_ids: Sequence[str]) -> None:
        # An attempt that we have not heard of yet may not be known to the engine either, and would slip through.
        known = []
        for request_id in request_ids:
            attempt = self._attempts.get(request_id)
            if attempt is not None and not attempt.heard:
                attempt.abandon()
            else:
                known.append(request_id)
        if not known:  # vLLM reads an empty list as "abort everything"
            return
        engine_ids = [form.format(request_id) for request_id in known for form in ENGINE_ID_FORMS]
        try:
            await self._json("POST", "/abort_requests", {"request_ids": engine_ids})
        except Refused as refusal:
            if refusal.status not in (404, 405):
                raise
            for request_id in known:
                if request_id in self._attempts:
                    self._attempts[request_id].abandon()

    async def pause(self, mode: PauseMode, *, drop_kv: bool = False) -> None:
        # Waiting for the running requests takes as long as they do.
        timeout_s = math.inf if mode is PauseMode.WAIT else None
        # By default vLLM drops the KV of what it keeps, to prefill it again later.
        clear = "&clear_cache=false" if mode is PauseMode.KEEP and not drop_kv else ""
        await self._json("POST", f"/pause?mode={mode.value}{clear}", timeout_s=timeout_s)

    async def resume(self) -> None:
        await self._json("POST", "/resume")

    async def is_paused(self) -> bool:
        answer = await self._json("GET", "/is_paused")
        with self._reading("/is_paused"):
            return bool(answer["is_paused"])

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        answer = await self._json("POST", "/detokenize", {"tokens": list(token_ids)})
        with self._reading("/detokenize"):
            return str(answer["prompt"])

    async def close(self) -> None:
        if self._session is not None and self._owns_session:
            await self._session.close()
            self._session = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Each control call has a connection of its own: vLLM closes kept ones after 5 s, and where its event loop
            # lags, as it does on a busy machine, it does so before reading what was just sent, and an order is lost.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    def _open_pool(self) -> Pool:
        """For requests alone. Raises Permanent where the URL is none."""
        if self._pool is None:
            self._pool = Pool(self.url, connect_timeout_s=self._timeout_s, headers=self._headers)
        return self._pool

    def _chunk(self, path: str, reader: ChunkReader, events: Sequence[bytes], at: int) -> tuple[Chunk | None, int]:
        try:
            return reader.read_on(events, at)
        except StreamError as told:
            status, message = told.error.get("code"), told.error.get("message")
            if isinstance(status, int) and 400 <= status < 500 and status not in BUSY_STATUSES:
                raise Refused(f"{self.url}{path}: {message}", status, told.event) from told
            # The engine gave up midway, often because it is dying: as good as a cut stream.
            raise OutcomeUnknown(f"{self.url}{path}: the stream ended with an error: {message}") from told
        except NOT_OF_VLLM as error:
            raise self._nonsense(path, error) from error

    async def _models(self) -> dict[str, int | None]:
        """Longest context of each model by its name, the served model first."""
        answer = await self._json("GET", "/v1/models")
        with self._reading("/v1/models"):
            return {str(model["id"]): model.get("max_model_len") for model in answer["data"]}

    async def _max_sequences(self) -> int | None:
        """vLLM's --max-num-seqs, where its configuration comes as JSON."""
        path = "/server_info?config_format=json"
        info = await self._json("GET", path, timeout_s=max(self._timeout_s, SERVER_INFO_TIMEOUT_S))
        with self._reading(path):
            config = info["vllm_config"]
            return int(config["scheduler_config"]["max_num_seqs"]) if isinstance(config, dict) else None

    async def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        status, text = await self._call(method, path, body, timeout_s)
        if status != 200:
            raise _failure(self.url + path, status, text, None)
        with self._reading(path):
            return json.loads(text)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> tuple[int, str]:
        """Status and text of one exchange. Without `timeout_s` the client's own holds."""
        total_s = self._timeout_s if timeout_s is None else timeout_s
        timeout = aiohttp.ClientTimeout(total=None if total_s == math.inf else total_s, sock_connect=self._timeout_s)
        with self._reporting(path, sent=Retryable if method == "GET" else OutcomeUnknown):
            async with self._open_session().request(
                method, self.url + path, json=body, headers=self._headers, timeout=timeout
            ) as response:
                return response.status, await response.text(errors="replace")
        raise AssertionError("unreachable")

    @contextmanager
    def _reporting(self, path: str, sent: type[Retryable] | type[OutcomeUnknown]) -> Iterator[None]:
        """Network failures as ours: Retryable before the request was sent, `sent` once it may have arrived."""
        where = self.url + path
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
    def _reading(self, path: str) -> Iterator[None]:
        """An answer that does not look like vLLM's is Permanent."""
        try:
            yield
        except NOT_OF_VLLM as error:
            raise self._nonsense(path, error) from error

    def _nonsense(self, path: str, error: Exception) -> Permanent:
        return Permanent(f"{self.url}{path}: not an answer of {self.name}: {error!r}")


def parse_metrics(text: str) -> EngineMetrics:
    """vLLM's `/metrics`, summed over the engines of one server (data parallelism), with the mean of their KV usage.

    Raises ValueError or KeyError for a page that lacks any of them.
    """
    # Most of the page is histograms, which cost much to parse and say nothing here.
    wanted = "\n".join(line for line in text.splitlines() if line.startswith(_SAMPLES))
    values: dict[str, list[float]] = {}
    capacity_tokens, loaded_tokens = 0, None
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(sample.value)
            if sample.name == CACHE_CONFIG:
                capacity_tokens += int(sample.labels["block_size"]) * int(sample.labels["num_gpu_blocks"])
            elif sample.name == BY_SOURCE and sample.labels["source"] == EXTERNAL_SOURCE:
                loaded_tokens = (loaded_tokens or 0) + int(sample.value)
    return EngineMetrics(
        running=int(sum(values[RUNNING])),
        waiting=int(sum(values[WAITING])),
        kv_usage_fraction=sum(values[KV_USAGE]) / len(values[KV_USAGE]),
        kv_capacity_tokens=capacity_tokens,
        generation_tokens_total=int(sum(values[GENERATED])),
        prompt_tokens_total=int(sum(values[PROMPT])) - (loaded_tokens or 0),
        preemptions_total=int(sum(values[PREEMPTIONS])),
        loaded_tokens_total=loaded_tokens,
    )


def _asked(request: GenerationRequest) -> dict[str, Any]:
    """The body of an attempt."""
    body = {**request.body, "stream": True, "return_token_ids": True}
    if request.coalesce_tokens > 1:
        # Servers that do not know it ignore it.
        body.setdefault("stream_interval", request.coalesce_tokens)
    return body


def _failure(where: str, status: int, text: str, retry_after: str | None) -> OrchestrRLError:
    """An HTTP status that is not 200 as an error of ours, with the engine's own words."""
    try:
        body = json.loads(text)
        message = body["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = shorten(text, 300)
        body = {"error": {"message": message, "type": "error", "param": None, "code": status}}
    if status in BUSY_STATUSES or status >= 500:
        after_s = float(retry_after) if retry_after and retry_after.isdecimal() else RETRY_AFTER_S
        return Retryable(f"{where}: {status}: {message}", after_s)
    return Refused(f"{where}: {status}: {message}", status, body)
