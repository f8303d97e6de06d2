"""Kernel tables become profiles: whole-engine batches within the KV cache, with the provenance of assumed figures."""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.engines.profiles.importer import (
    INSTALL,
    Aiconfigurator,
    ImportHandle,
    ImportInputs,
    import_profile,
    layout_named,
    step_table,
)
from orchestrrl.engines.profiles.store import as_text, parse_profile, read_profile
from planner.cost.predict import identifier
from planner.cost.profile import Parallelism, Profile, ProfileSource

GIVEN = ImportInputs(256, 45.0, "default", "command line", "2026-01-31")


@dataclass
class Table:
    """A fake handle with the package's methods: milliseconds, batches of one rank."""

    layout: Parallelism
    bend: float = 0.0  # like a mixture of experts: rises steeply, then flattens
    asked: list[tuple[int, int]] = field(default_factory=list)

    def decode_step_latency(self, gen_tokens: int, isl: int, osl: int) -> float:
        assert osl == 2
        self.asked.append((gen_tokens, isl))
        return 26.0 / self.layout.tp + self.bend * min(gen_tokens, 32) + 0.03 * gen_tokens + 1e-4 * gen_tokens * isl

    def predict_prefill_latency(self, bs: int, isl: int) -> float:
        assert bs == 1
        return 10.0 + isl / 20.0


class FakeVendor(Aiconfigurator):
    detail = "tables 1.0"

    def __init__(self, bend: float = 0.0) -> None:
        self.model, self.system, self.backend = "m", "h100_sxm", "vllm"
        self._bend = bend

    def compile(self, layout: Parallelism) -> ImportHandle:
        return Table(layout, self._bend)

    def room(self, layout: Parallelism, sequences: int) -> int:
        if layout.tp == 1 and layout.dp == 1:
            raise ValueError("no KV budget")
        return 100_000 * layout.tp

    def kv_bytes_per_token(self) -> float:
        return 131_072.0

    def link(self) -> tuple[float, float] | None:
        return 5e10, 1e-5


def imported(*names: str, bend: float = 0.0) -> tuple[Profile, list[str]]:
    layouts = [layout_named(name) for name in names]
    return import_profile(FakeVendor(bend), layouts, GIVEN)


def test_linear_table_gives_a_linear_fit() -> None:
    (engine,) = imported("tp2")[0].configurations
    affine = engine.configuration()
    assert (affine.alpha_s, affine.beta_s, affine.gamma_s) == pytest.approx((0.013, 3e-5, 1e-7), rel=1e-3)
    assert engine.prefill_tokens_per_s == pytest.approx(20_000, rel=1e-3)
    assert engine.kv_capacity_tokens == 200_000
    assert engine.provenance.source is ProfileSource.IMPORTED
    assert (engine.provenance.date, engine.provenance.detail) == ("2026-01-31", "tables 1.0")
    others = dict(engine.others)
    assert others["switch_s"].source is ProfileSource.GIVEN
    assert others["kv_capacity_tokens"].detail.startswith("tables 1.0: memory model")


def test_mixture_of_experts_gives_a_curve() -> None:
    (engine,) = imported("tp8ep8", bend=0.5)[0].configurations
    assert len(engine.step.base_s.xs) > 2
    assert engine.provenance.fit_error_mean is not None
    assert engine.provenance.fit_error_mean < 0.02
    table = Table(engine.parallelism, 0.5)
    for batch in (1, 8, 32, 200):
        expected_s = table.decode_step_latency(batch, 1000, 2) / 1e3
        assert engine.step.at(batch, 1000 * batch) == pytest.approx(expected_s, rel=0.05)


def test_data_parallel_ranks_are_summed() -> None:
    (engine,) = imported("dp8ep8")[0].configurations
    assert engine.id == "tp1dp8ep8"
    assert engine.parallelism.gpus == 8
    assert engine.kv_capacity_tokens == 800_000
    assert engine.prefill_tokens_per_s == pytest.approx(160_000, rel=1e-3)
    expected_s = Table(engine.parallelism).decode_step_latency(16, 2000, 2) / 1e3
    assert engine.step.at(8 * 16, 8 * 16 * 2000) == pytest.approx(expected_s, rel=1e-3)


def test_only_batches_that_fit_are_queried() -> None:
    table = Table(Parallelism(tp=2))
    samples = step_table(table, Parallelism(tp=2), rank_tokens=10_000, max_sequences=100)
    assert table.asked
    assert all(batch * context < 10_000 and batch <= 100 for batch, context in table.asked)
    assert len(samples) == len(table.asked)
    assert any(batch == 1 for batch, _ in table.asked)


def test_move_costs_use_the_link_and_the_prefill() -> None:
    moves = imported("tp4")[0].moves
    assert moves is not None
    assert moves.kv_bytes_per_token == 131_072
    assert moves.transfer_s.at(5e10) == pytest.approx(1.0, rel=1e-3)
    assert moves.recompute_s.at(4000) == pytest.approx(0.21, rel=0.02)


def test_layout_that_does_not_fit_is_omitted_with_a_reason() -> None:
    found = imported("tp1", "tp2")
    assert [engine.id for engine in found[0].configurations] == ["tp2"]
    assert found[1] == ["tp1: no KV budget"]
    with pytest.raises(Permanent, match="no layout can be imported: tp1: no KV budget"):
        imported("tp1")


def test_imported_profile_survives_a_round_trip() -> None:
    profile = imported("tp2", "tp8")[0]
    assert parse_profile(as_text(profile)) == profile


@pytest.mark.parametrize("name", ["tp2", "tp8ep8", "tp1dp8ep8", "tp2dp4"])
def test_layout_name_round_trip(name: str) -> None:
    assert identifier(layout_named(name)) == name


@pytest.mark.parametrize("name", ["", "8", "tp", "tp0", "pp2", "tp8ep4"])
def test_invalid_layout_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"must|experts"):
        layout_named(name)


def test_missing_package_error_has_the_install_command() -> None:
    try:
        import aiconfigurator_core  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(ProblemFaults, match=r"pip install 'orchestrrl\[aiconfigurator\]'"):
            Aiconfigurator("Qwen/Qwen3-32B", "h100_sxm", "vllm")
    else:
        pytest.skip("aiconfigurator-core is installed")


def documented() -> list[list[str]]:
    """Return the import commands in docs/profiles.md."""
    page = (Path(__file__).parents[4] / "docs" / "profiles.md").read_text()
    return [line.split()[1:] for line in page.splitlines() if line.startswith("orchestrrl profile import")]


@pytest.mark.parametrize("words", documented(), ids=lambda words: words[words.index("--model") + 1])
def test_documented_commands_work(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, the commands fail only because of it."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(application(), words)
    if importlib.util.find_spec("aiconfigurator_core") is None:
        assert (result.exit_code, result.stderr.strip()) == (2, INSTALL)
    else:
        assert result.exit_code == 0, result.stderr
        assert read_profile(words[words.index("--out") + 1]).configurations


def test_documented_file_is_valid() -> None:
    page = (Path(__file__).parents[4] / "docs" / "profiles.md").read_text()
    shown = page.partition("## The file")[2].partition("```yaml\n")[2].partition("```")[0]
    assert parse_profile(shown).configurations[0].others


class TestPackage:
    """Tests against the package itself, if the optional extra is installed."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("aiconfigurator_core", reason="the extra `aiconfigurator` is not installed")

    def test_dense_model_is_nearly_linear(self) -> None:
        vendor = Aiconfigurator("Qwen/Qwen3-32B", "h100_sxm", "vllm")
        layouts = [layout_named(name) for name in ("tp2", "tp4", "tp8")]
        found = import_profile(vendor, layouts, GIVEN)
        steps_s = [engine.step.at(16, 32_000) for engine in found[0].configurations]
        assert steps_s == sorted(steps_s, reverse=True)
        for engine in found[0].configurations:
            assert engine.provenance.fit_error_mean is not None
            assert engine.provenance.fit_error_mean < 0.03
        assert found[0].moves is not None
        assert found[0].moves.kv_bytes_per_token == 2 * 2 * 64 * 8 * 128  # bf16, layers, KV heads, head size

    def test_mixture_of_experts_is_not_linear(self) -> None:
        vendor = Aiconfigurator("Qwen/Qwen3-235B-A22B", "h200_sxm", "vllm")
        layouts = [layout_named(name) for name in ("tp8", "tp8ep8")]
        found = import_profile(vendor, layouts, GIVEN)
        for engine in found[0].configurations:
            assert len(engine.step.base_s.xs) > 2
            assert engine.provenance.fit_error_mean is not None
            assert engine.provenance.fit_error_mean < 0.03

    def test_unknown_model_system_or_backend_is_a_fault(self) -> None:
        with pytest.raises(ProblemFaults, match="--gpu: must be a system with data"):
            Aiconfigurator("Qwen/Qwen3-32B", "h999", "vllm")
        with pytest.raises(ProblemFaults, match="--engine-kind: must be one of"):
            Aiconfigurator("Qwen/Qwen3-32B", "h100_sxm", "none")
