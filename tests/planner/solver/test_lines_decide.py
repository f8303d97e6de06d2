"""Tests that choosing fleets by fitted lines is almost as good as by the curves, for the bent step times of
mixture-of-experts models."""

import numpy as np
import pytest
from decode_oracle import curve_decode_s
from numpy.typing import NDArray
from planner_builders import RemainingWork, engine, request, snapshot

from planner.cost.profile import Curve, EngineProfile, Parallelism, ProfileSource, Provenance, StepTime
from planner.model import ConfigurationId, RequestState
from planner.solver.candidates import CandidateFleet
from planner.solver.from_snapshot import live_fleet
from planner.solver.options import consider
from planner.solver.phases import line_ahead
from planner.workload.sampled_lengths import SampledLengths

GPUS = 16
SAMPLES = 3
PROMPT_TOKENS = 500


def experts(tp: int, scale: float) -> EngineProfile:
    """Return a profile in which the first few sequences load most experts. It bends more than measured kernels do."""
    sizes = [float(2**k) for k in range(9)]
    base_s = [0.003 + scale * (0.008 + 0.045 * (1 - np.exp(-size / 12))) + 2e-5 * size for size in sizes]
    step = StepTime(Curve(tuple(sizes), tuple(base_s)), 2e-8 / tp)
    given = Provenance(ProfileSource.GIVEN, "")
    return EngineProfile(
        ConfigurationId(f"tp{tp}"), Parallelism(tp=tp), step, 9000.0 * tp, 400_000 * tp, 256, 3.0, given
    )


PROFILES = [experts(tp, scale) for tp, scale in ((1, 1.0), (2, 0.6), (4, 0.4), (8, 0.3))]


def along_curves_s(fleet: CandidateFleet, context: NDArray[np.int64], samples: NDArray[np.int64]) -> float:
    """Return the mean seconds to the end along the curves, with the plan's costs included."""
    profiles = {profile.id: profile for profile in PROFILES}
    ends_s = [
        [
            curve_decode_s(
                profiles[instance.configuration],
                [RemainingWork(int(context[row]), int(sample[row])) for row in fleet.requests_of(place)],
            )
            for place, instance in enumerate(fleet.instances)
        ]
        for sample in samples
    ]
    return float((np.array(ends_s) + fleet.migration_s + fleet.switch_s).max(axis=1).mean())


@pytest.mark.parametrize("runs", [0, 1, 2, 3])
@pytest.mark.parametrize("generated", [0, 4000, 9000])
def test_the_fleet_that_lines_choose_is_as_good_along_the_curves(runs: int, generated: int) -> None:
    random = np.random.default_rng(generated + runs)
    drawn = np.minimum(random.lognormal(np.log(4000), 0.9, (SAMPLES, 192)).astype(np.int64), 30_000)
    left = int((drawn[0] > generated).sum())
    samples = np.sort(drawn, axis=1)[:, -left:] - generated
    samples = random.permuted(np.maximum(samples, 1), axis=1)
    now = PROFILES[runs]
    engines = [engine(f"e{place}", now.id) for place in range(GPUS // now.parallelism.gpus)]
    state = RequestState.RUNNING if generated else RequestState.WAITING
    requests = [
        request(f"r{n:03d}", generated, where=f"e{n % len(engines)}", prompt=PROMPT_TOKENS, state=state)
        for n in range(left)
    ]
    seen = snapshot(engines, requests)
    ahead = samples.mean(axis=0)
    lines = tuple(line_ahead(profile, ahead, float(PROMPT_TOKENS + generated), GPUS) for profile in PROFILES)
    fleet = live_fleet(seen, lines, GPUS, 8, 4, work_budget=20_000)
    lengths = SampledLengths(
        samples, np.rint(ahead).astype(np.int64), np.quantile(samples, 0.8, axis=0).astype(np.int64)
    )
    options = consider(fleet, lengths, 1.0).found
    ends_s = [along_curves_s(option.fleet, fleet.problem.requests.context_tokens, samples) for option in options]
    chosen = min(range(len(options)), key=lambda place: options[place].total_s)
    assert len(options) > 3
    assert ends_s[chosen] <= 1.02 * min(ends_s)
    assert options[chosen].total_s == pytest.approx(ends_s[chosen], rel=0.1)
