"""The protocols that clients of inference engines implement.

Engines are a plug point: one module per product, registered in the entry-point group `orchestrrl.engines`. Every
implementation passes `orchestrrl/engines/conformance.py`. Implementations raise `Retryable` (the engine is unreachable
or busy), `Permanent` (the engine rejects the request) and `OutcomeUnknown` (the connection broke after the request was
sent).
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.core.operations import PauseMode
from orchestrrl.core.plug_points import PlugPoint
from orchestrrl.engines.serving import UNKNOWN_SERVING, ServingFacts


class CompletionEndpoint(StrEnum):
    """OpenAI's two completion endpoints, and vLLM's endpoint with tokens in the request and in the answer."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    GENERATE = "generate"


PATHS: Mapping[CompletionEndpoint, str] = {
    CompletionEndpoint.COMPLETIONS: "/v1/completions",
    CompletionEndpoint.CHAT: "/v1/chat/completions",
    CompletionEndpoint.GENERATE: "/inference/v1/generate",
}
# vLLM serves these with --enable-scale-out.
RENDER = "/v1/chat/completions/render"
DERENDER = "/v1/chat/completions/derender"


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """The features and limits that an engine reports. They are queried, never inferred from a version."""

    engine: str
    version: str
    models: tuple[str, ...]
    token_ids: bool = False
    abort_requests: bool = False
    pause: bool = False
    sleep: bool = False
    scale_elastic_ep: bool = False
    routed_experts: bool = False  # non-streamed answers include each token's experts; streamed ones do not
    max_model_len_tokens: int | None = None
    max_sequences: int | None = None
    serving: ServingFacts = UNKNOWN_SERVING
    paths: frozenset[str] = frozenset()  # paths of its HTTP API
    parses_chats: bool = False  # the client implements ChatParsingEngine


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One sample of an engine's metrics. Totals count from the engine's start. `prompt_tokens_total` excludes prompt
    tokens whose KV was loaded instead of computed. The agent adds `sampled_s`, `scrape_s` and `decode_tokens_per_s`
    (agent/watch.py)."""

    running: int
    waiting: int
    kv_usage_fraction: float  # 0..1
    kv_capacity_tokens: int  # 0: unknown
    generation_tokens_total: int
    prompt_tokens_total: int
    preemptions_total: int
    loaded_tokens_total: int | None = None  # prompt tokens whose KV was loaded; None: not reported
    server: str = ""  # globally unique identity of the server process; empty: unknown
    sampled_s: float = 0.0  # time of the scrape, by the agent's clock
    scrape_s: float = 0.0  # duration of the scrape
    decode_tokens_per_s: float | None = None  # None: first scrape, a counter decreased, or nothing was decoded


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probabilities of one generated token and of the requested alternatives to it."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    ranks: tuple[int | None, ...] = ()  # of the token and of each alternative; empty: not reported


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One attempt at a request on one engine. `body` is the body of the endpoint. Unless `verbatim` is True, it lacks
    `stream` and `return_token_ids`, which the engine client adds, and its `n` is absent or 1."""

    request_id: str  # unique per attempt; `abort` takes it
    endpoint: CompletionEndpoint
    body: Mapping[str, Any]
    coalesce_tokens: int = 1  # tokens per chunk, except the first and last, if the engine supports it
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # the client's; may include credentials
    verbatim: bool = False  # send the body unchanged; the answer arrives in `Chunk.answer` or `Chunk.event`


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an answer. The last chunk of a stream has a finish_reason. If a stream ends without such a chunk,
    `Engine.generate` raises OutcomeUnknown."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    prompt_token_ids: tuple[int, ...] | None = None  # in the first chunk
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token id, if requested
    finish_reason: str | None = None  # stop | length | abort | ...
    stop_reason: int | str | None = None
    raw: Mapping[str, Any] | None = None  # the engine's choice object, for fields that are only forwarded
    choice_fields: Mapping[str, Any] | None = None  # further fields of the choice object
    answer_fields: Mapping[str, Any] | None = None  # further fields of the object around the choice
    usage: Mapping[str, Any] | None = None  # the engine's usage object, in the last chunk
    answer: Mapping[str, Any] | None = None  # the whole answer to a verbatim request
    event: Mapping[str, Any] | None = None  # an event of the streamed answer to a verbatim request; {} in the last


class RequestRefused(Permanent):
    """The engine rejected the request. `status` is the HTTP status of the engine's answer, and `body` is the error
    object for the client."""

    def __init__(self, message: str, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class NoConnection(Retryable):
    """No connection could be opened because this process lacks file descriptors or memory. Nothing was sent."""


class ObservedEngine(Protocol):
    """A client that reads the state of one engine. Construction opens no connections. `close` releases all
    connections."""

    url: str

    async def capabilities(self) -> EngineCapabilities: ...

    async def metrics(self) -> EngineSample:
        """Return a sample of the engine's metrics. Raises Retryable if the engine is unreachable, and Permanent if its
        answer is not a metrics page."""
        ...

    async def healthy(self) -> bool:
        """Return whether the engine reports itself as healthy. Unlike `probe`, this method runs no completion."""
        ...

    async def probe(self) -> float:
        """Run a completion of one token and return its duration in seconds. Raises an OrchestrRLError if the completion
        fails."""
        ...

    async def close(self) -> None: ...


class Engine(ObservedEngine, Protocol):
    """A client that sends requests to one engine."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Send one request and yield the chunks of its answer. If the caller closes the iterator before a chunk with a
        finish_reason arrives, the connection is closed, which aborts the request on the engine."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort the attempts with these values of `GenerationRequest.request_id`. Unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode, *, drop_kv: bool = False) -> None:
        """Pause the engine. With mode KEEP, `drop_kv` discards all KV, including cached prefixes, so that the KV is
        computed again later. This is necessary if the weights change. The other modes always discard the KV."""
        ...

    async def resume(self) -> None: ...

    async def is_paused(self) -> bool: ...

    async def detokenize(self, token_ids: Sequence[int]) -> str: ...


class ChatParsingEngine(Protocol):
    """A client of an engine that parses complete answers to chats."""

    async def samples_plainly(self, body: Mapping[str, Any]) -> bool:
        """Return whether the engine samples the answer to the chat `body` like a completion of the chat's tokens, that
        is, without a grammar for tool calls and without stop tokens of its own."""
        ...

    async def parse_chat(
        self, body: Mapping[str, Any], prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> Mapping[str, Any]:
        """Return the message of the complete answer `token_ids` to the chat `body`. `token_ids` must not be empty, and
        excludes the token that stopped the answer."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The version and checksum of an engine's weights. `sum` has the form `ALGORITHM:HEX`, and is empty if no checksum
    was computed. Engines with the same layout that load the same bytes by the same method have equal checksums."""

    version: int
    sum: str = ""
    is_read_back: bool = False  # the checksum covers the weights in the engine's memory, not the loaded bytes


class WeightsEngine(Protocol):
    """Loads weights into one engine over the connections of the engine's client. During a load the engine must have no
    running requests; frozen requests are allowed. A load discards the KV of the old weights."""

    async def load_weights(self, folder: Path | str, version: int, known_sum: str | None = "") -> LoadedWeights:
        """Load a checkpoint from a folder on the engine's host, discard all KV, and set the version. Afterwards the
        engine is paused only if it was paused before. `known_sum` is the folder's checksum, or "" if the checksum is
        not known yet. If `known_sum` is None, no checksum is required, and the engine need not support setting a
        version.

        If the load fails, Retryable or Permanent is raised if the engine still has its old weights, and OutcomeUnknown
        if it may have other weights or a mixture of two versions. After OutcomeUnknown, the engine stays paused until a
        load succeeds.
        """
        ...

    async def takes_sums(self) -> bool:
        """Return whether a load without a known checksum computes the folder's checksum in this process, while requests
        are frozen. The call also caches the information about the engine that a load needs. It changes nothing on the
        engine."""
        ...

    async def loaded(self) -> LoadedWeights | None:
        """Return the weights that the engine reports, or None if it reports no version, for example after a restart."""
        ...

    async def continue_greedily(self, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` tokens that the engine generates greedily after the prompt, ignoring end-of-text. A
        paused engine runs for this request and is paused again afterwards, even if the request fails."""
        ...


def weights_engine(engine: ObservedEngine) -> WeightsEngine:
    """Return the client's interface for loading weights (`weights`). Raises Permanent if the engine product cannot load
    weights while it is running."""
    weights: WeightsEngine | None = getattr(engine, "weights", None)
    if weights is None:
        raise Permanent(f"{engine.url}: {type(engine).__name__} does not support loading weights while running")
    return weights


@dataclass(frozen=True, slots=True)
class TransferEnds:
    """The receiving side of a direct weight transfer from a trainer: the engine's transfer backend and the number of
    its workers."""

    backend: str  # empty: the engine was started without one
    workers: int


class TransferEngine(Protocol):
    """Transfers weights from a trainer's process into one engine with the product's own mechanism. The engine must be
    paused when `start` is called, and stays paused. Between `start` and `finish`, the engine reports no version. If a
    method fails after the call of `start`, it raises Permanent or Retryable if the engine is unchanged, and
    OutcomeUnknown if the engine may have changed."""

    async def ends(self) -> TransferEnds: ...

    async def join(self, init_info: Mapping[str, Any], within_s: float) -> None:
        """Connect the engine's workers to the trainer, which connects at the same time."""
        ...

    async def start(self) -> None: ...

    async def update(self, update_info: Mapping[str, Any] | Sequence[Any], within_s: float) -> None:
        """Receive the weights that the trainer sends during this call."""
        ...

    async def finish(self, version: int, within_s: float) -> None:
        """End the transfer and set the engine's version."""
        ...

    async def begin(self) -> None:
        """Begin a transfer that does not use the product's own mechanism. In such a transfer, `call_workers` calls a
        method of every worker, and `end` replaces `finish`."""
        ...

    async def call_workers(self, method: str, arguments: Sequence[Any], within_s: float) -> None: ...

    async def end(self, version: int) -> None: ...


def transfer_engine(engine: Engine) -> TransferEngine:
    """Return the client's interface for weight transfers from a trainer (`transfers`). Raises Permanent if the engine
    product does not support such transfers."""
    transfers: TransferEngine | None = getattr(engine, "transfers", None)
    if transfers is None:
        raise Permanent(f"{engine.url}: {type(engine).__name__} does not support weight transfers from a trainer")
    return transfers


ENGINES = PlugPoint(
    "engine",
    "orchestrrl.engines",
    {
        "vllm": "orchestrrl.engines.vllm:VllmEngine",
        "simulated": "orchestrrl.lab.simulated_engine.client:SimulatedEngine",
    },
)


def connect(name: str, url: str, **options: Any) -> Engine:
    """Return a client for an engine of the product `name` at `url`. Raises Permanent, listing the known products, if
    `name` is unknown."""
    engine: Engine = ENGINES.load(name)(url, **options)
    return engine


@dataclass(frozen=True, slots=True)
class ReportedLayout:
    """The parallel layout that an engine reports. A field is None if the engine does not report it."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: bool | None = None  # experts are spread over its ranks

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "DP": self.dp, "EP": self.ep}
        return " ".join(f"{name}={value}" for name, value in sizes.items() if value is not None) or "unknown"


@dataclass(frozen=True, slots=True)
class AnswerExcerpt:
    """The tokens `token_ids` that one engine generated greedily after `prompt_ids`, with the natural logarithm of each
    token's probability."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class ManagedEngine(ObservedEngine, Protocol):
    """A client for an engine that a redeployment starts. It reads the layout and the weight version, compares the
    engine's answers with those of earlier engines, and puts the engine to sleep. It can also load weights
    (`weights_engine`). `capabilities` reports which features the engine supports. Methods of unsupported features raise
    Permanent. `managed_conformance.py` tests the protocol."""

    async def layout(self) -> ReportedLayout: ...

    async def weight_version(self) -> int | None:
        """Return the policy version that was last set for the weights. Return None if no version was set or the engine
        does not support versions."""
        ...

    async def name_weights(self, policy_version: int | None) -> None:
        """Set the policy version of the weights without changing the weights. None clears the version."""
        ...

    async def excerpt(self, prompt_ids: Sequence[int], tokens: int) -> AnswerExcerpt:
        """Return the engine's greedy continuation of up to `tokens` tokens, ignoring end-of-text."""
        ...

    async def score(self, excerpt: AnswerExcerpt) -> tuple[float, ...]:
        """Return the log-probabilities that this engine assigns to the tokens of another engine's excerpt."""
        ...

    async def sleep(self) -> None:
        """Free the GPU memory, keeping the weights in host memory for a quick `wake`. The engine must have no
        requests."""
        ...

    async def wake(self) -> None:
        """Load the weights back into GPU memory. The KV cache is empty afterwards."""
        ...

    async def asleep(self) -> bool: ...

    async def scale(self, dp: int) -> None:
        """Scale the engine to `dp` data-parallel replicas (elastic expert parallelism). The engine selects the GPUs
        itself."""
        ...


def connect_managed(product: str, url: str, timeout_s: float = 10.0) -> ManagedEngine:
    """Return a client for an engine of `product` at `url`. Raises Permanent if the product is unknown."""
    engine: ManagedEngine = ENGINES.load(product)(url, timeout_s=timeout_s)
    return engine
