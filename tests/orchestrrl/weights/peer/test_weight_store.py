"""The folder of a peer: received bytes are recognized only by checksums, and inconsistent maps are refused."""

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_versions import BLOCK, HALVES, SHARDS, Contents

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import Permanent, ProblemFaults, Retryable
from orchestrrl.integrations.instrument.checkpoint_files import folder_sum
from orchestrrl.weights.model import MODEL_FILE, ShardMap, StagedPart
from orchestrrl.weights.orders import OpenVersion, OrderOutcome, PeerOrder
from orchestrrl.weights.peer import disk_space
from orchestrrl.weights.peer.carry import ThreadedCarrier
from orchestrrl.weights.peer.engines import PeerEngines
from orchestrrl.weights.peer.peer import PeerOrders
from orchestrrl.weights.peer.staged import StagedVersion
from orchestrrl.weights.peer.store import VersionStore
from orchestrrl.weights.staging_hold import StagingHold, nobody_stages
from planner.model import PeerId


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VersionStore]:
    store = VersionStore(tmp_path / "weights")
    yield store
    store.close()


def bring(staged: StagedVersion, shard: ShardMap, data: bytes, offset: int = 0, size: int | None = None) -> None:
    """Write a range as a receiver does: directly if it is contiguous in the file."""
    size = len(data) - offset if size is None else size
    piece = memoryview(data)[offset : offset + size]
    view = staged.view(shard.id, offset, size)
    if view is not None:
        view[:] = piece
    else:
        staged.write(shard.id, offset, piece)
    staged.arrived(shard.id, offset, size)


def bring_all(staged: StagedVersion, contents: Contents) -> None:
    for shard in staged.map.shards:
        bring(staged, shard, contents.wire(shard))


def test_received_version_is_the_checkpoint(store: VersionStore) -> None:
    contents = Contents(1)
    staged = store.open(OpenVersion(contents.map(7)))
    assert staged.missing() == {shard.id: ((0, shard.bytes),) for shard in staged.map.shards}
    with pytest.raises(Retryable, match="is incomplete"):
        staged.install_folder()
    bring_all(staged, contents)
    assert staged.missing() == {}
    staged.check()
    assert staged.hashed_bytes == 0  # each block was hashed on arrival
    assert (staged.install_folder() / MODEL_FILE).read_bytes() == contents.model_file()
    assert [(held.version, held.complete, held.staged_by) for held in store.held] == [(7, True, ())]


def test_content_sum_is_valid_until_bytes_change(store: VersionStore) -> None:
    contents, other = Contents(1), Contents(2)
    staged = store.open(OpenVersion(contents.map(7)))
    staged.take_content_sum()
    assert staged.content_sum() == ""
    bring_all(staged, contents)
    staged.take_content_sum()
    known = staged.content_sum()
    assert known == folder_sum(staged.install_folder())
    shard = staged.map.shards[0]
    bring(staged, shard, contents.wire(shard))
    assert staged.content_sum() == known
    bring(staged, shard, other.wire(shard))
    assert staged.content_sum() == ""
    staged.take_content_sum()
    assert staged.content_sum() == "", "a block is missing"
    bring(staged, shard, contents.wire(shard))
    staged.take_content_sum()
    assert staged.content_sum() == known


def test_version_without_checksums_has_no_content_sum(store: VersionStore) -> None:
    contents = Contents(1)
    staged = store.open(OpenVersion(contents.map(7, with_sums=False)))
    bring_all(staged, contents)
    staged.take_content_sum()
    assert staged.content_sum() == ""
    staged.update_sums(contents.map(7))
    staged.take_content_sum()
    assert staged.content_sum() == folder_sum(staged.install_folder())


@given(st.data())
def test_ranges_may_arrive_in_any_order_and_repeatedly(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Includes corrupted bytes, whose blocks are missing until they arrive again."""
    contents = Contents(2)
    store = VersionStore(tmp_path_factory.mktemp("any") / "weights")
    staged = store.open(OpenVersion(contents.map(1)))
    shard = data.draw(st.sampled_from(staged.map.shards))
    wire = contents.wire(shard)
    there = np.zeros(len(wire), dtype=bool)
    for _ in range(data.draw(st.integers(1, 8))):
        offset = data.draw(st.integers(0, len(wire) - 1))
        size = data.draw(st.integers(1, len(wire) - offset))
        bring(staged, shard, wire, offset, size)
        there[offset : offset + size] = True
        assert staged.wait(shard.id, offset, size, 0)
    told = np.ones(len(wire), dtype=bool)
    for first, length in staged.missing().get(shard.id, ()):
        told[first : first + length] = False
    assert (told == there).all()
    spoilt = data.draw(st.integers(0, len(wire) - 1))
    block = spoilt // BLOCK * BLOCK
    wrong = bytearray(wire)
    wrong[spoilt] ^= 1
    bring(staged, shard, bytes(wrong), block, min(BLOCK, len(wire) - block))
    assert not staged.wait(shard.id, spoilt, 1, 0)
    bring(staged, shard, wire, block, min(BLOCK, len(wire) - block))
    assert staged.wait(shard.id, block, min(BLOCK, len(wire) - block), 0)
    bring_all(staged, contents)
    assert staged.missing() == {}
    assert (staged.folder / MODEL_FILE).read_bytes() == contents.model_file()
    store.close()


def test_waiting_reader_continues_when_bytes_arrive(store: VersionStore) -> None:
    contents = Contents(3)
    staged = store.open(OpenVersion(contents.map(1)))
    shard = staged.map.shards[0]
    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(staged.wait(shard.id, 0, 100, 60.0)))
    waiter.start()
    bring(staged, shard, contents.wire(shard), 0, 99)
    assert not seen
    bring(staged, shard, contents.wire(shard), 99, 1)
    waiter.join(60)
    assert seen == [True]
    assert not staged.wait(shard.id, 0, shard.bytes, 0.0)


@pytest.mark.parametrize("interrupted_after", range(5))
def test_restart_keeps_exactly_the_verified_blocks(tmp_path: Path, interrupted_after: int) -> None:
    contents = Contents(4)
    store = VersionStore(tmp_path)
    staged = store.open(OpenVersion(contents.map(3)))
    for shard in staged.map.shards[:interrupted_after]:
        bring(staged, shard, contents.wire(shard))
    for shard in staged.map.shards[interrupted_after : interrupted_after + 1]:
        bring(staged, shard, contents.wire(shard), 0, BLOCK + 10)  # the second block is incomplete
    store.close()

    store = VersionStore(tmp_path)
    (held,) = store.held
    expected = {shard.id: ((0, shard.bytes),) for shard in staged.map.shards[interrupted_after:]}
    for shard in staged.map.shards[interrupted_after : interrupted_after + 1]:
        expected[shard.id] = ((BLOCK, shard.bytes - BLOCK),)
    assert held.missing == expected
    bring_all(store.version(3), contents)
    assert (store.version(3).install_folder() / MODEL_FILE).read_bytes() == contents.model_file()
    store.close()


def test_block_damaged_on_disk_is_missing_after_a_restart(tmp_path: Path) -> None:
    contents = Contents(5)
    store = VersionStore(tmp_path)
    bring_all(store.open(OpenVersion(contents.map(3))), contents)
    store.close()
    file = tmp_path / "v3" / MODEL_FILE
    image = bytearray(file.read_bytes())
    image[-1] ^= 0x40  # a byte of `scale`, the last tensor
    file.write_bytes(image)

    store = VersionStore(tmp_path)
    (held,) = store.held
    rest = next(shard for shard in store.version(3).map.shards if shard.id == "rest")
    last = (rest.bytes - 1) // BLOCK * BLOCK
    assert held.missing == {"rest": ((last, rest.bytes - last),)}
    store.close()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a folder in memory")
def test_verification_does_not_fill_holes() -> None:
    folder = Path("/dev/shm") / f"orchestrrl-test-{os.getpid()}"
    try:
        contents = Contents(6)
        store = VersionStore(folder)
        staged = store.open(OpenVersion(contents.map(3, shards=["columns"])))
        bring(staged, staged.map.shards[0], contents.wire(staged.map.shards[0]))
        before = disk_space.allocated_bytes(folder / "v3" / MODEL_FILE)
        store.close()
        store = VersionStore(folder)
        assert store.version(3).missing() == {}
        assert store.version(3).hashed_bytes == staged.map.shards[0].bytes
        assert disk_space.allocated_bytes(folder / "v3" / MODEL_FILE) == before
        store.keep([])
        store.close()
    finally:
        for left in folder.iterdir():
            left.unlink()
        folder.rmdir()


def test_staged_parts_are_hashed_sent_and_copied_for_engines(store: VersionStore) -> None:
    contents = Contents(7)
    parts = [contents.stage(store.folder_of(9), rank, boxes) for rank, boxes in enumerate(HALVES)]
    staged = store.open(OpenVersion(contents.map(9, with_sums=False), tuple(parts), tuple(SHARDS)))
    assert staged.missing() == {}
    assert staged.sums_of(SHARDS) == {shard.id: shard.sums for shard in contents.map(9).shards}
    all_bytes = sum(shard.bytes for shard in staged.map.shards)
    assert staged.hashed_bytes == all_bytes
    assert store.open(OpenVersion(contents.map(9), tuple(parts), tuple(SHARDS))) is staged  # with checksums
    assert staged.map == contents.map(9)
    staged.check()
    assert staged.hashed_bytes == all_bytes  # computed by this host
    assert staged.missing() == {}
    folder = staged.install_folder()
    assert [file.name for file in folder.iterdir()] == [MODEL_FILE]  # engines load every file of the folder
    assert (folder / MODEL_FILE).read_bytes() == contents.model_file()
    assert store.held[0].staged_by == (0, 1)


def test_part_with_a_wrong_checksum_is_received_from_peers(tmp_path: Path) -> None:
    contents = Contents(8)
    store = VersionStore(tmp_path)
    parts = [contents.stage(store.folder_of(9), rank, boxes) for rank, boxes in enumerate(HALVES)]
    staged = store.open(OpenVersion(contents.map(9), tuple(parts)))
    file = store.folder_of(9) / parts[0].file
    image = bytearray(file.read_bytes())
    image[-105] ^= 1  # this rank's last byte of the matrix's last row; `scale` follows it
    with file.open("r+b") as opened:
        opened.write(image)
    staged.check()
    ((name, ((offset, size),)),) = staged.missing().items()
    assert name == "rest"
    shard = next(shard for shard in staged.map.shards if shard.id == name)
    bring(staged, shard, contents.wire(shard), offset, size)
    assert staged.missing() == {}
    found = bytearray(shard.bytes)
    staged.read(name, 0, memoryview(found))
    assert bytes(found) == contents.wire(shard)
    store.close()


def test_incompletely_staged_shard_is_received(store: VersionStore) -> None:
    contents = Contents(9)
    parts = [contents.stage(store.folder_of(9), 0, HALVES[0]), StagedPart(7, {})]
    staged = store.open(OpenVersion(contents.map(9), tuple(parts), ("columns",)))
    assert sorted(staged.missing()) == ["rest", "rows", "tail"]
    for shard in staged.map.shards:
        if shard.id != "columns":
            bring(staged, shard, contents.wire(shard))
    assert (staged.install_folder() / MODEL_FILE).read_bytes() == contents.model_file()
    with pytest.raises(ProblemFaults):
        store.open(OpenVersion(contents.map(9), (parts[0], parts[0])))


def test_part_staged_again_is_read_again(store: VersionStore) -> None:
    first, second = Contents(10), Contents(11)
    parts = [first.stage(store.folder_of(2), rank, boxes) for rank, boxes in enumerate(HALVES)]
    before = store.open(OpenVersion(first.map(2, with_sums=False), tuple(parts)))
    parts = [second.stage(store.folder_of(2), rank, boxes) for rank, boxes in enumerate(HALVES)]
    staged = store.open(OpenVersion(second.map(2, with_sums=False), tuple(parts)))
    assert staged is not before
    assert staged.sums_of(SHARDS) == {shard.id: shard.sums for shard in second.map(2).shards}


def test_new_checksums_make_stored_bytes_missing(store: VersionStore) -> None:
    first, second = Contents(12), Contents(13)
    staged = store.open(OpenVersion(first.map(2)))
    bring_all(staged, first)
    assert store.open(OpenVersion(second.map(2))) is staged
    assert staged.missing() == {shard.id: ((0, shard.bytes),) for shard in staged.map.shards}
    bring_all(staged, second)
    assert (staged.install_folder() / MODEL_FILE).read_bytes() == second.model_file()


def test_shards_with_other_cuts_reuse_stored_bytes(store: VersionStore) -> None:
    contents = Contents(14)
    staged = store.open(OpenVersion(contents.map(2, shards=["rows", "tail"])))
    bring_all(staged, contents)
    again = store.open(OpenVersion(contents.map(2, shards=["columns", "tail"])))
    assert sorted(again.missing()) == ["columns"]


def test_version_with_other_tensors_is_replaced_with_a_warning(
    store: VersionStore, caplog: pytest.LogCaptureFixture
) -> None:
    contents = Contents(15)
    bring_all(store.open(OpenVersion(contents.map(2))), contents)
    fewer = Contents(15, contents.tensors[:1])
    staged = store.open(OpenVersion(fewer.map(2, shards=["tail"])))
    assert "it has other tensors" in caplog.text
    bring_all(staged, fewer)
    assert (staged.folder / MODEL_FILE).stat().st_size < len(contents.model_file())


def test_keep_discards_other_versions_but_not_foreign_files(store: VersionStore) -> None:
    contents = Contents(16)
    for version in (1, 2, 3):
        store.open(OpenVersion(contents.map(version)))
    (store.folder_of(1) / "notes.txt").write_text("mine")
    contents.stage(store.folder_of(0), 0, HALVES[0])  # never opened
    contents.stage(store.folder_of(5), 0, HALVES[0])  # a trainer is staging it
    (store.folder / "vacation").mkdir()
    assert store.keep([3]) == [0, 1, 2]
    assert store.keep([3]) == [1]  # the foreign file keeps its folder
    assert sorted(entry.name for entry in store.folder.iterdir()) == [
        "LOCK", "v1", "v3", "v5", "vacation",
    ]  # fmt: skip
    assert [entry.name for entry in store.folder_of(1).iterdir()] == ["notes.txt"]
    assert sorted(store.versions) == [3]
    store.close()
    again = VersionStore(store.folder)
    assert sorted(again.versions) == [3]
    store._locked = again._locked  # the fixture closes it


def test_parts_being_staged_are_kept_even_of_a_lower_version(store: VersionStore) -> None:
    """A trainer that returns to an older checkpoint does this."""
    contents = Contents(16)
    store.open(OpenVersion(contents.map(7)))
    hold = StagingHold(store.folder_of(3))
    part = contents.stage(store.folder_of(3), 0, HALVES[0])
    assert store.keep([7]) == []
    assert (store.folder_of(3) / part.file).exists()
    hold.let_go()
    hold.let_go()
    assert store.keep([7]) == [3]
    assert not store.folder_of(3).exists()


def test_discarding_a_version_keeps_parts_being_staged(store: VersionStore) -> None:
    contents = Contents(16)
    part = contents.stage(store.folder_of(3), 0, HALVES[0])
    bring_all(store.open(OpenVersion(contents.map(3))), contents)
    with nobody_stages(store.folder_of(3)) as is_left:
        assert is_left
    hold = StagingHold(store.folder_of(3))
    assert store.keep([7]) == [3]
    assert [entry.name for entry in store.folder_of(3).iterdir()] == [part.file]
    assert sorted(store.versions) == []
    hold.let_go()


def test_folder_is_either_held_or_discarded(store: VersionStore) -> None:
    """Ranks start and finish staging while the peer discards everything that it may."""
    over = threading.Event()

    def discard() -> None:
        while not over.is_set():
            store.keep([7])

    peer = threading.Thread(target=discard)
    peer.start()
    try:
        for number in range(300):
            hold = StagingHold(store.folder_of(3))
            part = store.folder_of(3) / f"part-{number % 3}.safetensors"
            part.write_bytes(b"x")
            assert part.read_bytes() == b"x"
            hold.let_go()
    finally:
        over.set()
        peer.join()


def test_second_peer_cannot_use_the_folder(store: VersionStore) -> None:
    with pytest.raises(Permanent, match=rf"is in use by the peer with process id {os.getpid()}; stop that peer, or"):
        VersionStore(store.folder)


def test_folder_must_not_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(Permanent, match="is a symbolic link or belongs to another user"):
        VersionStore(tmp_path / "link")


def test_version_without_space_is_refused_before_writing(store: VersionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = Contents(17)
    bring_all(store.open(OpenVersion(contents.map(1))), contents)
    held = disk_space.allocated_bytes(store.folder_of(1) / MODEL_FILE)
    monkeypatch.setattr(disk_space, "free_bytes", lambda _: 4096)
    with pytest.raises(Retryable, match="it will fit after they are discarded"):
        store.open(OpenVersion(contents.map(2)))
    assert held > 0
    assert not list(store.folder_of(2).iterdir())
    store.keep([])
    with pytest.raises(Permanent, match=r"not enough space for version 2 .* other versions use 0"):
        store.open(OpenVersion(contents.map(2)))


def test_inconsistent_map_is_refused_with_all_faults(store: VersionStore) -> None:
    good = Contents(18).map(1)
    first, second, *rest = good.shards
    shards = (replace(first, bytes=7), replace(second, sums=("0",)), *rest, rest[0])
    with pytest.raises(ProblemFaults) as told:
        store.open(OpenVersion(replace(good, shards=shards, block_bytes=1 << 40)))
    assert len(told.value.faults) >= 4
    assert not store.folder_of(1).exists()
    staged = store.open(OpenVersion(good))
    for shard, offset, size in (("nobody", 0, 1), ("rows", -1, 2), ("rows", 0, 1 << 40)):
        with pytest.raises(Permanent):
            staged.view(shard, offset, size)
    with pytest.raises(Permanent, match="there is no shard 'x'"):
        staged.sums_of(["x"])
    with pytest.raises(Permanent, match="incomplete shards: rows"):
        staged.sums_of(["rows"])


def test_stored_bytes_are_recognized_when_checksums_arrive_later(store: VersionStore) -> None:
    """A version is opened without checksums if the peer is to compute those of staged parts."""
    contents = Contents(19)
    bring_all(store.open(OpenVersion(contents.map(2, shards=["rows", "tail", "rest"]))), contents)
    staged = store.open(OpenVersion(contents.map(2, with_sums=False, shards=["rows", "rest"])))
    assert sorted(staged.missing()) == ["rest", "rows"]
    assert store.open(OpenVersion(contents.map(2, shards=["rows", "rest"]))) is staged
    assert staged.missing() == {}


def test_discarded_version_frees_its_memory_at_once(store: VersionStore) -> None:
    """A removed file on a tmpfs uses space as long as it is mapped."""
    contents = Contents(20)
    parts = [contents.stage(store.folder_of(1), rank, boxes) for rank, boxes in enumerate(HALVES)]
    gc.collect()
    gc.disable()
    try:
        staged = store.open(OpenVersion(contents.map(1), tuple(parts), tuple(SHARDS)))
        staged.check()
        staged.install_folder()
        file = str(store.folder_of(1))
        assert file in Path("/proc/self/maps").read_text()
        del staged
        store.keep([])
        assert file not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


class Ends(ThreadedCarrier):
    """A fake carrier that records the shards open when its edges are ended."""

    def __init__(self, store: VersionStore) -> None:
        super().__init__(PeerId("here"), {}, lambda _: None)
        self.store = store
        self.open: list[list[str]] = []

    def end(self, version: int, edges: Sequence[str] = ()) -> None:
        self.open.append([shard.id for shard in self.store.version(version).map.shards])


async def test_edges_of_an_earlier_plan_end_before_its_file_is_verified(store: VersionStore) -> None:
    """They write to the file in which the next plan verifies blocks."""
    contents = Contents(21)
    ends = Ends(store)
    orders = PeerOrders(store, ends, PeerEngines({}, "simulated", WallClock(), lambda: None))
    for number, shards in enumerate((["rows", "tail"], ["rows", "tail"], ["rest", "tail"])):
        opened = await orders.perform(PeerOrder(f"{number}", 1, OpenVersion(contents.map(2, shards=shards))))
        assert opened.outcome is OrderOutcome.DONE
    assert ends.open == [["rows", "tail"]]
