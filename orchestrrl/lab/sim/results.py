"""What one arm came to over one seed, as a value."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineSpan:
    """One engine on its GPUs, for pictures: how many sequences it ran from when on."""

    engine: str
    configuration: str
    first_gpu: int
    gpus: int
    started_s: float
    ended_s: float
    running: list[tuple[float, int]]


@dataclass(slots=True)
class SeedRun:
    """One arm over the measured steps of one seed. Pictures show the last step."""

    seed: int
    makespan_s: list[float] = field(default_factory=list)  # by step
    samples: int = 0
    output_tokens: int = 0
    idle_fraction: float = 0.0  # of all GPU seconds of the steps
    moves: int = 0
    redeployments: int = 0
    tokens_recomputed: int = 0
    preemptions: int = 0
    transfers: int = 0  # of KV, instead of computing it again
    transferred_gbytes: float = 0.0  # over NICs, new weights included
    transfer_delay_s: float = 0.0  # by which they took longer than alone, summed
    predicted_actual_s: list[tuple[float, float]] = field(default_factory=list)  # of each plan
    remaining: list[tuple[float, int]] = field(default_factory=list)
    spans: list[EngineSpan] = field(default_factory=list)
    journal_digest: str = ""

    @property
    def total_s(self) -> float:
        return sum(self.makespan_s)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.total_s
