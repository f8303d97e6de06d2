"""What the ranks of a trainer have to know of each other: which start of it this is, who has the same on one host.

Asked of torch.distributed where that runs, once for as long as a rank has the same boxes; every rank has to take part.
"""

import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent
from orchestrrl.weights.trainer.boxes import TensorPiece


@dataclass(frozen=True, slots=True)
class HostRanks:
    """`holders`: of what this rank has, by `TensorPiece.key`: which ranks of this host have it, too."""

    run: str
    holders: dict[int, tuple[int, ...]]


class TrainerRanks:
    """The ranks of `group` (None: all of torch.distributed's). `run`: what they call this start of the trainer; without
    it the first of them finds a name, where they can be asked."""

    def __init__(self, rank: int, world: int, peer: str, group: Any = None, run: str = "") -> None:
        self._rank, self._world, self._peer, self._group = rank, world, peer, group
        self._own_run = run or uuid.uuid4().hex
        self._is_named = bool(run)
        self._known: HostRanks | None = None
        self._keys: tuple[int, ...] = ()

    def neighbours(self, pieces: Sequence[TensorPiece]) -> HostRanks:
        """A collective call, unless this is the only rank. Raises Permanent where torch.distributed says otherwise of
        rank and world."""
        distributed = self._distributed()
        if distributed is None:
            # Ranks that nothing joins stage all that they have.
            return HostRanks(self._own_run if self._world == 1 or self._is_named else "", {})
        keys = tuple(sorted(piece.key for piece in pieces))
        if not all(self._gathered(distributed, self._known is not None and keys == self._keys)):
            told = self._gathered(distributed, (self._peer, self._own_run, keys))
            self._known, self._keys = self._read(told, keys), keys
        assert self._known is not None
        return self._known

    def of_the_first(self, ask: Callable[[], int]) -> int:
        """What the first rank is answered, for all: a collective call. Where it raises all do. Ranks that nothing joins
        ask each for itself."""
        distributed = self._distributed()
        if distributed is None:
            return ask()
        answer: int | OrchestrRLError = 0
        if self._rank == 0:
            try:
                answer = ask()
            except OrchestrRLError as error:
                answer = error
        told = self._gathered(distributed, str(answer) if isinstance(answer, OrchestrRLError) else answer)
        if isinstance(answer, OrchestrRLError):
            raise answer
        if isinstance(told[0], str):
            raise OutcomeUnknown(f"the first rank was not answered: {told[0]}")
        return int(told[0])

    def _read(self, told: Sequence[tuple[str, str, tuple[int, ...]]], keys: Sequence[int]) -> HostRanks:
        own = set(keys)
        holders: dict[int, list[int]] = {}
        for rank, (peer, _, theirs) in enumerate(told):
            if peer == self._peer:
                for key in own.intersection(theirs):
                    holders.setdefault(key, []).append(rank)
        return HostRanks(told[0][1], {key: tuple(ranks) for key, ranks in holders.items()})

    def _gathered(self, distributed: Any, own: object) -> list[Any]:
        """What all ranks say, by rank."""
        told: list[Any] = [None] * self._world
        distributed.all_gather_object(told, own, group=self._group)
        return told

    def _distributed(self) -> Any:
        distributed: Any = sys.modules.get("torch.distributed")
        if self._world == 1 or distributed is None or not distributed.is_available():
            return None
        if not distributed.is_initialized():
            return None
        rank, world = distributed.get_rank(self._group), distributed.get_world_size(self._group)
        if (rank, world) != (self._rank, self._world):
            raise Permanent(
                f"rank and world must be torch.distributed's {rank} of {world}, got {self._rank} of {self._world};"
                " where only some ranks publish, name their group"
            )
        return distributed
