"""What OrchestrRL asks of an inference engine, over whatever protocol the engine speaks.

A plug point: one module per engine, registered in the entry-point group `orchestrrl.engines`. Every implementation
passes `orchestrrl/engines/conformance.py`. Implementations raise `Retryable` (refused, busy), `Permanent` (the engine
says the request is wrong) and `OutcomeUnknown` (the connection broke after the request had been sent).
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
    """OpenAI's two ways to ask for tokens."""

    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine was found to offer; asked, never assumed from a version."""

    engine: str
    version: str
    models: tuple[str, ...]
    token_ids: bool = False
    abort_requests: bool = False
    pause: bool = False
    sleep: bool = False
    scale_elastic_ep: bool = False
    routed_experts: bool = False  # whole answers have each token's experts, and streamed ones do not
    max_model_len_tokens: int | None = None
    max_sequences: int | None = None
    serving: ServingFacts = UNKNOWN_SERVING


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One reading of an engine's metrics. Totals are counters since the engine's start; prompt tokens that were loaded
    do not count as such. The agent that takes it adds the times and the rate (agent/watch.py)."""

    running: int
    waiting: int
    kv_usage_fraction: float  # 0..1
    kv_capacity_tokens: int  # 0: the engine does not tell
    generation_tokens_total: int
    prompt_tokens_total: int
    preemptions_total: int
    loaded_tokens_total: int | None = None  # prompt tokens whose KV came from elsewhere; None: it does not say
    server: str = ""  # identifies the server's process among those of all hosts; empty: nothing does
    sampled_s: float = 0.0  # when it was asked for, by the agent's clock
    scrape_s: float = 0.0  # that the answer took
    decode_tokens_per_s: float | None = None  # None: first scrape, a counter went back, nothing was to be decoded


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one generated token, with the alternatives that were asked for."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One attempt at a request on one engine. `body` is the OpenAI body without `stream` and `return_token_ids`,
    which the engine client sets itself; `n` in it is absent or 1."""

    request_id: str  # unique per attempt: names it for `abort`
    endpoint: CompletionEndpoint
    body: Mapping[str, Any]
    coalesce_tokens: int = 1  # this many tokens in a chunk, but for the first and the last, where the engine can
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # of the client, credentials among them
    verbatim: bool = False  # send the body unchanged; the answer comes in `Chunk.answer` or `Chunk.event`


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some newly generated tokens. The last chunk of a stream has a finish_reason; a stream that ends without one
    was cut (the implementation raises OutcomeUnknown instead of ending silently)."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    prompt_token_ids: tuple[int, ...] | None = None  # with the first chunk
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token id, when asked for
    finish_reason: str | None = None  # stop | length | abort | ...
    stop_reason: int | str | None = None
    raw: Mapping[str, Any] | None = None  # the engine's own choice object, for fields that are only passed on
    choice_fields: Mapping[str, Any] | None = None  # other fields of its choice object
    answer_fields: Mapping[str, Any] | None = None  # other fields of the object around the choice
    usage: Mapping[str, Any] | None = None  # the engine's own, with the last chunk
    answer: Mapping[str, Any] | None = None  # the whole answer to a verbatim request
    event: Mapping[str, Any] | None = None  # an event of the streamed answer to one; empty with the last


class RequestRefused(Permanent):
    """The engine answered that the request is wrong: its HTTP status, and its own error object to pass on."""

    def __init__(self, message: str, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class NoConnection(Retryable):
    """Nothing was sent, for want of connections on this side: files or memory have run out. The engine is as it was."""


class ObservedEngine(Protocol):
    """A client of one engine that reads how it is. Construction opens nothing; `close` releases connections."""

    url: str

    async def capabilities(self) -> EngineCapabilities: ...

    async def metrics(self) -> EngineSample:
        """Raises Retryable when the engine cannot be reached, Permanent when it answers something else than metrics."""
        ...

    async def healthy(self) -> bool:
        """The engine's own word; see `probe` for the proof."""
        ...

    async def probe(self) -> float:
        """Seconds that a real completion of one token took; raises when it failed."""
        ...

    async def close(self) -> None: ...


class Engine(ObservedEngine, Protocol):
    """A client of one engine that sends it requests."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Stream one request. Closing the iterator before a chunk with a finish_reason closes the connection, which
        aborts it on the engine."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these attempts, named as in GenerationRequest; unknown ones are ignored."""
        ...

    async def pause(self, mode: PauseMode, *, drop_kv: bool = False) -> None:
        """`drop_kv`: what it keeps loses its KV, cached prefixes included, and has it computed again later, as is due
        where the weights change meanwhile. The other modes drop what is left in any case."""
        ...

    async def resume(self) -> None: ...

    async def is_paused(self) -> bool: ...

    async def detokenize(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The weights that an engine has. `sum` names its algorithm before a colon, and is equal wherever an engine of one
    layout took the same bytes in the same way; empty where nobody took it."""

    version: int
    sum: str = ""
    is_read_back: bool = False  # the sum is of what the engine holds, not of what it was given


class WeightsEngine(Protocol):
    """The weights of one engine, over the connections of its client. The engine has no requests meanwhile, or they are
    frozen; its KV is dropped with the weights that it was computed under."""

    async def load_weights(self, folder: Path | str, version: int, known_sum: str | None = "") -> LoadedWeights:
        """Have it load a checkpoint, in a folder of its machine, drop all KV, and name the weights after the version.
        Afterwards it is paused where it was before. `known_sum`: of what is in the folder, where that was taken before;
        None: no sum is needed, nor that the engine remembers the version. Raises Retryable and Permanent where it has
        the weights from before, and OutcomeUnknown where it may have others, or some of each: then it stays paused
        until a load succeeds."""
        ...

    async def takes_sums(self) -> bool:
        """Whether a load sums its folder on this side, while requests stand still, unless the sum is known. Whatever
        else a load would have to ask is learnt with it. Changes nothing."""
        ...

    async def loaded(self) -> LoadedWeights | None:
        """What it says that it has; None: it does not know, as one that was started anew."""
        ...

    async def continue_greedily(self, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """At most so many tokens, going on beyond end-of-text. One that is paused runs for so long, and is paused
        again afterwards, also where that fails."""
        ...


def weights_engine(engine: ObservedEngine) -> WeightsEngine:
    """Return the client's `weights`. Raises Permanent for a product that cannot load weights while it runs."""
    weights: WeightsEngine | None = getattr(engine, "weights", None)
    if weights is None:
        raise Permanent(f"{engine.url}: engines of {type(engine).__name__} cannot load weights while they run")
    return weights


@dataclass(frozen=True, slots=True)
class TransferEnds:
    """What a trainer would reach that sends weights straight into an engine: by which backend, and how many workers."""

    backend: str  # empty: it was started without one
    workers: int


class TransferEngine(Protocol):
    """Weights of one engine from a trainer's process, over what the engine's own product has for that. The engine is at
    rest from `start` on, and stays so. From then until `finish` it names no version. Errors from `start` on: Permanent
    and Retryable where it is as it was, OutcomeUnknown where it may not be."""

    async def ends(self) -> TransferEnds: ...

    async def join(self, init_info: Mapping[str, Any], within_s: float) -> None:
        """Let its workers meet the trainer, who comes at the same time."""
        ...

    async def start(self) -> None: ...

    async def update(self, update_info: Mapping[str, Any] | Sequence[Any], within_s: float) -> None:
        """Take what the trainer sends meanwhile."""
        ...

    async def finish(self, version: int, within_s: float) -> None:
        """It has the version, and says so."""
        ...

    async def begin(self) -> None:
        """As `start`, where something else than the product's own transfer brings the weights: then `call_workers`,
        a method of all its workers, and `end`."""
        ...

    async def call_workers(self, method: str, arguments: Sequence[Any], within_s: float) -> None: ...

    async def end(self, version: int) -> None: ...


def transfer_engine(engine: Engine) -> TransferEngine:
    """Return the client's `transfers`. Raises Permanent for a product that has nothing of the kind."""
    transfers: TransferEngine | None = getattr(engine, "transfers", None)
    if transfers is None:
        raise Permanent(f"{engine.url}: engines of {type(engine).__name__} take no weights from a trainer's process")
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
    """A client for the engine product `name` at `url`. Raises Permanent for an unknown name, listing the known ones."""
    engine: Engine = ENGINES.load(name)(url, **options)
    return engine


@dataclass(frozen=True, slots=True)
class ReportedLayout:
    """How the engine says that it is laid out. None: it does not say."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: bool | None = None  # experts are spread over its ranks

    def __str__(self) -> str:
        said = {"TP": self.tp, "PP": self.pp, "DP": self.dp, "EP": self.ep}
        return " ".join(f"{name}={value}" for name, value in said.items() if value is not None) or "not told"


@dataclass(frozen=True, slots=True)
class AnswerExcerpt:
    """A piece of greedy text as an engine sees it: log-probabilities (natural, one per token of `token_ids`) that it
    gives to the tokens after `prompt_ids`."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class ManagedEngine(ObservedEngine, Protocol):
    """What a redeployment asks of an engine that it has started, beyond what the gateway and agents ask: how it is laid
    out, which weights it has, whether it answers as its predecessors did, and to sleep and wake. Its client can load
    weights, too (`weights_engine`). What an engine cannot do is found out with `capabilities`; asking for it all the
    same raises Permanent. `managed_conformance.py` covers it."""

    async def layout(self) -> ReportedLayout: ...

    async def weight_version(self) -> int | None:
        """The policy version that it was last told its weights to be; None: it has none, or cannot tell."""
        ...

    async def name_weights(self, policy_version: int | None) -> None:
        """Tell it what its weights are called; they stay. None: they have no version."""
        ...

    async def excerpt(self, prompt_ids: Sequence[int], tokens: int) -> AnswerExcerpt:
        """Its own greedy continuation of at most `tokens`, going on beyond end-of-text."""
        ...

    async def score(self, excerpt: AnswerExcerpt) -> tuple[float, ...]:
        """The log-probabilities that this engine gives to another's excerpt, token by token."""
        ...

    async def sleep(self) -> None:
        """Free its GPUs' memory, weights kept aside so that `wake` is quick. It must have no requests."""
        ...

    async def wake(self) -> None:
        """With the weights from before, and no KV."""
        ...

    async def asleep(self) -> bool: ...

    async def scale(self, dp: int) -> None:
        """Elastic expert parallelism: go on with so many data-parallel replicas, on GPUs that it finds itself."""
        ...


def connect_managed(product: str, url: str, timeout_s: float = 10.0) -> ManagedEngine:
    """Raises Permanent for an unknown product."""
    engine: ManagedEngine = ENGINES.load(product)(url, timeout_s=timeout_s)
    return engine
