"""`orchestrrl sync publish`: publish a checkpoint on disk, single or sharded; and weights in `orchestrrl status`."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from orchestrrl.cli.fleet.status import weights_summary
from orchestrrl.cli.main import application
from orchestrrl.core.errors import Permanent
from orchestrrl.rpc.codecs.weights import STATUS
from orchestrrl.rpc.plain_values import plain
from orchestrrl.weights.controller.reports import (
    EngineStatus,
    EngineSync,
    PhaseTime,
    SyncPhase,
    SyncReport,
    SyncState,
    WeightsStatus,
)
from orchestrrl.weights.layout import lay_out
from orchestrrl.weights.model import TensorMeta
from orchestrrl.weights.trainer.staging import checkpoint_pieces
from planner.model import EngineId
from tests.orchestrrl.weights.publishing_daemon import Daemon, serving

CARRYING = SyncReport("sync-5", 5, SyncState.CARRYING, 1.0, phases=(PhaseTime(SyncPhase.PHASE_B, 1.0),))
DONE = replace(
    CARRYING, state=SyncState.DONE, code="done", ended_s=2.0, phases=(PhaseTime(SyncPhase.PHASE_B, 1.0, 2.0),)
)
ABORTED = replace(DONE, state=SyncState.ABORTED, code="corrupt", detail="gen0 got other bytes")
VALUES = {
    "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.weight": np.arange(5, dtype=np.uint16),  # BF16
    "c": np.array(7, dtype=np.int64),
}
DTYPES = {"b.weight": "F32", "a.weight": "BF16", "c": "I64"}


def write_file(path: Path, names: list[str]) -> None:
    layout = lay_out([TensorMeta(name, DTYPES[name], VALUES[name].shape) for name in names])
    path.write_bytes(layout.header + b"".join(VALUES[name].tobytes() for name in sorted(names)))


def checkpoint(folder: Path, *, sharded: bool) -> Path:
    folder.mkdir()
    if not sharded:
        write_file(folder / "model.safetensors", list(VALUES))
        return folder
    files = {"model-00001-of-00002.safetensors": ["b.weight", "a.weight"], "model-00002-of-00002.safetensors": ["c"]}
    for file, names in files.items():
        write_file(folder / file, names)
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


async def run(*words: str) -> Result:
    result = await asyncio.to_thread(CliRunner().invoke, application(), ["sync", "publish", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
def test_checkpoint_pieces_are_the_tensors_of_the_folder(tmp_path: Path, sharded: bool) -> None:
    pieces = checkpoint_pieces(checkpoint(tmp_path / "c", sharded=sharded))
    assert [(piece.meta.name, piece.meta.dtype, piece.meta.shape) for piece in pieces] == [
        ("a.weight", "BF16", (5,)),
        ("b.weight", "F32", (2, 3)),
        ("c", "I64", ()),
    ]
    for piece in pieces:
        assert piece.values.tobytes() == VALUES[piece.meta.name].tobytes()


def test_invalid_checkpoint_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Permanent, match="not a directory"):
        checkpoint_pieces(tmp_path / "none")
    broken = checkpoint(tmp_path / "c", sharded=True)
    (broken / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(Permanent, match="00002"):
        checkpoint_pieces(broken)


async def test_publish_waits_for_the_sync(tmp_path: Path) -> None:
    folder, home = checkpoint(tmp_path / "c", sharded=True), tmp_path / "train0"
    home.mkdir()
    words = (str(folder), "--peer", "train0", "--peer-folder", str(home))
    daemon = Daemon([[CARRYING, DONE], [DONE], [CARRYING, ABORTED]], status=WeightsStatus(4, None))
    daemon.may_end.set()
    async with serving(daemon) as address:
        shown = await run(*words, "--daemon", address)
        as_json = await run(*words, "--policy-version", "9", "--json", "--daemon", address)
        aborted = await run(*words, "--policy-version", "9", "--daemon", address)
    assert shown.exit_code == 0, shown.output
    assert "version 5 (sync-5): done" in shown.stdout
    assert "staging 3 tensors, 42 B" in " ".join(shown.stderr.split())
    assert as_json.exit_code == 0, as_json.output
    assert json.loads(as_json.stdout)["state"] == "done"
    assert aborted.exit_code == 1
    assert "gen0 got other bytes" in aborted.stderr
    first, second, _ = daemon.publications
    assert (first.version, second.version) == (5, 9)  # the default is the fleet's version plus one
    assert first.install == ""  # as configured in the daemon
    assert [tensor.name for tensor in first.tensors] == ["a.weight", "b.weight", "c"]


async def test_publish_returns_when_the_sync_waits_for_the_barrier(tmp_path: Path) -> None:
    home = tmp_path / "train0"
    home.mkdir()
    waits = replace(CARRYING, state=SyncState.PREPARED, phases=(PhaseTime(SyncPhase.NEXT_PAUSE, 1.0),))
    daemon = Daemon([[waits, DONE]])  # the sync would end only when the pause barrier closes
    words = [str(checkpoint(tmp_path / "c", sharded=False)), "--peer", "train0", "--peer-folder", str(home)]
    async with serving(daemon) as address:
        shown = await run(*words, "--policy-version", "5", "--next-pause", "--daemon", address)
        daemon.may_end.set()
    assert shown.exit_code == 0, shown.output
    assert "orchestrrl sync install" in shown.stdout
    assert daemon.publications[0].install == "next_pause"


async def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    result = await run(str(tmp_path / "none"), "--peer", "", "--daemon", "nowhere")
    assert result.exit_code == 2
    for fault in ("--daemon: must be HOST:PORT", "--peer: must be the id of a peer", "FOLDER: "):
        assert fault in result.stderr
    folder = checkpoint(tmp_path / "c", sharded=False)
    result = await run(str(folder), "--peer", "train0", "--peer-folder", str(tmp_path / "missing"))
    assert result.exit_code == 2
    assert "--peer-folder: no peer has the folder" in result.stderr


# --- `orchestrrl status`


def line_of(status: WeightsStatus) -> list[str]:
    shown: dict[str, Any] = plain(STATUS.to_pb(status))
    return weights_summary(shown, 4.0)


def test_status_shows_the_weights() -> None:
    assert weights_summary(None, 4.0) == []
    assert line_of(WeightsStatus(None, None)) == []
    assert line_of(WeightsStatus(5, DONE)) == ["weights: version 5"]
    late = EngineStatus(EngineId("e2"), EngineSync.QUARANTINED, "does not answer")
    (line,) = line_of(WeightsStatus(4, CARRYING, (late,)))
    assert line.startswith("weights: version 4; version 5 is carrying for 3 s; ")
    assert "e2, see `orchestrrl sync status`" in line
