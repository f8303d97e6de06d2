"""Tests of the demand for which a fabric is built."""

import numpy as np
import pytest

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFailures
from orchestrrl.lab.sim.net.fabrics.topoopt import TopoOpt
from orchestrrl.lab.sim.rl.scenario import ClusterScenario, scenario_of
from orchestrrl.lab.sim.rl.stages import ArmTimes, FabricStages, fabric_for, job_demand
from tests.orchestrrl.lab.sim.rl.cluster_builders import document


def scenario(**changes: object) -> ClusterScenario:
    return scenario_of(document(fabrics=["topoopt"], cluster__gen_gpus=32, **changes))


def mixture(layouts: list[str], **changes: object) -> ClusterScenario:
    """Return a scenario with a mixture of experts, whose wide engines exchange tokens."""
    wide = {"generation__layouts": layouts, "generation__initial": None, **changes}
    return scenario(model="qwen2-57b-a14b", training={"tp": 4, "ep": 16}, **wide)


def between_servers(made: ClusterScenario) -> np.ndarray:
    """Return the demand in bytes, [server, server]."""
    flows = job_demand(made, made.fabric(made.fabrics[0]))
    found = np.zeros((made.servers.count, made.servers.count))
    np.add.at(found, (flows.src // 8, flows.dst // 8), flows.bytes)
    return found


def test_job_demand_has_gradients_and_weights() -> None:
    """Two servers train. Each of the other four receives the weights once, from a trainer or from another engine."""
    sent = between_servers(scenario())
    assert sent[0, 1] > 0
    assert sent[1, 0] > 0
    arriving = sent[:, 2:].sum(axis=0)
    weights = 2 * scenario().model_value.params
    np.testing.assert_allclose(arriving - np.diag(sent)[2:], weights, rtol=0.01)


def test_job_demand_counts_each_optimiser_step() -> None:
    once, twice = (between_servers(scenario(training__updates=updates))[0, 1] for updates in (1, 2))
    assert twice > 1.8 * once


def test_job_demand_has_exchanges_of_engines_that_span_servers() -> None:
    inside, wide = (between_servers(mixture(layouts)) for layouts in (["tp4"], ["tp4", "tp1dp16ep16"]))
    assert not inside[3, 2]
    assert wide[3, 2] > 0


def test_job_demand_exchanges_are_proportional_to_tokens() -> None:
    """The demand between two generating servers is exchanges, which grow with tokens, plus weights, which do not."""
    found = [
        between_servers(mixture(["tp1dp16ep16"], generation__workload__prompts=prompts)) for prompts in (8, 16, 24)
    ]
    first, then = found[1][3, 2] - found[0][3, 2], found[2][3, 2] - found[1][3, 2]
    assert first > 0
    assert then == pytest.approx(first)


def test_run_uses_a_fabric_built_for_the_job() -> None:
    made = scenario()
    stages = FabricStages(made, made.fabrics[0])
    plain = made.fabric(made.fabrics[0])
    assert isinstance(stages.fabric, TopoOpt)
    assert isinstance(plain, TopoOpt)
    assert not np.array_equal(stages.fabric.sends_to, plain.sends_to)
    assert ArmTimes(stages, "verl_to", 1).sync_stage(SimulatedFailures()).seconds > 0
    assert fabric_for(made, made.fabrics[0]).inventory() == plain.inventory(), "only the cabling differs"


def test_other_fabrics_do_not_depend_on_the_job() -> None:
    made = scenario_of(document(fabrics=["rfabric"]))
    assert fabric_for(made, made.fabrics[0]).inventory() == made.fabric(made.fabrics[0]).inventory()
