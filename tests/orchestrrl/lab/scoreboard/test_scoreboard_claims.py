"""Tests of the paper's claims: they match the reference, and each is reproduced or listed as not reproduced."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrrl.lab.scoreboard import constants
from orchestrrl.lab.scoreboard.claims import CLAIMS, Constant, PaperClaim, ScoreboardRow, compared
from orchestrrl.lab.scoreboard.constants import every
from orchestrrl.lab.scoreboard.fidelity import HELD
from orchestrrl.lab.scoreboard.run import FIGURES, NOT_HERE, chosen

FIDELITY = Path(__file__).parents[4] / "docs" / "fidelity.md"
REFERENCE = Path(__file__).parents[5] / "shared" / "reference" / "paper.yaml"


@pytest.mark.shared
def test_claims_match_the_reference() -> None:
    if not REFERENCE.exists():
        pytest.skip(f"there is no {REFERENCE.name}")
    assert dict(CLAIMS) == of_reference(yaml.safe_load(REFERENCE.read_text()))


def of_reference(paper: dict[str, Any]) -> dict[str, PaperClaim]:
    """Return the reference's claims by our names. Its inputs (devices, prices, models, GPUs) are not claims."""
    head, fabric, both = paper["headline"], paper["fabric"], paper["codesign_2x2"]
    found: dict[str, Any] = {
        f"headline.throughput.{each['model']}.{each['max_tokens']}": each["ratio"]
        for each in head["throughput_vs_verl_to"]
    }
    for model, arms in head["ablation_vs_verl_to"].items():
        found |= {f"headline.ablation.{model}.{arm}": ratio for arm, ratio in arms.items()}
    found["headline.forecast_error"] = PaperClaim.bound(head["forecast_bin_relative_error_max"])
    found["headline.solve_s"] = PaperClaim.bound(head["solver"]["solve_s_max"])
    found |= {f"headline.case_study.{name}": value for name, value in head["case_study_switch"].items()}
    for phase, times in paper["phase_example"].items():
        found |= {f"phase_example.{phase}.{name}": value for name, value in times.items()}
    found["gen_vs_train_time"] = paper["gen_vs_train_time"]
    found["worker_time_skew"] = paper["worker_time_skew_max_over_min"]
    slack = paper["slack"]
    found["slack.gen_tp_median_s"] = PaperClaim.bound(slack["gen_tp_median_s_max"])
    found["slack.train_window_s"] = slack["train_window_s"]
    found["slack.weight_sync_idle_s"] = PaperClaim(slack["weight_sync_idle_s_min"], float("inf"))
    assert fabric["throughput_vs_fat_tree"].pop("rfabric") == "close to 1"
    found["fabric.throughput.rfabric"] = 1.0
    found |= {f"fabric.throughput.{kind}": value for kind, value in fabric["throughput_vs_fat_tree"].items()}
    found["fabric.cost.rfabric"] = fabric["rfabric_cost_vs_fat_tree"]
    found |= {f"fabric.cost.{kind.split('_3_1')[0]}": value for kind, value in fabric["cost_vs_fat_tree"].items()}
    found |= {f"fabric.cost_vs_gpus.{rate[:3]}": value for rate, value in fabric["fat_tree_cost_vs_gpu_cost"].items()}
    found |= {f"fabric.cost_efficiency.{kind}": value for kind, value in fabric["cost_efficiency_rfabric_vs"].items()}
    for ours, theirs in (("throughput", "throughput"), ("per_dollar", "throughput_per_dollar")):
        found |= {f"codesign.{ours}.{arm}": value for arm, value in both[theirs].items()}
    effect = paper["fabric_effect_on_compute_switch"]
    found["fabric_effect.afd_phase"] = effect["afd_phase_time"]
    found["fabric_effect.kv_migration"] = effect["kv_migration_time"]
    found["fabric_effect.gen_step"] = effect["gen_step_time"]
    fidelity = paper["simulator_fidelity"]
    found["fidelity.training_mfu"] = PaperClaim.bound(fidelity["training_mfu_error_max"])
    found |= {
        f"fidelity.generation_{name}": PaperClaim.bound(v) for name, v in fidelity["generation_error_mean"].items()
    }
    found["fidelity.network"] = PaperClaim.bound(fidelity["network_error_mean"])
    found["fidelity.end_to_end"] = fidelity["end_to_end_error"]
    return {name: claim_of(value) for name, value in found.items()}


def claim_of(value: Any) -> PaperClaim:
    if isinstance(value, PaperClaim):
        return value
    return PaperClaim(*value) if isinstance(value, list) else PaperClaim.of(float(value))


def test_every_claim_is_reproduced_or_listed_as_not_reproduced() -> None:
    """Names of claims are found in the code of the figures, where they may be f-strings."""
    made = [
        pattern
        for path in Path(constants.__file__).parent.glob("*.py")
        if path.name not in ("claims.py", "run.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (pattern := _claim_pattern(node)) is not None
    ]
    for name in CLAIMS:
        assert any(re.fullmatch(pattern, name) for pattern in made) != (name in NOT_HERE), name
    assert set(NOT_HERE) <= set(CLAIMS)


def _claim_pattern(node: ast.AST) -> str | None:
    """Return the pattern of a string literal or f-string; None for an f-string that begins with a replacement field."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    if not isinstance(node, ast.JoinedStr) or not isinstance(node.values[0], ast.Constant):
        return None
    pattern = "".join(re.escape(str(each.value)) if isinstance(each, ast.Constant) else ".+" for each in node.values)
    return pattern if re.match(r"\w+\\\.", pattern) else None


def test_constants_have_unique_names_and_sources() -> None:
    listed = every()
    assert len({each.name for each in listed}) == len(listed)
    for each in listed:
        assert each.source.strip(), each.name


def test_every_constant_is_used() -> None:
    """Every listed constant is used by a figure, or is defined by a name of the simulator."""
    listing = Path(constants.__file__)
    code = "".join(path.read_text() for path in listing.parent.glob("*.py"))
    unread = [name for name, value in vars(constants).items() if isinstance(value, Constant)]
    unread = [name for name in unread if not re.search(rf"given\.{name}\b", code)]
    calls = {
        ast.unparse(each.targets[0]): each.value
        for each in ast.parse(listing.read_text()).body
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)
    }
    assert [name for name in unread if not isinstance(calls[name].args[1], ast.Name)] == []


def test_held_errors_match_the_fidelity_page() -> None:
    rows = [line for line in FIDELITY.read_text().splitlines() if line.startswith("| ")]
    for name, (ours, _) in HELD.items():
        assert any(f"| {ours * 100:.1f} %" in row for row in rows), name


def test_figures_are_found_by_number() -> None:
    assert len({figure.id for figure in FIGURES}) == len(FIGURES)
    assert [figure.id for figure in chosen(["13"])] == ["13-dense", "13-moe"]
    assert [figure.id for figure in chosen(["13-moe", "2"])] == ["2", "2-phases", "13-moe"]
    assert chosen([]) == list(FIGURES)


@pytest.mark.parametrize(
    ("claim", "ours", "difference"),
    [
        (PaperClaim.of(2.0), 3.0, 0.5),
        (PaperClaim.of(-0.5), -0.25, 0.5),
        (PaperClaim(1.0, 2.0), 1.5, 0.0),
        (PaperClaim(1.0, 2.0), 0.5, -0.5),
        (PaperClaim.bound(4.0), -9.0, 0.0),
        (PaperClaim.bound(4.0), 5.0, 0.25),
        (PaperClaim(1.0, float("inf")), 1e9, 0.0),
    ],
)
def test_difference_is_relative_to_the_nearer_end(claim: PaperClaim, ours: float, difference: float) -> None:
    assert claim.difference(ours) == pytest.approx(difference)


def test_reason_is_kept_only_for_large_differences() -> None:
    near = compared("Figure 15", "cost", "fabric.cost.topoopt", 0.22, "because")
    far = compared("Figure 15", "cost", "fabric.cost.topoopt", 0.42, "because")
    assert (near.why, far.why) == ("", "because")
    assert far.is_far
    assert not near.is_far


def test_given_rows_are_not_compared() -> None:
    row = ScoreboardRow("Figure 11", "switching", PaperClaim.of(1.5), 3.0, given=True)
    assert row.difference is None
    assert not row.is_far
