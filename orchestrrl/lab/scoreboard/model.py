"""The scoreboard's rows: what the paper says of a figure, what comes out here, and why where that is far off."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Annotated, Generic, TypeVar

from pydantic import BeforeValidator

# Of what the paper says: beyond it a row has to tell why.
FAR = 0.15

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class PaperClaim:
    """A figure of the paper: one number, or a range that it gives. `at_most`: a bound, and less is as good. An
    open side is null in JSON."""

    low: Annotated[float, BeforeValidator(lambda value: -inf if value is None else value)]
    high: Annotated[float, BeforeValidator(lambda value: inf if value is None else value)]
    at_most: bool = False

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"low must be <= high, got {self.low} and {self.high}")

    @classmethod
    def of(cls, value: float) -> "PaperClaim":
        return cls(value, value)

    @classmethod
    def bound(cls, value: float) -> "PaperClaim":
        return cls(float("-inf"), value, at_most=True)

    def difference(self, ours: float) -> float:
        """Relative to the nearer end; 0 within."""
        if self.low <= ours <= self.high:
            return 0.0
        end = self.low if ours < self.low else self.high
        return (ours - end) / abs(end) if end else float("inf")


@dataclass(frozen=True, slots=True)
class ScoreboardRow:
    """`paper` None: beyond the paper. `why`: needed where the difference is over FAR; beyond the paper what there is to
    know; else empty. `claim`: its name among CLAIMS. `given`: ours was put in, not made, and is not compared."""

    figure: str  # e.g. "Figure 13", "Table 4", "Beyond"
    what: str  # e.g. "throughput of TopoOpt over fat tree, Qwen2.5-72B on 1,024 GPUs"
    paper: PaperClaim | None
    ours: float
    unit: str = "x"  # x: a ratio; share: one that is shown in per cent
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
    """What a figure was made from. `source`: a data sheet, the paper's section, a file of measurements."""

    name: str
    value: Value
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class ScoreboardPart:
    """One part of the scoreboard. `make(quick)` gives its rows; quick: fewer seeds, sizes and steps, and the table says
    so. `quick`: what is less."""

    id: str
    title: str
    make: Callable[[bool], list[ScoreboardRow]]
    quick: str = ""
