"""Tests of the simulated gateway with the production queue: depth, completeness, and every routing strategy."""

import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.operations import EngineRoute, Operation, OperationId, SetRoutes
from orchestrrl.gateway.routing.strategies import STRATEGIES, RoutingPolicy
from orchestrrl.lab.sim.engines import VirtualEngine
from orchestrrl.lab.sim.gateway import CountedRecord, VirtualGateway
from orchestrrl.lab.sim.run import ControlledRun, steps_of
from orchestrrl.lab.sim.scenario import GatewaySection, GenerationFaultSection, parse_scenario
from orchestrrl.lab.sim.workload import SimRequest
from planner.model import ConfigurationId, NodeId, RequestId
from tests.orchestrrl.lab.sim.gen_scenarios import TEXT, kinds, scenario
from tests.orchestrrl.lab.sim.test_sim_gateway import LENGTHS, PROMPT_TOKENS, TICK_S, virtual_engines


@pytest.mark.parametrize("policy", STRATEGIES)
async def test_every_request_ends_and_queue_depth_is_respected(policy: str) -> None:
    clock = VirtualClock()
    engines = {engine.url: engine for engine in virtual_engines(3)}
    ended: dict[str, int] = {}

    def arrive(record: CountedRecord, engine: VirtualEngine, source: VirtualEngine | None) -> None:
        gateway.progressed(engine, engine.advance(clock.now_s()), clock.now_s())
        engine.scheduler.submit(clock.now_s(), record.id, record.context_tokens, record.left_tokens)

    def finished(record: CountedRecord) -> None:
        ended[record.id] = record.generated

    routing = RoutingPolicy(policy, queue_depth=1)
    gateway = VirtualGateway(NodeId("gateway"), clock, engines.__getitem__, arrive, finished, routing)
    # Routes have no max_sequences: only the queue depth limits the waiting requests of an engine.
    unknown = tuple(EngineRoute(engine.id, engine.url) for engine in engines.values())
    gateway.perform(Operation(OperationId("1"), 1, 10.0, SetRoutes(unknown)))
    gateway.submit([SimRequest(RequestId(n), "", PROMPT_TOKENS, length, 0, 2000) for n, length in LENGTHS.items()])
    assert len(gateway.fleet.queue) == len(LENGTHS) - 3
    assert sum(view.engine is None for view in gateway.report().in_flight) == len(LENGTHS) - 3
    died = False
    while gateway.records:
        assert clock.now_s() < 600
        await clock.advance(TICK_S)
        for engine in engines.values():
            if not died or engine.id != "e1":
                gateway.progressed(engine, engine.advance(clock.now_s()), clock.now_s())
        if not died and clock.now_s() > 2.0:
            died = True
            (lost,) = [engine for engine in engines.values() if engine.id == "e1"]
            lost.stopped_s = clock.now_s()
            gateway.engine_died(lost)
        assert all(backend.waiting <= 1 for backend in gateway.fleet)
    assert ended == LENGTHS
    await gateway.fleet.close()


@pytest.mark.parametrize("policy", STRATEGIES)
def test_routing_arm_answers_all_requests_through_a_queue(policy: str) -> None:
    """The daemon plans and balances as usual, and an engine dies during the step."""
    of = scenario(
        gateway=GatewaySection(policy=policy, queue_depth=2),
        faults=(GenerationFaultSection(at_s=8.0, kill_engine="e1", back_after_s=6.0),),
    )
    run = ControlledRun(of, kinds(of), ConfigurationId("narrow"), "both", 1, steps_of(of, 1)).run(lambda *_: None, None)
    assert run.samples == of.workload.prompts * of.workload.samples


def test_scenario_rejects_unknown_routing_policy() -> None:
    with pytest.raises(ProblemFaults) as caught:
        parse_scenario(TEXT + "gateway: {policy: best, queue_depth: -1}\n")
    assert sorted(fault.split(":")[0] for fault in caught.value.faults) == ["gateway.policy", "gateway.queue_depth"]
