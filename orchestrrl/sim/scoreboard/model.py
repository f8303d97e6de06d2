"""The scoreboard's rows: what the paper says of a figure, what comes out here, and why where that is far off."""

from collections.abc import Callable
from dataclasses import dataclass

# Of what the paper says: beyond it a row has to tell why.
FAR = 0.15

Report = Callable[[str, int, int], None]  # what is under way, done, in all


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure of the paper: one number, or a range that it gives. `at_most`: a bound, and less is as good."""

    low: float
    high: float
    at_most: bool = False

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"low must be <= high, got {self.low} and {self.high}")

    @classmethod
    def of(cls, value: float) -> "Claim":
        return cls(value, value)

    @classmethod
    def bound(cls, value: float) -> "Claim":
        return cls(float("-inf"), value, at_most=True)

    def difference(self, ours: float) -> float:
        """Relative to the nearer end; 0 within."""
        if self.low <= ours <= self.high:
            return 0.0
        end = self.low if ours < self.low else self.high
        return (ours - end) / abs(end) if end else float("inf")


@dataclass(frozen=True, slots=True)
class Row:
    """`paper` None: beyond the paper. `why`: needed where the difference is over FAR; empty elsewhere."""

    figure: str  # e.g. "Figure 13", "Table 4", "Beyond"
    what: str  # e.g. "throughput of TopoOpt over fat tree, Qwen2.5-72B on 1,024 GPUs"
    paper: Claim | None
    ours: float
    unit: str = "x"  # x: a ratio
    why: str = ""

    @property
    def difference(self) -> float | None:
        return None if self.paper is None else self.paper.difference(self.ours)

    @property
    def is_far(self) -> bool:
        return self.difference is not None and abs(self.difference) > FAR


@dataclass(frozen=True, slots=True)
class Constant:
    """What a figure was made from. `source`: a data sheet, the paper's section, a file of measurements."""

    name: str
    value: float | str
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One part of the scoreboard. `make(quick, report)` gives its rows; quick: fewer seeds, sizes and steps, and the
    table says so."""

    id: str
    title: str
    make: Callable[[bool, Report], list[Row]]
