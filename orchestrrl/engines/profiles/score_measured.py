"""How well a profile that was measured on an engine predicts loads that it was not measured on.

Each row is predicted by a profile fitted to the rows of the same engine that have other prompt and output lengths:
a curve over sequences, a time for each KV token and one for each prompt token, which is what `profile measure` finds.
Nothing is known of the lengths that are scored.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from orchestrrl.engines.profiles.score import Prediction, ScoredPrediction
from orchestrrl.engines.profiles.silicon import TEXTS, MeasuredDeployment, SiliconData, UnpredictedRow
from planner.cost.fit import LoadedFit, StepSample, TooFewSamples, fit_loaded
from planner.cost.profile import ProfileSource
from planner.cost.roofline import attended_tokens, kv_capacity_tokens, running_sequences

LEAST_ROWS = 8  # that a profile is fitted to
# Below, another knot in the curve would follow the spread of single deployments.
LINE_IS_ENOUGH = 0.03


def score_measured(silicon: SiliconData) -> tuple[SiliconData, list[ScoredPrediction]]:
    """What can be scored so, and its scores in the same order. Rows whose engine was measured on too few other loads
    are among the unpredicted."""
    found: dict[int, ScoredPrediction] = {}
    missing: list[UnpredictedRow] = list(silicon.unpredicted)
    for engine in _engines(silicon.deployments):
        for held_out, others in _folds(engine):
            try:
                fit = _fit(others)
            except TooFewSamples as why:
                reason = f"too little measured: {why}"
                missing += [UnpredictedRow(row.row, row.texts["model_path"], reason) for row in held_out]
                continue
            detail = f"fitted to {len(others)} rows of the engine at other prompt and output lengths"
            for row in held_out:
                found[row.row] = ScoredPrediction(row, Prediction(_tpot_s(fit, row), ProfileSource.MEASURED, detail))
    scored = [found[row] for row in sorted(found)]
    unpredicted = sorted(missing, key=lambda each: each.row)
    return SiliconData(tuple(each.deployment for each in scored), tuple(unpredicted)), scored


def _engines(deployments: Sequence[MeasuredDeployment]) -> list[list[MeasuredDeployment]]:
    """Rows of one engine: same model, system, software and layout."""
    engines: dict[object, list[MeasuredDeployment]] = defaultdict(list)
    for row in deployments:
        engines[(*(row.texts[name] for name in TEXTS), row.parallelism)].append(row)
    return list(engines.values())


def _folds(engine: Sequence[MeasuredDeployment]) -> Iterator[tuple[list[MeasuredDeployment], list[MeasuredDeployment]]]:
    """Each pair of lengths in turn: the rows that have it, and the others."""
    for lengths in sorted({_lengths(row) for row in engine}):
        held_out = [row for row in engine if _lengths(row) == lengths]
        yield held_out, [row for row in engine if _lengths(row) != lengths]


def _lengths(row: MeasuredDeployment) -> tuple[float, float]:
    return row.load.prompt_tokens, row.load.output_tokens


def _fit(rows: Sequence[MeasuredDeployment]) -> LoadedFit:
    if len(rows) < LEAST_ROWS:
        raise TooFewSamples(f"{len(rows)} rows at other lengths, {LEAST_ROWS} are needed")
    return fit_loaded([_sample(row) for row in rows], [_prefilled_tokens(row) for row in rows], LINE_IS_ENOUGH)


def _sample(row: MeasuredDeployment) -> StepSample:
    sequences = _sequences(row)
    return StepSample(sequences, sequences * attended_tokens(row.model, row.load), row.tpot_s)


def _sequences(row: MeasuredDeployment) -> float:
    return running_sequences(row.load, kv_capacity_tokens(row.model, row.gpu, row.parallelism, row.precision))


def _prefilled_tokens(row: MeasuredDeployment) -> float:
    """In a step of a closed loop: over its output, a request meets one prompt of every other."""
    return max(0.0, _sequences(row) - 1) * row.load.prompt_tokens / row.load.output_tokens


def _tpot_s(fit: LoadedFit, row: MeasuredDeployment) -> float:
    sample = _sample(row)
    return fit.step.at(sample.sequences, sample.kv_tokens) + fit.prefill_s_per_token * _prefilled_tokens(row)
