"""The problem of `orchestrrl fabric transition` as a document."""

from typing import TYPE_CHECKING

from pydantic import Field

from orchestrrl.cli.fabric.cabling import (
    CABLING_CHECKS,
    CabledSwitchPart,
    CrossConnectPart,
    cabling,
    cross_connects,
    port_pairs,
)
from orchestrrl.cli.problem import ProblemPart

if TYPE_CHECKING:
    from planner.fabric.transition import TransitionProblem


class TransitionFile(ProblemPart):
    switches: list[CabledSwitchPart]
    current: list[CrossConnectPart]
    target: list[CrossConnectPart]
    max_moves_per_stage: int = Field(ge=1, lt=2**53)
    min_fraction: float = Field(ge=0, le=1)


CHECKS = (*CABLING_CHECKS, cross_connects("current", "target", ends_differ=True))


def problem_of(read: TransitionFile) -> "TransitionProblem":
    from planner.fabric.transition import TransitionProblem

    current, target = port_pairs(read.current), port_pairs(read.target)
    return TransitionProblem(cabling(read.switches), current, target, read.max_moves_per_stage, read.min_fraction)
