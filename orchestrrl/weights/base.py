"""What the parts of a peer ask of each other: a version on this host, and who carries its bytes."""

from collections.abc import Callable, Sequence
from typing import Protocol

from orchestrrl.weights.model import Range, VersionMap
from orchestrrl.weights.orders import ArrivedBytes, CarryEdges, EdgeEvent

Tell = Callable[[EdgeEvent | ArrivedBytes], None]  # from any thread


class LocalVersion(Protocol):
    """A version on this host, whole or being filled. May be used from many threads; `weights/peer/store.py` has it."""

    map: VersionMap

    def view(self, shard: str, offset: int, size: int) -> memoryview | None:
        """The bytes themselves, where they lie in one piece in a file; else None. To be written to where the version
        is received."""
        ...

    def read(self, shard: str, offset: int, into: memoryview) -> None:
        """Bytes that are there, wherever they lie."""
        ...

    def write(self, shard: str, offset: int, data: memoryview) -> None:
        """The same the other way round; `arrived` has to be told."""
        ...

    def arrived(self, shard: str, offset: int, size: int) -> None:
        """These are there now, by `write` or through `view`: who waits for them goes on."""
        ...

    def wait(self, shard: str, offset: int, size: int, timeout_s: float) -> bool:
        """Whether all of it is there, by then."""
        ...

    def missing(self) -> dict[str, tuple[Range, ...]]:
        """By shard, in order; shards of which nothing is missing are left out."""
        ...


class Carrier(Protocol):
    """Sends and receives edges in threads of its own; `weights/peer/carry.py` has it."""

    def carry(self, staged: LocalVersion, order: CarryEdges) -> None:
        """Begin, beside what runs; it returns at once. An edge that runs already is left as it is."""
        ...

    def end(self, version: int, edges: Sequence[str] = ()) -> None:
        """Let go of these, or of all of the version's; nothing is told of them any more. Returns once they are."""
        ...

    def close(self) -> None: ...
