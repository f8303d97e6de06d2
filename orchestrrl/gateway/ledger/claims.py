"""Which process of this machine has a request of a given name in hand. The system frees a killed process's claims.

A claim is a lock on one byte of a file: taken and freed by a system call each, without a disk, and gone with the
process that holds it, however it ends. (Locks of open file descriptions, fcntl(2): another Claims of the same process
is kept out as well.)
"""

import errno
import fcntl
import os
import struct
import threading
from pathlib import Path

# The kernel walks a file's locks one by one: with so many files, ten thousand requests are short walks.
FILES = 64
_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_POSITION = (1 << 62) - 1


class RequestClaims:
    """Keys are whole numbers below 2**63. Any thread may call."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._files: list[int] = []
        try:
            for number in range(FILES):
                self._files.append(os.open(folder / f"{number:02d}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError:
            self.close()
            raise
        self._held: set[int] = set()
        self._guard = threading.Lock()

    def take(self, key: int) -> bool:
        """False: it is held, here or by another process. Raises OSError where the file system has no locks."""
        with self._guard:
            if key in self._held:
                return False
            try:
                self._lock(key, fcntl.F_WRLCK)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    return False
                raise
            self._held.add(key)
            return True

    def free(self, key: int) -> None:
        with self._guard:
            if key in self._held:
                self._held.remove(key)
                self._lock(key, fcntl.F_UNLCK)

    def close(self) -> None:
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []

    def _lock(self, key: int, kind: int) -> None:
        lock = _LOCK.pack(kind, os.SEEK_SET, key & _POSITION, 1, 0)
        fcntl.fcntl(self._files[key % FILES], fcntl.F_OFD_SETLK, lock)
