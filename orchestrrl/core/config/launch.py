"""Configuration sections for starting and stopping engines: `fleet.launch`, `fleet.deployer`, and parallel layouts."""

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from orchestrrl.core.documents import Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from planner.model import Parallelism


class EngineProduct(StrEnum):
    VLLM = "vllm"
    SIMULATED = "simulated"


class EngineDevice(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"  # vLLM's CPU build; a GPU's id stands for a number of cores


Words = Annotated[tuple[str, ...], Field(strict=False)]


class ParallelismSection(Section):
    """A parallel layout of an engine. If `attention_gpus` and `ffn_gpus` are set, attention and FFN run on separate
    GPUs (AFD)."""

    tp: PositiveInt = 1
    dp: PositiveInt = 1
    ep: PositiveInt = 1
    attention_gpus: NonNegativeInt = 0
    ffn_gpus: NonNegativeInt = 0
    micro_batches: PositiveInt = 1
    pp: PositiveInt = 1

    @model_validator(mode="after")
    def _checks_itself(self) -> Self:
        self.value()
        return self

    def value(self) -> Parallelism:
        return Parallelism(**dict(self))


class ConfigurationLaunch(Section):
    """Settings for starting the engines of one configuration, in addition to those of `fleet.launch`."""

    arguments: Words = ()
    environment: dict[str, str] = Field(default_factory=dict)


class LaunchSettings(Section):
    """Settings for starting engines. Paths refer to the file systems of the engines' machines."""

    engine: Annotated[EngineProduct, Field(strict=False)] = EngineProduct.VLLM
    # the Python of the engines' environment; default: python3, or the daemon's Python for simulated engines
    python: Name | None = None
    model: Name | None = None  # a name or a folder; not needed for simulated engines
    served_model_name: Name | None = None  # default: the model's name
    device: Annotated[EngineDevice, Field(strict=False)] = EngineDevice.CUDA
    cores_per_gpu: NonNegativeInt = 0  # CPU only: cores per GPU id; 0: not bound
    host: Name = "127.0.0.1"
    # First and last port. Each GPU of a node has four ports; an engine uses the ports of its lowest GPU.
    ports: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)] = (8100, 8199)
    nodes: Words = ()  # addresses, in the order of GPUs
    arguments: Words = ()
    environment: dict[str, str] = Field(default_factory=dict)
    # by id: additional or different settings
    configurations: dict[Name, ConfigurationLaunch] = Field(default_factory=dict)
    kv_directory: Name | None = None  # for kv_transfer.connector; contains a folder for each configuration
    weight_backend: bool = False  # vLLM only: weight versions are verified during loading and can be read

    @field_validator("ports")
    @classmethod
    def _a_range(cls, ports: tuple[int, int]) -> tuple[int, int]:
        if not ports[0] <= ports[1] <= 65535:
            raise ValueError("must be the first and the last port of a range within 1..65535")
        return ports


class Standby(StrEnum):
    """The treatment of engines that a redeployment replaces, if they support sleep mode."""

    STOP = "stop"
    KEEP = "keep"  # they sleep, so that a later redeployment can wake them


class DeployerSettings(Section):
    """Settings of the deployer, which starts and stops engines, and the time limits of a redeployment's steps."""

    product: Name = "local"
    options: dict[str, Any] = Field(default_factory=dict)  # options of the deployer product
    name: Name = "orchestrrl"  # name of the fleet, which marks its engines on machines shared between fleets
    folder: Name = "orchestrrl-engines"  # for records and logs
    standby: Annotated[Standby, Field(strict=False)] = Standby.STOP
    drain_within_s: NonNegativeFloat = 30.0  # time in which requests that cannot move may finish
    stop_within_s: PositiveFloat = 60.0
    start_within_s: PositiveFloat = 60.0
    ready_within_s: PositiveFloat = 600.0  # time from an engine's start until it responds
    load_within_s: PositiveFloat = 300.0  # time limit for loading weights
    check_within_s: PositiveFloat = 120.0  # time limit for warm-up and verification
    # A new engine must assign similar probabilities to an answer of the old engines: limit for the mean difference of
    # log-probabilities over this many tokens.
    compare_tokens: PositiveInt = 16
    compare_nats: PositiveFloat = 0.1
