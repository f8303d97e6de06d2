"""The demo's scenario: read from YAML, and what follows from it: prompts, lengths, and what a right answer is."""

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
VLLM_VOCABULARY = 512  # of the tiny model; ids below 16 are special


class DemoFabricSection(ScenarioSection):
    """An optical fabric of virtual switches: a PoD with these engines, and one as large that takes their responses."""

    model: str  # whose sizes say what engines send
    gpus_per_server: Count  # each with a NIC; a server is below a ToR of its own
    tor_fibres: Count
    device_s: Positive  # from command to link up, of the clock


class DeploymentSection(ScenarioSection):
    """Engines that the daemon starts, and may replace by others. What they cost is a built-in profile's; replaced ones
    sleep until they are wanted again."""

    profile: str
    gpus: Count
    per_node: Count
    initial: str  # configuration that each step begins with
    standby: str  # one that is started before, and put to sleep
    # What a switch takes here beside the engines' own time: of the clock.
    overhead_s: NotNegative
    fabric: DemoFabricSection


class SyncSection(ScenarioSection):
    """Weights that a trainer publishes while requests of a step run. vLLM's are those of its model."""

    prompts: Count  # of that step
    max_tokens: Count


class DemoScenario(ScenarioSection):
    """One generation step, to be run over several seeds."""

    engines: Count
    engine: SimulatedOptions  # vLLM brings its own step time
    prompts: Count
    samples: Count
    prompt_tokens: tuple[Count, Count]
    max_tokens: Count
    lengths: LengthModel
    # A model without a sense of length: each request's own max_tokens is how long its answer will be.
    length_is_max_tokens: bool = False
    kv: bool = False  # engines hand KV over to each other; else moved requests are computed again
    deployment: DeploymentSection | None = None  # None: the demo starts the engines, and they stay
    sync: SyncSection | None = None  # None: weights stay as they are
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    speed: Positive
    tick_s: Positive = 0.03
    # In seconds of wall time, the daemon's configuration without its fleet included.
    control: GenerationControlSection
    daemon: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of the step."""

    id: RequestId
    group: str  # the prompt's name
    prompt_ids: tuple[int, ...]
    output_tokens: int  # how long its answer will be
    dealt_to: int  # the engine that the framework would deal its prompt to

    @property
    def request(self) -> SimRequest:
        return SimRequest(self.id, self.group, len(self.prompt_ids), self.output_tokens)


def load_scenario(name: str) -> DemoScenario:
    """The shipped scenario `simulated`, `simulated-kv`, `simulated-redeploy` or `vllm`. Raises ProblemFaults if it has
    been edited into nonsense."""
    text = files("orchestrrl.lab.demo").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    # YAML 1.1 reads 4.1e-8 as a number but 1e-8 as a string; pydantic takes both.
    try:
        return DemoScenario.model_validate(document)
    except ValidationError as error:
        raise ProblemFaults(faults_of(error)) from None


def samples(scenario: DemoScenario, engine: str, seed: int) -> list[Sample]:
    """The step's requests in order of submission: a prompt's samples together, prompts dealt round robin.

    The engines decode greedily, so that a moved request can be checked against an undisturbed one; a prompt's samples
    differ in its last token instead of in what is drawn.
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
    """What an undisturbed simulated engine answers, computed without any engine."""
    generation = TokenModel(lengths=scenario.lengths).begin(sample.prompt_ids)
    ids = [generation.next_token()[0] for _ in range(sample.output_tokens)]
    if generation.answer_tokens <= scenario.max_tokens:
        ids[-1] = EOS  # it ends by itself rather than at the limit
    return ids
