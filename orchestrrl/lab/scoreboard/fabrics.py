"""Figures 13 and 14: throughput of fabrics at several scales, and where the time goes."""

from collections.abc import Mapping
from dataclasses import replace

from orchestrrl.lab.scoreboard import constants as given
from orchestrrl.lab.scoreboard.cases import (
    FABRICS,
    LONE_RADIX,
    NAMES,
    TITLES,
    Case,
    SteadyStep,
    balanced,
    measured,
    retrained,
    stages_of,
)
from orchestrrl.lab.scoreboard.model import ScoreboardRow
from orchestrrl.lab.scoreboard.rows import beyond, compared

MODELS: Mapping[str, tuple[str, ...]] = {"qwen2.5-72b": given.GEN_LAYOUTS.value, "qwen2-57b-a14b": (given.AFD.value,)}
OF_FIGURE_14 = "qwen2-57b-a14b"
ONCE = "gradients are exchanged once for all samples here, further below after every 512"
CLAIMED = ("topoopt", "mixnet", "rfabric")


def throughput(model: str, quick: bool) -> list[ScoreboardRow]:
    scales = given.SCALES.value[:1] if quick else given.SCALES.value
    rows = []
    for gpus in scales:
        case = balanced(model, gpus, MODELS[model])
        found = on_fabrics(case)
        rows += [*_throughput_rows(case, found), *_divided_rows(case, found)]
    return rows


def on_fabrics(case: Case) -> dict[str, SteadyStep]:
    scenario = case.scenario()
    found = {kind: measured(stages_of(scenario, kind)) for kind in FABRICS}
    found["lone"] = measured(stages_of(scenario, "oversubscribed", radix=LONE_RADIX))
    return found


def _throughput_rows(case: Case, found: Mapping[str, SteadyStep]) -> list[ScoreboardRow]:
    first = found["fat_tree"]
    rows = []
    for kind in (*FABRICS[1:], "lone"):
        what = f"throughput of {NAMES[kind]} over fat tree, {TITLES[case.model]} on {case.gpus:,} GPUs"
        ours = found[kind].samples_per_s / first.samples_per_s
        if kind in CLAIMED:
            why = f"{_why(case, first, found[kind])}; {ONCE}"
            rows.append(compared("Figure 13", what, f"fabric.throughput.{kind}", ours, why))
        else:
            rows.append(beyond(what, ours, figure="Figure 13", why=_parts(first, found[kind])))
    return rows


def _divided_rows(case: Case, found: Mapping[str, SteadyStep]) -> list[ScoreboardRow]:
    """With a step's samples divided among optimiser steps, each with its own exchange of gradients: the paper does not
    say how many there are, and of one for all samples gradients take little."""
    updates = max(1, found["fat_tree"].gen.samples // given.STEP_SAMPLES.value)
    scenario = replace(case, updates=updates).scenario()
    here = {kind: retrained(found[kind], stages_of(scenario, kind)) for kind in ("fat_tree", *CLAIMED)}
    first, rows = here["fat_tree"], []
    for kind in CLAIMED:
        of = f"{TITLES[case.model]} on {case.gpus:,} GPUs, {updates} optimiser steps"
        what, ours = f"throughput of {NAMES[kind]} over fat tree, {of}", here[kind].samples_per_s / first.samples_per_s
        rows.append(compared("Figure 13", what, f"fabric.throughput.{kind}", ours, _why(case, first, here[kind])))
    return rows


def _why(case: Case, first: SteadyStep, other: SteadyStep) -> str:
    if other.samples_per_s > first.samples_per_s * 0.9:
        return (
            f"{case.train_gpus} GPUs train: {_parts(first, other)}; engines of one server each do not depend on the"
            " fabric"
        )
    return f"{case.train_gpus} GPUs train: {_parts(first, other)}"


def _parts(first: SteadyStep, other: SteadyStep) -> str:
    """What differs, in seconds on the fat tree and here."""
    told = [f"train {first.train.seconds:.0f} to {other.train.seconds:.0f} s"]
    for part, then_s in first.train.parts_s.items():
        now_s = other.train.parts_s[part]
        if abs(now_s - then_s) > 0.02 * first.train.seconds:
            told.append(f"of it {part} {then_s:.0f} to {now_s:.0f} s")
    told.append(f"generation {first.gen.seconds:.0f} to {other.gen.seconds:.0f} s")
    told.append(f"sync {first.sync.seconds:.2f} to {other.sync.seconds:.2f} s")
    return ", ".join(told)


def stage_times(quick: bool) -> list[ScoreboardRow]:
    case = balanced(OF_FIGURE_14, given.SCALES.value[0 if quick else 1], MODELS[OF_FIGURE_14])
    found = on_fabrics(case)
    first, rows = found["fat_tree"], []
    for kind in (*FABRICS[1:], "lone"):
        other = found[kind]
        stages = (
            ("training", first.train.seconds, other.train.seconds),
            ("generation under AFD", first.gen.seconds, other.gen.seconds),
            ("weight sync", first.sync.seconds, other.sync.seconds),
        )
        for stage, then_s, now_s in stages:
            what = f"{stage} on {NAMES[kind]} over fat tree, {TITLES[case.model]} on {case.gpus:,} GPUs"
            why = f"{then_s:.3g} s on the fat tree"
            rows.append(beyond(what, now_s / then_s, figure="Figure 14", why=why))
    return rows
