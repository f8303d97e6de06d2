"""Tests of a daemon without a configuration of engines, as in the README: the policy in use, and why."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders import engine_report, gateway_hello, gateway_report, request, sample
from prometheus_client import CollectorRegistry, generate_latest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.journal.store import Journal
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.metrics import DaemonCollector
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.engines.base import EngineCapabilities, EngineSample
from orchestrrl.engines.serving import ServingFacts
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.fleet.reports import EngineReport
from orchestrrl.lab.simulated_engine.server import SimulatedOptions, SimulatedServer
from orchestrrl.rpc.codecs.control import balance_to_pb, status_to_pb
from orchestrrl.rpc.pb import control_pb2
from planner.model import Hold

CONFIG = "mode: advise\nlisten: {address: '127.0.0.1:7070'}\n"  # the README's two lines
H800 = ServingFacts(model="Qwen/Qwen2.5-14B-Instruct", tp=1, gpu="NVIDIA H800")
CPU = ServingFacts(model="/models/tiny", tp=1, device="cpu", gpu_detail="the engine runs on CPUs")
CONFIGURED = """
fleet:
  gpus: {count: 2}
  configurations:
    - {id: tp1, gpus: 1, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 100000, max_sequences: 64,
       prefill_tokens_per_s: 9000, switch_s: 1.5}
  engines: [{id: e0, url: "http://e0", configuration: tp1}]
"""
OTHERS = "no other configuration is known: add some to fleet.configurations or fleet.profile"


class Daemon:
    """A control plane on a virtual clock, with an agent and a gateway that report to it."""

    def __init__(self, journal: Journal, config: str = CONFIG) -> None:
        self.clock = VirtualClock(1000.0)
        self.parts = build_daemon(parse_config(config), journal, self.clock)
        self.plane = self.parts.control_plane
        self.plane.fleet.attach(gateway_hello("e0", "e1"))
        self._sequence = 0
        self._totals: dict[str, int] = {}

    async def report(self, facts: dict[str, ServingFacts], running: dict[str, int], seconds: float = 1.0) -> None:
        """Report for this time, while engines decode 50 tokens/s for each request."""
        requests = [request(f"{e}-{i}", e, generated=100) for e, count in running.items() for i in range(count)]
        for turn in range(round(seconds * 4)):
            await self.clock.advance(0.25)
            self._sequence += 1
            for engine, about in facts.items():
                total = self._totals[engine] = self._totals.get(engine, 0) + 12 * running.get(engine, 0)
                offers = EngineCapabilities("vllm", "1", ("m",), max_sequences=64, serving=about) if turn == 0 else None
                self.plane.fleet.engine_reported(self._engine_report(engine, running.get(engine, 0), total, offers), 1)
            report = gateway_report(*requests, sequence=self._sequence, at_s=self.clock.now_s())
            self.plane.fleet.gateway_reported(report, 1)

    def _engine_report(self, engine: str, running: int, total: int, offers: EngineCapabilities | None) -> EngineReport:
        fields = {"kv_usage_fraction": 0.2, "kv_capacity_tokens": 100_000}
        reading: EngineSample = sample(self.clock.now_s(), running, 0, total, **fields)
        rate = 50.0 * running if running else None
        report = engine_report(engine, self._sequence, replace(reading, decode_tokens_per_s=rate))
        return replace(report, capabilities=offers)

    def status(self) -> control_pb2.Status:
        self.plane.fast_tick()
        return status_to_pb(self.parts, "test")

    def page(self) -> str:
        registry = CollectorRegistry()
        registry.register(DaemonCollector(self.parts))
        return generate_latest(registry).decode()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.sqlite", 0.0) as made:
        yield made


@pytest.fixture
async def daemon(journal: Journal) -> AsyncIterator[Daemon]:
    made = Daemon(journal)
    yield made
    await made.plane.fleet.close(0.0)


async def test_engines_that_report_model_and_gpu_are_packed_from_the_first_tick(daemon: Daemon) -> None:
    await daemon.report({"e0": H800, "e1": H800}, {"e0": 12, "e1": 2})
    status = daemon.status()
    prior = "prior: qwen2.5-14b on H800, TP=1"
    assert status.balance_policy == "packing"
    assert status.balance_policy_reason == f"step times of all engines are known; 2 x {prior}"
    assert {(w.step_times_source, w.step_times_detail) for w in status.workers} == {("prior", prior)}
    assert {w.configuration for w in status.workers} == {""}, "nothing is configured"
    assert status.balance_reason.startswith("advise_only: mode is advise: the last engine is expected to finish in")
    assert daemon.plane.balance is not None
    reported = balance_to_pb(daemon.plane.balance)
    assert (reported.policy, reported.policy_reason) == (status.balance_policy, status.balance_policy_reason)
    assert {(move.from_engine_id, move.to_engine_id) for move in reported.moves} == {("e0", "e1")}
    page = daemon.page()
    assert 'orchestrrl_balance_policy{policy="packing"} 1.0' in page
    assert 'orchestrrl_workers_by_step_times{source="prior"} 2.0' in page


async def test_planner_keeps_the_fleet_and_notes_that_no_other_is_known(daemon: Daemon) -> None:
    await daemon.report({"e0": H800, "e1": H800}, {"e0": 12, "e1": 12})
    plan = await daemon.plane.slow_tick()
    assert plan.decision == "keep"
    assert plan.verdict == Hold("already_deployed", f"2 x auto:qwen2.5-14b-h800-tp1 is deployed and {OTHERS}")
    assert plan.current_makespan_s is not None
    assert 0 < plan.lower_bound_s <= plan.current_makespan_s
    assert OTHERS in plan.notes
    assert "step times of auto:qwen2.5-14b-h800-tp1: prior: qwen2.5-14b on H800, TP=1, error 14.3%" in plan.notes


async def test_engines_without_a_gpu_use_the_load_index_until_enough_was_observed(daemon: Daemon) -> None:
    why = "no step times for e0, e1: the engine runs on CPUs; will be learned from 8 observed batches, 0 so far"
    facts, running = {"e0": CPU, "e1": CPU}, {"e0": 6, "e1": 0}
    await daemon.report(facts, running, 0.25)
    status = daemon.status()
    assert (status.balance_policy, status.balance_policy_reason) == ("load_index", why)
    assert {worker.step_times_source for worker in status.workers} == {""}
    plan = await daemon.plane.slow_tick()
    assert plan.verdict == Hold("no_step_times", why)
    assert 'orchestrrl_balance_policy{policy="load_index"} 1.0' in daemon.page()
    await daemon.report(facts, running, 6.0)
    status = daemon.status()  # e1 has been idle all the time, and is assumed to be like e0
    assert status.balance_policy == "packing"
    assert {worker.step_times_source for worker in status.workers} == {"observed"}
    plan = await daemon.plane.slow_tick()
    assert plan.verdict.code == "gain_too_small", "moving requests is all that it may propose"
    assert {option.decision for option in plan.alternatives} <= {"keep", "rebalance"}


async def test_idle_engine_is_assumed_to_be_like_others_with_its_model(daemon: Daemon) -> None:
    told_less = replace(CPU, device="", gpu_detail="the engine's host has no GPU (nvidia-smi is not installed)")
    await daemon.report({"e0": CPU, "e1": told_less}, {"e0": 6}, 6.0)
    workers = {worker.engine_id: worker for worker in daemon.status().workers}
    assert workers["e0"].step_times_detail.startswith("observed: ")
    assert workers["e1"].step_times_detail == f"{workers['e0'].step_times_detail}, of engines with the same model"
    other_model = replace(told_less, model="/models/other")
    await daemon.report({"e0": CPU, "e1": other_model}, {"e0": 6}, 1.0)
    status = daemon.status()
    assert status.balance_policy == "load_index"
    assert status.balance_policy_reason.startswith("no step times for e1: the engine's host has no GPU")


async def test_missing_agent_is_the_reason(daemon: Daemon) -> None:
    await daemon.report({"e0": H800}, {"e0": 3, "e1": 1})
    status = daemon.status()
    assert {w.engine_id: w.step_times_detail for w in status.workers}["e1"] == (
        "no agent has reported what the engine serves"
    )
    assert status.balance_policy == "packing", "e1 is not reported well, so nothing is decided for it"


async def test_configured_fleet_takes_precedence(journal: Journal) -> None:
    daemon = Daemon(journal, CONFIGURED)
    await daemon.report({"e0": H800, "e1": H800}, {"e0": 6, "e1": 6})
    status = daemon.status()
    sources = {w.engine_id: (w.configuration, w.step_times_source, w.step_times_detail) for w in status.workers}
    assert sources == {
        "e0": ("tp1", "configured", "configured: tp1"),
        "e1": ("", "prior", "prior: qwen2.5-14b on H800, TP=1"),
    }
    assert status.balance_policy == "packing"
    plan = await daemon.plane.slow_tick()
    assert plan.current_configuration == "tp1", "the planner chooses among what is configured alone"
    assert {option.configuration for option in plan.alternatives} <= {"tp1", None}
    await daemon.plane.fleet.close(0.0)


async def test_removed_engines_are_forgotten_and_return_unchanged(daemon: Daemon) -> None:
    await daemon.report({"e0": CPU, "e1": CPU}, {"e0": 6, "e1": 6}, 6.0)
    assert daemon.status().balance_policy == "packing"
    await daemon.clock.advance(120.0)
    await daemon.plane.slow_tick()
    await daemon.report({"e0": H800, "e1": H800}, {"e0": 6, "e1": 6})  # restarted with another model
    assert {worker.step_times_source for worker in daemon.status().workers} == {"prior"}


async def test_implicit_configurations_never_reach_gateways(daemon: Daemon) -> None:
    """KV is transferred between configured engines only."""
    await daemon.report({"e0": H800, "e1": H800}, {"e0": 12, "e1": 2})
    snapshot = daemon.plane.fleet.state.snapshot(daemon.clock.now_s())
    daemon.plane.fast_tick()
    assert {engine.configuration for engine in snapshot.engines} == {None}
    assert set(daemon.plane.fleet.routes.kv_versions(snapshot.engines).values()) == {""}


async def test_simulated_engine_reports_its_simulated_facts_like_vllm() -> None:
    async with SimulatedServer(SimulatedOptions(tensor_parallel_size=2)) as server:
        client = VllmEngine(server.url)
        serving = (await client.capabilities()).serving
        await client.close()
    assert serving == ServingFacts(
        model="Qwen/Qwen2.5-14B-Instruct",
        weight_bits=16.0,
        kv_bits=16.0,
        tp=2,
        pp=1,
        dp=1,
        ep=False,
        device="cuda",
        gpu="NVIDIA H800",
    )
    async with SimulatedServer(SimulatedOptions(gpu="", model_root="/models/tiny")) as server:
        client = VllmEngine(server.url)
        serving = (await client.capabilities()).serving
        await client.close()
    assert (serving.model, serving.gpu, serving.gpu_detail) == ("/models/tiny", "", "the engine runs on CPUs")
