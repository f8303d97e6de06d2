"""What a redeployment asks of an engine that it has started, beyond what the gateway and agents ask: how it is laid
out, which weights it has, whether it answers as its predecessors did, and to sleep and wake.

The clients of `orchestrrl.engines` that can be deployed implement it; `managed_conformance.py` beside this covers it.
What an engine cannot do is found out with `capabilities`, never assumed; asking for it all the same raises Permanent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrrl.engines.base import EngineCapabilities, EngineSample, connect


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


class ManagedEngine(Protocol):
    """A client of one engine that we started. Raises as `engines.base.Engine` does."""

    url: str

    async def capabilities(self) -> EngineCapabilities: ...

    async def metrics(self) -> EngineSample: ...

    async def healthy(self) -> bool: ...

    async def probe(self) -> float: ...

    async def layout(self) -> ReportedLayout: ...

    async def weight_version(self) -> int | None:
        """The policy version that it was last told its weights to be; None: it has none, or cannot tell."""
        ...

    async def load_weights(self, source: str, policy_version: int | None) -> None:
        """Have it load the weights in folder `source` (of its machine), drop all KV, and name them. It must have no
        requests. Raises Permanent where it cannot, OutcomeUnknown where it may have half of them."""
        ...

    async def name_weights(self, policy_version: int) -> None:
        """Tell it what its weights are called; they stay."""
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

    async def close(self) -> None: ...


def connect_managed(product: str, url: str, timeout_s: float = 10.0) -> ManagedEngine:
    """Raises Permanent for an unknown product."""
    engine: Any = connect(product, url, timeout_s=timeout_s)
    managed: ManagedEngine = engine
    return managed
