"""Tests of the paper's profile: it reproduces both phases, in which narrow engines win first and wide ones last."""

from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from scipy.optimize import least_squares

from planner.cost.engines import engine_named, with_constants
from planner.cost.hardware import gpu_named
from planner.cost.models import model_named
from planner.cost.paper import (
    EARLY_S,
    FITTED,
    PROFILES,
    TAIL_S,
    HostFit,
    UnknownProfile,
    named_profile,
    phase_seconds,
)
from planner.cost.predict import predict
from planner.cost.profile import EngineProfile, Parallelism

PAPER = Path(__file__).parents[4] / "shared" / "reference" / "paper.yaml"


def tp2_to_tp8() -> tuple[EngineProfile, ...]:
    return named_profile("paper-14b-h800").configurations[1:]


def test_the_phases_are_reproduced() -> None:
    early_s, tail_s = phase_seconds(tp2_to_tp8()).reshape(2, 3).tolist()
    assert early_s == sorted(early_s)
    assert tail_s == sorted(tail_s, reverse=True)
    for seconds, measured_s in ((early_s, list(EARLY_S.values())), (tail_s, list(TAIL_S.values()))):
        assert seconds == pytest.approx(measured_s, rel=0.05)
        assert seconds[2] / seconds[0] == pytest.approx(measured_s[2] / measured_s[0], rel=0.05)


@pytest.mark.shared
def test_the_times_are_those_of_the_paper() -> None:
    if not PAPER.exists():
        pytest.skip(f"there is no {PAPER}")
    phases = yaml.safe_load(PAPER.read_text())["phase_example"]
    assert phases["early"] == {f"tp{tp}_s": seconds for tp, seconds in EARLY_S.items()}
    assert phases["tail"] == {f"tp{tp}_s": seconds for tp, seconds in TAIL_S.items()}


def fit_host() -> HostFit:
    """Return the fit by least squares on the logarithms of the six times."""
    model, gpu = model_named("qwen2.5-14b"), gpu_named("h800")
    logs_s = np.log([*EARLY_S.values(), *TAIL_S.values()])

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        host = HostFit(*np.exp(logs).tolist())
        engine = with_constants(engine_named("vllm"), step_s=host.step_s, sequence_s=host.sequence_s)
        profiles = [predict(model, gpu, Parallelism(tp=tp), engine) for tp in EARLY_S]
        return np.asarray(np.log(phase_seconds(profiles, host)) - logs_s)

    return HostFit(*np.exp(least_squares(residuals, np.log([1e-2, 50e-6, 2000.0, 10000.0])).x).tolist())


def test_fitting_again_gives_the_same_host_time() -> None:
    assert astuple(fit_host()) == pytest.approx(astuple(FITTED), rel=1e-3)


def test_host_time_per_sequence_is_similar_for_all_tp() -> None:
    """It is about 70 us in many engines; a model without it has large errors."""
    betas_s = [profile.configuration((1, 512)).beta_s for profile in tp2_to_tp8()]
    assert betas_s == pytest.approx([70e-6] * 3, rel=0.15)


def test_start_of_tp8_takes_the_time_of_the_case_study() -> None:
    assert tp2_to_tp8()[-1].switch_s == pytest.approx(1.5)


@pytest.mark.parametrize("name", PROFILES)
def test_every_named_profile_has_a_provenance(name: str) -> None:
    profile = named_profile(name)
    assert profile.moves is not None
    assert [configuration.id for configuration in profile.configurations] == ["tp1", "tp2", "tp4", "tp8"]
    for configuration in profile.configurations:
        assert "2601.01209" in configuration.provenance.detail
        assert configuration.spill_capacity_tokens > 0
    fitted = profile.configurations[0].provenance.fit_error_mean
    assert (fitted is None) == (name != "paper-14b-h800")
    assert fitted is None or 0 < fitted < 0.02


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(UnknownProfile, match="paper-14b-h800, paper-32b-h800"):
        named_profile("nonsense")
