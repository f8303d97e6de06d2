"""The folder of one peer: a folder for each version that it holds, one peer at a time, and what outlives the peer.

    LOCK, peer.json
    v7/state.json               what the version is: written before any byte of it comes
    v7/model.safetensors        received, and installed
    v7/part-RANK.safetensors    staged by a trainer's rank of this host

Whatever else lies there is a stranger's and stays.
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
    """What outlives the peer beside its versions. `installed`: by engine, `StagedVersion.identity` of what it was given
    last; `serving`: engines that the daemon told of last, and where they listen."""

    installed: dict[EngineId, str] = field(default_factory=dict)
    serving: dict[EngineId, str] = field(default_factory=dict)


_STATE: TypeAdapter[_State] = TypeAdapter(_State)
_PEER_STATE: TypeAdapter[RememberedPeer] = TypeAdapter(RememberedPeer)


class VersionStore:
    """Raises Permanent where the folder cannot be had."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions: dict[int, StagedVersion] = {}
        self._changing = threading.Lock()
        self._locked = _lock(folder)
        self.state = _read(folder / PEER_FILE, _PEER_STATE) or RememberedPeer()
        for version in self._on_disk():
            self._find(version)

    def open(self, order: OpenVersion) -> StagedVersion:
        """The version, with what is there of it. An open one goes on where only its sums are new; else it is opened
        anew over what its files hold. Raises ProblemFaults for a map that makes no sense, Permanent and Retryable
        where it cannot be held."""
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
        """Raises Permanent where it is not held."""
        try:
            return self.versions[version]
        except KeyError:
            known = ", ".join(str(each) for each in sorted(self.versions)) or "none"
            raise Permanent(f"version {version} is not held here; held: {known}") from None

    def keep(self, versions: Collection[int]) -> list[int]:
        """Discard the others, and what was staged of older ones that never came to be; which. What trainers stage now
        stays: parts in their hands, be the number lower than the fleet's, and newer ones that nobody has opened."""
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
        """Empty: nobody knows what it has. To be there again after a restart."""
        with self._changing:
            self._note(replace(self.state, installed={**self.state.installed, engine: identity}))

    def note_serving(self, engines: Mapping[EngineId, str]) -> None:
        with self._changing:
            self._note(replace(self.state, serving=dict(engines)))

    def _note(self, state: RememberedPeer) -> None:
        _write(self.folder / PEER_FILE, _PEER_STATE.dump_json(state))
        self.state = state

    def close(self) -> None:
        """Let another peer have the folder. What is held stays there."""
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
        """What an earlier start left: as much of it as agrees with its sums."""
        folder = self.folder_of(version)
        state = _read(folder / STATE_FILE, _STATE)
        if state is None or state.map.version != version:
            return  # what trainers have staged so far, or another schema: until it is opened
        if faults := _faults(state):
            logger.warning("%s: makes no sense and is not used: %s", folder / STATE_FILE, "; ".join(faults))
            return
        try:
            staged = self.versions[version] = StagedVersion(folder, state)
        except OrchestrRLError as error:
            logger.warning("version %d: what is left of it in %s cannot be used: %s", version, folder, error)
            return
        lacking = sum(size for ranges in staged.missing().values() for _, size in ranges)
        level = logging.WARNING if lacking else logging.INFO
        hashed = staged.hashed_bytes
        logger.log(level, "version %d: found in %s, hashed %d bytes; %d lack", version, folder, hashed, lacking)

    def _replace_others(self, folder: Path, map: VersionMap) -> None:
        """What is there of another version of that number makes room. Parts stay: trainers replace these themselves."""
        if not (folder / STATE_FILE).exists():
            return
        state = _read(folder / STATE_FILE, _STATE)
        if state is not None and (state.map.tensors, state.map.block_bytes) == (map.tensors, map.block_bytes):
            return
        logger.warning("%s: is of another manifest or an older schema, and is replaced", folder)
        _discard(folder, with_parts=False)


def _faults(order: OpenVersion) -> list[str]:
    """All that is wrong with an order to hold this."""
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
        faults.append(f"shards: must have ids of their own, twice are {', '.join(twice)}")
    for shard in map.shards:
        faults += faults_of_shard(shard, tensors, map.block_bytes)
    if len({part.rank for part in parts}) < len(parts) or any(part.rank < 0 for part in parts):
        faults.append(f"parts: must be of ranks >= 0, each once, got {[part.rank for part in parts]}")
    for part in parts:
        for name, boxes in part.boxes.items():
            if name not in tensors:
                continue  # of no use to anybody here
            faults += [
                f"parts[{part.rank}].boxes.{name}: must be within {tensors[name].shape}, got {box}"
                for box in boxes
                if not tensors[name].has(box)
            ]
    return faults


def _lock(folder: Path) -> int:
    """Ours until the process ends. In a folder that everybody may write to, one of ours is not taken from others."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise Permanent(f"{folder} is a link or belongs to another user: name a folder of your own with --folder")
        file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Permanent(f"{folder} cannot be used ({error}): name another folder with --folder") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(file, 20, 0).decode(errors="replace").strip() or "?"
        os.close(file)
        raise Permanent(
            f"{folder} is in use by the peer with process id {owner}: stop it, or give this one another --folder"
        ) from error
    os.ftruncate(file, 0)
    os.pwrite(file, str(os.getpid()).encode(), 0)
    return file


def _read(path: Path, content: TypeAdapter[_Content]) -> _Content | None:
    """None where there is nothing that this release can read."""
    try:
        return content.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _discard(folder: Path, *, with_parts: bool = True) -> None:
    """What is ours of it; the folder, where nothing else is in it."""
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
