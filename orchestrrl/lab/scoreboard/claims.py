"""The claims of the OrchestrRL paper (arXiv 2601.01209v2), figure by figure, and the rows that compare these claims
with our results.

Each claim has a unique name. A test compares the claims with the values transcribed from the paper.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated, Generic, TypeVar

from pydantic import BeforeValidator

# Relative difference beyond which a row must give a reason.
FAR = 0.15

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class PaperClaim:
    """A value that the paper states: one number, or a range. An unbounded side of a range is null in JSON."""

    low: Annotated[float, BeforeValidator(lambda value: -inf if value is None else value)]
    high: Annotated[float, BeforeValidator(lambda value: inf if value is None else value)]

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"low must be <= high, got {self.low} and {self.high}")

    @classmethod
    def of(cls, value: float) -> "PaperClaim":
        return cls(value, value)

    @classmethod
    def bound(cls, value: float) -> "PaperClaim":
        return cls(-inf, value)

    def difference(self, ours: float) -> float:
        """Return the difference between `ours` and the nearer end of the claimed range, relative to that end. The
        difference is 0 if `ours` is inside the range."""
        if self.low <= ours <= self.high:
            return 0.0
        end = self.low if ours < self.low else self.high
        return (ours - end) / abs(end) if end else float("inf")


@dataclass(frozen=True, slots=True)
class ScoreboardRow:
    """A row of the scoreboard, which compares the paper's value `paper` with the reproduced value `ours`. `paper` is
    None if the paper does not state the value. `why` gives the reason for a relative difference over FAR, or explains a
    row that is not compared. For any other row, `why` is empty. `claim` is a key of CLAIMS, or empty if `paper` is
    None. If `given` is true, `ours` is an input and is not compared."""

    figure: str  # e.g. "Figure 13", "Table 4", "Beyond"
    what: str  # e.g. "throughput of TopoOpt over fat tree, Qwen2.5-72B on 1,024 GPUs"
    paper: PaperClaim | None
    ours: float
    unit: str = "x"  # x: a ratio; share: a ratio shown in per cent
    why: str = ""
    claim: str = ""
    given: bool = False

    @property
    def difference(self) -> float | None:
        return None if self.paper is None or self.given else self.paper.difference(self.ours)

    @property
    def is_far(self) -> bool:
        return self.difference is not None and abs(self.difference) > FAR


@dataclass(frozen=True, slots=True)
class Constant(Generic[Value]):
    """A constant from which figures are computed. `source` is a data sheet, a section of the paper, or a file of
    measurements."""

    name: str
    value: Value
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class ScoreboardPart:
    """A part of the scoreboard. `make` returns the part's rows. If its argument is true, the run is quick: it uses
    fewer seeds, models or cluster sizes. The attribute `quick` describes the scope of a quick run. It is empty if a
    quick run has the full scope."""

    id: str
    title: str
    make: Callable[[bool], Iterable[ScoreboardRow]]
    quick: str = ""


UNKNOWN = "unknown"


def compared(figure: str, what: str, claim: str, ours: float, why: str = UNKNOWN, unit: str = "x") -> ScoreboardRow:
    """Return a row that compares `ours` with a claim of the paper. `why` is omitted from the row if the relative
    difference is at most FAR. Raises KeyError if the claim is unknown."""
    row = ScoreboardRow(figure, what, CLAIMS[claim], ours, unit, why, claim)
    return row if row.is_far else ScoreboardRow(figure, what, CLAIMS[claim], ours, unit, "", claim)


def beyond(what: str, ours: float, unit: str = "x", why: str = "", figure: str = "Beyond") -> ScoreboardRow:
    """Return a row for a value that the paper does not state. `why` explains the row."""
    return ScoreboardRow(figure, what, None, ours, unit, why)


def put_in(figure: str, what: str, claim: str, ours: float, why: str, unit: str = "x") -> ScoreboardRow:
    """Return a row whose value is an input of the simulation and is not compared."""
    return ScoreboardRow(figure, what, CLAIMS[claim], ours, unit, why, claim, given=True)


_of, _between, _most = PaperClaim.of, PaperClaim, PaperClaim.bound

CLAIMS: Mapping[str, PaperClaim] = {
    # Section 6.1, figure 9: samples per second over veRL-TO, end to end, one step asynchronous.
    "headline.throughput.qwen2.5-14b.15000": _of(1.31),
    "headline.throughput.qwen2.5-14b.25000": _of(1.42),
    "headline.throughput.qwen2.5-32b.15000": _of(1.32),
    "headline.throughput.qwen2.5-32b.25000": _of(1.34),
    # Section 6.2.1, figure 10.
    "headline.ablation.qwen2.5-14b.planning": _of(1.24),
    "headline.ablation.qwen2.5-14b.balancing": _of(1.18),
    "headline.ablation.qwen2.5-14b.both": _of(1.42),
    "headline.ablation.qwen2.5-32b.planning": _of(1.19),
    "headline.ablation.qwen2.5-32b.balancing": _of(1.14),
    "headline.ablation.qwen2.5-32b.both": _of(1.34),
    # Section 4.1 and appendix F.
    "headline.forecast_error": _most(0.098),
    "headline.solve_s": _most(11.0),
    # Section 6.2.2, figure 11.
    "headline.case_study.at_s": _of(272.0),
    "headline.case_study.total_s": _of(7.5),
    "headline.case_study.switching_s": _of(1.5),
    "headline.case_study.kv_recompute_s": _of(5.4),
    # Section 2.
    "phase_example.early.tp2_s": _of(79.2),
    "phase_example.early.tp4_s": _of(96.3),
    "phase_example.early.tp8_s": _of(138.7),
    "phase_example.tail.tp2_s": _of(208.4),
    "phase_example.tail.tp4_s": _of(188.3),
    "phase_example.tail.tp8_s": _of(165.1),
    "gen_vs_train_time": _of(1.49),
    "worker_time_skew": _of(1.58),
    "slack.gen_tp_median_s": _most(0.0005),
    "slack.train_window_s": _between(0.010, 0.500),
    "slack.weight_sync_idle_s": _between(1.0, inf),
    # Sections 7.2.1 to 7.2.4, figures 13 to 16.
    "fabric.throughput.topoopt": _between(0.47, 0.76),
    "fabric.throughput.mixnet": _of(0.81),
    "fabric.throughput.rfabric": _of(1.0),  # "close to FT and RO"
    "fabric.cost.rfabric": _between(0.51, 0.52),
    "fabric.cost.rail_optimized": _of(1.0),
    "fabric.cost.oversubscribed": _of(0.54),
    "fabric.cost.topoopt": _of(0.21),
    "fabric.cost_vs_gpus.200": _of(0.37),
    "fabric.cost_vs_gpus.400": _of(0.59),
    "fabric.cost_efficiency.fat_tree": _between(1.53, 2.06),
    "fabric.cost_efficiency.rail_optimized": _between(1.61, 2.08),
    "fabric.cost_efficiency.mixnet": _of(1.13),
    # Section 7.3.1, figure 17: over a fixed schedule on the 3:1 fat tree.
    "codesign.throughput.scheduler_only": _of(1.18),
    "codesign.throughput.fabric_only": _of(1.56),
    "codesign.throughput.both": _of(2.01),
    "codesign.per_dollar.scheduler_only": _of(1.18),
    "codesign.per_dollar.fabric_only": _of(1.79),
    "codesign.per_dollar.both": _of(2.31),
    # Section 7.3.2, figure 18: times on RFabric over those on the 3:1 fat tree, minus 1.
    "fabric_effect.afd_phase": _of(-0.167),
    "fabric_effect.kv_migration": _of(-0.583),
    "fabric_effect.gen_step": _of(-0.107),
    # Section 7.1, figure 12: errors of the paper's simulator against its testbed.
    "fidelity.training_mfu": _most(0.0886),
    "fidelity.generation_tp": _most(0.033),
    "fidelity.generation_afd": _most(0.0595),
    "fidelity.network": _most(0.0598),
    "fidelity.end_to_end": _between(0.022, 0.104),
}
