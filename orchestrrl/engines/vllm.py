"""The client of a vLLM server. It requests tokens from the server's OpenAI endpoints and from its generate endpoint. It
controls the server over its development endpoints.

Features are detected from `/openapi.json`, never inferred from a version. `/pause`, `/abort_requests` and
`/server_info` exist only with VLLM_SERVER_DEV_MODE=1. Without these endpoints, an attempt is aborted by closing its
connection.
"""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import (
    DERENDER,
    PATHS,
    RENDER,
    Chunk,
    CompletionEndpoint,
    EngineCapabilities,
    GenerationRequest,
    RequestRefused,
)
from orchestrrl.engines.exchange import EngineConnection, EngineExchange
from orchestrrl.engines.forwarding import ForwardedRequest
from orchestrrl.engines.generate_chunks import parse_generate_chunk
from orchestrrl.engines.openai_chunks import (
    DONE,
    ChunkReader,
    ParseChunk,
    ServerSentEvents,
    StreamError,
    parse_chunk,
    parse_event,
)
from orchestrrl.engines.serving import named
from orchestrrl.engines.vllm_managed import BUSY_STATUSES, NOT_OF_VLLM, ManagedVllm, failure
from orchestrrl.engines.vllm_weights import VllmWeights

# The ids that vLLM derives from `X-Request-Id: x`. It ignores unknown ids, so all forms are sent.
ENGINE_ID_FORMS = ("cmpl-{}-0", "chatcmpl-{}", "generate-tokens-{}")

USAGE_WITHIN_S = 1.0  # after an answer's last token


class VllmEngine(ManagedVllm):
    """A client of the vLLM server at `url`. `timeout_s` limits the time to connect and the time of control calls, but
    not the duration of streams."""

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        super().__init__(url, timeout_s=timeout_s)
        self.weights = self.transfers = VllmWeights(self)
        self._attempts: dict[str, EngineExchange] = {}  # requests in flight

    async def capabilities(self) -> EngineCapabilities:
        info = await self.description()
        paths = info.paths
        version = (await self.ask("GET", "/version")).get("version", "") if "/version" in paths else ""
        served = await self.served()
        main = next(iter(served), {})
        model = named(main.get("root")) or info.serving.model or named(main.get("id"))
        return EngineCapabilities(
            engine=self.name,
            version=version,
            models=tuple(str(each["id"]) for each in served),
            token_ids=info.token_ids,
            abort_requests="/abort_requests" in paths,
            pause={"/pause", "/resume", "/is_paused"} <= paths,
            parses_chats={RENDER, DERENDER} <= paths and info.derenders_after_prompt,
            routed_experts=info.routed_experts,
            sleep=info.sleep and {"/sleep", "/wake_up"} <= paths,
            scale_elastic_ep=info.elastic_ep and "/scale_elastic_ep" in paths,
            max_model_len_tokens=main.get("max_model_len"),
            max_sequences=info.max_sequences,
            serving=replace(info.serving, model=model),
            paths=paths,
        )

    async def healthy(self) -> bool:
        try:
            status, _ = await self.exchange("GET", "/health")
        except OrchestrRLError:
            return False
        return status == 200

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        path = PATHS[request.endpoint]
        asked = request.body if request.verbatim else _request_body(request)
        body = json.dumps(asked, separators=(",", ":"), allow_nan=False).encode()
        headers = [("X-Request-Id", request.request_id), *request.headers]
        exchange = self._attempts[request.request_id] = self.pool.exchange(path, body, headers)
        finished = False
        try:
            connection = await exchange.begin()
            if connection.status != 200:
                text = (await connection.read_all()).decode(errors="replace")
                exchange.leave()
                raise failure(self.where + path, connection.status, text, connection.headers.get("retry-after"))
            streamed = connection.headers.get("content-type", "").startswith("text/event-stream")
            if request.verbatim and not streamed:
                chunks = self._whole(path, connection)
            elif request.verbatim and request.body.get("stream"):
                chunks = self._events(path, connection)
            else:
                parse: ParseChunk = parse_chunk
                if request.endpoint is CompletionEndpoint.GENERATE:
                    parse = partial(parse_generate_chunk, text=request.body.get("output_mode") == "text")
                chunks = self._chunks(path, connection, ChunkReader(parse))
            async with aclosing(chunks):
                async for chunk in chunks:
                    exchange.answered = True
                    finished = finished or chunk.finish_reason is not None
                    yield chunk
            if not finished:
                raise OutcomeUnknown(
                    f"{self.where}{path}: the stream of request {request.request_id} ended without a finish_reason"
                )
        except OutcomeUnknown:
            if not exchange.closed:
                raise
            yield Chunk(finish_reason="abort")
        finally:
            self._attempts.pop(request.request_id, None)
            if finished:
                exchange.leave()
            else:
                exchange.close()

    def forward(self, request: ForwardedRequest) -> EngineExchange:
        method, content_type = request.method, request.content_type
        return self.pool.exchange(
            request.target, request.body, request.headers, method=method, content_type=content_type
        )

    async def _chunks(self, path: str, connection: EngineConnection, reader: ChunkReader) -> AsyncGenerator[Chunk]:
        """Yield the chunks of a streamed answer. The last chunk is held for up to `USAGE_WITHIN_S`, until the engine's
        usage object has arrived."""
        events = ServerSentEvents()
        begun, last = False, None
        while data := await _read(connection, within_s=None if last is None else USAGE_WITHIN_S):
            with self.reading(path):
                received, at = events.feed(data), 0
            while at < len(received):
                if received[at] == DONE:
                    at += 1
                    # vLLM omits the last chunk of a request that was aborted before its first token.
                    if last is None and not begun:
                        last = Chunk(finish_reason="abort")
                    if last is not None:
                        yield last
                        return
                    continue
                with self._raising(path):
                    chunk, at = reader.read_on(received, at)
                if chunk is None:
                    continue
                if last is not None:
                    last = _completed(last, chunk)
                elif chunk.finish_reason is not None:
                    last = chunk
                else:
                    begun = begun or bool(chunk.token_ids)
                    yield chunk
        if last is not None:
            yield last

    async def _whole(self, path: str, connection: EngineConnection) -> AsyncGenerator[Chunk]:
        """Yield one chunk that contains the whole answer, which is a single JSON document."""
        text = await connection.read_all()
        with self.reading(path):
            answer = json.loads(text)
            reasons = [choice["finish_reason"] for choice in answer["choices"]]
        yield Chunk(finish_reason="abort" if "abort" in reasons else (reasons or [None])[-1] or "stop", answer=answer)

    async def _events(self, path: str, connection: EngineConnection) -> AsyncGenerator[Chunk]:
        """Yield one chunk for each event of a streamed answer, without changing the events."""
        events, finish_reason = ServerSentEvents(), None
        while data := await connection.read():
            with self.reading(path):
                received = events.feed(data)
            for each in received:
                if each == DONE:
                    yield Chunk(finish_reason=finish_reason or "abort", event={})
                    return
                with self._raising(path):
                    event = parse_event(each)
                    reasons = [choice.get("finish_reason") for choice in event["choices"]]
                finish_reason = next((reason for reason in reasons if reason), finish_reason)
                if finish_reason != "abort":
                    yield Chunk(event=event)
        if finish_reason is not None:
            yield Chunk(finish_reason=finish_reason, event={})

    async def abort(self, request_ids: Sequence[str]) -> None:
        # An attempt without an answer may still be unknown to the engine, so abort_requests might miss it.
        known = []
        for request_id in request_ids:
            attempt = self._attempts.get(request_id)
            if attempt is not None and not attempt.answered:
                attempt.close()
            else:
                known.append(request_id)
        if not known:  # vLLM reads an empty list as "abort everything"
            return
        engine_ids = [form.format(request_id) for request_id in known for form in ENGINE_ID_FORMS]
        try:
            await self.ask("POST", "/abort_requests", {"request_ids": engine_ids})
        except RequestRefused as refusal:
            if refusal.status not in (404, 405):
                raise
            for request_id in known:
                if request_id in self._attempts:
                    self._attempts[request_id].close()

    async def pause(self, mode: PauseMode, *, drop_kv: bool = False) -> None:
        # WAIT returns when the running requests have finished, which has no bound.
        timeout_s = math.inf if mode is PauseMode.WAIT else None
        # By default vLLM discards the KV of frozen requests and prefills it again later.
        clear = "&clear_cache=false" if mode is PauseMode.KEEP and not drop_kv else ""
        await self.ask("POST", f"/pause?mode={mode.value}{clear}", timeout_s=timeout_s)

    async def resume(self) -> None:
        await self.ask("POST", "/resume")

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        answer = await self.ask("POST", "/detokenize", {"tokens": list(token_ids)})
        with self.reading("/detokenize"):
            return str(answer["prompt"])

    async def samples_plainly(self, body: Mapping[str, Any]) -> bool:
        answer = await self.ask("POST", RENDER, body)
        with self.reading(RENDER):
            sampling = answer["sampling_params"]
            added = set(sampling.get("stop_token_ids") or ()) - set(body.get("stop_token_ids") or ())
            return sampling.get("structured_outputs") is None and not added

    async def parse_chat(
        self, body: Mapping[str, Any], prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> Mapping[str, Any]:
        prompt = list(prompt_ids)
        choice = {"index": 0, "token_ids": list(token_ids)}
        generated = {"request_id": "moved", "choices": [choice], "prompt_token_ids": prompt}
        asked = {"chat_request": body, "generate_response": generated, "prompt_token_ids": prompt}
        answer = await self.ask("POST", DERENDER, asked)
        with self.reading(DERENDER):
            message = dict(answer["choices"][0]["message"])
            content, calls = message.get("content"), message.get("tool_calls") or ()
            if not isinstance(content, str | None) or not all(isinstance(call, dict) for call in calls):
                raise ValueError("the content must be text, and the tool calls a list of objects")
        return message

    @contextmanager
    def _raising(self, path: str) -> Iterator[None]:
        """Convert errors that the enclosed block raises, for error events and malformed events, into OrchestrRL's
        errors."""
        try:
            yield
        except StreamError as failed:
            status, message = failed.error.get("code"), failed.error.get("message")
            if isinstance(status, int) and 400 <= status < 500 and status not in BUSY_STATUSES:
                raise RequestRefused(f"{self.where}{path}: {message}", status, failed.event) from failed
            # The engine failed during the stream, often because it is dying: treated as a broken stream.
            raise OutcomeUnknown(f"{self.where}{path}: the stream ended with an error: {message}") from failed
        except NOT_OF_VLLM as error:
            raise self.nonsense(path, error) from error


def _request_body(request: GenerationRequest) -> dict[str, Any]:
    """Return the body of an attempt, with the fields that make the engine stream the answer with usage and token
    ids."""
    options = {"include_usage": True}
    body = {**request.body, "stream": True, "stream_options": options, "return_token_ids": True}
    if request.coalesce_tokens > 1:
        # Servers without this field ignore it.
        interval = {"stream_interval": request.coalesce_tokens}
        if request.endpoint is CompletionEndpoint.GENERATE:
            body["sampling_params"] = interval | body["sampling_params"]
        else:
            body = interval | body
    return body


async def _read(connection: EngineConnection, *, within_s: float | None) -> bytes:
    """Return the next bytes of the answer, or b"" if the answer has ended. If `within_s` is given, also return b"" if
    nothing arrives within this time or the connection fails."""
    if within_s is None:
        return await connection.read()
    try:
        async with asyncio.timeout(within_s):
            return await connection.read()
    except (TimeoutError, OrchestrRLError):
        return b""


def _completed(last: Chunk, closing: Chunk) -> Chunk:
    """Return the chunk `last` with the usage and the answer's further fields from `closing`, the chunk that follows
    it."""
    fields = {**(last.answer_fields or {}), **(closing.answer_fields or {})}
    return replace(last, usage=closing.usage or last.usage, answer_fields=fields or None)
