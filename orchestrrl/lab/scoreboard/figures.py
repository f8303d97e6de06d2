"""All figures of the scoreboard, in the table's order, and which of the paper's nobody can make here."""

from collections.abc import Mapping, Sequence
from functools import partial

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.lab.scoreboard import (
    codesign,
    decisions,
    fabrics,
    fidelity,
    generation,
    phases,
    sensitivity,
)
from orchestrrl.lab.scoreboard.claims import ScoreboardPart

FIGURES: tuple[ScoreboardPart, ...] = (
    ScoreboardPart("2", "Section 2: a job on 72 GPUs", generation.workload),
    ScoreboardPart("2-phases", "Section 2.1: phases of a step", phases.example),
    ScoreboardPart("4.1", "Section 4.1: forecast", decisions.forecast, "4 seeds of 20 in its first row"),
    ScoreboardPart("5", "Figure 5: slack", generation.slack),
    ScoreboardPart(
        "9",
        "Figure 9: throughput on the testbed",
        generation.headline,
        "Qwen2.5-14B with 15,000 tokens alone, one seed",
    ),
    ScoreboardPart("10", "Figure 10: planning and balancing alone", generation.ablation, "Qwen2.5-14B alone"),
    ScoreboardPart("11", "Figure 11: case study", phases.case_study),
    ScoreboardPart("12", "Figure 12: fidelity", fidelity.fidelity),
    ScoreboardPart(
        "13-dense",
        "Figure 13: throughput of fabrics, dense model",
        partial(fabrics.throughput, "qwen2.5-72b"),
        "512 GPUs alone",
    ),
    ScoreboardPart(
        "13-moe",
        "Figure 13: throughput of fabrics, mixture of experts",
        partial(fabrics.throughput, "qwen2-57b-a14b"),
        "512 GPUs alone",
    ),
    ScoreboardPart("14", "Figure 14: stages by fabric", fabrics.stage_times, "512 GPUs instead of 1,024"),
    ScoreboardPart("15", "Figure 15: cost", fabrics.costs),
    ScoreboardPart(
        "16", "Figure 16: throughput per dollar", fabrics.frontier, "the mixture of experts at 200 Gbps alone"
    ),
    ScoreboardPart("17", "Figure 17: scheduler and fabric", codesign.two_by_two, "512 GPUs instead of 2,048"),
    ScoreboardPart(
        "18",
        "Figure 18: a change of engines",
        codesign.change_of_engines,
        "512 GPUs instead of 2,048, three moments to change at instead of five",
    ),
    ScoreboardPart("20", "Figure 20: solver", decisions.solver, "1,024 GPUs alone"),
    ScoreboardPart("I", "Appendix I: circuits by traffic", sensitivity.allocation, "without weight sync"),
    ScoreboardPart("I-delays", "Section 7.2.5: delays of circuits", sensitivity.delays, "the dense model alone"),
    ScoreboardPart("mixed", "Beyond: mixed fleets", sensitivity.mixed_fleets, "up to 64 GPUs"),
    ScoreboardPart("sync", "Beyond: weight sync", sensitivity.weight_sync),
    ScoreboardPart("additions", "Beyond: our additions", sensitivity.additions, "the packing balancer alone"),
    ScoreboardPart("failures", "Beyond: failures", sensitivity.failures),
)

NOT_HERE: Mapping[str, str] = {
    "fidelity.generation_afd": "there is no public implementation of AFD to measure; the paper's is internal",
    "fidelity.end_to_end": "takes a testbed that trains and generates; its parts are held alone (docs/fidelity.md)",
}


def chosen(wanted: Sequence[str]) -> list[ScoreboardPart]:
    """All where none is named; `13` is every one whose id begins with it. Raises ProblemFaults."""
    known = [figure.id for figure in FIGURES]
    faults = [
        f"--figures[{number}]: must be one of {', '.join(known)}, got {name!r}"
        for number, name in enumerate(wanted)
        if not any(_is(each, name) for each in known)
    ]
    if faults:
        raise ProblemFaults(faults)
    return [figure for figure in FIGURES if not wanted or any(_is(figure.id, name) for name in wanted)]


def _is(known: str, name: str) -> bool:
    return name in (known, known.split("-")[0])
