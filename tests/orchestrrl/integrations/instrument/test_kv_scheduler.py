"""The scheduler of KV transfers: saves, loads, and recomputation if an entry cannot be used."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.integrations.instrument.kv_entries import KvBlockLayout, KvEntryContents, KvEntryStore, KvEvictor
from orchestrrl.integrations.instrument.kv_scheduler import (
    KvTransferScheduler,
    LoadJob,
    TransferParams,
    read_transfer_params,
)

BLOCK_TOKENS = 4
LAYOUT = KvBlockLayout(("layer",), (3,))


class Keeper(KvEvictor):
    """A fake evictor that deletes at once, without a thread."""

    def discard(self, entry: str) -> None:
        self._store.discard(entry)


@dataclass
class Bench:
    """Two schedulers with one directory and a manual clock. `work` does the part of the workers."""

    shared: Path
    max_bytes: int = 1000
    now_s: float = 0.0
    store: KvEntryStore = field(init=False)

    def __post_init__(self) -> None:
        self.store = KvEntryStore(self.shared, ranks=1)
        self.source, self.target = self.scheduler(), self.scheduler()

    def scheduler(self) -> KvTransferScheduler:
        keeper = Keeper(self.store, 60.0, self.max_bytes)
        return KvTransferScheduler(
            self.store, keeper, block_tokens=BLOCK_TOKENS, bytes_per_block=3, clock=lambda: self.now_s
        )

    def stop(self, token_ids: Sequence[int], computed: int, entry: str = "e", **kwargs: Any) -> bool:
        """Abort a request at the source whose parameters select a save."""
        self.source.arrived("r", wish(save=entry))
        flags = {"aborted": True, "portable": True} | kwargs
        return self.source.finished("r", token_ids, computed, block_ids(computed), **flags)

    def work(self, scheduler: KvTransferScheduler) -> list[LoadJob]:
        saves, loads = scheduler.jobs()
        for job in saves:
            assert len(job.block_ids) == job.contents.blocks
            self.store.write(job.entry, 0, job.contents, LAYOUT, [[memoryview(b"abc")] * len(job.block_ids)])
        return loads

    def entries(self) -> list[str]:
        return sorted(path.name for path in self.store.root.iterdir()) if self.store.root.exists() else []


def wish(weights: str = "v1", **given: Any) -> dict[str, Any]:
    return {"handover": {"weights": weights, **given}}


def block_ids(tokens: int, first: int = 50) -> list[int]:
    return list(range(first, first - (-tokens // BLOCK_TOKENS)))


@given(
    prompt=st.integers(1, 30),
    known=st.integers(0, 30),
    ahead=st.integers(-3, 3),
    told=st.integers(0, 30),
    local_blocks=st.integers(0, 10),
)
def test_continued_request_loads_all_usable_tokens(
    tmp_path_factory: pytest.TempPathFactory, prompt: int, known: int, ahead: int, told: int, local_blocks: int
) -> None:
    """Steps may run ahead of the known tokens, and the router may have fewer tokens than the engine."""
    bench = Bench(tmp_path_factory.mktemp("kv"))
    tokens = list(range(prompt + known))
    computed = max(0, len(tokens) + ahead)
    kept = bench.stop(tokens, computed)
    assert kept == (computed > 0)
    bench.work(bench.source)
    assert bench.entries() == ["e"]

    continued = tokens[: prompt + min(known, told)]
    local = min(local_blocks * BLOCK_TOKENS, (len(continued) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    bench.target.arrived("s", wish(load="e"))
    external = bench.target.loadable_tokens("s", continued, local)
    usable = min(computed, len(tokens), len(continued) - 1)
    assert external == max(0, usable - local)
    if external:
        assert bench.target.loadable_tokens("s", continued, local) == external  # called again: no free blocks yet
        bench.target.allocated("s", block_ids(len(continued), 90), external)
        (job,) = bench.work(bench.target)
        assert job.first_block * BLOCK_TOKENS == local
        assert list(job.block_ids) == block_ids(usable, 90)[job.first_block :]
        assert bench.target.loadable_tokens("s", continued, local) == 0  # the load failed, or the request was preempted
    else:
        assert bench.entries() == []
    assert bench.work(bench.target) == []


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        (wish("v2", load="e"), range(12)),
        (wish(load="e"), [*range(5), 99, *range(6, 12)]),
        (wish(load="e"), [7]),
    ],
    ids=["other weights", "other tokens", "one token"],
)
def test_unusable_entry_is_deleted(tmp_path: Path, params: dict[str, Any], tokens: Sequence[int]) -> None:
    bench = Bench(tmp_path)
    assert bench.stop(range(12), 12)
    bench.work(bench.source)
    bench.target.arrived("s", params)
    assert bench.target.loadable_tokens("s", tokens, 0) == 0
    assert bench.entries() == []


def test_request_waits_for_an_entry_up_to_wait_s(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.target.arrived("s", wish(load="e", wait_s=2.0))
    for bench.now_s in (100.0, 100.001, 101.0, 101.9):
        assert bench.target.loadable_tokens("s", range(12), 0) is None
    bench.now_s = 102.0
    assert bench.target.loadable_tokens("s", range(12), 0) == 0
    bench.stop(range(12), 12)
    bench.work(bench.source)  # too late: no request needs it, and the sweep deletes it later
    assert bench.target.loadable_tokens("s", range(12), 0) == 0

    bench.target.arrived("t", wish(load="f", wait_s=2.0))
    assert bench.target.loadable_tokens("t", range(12), 0) is None
    bench.stop(range(12), 12, entry="f")
    bench.work(bench.source)
    bench.now_s = 103.0
    assert bench.target.loadable_tokens("t", range(12), 0) == 11


@pytest.mark.parametrize("reason", ["waiting", "not portable", "full", "caches cleared"])
def test_empty_entry_is_written_at_once_if_nothing_is_saved(tmp_path: Path, reason: str) -> None:
    bench = Bench(tmp_path, max_bytes=8 if reason == "full" else 1000)
    bench.source.arrived("r", wish(save="e"))
    if reason == "caches cleared":
        bench.source.caches_cleared()
    computed = 0 if reason == "waiting" else 12
    portable = reason != "not portable"
    assert not bench.source.finished("r", range(12), computed, block_ids(computed), aborted=True, portable=portable)
    bench.work(bench.source)
    bench.target.arrived("s", wish(load="e", wait_s=60.0))
    assert bench.target.loadable_tokens("s", range(12), 0) == 0
    assert bench.entries() == []


def test_finished_request_is_saved_at_its_end_if_asked_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.source.arrived("r", wish(save="e", at_end=True))
    assert bench.source.finished("r", range(12), 11, block_ids(11), aborted=False, portable=True)
    bench.work(bench.source)
    bench.target.arrived("s", wish(load="e"))
    assert bench.target.loadable_tokens("s", range(20), 0) == 11


def test_only_aborted_requests_with_a_save_are_saved(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert not bench.stop(range(12), 12, aborted=False)
    bench.source.arrived("q", None)
    assert not bench.source.finished("q", range(12), 12, block_ids(12), aborted=True, portable=True)
    assert bench.source.jobs() == ([], [])


def test_request_moved_while_loading_saves_nothing(tmp_path: Path) -> None:
    """Its blocks are still being filled; they are valid afterwards."""
    bench = Bench(tmp_path)
    for loaded in (False, True):
        bench.stop(range(12), 12)
        bench.work(bench.source)
        bench.target.arrived("s", wish(load="e", save="f"))
        assert bench.target.loadable_tokens("s", range(12), 0) == 11
        bench.target.allocated("s", block_ids(12), 11)
        if loaded:
            bench.target.loaded(["s"])
        assert bench.target.finished("s", range(12), 11, block_ids(11), aborted=True, portable=True) == loaded
        bench.target.loaded(["s"])
        bench.target.jobs()


def test_entry_is_deleted_with_its_request(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for ending in ("aborted", "scheduled without it"):
        bench.stop(range(12), 12)
        bench.work(bench.source)
        bench.target.arrived("s", wish(load="e"))
        if ending == "aborted":
            bench.target.finished("s", range(12), 0, [], aborted=True, portable=True)
        else:
            bench.target.allocated("s", block_ids(12), 0)
        assert bench.entries() == []
        assert bench.target.jobs() == ([], [])


def test_transfer_params_are_parsed_or_all_faults_reported() -> None:
    assert (
        read_transfer_params(None)
        is read_transfer_params({})
        is read_transfer_params({"do_remote_prefill": True})
        is None
    )
    assert read_transfer_params(wish(save="a", load="b", wait_s=1)) == TransferParams("v1", "a", "b", 1.0)
    with pytest.raises(ValueError, match="must be an object, got 3"):
        read_transfer_params({"handover": 3})
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # every part of the message is checked
        read_transfer_params(wish("", save="../x", load=7, wait_s=float("nan"), at_end=1, zeal=1))
    path = "kv_transfer_params.handover"
    told = str(raised.value)
    for name, got in (("weights", "''"), ("save", "'../x'"), ("load", "7"), ("wait_s", "nan"), ("at_end", "1")):
        assert f"{path}.{name}: must be" in told
        assert f"got {got}" in told
    assert f"{path}.zeal: is an unknown field" in told
    with pytest.raises(ValueError, match=r"save: must differ from load, got 'a' for both"):
        read_transfer_params(wish(save="a", load="a"))


def test_request_with_invalid_params_is_served(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.target.arrived("s", {"handover": {"weights": 1, "load": "e", "save": "f"}})
    assert bench.target.loadable_tokens("s", range(12), 0) == 0
    assert not bench.target.finished("s", range(12), 12, block_ids(12), aborted=True, portable=True)


def test_token_ids_are_pickled_compactly() -> None:
    one = KvEntryContents("v1", 1, BLOCK_TOKENS, array("I", [1, 2**32 - 1]))
    other = KvEntryContents("v1", 1, BLOCK_TOKENS, array("I", [1, 2]))
    assert one.identity != other.identity
    assert one.blocks == 1
