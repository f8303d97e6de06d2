"""Fit the engine constants of the roofline to measured deployments, and predict deployments with them.

The fit is robust least squares (Cauchy loss) on the logarithm of TPOT, with a prior on every constant. Constants that
only affect models with experts are fitted second, on those models alone, so that a poor fit does not affect dense
models. For each model, a separate set of constants is fitted without the model's rows, and the model is scored only
with this set. Two checkpoints of one architecture (bf16 and fp8) count as one model. The form of the roofline and its
priors are not cross-validated. They were chosen once for all models and engines, using all measured deployments.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from orchestrrl.engines.profiles.silicon import MeasuredDeployment
from planner.cost.engine_constants import MOE_ONLY, constants_of, flat_priors, prior_values
from planner.cost.roofline import IterationWork, attended_tokens, stacked, tpot_s, work_of

# Relative errors beyond this count as outliers.
USUAL_ERROR = 0.06
# The rows of one sweep have correlated errors, so the priors weigh as if there were fewer rows, by this factor squared.
PRIOR_WEIGHT = 3.0

ALL_MODELS = ""  # key of the set fitted on all models

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DeploymentColumns:
    """The columns of a table of measured deployments, as arrays indexed by row. The roofline is evaluated on these
    arrays."""

    work: IterationWork
    backends: tuple[str, ...]
    context_tokens: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    moe: NDArray[np.bool_]
    models: tuple[str, ...]
    measured_s: Floats


def rows_of(deployments: Sequence[MeasuredDeployment]) -> DeploymentColumns:
    works = [work_of(row.model, row.gpu, row.parallelism, row.precision, row.sequences) for row in deployments]
    return DeploymentColumns(
        work=stacked(works),
        backends=tuple(row.backend for row in deployments),
        context_tokens=np.array([attended_tokens(row.model, row.load) for row in deployments]),
        prompt_tokens=np.array([row.load.prompt_tokens for row in deployments]),
        output_tokens=np.array([row.load.output_tokens for row in deployments]),
        moe=np.array([row.model.moe for row in deployments], dtype=np.bool_),
        models=tuple(row.model.name for row in deployments),
        measured_s=np.array([row.tpot_s for row in deployments]),
    )


def predicted_s(rows: DeploymentColumns, values: Mapping[str, float]) -> Floats:
    """Return the predicted TPOT of every row in seconds, computed with the constants in `values`."""
    by_backend = {backend: constants_of(values, backend) for backend in sorted(set(rows.backends))}
    constants = stacked([by_backend[backend] for backend in rows.backends])
    return tpot_s(rows.work, constants, rows.context_tokens, rows.prompt_tokens, rows.output_tokens)


def fit(deployments: Sequence[MeasuredDeployment]) -> dict[str, dict[str, float]]:
    """Return the sets of fitted constants, each keyed by the name of the model that was left out of its fit. The key
    `ALL_MODELS` has the set that was fitted on all models."""
    rows = rows_of(deployments)
    models = np.array(rows.models)
    return {left_out: fit_one(rows, models != left_out) for left_out in (ALL_MODELS, *sorted(set(rows.models)))}


def fit_one(rows: DeploymentColumns, used: NDArray[np.bool_]) -> dict[str, float]:
    """Return the constants that best fit the rows selected by `used`, under the priors of the constants."""
    values = prior_values()
    dense = [name for name in values if name not in MOE_ONLY]
    for free, which in ((dense, used & ~rows.moe), (list(MOE_ONLY), used & rows.moe)):
        if which.any():
            values |= _fitted(rows, which, free, values)
    return values


def _fitted(
    rows: DeploymentColumns, used: NDArray[np.bool_], free: list[str], values: Mapping[str, float]
) -> dict[str, float]:
    priors = flat_priors()
    start = np.log([priors[name].value for name in free])
    spread = np.array([priors[name].spread for name in free])
    measured = np.log(rows.measured_s[used])

    def named(logs: Floats) -> dict[str, float]:
        return dict(zip(free, np.exp(logs).tolist(), strict=True))

    def residuals(logs: Floats) -> Floats:
        error = (np.log(predicted_s(rows, {**values, **named(logs)})[used]) - measured) / USUAL_ERROR
        robust = np.sign(error) * np.sqrt(np.log1p(error**2))
        return np.concatenate([robust, PRIOR_WEIGHT * (logs - start) / spread])

    return named(least_squares(residuals, start, x_scale=0.3).x)


def left_out_s(rows: DeploymentColumns, sets: Mapping[str, Mapping[str, float]]) -> Floats:
    """Return the predicted TPOT of every row in seconds. A row is predicted with the constants that were fitted without
    its model or, if there are none, with the constants fitted on all models."""
    models = np.array(rows.models)
    predicted = predicted_s(rows, sets[ALL_MODELS])
    for left_out in set(rows.models) & sets.keys():
        predicted[models == left_out] = predicted_s(rows, sets[left_out])[models == left_out]
    return predicted


def left_out_errors(deployments: Sequence[MeasuredDeployment], sets: Mapping[str, Mapping[str, float]]) -> Floats:
    """Return the absolute relative errors of the predictions that `left_out_s` returns, as an array indexed by
    deployment."""
    rows = rows_of(deployments)
    return np.asarray(np.abs(left_out_s(rows, sets) / rows.measured_s - 1))


def write_fitted(path: Path, sets: Mapping[str, Mapping[str, float]], errors: Floats, source: str, today: date) -> None:
    """Write the sets of constants as a Python module of literals, which the planner imports. `errors` is the result of
    `left_out_errors`, and `source` names the measurements."""
    rows = [(name, ", ".join(f"{values[name]:.4g}" for values in sets.values())) for name in sets[ALL_MODELS]]
    lines = [
        '"""Fitted engine constants. `orchestrrl profile fit` writes this file; do not edit it. The names are',
        'documented in engine_constants.py."""',
        "",
        f'FITTED_ON = "{today.isoformat()}"',
        f'FITTED_TO = "{source}"',
        f"LEFT_OUT_ROWS = {len(errors)}",
        f"LEFT_OUT_ERROR_MEAN = {errors.mean():.4g}",
        f"LEFT_OUT_ERROR_MAX = {errors.max():.4g}",
        "",
        "# [set]: the model left out of the fit; the set without a name is fitted on all models.",
        f"_LEFT_OUT = [{', '.join(map(json.dumps, sets))}]",
        "_VALUES = {  # [constant][set]",
        *(f'    "{name}": [{row}],' for name, row in rows),
        "}",
        "FITTED: dict[str, dict[str, float]] = {",
        "    left_out: {name: row[place] for name, row in _VALUES.items()} for place, left_out in enumerate(_LEFT_OUT)",
        "}",
    ]
    path.write_text("\n".join(lines) + "\n")
