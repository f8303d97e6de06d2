"""Data types of weight sync: peers, versions, and the parts of a version that a peer stores. The types do not need
torch.

A version is a list of tensors. They have the names of Hugging Face checkpoints, because engines load tensors by these
names. Every host stores a version in safetensors files of whole tensors, sorted by name. If a host does not store a
part of a tensor, that part is a hole in the sparse file. A shard is the unit of transfer. It consists of boxes of
tensors, one after the other, each in row-major order. `planner.sync_tree.reshard` determines the boxes. A shard has a
checksum (xxh3_64) for each block of `block_bytes`.
"""

import ipaddress
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from orchestrrl.core.errors import shorten
from planner.model import EngineId, PeerId
from planner.sync_tree.parameters import Box
from planner.sync_tree.reshard import ShardSlice
from planner.sync_tree.shares import EngineShare

# Bounds on values that processes report in JSON, so that the journal and protobuf can store them and their sums.
MOST_VERSION = 2**63 - 1
MOST_BYTES = 2**50  # size of one version
MOST_BLOCK_BYTES = 1 << 30  # a block whose bytes are scattered in the file is copied into memory
MOST_SECONDS = 253402300799.0  # the end of the year 9999, which dates can show
Version = Annotated[int, Field(ge=0, le=MOST_VERSION)]
Rank = Annotated[int, Field(ge=0, lt=2**31)]
ByteCount = Annotated[int, Field(ge=0, le=MOST_BYTES)]
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS, allow_inf_nan=False)]
Tokens = Annotated[tuple[Rank, ...], Field(max_length=65_536)]  # token ids
Range = tuple[ByteCount, ByteCount]  # (offset, size) in bytes within a shard


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must consist of printable characters")
    return text


# Fields that a peer reports about itself.
Name = Annotated[str, Field(max_length=1024), AfterValidator(_printable)]
EngineName = Annotated[EngineId, Field(max_length=1024), AfterValidator(_printable)]
MOST_ITEMS = 4096  # engines of one peer, and versions that it stores

# The names of dtypes in safetensors files.
DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The name, dtype and shape of one whole tensor. They do not depend on how ranks divide the tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor's name must not be empty, got ''")
        if self.name == "__metadata__":
            raise ValueError(f"a tensor's name must not be the metadata key of safetensors, got {self.name!r}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.name}: dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if any(length < 1 for length in self.shape):
            raise ValueError(f"{self.name}: shape must have no empty axis, got {self.shape}")
        if self.bytes > MOST_BYTES:
            raise ValueError(
                f"{self.name}: must have at most {MOST_BYTES} bytes, got {self.bytes} for shape {self.shape}"
            )

    @property
    def bytes(self) -> int:
        return self.bytes_of(self.whole)

    @property
    def whole(self) -> Box:
        return tuple((0, length) for length in self.shape)

    def has(self, box: Box) -> bool:
        """Return whether the box lies within the tensor and is not empty."""
        return len(box) == len(self.shape) and all(
            0 <= first < last <= length for (first, last), length in zip(box, self.shape, strict=True)
        )

    def bytes_of(self, box: Box) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(last - first for first, last in box)


@dataclass(frozen=True, slots=True)
class ShardMap:
    """The tensor slices of a shard. `sums` has the checksums of its blocks in hexadecimal, or is empty if they are not
    computed yet."""

    id: str
    bytes: int
    slices: tuple[ShardSlice, ...]
    sums: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionMap:
    """The tensors and shards of a version, or of the part of a version that one peer stores or receives. Tensors are
    sorted by name and unique. Each block of `block_bytes` in a shard has a checksum."""

    version: int  # the policy version
    tensors: tuple[TensorMeta, ...]
    shards: tuple[ShardMap, ...]
    block_bytes: int

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if names != sorted(set(names)):
            raise ValueError(f"tensors must be sorted by name without duplicates, got {shorten(names)}")
        if self.version < 0 or self.block_bytes < 1:
            raise ValueError(
                f"version must be >= 0 and block_bytes >= 1, got version {self.version} and block_bytes"
                f" {self.block_bytes}"
            )

    @property
    def bytes(self) -> int:
        """Return the total size of the tensors in bytes. A byte that several peers store is counted once."""
        return sum(tensor.bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class StagedPart:
    """The part of a version that one trainer rank has staged in a separate file in the version's folder. The file has
    whole tensors, of which only `boxes` are filled."""

    rank: int
    boxes: Mapping[str, tuple[Box, ...]]  # by tensor name

    @property
    def file(self) -> str:
        return f"part-{self.rank}.safetensors"


MODEL_FILE = "model.safetensors"  # the file of a received version, from which engines install it


class PeerRole(StrEnum):
    TRAINER = "trainer"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class EngineAt:
    """An engine into which a peer installs weights."""

    engine: EngineName
    url: Name
    installed: Version | None = None  # version that this peer installed, if the engine has not been restarted since
    given: bool = False  # the daemon assigned the engine; it is not an argument of the peer's command line


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version of which a peer stores some bytes. `missing` has the ranges of each shard that have not arrived or that
    have a wrong checksum. For a version that trainers staged on the peer's host, `missing` is empty."""

    version: Version
    shards: tuple[str, ...]
    missing: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)
    staged_by: tuple[Rank, ...] = ()  # trainer ranks whose parts are on this host

    @property
    def complete(self) -> bool:
        return not self.missing


@dataclass(frozen=True, slots=True)
class PeerLocation:
    """The location of a peer in the network. It is given either as a GPU of the fabric's site, or as the PoD, the ToR
    and the NIC rate. A GPU implies the other values."""

    gpu: Rank | None = None
    pod: Name = ""
    tor: Name = ""
    nic_gbps: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0  # 0: the configuration's


@dataclass(frozen=True, slots=True)
class Peer:
    """A description of a peer, which is a process that stores weights on one host for a trainer or for engines. The
    peer sends this description when it attaches and when its state changes. `share` is the part of each version that
    the host's engines load."""

    id: Annotated[PeerId, Field(min_length=1, max_length=1024), AfterValidator(_printable)]
    role: PeerRole
    host: Name
    place: PeerLocation
    transports: Mapping[str, str]  # address on which it listens, by transport name
    engines: Annotated[tuple[EngineAt, ...], Field(max_length=MOST_ITEMS)] = ()
    share: EngineShare = field(default_factory=EngineShare)
    held: Annotated[tuple[HeldVersion, ...], Field(max_length=MOST_ITEMS)] = ()
    folder: Name = ""  # on its host; each version is in its subfolder `vVERSION`
    # Names of the hosts whose engines the daemon may assign to this peer.
    serves: Annotated[tuple[Name, ...], Field(max_length=MOST_ITEMS)] = ()
    # Engines that span several hosts, have ranks on this host, and that another host's peer installs into.
    ranks_of: tuple[EngineName, ...] = ()


LOOPBACK = "loopback"  # the name for every loopback address and for localhost


def host_name(host: str) -> str:
    """Return the canonical name of a host. All loopback addresses have the same name."""
    name = host.strip("[]").rstrip(".").lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return LOOPBACK if name == "localhost" else name
    return LOOPBACK if address.is_loopback else str(address)
