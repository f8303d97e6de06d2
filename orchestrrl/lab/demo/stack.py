"""Start the processes of the demo: the scenario's engines, and OrchestrRL."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from orchestrrl.lab.demo.scenario import DemoScenario
from orchestrrl.lab.testbed.engines import LocalEngine, all_started, make_model, start_simulated, start_vllm
from orchestrrl.lab.testbed.processes import flags_of
from orchestrrl.lab.testbed.stack import Stack, engine_flags, named, sped_up
from planner.model import Configuration, ConfigurationId

GPUS_PER_ENGINE = 2
STREAM_INTERVAL_TOKENS = 16
# Engine seconds: the minimum gain of a plan, and the duration of a switch.
EPSILON_S, SWITCH_S = 10.0, 1.7


@contextlib.asynccontextmanager
async def engines(scenario: DemoScenario, kind: str, out_dir: Path) -> AsyncIterator[list[LocalEngine]]:
    """Start the scenario's engines and yield them when all are ready. `kind` is the kind of engine. The engines are
    stopped on exit."""
    out_dir.mkdir(parents=True, exist_ok=True)
    names = [f"engine-{index}" for index in range(scenario.engines)]
    if kind == "simulated":
        flags = _simulated_flags(scenario, out_dir)
        starting = [start_simulated(name, log_dir=out_dir, arguments=flags) for name in names]
    else:
        model, engine = out_dir / "tiny-model", scenario.engine
        await make_model(model)
        # The gateway requests streams; with one token per chunk, vLLM's front end would cost more than the tiny model.
        limits = {"stream_interval": STREAM_INTERVAL_TOKENS, "max_model_len": engine.max_model_len_tokens}
        starting = [
            start_vllm(name, model=model, log_dir=out_dir, max_num_seqs=engine.max_num_seqs, arguments=flags_of(limits))
            for name in names
        ]
    async with all_started(starting) as running:
        yield running


def _simulated_flags(scenario: DemoScenario, out_dir: Path) -> list[str]:
    options: dict[str, object] = scenario.engine.model_dump(exclude_unset=True)
    options["max_model_len"] = options.pop("max_model_len_tokens")
    options |= {"lengths": write_lengths(scenario, out_dir), "speed": scenario.speed, "tick_s": scenario.tick_s}
    if scenario.kv:
        options["kv_directory"] = out_dir / "kv"
        (out_dir / "kv").mkdir(exist_ok=True)
    return flags_of(options)


def write_lengths(scenario: DemoScenario, out_dir: Path) -> Path:
    """Write the scenario's distribution of response lengths to a file for simulated engines, and return the file's
    path."""
    path = (out_dir / "lengths.yaml").absolute()
    path.write_text(yaml.safe_dump(scenario.model_dump(mode="json")["lengths"]))
    return path


@contextlib.asynccontextmanager
async def orchestrrl(
    scenario: DemoScenario, kind: str, running: Sequence[LocalEngine], out_dir: Path
) -> AsyncIterator[Stack]:
    """Start a daemon, an agent and a gateway for running engines. Yield the started stack when all engines, the agent
    and the gateway have reported to the daemon. Stop the processes on exit."""
    control, urls = scenario.control, named([engine.url for engine in running])
    async with Stack(out_dir) as stack:
        await stack.start_daemon(_daemon_config(scenario, urls))
        intervals = {"interval_s": control.scrape_interval_s, "rate_window_s": control.rate_window_s}
        stack.start_agent("--engine-kind", kind, "--id", "agent", *flags_of(intervals), *engine_flags("--engine", urls))
        await stack.start_gateway(*gateway_flags(scenario, kind), *engine_flags("--engine", urls))
        await stack.until_reported(len(running))
        yield stack


def gateway_flags(scenario: DemoScenario, kind: str) -> list[str]:
    return flags_of({"engine_kind": kind, "report_interval_s": scenario.control.report_interval_s})


def daemon_settings(scenario: DemoScenario) -> dict[str, dict[str, Any]]:
    """Return the daemon's configuration without the section `fleet`."""
    by_step = {"max_output_tokens": scenario.max_tokens, "epsilon_s": EPSILON_S / scenario.speed}
    return {**scenario.daemon, "slow": {**scenario.daemon["slow"], **by_step}}


def _daemon_config(scenario: DemoScenario, urls: Mapping[str, str]) -> dict[str, Any]:
    engine = scenario.engine
    shape = engine.shape
    kv_transfer = {
        "connector": "kv_handover",
        "inter_node_gbps_per_gpu": engine.kv_gbps / GPUS_PER_ENGINE * scenario.speed,
        "latency_s": engine.kv_latency_s / scenario.speed,
        "kv_bytes_per_token": engine.kv_bytes_per_token,
    }
    configuration = Configuration(
        ConfigurationId("as-started"),
        GPUS_PER_ENGINE,
        shape.alpha_s,
        shape.beta_s,
        shape.gamma_s,
        shape.kv_capacity_tokens,
        shape.max_num_seqs,
        1 / shape.prefill_s_per_token,
        SWITCH_S,
    )
    fleet = {
        "gpus": {"count": GPUS_PER_ENGINE * len(urls), "per_node": 8},
        "kv_transfer": kv_transfer if scenario.kv else None,
        "configurations": [sped_up(configuration, scenario.speed)],
        "engines": [
            {
                "id": name,
                "url": url,
                "configuration": "as-started",
                "gpus": list(range(GPUS_PER_ENGINE * index, GPUS_PER_ENGINE * (index + 1))),
                "max_sequences": shape.max_num_seqs,
            }
            for index, (name, url) in enumerate(urls.items())
        ],
    }
    return {**daemon_settings(scenario), "fleet": fleet}
