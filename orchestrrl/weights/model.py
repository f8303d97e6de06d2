"""The vocabulary of carrying weights: peers, versions, and what of a version is where. Values only, and no torch.

A version is a list of tensors under the names that engines load (Hugging Face's). Wherever some of it is held it lies
in safetensors files whose data are the whole tensors, one behind the other in order of names; what is not held is a
hole in a sparse file. A shard is what is sent: boxes of tensors, one behind the other in row-major order, as
`planner.sync_tree.reshard` cuts them. Shards have a checksum (xxh3_64) for each of their blocks of `block_bytes`.
"""

import ipaddress
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from planner.model import EngineId, PeerId
from planner.sync_tree.parameters import Box
from planner.sync_tree.reshard import ShardSlice
from planner.sync_tree.shares import EngineShare

# What processes report in JSON, bounded so that the journal and protobuf can hold it, and sums over all peers too.
MOST_VERSION = 2**63 - 1
MOST_BYTES = 2**50  # of one version
MOST_BLOCK_BYTES = 1 << 30  # a block is held in memory where it is scattered
MOST_SECONDS = 253402300799.0  # the end of the year 9999, which dates can show
Version = Annotated[int, Field(ge=0, le=MOST_VERSION)]
Rank = Annotated[int, Field(ge=0, lt=2**31)]
ByteCount = Annotated[int, Field(ge=0, le=MOST_BYTES)]
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS, allow_inf_nan=False)]
Tokens = Annotated[tuple[Rank, ...], Field(max_length=65_536)]  # their ids
Range = tuple[ByteCount, ByteCount]  # bytes into a shard: from, and how many


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must have printable characters alone")
    return text


# What a peer says of itself.
Name = Annotated[str, Field(max_length=1024), AfterValidator(_printable)]
EngineName = Annotated[EngineId, Field(max_length=1024), AfterValidator(_printable)]
MOST_ITEMS = 4096  # engines of a peer, and versions that it holds

# As safetensors writes them.
DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One whole tensor, however it is divided."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor needs a name, got ''")
        if self.name == "__metadata__":
            raise ValueError(f"a tensor's name must not be what safetensors calls its metadata, got {self.name!r}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.name}: dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if any(length < 1 for length in self.shape):
            raise ValueError(f"{self.name}: every axis must have elements, got {self.shape}")
        if self.bytes > MOST_BYTES:
            raise ValueError(f"{self.name}: must have at most {MOST_BYTES} bytes, got {self.shape}")

    @property
    def bytes(self) -> int:
        return self.bytes_of(self.whole)

    @property
    def whole(self) -> Box:
        return tuple((0, length) for length in self.shape)

    def has(self, box: Box) -> bool:
        """Return whether the box lies within the tensor and has elements."""
        return len(box) == len(self.shape) and all(
            0 <= first < last <= length for (first, last), length in zip(box, self.shape, strict=True)
        )

    def bytes_of(self, box: Box) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(last - first for first, last in box)


@dataclass(frozen=True, slots=True)
class ShardMap:
    """What a shard is made of. `sums`: of its blocks, in hexadecimal; empty where they are not known yet."""

    id: str
    bytes: int
    slices: tuple[ShardSlice, ...]
    sums: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionMap:
    """All of a version that one peer has to do with. Tensors are in order of their names, each once."""

    version: int  # the policy version
    tensors: tuple[TensorMeta, ...]
    shards: tuple[ShardMap, ...]
    block_bytes: int

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if names != sorted(set(names)):
            raise ValueError("tensors must be in order of their names, each once")
        if self.version < 0 or self.block_bytes < 1:
            raise ValueError(f"version must be >= 0 and block_bytes >= 1, got {self.version} and {self.block_bytes}")

    @property
    def bytes(self) -> int:
        """Of its tensors, each byte once."""
        return sum(tensor.bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class StagedPart:
    """What one trainer rank has staged of a version: a file of its own in the version's folder, with whole tensors of
    which these boxes are there."""

    rank: int
    boxes: Mapping[str, tuple[Box, ...]]  # by tensor

    @property
    def file(self) -> str:
        return f"part-{self.rank}.safetensors"


MODEL_FILE = "model.safetensors"  # of a version that is received, and installed


class PeerRole(StrEnum):
    TRAINER = "trainer"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class EngineAt:
    """An engine that a peer installs weights into."""

    engine: EngineName
    url: Name
    installed: Version | None = (
        None  # version that it has, as far as the peer knows: brought by it, engine not restarted
    )
    given: bool = False  # the daemon told the peer of it, not whoever started the peer


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version of which a peer has something. `missing`: ranges of its shards that are not there, or did not agree
    with their sums; of one that trainers staged here: empty."""

    version: Version
    shards: tuple[str, ...]
    missing: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)
    staged_by: tuple[Rank, ...] = ()  # trainer ranks whose parts are here

    @property
    def complete(self) -> bool:
        return not self.missing


@dataclass(frozen=True, slots=True)
class PeerLocation:
    """Where a peer is: a GPU of the fabric's site, which says the rest, or pod, ToR and the NIC's rate by name."""

    gpu: Rank | None = None
    pod: Name = ""
    tor: Name = ""
    nic_gbps: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0  # 0: the configuration's


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that holds weights on one host, for a trainer or for engines, as it introduces itself."""

    id: Annotated[PeerId, Field(min_length=1, max_length=1024), AfterValidator(_printable)]
    role: PeerRole
    host: Name
    place: PeerLocation
    transports: Mapping[str, str]  # by name: where it listens
    engines: Annotated[tuple[EngineAt, ...], Field(max_length=MOST_ITEMS)] = ()
    share: EngineShare = field(default_factory=EngineShare)
    held: Annotated[tuple[HeldVersion, ...], Field(max_length=MOST_ITEMS)] = ()
    folder: Name = ""  # on its host; a version that it has is in `vVERSION` there
    # Names of the hosts whose engines it installs into as the daemon tells it of them.
    serves: Annotated[tuple[Name, ...], Field(max_length=MOST_ITEMS)] = ()
    # Engines of several hosts that another host's peer installs into, and of which ranks are on this one.
    ranks_of: tuple[EngineName, ...] = ()


LOOPBACK = "loopback"  # the host that the daemon is on, by whichever of its names


def host_name(host: str) -> str:
    """Return one name for what is the same host."""
    name = host.strip("[]").rstrip(".").lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return LOOPBACK if name == "localhost" else name
    return LOOPBACK if address.is_loopback else str(address)
