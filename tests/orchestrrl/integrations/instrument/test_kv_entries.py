"""KV cache entries: reads return what was written or are refused, and old entries are deleted."""

import os
import random
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.integrations.instrument.kv_entries import (
    FOLDER,
    KvBlockLayout,
    KvEntryContents,
    KvEntryStore,
    KvEvictor,
    UnusableEntry,
    is_entry_id,
)

LAYOUT = KvBlockLayout(("first", "second"), (6, 10))
DEADLINE_S = 120.0


def contents(tokens: int, weights: str = "v1", ranks: int = 1, block_tokens: int = 4) -> KvEntryContents:
    return KvEntryContents(weights, ranks, block_tokens, array("I", range(100, 100 + tokens)))


def payload(blocks: int, layout: KvBlockLayout, seed: int = 0) -> list[list[bytes]]:
    chance = random.Random(seed)
    return [[chance.randbytes(size) for _ in range(blocks)] for size in layout.block_bytes]


def pieces(layers: list[list[bytes]], blocks_per_piece: int = 1) -> Iterator[list[memoryview]]:
    for layer in layers:
        yield [memoryview(b"".join(layer[at : at + blocks_per_piece])) for at in range(0, len(layer), blocks_per_piece)]


def save(store: KvEntryStore, entry: str, what: KvEntryContents, rank: int = 0, seed: int = 0) -> list[list[bytes]]:
    layers = payload(what.blocks, LAYOUT, seed)
    store.write(entry, rank, what, LAYOUT, pieces(layers))
    return layers


def load(store: KvEntryStore, entry: str, what: KvEntryContents, wanted: range, rank: int = 0) -> list[list[bytes]]:
    into = [[bytearray(size) for _ in wanted] for size in LAYOUT.block_bytes]
    store.read(entry, rank, what.identity, LAYOUT, wanted, [[memoryview(block) for block in layer] for layer in into])
    return [[bytes(block) for block in layer] for layer in into]


@given(
    tokens=st.integers(0, 40),
    block_tokens=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    per_piece=st.integers(1, 4),
    data=st.data(),
)
def test_read_returns_the_written_blocks(
    tmp_path_factory: pytest.TempPathFactory,
    tokens: int,
    block_tokens: int,
    sizes: list[int],
    per_piece: int,
    data: st.DataObject,
) -> None:
    store = KvEntryStore(tmp_path_factory.mktemp("kv"), ranks=1)
    what = contents(tokens, block_tokens=block_tokens)
    layout = KvBlockLayout(tuple(f"layer {size}" for size in sizes), tuple(sizes))
    written = payload(what.blocks, layout)
    size = store.write("e", 0, what, layout, pieces(written, per_piece))
    assert size == store.file("e", 0).stat().st_size
    assert store.lookup("e", "v1", block_tokens) == what
    stop = data.draw(st.integers(0, what.blocks))
    start = data.draw(st.integers(0, stop))
    into = [[bytearray(block_bytes) for _ in range(start, stop)] for block_bytes in sizes]
    views = [[memoryview(block) for block in layer] for layer in into]
    assert store.read("e", 0, what.identity, layout, range(start, stop), views) == (stop - start) * sum(sizes)
    assert into == [layer[start:stop] for layer in written]


@given(data=st.data())
def test_damaged_entry_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """One wrong or missing byte makes lookup or read refuse the entry, or the result is still correct."""
    store = KvEntryStore(tmp_path_factory.mktemp("kv"), ranks=1)
    what = contents(7)
    written = save(store, "e", what)
    good = store.file("e", 0).read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    store.file("e", 0).write_bytes(data.draw(st.sampled_from([flipped, good[:at], good + good[: at + 1]])))
    try:
        found = store.lookup("e", "v1", 4)
        assert found is not None
        assert load(store, "e", found, range(what.blocks)) == written
        assert found.token_ids == what.token_ids
    except UnusableEntry:
        pass


def test_entry_is_valid_only_for_its_weights_blocks_ranks_and_layout(tmp_path: Path) -> None:
    store = KvEntryStore(tmp_path, ranks=1)
    what = contents(7)
    save(store, "e", what)
    with pytest.raises(UnusableEntry, match="computed with weights 'v1', expected 'v2'"):
        store.lookup("e", "v2", 4)
    with pytest.raises(UnusableEntry, match="blocks of the KV entry have 4 tokens, expected 8"):
        store.lookup("e", "v1", 8)
    with pytest.raises(UnusableEntry, match=r"has the file 0-of-1\.kv, expected only files named RANK-of-2\.kv"):
        KvEntryStore(tmp_path, ranks=2).lookup("e", "v1", 4)
    with pytest.raises(UnusableEntry, match="was replaced"):
        load(store, "e", contents(6), range(1))
    with pytest.raises(UnusableEntry, match="saved 'second', own 'packed'"):
        store.read("e", 0, what.identity, KvBlockLayout(("first", "packed"), (6, 10)), range(1), [])
    with pytest.raises(UnusableEntry, match="the KV entry has 2 blocks, but 3 were requested"):
        load(store, "e", what, range(3))


def test_entry_is_complete_when_all_ranks_have_written(tmp_path: Path) -> None:
    store = KvEntryStore(tmp_path, ranks=2)
    what = contents(7, ranks=2)
    assert store.lookup("e", "v1", 4) is None
    save(store, "e", what, rank=0, seed=1)
    assert store.lookup("e", "v1", 4) is None
    second = save(store, "e", what, rank=1, seed=2)
    assert store.lookup("e", "v1", 4) == what
    assert load(store, "e", what, range(2), rank=1) == second
    save(store, "e", contents(8, ranks=2), rank=1)
    with pytest.raises(UnusableEntry, match="ranks 0 and 1 are from different KV entries"):
        store.lookup("e", "v1", 4)


def test_file_is_written_atomically(tmp_path: Path) -> None:
    store = KvEntryStore(tmp_path, ranks=1)

    def broken() -> Iterator[list[memoryview]]:
        yield [memoryview(b"123456")] * 2
        assert not store.file("e", 0).exists()
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        store.write("e", 0, contents(7), LAYOUT, broken())
    with pytest.raises(ValueError, match="a layer must have 2 blocks, got 1"):
        store.write("e", 0, contents(7), LAYOUT, [[memoryview(b"123456")]] * 2)
    assert os.listdir(store.root / "e") == []


def test_discard_deletes_one_rank_or_all_but_no_foreign_files(tmp_path: Path) -> None:
    store = KvEntryStore(tmp_path, ranks=2)
    for rank in (0, 1):
        save(store, "e", contents(3, ranks=2), rank=rank)
    store.discard("e", 0)
    assert store.file("e", 1).exists()
    store.discard("e", 1)
    assert not (store.root / "e").exists()
    store.discard("e", 1)
    store.discard("e")
    save(store, "f", contents(3, ranks=2))
    (store.root / "f" / "notes.txt").write_text("mine")
    store.discard("f")
    assert os.listdir(store.root / "f") == ["notes.txt"]


def test_sweep_keeps_young_entries_within_the_limit(tmp_path: Path) -> None:
    store = KvEntryStore(tmp_path, ranks=1)
    assert store.sweep(0.0, 60.0, 1000) == 0
    now_s = 1_000_000.0
    for entry, age_s in (("old", 61.0), ("middle", 50.0), ("young", 1.0)):
        save(store, entry, contents(7))
        for path in (store.file(entry, 0), store.root / entry):
            os.utime(path, (now_s - age_s, now_s - age_s))
    (tmp_path / "other").mkdir()
    os.utime(tmp_path / "other", (0, 0))
    (store.root / ".hidden").mkdir()
    size = store.file("young", 0).stat().st_size
    assert store.sweep(now_s, 60.0, 2 * size) == 2 * size
    assert sorted(os.listdir(store.root)) == [".hidden", "middle", "young"]
    assert store.sweep(now_s, 60.0, 2 * size - 1) == size
    assert sorted(os.listdir(store.root)) == [".hidden", "young"]
    assert sorted(os.listdir(tmp_path)) == [FOLDER, "other"]


def test_evictor_deletes_discarded_and_old_entries(tmp_path: Path) -> None:
    store = KvEntryStore(tmp_path, ranks=1)
    save(store, "old", contents(7))
    for path in (store.file("old", 0), store.root / "old"):
        os.utime(path, (0, 0))
    save(store, "told", contents(7))
    before = threading.active_count()
    keeper = KvEvictor(store, max_age_s=1e6, max_bytes=1000)
    keeper.start()
    keeper.discard("told")
    deadline_s = time.monotonic() + DEADLINE_S
    while os.listdir(store.root) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert os.listdir(store.root) == []
    keeper.stop()
    while threading.active_count() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_reserve_fails_when_the_limit_is_reached(tmp_path: Path) -> None:
    keeper = KvEvictor(KvEntryStore(tmp_path, ranks=1), max_age_s=60.0, max_bytes=1000)
    assert keeper.reserve(600)
    assert not keeper.reserve(401)
    assert keeper.reserve(400)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".a", "-a", "a\n", "ä", "a" * 129])
def test_entry_id_cannot_escape_the_folder(name: str) -> None:
    assert not is_entry_id(name)


def test_entry_ids_are_plain_names() -> None:
    assert all(is_entry_id(name) for name in ("a", "7", "req-1~2.kv_x", "a" * 128))
