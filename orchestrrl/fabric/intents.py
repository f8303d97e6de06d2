"""Convert intents to and from JSON, the form in which trainers announce them and the journal stores them.

    {"stage": "train", "gpus": {"0": 0, "1": 8},
     "traffic": [{"operation": "DP", "primitive": "ring_all_reduce", "groups": [[0, 1]], "bytes_per_rank": 4e9,
                  "times": 1}]}

`gpus` maps each rank to a GPU of the site. A rank without an entry uses the GPU with the same number. `job` is the job
name that the ranks' recorders use. If `job` is missing, the job of the recorder that announces the intent is used, if
there is one.
"""

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from orchestrrl.core.documents import Section, require
from orchestrrl.core.errors import ProblemFaults, faults_of
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.model import GpuId

MOST_BYTES = 2 * 1024 * 1024  # 16,384 ranks with a map and five kinds of traffic take a third of it, and parse in 25 ms

_Rank = Annotated[int, Field(ge=0, lt=2**31)]
_Amount = Annotated[float, AfterValidator(require(lambda value: 0 <= value <= 1e18, ">= 0 and <= 1e18"))]
_Groups = tuple[tuple[_Rank, ...], ...]


class _TrafficPart(Section):
    operation: Annotated[TrafficOperation, Field(strict=False)]
    primitive: Annotated[Primitive, Field(strict=False)]
    groups: _Groups = Field(strict=False)
    bytes_per_rank: _Amount
    times: _Amount = 1.0
    receivers: _Groups = Field(default=(), strict=False)
    both_ways: bool = False


class _IntentPart(Section):
    stage: Annotated[Stage, Field(strict=False)]
    traffic: tuple[_TrafficPart, ...] = Field(strict=False)
    job: str = Field(default="", max_length=200)
    gpus: dict[Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")], _Rank] = Field(default_factory=dict)


def parse_intent(period: str, text: str, job: str = "") -> Intent:
    """Parse an intent from JSON text. `job` is used if the text does not name a job. Raises ProblemFaults, listing
    every fault, if the text is invalid or `period` is empty."""
    faults = [] if period else ["period: must be a name, got ''"]
    if len(text) > MOST_BYTES:
        raise ProblemFaults([*faults, f"intent: must be at most {MOST_BYTES} bytes, got {len(text)}"])
    try:
        part = _IntentPart.model_validate_json(text)
    except ValidationError as error:
        raise ProblemFaults([*faults, *(f"intent.{fault}" for fault in faults_of(error, _IntentPart))]) from None
    traffic = []
    for index, each in enumerate(part.traffic):
        try:
            traffic.append(Traffic(**dict(each)))
        except ValueError as error:
            faults.append(f"intent.traffic[{index}]: {error}")
    if faults:
        raise ProblemFaults(faults)
    gpus = {int(rank): GpuId(gpu) for rank, gpu in part.gpus.items()}
    return Intent(period, part.stage, tuple(traffic), gpus, part.job or job)


def intent_to_json(intent: Intent) -> str:
    traffic = tuple(_TrafficPart.model_validate(each, from_attributes=True) for each in intent.traffic)
    gpus = {str(rank): int(gpu) for rank, gpu in sorted(intent.gpus.items())}
    part = _IntentPart(stage=intent.stage, traffic=traffic, gpus=gpus, job=intent.job)
    return part.model_dump_json(exclude_defaults=True)
