"""What a redeployment asks of an engine, asked of a simulated one of the cluster. All of them are replicas: they are
laid out as wanted and answer alike."""

from collections.abc import Callable, Sequence

from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.engines.base import EngineCapabilities, EngineMetrics
from orchestrrl.engines.managed import AnswerExcerpt, ReportedLayout
from orchestrrl.lab.sim.engines import VirtualEngine

RETRY_S = 0.1


class VirtualManaged:
    """`find` gives the engine that answers at the URL now, None where none does."""

    def __init__(self, url: str, find: Callable[[str], VirtualEngine | None]) -> None:
        self.url = url
        self._find = find
        self._policy_version: int | None = None

    async def capabilities(self) -> EngineCapabilities:
        return self._engine().features

    async def metrics(self) -> EngineMetrics:
        return self._engine().reading()

    async def healthy(self) -> bool:
        return self._find(self.url) is not None

    async def probe(self) -> float:
        self._engine()
        return 0.0

    async def layout(self) -> ReportedLayout:
        return ReportedLayout()

    async def weight_version(self) -> int | None:
        return self._policy_version

    async def load_weights(self, source: str, policy_version: int | None) -> None:
        self._policy_version = policy_version

    async def name_weights(self, policy_version: int) -> None:
        self._policy_version = policy_version

    async def excerpt(self, prompt_ids: Sequence[int], tokens: int) -> AnswerExcerpt:
        self._engine()
        return AnswerExcerpt(tuple(prompt_ids), (0,) * tokens, (0.0,) * tokens)

    async def score(self, excerpt: AnswerExcerpt) -> tuple[float, ...]:
        self._engine()
        return excerpt.logprobs

    async def sleep(self) -> None:
        raise Permanent(f"{self.url}: does not sleep")

    async def wake(self) -> None:
        raise Permanent(f"{self.url}: does not sleep")

    async def asleep(self) -> bool:
        return False

    async def scale(self, dp: int) -> None:
        raise Permanent(f"{self.url}: does not scale")

    async def close(self) -> None:
        """Nothing is open."""

    def _engine(self) -> VirtualEngine:
        engine = self._find(self.url)
        if engine is None:
            raise Retryable(f"{self.url}: connection refused", RETRY_S)
        return engine
