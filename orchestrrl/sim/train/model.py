"""What the training simulator speaks of. Values only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrrl.sim.net.fabrics.base import Period
from orchestrrl.sim.net.model import Network
from planner.hardware import Gpu
from planner.models import Model


@dataclass(frozen=True, slots=True)
class TrainLayout:
    """Degrees of parallelism as Megatron has them: ranks are numbered tensor first, then context, data and pipeline;
    experts are spread over `ep` ranks of tensor, context and data together. `gpus` = tp * cp * dp * pp."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "dp", "pp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if (self.tp * self.cp * self.dp) % self.ep:
            raise ValueError(f"ep must divide tp * cp * dp ({self.tp * self.cp * self.dp}), got {self.ep}")

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True, slots=True)
class TrainJob:
    """An optimiser step: `sequences` of `tokens` each (mean), in micro-batches of `micro_sequences` per data-parallel
    rank."""

    model: Model
    gpu: Gpu
    layout: TrainLayout
    sequences: int
    tokens: float
    micro_sequences: int = 1
    first_gpu: int = 0  # its GPUs are numbered from here on
    recompute: bool = False  # activations are computed again in the backward pass

    @property
    def micro_batches(self) -> int:
        return max(1, -(-self.sequences // (self.layout.dp * self.micro_sequences)))


@dataclass(frozen=True, slots=True)
class Boundary:
    """A collective over the network as one rank sees it; seconds from the iteration's beginning."""

    group: str  # e.g. "dp", "ep", "pp", "cp"
    begin_s: float
    end_s: float
    bytes: float  # that the rank gives


@dataclass(frozen=True, slots=True)
class Window:
    """Without a collective over the network, between two of them."""

    begin_s: float
    end_s: float
    before: str  # group of the collective before, and after
    after: str

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Iteration:
    """`parts_s` adds up to `seconds`: compute, bubble, and what of each group's communication is not hidden."""

    seconds: float
    mfu: float
    parts_s: Mapping[str, float]
    boundaries: tuple[Boundary, ...]
    windows: tuple[Window, ...]
    waits_s: float = 0.0  # of parts_s: for circuits that were not there in time


# The network as it is made for a period.
NetworkOf = Callable[[Period], Network]
