"""`weights` of the daemon's configuration: how new weights reach the engines."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from orchestrrl.core.documents import (
    Name,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    SectionWithFormer,
    require,
)

_Share = Annotated[float, AfterValidator(require(lambda value: 0 < value <= 1, "> 0 and <= 1"))]


class InstallWhen(StrEnum):
    AT_ONCE = "at_once"  # the pause barrier is closed for it as soon as all bytes are everywhere
    NEXT_PAUSE = "next_pause"  # engines take it when the pause barrier is closed next


class ProbeSettings(Section):
    """A prompt that every engine goes on from, greedily, before a version counts. All of one configuration must answer
    the same."""

    prompt_ids: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)] = (1, 2, 3, 4, 5, 6, 7, 8)
    max_tokens: PositiveInt = 8


class PodCircuits(Section):
    id: Name
    boundary_circuits: PositiveInt


class TorCircuits(Section):
    id: Name
    circuits: PositiveInt


class NetworkSettings(Section):
    """Where there is no `fabric`: the packet network between peers, for plans and their rate budgets. Peers say in
    which PoD and ToR they are; those not named here have no limit but their NICs."""

    link_gbps: PositiveFloat = 100.0
    nic_gbps: PositiveFloat = 100.0  # of a peer that does not say
    pods: Annotated[tuple[PodCircuits, ...], Field(strict=False)] = ()
    tors: Annotated[tuple[TorCircuits, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        for name in ("pods", "tors"):
            ids = [each.id for each in getattr(self, name)]
            if twice := sorted({each for each in ids if ids.count(each) > 1}):
                raise ValueError(f"{name} must be named once each, twice are {', '.join(twice)}")
        return self


class WeightSettings(SectionWithFormer):
    former = ("seeds_per_pod",)
    # In order of preference: the first that both ends of an edge have. Between CPUs our TCP takes 0.84 to 0.93 of the
    # time of torch's broadcast of the same bytes, point to point over gloo 0.98 to 1.17.
    transports: Annotated[tuple[Name, ...], Field(strict=False, min_length=1)] = ("nccl", "tcp", "gloo")
    chunk_bytes: PositiveInt = 4 * 1024 * 1024
    hop_latency_s: PositiveFloat = 0.001
    # Of NICs and links that a sync takes at most; 1.0: it is not held back, the network shares out by itself.
    rate_share: _Share = 1.0
    network: NetworkSettings = NetworkSettings()
    install: Annotated[InstallWhen, Field(strict=False)] = InstallWhen.AT_ONCE  # where the trainer does not say
    probe: ProbeSettings | None = ProbeSettings()
    publish_within_s: PositiveFloat = 120.0  # from the first rank's word to the last one's
    stall_s: PositiveFloat = 10.0  # an edge on which nothing moves for so long is broken
    patience_s: PositiveFloat = 30.0  # for a peer that has gone, before the sync goes on without it or is given up
    fence_within_s: PositiveFloat = 60.0
    install_within_s: PositiveFloat = 300.0
    probe_within_s: PositiveFloat = 60.0
    # The pause barrier's lease while engines are being changed. If the daemon dies then, requests wait for it to come
    # back, at most so long: engines could have different weights until it does.
    lease_s: PositiveFloat = 3600.0
    attempts: PositiveInt = 2  # of one version: a failed one begins again with the bytes that are there
    slowest_edges: PositiveInt = 16  # that a report names
