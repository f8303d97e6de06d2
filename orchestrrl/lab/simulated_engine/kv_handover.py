"""KV of running requests between simulated engines of one machine: a small file for each entry, in a shared directory.

Bodies say what they want as vLLM's are told with OrchestrRL's connector
(orchestrrl/integrations/instrument/kv_scheduler.py). Nothing is carried but what stands for the KV: the tokens that it
belongs to, and the version of the weights.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrrl.integrations.instrument.kv_scheduler import TransferParams


@dataclass(frozen=True, slots=True)
class KvLink:
    """How engines hand KV over. Times are virtual."""

    directory: Path
    bytes_per_token: float
    gbps: float
    latency_s: float

    def transfer_s(self, tokens: int) -> float:
        return self.latency_s + tokens * self.bytes_per_token * 8 / (self.gbps * 1e9)

    def save(self, wish: TransferParams, token_ids: Sequence[int]) -> None:
        """The KV of an aborted request; of no tokens, so that nobody waits for it."""
        assert wish.save is not None
        entry = self.directory / wish.save
        written = entry.with_suffix(".part")
        written.write_text(json.dumps({"weights": wish.weights, "token_ids": list(token_ids)}))
        written.rename(entry)

    def take(self, wish: TransferParams, token_ids: Sequence[int]) -> int | None:
        """How many of these tokens' KV the entry has, at most all but the last; None: it is not there yet. Once found
        it is gone: 0 where it is of other weights or tokens."""
        assert wish.load is not None
        entry = self.directory / wish.load
        try:
            found = json.loads(entry.read_text())
        except FileNotFoundError:
            return None
        entry.unlink()
        common = min(len(found["token_ids"]), len(token_ids))
        if found["weights"] != wish.weights or found["token_ids"][:common] != list(token_ids[:common]):
            return 0
        return min(common, len(token_ids) - 1)
