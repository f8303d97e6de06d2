"""Fake engines without sockets: deterministic tokens, characters of several tokens, and many kinds of failure."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable
from orchestrrl.core.operations import EngineRoute, PauseMode
from orchestrrl.engines.base import (
    PATHS,
    Chunk,
    CompletionEndpoint,
    EngineCapabilities,
    EngineSample,
    GenerationRequest,
    RequestRefused,
    TokenLogprob,
)
from orchestrrl.gateway.core import Gateway, RequestGroup
from orchestrrl.gateway.http.completion_requests import CompletionRequest, read_completion_request
from orchestrrl.gateway.moves.movable import sampling_fields
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from planner.model import EngineId, NodeId
from tests.orchestrrl.gateway.stop_reference import ReferenceDetokenizer

# A token is a byte, so a character may need several; EOS ends an answer.
CHARACTERS = [character.encode() for character in "ab é€漢😀"]
EOS = 256
WORDS = {300: b"ab", 301: "ab漢a".encode()}  # tokens of several characters, which the model does not generate
MODEL_LENGTH = 4096


def next_token(context: Sequence[int], *, may_stop: bool) -> int:
    """Return the next token, a deterministic function of the whole context. Tokens form valid characters."""
    digest = hashlib.blake2b(b"".join(token.to_bytes(2, "big") for token in context), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    begun = _begun_character(context)
    if begun:
        choices = [character for character in CHARACTERS if character.startswith(begun) and character != begun]
        return choices[number % len(choices)][len(begun)]
    if may_stop and number % 61 == 0:
        return EOS
    return CHARACTERS[number % len(CHARACTERS)][0]


def _begun_character(context: Sequence[int]) -> bytes:
    """Return the trailing bytes that start a character without completing it."""
    for length in (3, 2, 1):
        tail = context[-length:]
        if len(tail) == length and all(token < 256 for token in tail):
            piece = bytes(tail)
            if any(character.startswith(piece) and character != piece for character in CHARACTERS):
                return piece
    return b""


def decode(tokens: Sequence[int]) -> str:
    pieces = [bytes((token,)) if token < 256 else WORDS.get(token, b"") for token in tokens]
    return b"".join(pieces).decode(errors="replace")


class DecodeStream:
    """A decoder with the behaviour of the tokenizers library. It withholds text while a character is incomplete. If it
    starts inside a character, it returns everything before as new text."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = list(prompt)
        text = decode(prompt)
        self._shown = "" if text.endswith("\ufffd") else text

    def step(self, token: int) -> str:
        self._tokens.append(token)
        text = decode(self._tokens)
        if len(text) <= len(self._shown) or text.endswith("\ufffd"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new


def undisturbed(prompt: Sequence[int], max_tokens: int, *, min_tokens: int = 0) -> tuple[list[int], str, str]:
    """Return the tokens, text and finish_reason of an undisturbed answer."""
    tokens: list[int] = []
    stream = DecodeStream(prompt)
    text = ""
    while True:
        token = next_token([*prompt, *tokens], may_stop=len(tokens) >= min_tokens)
        tokens.append(token)
        if token == EOS:
            return tokens, text, "stop"
        text += stream.step(token)
        if len(tokens) >= max_tokens:
            return tokens, text, "length"


def logprob_of(context: Sequence[int], token: int) -> TokenLogprob:
    value = -0.25 * (len(context) % 8)
    return TokenLogprob(f"<{token}>", value, ((f"<{token}>", value), (f"<{(token + 1) % 256}>", value - 1)))


def by_id(item: TokenLogprob) -> TokenLogprob:
    """Return the entry as the generate endpoint returns it: with token ids, and with ranks."""
    top = tuple((f"token_id:{token[1:-1]}", value) for token, value in item.top)
    return TokenLogprob(f"token_id:{item.token[1:-1]}", item.logprob, top, (*range(1, len(top) + 1), None))


@dataclass(slots=True)
class Attempt:
    request: GenerationRequest
    chunks: "asyncio.Queue[Chunk | Exception]"
    context: list[int]
    left: int
    min_left: int
    detokenizer: ReferenceDetokenizer
    told_prompt: bool = False
    answered: int = 0

    @property
    def textual(self) -> bool:
        body = self.request.body
        return self.request.endpoint is not CompletionEndpoint.GENERATE or body.get("output_mode") == "text"

    def text(self, *, ends: bool) -> str:
        news = self.detokenizer.news(ends=ends)
        return news if self.textual else ""


@dataclass
class FakeEngine:
    """A fake engine that generates `tokens_per_step` tokens for each of its requests at each call of `step`."""

    url: str = "fake"
    max_sequences: int = 1000
    tokens_per_step: int = 1
    dead: bool = False
    paused: bool = False
    can_pause: bool = True
    stuck: bool = False  # a resume fails
    pauses: list[bool] = field(default_factory=list)  # of each pause, whether KV was discarded
    hangs: bool = False
    refuses: RequestRefused | None = None
    aborted: list[str] = field(default_factory=list)
    seen: list[GenerationRequest] = field(default_factory=list)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    model_length: int | None = MODEL_LENGTH
    parses_chats: bool = False
    constrains: bool = False  # chats with tools have a grammar
    models: tuple[str, ...] = ("model",)
    routed_experts: bool = False  # only its non-streamed answers include them
    generate_endpoint: bool = True
    label: str = "default"  # of its weights

    # --- controls for tests ---

    def step(self) -> None:
        if self.dead or self.paused or self.hangs:
            return
        for attempt in list(self.attempts.values())[: self.max_sequences]:
            self._advance(attempt)

    def die(self) -> None:
        self.dead = True
        self._break_all(OutcomeUnknown("connection reset"))

    def revive(self) -> None:
        self.dead = False
        self.paused = False  # a new process

    def give_up_all(self) -> None:
        """Abort all requests, as a pause with mode ABORT does."""
        for attempt in self.attempts.values():
            attempt.chunks.put_nowait(Chunk(text=attempt.text(ends=True), finish_reason="abort"))
        self.attempts.clear()

    def _break_all(self, error: Exception) -> None:
        for attempt in self.attempts.values():
            attempt.chunks.put_nowait(error)
        self.attempts.clear()

    def _advance(self, attempt: Attempt) -> None:
        request = attempt.request
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        finish_reason, detokenizer = None, attempt.detokenizer
        while len(tokens) < self.tokens_per_step and finish_reason is None:
            token = next_token(attempt.context, may_stop=attempt.min_left <= 0)
            logprobs.append(logprob_of(attempt.context, token))
            attempt.context.append(token)
            tokens.append(token)
            attempt.left -= 1
            attempt.min_left -= 1
            detokenizer.add(None if token == EOS else token)
            if token == EOS or detokenizer.matched is not None:
                finish_reason = "stop"
            else:
                finish_reason = "length" if attempt.left == 0 else None
        prompt = None
        if not attempt.told_prompt:
            prompt = tuple(attempt.context[: len(attempt.context) - len(tokens)])
            attempt.told_prompt = True
        attempt.answered += len(tokens)
        wanted = sampling_fields(request.endpoint, request.body).get("logprobs")
        asked = wanted is not None and wanted is not False  # 0 requests those of the sampled tokens
        fields: dict[str, Any] = {}
        if request.endpoint is CompletionEndpoint.GENERATE:
            logprobs = logprobs if attempt.textual else [by_id(item) for item in logprobs]
            spans = [{"version": self.label, "start": 0, "end": attempt.answered}]
            fields = {"sampling_mask": [[token] for token in tokens]}
            fields |= {"weight_versions": spans} if finish_reason is not None else {}
        attempt.chunks.put_nowait(
            Chunk(
                token_ids=tuple(tokens),
                text=attempt.text(ends=finish_reason is not None),
                prompt_token_ids=prompt,
                logprobs=tuple(logprobs) if asked else None,
                finish_reason=finish_reason,
                stop_reason=detokenizer.matched,
                choice_fields=fields or None,
            )
        )
        if finish_reason is not None:
            del self.attempts[attempt.request.request_id]

    # --- the Engine protocol ---

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        self.seen.append(request)
        if self.dead:
            raise Retryable("connection refused", 1.0)
        if self.refuses is not None:
            raise self.refuses
        prompt = prompt_of(request)
        sampling = sampling_fields(request.endpoint, request.body)
        limit = sampling.get("max_tokens")
        if limit is None:
            limit = 16 if request.endpoint is CompletionEndpoint.COMPLETIONS else MODEL_LENGTH - len(prompt)
        assert limit >= 1
        attempt = Attempt(
            request,
            asyncio.Queue(),
            list(prompt),
            limit,
            sampling.get("min_tokens") or 0,
            ReferenceDetokenizer(sampling, DecodeStream(prompt).step),
        )
        self.attempts[request.request_id] = attempt
        try:
            while True:
                item = await attempt.chunks.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self.attempts.pop(request.request_id, None)

    async def abort(self, request_ids: Sequence[str]) -> None:
        if self.dead:
            raise Retryable("connection refused", 1.0)
        self.aborted.extend(request_ids)

    async def capabilities(self) -> EngineCapabilities:
        if self.dead:
            raise Retryable("connection refused", 1.0)
        return EngineCapabilities(
            "fake",
            "0",
            self.models,
            token_ids=True,
            max_model_len_tokens=self.model_length,
            pause=self.can_pause,
            routed_experts=self.routed_experts,
            paths=frozenset([PATHS[CompletionEndpoint.GENERATE]] * self.generate_endpoint),
            parses_chats=self.parses_chats,
            max_sequences=self.max_sequences,
        )

    async def metrics(self) -> EngineSample:
        return EngineSample(len(self.attempts), 0, 0.0, 0, 0, 0, 0)

    async def healthy(self) -> bool:
        return not self.dead

    async def probe(self) -> float:
        return 0.0

    async def pause(self, mode: PauseMode, *, drop_kv: bool = False) -> None:
        if self.dead:
            raise Retryable("connection refused", 1.0)
        assert self.can_pause
        assert mode is PauseMode.KEEP
        self.paused = True
        self.pauses.append(drop_kv)

    async def resume(self) -> None:
        if self.dead or self.stuck:
            raise Retryable("connection refused", 1.0)
        self.paused = False

    async def is_paused(self) -> bool:
        if self.dead:
            raise Retryable("connection refused", 1.0)
        if self.hangs and not self.paused:
            raise Permanent("no such path")
        return self.paused

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        if self.dead:
            raise Retryable("connection refused", 1.0)
        return decode(token_ids)

    async def samples_plainly(self, body: Mapping[str, Any]) -> bool:
        if self.dead:
            raise Retryable("connection refused", 1.0)
        return not self.constrains

    async def parse_chat(
        self, body: Mapping[str, Any], prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> Mapping[str, Any]:
        if self.dead:
            raise Retryable("connection refused", 1.0)
        return parsed(decode(token_ids))

    async def close(self) -> None:
        self._break_all(OutcomeUnknown("closed"))


def parsed(text: str) -> dict[str, Any]:
    """Return the message of an answer in which the words are tool calls, and the first word is content."""
    content, *names = text.split(" ")
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names if name]
    return {"role": "assistant", "content": content or None, "tool_calls": calls, "reasoning": None, "audio": None}


def prompt_of(request: GenerationRequest) -> list[int]:
    if request.endpoint is CompletionEndpoint.GENERATE:
        return list(request.body["token_ids"])
    if request.endpoint is CompletionEndpoint.CHAT:
        return chat_prompt(request.body["messages"])
    prompt = request.body["prompt"]
    return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)


def chat_prompt(messages: Sequence[dict[str, Any]]) -> list[int]:
    return list("".join(f"<{message['role']}>{message['content']}" for message in messages).encode())


class RunningGroup(RequestGroup):
    """A request group that runs in the background inside its `async with` block. Leaving the block cancels it."""

    _entered: asyncio.Event
    _running: "asyncio.Task[None]"

    @property
    def done(self) -> bool:
        """Return whether all answers have ended or one has failed."""
        return all(record.done for record in self.records) or self.failure is not None

    async def __aenter__(self) -> "RunningGroup":
        self._entered, self._running = asyncio.Event(), asyncio.create_task(self.run())
        entering = asyncio.create_task(self._entered.wait())
        await asyncio.wait({entering, self._running}, return_when=asyncio.FIRST_COMPLETED)
        entering.cancel()
        if self._running.done():
            self._running.result()
        return self

    async def _enter(self) -> None:
        await super()._enter()
        if hasattr(self, "_entered"):
            self._entered.set()

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        (outcome,) = await asyncio.gather(self._running, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome


class GatewayUnderTest(Gateway):
    def request_group(self, request: CompletionRequest, named_body: Mapping[str, Any] | None = None) -> RunningGroup:
        return RunningGroup(request, self, named_body)


@dataclass
class World:
    """A gateway before fake engines e0, e1, ... in virtual time."""

    gateway: GatewayUnderTest
    engines: dict[str, FakeEngine]
    clock: VirtualClock

    @property
    def fleet(self) -> EngineBackends:
        return self.gateway.fleet

    def ask(
        self, endpoint: CompletionEndpoint = CompletionEndpoint.COMPLETIONS, request_id: str = "r", **body: Any
    ) -> CompletionRequest:
        return read_completion_request(
            endpoint, body, request_id=request_id, group="", tag="", default_model="model", now_s=self.clock.now_s()
        )

    async def settle(self) -> None:
        """Run all ready tasks without advancing the clock."""
        await self.clock.advance(0.0)
        await self.clock.advance(0.0)

    async def step(self, *names: str) -> None:
        for name in names or self.engines:
            self.engines[name].step()
        await self.settle()


def beside(w: World) -> World:
    """Return another gateway before the same engines."""
    by_url = {fake.url: fake for fake in w.engines.values()}
    fleet = EngineBackends(lambda url: by_url[url], clock=w.clock)
    fleet.set_routes([EngineRoute(EngineId(name), fake.url) for name, fake in w.engines.items()])
    return World(GatewayUnderTest(NodeId("other"), fleet, limits=RelayLimits()), w.engines, w.clock)


def world(engines: int = 2, **limits: Any) -> World:
    clock = VirtualClock(1000.0)
    fakes = {f"e{index}": FakeEngine(url=f"http://e{index}") for index in range(engines)}
    by_url = {fake.url: fake for fake in fakes.values()}
    fleet = EngineBackends(lambda url: by_url[url], clock=clock)
    fleet.set_routes([EngineRoute(EngineId(name), fake.url) for name, fake in fakes.items()])
    gateway = GatewayUnderTest(NodeId("gateway"), fleet, limits=RelayLimits(**limits))
    return World(gateway, fakes, clock)
