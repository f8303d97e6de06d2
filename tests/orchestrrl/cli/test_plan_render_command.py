"""`orchestrrl plan render` as a process, and the settings that it reads."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from orchestrrl.cli.main import application
from orchestrrl.core.config.example import EXAMPLE
from orchestrrl.core.config.schema import Config
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.daemon.configuration import load_config, parse_config
from orchestrrl.fleet.deployers.layout_flags import BLOCK_TOKENS, CONTEXT_TOKENS
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from planner.model import ConfigurationId, Parallelism

COSTS = (
    "alpha_s: 0.02, beta_s: 0.0001, gamma_s: 1.0e-8, kv_capacity_tokens: 100000, max_sequences: 512,"
    " prefill_tokens_per_s: 9000.0, switch_s: 2.0"
)


def fleet(launch: str, more: str = "") -> str:
    return f"""
fleet:
  gpus: {{count: 16, per_node: 8}}
  configurations:
    - {{id: tp2, gpus: 2, {COSTS}}}
    - {{id: tp16, gpus: 16, {COSTS}}}
    - {{id: wide, gpus: 8, {COSTS}, parallelism: {{dp: 8, ep: 8}}}}
    - {{id: afd, gpus: 12, {COSTS}, parallelism: {{attention_gpus: 8, ffn_gpus: 4, micro_batches: 3}}}}
  launch: {launch}
{more}
"""


LAUNCH = "{model: org/model, nodes: [10.0.0.1, 10.0.0.2], arguments: [--max-model-len, '4096']}"


def run(folder: Path, document: str, *arguments: str) -> Result:
    path = folder / "orchestrrl.yaml"
    path.write_text(document)
    return CliRunner().invoke(application(), ["plan", "render", str(path), *arguments])


def faults_in(document: str) -> list[str]:
    with pytest.raises(ProblemFaults) as caught:
        parse_config(document)
    return caught.value.faults


def test_render_prints_each_engine_of_the_example(tmp_path: Path) -> None:
    result = run(tmp_path, EXAMPLE)
    assert (result.exit_code, result.stderr) == (0, "")
    first, second = result.stdout.split("\n\n")
    heading, *lines = first.splitlines()
    assert heading == "# e0: tp2 on GPUs 0-1 of node 0, serving http://127.0.0.1:8000"
    assert shlex.split(" ".join(line.removesuffix("\\") for line in lines)) == [
        "CUDA_VISIBLE_DEVICES=0,1",
        "VLLM_SERVER_DEV_MODE=1",
        *("python3", "-m", "vllm.entrypoints.cli.main", "serve", "Qwen/Qwen2.5-14B-Instruct"),
        *("--host", "127.0.0.1", "--port", "8000", "--tensor-parallel-size", "2", "--max-num-seqs", "1024"),
    ]
    assert "--max-num-seqs 256" in second  # the engine's default


def test_json_lists_all_processes_of_a_multi_node_engine(tmp_path: Path) -> None:
    result = run(tmp_path, fleet(LAUNCH), "--configuration", "tp16", "--json")
    (engine,) = json.loads(result.stdout)["engines"]
    assert (engine["id"], engine["url"], engine["gpus"]) == ("tp16-0", "http://127.0.0.1:8100", list(range(16)))
    assert [(each["role"], each["node"]) for each in engine["processes"]] == [("server", 0), ("node", 1)]
    assert "--headless" in engine["processes"][1]["argv"]
    assert engine["processes"][1]["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    output = run(tmp_path, fleet(LAUNCH), "--configuration", "tp16").stdout
    assert "# tp16-0, process 2 of 2 (node): tp16 on GPUs 8-15 of node 1\n" in output


def test_configuration_fills_the_fleet_or_the_given_gpus(tmp_path: Path) -> None:
    everywhere = json.loads(run(tmp_path, fleet(LAUNCH), "--configuration", "tp2", "--json").stdout)["engines"]
    assert [engine["gpus"] for engine in everywhere] == [[gpu, gpu + 1] for gpu in range(0, 16, 2)]
    (there,) = json.loads(run(tmp_path, fleet(LAUNCH), "--configuration", "tp2", "--gpus", "5, 4", "--json").stdout)[
        "engines"
    ]
    assert (there["gpus"], there["url"]) == ([4, 5], "http://127.0.0.1:8116")
    (wide,) = json.loads(run(tmp_path, fleet(LAUNCH), "--configuration", "wide", "--gpus", "8-15", "--json").stdout)[
        "engines"
    ]
    assert wide["processes"][0]["argv"].count("--enable-expert-parallel") == 1


SIMULATED = "{engine: simulated, arguments: [--speed, '30'], configurations: {tp2: {arguments: [--alpha-s, '0.5']}}}"


def test_simulated_engines_use_layout_and_costs_of_their_configuration(tmp_path: Path) -> None:
    engines = json.loads(run(tmp_path, fleet(SIMULATED), "--configuration", "wide", "--json").stdout)["engines"]
    assert [engine["url"] for engine in engines] == ["http://127.0.0.1:8100"] * 2  # GPUs of two nodes
    (process,) = engines[0]["processes"]
    assert process["environment"] == {}
    assert process["argv"] == [
        *(sys.executable, "-m", "orchestrrl", "engine", "simulated"),
        *("--host", "127.0.0.1", "--port", "8100"),
        *("--tensor-parallel-size", "1", "--data-parallel-size", "8", "--enable-expert-parallel"),
        # Each of the eight replicas has one eighth of the sequences, the KV and the prefill rate.
        *("--model-name", "simulated", "--alpha-s", "0.02", "--beta-s", "0.0008", "--gamma-s", "8e-08"),
        *("--prefill-tokens-per-s", "1125.0", "--kv-capacity-tokens", "12500", "--max-model-len", "12496"),
        *("--max-num-seqs", "64"),
        *("--speed", "30"),
    ]
    (own, *_) = json.loads(run(tmp_path, fleet(SIMULATED), "--configuration", "tp2", "--json").stdout)["engines"]
    argv = own["processes"][0]["argv"]
    assert (argv.count("--alpha-s"), argv[argv.index("--alpha-s") + 1]) == (1, "0.5")
    afd = run(tmp_path, fleet(SIMULATED), "--configuration", "afd", "--gpus", "0-11", "--json")
    assert len(json.loads(afd.stdout)["engines"][0]["processes"]) == 1


@pytest.mark.parametrize(
    ("document", "arguments", "expected"),
    [
        ("", (), ["fleet.launch: must be set", "fleet.engines: must not be empty"]),
        (
            fleet(LAUNCH),
            ("--gpus", "0-x"),
            ["--gpus: must be numbers", "--gpus: requires --configuration", "fleet.engines: must not be empty"],
        ),
        (
            fleet(LAUNCH),
            ("--configuration", "tp3", "--gpus", "1,99"),
            [
                "--configuration: must be a configuration of the fleet (afd, tp16, tp2, wide)",
                "--gpus: must be less",
            ],
        ),
        (fleet(LAUNCH), ("--configuration", "tp2", "--gpus", "1"), ["tp2-0.gpus: must be 2 different GPUs"]),
        (fleet(LAUNCH), ("--configuration", "afd"), ["afd.micro_batches: must be 1 or 2 (afd-plugin), got 3"]),
        (
            fleet(LAUNCH, "  engines: [{id: a, url: 'http://a:1'}, {id: b, url: 'http://b:1', configuration: tp2}]"),
            (),
            ["fleet.engines[0].configuration: must", "fleet.engines[0].gpus: must", "fleet.engines[1].gpus: must"],
        ),
        (
            fleet("{engine: simulated, arguments: [-tp, '4', --port, '1', --enable-expert-parallel, --seed, '3']}"),
            ("--configuration", "tp2", "--gpus", "0"),
            [
                "tp2-0.gpus: must be 2 different GPUs",
                "fleet.launch.arguments[0]: contradicts `--tensor-parallel-size 2` of tp2, got '-tp 4'",
                "fleet.launch.arguments[2]: contradicts `--port 8100` of tp2, got '--port 1'",
                "fleet.launch.arguments[4]: contradicts tp2, which does not set --enable-expert-parallel",
            ],
        ),
        (
            fleet("{model: m, arguments: [-tp, '4'], environment: {CUDA_VISIBLE_DEVICES: '3'}}"),
            ("--configuration", "tp2", "--gpus", "0,1"),
            [
                "fleet.launch.environment.CUDA_VISIBLE_DEVICES: contradicts `CUDA_VISIBLE_DEVICES=0,1`",
                "fleet.launch.arguments[0]: contradicts `--tensor-parallel-size 2` of tp2, got '-tp 4'",
            ],
        ),
    ],
)
def test_all_errors_are_reported_with_exit_status_2(
    tmp_path: Path, document: str, arguments: tuple[str, ...], expected: list[str]
) -> None:
    result = run(tmp_path, document, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    output = result.stderr.splitlines()
    assert len(output) == len(expected)
    for fault, start in zip(output, expected, strict=True):
        assert fault.startswith(start)


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    result = CliRunner().invoke(application(), ["plan", "render", str(tmp_path / "no.yaml")])
    assert (result.exit_code, result.stderr) == (2, f"{tmp_path / 'no.yaml'}: No such file or directory\n")


def test_all_errors_of_the_launch_section_are_reported_at_once() -> None:
    document = fleet(
        "{model: '', device: tpu, ports: [8100, 8110], cores_per_gpu: 2, colour: red, environment: {A: 1},"
        " configurations: {tp9: {arguments: [--seed, '1']}}}",
        "  kv_transfer: {connector: kv_handover, inter_node_gbps_per_gpu: 1.0, kv_bytes_per_token: 1.0}",
    )
    assert faults_in(document) == [
        "fleet.launch.model: String should have at least 1 character, got ''",
        "fleet.launch.device: should be 'cuda' or 'cpu', got 'tpu'",
        "fleet.launch.environment.A: should be a valid string, got 1",
        "fleet.launch.colour: is not a known field, got 'red'",
        "fleet.launch.configurations.tp9: must be one of fleet.configurations (afd, tp16, tp2, wide), got 'tp9'",
        "fleet.launch.kv_directory: must be given if fleet.kv_transfer has a connector, got nothing",
        "fleet.launch.ports: must have 4 ports for each of a node's 8 GPUs, got [8100, 8110]",
        "fleet.launch.cores_per_gpu: is only for device cpu, got 2",
    ]
    fault = faults_in(fleet("{model: m, ports: [9000, 8000]}"))[0]
    assert fault.startswith("fleet.launch.ports: must be the first and the last port")


def test_simulated_engine_without_options_is_valid() -> None:
    default = SimulatedOptions()
    assert (default.max_model_len_tokens, default.block_tokens) == (CONTEXT_TOKENS, BLOCK_TOKENS)


def test_model_is_required_unless_engines_are_simulated() -> None:
    assert faults_in(fleet("{python: python3}")) == ["fleet.launch.model: is missing, got nothing"]
    assert faults_in(fleet("{model: null, engine: vllm}")) == ["fleet.launch.model: is missing, got nothing"]
    assert faults_in(fleet("{engine: sglang, model: m}")) == [
        "fleet.launch.engine: should be 'vllm' or 'simulated', got 'sglang'"
    ]
    parse_config(fleet("{engine: simulated}"))


def test_layout_must_match_the_gpus_of_its_configuration() -> None:
    (fault,) = faults_in(fleet(LAUNCH).replace("parallelism: {dp: 8, ep: 8}", "parallelism: {tp: 2, pp: 2}"))
    assert fault.startswith("fleet.configurations[2]: parallelism must use 8 GPUs, got 4")


def test_layouts_are_read_from_file_and_profile(tmp_path: Path) -> None:
    made = parse_config(fleet(LAUNCH)).fleet
    assert made.layouts()[ConfigurationId("tp16")] == Parallelism(tp=16)
    assert made.layouts()[ConfigurationId("wide")] == Parallelism(dp=8, ep=8)
    assert made.configuration_values()[2].gpus == 8
    profile = tmp_path / "p.yaml"
    found = CliRunner().invoke(application(), ["profile", "predict", "Qwen/Qwen3-30B-A3B", "--out", str(profile)])
    assert found.exit_code == 0
    (tmp_path / "c.yaml").write_text(f"fleet: {{gpus: {{count: 8}}, profile: p.yaml, launch: {LAUNCH}}}")
    layouts = load_config(tmp_path / "c.yaml").fleet.layouts()
    assert layouts[ConfigurationId("tp1dp8ep8")] == Parallelism(dp=8, ep=8)
    for name, layout in layouts.items():
        result = run(tmp_path, (tmp_path / "c.yaml").read_text(), "--configuration", name, "--json")
        (*_, last) = json.loads(result.stdout)["engines"]
        assert len(last["gpus"]) == layout.gpus


def test_example_shows_the_defaults() -> None:
    shown = parse_config(EXAMPLE).fleet.launch
    assert shown is not None
    least = Config.model_validate({"fleet": {"launch": {"model": shown.model}}}).fleet.launch
    assert shown == least
