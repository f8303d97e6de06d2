"""The `weights` section of the daemon's configuration, which defines how new weights are transferred to the engines."""

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
    AT_ONCE = "at_once"  # the pause barrier is closed for the install as soon as all peers have all bytes
    NEXT_PAUSE = "next_pause"  # engines install the weights when the pause barrier closes next


class ProbeSettings(Section):
    """The prompt that every engine completes by greedy decoding before a weight version is committed. All engines with
    the same configuration must return the same answer."""

    prompt_ids: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)] = (1, 2, 3, 4, 5, 6, 7, 8)
    max_tokens: PositiveInt = 8


class PodCircuits(Section):
    id: Name
    boundary_circuits: PositiveInt


class TorCircuits(Section):
    id: Name
    circuits: PositiveInt


class NetworkSettings(Section):
    """The packet network between peers. If `fabric` is not configured, sync plans and their rate limits are computed
    for this network. Peers report their PoD and ToR. PoDs and ToRs that are not listed here have no bandwidth limit, so
    their peers are limited only by their NICs."""

    link_gbps: PositiveFloat = 100.0
    nic_gbps: PositiveFloat = 100.0  # for peers that do not report their NIC rate
    pods: Annotated[tuple[PodCircuits, ...], Field(strict=False)] = ()
    tors: Annotated[tuple[TorCircuits, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        for name in ("pods", "tors"):
            ids = [each.id for each in getattr(self, name)]
            if twice := sorted({each for each in ids if ids.count(each) > 1}):
                raise ValueError(f"{name} must have unique ids, got duplicates of {', '.join(twice)}")
        return self


class WeightSettings(SectionWithFormer):
    former = ("seeds_per_pod",)
    # In order of preference; an edge uses the first that both peers support. Between CPUs TCP takes 0.84 to
    # 0.93 of the time of torch's broadcast of the same bytes; point to point over gloo it takes 0.98 to 1.17.
    transports: Annotated[tuple[Name, ...], Field(strict=False, min_length=1)] = ("nccl", "tcp", "gloo")
    chunk_bytes: PositiveInt = 4 * 1024 * 1024
    hop_latency_s: PositiveFloat = 0.001
    # The largest share of NICs and links that a sync uses; 1.0: no limit, the network shares its bandwidth itself.
    rate_share: _Share = 1.0
    network: NetworkSettings = NetworkSettings()
    install: Annotated[InstallWhen, Field(strict=False)] = InstallWhen.AT_ONCE  # unless the trainer specifies it
    probe: ProbeSettings | None = ProbeSettings()
    publish_within_s: PositiveFloat = 120.0  # from the first rank's publication to the last rank's
    stall_s: PositiveFloat = 10.0  # an edge without progress for this long is broken
    patience_s: PositiveFloat = 30.0  # for a disconnected peer to return, before the sync continues without it or fails
    fence_within_s: PositiveFloat = 60.0
    install_within_s: PositiveFloat = 300.0
    probe_within_s: PositiveFloat = 60.0
    # The pause barrier's lease during a change of engines. If the daemon dies in the meantime, requests wait at most
    # this long for its return, because engines could have different weights until then.
    lease_s: PositiveFloat = 3600.0
    attempts: PositiveInt = 2  # attempts for one version; a retry reuses the bytes already received
    slowest_edges: PositiveInt = 16  # number of slowest edges listed in a report
