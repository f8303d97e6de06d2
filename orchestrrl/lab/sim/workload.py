"""Draw the requests of each generation step from a scenario's distributions. The functions have no side effects.

Lengths are drawn by inverse transform sampling. A Gaussian copula correlates the lengths of the samples of one prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from orchestrrl.lab.sim.scenario import (
    EmpiricalLengths,
    HistogramLengths,
    Lengths,
    LognormalLengths,
    ParetoLengths,
    WorkloadSection,
)
from orchestrrl.lab.simulated_engine.scheduler import Scheduler
from planner.model import RequestId

Floats = NDArray[np.float64]
MEAN_OF = 4096  # quantiles


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A simulated request. `output_tokens` is the length of its answer. Only engines and a planner with known lengths
    may read this field."""

    id: RequestId
    group: str
    prompt_tokens: int
    output_tokens: int
    group_index: int = 0  # the index of its prompt within the step
    max_tokens: int = 1 << 20

    def submit(self, engine: Scheduler, at_s: float, generated: int = 0, *, prefilled: bool = False) -> None:
        """Queue the request on an engine at time `at_s`. `generated` is the number of tokens of its answer that have
        already been generated. If `prefilled` is set, the engine has the KV of these tokens and of the prompt."""
        engine.submit(
            at_s,
            self.id,
            self.prompt_tokens + generated,
            self.output_tokens - generated,
            prefilled,
            group=self.group,
            prompt_tokens=self.prompt_tokens,
        )


def requests_of_step(workload: WorkloadSection, seed: int, step: int) -> list[SimRequest]:
    """Return the requests of a generation step in the order of submission, grouped by prompt. Equal arguments give
    equal requests."""
    rng = np.random.default_rng((seed, step))
    prompts, samples = workload.prompts, workload.samples
    prompt_tokens, of_prompt = _drawn_prompts(workload, rng)
    output_tokens = _lengths(workload, of_prompt, rng.standard_normal((prompts, samples)), step)
    return [
        SimRequest(
            RequestId(f"s{step}-p{prompt:05d}-{sample:02d}"),
            f"s{step}-p{prompt:05d}",
            int(prompt_tokens[prompt]),
            int(output_tokens[prompt, sample]),
            prompt,
            workload.max_tokens,
        )
        for prompt in range(prompts)
        for sample in range(samples)
    ]


def redrawn(workload: WorkloadSection, seed: int, step: int, times: int) -> NDArray[np.int64]:
    """Draw the output lengths of a step's requests again, `times` times, for the same prompts. Return the lengths in
    tokens, as an array indexed by [draw, request]."""
    _, of_prompt = _drawn_prompts(workload, np.random.default_rng((seed, step)))
    rng = np.random.default_rng((seed, step, times))
    shape = (workload.prompts, workload.samples)
    return np.array([_lengths(workload, of_prompt, rng.standard_normal(shape), step).reshape(-1) for _ in range(times)])


def mean_tokens(workload: WorkloadSection) -> float:
    """Return the expected number of tokens of a sample in the first step, prompt and answer together."""
    evenly = (np.arange(MEAN_OF) + 0.5) / MEAN_OF
    answers = np.clip(quantile_function(workload.lengths)(evenly), 1, workload.max_tokens)
    return float(np.mean(workload.prompt_tokens) + answers.mean())


def _drawn_prompts(workload: WorkloadSection, rng: np.random.Generator) -> tuple[NDArray[np.int64], Floats]:
    """Return two arrays: the number of tokens of each prompt, indexed by [prompt], and a standard normal score that the
    samples of each prompt share, indexed by [prompt, 1]."""
    low, high = workload.prompt_tokens
    prompt_tokens = rng.integers(low, high + 1, size=workload.prompts)
    return prompt_tokens, rng.standard_normal((workload.prompts, 1))


def _lengths(workload: WorkloadSection, of_prompt: Floats, of_sample: Floats, step: int) -> NDArray[np.int64]:
    """Return the number of output tokens of each sample, as an array indexed by [prompt, sample]. `of_prompt` and
    `of_sample` are the standard normal scores of the prompts and of the samples."""
    correlation = workload.correlation
    score = np.sqrt(correlation) * of_prompt + np.sqrt(1 - correlation) * of_sample
    lengths = quantile_function(workload.lengths)(ndtr(score)) * (1 + workload.drift_per_step) ** step
    return np.clip(np.rint(lengths), 1, workload.max_tokens).astype(np.int64)


def quantile_function(lengths: Lengths) -> Callable[[Floats], Floats]:
    """Return the quantile function of a length distribution. It maps a probability in 0..1 to a length in tokens, which
    is not yet limited to the maximum length."""
    match lengths:
        case LognormalLengths(median_tokens=median, sigma=sigma):
            return lambda u: median * np.exp(sigma * ndtri(np.clip(u, 1e-12, 1 - 1e-12)))
        case ParetoLengths(minimum_tokens=minimum, exponent=exponent):
            return lambda u: minimum * np.power(np.clip(1 - u, 1e-12, 1), -1 / exponent)
        case HistogramLengths(quantiles=quantiles, tokens=tokens):
            logs = np.log(np.array(tokens))
            return lambda u: np.exp(np.interp(u, np.array(quantiles), logs))
        case EmpiricalLengths(tokens=tokens):
            ordered = np.sort(np.array(tokens, dtype=np.float64))
            return lambda u: ordered[np.minimum((u * len(ordered)).astype(np.int64), len(ordered) - 1)]
