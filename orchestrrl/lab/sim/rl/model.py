"""Types of the cluster simulator: the stages of a step, the modes of the loop, and the results of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import FiniteFloat

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.train.model import OverlapWindow, TrainingIteration


class LoopMode(StrEnum):
    """The order of generation and training."""

    SYNCHRONOUS = "synchronous"  # generate a step, train on it, then send the new weights to the engines
    ONE_STEP_ASYNC = "one_step_async"  # step k is generated during training on step k - 1
    BOUNDED_STALENESS = "bounded_staleness"  # generation may be a bounded number of versions ahead of training


SCHEMES = ("tree", "naive", "two_stage")  # ways to distribute a weight version to engines


class Holds(StrEnum):
    """The sides (trainer, engines) that pause during a weight sync."""

    BOTH = "both"  # the trainer and the engines pause
    ENGINES = "engines"  # the trainer continues, and sends a copy of the weights
    NOBODY = "nobody"  # engines continue with their current weights, and install the new ones before their next step


@dataclass(frozen=True, slots=True)
class GenStage:
    """A generation step on a fabric."""

    seconds: float
    finish_s: tuple[float, ...]  # [sample] ascending, from the step's beginning
    remaining: tuple[tuple[float, int], ...]  # (seconds from its beginning, requests in flight)
    phases_s: Mapping[str, float]  # e.g. seconds under AFD, redeploying, moving KV, under TP
    sample_tokens: float  # mean tokens of the samples begun, prompt and answer
    sample_square_tokens: float  # mean of their squares
    tier_bytes: Mapping[str, float] = field(default_factory=dict)  # engines' exchanges, and moved KV

    @property
    def samples(self) -> int:
        return len(self.finish_s)


@dataclass(frozen=True, slots=True)
class TrainStage:
    """A training step: passes for log-probabilities, then optimiser steps. `parts_s` contains the time of the
    log-probability passes and the times of the parts of all optimiser steps, which add up to `seconds`. `mfu` includes
    the FLOPs of the log-probability passes."""

    seconds: float
    mfu: float
    parts_s: Mapping[str, float]
    updates: int  # optimiser steps
    update: TrainingIteration  # the first optimiser step


class SyncCourse(StrEnum):
    """The ways in which a weight sync can use the fabric's circuits."""

    KEEP = "keep"  # the current circuits
    CHANGE = "change"  # once, for the whole sync
    CHANGE_BY_WAVE = "change_by_wave"  # before each wave that needs other circuits


@dataclass(frozen=True, slots=True)
class SyncStage:
    """The sync of a weight version to every engine. `bound_s` is a lower bound on the duration of any plan on the
    fabric's links. `held_s` is the delay, in seconds, of each stage that sends from the beginning to the end of the
    sync. The delay includes the time of circuit changes, during which no stage sends."""

    seconds: float
    phases_s: Mapping[str, float]  # circuits; phase A, until the last bytes from other PoDs have arrived; phase B
    bound_s: float
    tier_bytes: Mapping[str, float]
    circuits: SyncCourse
    held_s: Mapping[FabricStage, float]

    @property
    def cost_s(self) -> float:
        return self.seconds + sum(self.held_s.values())


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """An activity on the time line. `lane` is "train", "gen", "sync" or "fault"."""

    lane: str
    stage: FabricStage
    step: int
    begin_s: float
    end_s: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class RlRun:
    """The results of one arm on one fabric and seed. `samples_per_s` and `idle_share` exclude the first steps, in which
    the pipeline fills."""

    fabric: str
    arm: str
    seed: int
    seconds: float
    samples: int
    samples_per_s: FiniteFloat
    spans: tuple[TimelineSpan, ...]
    steps: tuple[Mapping[str, float], ...]  # [step] seconds by stage, and seconds of waiting
    staleness: Mapping[int, int]  # number of samples by their lag in versions when they were trained on
    idle_share: Mapping[FabricStage, float]  # idle fraction of the stage's GPUs in the measured time
    sync_beside: tuple[FabricStage, ...] = ()  # stages that ran during the last weight sync
    # Bytes of one step by stage and tier: train, gen, weight_sync and response_stream.
    tier_bytes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    windows: tuple[OverlapWindow, ...] = ()  # in an optimiser step
    remaining: tuple[tuple[float, int], ...] = ()  # in the last generation step
    notes: tuple[str, ...] = ()
