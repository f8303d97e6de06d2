"""What the simulator of a whole RL cluster speaks of: stages of a step, how they follow each other, and what came of
it. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import FiniteFloat

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.train.model import OverlapWindow, TrainingIteration


class LoopMode(StrEnum):
    """How generation and training follow each other."""

    SYNCHRONOUS = "synchronous"  # a step is generated, then trained on, then its weights are brought to engines
    ONE_STEP_ASYNC = "one_step_async"  # step k is generated while step k - 1 is trained on
    BOUNDED_STALENESS = "bounded_staleness"  # generation may be so many versions ahead of training


SCHEMES = ("tree", "naive", "two_stage")  # by which a weight version is brought to engines


class Holds(StrEnum):
    """Who waits while new weights are on their way."""

    BOTH = "both"  # the trainer sends and engines receive, and neither does anything else
    ENGINES = "engines"  # the trainer goes on with a copy
    NOBODY = "nobody"  # engines go on with the weights that they have, and take the new ones at their next step


@dataclass(frozen=True, slots=True)
class GenStage:
    """A generation step on a fabric."""

    seconds: float
    finish_s: tuple[float, ...]  # [sample] ascending, from the step's beginning
    remaining: tuple[tuple[float, int], ...]  # (seconds from its beginning, requests in flight)
    phases_s: Mapping[str, float]  # e.g. seconds under AFD, redeploying, moving KV, under TP
    sample_tokens: float  # of a sample that was begun, prompt and answer, in the mean
    sample_square_tokens: float  # mean of their squares
    tier_bytes: Mapping[str, float] = field(default_factory=dict)  # engines' exchanges, and KV that moves

    @property
    def samples(self) -> int:
        return len(self.finish_s)


@dataclass(frozen=True, slots=True)
class TrainStage:
    """A training step: passes for log-probabilities, then optimiser steps. `parts_s` adds up to `seconds`: `log probs`,
    and the parts of all optimiser steps. `mfu` counts what the passes ask for, too."""

    seconds: float
    mfu: float
    parts_s: Mapping[str, float]
    updates: int  # optimiser steps
    update: TrainingIteration  # the first of them


class SyncCourse(StrEnum):
    """How a sync uses the fabric's circuits."""

    KEEP = "keep"  # as they are
    CHANGE = "change"  # once, for all that is sent
    CHANGE_BY_WAVE = "change_by_wave"  # before each wave that wants others


@dataclass(frozen=True, slots=True)
class SyncStage:
    """A weight version to every engine. `bound_s`: no plan is shorter on these links. `held_s`: what each of those who
    send beside it is late by, if it does so all the while; nobody sends while circuits change."""

    seconds: float
    phases_s: Mapping[str, float]  # circuits; phase A, until the last bytes have come from other PoDs; phase B
    bound_s: float
    tier_bytes: Mapping[str, float]
    circuits: SyncCourse
    held_s: Mapping[FabricStage, float]

    @property
    def cost_s(self) -> float:
        return self.seconds + sum(self.held_s.values())


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Something that a part of the cluster does, for the time line. `lane`: "train", "gen", "sync", or a fault's."""

    lane: str
    stage: FabricStage
    step: int
    begin_s: float
    end_s: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class RlRun:
    """One arm on one fabric and seed. Rates leave out the first steps, in which the pipeline fills."""

    fabric: str
    arm: str
    seed: int
    seconds: float
    samples: int
    samples_per_s: FiniteFloat
    spans: tuple[TimelineSpan, ...]
    steps: tuple[Mapping[str, float], ...]  # [step] seconds by stage, and what it waited for
    staleness: Mapping[int, int]  # samples by how many versions they were behind when they were trained on
    idle_share: Mapping[FabricStage, float]  # of the stage's GPUs, of the seconds measured
    sync_beside: tuple[FabricStage, ...] = ()  # who was at work when the last weights set out, and went on
    # By stage and tier, of one step: train, gen, weight_sync and response_stream.
    tier_bytes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    windows: tuple[OverlapWindow, ...] = ()  # of an optimiser step
    remaining: tuple[tuple[float, int], ...] = ()  # of the last generation step
    notes: tuple[str, ...] = ()
