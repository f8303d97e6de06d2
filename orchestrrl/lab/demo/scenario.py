"""The demo's scenario, read from YAML, and the values derived from it: prompts, lengths and expected responses."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from orchestrrl.core.errors import ProblemFaults, faults_of
from orchestrrl.lab.sim.scenario import Count, GenerationControlSection, NotNegative, Positive, ScenarioSection
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.tokens import EOS, FIRST_WORD, LengthModel, TokenModel
from planner.model import RequestId

ENGINES = ("simulated", "vllm")
VLLM_VOCABULARY = 512  # vocabulary of the tiny model; ids below 16 are special


class DemoFabricSection(ScenarioSection):
    """An optical fabric of virtual switches: a PoD with the scenario's engines, and a training PoD of the same size."""

    model: str  # the model whose sizes determine the traffic of engines
    gpus_per_server: Count  # each GPU has a NIC; each server has its own ToR
    tor_fibres: Count
    device_s: Positive  # wall-clock seconds from command to link up


class DeploymentSection(ScenarioSection):
    """The engines that the daemon starts and can replace. Their costs are taken from the built-in profile `profile`.
    Replaced engines sleep until they are needed again."""

    profile: str
    gpus: Count
    per_node: Count
    initial: str  # configuration at the start of each step
    standby: str  # configuration that is started first and put to sleep
    overhead_s: NotNegative  # wall-clock seconds of a switch in addition to the engines' time
    fabric: DemoFabricSection


class SyncSection(ScenarioSection):
    """The step during which a trainer publishes new weights. If the engines are vLLM engines, the weights belong to the
    model that they serve."""

    prompts: Count  # prompts of that step
    max_tokens: Count


class DemoScenario(ScenarioSection):
    """The scenario of a demo: one generation step that is run with several seeds."""

    engines: Count
    engine: SimulatedOptions  # step times are ignored by vLLM
    prompts: Count
    samples: Count
    prompt_tokens: tuple[Count, Count]
    max_tokens: Count
    lengths: LengthModel
    # For a model that does not end its responses: each request's max_tokens is the length of its response.
    length_is_max_tokens: bool = False
    kv: bool = False  # engines transfer KV; otherwise moved requests are recomputed
    deployment: DeploymentSection | None = None  # None: the demo starts the engines, and none is replaced
    sync: SyncSection | None = None  # None: no new weights
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    speed: Positive
    tick_s: Positive = 0.03
    # Both sections are in wall-clock seconds.
    control: GenerationControlSection
    daemon: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of the generation step."""

    id: RequestId
    group: str  # the name of the prompt
    prompt_ids: tuple[int, ...]
    output_tokens: int  # length of its response
    dealt_to: int  # index of the engine to which a framework would assign the prompt

    @property
    def request(self) -> SimRequest:
        return SimRequest(self.id, self.group, len(self.prompt_ids), self.output_tokens)


def load_scenario(name: str) -> DemoScenario:
    """Return the built-in scenario `simulated`, `simulated-kv`, `simulated-redeploy` or `vllm`. Raises ProblemFaults if
    the scenario's file is invalid."""
    text = files("orchestrrl.lab.demo").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    # YAML 1.1 reads 4.1e-8 as a number but 1e-8 as a string; pydantic accepts both.
    try:
        return DemoScenario.model_validate(document)
    except ValidationError as error:
        raise ProblemFaults(faults_of(error)) from None


def samples(scenario: DemoScenario, engine: str, seed: int) -> list[Sample]:
    """Return the requests of the scenario's step in order of submission, grouped by prompt. `engine` is the kind of
    engine, one of ENGINES. Prompts are assigned to engines round-robin.

    The engines decode greedily, so that the response to a moved request can be compared with the response to an
    undisturbed request. Samples of a prompt therefore differ in the last prompt token instead of in random numbers.
    """
    rng = random.Random(seed)
    vocabulary = (FIRST_WORD, TokenModel().vocab_size) if engine == "simulated" else (16, VLLM_VOCABULARY)
    tokens = TokenModel(lengths=scenario.lengths)
    result = []
    for prompt in range(scenario.prompts):
        length = rng.randint(*scenario.prompt_tokens)
        shared_ids = tuple(rng.randrange(*vocabulary) for _ in range(length - 1))
        for sample in range(scenario.samples):
            prompt_ids = (*shared_ids, vocabulary[0] + sample)
            output_tokens = min(tokens.begin(prompt_ids).answer_tokens, scenario.max_tokens)
            result.append(
                Sample(
                    RequestId(f"step{seed}-p{prompt:02d}-s{sample}"),
                    f"step{seed}-p{prompt:02d}",
                    prompt_ids,
                    output_tokens,
                    prompt % scenario.engines,
                )
            )
    return result


def expected_answers(scenario: DemoScenario, step: Sequence[Sample]) -> dict[RequestId, list[int]]:
    return {sample.id: expected_ids(scenario, sample) for sample in step}


def expected_ids(scenario: DemoScenario, sample: Sample) -> list[int]:
    """Return the token IDs with which an undisturbed simulated engine responds to the sample. The IDs are computed
    without an engine."""
    generation = TokenModel(lengths=scenario.lengths).begin(sample.prompt_ids)
    ids = [generation.next_token()[0] for _ in range(sample.output_tokens)]
    if generation.answer_tokens <= scenario.max_tokens:
        ids[-1] = EOS  # the model ends the response before the limit
    return ids
