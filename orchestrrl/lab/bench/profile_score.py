"""How far predicted step times are from measured deployments, beside what others reach on the same rows."""

import sys
from pathlib import Path
from typing import Any

from orchestrrl.engines.profiles.score import report, score
from orchestrrl.engines.profiles.silicon import read_silicon
from orchestrrl.lab.bench.figure import Figure

SILICON = Path(__file__).parents[4] / "shared" / "data" / "silicon_decode_h100_h200.csv"

# NVIDIA's AIConfigurator, predicting from its own measured kernels, on rows of this file.
OTHERS = "aiconfigurator"
ERROR_MEAN, ERROR_MEDIAN = 0.28, 0.14
RATIO_MEAN, RATIO_MEDIAN = 0.12, 0.08


def profile_score(silicon: Path = SILICON) -> list[Figure]:
    """No figures, but a note on standard error, where the measured deployments are not there."""
    if not silicon.exists():
        sys.stderr.write(f"profile_score: skipped, there is no {silicon}\n")
        return []
    measured = read_silicon(silicon)
    overall = report(measured, score(measured))["overall"]
    return [figure for kind in ("dense", "moe", "all") for figure in _figures(kind, overall[kind])]


def _figures(kind: str, errors: dict[str, Any]) -> list[Figure]:
    rows = f"TPOT of {errors['rows']} rows; nothing fitted on the model that is scored"
    pairs = f"TPOT at one TP over another, {errors['ratio']['pairs']} pairs"
    found = (
        ("median", errors["error_median"], ERROR_MEDIAN, rows),
        ("mean", errors["error_mean"], ERROR_MEAN, rows),
        ("ratio_median", errors["ratio"]["error_median"], RATIO_MEDIAN, pairs),
        ("ratio_mean", errors["ratio"]["error_mean"], RATIO_MEAN, pairs),
    )
    return [
        Figure(f"profile_score_{kind}_{name}", error, "of measured", OTHERS, others, note)
        for name, error, others, note in found
        if error is not None
    ]
