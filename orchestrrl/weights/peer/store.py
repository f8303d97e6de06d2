"""Manage the folder of one peer: a subfolder per version, a lock against other peers, and state that outlives the peer.

    LOCK                        locked while a peer uses the folder
    peer.json                   state that outlives the peer
    v7/state.json               description of the version, written before any of its bytes arrives
    v7/model.safetensors        received; engines install from it
    v7/part-RANK.safetensors    staged by a trainer's rank of this host

The peer does not change other files in the folder.
"""

import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults
from orchestrrl.weights.layout import faults_of_shard
from orchestrrl.weights.model import MODEL_FILE, MOST_BLOCK_BYTES, MOST_BYTES, MOST_VERSION, HeldVersion, VersionMap
from orchestrrl.weights.orders import OpenVersion
from orchestrrl.weights.peer.staged import INSTALL_FOLDER, StagedVersion
from orchestrrl.weights.staging_hold import nobody_stages
from planner.model import EngineId

logger = logging.getLogger(__name__)

_Content = TypeVar("_Content")

STATE_FILE = "state.json"
PEER_FILE = "peer.json"
LOCK_FILE = "LOCK"


@dataclass(frozen=True, slots=True, kw_only=True)
class _State(OpenVersion):
    schema: Literal[1]


@dataclass(frozen=True, slots=True)
class RememberedPeer:
    """The state that a peer keeps across restarts, in addition to its versions.

    `installed` maps each engine to the `StagedVersion.identity` of the version last installed into it. `serving` maps
    each engine in the daemon's last assignment to its URL.
    """

    installed: dict[EngineId, str] = field(default_factory=dict)
    serving: dict[EngineId, str] = field(default_factory=dict)


_STATE: TypeAdapter[_State] = TypeAdapter(_State)
_PEER_STATE: TypeAdapter[RememberedPeer] = TypeAdapter(RememberedPeer)


class VersionStore:
    """The versions in a peer's folder. The constructor raises Permanent if the folder cannot be used or another peer
    uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions: dict[int, StagedVersion] = {}
        self._changing = threading.Lock()
        self._locked = _lock(folder)
        self.state = _read(folder / PEER_FILE, _PEER_STATE) or RememberedPeer()
        for version in self._on_disk():
            self._find(version)

    def open(self, order: OpenVersion) -> StagedVersion:
        """Open a version with its stored bytes. A version that is already open stays open if nothing but its checksums
        has changed. Otherwise it is opened again from its files. Raises ProblemFaults if the map is inconsistent,
        Retryable if the version will fit after other versions are discarded, and Permanent if the version cannot be
        stored."""
        if faults := _faults(order):
            raise ProblemFaults(faults)
        with self._changing:
            staged = self.versions.get(order.map.version)
            if staged is not None and staged.is_same(order):
                staged.update_sums(order.map)
            else:
                folder = self.folder_of(order.map.version)
                self._replace_others(folder, order.map)
                folder.mkdir(mode=0o700, exist_ok=True)
                staged = StagedVersion(folder, order)
            state = _State(staged.map, staged.parts, staged.at_home, schema=1)
            _write(staged.folder / STATE_FILE, _STATE.dump_json(state))
            self.versions[order.map.version] = staged
            return staged

    def version(self, version: int) -> StagedVersion:
        """Return an open version. Raises Permanent if this peer does not store it."""
        try:
            return self.versions[version]
        except KeyError:
            known = ", ".join(str(each) for each in sorted(self.versions)) or "none"
            raise Permanent(f"version {version} is not stored on this peer; its versions are {known}") from None

    def keep(self, versions: Collection[int]) -> list[int]:
        """Discard all stored versions except `versions`. Also discard parts that were staged for a version that is
        older than the newest of `versions` and was never opened. Parts on which a trainer still holds a lock are kept.
        Return the discarded versions."""
        with self._changing:
            newest = max(versions, default=-1)
            discarded = []
            for version in self._on_disk():
                if version not in versions and self._discarded(version, newest):
                    discarded.append(version)
            return discarded

    def _discarded(self, version: int, newest: int) -> bool:
        with nobody_stages(self.folder_of(version)) as is_left:
            is_ours = self.versions.pop(version, None) is not None
            if not is_ours and (version > newest or not is_left):
                return False
            _discard(self.folder_of(version), with_parts=is_left)
            return True

    @property
    def held(self) -> tuple[HeldVersion, ...]:
        return tuple(staged.held for _, staged in sorted(self.versions.copy().items()))

    def folder_of(self, version: int) -> Path:
        return self.folder / f"v{version}"

    def note_installed(self, engine: EngineId, identity: str) -> None:
        """Store persistently which version was installed into an engine. An empty identity means that the version is
        unknown."""
        with self._changing:
            self._note(replace(self.state, installed={**self.state.installed, engine: identity}))

    def note_serving(self, engines: Mapping[EngineId, str]) -> None:
        with self._changing:
            self._note(replace(self.state, serving=dict(engines)))

    def _note(self, state: RememberedPeer) -> None:
        _write(self.folder / PEER_FILE, _PEER_STATE.dump_json(state))
        self.state = state

    def close(self) -> None:
        """Release the folder for another peer. The stored versions remain in the folder."""
        self.versions.clear()
        os.close(self._locked)

    def _on_disk(self) -> list[int]:
        found = []
        for entry in self.folder.iterdir():
            number = entry.name.removeprefix("v")
            is_version = entry.name.startswith("v") and number.isdecimal() and str(int(number)) == number
            if is_version and entry.is_dir() and not entry.is_symlink():
                found.append(int(number))
        return sorted(found)

    def _find(self, version: int) -> None:
        """Open a version that an earlier run has left in the folder. Blocks with wrong checksums are marked as
        missing."""
        folder = self.folder_of(version)
        state = _read(folder / STATE_FILE, _STATE)
        if state is None or state.map.version != version:
            return  # parts of an unopened version, or another schema: `open` handles it
        if faults := _faults(state):
            logger.warning("%s: ignored, because it is inconsistent: %s", folder / STATE_FILE, "; ".join(faults))
            return
        try:
            staged = self.versions[version] = StagedVersion(folder, state)
        except OrchestrRLError as error:
            logger.warning("version %d: its files in %s cannot be used: %s", version, folder, error)
            return
        lacking = sum(size for ranges in staged.missing().values() for _, size in ranges)
        level = logging.WARNING if lacking else logging.INFO
        hashed = staged.hashed_bytes
        logger.log(level, "version %d: found in %s, %d bytes hashed, %d missing", version, folder, hashed, lacking)

    def _replace_others(self, folder: Path, map: VersionMap) -> None:
        """Discard the received file in the folder if it belongs to another version with the same number. Parts are
        kept, because trainers replace them."""
        if not (folder / STATE_FILE).exists():
            return
        state = _read(folder / STATE_FILE, _STATE)
        if state is not None and (state.map.tensors, state.map.block_bytes) == (map.tensors, map.block_bytes):
            return
        logger.warning("%s: replaced, because it has other tensors or an older schema", folder)
        _discard(folder, with_parts=False)


def _faults(order: OpenVersion) -> list[str]:
    """Return all faults of an order to open a version."""
    map, parts = order.map, order.parts
    tensors = {tensor.name: tensor for tensor in map.tensors}
    faults = []
    if map.version > MOST_VERSION:
        faults.append(f"version: must be at most {MOST_VERSION}, got {map.version}")
    if map.block_bytes > MOST_BLOCK_BYTES:
        faults.append(f"block_bytes: must be at most {MOST_BLOCK_BYTES}, got {map.block_bytes}")
    if map.bytes > MOST_BYTES:
        faults.append(f"tensors: must have at most {MOST_BYTES} bytes, got {map.bytes}")
    if not map.shards:
        faults.append("shards: must not be empty, got ()")
    ids = [shard.id for shard in map.shards]
    if twice := sorted({each for each in ids if ids.count(each) > 1}) if len(set(ids)) < len(ids) else []:
        faults.append(f"shards: must have unique ids, got several of {', '.join(twice)}")
    for shard in map.shards:
        faults += faults_of_shard(shard, tensors, map.block_bytes)
    if len({part.rank for part in parts}) < len(parts) or any(part.rank < 0 for part in parts):
        faults.append(f"parts: must have unique ranks >= 0, got {[part.rank for part in parts]}")
    for part in parts:
        for name, boxes in part.boxes.items():
            if name not in tensors:
                continue  # no shard of this peer uses it
            faults += [
                f"parts[{part.rank}].boxes.{name}: must be within {tensors[name].shape}, got {box}"
                for box in boxes
                if not tensors[name].has(box)
            ]
    return faults


def _lock(folder: Path) -> int:
    """Lock the folder until `close` or the end of the process; return the descriptor of the lock. Raises Permanent if
    the folder cannot be used or another peer uses it. Also raises Permanent if the folder is a link or belongs to
    another user, which is possible in a world-writable parent folder."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise Permanent(f"{folder} is a symbolic link or belongs to another user; set --folder to one that you own")
        file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Permanent(f"cannot use folder {folder}: {error}; choose another folder with --folder") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(file, 20, 0).decode(errors="replace").strip() or "?"
        os.close(file)
        raise Permanent(
            f"{folder} is in use by the peer with process id {owner}; stop that peer, or set --folder to another folder"
        ) from error
    os.ftruncate(file, 0)
    os.pwrite(file, str(os.getpid()).encode(), 0)
    return file


def _read(path: Path, content: TypeAdapter[_Content]) -> _Content | None:
    """Parse a file; return None if the file does not exist or this release cannot parse it."""
    try:
        return content.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _write(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _discard(folder: Path, *, with_parts: bool = True) -> None:
    """Delete the peer's files in a version's folder. If `with_parts` is set, also delete the staged parts, and the
    folder if it is then empty."""
    ours = [MODEL_FILE, STATE_FILE, f".{STATE_FILE}.*"]
    if with_parts:
        ours += ["part-*.safetensors", ".part-*.safetensors.*"]
    for pattern in ours:
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)
    shutil.rmtree(folder / INSTALL_FOLDER, ignore_errors=True)
    if with_parts:
        with suppress(OSError):
            folder.rmdir()
