"""How far forecasts of a step's output lengths are off, one step ahead, beside what chance alone takes.

Clients of a production service are mixed with weights that drift, or change at once; each step is a sample of its
mixture. The error is the total absolute difference over bins by the number of requests. Two floors stand beside it:
what two samples of the true mixture differ by (the aim is set on this one), and how far a sample is from the true
mixture itself, below which no forecast can stay; a forecast of expected counts may well lie between the two.
"""

import csv
import gzip
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orchestrrl.lab.bench.figure import Figure
from planner.workload.series import LengthCounts, SeriesForecaster, StepStatistics

HISTOGRAMS = Path(__file__).parents[4] / "shared" / "data" / "r1_length_histograms.csv.gz"
BIN_TOKENS, MAX_OUTPUT_TOKENS = 256, 32_768
BINS = MAX_OUTPUT_TOKENS // BIN_TOKENS
STEPS, FIRST_SCORED = 60, 16  # ARIMA must have been scored itself before it can be picked
SEEDS, FEWER_SEEDS = 20, 8
REQUESTS = (512, 2_048)
FEW_CLIENTS = 6  # a job of a few tasks: its mixture moves far more than one of many clients
CHANGE_AT = 40  # the step at which everything is different, where it changes at once
AIM_FLOOR, AIM_EWMA, AIM_STEP_S = 1.15, 1.02, 0.5
# Where the histograms are missing: median tokens and spread of the logarithm of 26 clients' outputs, fitted to
# ServeGen's deepseek-r1 data (Alibaba, Apache-2.0).
FITTED = (
    *((1147, 0.63), (778, 0.85), (1408, 0.70), (15499, 0.30), (444, 0.55), (840, 0.63), (700, 0.88), (948, 0.28)),
    *((951, 0.48), (893, 0.44), (1251, 0.91), (661, 0.42), (598, 0.69), (903, 0.64), (644, 0.47), (540, 0.45)),
    *((664, 1.06), (493, 0.59), (1436, 0.48), (523, 0.69), (360, 0.82), (1111, 0.49), (6830, 0.68), (831, 0.46)),
    *((328, 0.67), (359, 0.73)),
)
FIXED_AVERAGES = (0.1, 0.2, 0.3, 0.5, 0.8)

Shares = NDArray[np.float64]  # [client or step, bin]
Mixture = Callable[[Shares, np.random.Generator], Shares]


@dataclass(frozen=True, slots=True)
class Scores:
    """Means over seeds and scored steps."""

    errors: Mapping[str, float]  # by method, and `chosen`, `two_samples`, `truth`
    chosen: Mapping[str, int]  # how often each method gave the forecast
    slowest_s: float  # CPU seconds of one step
    inside: float  # share of bins within the 90 % band, of those that expect 5 requests or more


def forecasts() -> list[Figure]:
    """All figures of the forecast before a step."""
    clients, source = client_shares()
    figures, slowest_s = [], 0.0
    for requests in REQUESTS:
        scores = measure(clients, drifting, requests, SEEDS)
        slowest_s = max(slowest_s, scores.slowest_s)
        figures += _against_both(
            f"forecast_{requests}", scores, f"{source}, {requests:,} requests a step, smooth drift"
        )
    for requests in REQUESTS:
        scores = measure(clients, few_drifting, requests, FEWER_SEEDS)
        figures += _against_both(f"forecast_few_tasks_{requests}", scores, f"{FEW_CLIENTS} clients alone, smooth drift")
    scores = measure(clients, changing, REQUESTS[-1], FEWER_SEEDS, first_scored=CHANGE_AT + 1)
    note = f"the {STEPS - CHANGE_AT - 1} steps after the mixture has changed at once"
    figures += _against_both("forecast_after_change", scores, note)
    note = f"CPU of the slowest of {SEEDS * STEPS * len(REQUESTS):,} steps, choosing orders and fitting included"
    figures.append(Figure("forecast_step", slowest_s, "s", "the aim", AIM_STEP_S, note))
    return figures


def _against_both(name: str, scores: Scores, note: str) -> list[Figure]:
    errors = scores.errors
    best_alpha = min(FIXED_AVERAGES, key=lambda alpha: errors[f"ewma alpha={alpha:g}"])
    detail = ", ".join(f"{method} {errors[method]:.4f}" for method in ("arima", "ewma", "last_step"))
    picked = ", ".join(f"{method} {count}" for method, count in sorted(scores.chosen.items()))
    floor = f"{note}; the true mixture itself {errors['truth']:.4f}; {detail}; aim {AIM_FLOOR}"
    best = (
        f"best fixed weight in hindsight {best_alpha:g}: {errors[f'ewma alpha={best_alpha:g}']:.4f}; "
        f"used: {picked}; {scores.inside:.0%} of bins within the 90% band; aim {AIM_EWMA}"
    )
    chosen, two, ewma = (errors[method] for method in ("chosen", "two_samples", "ewma"))
    return [
        Figure(f"{name}_vs_floor", chosen, "error", "two samples of the true mixture", two, floor),
        Figure(f"{name}_vs_ewma", chosen, "error", "EWMA, its weight picked by the backtest", ewma, best),
    ]


def measure(clients: Shares, mixture: Mixture, requests: int, seeds: int, first_scored: int = FIRST_SCORED) -> Scores:
    """Forecast series of steps, one step ahead."""
    errors: dict[str, list[float]] = defaultdict(list)
    chosen: Counter[str] = Counter()
    slowest_s, inside = 0.0, []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        truth = mixture(clients, rng)
        counts, others = rng.multinomial(requests, truth), rng.multinomial(requests, truth)
        series = SeriesForecaster(BIN_TOKENS, MAX_OUTPUT_TOKENS)
        for step, actual in enumerate(counts):
            shares = actual / requests
            if step >= first_scored and series.next is not None:
                told = {**series.forecasts, "chosen": np.array(series.next.shares)}
                told |= {"two_samples": others[step] / requests, "truth": truth[step]}
                for method, forecast in told.items():
                    errors[method].append(float(np.abs(forecast - shares).sum()))
                chosen[series.next.method] += 1
                expected, std = requests * told["chosen"], series.next.std(requests)
                inside.append((np.abs(actual - expected) <= 1.645 * std)[expected >= 5])
            began_s = time.process_time()
            series = series.fold(_statistics(actual))
            # The first fit imports statsmodels, once in a process.
            slowest_s = max(slowest_s, time.process_time() - began_s if seed else 0.0)
    means = {method: float(np.mean(values)) for method, values in errors.items()}
    return Scores(means, chosen, slowest_s, float(np.concatenate(inside).mean()))


def drifting(clients: Shares, rng: np.random.Generator) -> Shares:
    """[step, bin]: each client's weight is log-normal and swings to its reciprocal, each on a path of its own."""
    along, across = rng.normal(size=(2, len(clients)))
    angle = np.pi * np.arange(STEPS) / (STEPS - 1)
    return _mixed(clients, np.outer(np.cos(angle), along) + np.outer(np.sin(angle), across))


def few_drifting(clients: Shares, rng: np.random.Generator) -> Shares:
    return drifting(clients[rng.choice(len(clients), FEW_CLIENTS, replace=False)], rng)


def changing(clients: Shares, rng: np.random.Generator) -> Shares:
    """[step, bin]: a few clients, and from one step to the next a few others."""
    before, after = (clients[rng.choice(len(clients), FEW_CLIENTS, replace=False)].mean(axis=0) for _ in range(2))
    steps: Shares = np.where(np.arange(STEPS)[:, None] < CHANGE_AT, before, after)
    return steps


def _mixed(clients: Shares, log_weights: Shares) -> Shares:
    weights = np.exp(log_weights)
    shares: Shares = weights @ clients / weights.sum(axis=1, keepdims=True)
    return shares


@cache
def client_shares() -> tuple[Shares, str]:
    """[client, bin] of output lengths, each client's windows averaged, and where they come from."""
    if not HISTOGRAMS.exists():
        return _fitted_shares(), f"{len(FITTED)} fitted clients ({HISTOGRAMS.name} is missing)"
    windows: dict[tuple[int, int], Shares] = defaultdict(lambda: np.zeros(BINS))
    with gzip.open(HISTOGRAMS, "rt", newline="") as lines:
        for row in csv.DictReader(lines):
            if row["kind"] == "output":
                # Four bins of the file make one of ours.
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


def _statistics(counts: NDArray[np.int64]) -> StepStatistics:
    return StepStatistics(BIN_TOKENS, LengthCounts(tuple(counts.astype(float).tolist()), (0.0,) * (BINS + 1)))
