"""The vLLM client for redeployments: layout, weights, comparison of answers, sleep, and elastic expert parallelism.

Each call to a control endpoint is one exchange, and each failure is raised as one of OrchestrRL's errors. If a call
fails after it may have changed the engine, it raises OutcomeUnknown, because vLLM does not roll back.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from orchestrrl.core.addresses import without_login
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable, shorten
from orchestrrl.engines import vllm_info
from orchestrrl.engines.base import AnswerExcerpt, EngineSample, ReportedLayout, RequestRefused
from orchestrrl.engines.exchange import RETRY_AFTER_S, ConnectionPool
from orchestrrl.engines.vllm_info import VllmServerInfo

# Large models take minutes. A caller with a shorter deadline cancels.
LOAD_TIMEOUT_S = 1_800.0
SLEEP_TIMEOUT_S = 300.0  # time to move the weights to CPU memory or back
SCALE_TIMEOUT_S = 1_800.0
SCALE_DRAIN_S = 120  # vLLM's own default
LOAD_NEEDS = frozenset({"/pause", "/resume", "/is_paused", "/is_sleeping", "/collective_rpc"})
LOADING = "loading"  # name of the weights from the start of a load until it has succeeded
UNNAMED = "default"  # vLLM's name of weights without a set version
NOT_BEGUN = frozenset({425, 429, 503})  # statuses of rejected calls; 503 to every call while the server is scaled


BUSY_STATUSES = frozenset({408, 425, 429})
# Errors from reading a document of an unexpected form.
NOT_OF_VLLM = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError)


class ManagedVllm:
    """The part of the vLLM client that redeployments and weight loads need. `timeout_s` limits the time to connect and
    the time of each call that specifies no timeout. Connections are opened when needed and released by `close`."""

    name = "vllm"  # product name

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self.where = without_login(self.url)  # for messages
        self.timeout_s = timeout_s
        self._known: tuple[str, VllmServerInfo] | None = None  # cached info, with the process's start time

    @cached_property
    def pool(self) -> ConnectionPool:
        """The connections to the server. Raises Permanent if the URL is invalid."""
        return ConnectionPool(self.url, connect_timeout_s=self.timeout_s)

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """Send a call and return the JSON answer. Raises Retryable if the server is unreachable or busy, Permanent if
        the answer is invalid (RequestRefused if the server rejects the call), and OutcomeUnknown if the call may have
        taken effect."""
        status, text = await self.exchange(method, path, body, timeout_s)
        if status != 200:
            raise failure(self.where + path, status, text, None)
        with self.reading(path):
            return json.loads(text)

    async def exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> tuple[int, str]:
        """Send a call and return the status and text of the answer. If there is no answer, raises OutcomeUnknown if a
        call other than GET was sent, and Retryable otherwise. Raises Permanent if the answer is not HTTP."""
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
        """Convert errors of the enclosed block, which reads an answer of `path`, into Permanent."""
        try:
            yield
        except NOT_OF_VLLM as error:
            raise self.nonsense(path, error) from error

    def nonsense(self, path: str, error: Exception) -> Permanent:
        return Permanent(f"{self.where}{path}: the answer is not one of {self.name}: {error!r}")

    async def as_started(self, page: str | None = None) -> VllmServerInfo:
        """Return the server's description, cached per server process because it takes seconds to read. If the process
        cannot be identified, the description is read at every call. `page` is the metrics page if the caller has just
        read it."""
        began = vllm_info.began_at(await self.metrics_page() if page is None else page)
        if began and self._known is not None and self._known[0] == began:
            return self._known[1]
        self._known = None
        description = await self.description()
        if began and began == vllm_info.began_at(await self.metrics_page()):  # else a new process may have answered
            self._known = began, description
        return description

    async def model(self) -> str:
        return next((str(model["id"]) for model in await self.served()), "")

    async def served(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models. Each entry has an `id`, and the first entry is the served model."""
        answer = await self.ask("GET", "/v1/models")
        with self.reading("/v1/models"):
            return [{**model, "id": str(model["id"])} for model in answer["data"]]

    async def metrics(self) -> EngineSample:
        page = await self.metrics_page()
        with self.reading("/metrics"):
            return vllm_info.parse_metrics(page)

    async def metrics_page(self) -> str:
        status, page = await self.exchange("GET", "/metrics")
        if status != 200:
            raise failure(f"{self.where}/metrics", status, page, None)
        return page

    async def _info(self) -> VllmServerInfo:
        answer = await self.ask("GET", vllm_info.PATH, timeout_s=max(self.timeout_s, vllm_info.TIMEOUT_S))
        with self.reading(vllm_info.PATH):
            return vllm_info.read_server_info(answer)

    async def description(self) -> VllmServerInfo:
        """Return the server's configuration and API features. If the server lacks /server_info, return only the API
        features."""
        features = await self._api()
        if "/server_info" not in features.paths:
            return features
        known = await self._info()
        after_prompt = features.derenders_after_prompt
        return replace(known, paths=features.paths, token_ids=features.token_ids, derenders_after_prompt=after_prompt)

    async def _api(self) -> VllmServerInfo:
        """Return the server's API features."""
        api = await self.ask("GET", "/openapi.json")
        with self.reading("/openapi.json"):
            schemas = api.get("components", {}).get("schemas", {})
            completion, derender = (
                schemas.get(name, {}).get("properties", {}) for name in ("CompletionRequest", "DerenderChatRequest")
            )
            return VllmServerInfo(
                paths=frozenset(api["paths"]),
                token_ids="return_token_ids" in completion,
                derenders_after_prompt="prompt_token_ids" in derender,
            )

    async def layout(self) -> ReportedLayout:
        info = await self.description()
        return ReportedLayout(info.serving.tp, info.serving.pp, info.replicas, info.serving.ep)

    # --- weights

    async def weight_version(self) -> int | None:
        name = await self.weight_name()
        return int(name) if name.isdecimal() else None

    async def weight_name(self) -> str:
        answer = await self._if_offered("/weight_info")
        with self.reading("/weight_info"):
            return UNNAMED if answer is None else str(answer["weight_version"])

    async def name_weights(self, policy_version: int | None) -> None:
        """Set the policy version of the weights. Does nothing if the server does not support versions."""
        if "/update_weight_version" in (await self._api()).paths:
            await self.set_weight_name(UNNAMED if policy_version is None else str(policy_version))

    @asynccontextmanager
    async def loading(self, source: object, name: str, *, takes_names: bool) -> AsyncIterator[str]:
        """Pause the engine and discard its KV, so that the enclosed block can load `source`. Yields the name of the old
        weights. After the block, set `name` for the new weights if `takes_names` is True, and resume the engine if it
        was running before. If the block raises Retryable or Permanent, the old name and state are restored."""
        was_paused, renamed = await self.is_paused(), False
        before = await self.weight_name() if takes_names else UNNAMED
        try:
            await self.pause_without_kv()
            if takes_names:  # during the load, the old name would be wrong
                await self.set_weight_name(LOADING)
                renamed = True
            yield before
        except (Retryable, Permanent) as error:
            try:
                await self._leave(before if renamed else None, was_paused)
            except OrchestrRLError as another:
                raise OutcomeUnknown(
                    f"{error}; the engine may still be paused, because its state could not be restored: {another}"
                ) from error
            raise
        try:
            await self._leave(name if renamed else None, was_paused)
        except OrchestrRLError as error:
            raise OutcomeUnknown(f"{self.where}: loaded {source}, but a later step failed: {error}") from error

    async def _leave(self, name: str | None, stays_paused: bool) -> None:
        if name is not None:
            await self.set_weight_name(name)
        await self.resume_if(not stays_paused)

    async def pause_without_kv(self) -> None:
        """Pause the engine so that vLLM discards all KV, including cached prefixes, even if the engine was already
        paused."""
        await self.order("/pause?mode=keep")

    async def check_load(self, needed: Set[str], paths: Set[str], page: str | None = None) -> None:
        """Raise Permanent if the server is asleep or lacks a path in `needed`. `paths` are the paths of its API. `page`
        is the metrics page if the caller has just read it."""
        if missing := needed - paths:
            raise Permanent(
                f"{self.where}: cannot load weights without the endpoints {', '.join(sorted(missing))}; start the"
                " server with VLLM_SERVER_DEV_MODE=1"
            )
        if await self.asleep(page):
            raise Permanent(f"{self.where}: is asleep; wake it before loading weights")

    async def reload(self, source: str) -> None:
        """Load weights with vLLM's own `reload_weights`. Raises OutcomeUnknown if the call fails, because the server
        then crashes at its next step or answers with partly loaded weights."""
        path, order = "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": source}}
        status, text = await self.exchange("POST", path, order, timeout_s=LOAD_TIMEOUT_S)
        if status != 200:
            raise OutcomeUnknown(
                f"{self.where}: failed to load {source}: {failure(path, status, text, None)}; the engine is paused and"
                " may have loaded only part of the weights; check that the server can read this path"
            )

    async def set_weight_name(self, name: str) -> None:
        await self.order("/update_weight_version", {"new_version": name})

    async def is_paused(self) -> bool:
        answer = await self.ask("GET", "/is_paused")
        with self.reading("/is_paused"):
            return bool(answer["is_paused"])

    async def resume_if(self, wanted: bool) -> None:
        if wanted:
            await self.order("/resume")

    # --- comparison of answers

    async def excerpt(self, prompt_ids: Sequence[int], tokens: int) -> AnswerExcerpt:
        choice = await self._greedy(prompt_ids, {**_going_on(tokens), "logprobs": 0})
        with self.reading("/v1/completions"):
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if len(ids) != len(logprobs) or not 0 < len(ids) <= tokens:
                raise ValueError(
                    f"the response must have 1 to {tokens} tokens, each with a log-probability, got {len(ids)} tokens"
                    f" and {len(logprobs)} log-probabilities"
                )
            return AnswerExcerpt(tuple(prompt_ids), tuple(map(int, ids)), tuple(map(float, logprobs)))

    async def go_on(self, prompt_ids: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Return up to `tokens` tokens that the engine generates greedily after the prompt. Log-probabilities are not
        requested, because vLLM compiles code at the first request for them, which takes seconds."""
        choice = await self._greedy(prompt_ids, _going_on(tokens))
        with self.reading("/v1/completions"):
            ids = tuple(map(int, choice["token_ids"]))
            if not 0 < len(ids) <= tokens:
                raise ValueError(f"the response must have 1 to {tokens} tokens, got {len(ids)}")
            return ids

    async def score(self, excerpt: AnswerExcerpt) -> tuple[float, ...]:
        read = [*excerpt.prompt_ids, *excerpt.token_ids]
        # vLLM does not use cached prefixes for a request with prompt_logprobs.
        choice = await self._greedy(read, {"max_tokens": 1, "prompt_logprobs": 0})
        with self.reading("/v1/completions"):
            listed = choice["prompt_logprobs"]
            if len(listed) != len(read):
                raise ValueError(
                    f"prompt_logprobs must have one entry for each of {len(read)} tokens, got {len(listed)}"
                )
            first = len(excerpt.prompt_ids)
            return tuple(
                float(listed[place][str(token)]["logprob"]) for place, token in enumerate(excerpt.token_ids, first)
            )

    async def probe(self) -> float:
        started_s = time.monotonic()
        await self._greedy([0], {"max_tokens": 1})
        return time.monotonic() - started_s

    async def _greedy(self, prompt_ids: Sequence[int], asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the single choice of a greedy completion. `asked` are the further fields of the request's body. An
        unknown outcome is raised as Retryable, because a completion can be repeated safely."""
        path = "/v1/completions"
        body = {"model": await self.model(), "prompt": list(prompt_ids), "temperature": 0, **asked}
        try:
            answer = await self.ask("POST", path, body)
        except OutcomeUnknown as error:
            raise Retryable(str(error), RETRY_AFTER_S) from error
        with self.reading(path):
            (choice,) = answer["choices"]
            if choice["finish_reason"] not in ("length", "stop"):
                raise Retryable(
                    f"{self.where}{path}: the response must have finish_reason length or stop, got"
                    f" {shorten(choice['finish_reason'])}",
                    RETRY_AFTER_S,
                )
            found: dict[str, Any] = choice
            return found

    # --- sleep

    async def sleep(self) -> None:
        await self.check_sleep()
        if await self.asleep():
            return
        if (now := await self.metrics()).running or now.waiting:
            raise Permanent(
                f"{self.where}: cannot sleep while it has {now.running + now.waiting} requests, which would be lost"
            )
        await self.order("/sleep?level=1", timeout_s=SLEEP_TIMEOUT_S)

    async def wake(self) -> None:
        await self.check_sleep()
        text = await self.order("/wake_up", timeout_s=SLEEP_TIMEOUT_S)
        with self.reading("/wake_up"):
            answer = json.loads(text or "{}")
            if answer.get("status") == "sleeping":
                raise OutcomeUnknown(f"{self.where}: /wake_up did not fully wake the engine, got {shorten(answer)}")

    async def asleep(self, page: str | None = None) -> bool:
        """Return whether the engine is asleep. `page` is the metrics page if the caller has just read it."""
        answer = await self._if_offered("/is_sleeping")
        with self.reading("/is_sleeping"):
            if answer is None or not answer["is_sleeping"]:
                return False
        # vLLM also reports a paused engine as sleeping.
        page = await self.metrics_page() if page is None else page
        with self.reading("/metrics"):
            return vllm_info.is_asleep(page)

    async def check_sleep(self) -> None:
        """Raise Permanent if the engine was started without sleep mode."""
        if not (await self.description()).sleep:
            raise Permanent(f"{self.where}: cannot sleep; start the server with --enable-sleep-mode")

    # --- elastic expert parallelism

    async def scale(self, dp: int) -> None:
        """Scale the engine to `dp` data-parallel replicas. Replicas to be removed are drained first, for at most vLLM's
        default drain time."""
        if not (await self.description()).elastic_ep:
            raise Permanent(f"{self.where}: cannot be scaled; start the server with --enable-elastic-ep")
        order = {"new_data_parallel_size": dp, "drain_timeout": SCALE_DRAIN_S}
        await self.order("/scale_elastic_ep", order, timeout_s=SCALE_TIMEOUT_S)
        if (has := (await self.layout()).dp) != dp:
            raise OutcomeUnknown(f"{self.where}: was scaled to DP={dp}, but reports DP={has}")

    async def _if_offered(self, path: str) -> Any | None:
        """Return the answer to a GET, or None if the server lacks the path."""
        try:
            return await self.ask("GET", path)
        except RequestRefused as refusal:
            if refusal.status in (404, 405):
                return None
            raise

    async def order(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> str:
        """Send a call that changes the engine, and return the text of the answer. Raises OutcomeUnknown if the call
        failed but may have taken effect in part."""
        status, text = await self.exchange("POST", path, body, timeout_s)
        if status == 200:
            return text
        error = failure(self.where + path, status, text, None)
        if status in NOT_BEGUN or not isinstance(error, Retryable):
            raise error
        raise OutcomeUnknown(str(error))


def _going_on(tokens: int) -> dict[str, Any]:
    # The model's generation_config.json may set a penalty.
    return {"max_tokens": tokens, "ignore_eos": True, "repetition_penalty": 1.0, "return_token_ids": True}


def failure(where: str, status: int, text: str, retry_after: str | None) -> OrchestrRLError:
    """Convert an HTTP status other than 200 into an OrchestrRL error with the engine's message."""
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
