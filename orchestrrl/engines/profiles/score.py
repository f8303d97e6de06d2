"""Score predicted TPOT, and the ratios of predicted TPOT between TP degrees, against measured deployments.

A planner chooses between configurations, so ratios matter. The score therefore includes the error of each prediction,
and, for rows that differ only in TP, the error of `predicted(tp a) / predicted(tp b)` relative to the measured ratio.

Predictions come from the roofline (`roofline`) or from a profile measured on the engine (`score_measured`). In the
second case, each row is predicted by a profile that is fitted to the engine's rows with other prompt and output
lengths. Like the profiles of `profile measure`, this profile has a curve over sequences, a time per KV token and a time
per prompt token.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any

from orchestrrl.engines.profiles.roofline_fit import left_out_s, rows_of
from orchestrrl.engines.profiles.silicon import TEXTS, MeasuredDeployment, SiliconData, UnpredictedRow
from planner.cost.fit import StepFit, StepSample, TooFewSamples, fit_step
from planner.cost.fitted import FITTED, FITTED_TO
from planner.cost.profile import ProfileSource
from planner.cost.roofline import attended_tokens


@dataclass(frozen=True, slots=True)
class ScoredPrediction:
    deployment: MeasuredDeployment
    tpot_s: float  # predicted
    source: ProfileSource
    detail: str  # the data on which the prediction is based

    @property
    def error(self) -> float:
        """The relative error of the prediction. It is positive if the predicted TPOT is too high."""
        return self.tpot_s / self.deployment.tpot_s - 1


def roofline(deployments: Sequence[MeasuredDeployment]) -> list[ScoredPrediction]:
    """Return the roofline's prediction for each deployment, in the order of `deployments`. Each prediction uses the
    constants that were fitted without the deployment's model or, if the model was not part of the fit, the constants
    fitted on all models."""
    if not deployments:
        return []
    rows = rows_of(deployments)
    constants = f"constants fitted to {FITTED_TO}"
    details = [f"without {model}" if model in FITTED else "which has no rows of this model" for model in rows.models]
    return [
        ScoredPrediction(deployment, predicted, ProfileSource.ROOFLINE, f"{constants}, {detail}")
        for deployment, predicted, detail in zip(deployments, left_out_s(rows, FITTED).tolist(), details, strict=True)
    ]


def ratio_errors(scored: Iterable[ScoredPrediction]) -> list[tuple[tuple[int, int], float]]:
    """Return the two TP degrees and an error for each pair of deployments that differ only in TP. The error is the
    relative error of the predicted ratio between the TPOT at the smaller degree and the TPOT at the larger degree."""
    groups: dict[object, list[ScoredPrediction]] = defaultdict(list)
    for row in sorted(scored, key=lambda row: row.deployment.tp):
        groups[row.deployment.but_for_tp()].append(row)
    return [
        ((narrow.deployment.tp, wide.deployment.tp), (1 + narrow.error) / (1 + wide.error) - 1)
        for rows in groups.values()
        for narrow, wide in combinations(rows, 2)
        if narrow.deployment.tp != wide.deployment.tp
    ]


def report(scored: Sequence[ScoredPrediction], unpredicted: Sequence[UnpredictedRow]) -> dict[str, Any]:
    """Return the document that `orchestrrl profile score --json` prints. Errors are fractions, or null if there are no
    rows."""
    kinds = {
        "dense": [row for row in scored if not row.deployment.model.moe],
        "moe": [row for row in scored if row.deployment.model.moe],
        "all": list(scored),
    }
    groups: dict[tuple[str, str, str, str], list[ScoredPrediction]] = defaultdict(list)
    for row in scored:
        texts = row.deployment.texts
        groups[texts["system"], texts["backend"], texts["model_path"], row.source.value].append(row)
    return {
        "rows": len(scored) + len(unpredicted),
        "predicted": len(scored),
        "overall": {kind: _errors(rows) for kind, rows in kinds.items()},
        "groups": [
            {"system": system, "backend": backend, "model": model, "source": source, **_errors(rows)}
            for (system, backend, model, source), rows in sorted(groups.items())
        ],
        "tp_ratios": {kind: _by_pair(rows) for kind, rows in kinds.items()},
        "not_predicted": [{"row": row.row, "model": row.model_path, "reason": row.reason} for row in unpredicted],
        "predictions": [_prediction(row) for row in scored],
    }


def _errors(rows: Sequence[ScoredPrediction]) -> dict[str, Any]:
    ratios = [abs(error) for _, error in ratio_errors(rows)]
    return {"rows": len(rows), **_mean_median([abs(row.error) for row in rows]), "ratio": _pairs(ratios)}


def _by_pair(rows: Sequence[ScoredPrediction]) -> list[dict[str, Any]]:
    pairs: dict[tuple[int, int], list[float]] = defaultdict(list)
    for tps, error in ratio_errors(rows):
        pairs[tps].append(abs(error))
    return [{"tp": list(tps), **_pairs(errors)} for tps, errors in sorted(pairs.items())]


def _pairs(errors: list[float]) -> dict[str, Any]:
    return {"pairs": len(errors), **_mean_median(errors)}


def _mean_median(errors: list[float]) -> dict[str, float | None]:
    if not errors:
        return {"error_mean": None, "error_median": None}
    return {"error_mean": fmean(errors), "error_median": median(errors)}


def _prediction(row: ScoredPrediction) -> dict[str, Any]:
    deployment = row.deployment
    return {
        "row": deployment.row,
        "model": deployment.texts["model_path"],
        "system": deployment.texts["system"],
        "backend": deployment.backend,
        "tp": deployment.tp,
        "concurrency": deployment.load.concurrency,
        "isl": deployment.load.prompt_tokens,
        "osl": deployment.load.output_tokens,
        "measured_ms": deployment.tpot_s * 1e3,
        "predicted_ms": row.tpot_s * 1e3,
        "error": row.error,
        "source": row.source.value,
        "detail": row.detail,
    }


LEAST_ROWS = 8  # the fewest rows for a fit
# At errors below this, another knot in the curve would overfit single deployments.
LINE_IS_ENOUGH = 0.03


def score_measured(silicon: SiliconData) -> tuple[list[ScoredPrediction], list[UnpredictedRow]]:
    """Return the predictions by measured profiles, and the rows without a prediction, each with the reason. A row has
    no prediction if too few rows with other prompt and output lengths exist for its engine."""
    scored: list[ScoredPrediction] = []
    missing: list[UnpredictedRow] = list(silicon.unpredicted)
    for engine in _engines(silicon.deployments):
        for held_out, others in _folds(engine):
            try:
                fit = _fit(others)
            except TooFewSamples as why:
                reason = f"too few measurements: {why}"
                missing += [UnpredictedRow(row.row, row.texts["model_path"], reason) for row in held_out]
                continue
            detail = f"fitted to {len(others)} rows of the engine at other prompt and output lengths"
            scored += [ScoredPrediction(row, _tpot_s(fit, row), ProfileSource.MEASURED, detail) for row in held_out]
    return sorted(scored, key=lambda each: each.deployment.row), sorted(missing, key=lambda each: each.row)


def _engines(deployments: Sequence[MeasuredDeployment]) -> list[list[MeasuredDeployment]]:
    """Group the rows by engine. The rows of one engine have the same model, system, software and layout."""
    engines: dict[object, list[MeasuredDeployment]] = defaultdict(list)
    for row in deployments:
        engines[(*(row.texts[name] for name in TEXTS), row.parallelism)].append(row)
    return list(engines.values())


def _folds(engine: Sequence[MeasuredDeployment]) -> Iterator[tuple[list[MeasuredDeployment], list[MeasuredDeployment]]]:
    """Yield two lists for each pair of prompt and output lengths: the rows with these lengths, and the remaining
    rows."""
    for lengths in sorted({_lengths(row) for row in engine}):
        held_out = [row for row in engine if _lengths(row) == lengths]
        yield held_out, [row for row in engine if _lengths(row) != lengths]


def _lengths(row: MeasuredDeployment) -> tuple[float, float]:
    return row.load.prompt_tokens, row.load.output_tokens


def _fit(rows: Sequence[MeasuredDeployment]) -> StepFit:
    if len(rows) < LEAST_ROWS:
        raise TooFewSamples(
            f"a fit requires at least {LEAST_ROWS} rows whose lengths differ from those of the predicted rows, "
            f"got {len(rows)}"
        )
    prefilled_tokens = [_prefilled_tokens(row) for row in rows]
    return fit_step([_sample(row) for row in rows], LINE_IS_ENOUGH, prefilled_tokens=prefilled_tokens)


def _sample(row: MeasuredDeployment) -> StepSample:
    return StepSample(row.sequences, row.sequences * attended_tokens(row.model, row.load), row.tpot_s)


def _prefilled_tokens(row: MeasuredDeployment) -> float:
    """Return the number of prompt tokens that are prefilled per decode step of a closed loop. While one request
    decodes, each of the other concurrent requests is prefilled once."""
    return max(0.0, row.sequences - 1) * row.load.prompt_tokens / row.load.output_tokens


def _tpot_s(fit: StepFit, row: MeasuredDeployment) -> float:
    sample = _sample(row)
    return fit.step.at(sample.sequences, sample.kv_tokens) + fit.prefill_s_per_token * _prefilled_tokens(row)
