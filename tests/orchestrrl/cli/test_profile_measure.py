"""Profile commands: files are written completely or not written, and errors exit with status 2."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.main import application

PROFILE = """
model: simulated
gpu: H800
engine: vllm
configurations:
  - id: tp2
    parallelism: {tp: 2}
    step_s: {sequences: [1, 64], seconds: [0.018, 0.023], per_kv_token: 4e-8}
    prefill_tokens_per_s: 18000
    kv_capacity_tokens: 582885
    max_sequences: 1024
    switch_s: 1.7
    provenance: {source: measured, date: 2026-01-31, samples: 3, fit_error_mean: 0.01}
    others:
      switch_s: {source: given, date: 2026-01-31, detail: by hand}
"""


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(application(), ["profile", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "p.yaml"
    path.write_text(PROFILE)
    return path


def test_show_prints_the_document(file: Path) -> None:
    status, out, _ = run("show", str(file), "--json")
    assert status == 0
    assert json.loads(out)["configurations"][0]["step_s"]["per_kv_token"] == 4e-8


def test_show_reports_all_errors(file: Path) -> None:
    file.write_text(PROFILE.replace("1.7", "-1").replace("1024", "0"))
    status, out, err = run("show", str(file))
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        "configurations[0].max_sequences: must be > 0, got 0",
        "configurations[0].switch_s: must be >= 0, got -1",
    ]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--gpu", "H20"], "--gpu: "),
        (
            ["--transfer-gbps", "0"],
            "--kv-bytes-per-token: must be > 0, got nothing\n--transfer-gbps: must be > 0, got 0",
        ),
    ],
)
def test_measure_checks_arguments_before_it_starts(file: Path, words: list[str], fault: str) -> None:
    status, out, err = run("measure", "http://127.0.0.1:9", "--out", str(file), *words)
    assert (status, out) == (2, "")
    assert err.startswith(fault)


def test_unreachable_engine_is_reported(tmp_path: Path) -> None:
    status, _, err = run("measure", "http://127.0.0.1:9", "--out", str(tmp_path / "p.yaml"))
    assert status == 1
    assert "cannot be reached" in err
    assert not list(tmp_path.iterdir())


def test_import_reports_all_errors(tmp_path: Path) -> None:
    out = tmp_path / "p.yaml"
    words = ["import", "--model", "m", "--gpu", "h100_sxm", "--out", str(out)]
    status, _, err = run(*words, "--tp-sizes", "2,x", "--layouts", "tp8ep4")
    assert status == 2
    assert [line.split(":")[0] for line in err.splitlines()] == ["--tp-sizes", "--layouts"]
    assert not out.exists()


def test_import_without_its_package_prints_advice(tmp_path: Path) -> None:
    try:
        import aiconfigurator_core  # noqa: F401
    except ModuleNotFoundError:
        status, _, err = run("import", "--model", "m", "--gpu", "h100_sxm", "--out", str(tmp_path / "p.yaml"))
        assert status == 2
        assert "pip install 'orchestrrl[aiconfigurator]'" in err
    else:
        pytest.skip("aiconfigurator-core is installed")


def test_daemon_reads_configurations_from_a_profile(file: Path) -> None:
    config = file.parent / "c.yaml"
    config.write_text("fleet: {profile: p.yaml}")
    result = CliRunner().invoke(application(), ["check-config", str(config)])
    assert result.exit_code == 0
    assert "tp2" in result.stdout
    file.write_text(PROFILE.replace("1.7", "-1"))
    result = CliRunner().invoke(application(), ["check-config", str(config)])
    assert result.exit_code == 2
    assert result.stderr == "fleet.profile: p.yaml: configurations[0].switch_s: must be >= 0, got -1\n"
