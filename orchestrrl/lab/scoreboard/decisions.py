"""Reproduce figure 20 and section 4.1 of the OrchestrRL paper: the time that the planner's solver needs, and the error
of the planner's forecast.

The length distributions of a production service's clients are mixed with drifting weights, and each step is a sample of
the current mixture. The error is the absolute difference between forecast and actual counts, summed over bins and
divided by the number of requests. Two reference values are reported: the difference between two samples of the true
mixture, and the difference between a sample and the true mixture. The latter is a lower bound for the error of any
forecast. A forecast of expected counts may have an error between the two values.
"""

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orchestrrl.lab.bench.solve import measure
from orchestrrl.lab.scoreboard import constants as given
from orchestrrl.lab.scoreboard.claims import ScoreboardRow, beyond, compared
from planner.workload.series import LengthCounts, SeriesForecaster, StepStatistics

HISTOGRAMS = Path(__file__).parents[4] / "shared" / "data" / "r1_length_histograms.csv.gz"
BIN_TOKENS, MAX_OUTPUT_TOKENS = 256, 32_768
BINS = MAX_OUTPUT_TOKENS // BIN_TOKENS
STEPS, FIRST_SCORED = 60, 16  # ARIMA must have a score before it can be chosen
# Used if the histograms are missing: median tokens and standard deviation of the logarithm of 26 clients' outputs,
# fitted to ServeGen's deepseek-r1 data (Alibaba, Apache-2.0).
FITTED = (
    *((1147, 0.63), (778, 0.85), (1408, 0.70), (15499, 0.30), (444, 0.55), (840, 0.63), (700, 0.88), (948, 0.28)),
    *((951, 0.48), (893, 0.44), (1251, 0.91), (661, 0.42), (598, 0.69), (903, 0.64), (644, 0.47), (540, 0.45)),
    *((664, 1.06), (493, 0.59), (1436, 0.48), (523, 0.69), (360, 0.82), (1111, 0.49), (6830, 0.68), (831, 0.46)),
    *((328, 0.67), (359, 0.73)),
)

Shares = NDArray[np.float64]  # [client or step, bin]


def mean_errors(clients: Shares, requests: int, seeds: int) -> dict[str, float]:
    """Forecast each step of a series from the steps before it. Return, by name, the mean errors over seeds and scored
    steps. The names are those of the forecast methods, `chosen` (the method that the planner chooses), and the
    reference values `two_samples` and `truth`."""
    errors: dict[str, list[float]] = defaultdict(list)
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        truth = drifting(clients, rng)
        counts, others = rng.multinomial(requests, truth), rng.multinomial(requests, truth)
        series = SeriesForecaster(BIN_TOKENS, MAX_OUTPUT_TOKENS)
        for number, actual in enumerate(counts):
            if number >= FIRST_SCORED and series.next is not None:
                forecasts = {**series.forecasts, "chosen": np.array(series.next.shares)}
                forecasts |= {"two_samples": others[number] / requests, "truth": truth[number]}
                for method, forecast in forecasts.items():
                    errors[method].append(float(np.abs(forecast - actual / requests).sum()))
            lengths = LengthCounts(tuple(actual.astype(float).tolist()), (0.0,) * (BINS + 1))
            series = series.fold(StepStatistics(BIN_TOKENS, lengths))
    return {method: float(np.mean(values)) for method, values in errors.items()}


def drifting(clients: Shares, rng: np.random.Generator) -> Shares:
    """Return the mixture of the clients' distributions at each step, as an array indexed by [step, bin]. Each client's
    weight is log-normal and drifts to its reciprocal."""
    along, across = rng.normal(size=(2, len(clients)))
    angle = np.pi * np.arange(STEPS) / (STEPS - 1)
    weights = np.exp(np.outer(np.cos(angle), along) + np.outer(np.sin(angle), across))
    shares: Shares = weights @ clients / weights.sum(axis=1, keepdims=True)
    return shares


@cache
def client_shares() -> tuple[Shares, str]:
    """Return each client's mean distribution of output lengths, indexed by [client, bin], and a description of the
    distributions' source."""
    if not HISTOGRAMS.exists():
        return _fitted_shares(), f"{len(FITTED)} fitted clients ({HISTOGRAMS.name} is missing)"
    windows: dict[tuple[int, int], Shares] = defaultdict(lambda: np.zeros(BINS))
    with gzip.open(HISTOGRAMS, "rt", newline="") as lines:
        for row in csv.DictReader(lines):
            if row["kind"] == "output":
                # Four bins of the file form one bin here.
                place = min(int(row["bin_start_tokens"]) // BIN_TOKENS, BINS - 1)
                windows[int(row["client"]), int(row["window_s"])][place] += float(row["probability"])
    by_client: dict[int, list[Shares]] = defaultdict(list)
    for (client, _), shares in sorted(windows.items()):
        by_client[client].append(shares / shares.sum())
    return np.array([np.mean(shares, axis=0) for shares in by_client.values()]), f"{len(by_client)} clients"


def _fitted_shares() -> Shares:
    from scipy.stats import norm

    edges = np.log(np.arange(1, BINS + 1) * BIN_TOKENS)
    medians, spreads = (np.array(values)[:, None] for values in zip(*FITTED, strict=True))
    below = norm.cdf((edges - np.log(medians)) / spreads)
    below[:, -1] = 1.0
    shares: Shares = np.diff(below, axis=1, prepend=0.0)
    return shares


GPUS = 1024
FORECAST_SEEDS, QUICK_SEEDS = 20, 4


def solver(quick: bool) -> Iterator[ScoreboardRow]:
    """Measure the run time of the solver in this process. This is the only figure of the scoreboard that depends on the
    machine."""
    measure(GPUS // 16)  # load compiled code
    for gpus in (GPUS,) if quick else (GPUS, 4 * GPUS, 16 * GPUS):
        found = measure(gpus)
        what = f"solve time, {gpus:,} GPUs, {found['requests']:,} requests, on this machine"
        if gpus == GPUS:
            yield compared("Figure 20", what, "headline.solve_s", found["solve_s"], "a slow machine", "s")
            gap = "of the makespan, to a proven lower bound; the paper reports none"
            yield beyond(f"gap to the lower bound, {gpus:,} GPUs", found["gap"], "share", gap, "Figure 20")
        else:
            yield beyond(what, found["solve_s"], "s", "larger than the paper's largest", "Figure 20")


def forecast(quick: bool) -> Iterator[ScoreboardRow]:
    """Measure the forecast error for both interpretations of the batch size in the paper's section 2.1: a number of
    answers, and a number of prompts."""
    clients, source = client_shares()
    batch = given.BATCH.value
    answers = {batch: QUICK_SEEDS if quick else FORECAST_SEEDS, batch * given.SAMPLES.value: QUICK_SEEDS}
    for requests, seeds in answers.items():
        errors = mean_errors(clients, requests, seeds)
        why = (
            f"a sample of {requests:,} differs by {errors['truth']:.1%} from its own distribution, in bins of"
            f" {BIN_TOKENS} tokens, so that no forecast can be closer; the paper does not define its error"
        )
        what = f"forecast error, bins of {BIN_TOKENS} tokens, {requests:,} requests per step, {source}"
        yield compared("Section 4.1", what, "headline.forecast_error", errors["chosen"], why, "share")
        over = errors["chosen"] / errors["two_samples"]
        yield beyond("the same over the difference of two samples", over, figure="Section 4.1")
