"""`orchestrrl profile predict`: profiles from data sheets, as tables, JSON and files."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.engines.profiles.store import parse_profile, read_profile
from planner.cost.paper import named_profile


def predict(*arguments: str) -> Result:
    return CliRunner().invoke(application(), ["profile", "predict", *arguments])


def test_json_output_is_a_profile(tmp_path: Path) -> None:
    out = tmp_path / "profile.yaml"
    result = predict("Qwen/Qwen3-32B", "--gpu", "H100", "--gpu-count", "8", "--json", "--out", str(out))
    assert (result.exit_code, result.stderr) == (0, "")
    profile = parse_profile(result.stdout)
    assert (profile.model, profile.gpu, profile.engine) == ("qwen3-32b", "h100", "vllm")
    assert [configuration.id for configuration in profile.configurations] == ["tp1", "tp2", "tp4", "tp8"]
    assert read_profile(out) == profile


def test_fewer_bits_fit_on_fewer_gpus() -> None:
    sixteen, eight = (
        {row["id"]: row for row in json.loads(predict("llama-3.1-70b", *bits, "--json").stdout)["configurations"]}
        for bits in ((), ("--weight-bits", "8", "--kv-bits", "8"))
    )
    assert set(eight) - set(sixteen) == {"tp2"}
    assert eight["tp4"]["kv_capacity_tokens"] > 2 * sixteen["tp4"]["kv_capacity_tokens"]


def test_built_in_profile_is_selected_by_name() -> None:
    result = predict("paper-14b-h800", "--json")
    assert parse_profile(result.stdout) == named_profile("paper-14b-h800")


def test_output_without_json_is_a_table(tmp_path: Path) -> None:
    out = tmp_path / "profile.yaml"
    result = predict("qwen3-30b-a3b", "--gpu-count", "16", "--phase", "tail", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "qwen3-30b-a3b on h100, vllm" in result.stdout
    assert f"wrote {out}" in result.stdout


def test_all_errors_are_reported() -> None:
    result = predict(
        "no", "--gpu", "no", "--engine-kind", "no", "--phase", "no", "--kv-bits", "3", "--weight-bits", "5"
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == [
        "MODEL",
        "--gpu",
        "--engine-kind",
        "--weight-bits",
        "--kv-bits",
        "--phase",
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("llama-3.1-70b", "--gpu-count", "1"), 1, "model llama-3.1-70b does not fit on any layout of up to 1 h100"),
        (("qwen3-8b", "--out", "/proc/no/profile.yaml"), 2, "--out: cannot write "),
    ],
)
def test_impossible_prediction_is_reported(arguments: tuple[str, ...], status: int, message: str) -> None:
    result = predict(*arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr.startswith(message)
