"""Tests of step times against measured deployments, by source of the profile. docs/fidelity.md has the tables, and
`orchestrrl profile score CSV --source measured|roofline` prints them."""

from pathlib import Path
from typing import Any

import pytest

from orchestrrl.engines.profiles.score import report, roofline, score_measured
from orchestrrl.engines.profiles.silicon import SiliconData, read_silicon

SILICON = Path(__file__).parents[5] / "shared" / "data" / "silicon_decode_h100_h200.csv"

# Error of the OrchestrRL paper's simulator against its testbed (section 7.2): 3.3 % for TP, 5.95 % for AFD.
PAPERS_ERROR = 0.0595
# Solvers and their roundings differ between machines.
BY_ROUNDING = 0.005

QWEN, QWEN_MOE, LLAMA = "Qwen/Qwen3-32B", "Qwen/Qwen3-235B-A22B-FP8", "meta-llama/Llama-3.1-8B-Instruct"
LLAMA_FP8, OSS = "nvidia/Llama-3.1-8B-Instruct-FP8", "openai/gpt-oss-120b"
# (system, backend, model): rows, mean error.
MEASURED = {
    ("h100_sxm", "sglang", QWEN): (78, 0.036),
    ("h100_sxm", "trtllm", QWEN_MOE): (124, 0.021),
    ("h100_sxm", "trtllm", QWEN): (176, 0.030),
    ("h100_sxm", "trtllm", LLAMA): (177, 0.050),
    ("h100_sxm", "vllm", QWEN): (90, 0.023),
    ("h100_sxm", "vllm", OSS): (19, 0.101),
    ("h200_sxm", "sglang", LLAMA): (46, 0.051),
    ("h200_sxm", "vllm", LLAMA_FP8): (10, 0.102),
}
# From data sheets, with engine constants fitted without the tested model. docs/step-times.md explains the large errors.
ROOFLINE = {
    ("h100_sxm", "sglang", QWEN): (84, 0.096),
    ("h100_sxm", "trtllm", QWEN_MOE): (127, 0.124),
    ("h100_sxm", "trtllm", QWEN): (180, 0.069),
    ("h100_sxm", "trtllm", LLAMA): (177, 0.109),
    ("h100_sxm", "trtllm", OSS): (5, 0.736),
    ("h100_sxm", "vllm", QWEN): (93, 0.117),
    ("h100_sxm", "vllm", OSS): (36, 0.136),
    ("h200_sxm", "sglang", LLAMA): (46, 0.120),
    ("h200_sxm", "vllm", LLAMA_FP8): (21, 1.399),
}


@pytest.fixture(scope="module")
def silicon() -> SiliconData:
    if not SILICON.exists():
        pytest.skip(f"there is no {SILICON}")
    return read_silicon(SILICON)


def by_group(result: dict[str, Any]) -> dict[tuple[str, str, str], tuple[int, float]]:
    return {
        (group["system"], group["backend"], group["model"]): (group["rows"], group["error_mean"])
        for group in result["groups"]
    }


def check(found: dict[tuple[str, str, str], tuple[int, float]], expected: dict[tuple[str, str, str], Any]) -> None:
    assert {key: rows for key, (rows, _) in found.items()} == {key: rows for key, (rows, _) in expected.items()}
    for key, (_, error) in expected.items():
        assert found[key][1] <= error + BY_ROUNDING, key


@pytest.mark.shared
def test_measured_profiles_have_errors_within_the_papers(silicon: SiliconData) -> None:
    """The 720 tested rows were not used for fitting; 49 other rows have too few measurements."""
    result = report(*score_measured(silicon))
    overall = result["overall"]
    assert overall["all"]["rows"] == 720
    assert overall["all"]["error_mean"] <= PAPERS_ERROR
    assert overall["dense"]["error_mean"] <= PAPERS_ERROR
    assert overall["moe"]["error_mean"] <= PAPERS_ERROR
    assert {row["source"] for row in result["predictions"]} == {"measured"}
    check(by_group(result), MEASURED)


@pytest.mark.shared
def test_roofline_errors_match_the_documentation(silicon: SiliconData) -> None:
    """These errors exceed the paper's. Roofline predictions are a starting point, and a planner depends on ratios."""
    result = report(roofline(silicon.deployments), silicon.unpredicted)
    overall = result["overall"]["all"]
    assert (overall["rows"], {row["source"] for row in result["predictions"]}) == (769, {"roofline"})
    assert overall["error_mean"] == pytest.approx(0.143, abs=BY_ROUNDING)
    assert overall["error_median"] == pytest.approx(0.081, abs=BY_ROUNDING)
    assert overall["ratio"]["error_median"] == pytest.approx(0.043, abs=BY_ROUNDING)
    check(by_group(result), ROOFLINE)
