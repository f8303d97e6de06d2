"""Determine the free space of a folder, and allocate pages before they are written.

Without this allocation, a write to a memory-mapped file on a full tmpfs would kill the process at the first unallocated
page.
"""

import ctypes
import errno
import logging
import os
import shutil
import threading
from pathlib import Path

import numpy as np

from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.weights.layout import PAGE_BYTES, Bytes, Ints

logger = logging.getLogger(__name__)

RETRY_S = 5.0
_GB = 1e9
MADV_POPULATE_WRITE = 23  # include/uapi/asm-generic/mman-common.h
MAPPED_AT_ONCE_BYTES = 64 * 1024 * 1024
MOST_EXTENTS = 65536  # more extents are allocated as one, including the gaps


def free_bytes(folder: Path) -> int:
    """Return the number of free bytes in the folder's file system. On a tmpfs, the number is at most the available
    memory."""
    free = shutil.disk_usage(folder).free
    if _file_system(folder) == "tmpfs":
        free = min(free, *_memory_left())
    return free


def allocated_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512 if path.exists() else 0


def pages(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return the starts and ends of the page ranges that cover these byte spans, sorted and merged."""
    order = np.argsort(starts, kind="stable")
    starts = starts[order] // PAGE_BYTES * PAGE_BYTES
    ends = np.maximum.accumulate(-(-ends[order] // PAGE_BYTES) * PAGE_BYTES)
    begins = np.concatenate([[True], starts[1:] > ends[:-1]]) if len(starts) else np.zeros(0, dtype=bool)
    return starts[begins], ends[np.concatenate([begins[1:], [True]])] if len(starts) else ends


def take(file: int, starts: Ints, ends: Ints, size: int) -> None:
    """Allocate the page ranges of an open file of `size` bytes. Existing content is kept. Raises OSError if there is
    not enough space."""
    if len(starts) > MOST_EXTENTS:
        starts, ends = starts[:1], ends[-1:]
    for first, last in zip(starts.tolist(), ends.tolist(), strict=True):
        os.posix_fallocate(file, first, min(last, size) - first)


def map_in(mapped: Bytes, starts: Ints, ends: Ints) -> None:
    """Add the pages of these byte ranges to the process's page tables, in another thread. Later writes then cause no
    page faults, which would take longer than the copy itself. On a kernel before 5.14 this has no effect, and each page
    is mapped at its first access."""

    def work() -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise would keep the interpreter's lock
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for first, last in zip(starts.tolist(), np.minimum(ends, len(mapped)).tolist(), strict=True):
            for at in range(first, last, MAPPED_AT_ONCE_BYTES):
                size = min(MAPPED_AT_ONCE_BYTES, last - at)
                if madvise(mapped.ctypes.data + at, size, MADV_POPULATE_WRITE) != 0:
                    logger.debug("mapping pages in advance failed: %s", os.strerror(ctypes.get_errno()))
                    return

    if len(starts) <= MOST_EXTENTS:
        threading.Thread(target=work, name="weights-pages", daemon=True).start()


def no_room(folder: Path, needed: int, version: int) -> Permanent | Retryable:
    """Return the error for a version that needs `needed` more bytes and does not fit into its folder. The error is
    Retryable if the version will fit after other versions are discarded, else Permanent. The folders of other versions
    are siblings of `folder`."""
    free = free_bytes(folder)
    held = sum(map(allocated_bytes, folder.parent.glob("v[0-9]*/*.safetensors"))) - sum(
        map(allocated_bytes, folder.glob("*.safetensors"))
    )
    words = (
        f"not enough space for version {version} in {folder}: {needed / _GB:.3f} GB more are needed,"
        f" {free / _GB:.3f} GB are free, other versions use {held / _GB:.3f} GB"
    )
    if needed <= free + held:
        return Retryable(f"{words}; it will fit after they are discarded", RETRY_S)
    return Permanent(f"{words}; increase the space (in containers, the size of /dev/shm), or set another --folder")


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


def _file_system(folder: Path) -> str:
    """Return the file system type of the folder's mount point, or an empty string if it is unknown."""
    best, found = "", ""
    real = os.path.realpath(folder)
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, mount, kind, *_ = line.split(" ")
        if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, found = mount, kind
    return found


def _memory_left() -> list[int]:
    """Return the available memory of the machine in bytes, followed by that of the container if the container has a
    memory limit. Values that cannot be determined are omitted. If neither is known, return one very large number."""
    left = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                left.append(int(line.split()[1]) * 1024)
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            left.append(max(0, int(limit) - int((group / "memory.current").read_text())))
    except (OSError, ValueError):
        pass  # not available on this system: only the folder's free space counts
    return left or [1 << 62]
