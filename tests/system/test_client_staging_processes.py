"""A rank's staged file is complete or absent if its trainer is killed."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from orchestrrl.weights.trainer.staging import ArrayCopies, stage
from tests.orchestrrl.weights.trainer.test_client_staging import piece


def test_trainer_killed_during_staging_leaves_no_valid_version(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
import numpy as np
from orchestrrl.weights.trainer.boxes import TensorPiece
from orchestrrl.weights.trainer.staging import ArrayCopies, stage
from orchestrrl.weights.model import ShardMap, TensorMeta, VersionMap
from orchestrrl.weights.peer.store import VersionStore

class Hangs(ArrayCopies):
    def copy(self, piece, into):
        super().copy(piece, into)
        print("copied", flush=True)
        time.sleep(3600)

meta = TensorMeta("w", "F64", (3,))
stage(Path({str(tmp_path)!r}), 1, 0, 1, [TensorPiece(meta, meta.whole, np.zeros(3))], Hangs())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"copied\n"
        trainer.kill()
    (left,) = os.listdir(tmp_path / "v1")
    assert left.startswith(".part-0.safetensors.")
    stage(tmp_path, 1, 0, 1, [piece("w", np.ones(3))], ArrayCopies())
    assert os.listdir(tmp_path / "v1") == ["part-0.safetensors"]
