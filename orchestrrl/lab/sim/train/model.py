"""What the training simulator speaks of. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.cost.hardware import GpuModel
from planner.cost.models import Model


@dataclass(frozen=True, slots=True)
class TrainLayout:
    """Degrees of parallelism as Megatron has them: ranks are numbered tensor first, then context, data and pipeline;
    experts are spread over `ep` ranks of tensor, context and data together. `gpus` = tp * cp * dp * pp. `vpp` > 1 gives
    each pipeline rank that many stages, interleaved."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "dp", "pp", "ep", "vpp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if (self.tp * self.cp * self.dp) % self.ep:
            raise ValueError(f"ep must divide tp * cp * dp ({self.tp * self.cp * self.dp}), got {self.ep}")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp needs pp > 1, got vpp {self.vpp}")

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def stages(self) -> int:
        """Of the pipeline, over all its ranks."""
        return self.pp * self.vpp


@dataclass(frozen=True, slots=True)
class TrainJob:
    """An optimiser step: `sequences` of `tokens` each (mean), in micro-batches of `micro_sequences` per data-parallel
    rank. Micro-batches are alike, as frameworks that pack sequences by their lengths make them; what attention takes
    goes by the lengths' squares."""

    model: Model
    gpu: GpuModel
    layout: TrainLayout
    sequences: int
    tokens: float
    micro_sequences: int = 1
    first_gpu: int = 0  # its GPUs are numbered from here on
    recompute: bool = False  # activations are computed again in the backward pass
    length_cv: float = 0.0  # standard deviation of the sequences' lengths over their mean; 0: all are as long

    def __post_init__(self) -> None:
        if faults := self._faults():
            raise ValueError("; ".join(faults))

    def _faults(self) -> list[str]:
        layout, found = self.layout, []
        for name in ("sequences", "tokens", "micro_sequences"):
            if not getattr(self, name) > 0:
                found.append(f"{name} must be > 0, got {getattr(self, name)}")
        if not self.length_cv >= 0:
            found.append(f"length_cv must be >= 0, got {self.length_cv}")
        if layout.stages > self.model.layers:
            found.append(f"{self.model.name} has {self.model.layers} layers, fewer than {layout.stages} stages")
        if layout.ep > 1 and (not self.model.moe or self.model.experts % layout.ep):
            found.append(f"ep must divide the experts of {self.model.name} ({self.model.experts}), got {layout.ep}")
        if self.model.q_heads % layout.tp:
            found.append(f"tp must divide the {self.model.q_heads} heads of {self.model.name}, got {layout.tp}")
        if not found and layout.vpp > 1 and self.micro_batches % layout.pp:
            found.append(f"interleaved, micro-batches ({self.micro_batches}) must be a multiple of pp, {layout.pp}")
        return found

    @property
    def micro_batches(self) -> int:
        return max(1, -(-self.sequences // (self.layout.dp * self.micro_sequences)))

    @property
    def micro_tokens(self) -> float:
        """Of a micro-batch, on each context-parallel rank."""
        return self.micro_sequences * self.tokens / self.layout.cp

    @property
    def square_tokens(self) -> float:
        """Mean of the squares of the sequences' lengths."""
        return self.tokens**2 * (1 + self.length_cv**2)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """[stage]: as even as they can be, the first ones take what is left over."""
        each, more = divmod(self.model.layers, self.layout.stages)
        return tuple(each + (stage < more) for stage in range(self.layout.stages))


@dataclass(frozen=True, slots=True)
class CollectiveBoundary:
    """A collective over the network as one rank sees it; seconds from the iteration's beginning."""

    group: str  # e.g. "dp", "ep", "pp", "cp"
    begin_s: float
    end_s: float
    bytes: float  # that the rank gives


@dataclass(frozen=True, slots=True)
class OverlapWindow:
    """Without a collective over the network, between two of them."""

    begin_s: float
    end_s: float
    before: str  # group of the collective before, and after
    after: str

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class TrainingIteration:
    """`parts_s` adds up to `seconds`: compute, bubble, and what of each group's communication is not hidden."""

    seconds: float
    mfu: float
    parts_s: Mapping[str, float]
    boundaries: tuple[CollectiveBoundary, ...]
    windows: tuple[OverlapWindow, ...]
    waits_s: float = 0.0  # of parts_s: for circuits that were not there in time
    circuits: str = "keep"  # how they were used: see circuits.Course
    within_layers: bool = False  # circuits followed attention and experts
