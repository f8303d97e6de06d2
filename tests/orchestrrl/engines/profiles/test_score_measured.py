"""Profiles fitted to some lengths predict rows at other lengths that were generated from a known step time."""

import pytest
from silicon_rows import csv_of

from orchestrrl.engines.profiles.score import score_measured
from orchestrrl.engines.profiles.silicon import SiliconData, parse_silicon
from planner.cost.fit import StepSample, TooFewSamples, fit_step
from planner.cost.profile import ProfileSource

LENGTHS = ((1024, 256), (4096, 256), (512, 1024))
BATCHES = (4, 8, 16, 32)


def tpot_ms(batch: int, prompt: int, output: int) -> float:
    """Return 2 ms + 50 us per sequence + 20 ns per KV token + 30 us per prefilled token, in milliseconds."""
    kv_tokens = batch * (prompt + output / 2)
    return 2.0 + 0.05 * batch + 2e-5 * kv_tokens + 0.03 * (batch - 1) * prompt / output


def row(batch: int, prompt: int, output: int, **others: str) -> dict[str, str]:
    load = {"batch_size": str(batch), "isl": str(prompt), "osl": str(output), "tp_size": "8"}
    return {**load, "silicon_tpot_ms": str(tpot_ms(batch, prompt, output)), **others}


def measured(**others: str) -> SiliconData:
    return parse_silicon(csv_of(*(row(batch, *lengths, **others) for lengths in LENGTHS for batch in BATCHES)))


def test_rows_at_other_lengths_are_predicted_exactly() -> None:
    scored, unpredicted = score_measured(measured())
    assert [each.deployment.row for each in scored] == list(range(1, 13))
    assert {each.source for each in scored} == {ProfileSource.MEASURED}
    assert max(abs(each.error) for each in scored) < 1e-3
    assert unpredicted == []


def test_scored_lengths_are_excluded_from_the_fit() -> None:
    """The rows of one pair of lengths are twice as slow. If they were part of the fit, their error would not be 50
    %."""
    rows = [row(batch, *lengths) for lengths in LENGTHS for batch in BATCHES]
    for each in rows[:4]:
        each["silicon_tpot_ms"] = str(2 * float(each["silicon_tpot_ms"]))
    scored, _ = score_measured(parse_silicon(csv_of(*rows)))
    assert [each.error for each in scored[:4]] == pytest.approx([-0.5] * 4, abs=1e-3)


def test_engines_are_fitted_separately_and_too_few_rows_are_reported() -> None:
    rows = [row(batch, *lengths) for lengths in LENGTHS for batch in BATCHES]
    rows += [row(batch, 1024, 256, backend_version="2.0") for batch in BATCHES]
    scored, unpredicted = score_measured(parse_silicon(csv_of(*rows)))
    assert len(scored) == 12
    assert [each.row for each in unpredicted] == [13, 14, 15, 16]
    assert (
        unpredicted[0].reason
        == "too few measurements: a fit requires at least 8 rows whose lengths differ from those of the predicted "
        "rows, got 0"
    )


def test_fit_needs_kv_tokens_that_vary_independently_of_sequences() -> None:
    samples = [StepSample(batch, 100.0 * batch, 0.01) for batch in BATCHES]
    with pytest.raises(TooFewSamples, match="4 samples"):
        fit_step(samples, prefilled_tokens=[1.0, 2.0, 3.0, 4.0])
