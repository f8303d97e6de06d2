"""Save and load KV blocks of every memory layout through a file. Runs in vLLM's environment."""

import sys
import time
from array import array
from pathlib import Path

import kv_handover
import torch
from kv_entries import KvBlockLayout, KvEntryContents, KvEntryStore
from kv_scheduler import LoadJob, SaveJob

BLOCKS = 20
DEADLINE_S = 60.0
SAVED, FILLED = (3, 9, 4, 0, 17, 11, 2), (1, 8, 15, 16, 5)  # the second five of the saved blocks


def caches(seed: int, *, in_one_piece: bool) -> dict[str, torch.Tensor]:
    """Return caches in which two kernel blocks form a block of layer 1, and layer 3 shares the KV of layer 2."""
    torch.manual_seed(seed)
    first, second = torch.randn(2 * BLOCKS, 2, 16, 8), torch.randn(BLOCKS, 16, 2, 8, dtype=torch.bfloat16)
    if not in_one_piece:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    return {"first": first, "second": second, "third": second}


def until_ended(worker: kv_handover.KvWorker) -> tuple[set[str], set[str], set[str]]:
    deadline_s = time.monotonic() + DEADLINE_S
    while not any(ended := worker.ended()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return ended


def carry(store: KvEntryStore, *, in_one_piece: bool) -> KvBlockLayout:
    source, target = (kv_handover.KvWorker(store, rank=0, num_blocks=BLOCKS) for _ in range(2))
    there, here = caches(1, in_one_piece=in_one_piece), caches(2, in_one_piece=in_one_piece)
    untouched = {name: cache.clone() for name, cache in here.items()}
    source.register(there)
    target.register(here)
    contents = KvEntryContents("v1", 1, 16, array("I", range(16 * len(SAVED) - 5)))
    source.save(SaveJob("r", "e", contents, SAVED))
    assert until_ended(source) == ({"r"}, set(), set())
    target.load(LoadJob("s", "e", contents.identity, 1, FILLED))
    assert until_ended(target) == (set(), {"s"}, set())
    for name, cache in here.items():
        now, saved, before = (kv.unflatten(0, (BLOCKS, -1)) for kv in (cache, there[name], untouched[name]))
        for block in range(BLOCKS):
            want = saved[SAVED[1 + FILLED.index(block)]] if block in FILLED else before[block]
            assert torch.equal(now[block], want), (name, block)
    target.load(LoadJob("s", "e", contents.identity, 0, FILLED))  # it has been deleted
    assert until_ended(target) == (set(), {"s"}, {"s"})
    layout = source._layout
    source.stop()
    target.stop()
    return layout


if __name__ == "__main__":
    kv_handover.STAGE_BYTES = 3000  # one block of the first layer, five of the second
    made = {carry(KvEntryStore(Path(sys.argv[1]), ranks=1), in_one_piece=answer) for answer in (True, False)}
    assert len(made) == 2, "what lies otherwise must not be taken for the same"
