"""Publishing what lies on a disk: a checkpoint's folder, in one file or sharded, as pieces of whole tensors. No torch.

The files stay mapped and are read as they are copied into the folder of the host's peer.
"""

from pathlib import Path

import numpy as np

from orchestrrl.core.errors import Permanent
from orchestrrl.integrations.instrument.checkpoint_files import BrokenCheckpoint, mapped, read_checkpoint
from orchestrrl.weights.model import DTYPE_BYTES, TensorMeta
from orchestrrl.weights.trainer.boxes import TensorPiece


def checkpoint_pieces(folder: Path) -> list[TensorPiece]:
    """Of every tensor, in order of names: for `publish_arrays`. Raises Permanent, with a line for each fault."""
    if not folder.is_dir():
        raise Permanent(f"{folder}: is no folder")
    try:
        stored = read_checkpoint(folder)
    except BrokenCheckpoint as fault:
        raise Permanent(str(fault)) from fault
    faults, metas = [], []
    for each in stored.values():
        try:
            metas.append(TensorMeta(each.name, each.dtype, each.shape))
        except ValueError as fault:
            faults.append(f"{each.file}: {fault}")
    if faults:
        raise Permanent("\n".join(faults))
    data = mapped(stored)
    return [TensorPiece(meta, meta.whole, _values(data[meta.name], meta)) for meta in metas]


def _values(data: memoryview, meta: TensorMeta) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    """As wide as the tensor's elements, whatever they mean: bytes are copied. One that does not begin at a multiple of
    its width is copied here."""
    width = DTYPE_BYTES[meta.dtype]
    plain = np.frombuffer(data, dtype=np.uint8)
    if plain.ctypes.data % width:
        plain = plain.copy()
    return plain.view(f"u{width}").reshape(meta.shape)
