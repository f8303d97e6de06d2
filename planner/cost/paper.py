"""Profiles of the engine of the OrchestrRL paper (arXiv 2601.01209), by name.

The paper gives the times of two phases of a step at three TP sizes, for Qwen2.5-14B on 8 H800 GPUs (section 2.1). Its
engine is slower than those in `fitted.py`. The host times per iteration and per sequence are equal for all TP sizes.
They are fitted to these six times, together with the lengths of the two phases, which the paper omits. All other
numbers are from the roofline.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from planner.cost.engines import EngineModel, engine_named, with_constants
from planner.cost.hardware import gpu_named
from planner.cost.models import Model, model_named
from planner.cost.predict import predict, predict_profile, published_precision
from planner.cost.profile import EngineProfile, Parallelism, Profile, ProfileSource, Provenance
from planner.cost.roofline import weight_bytes_per_gpu

Floats = NDArray[np.float64]

GPUS = 8
GPU = gpu_named("h800")
FITTED_MODEL = model_named("qwen2.5-14b")
FITTED_ON = "2026-11-21"


@dataclass(frozen=True, slots=True)
class PhaseOfStep:
    """One phase of a generation step: the number of sequences on all instances, their mean context, and the number of
    iterations."""

    sequences: float
    context_tokens: float
    iterations: float

    def seconds(self, profile: EngineProfile) -> float:
        """Return the duration of the phase in seconds, on as many equal instances as fit on the paper's GPUs."""
        mine = self.sequences * profile.parallelism.gpus / GPUS
        return self.iterations * profile.step.at(mine, mine * self.context_tokens)


# Seconds by TP, section 2.1.
EARLY_S = {2: 79.2, 4: 96.3, 8: 138.7}
TAIL_S = {2: 208.4, 4: 188.3, 8: 165.1}

# Given by the paper: the batch. Assumed: the contexts, and the number of sequences in the tail.
EARLY_SEQUENCES, EARLY_CONTEXT_TOKENS = 512.0, 2000.0
TAIL_SEQUENCES, TAIL_CONTEXT_TOKENS = 8.0, 8000.0


@dataclass(frozen=True, slots=True)
class HostFit:
    """The host times and phase lengths that are fitted to the six phase times of the paper."""

    step_s: float
    sequence_s: float  # beyond the roofline's own share for each sequence
    early_iterations: float
    tail_iterations: float

    @property
    def early(self) -> PhaseOfStep:
        return PhaseOfStep(EARLY_SEQUENCES, EARLY_CONTEXT_TOKENS, self.early_iterations)

    @property
    def tail(self) -> PhaseOfStep:
        return PhaseOfStep(TAIL_SEQUENCES, TAIL_CONTEXT_TOKENS, self.tail_iterations)


# By least squares on the logarithms of the six times; tests/planner/cost/test_paper.py repeats the fit.
FITTED = HostFit(step_s=7.074e-3, sequence_s=24.5e-6, early_iterations=2555, tail_iterations=14356)

# An eighth of half a terabyte of a node's CPU memory. Assumed: the paper does not give it.
CPU_KV_BYTES_PER_GPU = 64e9

# A redeployment of the case study to TP=8 takes this long (figure 11); all but loading weights counts as start-up.
SWITCH_TO_TP8_S = 1.5

PROFILES = {"paper-14b-h800": "qwen2.5-14b", "paper-32b-h800": "qwen2.5-32b"}


class UnknownProfile(ValueError):
    """Raised for an unknown built-in profile; the message lists the known profiles."""


@cache
def named_profile(name: str) -> Profile:
    """Return the profile of one of the paper's two models on the paper's engine and GPUs, with all TP sizes at which
    the model fits.

    Raises UnknownProfile if no built-in profile has this name.
    """
    if name not in PROFILES:
        raise UnknownProfile(f"unknown profile {name!r}; known profiles: {', '.join(sorted(PROFILES))}")
    model, layouts = model_named(PROFILES[name]), [Parallelism(tp=tp) for tp in (1, 2, 4, 8)]
    return predict_profile(model, GPU, layouts, paper_engine(model), cpu_kv_bytes_per_gpu=CPU_KV_BYTES_PER_GPU)


def paper_engine(model: Model, host: HostFit = FITTED) -> EngineModel:
    """Return the paper's vLLM engine for a model. KV cache that does not fit on the GPUs can go to CPU memory (section
    4.1)."""
    vllm = engine_named("vllm")
    switched = Parallelism(tp=8)
    loading_s = weight_bytes_per_gpu(FITTED_MODEL, switched, published_precision(FITTED_MODEL)) / GPU.pcie_bytes_per_s
    return replace(
        with_constants(vllm, step_s=host.step_s, sequence_s=host.sequence_s),
        name="vllm-paper",
        provenance=_provenance(model, host),
        start_detail="arXiv 2601.01209, figure 11: 1.5 s in all for TP=8",
        start_s=SWITCH_TO_TP8_S - switched.tp * vllm.start_s_per_gpu - loading_s,
        spills=True,
    )


def _provenance(model: Model, host: HostFit) -> Provenance:
    """Return the provenance of a model's profile. It includes fit errors only for the model to which the host times
    were fitted."""
    detail = "data sheets, vllm constants, host time fitted to phases of Qwen2.5-14B on H800 in arXiv 2601.01209"
    if model != FITTED_MODEL:
        return Provenance(ProfileSource.ROOFLINE, FITTED_ON, f"{detail}, applied to {model.name}")
    seconds, measured = phase_seconds(_tp_profiles(host), host), _measured_s()
    errors = np.abs(seconds / measured - 1)
    return Provenance(
        ProfileSource.ROOFLINE, FITTED_ON, detail, len(measured), float(errors.mean()), float(errors.max())
    )


def phase_seconds(profiles: Sequence[EngineProfile], host: HostFit = FITTED) -> Floats:
    """Return phase durations in seconds: first the early phase for each profile, then the tail for each profile."""
    return np.array([phase.seconds(profile) for phase in (host.early, host.tail) for profile in profiles])


def _measured_s() -> Floats:
    return np.array([*EARLY_S.values(), *TAIL_S.values()])


def _tp_profiles(host: HostFit) -> list[EngineProfile]:
    engine = with_constants(engine_named("vllm"), step_s=host.step_s, sequence_s=host.sequence_s)
    return [predict(FITTED_MODEL, GPU, Parallelism(tp=tp), engine) for tp in EARLY_S]
